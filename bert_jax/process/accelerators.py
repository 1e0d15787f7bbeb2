"""Detection of accelerators before JAX starts. This module imports only the standard library."""

import importlib.util
import os
import sys
from pathlib import Path

# Device files of TPU (accel, vfio), NVIDIA (dxg: Windows Subsystem for Linux) and AMD (kfd).
DEVICE_FILES = ("dev/accel*", "dev/vfio/[0-9]*", "dev/nvidia[0-9]*", "dev/nvidiactl", "dev/dxg", "dev/kfd")


def keep_to_cpu_without_accelerator() -> None:
    """Restrict JAX to the CPU on a machine that has libtpu (for planning) but no accelerator.

    Without this restriction, JAX would start libtpu, which would fail with a page of errors. Must be called before
    JAX starts its backends. Does nothing if JAX_PLATFORMS or ``jax_platforms`` is set, or if a device file or an
    environment variable indicates an accelerator.
    """
    jax = sys.modules.get("jax")
    is_chosen = "JAX_PLATFORMS" in os.environ or (jax and jax.config.jax_platforms)
    if not is_chosen and importlib.util.find_spec("libtpu") is not None and not may_have_accelerator():
        keep_to_cpu()


def may_have_accelerator() -> bool:
    """Return True if JAX may use an accelerator: the platforms that JAX_PLATFORMS lists, or else a device file or
    an environment variable, indicate one."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms != "cpu"
    is_forced = any(name in os.environ for name in ("JAX_FORCE_TPU_INIT", "TPU_WORKER_HOSTNAMES"))
    return is_forced or any(any(Path("/").glob(pattern)) for pattern in DEVICE_FILES)


def keep_to_cpu() -> None:
    """Restrict JAX to the CPU. Must be called before JAX starts its backends; afterwards it has no effect."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax = sys.modules.get("jax")
    if jax is not None:  # it reads the variable only when it is imported
        jax.config.update("jax_platforms", "cpu")
