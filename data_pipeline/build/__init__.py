"""Building shards from text: token store, instances, masks."""
