"""Conversion of text to shards, and of shards to batches.

This package imports bert_jax; in bert_jax, only functions of ``commands`` import this package.
"""
