"""Device memory: one-line out-of-memory errors with advice, and the memory that the state and the step need."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from bert_jax.config import RunConfig


class OutOfMemory(ValueError):
    """Raised if a device runs out of memory. The one-line message names the operation that failed, the number of
    bytes that it needs, and the options to change."""


@contextlib.contextmanager
def explain_memory(what: str, advice: str, needed: Callable[[], int | None] = lambda: None) -> Iterator[None]:
    """Raise :class:`OutOfMemory` if a device runs out of memory inside the block.

    Args:
        what: name of the work that the block does, for the message.
        advice: advice on the options to change, for the message.
        needed: function that returns the number of bytes per device that the work needs, or None if unknown.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise out_of_memory_error(error, what, advice, needed()) from None


def out_of_memory_error(error: Exception, what: str, advice: str, needed: int | None) -> Exception:
    """Return an :class:`OutOfMemory` if ``error`` reports that a device is out of memory, else ``error`` itself."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return error
    statistics = jax.local_devices()[0].memory_stats() or {}
    available = statistics.get("bytes_limit")
    # Compilers and allocators write "Used 17.89G of 15.48G hbm", "allocate 2.00GiB", "allocating 123 bytes".
    total = re.search(rf"Used {_AMOUNT} of {_AMOUNT}", text)
    asked = re.search(rf"(?:allocat\w*|reserve) {_AMOUNT}", text)
    if total:
        needed, available = _bytes(total[1], total[2]), _bytes(total[3], total[4])
    amounts = [f"{gib(needed)} per device" if needed else "more per device than is available"]
    if asked and not total:
        amounts.append(f"the allocation of the last {gib(_bytes(asked[1], asked[2]))} failed")
    amounts.append(f"available {gib(available)}" if available else "the available memory is unknown")
    return OutOfMemory(f"out of device memory: {what} needs {', '.join(amounts)}; {advice}")


_AMOUNT = r"([\d.]+\d|\d+) ?([KMGT]?)"


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * 1024 ** " KMGT".index(unit or " "))


def gib(amount: int) -> str:
    """Format a number of bytes as text: in GiB if it is at least 64 MiB, else in bytes."""
    return f"{amount / 2**30:,.1f} GiB" if amount >= 2**26 else f"{amount:,} bytes"


def step_bytes(compiled: jax.stages.Compiled) -> int | None:
    """Return the peak memory of a compiled program in bytes per device; None if the platform does not report it."""
    if (memory := compiled.memory_analysis()) is None:
        return None
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return peak - memory.alias_size_in_bytes


def device_bytes(tree: Any) -> int:
    """Return the bytes per device that a tree of arrays or of sharded ``jax.ShapeDtypeStruct`` objects occupies."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def step_advice(config: RunConfig) -> str:
    """Return advice on the options to change if the training step does not fit into device memory."""
    training, execution = config.training, config.execution
    remat = "" if execution.remat == "full" else f"set execution.remat (now {execution.remat}) to full, "
    dtype = "" if execution.dtype == "bfloat16" else "set execution.dtype bfloat16, "
    return (
        f"raise training.accumulation_steps (now {training.accumulation_steps}), lower training.global_batch_size "
        f"(now {training.global_batch_size}) or {config.SEQ_LENGTH_OPTION}, {remat}{dtype}or use more devices"
    )


def state_advice(config: RunConfig) -> str:
    """Return advice on the options to change if the training state does not fit into device memory."""
    average = ", set optimizer.ema_decay 0" if config.optimizer.ema_decay else ""
    return (
        f"shard the state over more devices with mesh.fsdp (now {config.mesh.fsdp}){average}, or train a smaller "
        "model (model.num_layers, model.hidden_size)"
    )
