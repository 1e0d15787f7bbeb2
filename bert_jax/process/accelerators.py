"""Detection of an accelerator before jax starts; imports nothing heavy."""

import importlib.util
import os
from pathlib import Path

# Device files of TPU (accel, vfio), NVIDIA (also in Windows' Linux) and AMD.
DEVICE_FILES = ("dev/accel*", "dev/vfio/[0-9]*", "dev/nvidia[0-9]*", "dev/nvidiactl", "dev/dxg", "dev/kfd")


def keep_to_cpu_without_accelerator() -> None:
    """Let jax use the CPU alone on a machine that has libtpu (for planning) but no accelerator: jax would start
    libtpu, which fails with a page of errors. Call it before jax is imported. JAX_PLATFORMS is kept, and nothing
    changes where a device file or a variable indicates an accelerator."""
    is_chosen = any(name in os.environ for name in ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_WORKER_HOSTNAMES"))
    if is_chosen or importlib.util.find_spec("libtpu") is None:
        return
    if not any(any(Path("/").glob(pattern)) for pattern in DEVICE_FILES):
        os.environ["JAX_PLATFORMS"] = "cpu"
