"""Metrics, progress and the report of a run."""
