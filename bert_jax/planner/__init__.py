"""Estimates for runs: floating-point operations of a training step, limits of the hardware, plans."""
