"""Consumers of text vectors: search, clusters, anisotropy."""
