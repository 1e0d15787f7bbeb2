"""State, checkpoints, step, loop, metric writers and report."""
