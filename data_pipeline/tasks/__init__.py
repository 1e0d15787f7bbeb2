"""Readers of fine-tuning files, one per format. They import no jax, and TensorFlow only for prepared datasets."""

from data_pipeline.tasks.reading import read_file
from data_pipeline.tasks.record_splits import read_named, read_splits, split_names

__all__ = ["read_file", "read_named", "read_splits", "split_names"]
