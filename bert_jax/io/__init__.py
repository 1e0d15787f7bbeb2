"""Paths, whole-file writes, locks and the files of others."""
