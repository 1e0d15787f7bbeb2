"""Shards, and cleaning, under Apache Beam."""

EXTENSIONS = {"--runner beam": "data_pipeline.contrib.beam.pipeline"}
