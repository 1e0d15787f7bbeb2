"""Conversion of text to shards, and of shards to batches.

This package imports bert_jax; bert_jax never imports this package.
"""
