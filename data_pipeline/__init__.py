"""Text to pre-masked shards, and shards to batches. May import bert_jax, never the reverse."""
