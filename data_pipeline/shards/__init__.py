"""The shard format on disk and its index."""
