"""Conversion of text to shards, and of shards to batches. Imports bert_jax; bert_jax never imports this package."""
