"""Smaller models: vocabularies with the pieces that a text uses, and teachers."""
