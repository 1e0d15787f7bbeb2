"""Parameters as a format stores them: name, orientation, and the check that a file has those of a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_jax.config import ModelSpec
from bert_jax.interop.exchange import parameter_shapes

# Types of values that become float32.
FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class StoredName:
    """Name and orientation of a parameter in a format."""

    name: str
    # Whether it is the transpose of the canonical array.
    transpose: bool


def listed(names: Sequence[str], most: int = 20, width: int = 80) -> str:
    """Names for a message, each cut to ``width``: all, or the first ``most`` and how many more."""
    shown = ", ".join(name[:width] for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def check_stored(
    spec: ModelSpec,
    names: Mapping[str, StoredName],
    found: Mapping[str, tuple[tuple[int, ...], str]],
    left_over: Sequence[str],
    *,
    allow_left_over: bool,
    where: Path,
    what: str,
) -> list[str]:
    """Notes on what is dropped, once every parameter of ``spec`` is in ``found`` with its shape and a float dtype.

    ``names`` are the format's, by canonical name; ``left_over`` are those in ``found`` that are nobody's; ``what``
    is the format's word for them all (tensors, variables). Raises ``ValueError`` in one line with all that is
    missing, left over or otherwise.
    """
    shapes = parameter_shapes(spec)
    missing = [entry.name for entry in names.values() if entry.name not in found]
    problems = [f"missing {listed(missing)}"] if missing else []
    if left_over and not allow_left_over:
        problems.append(f"left over {listed(left_over)}")
    unfit = []
    for canonical, entry in names.items():
        expected = shapes[canonical][::-1] if entry.transpose else shapes[canonical]
        shape, dtype = found.get(entry.name, (expected, FLOATS[0]))
        if shape != expected:
            unfit.append(f"{entry.name[:80]} has the shape {shape}, expected {expected}")
        elif dtype not in FLOATS:
            unfit.append(f"{entry.name[:80]} is {dtype}, readable are {', '.join(FLOATS)}")
    problems += [listed(unfit, width=200)] if unfit else []
    if problems:
        hint = f"; left-over {what} alone can be dropped with --allow_mismatch" if left_over else ""
        raise ValueError(f"{where}: the {what} are not those of the model: {'; '.join(problems)}{hint}")
    return [f"left over and dropped: {listed(left_over)}"] if left_over else []
