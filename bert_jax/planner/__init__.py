"""Arithmetic about runs: floating-point operations of a training step and what the hardware can give."""
