"""Readers that turn shards into batches."""
