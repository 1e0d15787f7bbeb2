"""Is there an accelerator in this machine? Asked before jax starts; imports nothing heavy."""

import importlib.util
import os
from pathlib import Path

# Device files of TPU (accel, vfio), NVIDIA (also in Windows' Linux) and AMD.
DEVICE_FILES = ("dev/accel*", "dev/vfio/[0-9]*", "dev/nvidia[0-9]*", "dev/nvidiactl", "dev/dxg", "dev/kfd")


def keep_to_cpu_without_accelerator() -> None:
    """On a machine that has libtpu (for planning) but no accelerator, let jax use the CPU alone: it would start
    libtpu, which fails with a page of errors. To be called before jax is imported; JAX_PLATFORMS is kept, and
    nothing is changed where a device file or a variable speaks of an accelerator."""
    told = any(name in os.environ for name in ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_WORKER_HOSTNAMES"))
    if told or importlib.util.find_spec("libtpu") is None:
        return
    if not any(any(Path("/").glob(pattern)) for pattern in DEVICE_FILES):
        os.environ["JAX_PLATFORMS"] = "cpu"
