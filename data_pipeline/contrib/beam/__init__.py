"""Building shards and cleaning text with Apache Beam."""

DATA_EXTENSIONS = {"--runner beam": "data_pipeline.contrib.beam.pipeline"}
