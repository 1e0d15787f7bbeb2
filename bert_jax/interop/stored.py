"""The base class of readers whose format has other names of parameters: sizes, contradictions, checks, values.

The readers of Hugging Face folders and of TF1 checkpoints are subclasses of :class:`StoredModel`.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bert_jax.config import ModelConfig, ModelSpec
from bert_jax.interop.exchange import ReadOptions, parameter_shapes
from bert_jax.io.safetensors_file import aligned_empty

# Dtypes that are converted to float32.
FLOATS = ("float32", "float16", "bfloat16", "float64")
# Embedding table -> field of ModelConfig with its number of rows.
_TABLES = {"word": "vocab_size", "position": "max_position_embeddings", "token_type": "type_vocab_size"}


@dataclass(frozen=True)
class StoredName:
    """Name and orientation of a parameter in a format."""

    name: str
    # True if the stored array is the transpose of the canonical one.
    transpose: bool


@dataclass(frozen=True)
class Tensor:
    """A tensor whose values are read on request."""

    shape: tuple[int, ...]
    dtype: str
    # Values as stored; bfloat16 in the type of ml_dtypes. Raises ValueError or OSError for a damaged file.
    read: Callable[[], np.ndarray]


def aligned_copy(values: np.ndarray) -> np.ndarray:
    """Copy ``values`` into page-aligned memory of their own."""
    target = aligned_empty(values.shape, values.dtype)
    np.copyto(target, values)
    return target


def read_float32(tensor: Tensor, transpose: bool = False) -> np.ndarray:
    """Read ``tensor``, whose dtype is in :data:`FLOATS`, as float32 in contiguous, page-aligned memory of its own,
    transposed on request."""
    values = tensor.read()
    if values.dtype == np.float32 and not transpose and values.flags.c_contiguous:
        return values
    target = aligned_empty(tensor.shape[::-1] if transpose else tensor.shape)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, and is reported as such
        np.copyto(target, values.T if transpose else values, casting="unsafe")
    return target


def listed(names: Sequence[str], most: int = 20, width: int = 80) -> str:
    """Join names for a message, each cut to ``width``: all, or the first ``most`` and the number of the others."""
    shown = ", ".join(name[:width] for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def default_labels(count: int) -> tuple[str, ...]:
    """Return the names that transformers gives to classes without names."""
    return tuple(f"LABEL_{i}" for i in range(count))


@dataclass
class StoredModel:
    """The stored parameters of a model, with the notes and contradictions found while reading them."""

    # The format's word for parameters; the file with the configuration.
    what: ClassVar[str]
    config_file: ClassVar[str]

    path: Path
    options: ReadOptions
    tensors: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    # Texts of the contradictions between configuration and tensors.
    contradictions: list[str] = field(default_factory=list)

    def has(self, prefix: str) -> bool:
        """Return True if the name of a tensor begins with ``prefix``."""
        return any(name.startswith(prefix) for name in self.tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a matrix; None if it is absent or of another rank (:meth:`read` reports that)."""
        tensor = self.tensors.get(name)
        return tensor.shape if tensor is not None and len(tensor.shape) == 2 else None

    def contradict(self, name: str, stated: Any, actual: Any) -> None:
        """Record that the configuration states another value than the tensors have."""
        self.contradictions.append(f"{name} is {stated} in {self.config_file}, {actual} in the {self.what}")

    def sizes(
        self, model: ModelConfig, table: str, layer: re.Pattern[str], intermediate: tuple[str, int]
    ) -> ModelConfig:
        """Return ``model``, with ``options.allow_mismatch`` the sizes of the tensors in it; record contradictions.

        Args:
            table: name of an embedding table, {} in the place of its kind.
            layer: matches the names of a layer's tensors; its group is the number of the layer.
            intermediate: tensor and dimension of the feed-forward width.
        """
        actual: dict[str, int] = {}
        for kind, rows in _TABLES.items():
            if shape := self.shape(table.format(kind)):
                actual[rows] = shape[0]
                actual.setdefault("hidden_size", shape[1])
        layers = {int(match[1]) for name in self.tensors if (match := layer.match(name))}
        if not layers or max(layers) >= len(self.tensors):
            raise ValueError(f"{self.path}: {self.what} are not those of BERT layers: {listed([*self.tensors])}")
        actual["num_layers"] = 1 + max(layers)
        if shape := self.shape(intermediate[0]):
            actual["intermediate_size"] = shape[intermediate[1]]
        differing = {name: size for name, size in actual.items() if size != getattr(model, name)}
        for name, size in differing.items():
            self.contradict(name, getattr(model, name), size)
        if not self.options.allow_mismatch:
            return model
        try:
            return dataclasses.replace(model, **differing)
        except ValueError as error:
            raise ValueError(f"{self.path}: the sizes of the {self.what} are not allowed: {error}") from None

    def labels(self, names: tuple[str, ...] | None, count: int) -> tuple[str, ...]:
        """Return ``names`` of ``count`` classes, or default names with a note or a contradiction."""
        if names is None:
            self.notes.append(f"{self.config_file} names no labels: {count}, called LABEL_0 and so on")
        elif len(names) == count:
            return names
        else:
            self.contradict("number of labels", len(names), count)
        return default_labels(count)

    def settle(self) -> None:
        """Raise ``ValueError`` with every contradiction, or note that the tensors decide."""
        if self.contradictions and not self.options.allow_mismatch:
            texts = "; ".join(self.contradictions)
            raise ValueError(f"{self.path}: {texts}; with --allow_mismatch the {self.what} decide")
        self.notes += [f"{text}: the {self.what} decide" for text in self.contradictions]

    def read(
        self, spec: ModelSpec, names: Mapping[str, StoredName], ignored: Collection[str]
    ) -> dict[str, np.ndarray]:
        """Return every parameter of ``spec`` by its canonical name, float32; ``names`` are those in the format.

        A tensor that is neither in ``names`` nor ``ignored`` is left over: an error, or a note with
        ``options.allow_mismatch``. Raises ``ValueError`` with all that is missing, left over or misshapen.
        """
        expected = {entry.name for entry in names.values()}
        left_over = [name for name in self.tensors if name not in expected and name not in ignored]
        self._check(spec, names, left_over)
        if left_over:
            self.notes.append(f"left over and dropped: {listed(left_over)}")
        params = {name: read_float32(self.tensors[entry.name], entry.transpose) for name, entry in names.items()}
        dtypes = collections.Counter(self.tensors[entry.name].dtype for entry in names.values())
        for dtype, count in dtypes.items():
            if dtype != "float32":
                verb = "rounded" if dtype == "float64" else "raised"
                self.notes.append(f"{count} of {len(params)} {self.what} are {dtype}: {verb} to float32")
        self.notes += non_finite({entry.name: params[name] for name, entry in names.items()})
        return params

    def _check(self, spec: ModelSpec, names: Mapping[str, StoredName], left_over: Sequence[str]) -> None:
        shapes = parameter_shapes(spec)
        missing = [entry.name for entry in names.values() if entry.name not in self.tensors]
        problems = [f"missing {listed(missing)}"] if missing else []
        if left_over and not self.options.allow_mismatch:
            problems.append(f"left over {listed(left_over)}")
        unfit = []
        for canonical, entry in names.items():
            expected = shapes[canonical][::-1] if entry.transpose else shapes[canonical]
            tensor = self.tensors.get(entry.name)
            if tensor is not None and tensor.shape != expected:
                unfit.append(f"{entry.name[:80]} has the shape {tensor.shape}, expected {expected}")
            elif tensor is not None and tensor.dtype not in FLOATS:
                unfit.append(f"{entry.name[:80]} is {tensor.dtype}, readable are {', '.join(FLOATS)}")
        problems += [listed(unfit, width=200)] if unfit else []
        if problems:
            hint = f"; --allow_mismatch drops left-over {self.what}" if left_over else ""
            raise ValueError(f"{self.path}: {self.what} do not fit the model: {'; '.join(problems)}{hint}")


def non_finite(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Return a warning that names the arrays with NaN or infinite values; empty if all values are finite."""
    bad = [name for name, values in arrays.items() if not np.isfinite(values).all()]
    return [f"WARNING: NaN or infinite values in {listed(bad)}"] if bad else []
