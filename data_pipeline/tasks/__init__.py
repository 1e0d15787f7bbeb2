"""Readers of fine-tuning files, one per format. They never import jax; only ``tfds_records`` loads TensorFlow."""

from data_pipeline.tasks.reading import read_file
from data_pipeline.tasks.record_splits import read_named, read_splits, split_names
from data_pipeline.tasks.tables import as_json, with_label_names

__all__ = ["as_json", "read_file", "read_named", "read_splits", "split_names", "with_label_names"]
