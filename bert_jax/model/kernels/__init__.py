"""Pallas kernels for TPUs and GPUs, and what they share: choice of a kernel, partition over devices, dropout
bits."""
