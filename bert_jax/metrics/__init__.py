"""Metrics of fine-tuned models, each a ``Score`` that can be computed on any resample of the records."""

from bert_jax.metrics.score import Score, value
