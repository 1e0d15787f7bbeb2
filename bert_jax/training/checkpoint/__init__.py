"""Writing, verifying and restoring checkpoints."""
