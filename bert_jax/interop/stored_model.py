"""The base class of readers for formats whose parameter names are not the canonical names.

:class:`StoredModel` compares the sizes of the tensors with the configuration, collects contradictions, checks the
tensors and reads their values. The readers of Hugging Face folders and of TF1 checkpoints are subclasses.
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
from bert_jax.interop.model_bundle import ReadOptions, parameter_shapes
from bert_jax.io.safetensors_file import aligned_empty
from bert_jax.json_values import Json

# Dtypes that are converted to float32.
FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class StoredName:
    """The name and orientation of a parameter in a stored format."""

    name: str
    # True if the stored array is the transpose of the canonical one.
    transpose: bool
    # The parameter is the part ``part`` of ``parts`` equal parts of each of ``groups`` equal groups of the output
    # features of the stored array.
    part: int = 0
    parts: int = 1
    groups: int = 1
    # Size of a head whose dimensions 2i and 2i + 1 are stored next to each other; they are i and i + D / 2 in the
    # canonical array. 0: the order is the same.
    interleaved: int = 0

    @property
    def is_whole(self) -> bool:
        """True if the stored array is the canonical one."""
        return not self.transpose and self.parts == 1 and not self.interleaved

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored array for a parameter with ``shape``."""
        whole = (*shape[:-1], shape[-1] * self.parts)
        return whole[::-1] if self.transpose else whole

    def take(self, stored: np.ndarray) -> np.ndarray:
        """Return the canonical parameter, a view or a copy, from the stored array."""
        whole = stored.T if self.transpose else stored
        if self.parts > 1:
            grouped = whole.reshape(*whole.shape[:-1], self.groups, self.parts, -1)
            whole = grouped[..., self.part, :].reshape(*whole.shape[:-1], -1)
        if self.interleaved:
            pairs = whole.reshape(*whole.shape[:-1], -1, self.interleaved // 2, 2)
            whole = pairs.swapaxes(-1, -2).reshape(whole.shape)
        return whole

    def give(self, values: np.ndarray) -> np.ndarray:
        """Return ``values``, a canonical parameter, with its output features in stored order and split into groups:
        [..., groups, features per group]."""
        if self.interleaved:
            halves = values.reshape(*values.shape[:-1], -1, 2, self.interleaved // 2)
            values = halves.swapaxes(-1, -2).reshape(values.shape)
        return values.reshape(*values.shape[:-1], self.groups, -1)


def stored_array(entries: Sequence[tuple[StoredName, np.ndarray]]) -> np.ndarray:
    """Return the array that is stored for the parameters of one stored name: all parts, in any order."""
    parts = [entry.give(values) for entry, values in sorted(entries, key=lambda pair: pair[0].part)]
    whole = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    whole = whole.reshape(*whole.shape[:-2], -1)
    return whole.T if entries[0][0].transpose else whole


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file; its values are read on demand."""

    shape: tuple[int, ...]
    dtype: str
    # Returns the values; bfloat16 values as ml_dtypes.bfloat16 or float32. Raises ValueError or OSError for a
    # damaged file.
    read: Callable[[], np.ndarray]


def aligned_copy(values: np.ndarray) -> np.ndarray:
    """Return a copy of ``values`` in new, page-aligned memory."""
    target = aligned_empty(values.shape, values.dtype)
    np.copyto(target, values)
    return target


def read_float32(tensor: Tensor, place: StoredName | None = None) -> np.ndarray:
    """Return the values of ``tensor``, or of the parameter at ``place`` in it, as a contiguous, page-aligned
    float32 array.

    The dtype of ``tensor`` must be in :data:`FLOATS`.
    """
    values = tensor.read()
    if place is not None and not place.is_whole:
        values = place.take(values)
    elif values.dtype == np.float32 and values.flags.c_contiguous:
        return values
    target = aligned_empty(values.shape)
    with np.errstate(over="ignore"):  # float64 values beyond the range of float32 become infinite and are reported
        np.copyto(target, values, casting="unsafe")
    return target


def listed(names: Sequence[str], most: int = 20, width: int = 80) -> str:
    """Join at most ``most`` names for a message, and append the number of omitted names.

    Each name is truncated to ``width`` characters.
    """
    shown = ", ".join(name[:width] for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def default_labels(count: int) -> tuple[str, ...]:
    """Return the default names of ``count`` classes in transformers: LABEL_0, LABEL_1 and so on."""
    return tuple(f"LABEL_{i}" for i in range(count))


@dataclass
class StoredModel:
    """The stored parameters of a model, with the notes and contradictions found while reading them."""

    # Word for the parameters in messages ("tensors", "variables"); name of the configuration file.
    what: ClassVar[str]
    config_file: ClassVar[str]

    path: Path
    options: ReadOptions
    tensors: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    # Texts of the contradictions between configuration and tensors.
    contradictions: list[str] = field(default_factory=list)

    def has(self, prefix: str) -> bool:
        """Return True if the name of any tensor begins with ``prefix``."""
        return any(name.startswith(prefix) for name in self.tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the matrix ``name``. Return None if no tensor has this name or if the tensor is not
        two-dimensional; :meth:`read` reports both problems."""
        tensor = self.tensors.get(name)
        return tensor.shape if tensor is not None and len(tensor.shape) == 2 else None

    def contradict(self, name: str, stated: Json, actual: Json) -> None:
        """Record a contradiction: ``name`` is ``stated`` in the configuration, but ``actual`` in the tensors."""
        self.contradictions.append(f"{name} is {stated} in {self.config_file}, but {actual} in the {self.what}")

    def sizes(
        self, model: ModelConfig, places: Mapping[str, tuple[str, int]], layer: re.Pattern[str] | None
    ) -> ModelConfig:
        """Record each size in ``model`` that contradicts the tensors, and return ``model``.

        If ``options.allow_mismatch`` is True, the returned config has the sizes of the tensors instead.

        Args:
            places: field -> (name of a tensor, dimension); the field is the size of the dimension.
            layer: pattern for the names of the tensors in a layer, whose group matches the index of the layer;
                None: the layers share their parameters.
        """
        actual: dict[str, int] = {}
        for field_name, (tensor, dimension) in places.items():
            if shape := self.shape(tensor):
                actual[field_name] = shape[dimension]
        if layer is not None:
            layers = {int(match[1]) for name in self.tensors if (match := layer.match(name))}
            if not layers or max(layers) >= len(self.tensors):
                problem = f"the {self.what} are not those of a BERT encoder"
                raise ValueError(f"{self.path}: {problem}: {listed([*self.tensors])}")
            actual["num_layers"] = 1 + max(layers)
        differing: dict[str, Any] = {name: size for name, size in actual.items() if size != getattr(model, name)}
        for name, size in differing.items():
            self.contradict(name, getattr(model, name), size)
        if not self.options.allow_mismatch:
            return model
        try:
            return dataclasses.replace(model, **differing)
        except ValueError as error:
            raise ValueError(f"{self.path}: the sizes of the {self.what} are not allowed: {error}") from None

    def labels(self, names: tuple[str, ...] | None, count: int) -> tuple[str, ...]:
        """Return ``names`` if it has ``count`` entries; otherwise return default names.

        Adds a note if ``names`` is None. Records a contradiction if ``names`` has another number of entries.
        """
        if names is None:
            self.notes.append(f"{self.config_file} has no labels: the {count} classes are named LABEL_0 and so on")
        elif len(names) == count:
            return names
        else:
            self.contradict("number of labels", len(names), count)
        return default_labels(count)

    def settle(self) -> None:
        """Raise a ``ValueError`` that lists every contradiction. If ``options.allow_mismatch`` is True, add notes
        instead."""
        if self.contradictions and not self.options.allow_mismatch:
            texts = "; ".join(self.contradictions)
            raise ValueError(f"{self.path}: {texts}; set --allow_mismatch to use the values of the {self.what}")
        self.notes += [f"{text}: the value of the {self.what} is used" for text in self.contradictions]

    def read(
        self, spec: ModelSpec, names: Mapping[str, StoredName], ignored: Collection[str]
    ) -> dict[str, np.ndarray]:
        """Return every parameter of ``spec`` as float32 by canonical name.

        ``names`` maps canonical names to stored names. A tensor that is neither in ``names`` nor in ``ignored`` is
        unexpected: an error, or a note if ``options.allow_mismatch`` is True. Raises a ``ValueError`` that lists
        every missing or unexpected tensor, and every tensor with the wrong shape or an unsupported dtype, or that
        names the first tensor with a value that is not finite.
        """
        expected = {entry.name for entry in names.values()}
        left_over = [name for name in self.tensors if name not in expected and name not in ignored]
        self._check(spec, names, left_over)
        if left_over:
            self.notes.append(f"unexpected and ignored: {listed(left_over)}")
        params = {name: read_float32(self.tensors[entry.name], entry) for name, entry in names.items()}
        dtypes = collections.Counter(self.tensors[entry.name].dtype for entry in names.values())
        for dtype, count in dtypes.items():
            if dtype != "float32":
                verb = "rounded" if dtype == "float64" else "converted"
                self.notes.append(f"{count} of {len(params)} {self.what} are {dtype}: {verb} to float32")
        require_finite({entry.name: params[name] for name, entry in names.items()}, self.path)
        return params

    def _check(self, spec: ModelSpec, names: Mapping[str, StoredName], left_over: Sequence[str]) -> None:
        shapes = parameter_shapes(spec)
        missing = [name for name in dict.fromkeys(e.name for e in names.values()) if name not in self.tensors]
        problems = [f"missing {listed(missing)}"] if missing else []
        if left_over and not self.options.allow_mismatch:
            problems.append(f"unexpected {listed(left_over)}")
        unfit = []
        for canonical, entry in names.items():
            expected = entry.stored_shape(shapes[canonical])
            tensor = self.tensors.get(entry.name)
            if tensor is not None and tensor.shape != expected:
                unfit.append(f"{entry.name[:80]} has the shape {tensor.shape}, expected {expected}")
            elif tensor is not None and tensor.dtype not in FLOATS:
                unfit.append(f"{entry.name[:80]} has the dtype {tensor.dtype}; supported: {', '.join(FLOATS)}")
        problems += [listed(unfit, width=200)] if unfit else []
        if problems:
            can_ignore = left_over and not self.options.allow_mismatch
            hint = f"; set --allow_mismatch to ignore unexpected {self.what}" if can_ignore else ""
            raise ValueError(f"{self.path}: the {self.what} do not match the model: {'; '.join(problems)}{hint}")


def require_finite(arrays: Mapping[str, np.ndarray], where: str | Path) -> None:
    """Raise ``ValueError``, which begins with ``where`` and names the first array, if an array of floating-point
    numbers has a NaN or infinite value."""
    for name, values in arrays.items():
        # The least and the greatest value are NaN if any value is; this needs no array of the size of the values.
        if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
            remedy = "use weights of a run that did not diverge, or copy the files again"
            raise ValueError(f"{where}: {name[:80]} has NaN or infinite values (as float32); {remedy}")
