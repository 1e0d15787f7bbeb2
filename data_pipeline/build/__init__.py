"""Text to shards: token store, instances, masks."""
