"""Files of fine-tuning tasks as records: plain Python, one reader a format. No jax, no TensorFlow but for tfds."""

from data_pipeline.tasks.reading import read_file
from data_pipeline.tasks.record_splits import read_named, read_splits, split_names

__all__ = ["read_file", "read_named", "read_splits", "split_names"]
