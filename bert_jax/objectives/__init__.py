"""Objectives, and losses and metrics as (sum, weight) pairs: summed over the global batch, then divided once."""
