"""Where a run starts: random parameters, another model, an earlier phase, or its own checkpoint."""
