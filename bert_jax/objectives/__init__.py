"""Objectives; losses and metrics are (sum, weight) pairs, added over the global batch and then divided once."""
