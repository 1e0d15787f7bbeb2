"""TF1 checkpoints of google-research/bert, in and out."""
