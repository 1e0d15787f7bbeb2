"""Conversion of text to shards, and of shards to batches.

This package imports bert_jax, of which only ``commands`` imports this package, in functions.
"""
