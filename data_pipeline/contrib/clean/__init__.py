"""Cleaning text before shards are built from it: duplicates, boilerplate, broken encoding, language, length."""

DATA_COMMANDS = {"clean": "data_pipeline.contrib.clean.command:COMMAND"}
