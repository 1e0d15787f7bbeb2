"""Pallas kernels for TPUs, and what they share: choice of the kernel, partition over devices, dropout bits."""
