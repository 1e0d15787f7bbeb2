"""Memory that the C library keeps instead of returning it to the system."""

import ctypes
import os
from pathlib import Path

from bert_jax.config.architecture import ModelConfig
from bert_jax.process.accelerators import has_accelerator

# Parameters of mallopt(3) in glibc.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
# Largest number of parameters with which the steps were seen to become quicker.
_MOST_PARAMETERS = 50e6
# Bytes of free memory that the process leaves to others.
_SPARE = 4 * 2**30


def keep_freed_memory(model: ModelConfig) -> bool:
    """Let the process keep all memory that it frees, for its next allocations. Return whether it does.

    On a CPU, XLA allocates the temporary arrays of every step anew. The C library returns blocks of this size to
    the system, which fills their pages with zeros when they are touched again: a quarter of the processor time of a
    small model. Nothing is gained with models of the size of BERT-base, so these are left alone. Must be called
    before JAX starts its backends, whose threads otherwise keep their ways. Does nothing with an accelerator,
    without glibc, and if less than 4 GiB are free.
    """
    width = model.hidden_size
    parameters = model.num_layers * width * (4 * width + 2 * model.intermediate_size) + model.vocab_size * width
    is_cpu = os.environ.get("JAX_PLATFORMS") == "cpu" or not has_accelerator()
    c_library = ctypes.CDLL(None) if os.name == "posix" else None
    if not (is_cpu and hasattr(c_library, "mallopt") and parameters <= _MOST_PARAMETERS):
        return False
    if _free_memory() < _SPARE:
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1))
    return all([c_library.mallopt(name, value) == 1 for name, value in settings])


def _free_memory() -> int:
    """Return the bytes that the system can give to processes (proc(5), MemAvailable); 0 if it does not say."""
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
