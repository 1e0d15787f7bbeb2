"""Reader and writer of TF1 checkpoints of google-research/bert."""
