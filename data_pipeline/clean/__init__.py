"""Cleaning text before shards are built from it: duplicates, boilerplate, broken encoding, language, length."""
