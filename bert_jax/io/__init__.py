"""Paths, atomic writes, locks, and readers of untrusted files."""
