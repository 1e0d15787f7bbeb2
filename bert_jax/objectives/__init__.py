"""Losses and metrics as (sum, weight) pairs: summed over the global batch, divided once, last."""
