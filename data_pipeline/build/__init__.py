"""Building of shards from text: token store, instances, masks."""
