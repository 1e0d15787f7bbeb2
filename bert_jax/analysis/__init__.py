"""Analyses of text vectors: search, clustering, anisotropy."""
