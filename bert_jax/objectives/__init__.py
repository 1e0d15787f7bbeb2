"""Objectives, with losses and metrics as (sum, weight) pairs: added over the global batch, then divided once."""
