"""Paragraphs of articles from MediaWiki XML dumps."""

DATA_COMMANDS = {"wikipedia": "data_pipeline.contrib.wikipedia.command:COMMAND"}
