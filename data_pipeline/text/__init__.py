"""Corpora, documents, sentences and vocabularies."""
