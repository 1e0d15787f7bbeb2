"""The common form of a model for all readers and writers: a spec, canonical float32 arrays, a tokenizer file."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bert_jax.config import ExecutionConfig, ModelSpec
from bert_jax.config.switches import Supported
from bert_jax.io.storage import Location
from bert_jax.json_values import Json

StoredDtype = Literal["float32", "float16", "bfloat16", "int8"]


# A path: absolute, of a drive, a store or a dataset, relative to a known folder, or parts without white space, or
# with a suffix.
_PATH = re.compile(
    r"(?s)[/~\\]|\.{1,2}[/\\]|[A-Za-z]:[/\\]|[a-z0-9+]+://|(hf|tfds):[/~.]|\S*[/\\]\S*\Z|"
    r".*\S[/\\].*\.\w{1,6}\Z"
)
_DATASETS = ("hf", "tfds")
_NO_PATHS = ("labels", "label_names", "tags", "columns", "classes")  # names of the user


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of the readers of model formats."""

    # For sources that do not state the case. True: the vocabulary is lower-cased; None: guess from the pieces.
    lower_case: bool | None = None
    # Class names of the task head, in id order; None: the source's.
    labels: tuple[str, ...] | None = None
    # If the config and the tensors contradict each other, use the tensors and add a note instead of raising.
    allow_mismatch: bool = False
    # True: read the moving average of the parameters. False: read the parameters. None: read the moving average if
    # the source is a pretraining run that has one; otherwise read the parameters.
    ema: bool | None = None
    # Network of a pretraining run that trains several; empty: the one to fine-tune.
    network: str = ""
    # Step of the checkpoint to read of a pretraining run; 0: its randomly initialized parameters; None: the newest
    # intact checkpoint.
    step: int | None = None
    # Feed-forward activation if the source is ambiguous ("gelu" of TF1 checkpoints); None: the reader's default.
    activation: Literal["gelu", "gelu_tanh"] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelBundle:
    """A model in the form that every reader returns and every writer accepts."""

    spec: ModelSpec
    # Canonical name -> float32 array; the names are exactly the keys of parameter_shapes(spec).
    params: Mapping[str, np.ndarray] = field(repr=False)
    # Content of the file that spec.tokenizer names; None if the source has no tokenizer.
    tokenizer_content: bytes | None = field(default=None, repr=False)
    # Notes of the reader, one line each: converted dtypes, dropped names, absent heads.
    notes: tuple[str, ...] = ()
    # Calibrated inputs of matrix products in 8 bits: name of the kernel or table -> (least value, greatest value).
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    # Writers of tokenizer.json write exact rules of WordPiece, which only the tokenizers library reads.
    exact_tokenizer: bool = False
    # Origin of the weights for the model card, JSON-serializable ("format", "name", "recipe", "metrics", ...).
    origin: Mapping[str, Any] = field(default_factory=dict)


def without_folders(value: Json) -> Any:
    """Return a JSON value whose paths, in strings at any depth, are shortened to their last part: published files
    must not reveal folders of this machine. Names of datasets (hf:, tfds:) are kept."""
    if isinstance(value, Mapping):
        return {key: one if key in _NO_PATHS else without_folders(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(one) for one in value]
    if not isinstance(value, str) or not _PATH.match(value):
        return value
    head, colon, rest = value.partition(":")
    if head in _DATASETS and colon:
        return f"{head}:{without_folders(rest)}" if rest[:1] in tuple("/~.") else value
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1]


def parameter_shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Return a dict from the canonical name of every parameter of a model to its shape, sorted by name.

    Kernels are [in, out]; see docs/design/parameters.md.
    """
    # Imported here because these modules import jax; commands create ReadOptions before they need jax.
    from bert_jax.model import BertModel
    from bert_jax.model.canonical import canonical_shapes

    # With scan_layers, JAX traces one layer instead of all of them.
    execution = ExecutionConfig(scan_layers=True, vocab_multiple=1)
    return canonical_shapes(BertModel(spec.model, execution, spec.heads, spec.sentence))


def check_sizes(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], where: str | Location) -> None:
    """Raise a ``ValueError``, which begins with ``where``, if a size in ``spec`` is too large for arrays of the
    ``shapes``, by name: more layers than arrays, or another size above the number of values.

    Called before :func:`parameter_shapes`, which lists the parameters of all layers.
    """
    model, count = spec.model, len(shapes)
    limits = dict.fromkeys(model.table_sizes, sum(math.prod(shape) for shape in shapes.values()))
    limits |= dict.fromkeys(model.layer_counts, count)
    for name, most in limits.items():
        if getattr(model, name) > most:
            arrays = f"the {count} stored arrays have {limits['vocab_size']:,} values"
            raise ValueError(f"{where}: model.{name} is {getattr(model, name)}, but {arrays}; restore the files")


def check_shapes(spec: ModelSpec, params: Mapping[str, np.ndarray], where: str | Location) -> None:
    """Raise a ``ValueError`` that lists all missing and unexpected parameters and all parameters of the wrong
    shape.

    ``params`` must have canonical names. The error message begins with ``where``.
    """
    check_sizes(spec, {name: tuple(array.shape) for name, array in params.items()}, where)
    expected = parameter_shapes(spec)
    problems = [f"missing {name}" for name in expected if name not in params]
    problems += [f"unexpected {name}" for name in params if name not in expected]
    problems += [
        f"{name} has shape {tuple(params[name].shape)}, expected {shape}"
        for name, shape in expected.items()
        if name in params and tuple(params[name].shape) != shape
    ]
    if problems:
        raise ValueError(f"{where}: the parameters do not match the model description: {'; '.join(problems)}")


@dataclass(frozen=True)
class Differences:
    """Differences between a model and what another library reads or computes from an export of the model."""

    # Name and version of the other library, such as "transformers 5.23.0".
    consumer: str
    # Output -> (largest absolute difference, largest allowed difference; infinity allows any finite difference).
    values: Mapping[str, tuple[float, float]]
    # Problems that the other library reports.
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Format:
    """A format of models outside the trunk (``bert_jax.registry``, kind formats), which this library also reads."""

    # Files in words, for messages.
    what: str
    # Returns True if a path holds a model in this format.
    knows: Callable[[Path], bool]
    read: Callable[[Path, ReadOptions], ModelBundle]
    # Writes into an existing empty folder and returns notes for the log: write(folder, weights, dtype=...).
    write: Callable[..., list[str]]
    # Field of ModelConfig -> values that the format can represent; or a function that returns a line for each
    # property of a model that it cannot represent.
    supported: Supported | Callable[[ModelSpec], list[str]]
    # Code that loads the files in DIR with another library, for the model card.
    snippet: str
    # Dtypes in which it can store weights.
    dtypes: tuple[StoredDtype, ...] = ("float32",)
    # Rows of the table of formats (export_table.py) that it can represent, besides an encoder of the family bert.
    holds: frozenset[str] = frozenset()
    # Returns a model with the values that files of a dtype hold; None: every value is rounded to the dtype.
    as_stored: Callable[[ModelBundle, str], ModelBundle] | None = None
    # Compares a folder with the model as stored, in another library, which a Python executable has (None: this
    # Python): check(folder, weights, dtype, python). Returns its differences, or why nothing was compared.
    check: Callable[[Path, ModelBundle, str, str | None], Differences | str] | None = None
