"""Shards, and cleaning, under Apache Beam."""

DATA_EXTENSIONS = {"--runner beam": "data_pipeline.contrib.beam.pipeline"}
