"""Check that the machine has the memory that a run needs, and control how much freed memory the C library keeps."""

import ctypes
import os
from pathlib import Path

from bert_jax.config import ModelConfig, RunConfig
from bert_jax.process.accelerators import may_have_accelerator

# Parameters of mallopt(3) in glibc.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
# Models with 23 million parameters gain from it; models with 110 million do not.
_MOST_PARAMETERS = 50e6
# Bytes that must be free at the start, in addition to twice the temporary arrays of a step.
_SPARE = 4 * 2**30
# Limits and use of the memory of a container (cgroup versions 2 and 1).
_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def keep_freed_memory(model: ModelConfig, tokens: int, length: int) -> bool:
    """Let the process keep all memory that it frees, for its next allocations. Return True if it does.

    On a CPU, XLA allocates the temporary arrays of every step anew. The C library returns blocks of this size to
    the system, which fills their pages with zeros when they are touched again: a quarter of the processor time of a
    small model. Nothing is gained with models of the size of BERT-base, so these are left alone.

    Does nothing with an accelerator, without glibc, and if too little memory is free for steps of ``tokens`` tokens
    in rows of ``length``. Must be called before JAX starts its backends: threads that have allocated memory keep
    separate arenas. A later call, as in a sweep, changes nothing; a call is never undone.
    """
    parameters, width = _parameters(model), model.hidden_size
    # Korthikanti et al. 2022, section 4.1, in float32.
    temporary = tokens * (68 * model.num_layers * width + 10 * sum(model.heads_by_layer) * length)
    is_cpu = not may_have_accelerator()
    c_library = ctypes.CDLL(None) if os.name == "posix" else None
    if c_library is None or not (is_cpu and hasattr(c_library, "mallopt") and parameters <= _MOST_PARAMETERS):
        return False
    if _free_memory() < _SPARE + 2 * temporary:
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1))
    return all([c_library.mallopt(name, value) == 1 for name, value in settings])


def require_memory(config: RunConfig, length: int, processes: int) -> None:
    """Raise ``ValueError`` if this machine has less memory than a batch of rows of ``length`` tokens takes (four
    features of four bytes) or, on a CPU, the parameters, their gradients and two moments."""
    training, free = config.training, _free_memory()
    options = {
        "training.global_batch_size": training.global_batch_size,
        "training.eval_batch_size": training.eval_batch_size,
        "training.batch_ramp": max(training.batch_ramp[1::2], default=0),
    }
    needs = {f"{option}: batches of {size:,}": size * length * 16 for option, size in options.items()}
    if not may_have_accelerator():
        parameters = _parameters(config.model)
        needs[f"model: about {parameters:,} parameters, of model.hidden_size, num_layers and vocab_size,"] = (
            parameters * 16
        )
    for what, needed in needs.items():
        if free and needed // processes > free:
            sizes = (
                f"at least {needed / processes / 2**30:,.0f} GiB of memory, but {free / 2**30:,.0f} GiB are free"
            )
            raise ValueError(f"{what} need {sizes}; use a smaller value")


def _parameters(model: ModelConfig) -> int:
    """Return the approximate number of parameters of a Transformer with these sizes."""
    width = model.hidden_size
    layers = width * (model.num_layers * 4 * width + 2 * sum(model.units_by_layer))
    layers //= model.num_layers if model.shared_layers else 1
    return layers + model.vocab_size * model.embedding_width


def _free_memory() -> int:
    """Return the bytes that the system (proc(5), MemAvailable) and the container can give to processes; 0 if the
    system does not state them."""
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.exists() else []
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    for limit, used in ((Path(limit), Path(used)) for limit, used in _LIMITS):
        if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
            free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free
