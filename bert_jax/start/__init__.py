"""The start of a run: random parameters, another model, an earlier phase, or its own checkpoint."""
