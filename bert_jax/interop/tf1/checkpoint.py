"""TF1 checkpoints of google-research/bert: ``PREFIX.{index,data-*}`` with bert_config.json and vocab.txt.

This is the only module of the library that uses TensorFlow. Its functions import TensorFlow when they are called.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Literal, TypeVar

import numpy as np

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, spec_from_json, spec_to_json
from bert_jax.config.spec import Activation, Problem
from bert_jax.interop.hf.config_json import read_config
from bert_jax.interop.hf.read import with_tokenizer
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions, StoredDtype, check_shapes
from bert_jax.interop.npz import same_arrays
from bert_jax.interop.stored_model import FLOATS, StoredModel, Tensor, aligned_copy, listed
from bert_jax.interop.tf1.names import CONFIG_FILE, tf1_config, tf1_model, tf1_names
from bert_jax.interop.tokenizers.folder_files import read_tokenizer_files
from bert_jax.io.untrusted_folder import inside, needed, read_small

R = TypeVar("R")
PREFIX = "bert_model.ckpt"
# File for settings that have no key in bert_config.json; written by write_tf1, and read by read_tf1 if it exists.
DETAILS_FILE = "bert_jax.json"
EMA = "/ExponentialMovingAverage"
# Optimizer state and the step counter, which are not weights.
_SLOT = re.compile(
    r"(/(adam_[mv]|lamb_\w+|Adam(_1)?|AdamWeightDecayOptimizer(_1)?|LAMB(Optimizer)?(_1)?|Momentum)"
    r"|(^|/)(global_step|beta[12]_power))$"
)
_LAYER = re.compile(r"bert/encoder/layer_(\d{1,6})/")
# Field -> variable and dimension from which its value follows.
_SIZES = {
    "vocab_size": ("bert/embeddings/word_embeddings", 0),
    "hidden_size": ("bert/embeddings/word_embeddings", 1),
    "max_position_embeddings": ("bert/embeddings/position_embeddings", 0),
    "type_vocab_size": ("bert/embeddings/token_type_embeddings", 0),
    "intermediate_size": ("bert/encoder/layer_0/intermediate/dense/kernel", 1),
}


def _tensorflow() -> ModuleType:
    """Import TensorFlow without its log lines and without accelerators. Raises ``ValueError`` if it is not
    installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    try:
        import tensorflow as tf
    except ImportError:
        raise ValueError("TF1 checkpoints need TensorFlow: pip install 'bert_jax[data]'") from None
    # If TensorFlow is already initialized in this process, its devices cannot be changed.
    with contextlib.suppress(RuntimeError):
        for kind in ("GPU", "TPU"):
            tf.config.set_visible_devices([], kind)
    return tf


# ------------------------------------------------------------------ reading


def is_tf1(path: Path) -> bool:
    """Return True if ``path`` looks like a checkpoint prefix (or one of its files) or a folder that contains
    one."""
    if path.is_dir():
        return (path / CONFIG_FILE).exists() or any(path.glob("*.ckpt*.index"))
    return Path(f"{path}.index").exists() or ".ckpt" in path.name


def read_tf1(path: Path, options: ReadOptions) -> ModelBundle:
    """Read a checkpoint of google-research/bert. ``path`` is its prefix or a folder that contains no other
    checkpoint.

    The reader restores the encoder, the pooler, ``cls/*``, and the output layers of run_classifier.py and
    run_squad.py. Optimizer state is ignored. Moving averages are ignored too unless ``options.ema`` is True; then
    they replace the parameters. Raises ``ValueError`` with a one-line message for missing or damaged files, missing
    or unexpected variables, variables with the wrong shape, and (unless ``options.allow_mismatch`` is True) a
    contradiction between bert_config.json and the variables.
    """
    prefix = _prefix(path)
    folder = prefix.parent
    config, notes = tf1_model(read_config(needed(folder, CONFIG_FILE)), folder / CONFIG_FILE)
    reader = _CheckpointReader(prefix, options, notes=notes)
    reader.open()
    model = reader.sizes(config, _SIZES, _LAYER)
    reader.settle()
    details = _details(folder, model)
    activation = options.activation or (details.model.activation if details is not None else None)
    if activation:
        model = dataclasses.replace(model, activation=activation)
        reader.notes = [note for note in reader.notes if " specifies gelu: " not in note]
    spec = ModelSpec(model=model, heads=reader.heads(details), task=details.task if details is not None else None)
    params = reader.read(spec, tf1_names(spec), ())
    tokenizer, content, tokenizer_notes = read_tokenizer_files(folder, options)
    stated = details.tokenizer if details is not None else None
    if tokenizer is not None and stated is not None and options.lower_case is None:
        tokenizer, tokenizer_notes = dataclasses.replace(stated, file=tokenizer.file), ()
    origin = {"format": "TF1 checkpoint", "name": f"{folder.absolute().name}/{prefix.name}"}
    weights = ModelBundle(spec=spec, params=params, notes=(*reader.notes, *tokenizer_notes), origin=origin)
    return with_tokenizer(weights, folder, tokenizer, content)


def _prefix(path: Path) -> Path:
    """Return the checkpoint prefix for ``path``: a prefix, a file of a checkpoint, or a folder with one
    checkpoint."""
    if path.is_dir():
        found = sorted(path.glob("*.index"))
        if len(found) != 1:
            names = ", ".join(file.name for file in found[:5]) or "none"
            raise ValueError(f"{path}: expected one checkpoint (PREFIX.index), found {names}; give a prefix")
        return found[0].with_suffix("")
    return path.with_name(re.sub(r"\.(index|meta|data-\d{5}-of-\d{5})$", "", path.name))


def _details(folder: Path, model: ModelConfig) -> ModelSpec | None:
    """Return the spec that this library stores in its TF1 exports. Return None if ``folder`` does not contain it.

    Raises ``ValueError`` if the spec describes another model.
    """
    file = inside(folder, DETAILS_FILE)
    if file is None:
        return None
    details = spec_from_json(read_small(file, "a model description"), str(file))
    if dataclasses.replace(details.model, activation=model.activation) != model or details.family != "bert":
        problem = f"describes a different model than {CONFIG_FILE} and the checkpoint"
        raise ValueError(f"{file}: {problem}; delete this file")
    return details


def _open(prefix: Path) -> dict[str, Tensor]:
    """Return the variables of a checkpoint by name.

    Raises ``ValueError`` if a file is missing, damaged or smaller than the variables that the index declares.
    """
    folder, name = prefix.parent, prefix.name
    needed(folder, f"{name}.index")
    data = sorted(file.name for file in folder.glob(f"{name}.data-*") if file.name.startswith(f"{name}.data-"))
    if not data:
        raise ValueError(f"{prefix}.data-00000-of-00001: missing; copy the checkpoint again")
    size = sum(needed(folder, file).stat().st_size for file in data)
    tf = _tensorflow()

    def guarded(work: Callable[[str], R], name: str) -> R:
        try:
            return work(name)
        # TensorFlow raises errors of several types for damaged files.
        except (tf.errors.OpError, RuntimeError, ValueError, LookupError, TypeError) as error:
            text = " ".join(str(getattr(error, "message", error)).split())
            raise ValueError(f"{prefix}: damaged or not a TF1 checkpoint ({text[:200]})") from None

    reader = guarded(tf.train.load_checkpoint, str(prefix))

    def read(key: str) -> np.ndarray:
        # Copy into memory that JAX can use without another copy; the memory of TensorFlow is freed with its array.
        return aligned_copy(guarded(reader.get_tensor, key))

    shapes, tensors = reader.get_variable_to_shape_map(), {}
    for key, stored in reader.get_variable_to_dtype_map().items():
        shape, dtype = tuple(shapes[key]), stored.name
        if dtype in FLOATS and math.prod(shape) * np.dtype(dtype.replace("b", "")).itemsize > size:
            problem = f"the shape {shape} of {key[:80]!r} is larger than the files"
            raise ValueError(f"{prefix}: {problem}; copy the checkpoint again")
        tensors[key] = Tensor(shape, dtype, functools.partial(read, key))
    return tensors


@dataclass
class _CheckpointReader(StoredModel):
    """Reader of the variables of one checkpoint."""

    what: ClassVar[str] = "variables"
    config_file: ClassVar[str] = CONFIG_FILE

    def open(self) -> None:
        """Collect all variables except optimizer state, or only the moving averages if ``options.ema`` is True."""
        stored = _open(self.path)
        averages = {name.removesuffix(EMA): tensor for name, tensor in stored.items() if name.endswith(EMA)}
        slots = [name for name in stored if _SLOT.search(name)]
        skipped = {*slots, *(f"{name}{EMA}" for name in averages)}
        self.tensors = {name: tensor for name, tensor in stored.items() if name not in skipped}
        if slots:
            self.notes.append(f"{len(slots)} optimizer slots and counters are ignored")
        if self.options.ema:
            if not averages:
                raise ValueError(f"{self.path}: contains no moving averages (no {EMA[1:]} variables); omit --ema")
            without = [name for name in self.tensors if name not in averages]
            if without and not self.options.allow_mismatch:
                remedy = "omit --ema, or set --allow_mismatch to ignore these variables"
                raise ValueError(f"{self.path}: no moving average of {listed(without)}; {remedy}")
            if without:
                self.notes.append(f"ignored, because they have no moving average: {listed(without)}")
            self.tensors = averages
        elif averages:
            self.notes.append(f"{len(averages)} moving averages are ignored; --ema true reads the averages")

    def heads(self, details: ModelSpec | None) -> HeadsConfig:
        """Return the heads whose variables are present. ``details`` contains the names of the classes, if they are
        known."""
        outputs = {"nsp": "cls/seq_relationship/", "sequence": "", "span": "cls/squad/"}
        present = {head: self.shape(f"{name}output_weights") for head, name in outputs.items()}
        pooler, mlm = self.has("bert/pooler/"), self.has("cls/predictions/")
        if not pooler:
            self.notes.append("no pooler: the model has no pooled output")
        if not mlm and not any(present.values()):
            self.notes.append("no output layers (cls/*): only the encoder is read")
        labels: tuple[str, ...] = ()
        if (shape := present["sequence"]) is not None:
            known = details.heads.sequence_labels if details is not None else ()
            labels = self.labels(known if len(known) == shape[0] else None, shape[0])
        problem: Problem = "regression" if len(labels) == 1 else "single_label"
        activation: Literal["", Activation] = ""
        if details is not None and len(details.heads.sequence_labels) == len(labels):
            problem, activation = details.heads.problem, details.heads.activation
        try:
            return HeadsConfig(
                pooler=pooler, mlm=mlm, nsp=present["nsp"] is not None, sequence_labels=labels, problem=problem,
                activation=activation, span=present["span"] is not None,
                dropout=details.heads.dropout if details is not None else None,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None


# ------------------------------------------------------------------ writing


def write_tf1(folder: Path, weights: ModelBundle, *, dtype: StoredDtype = "float32") -> list[str]:
    """Write ``bert_model.ckpt.*``, ``bert_config.json`` (eleven keys), the vocabulary and ``bert_jax.json``.

    ``folder`` must exist and be empty; ``export_table.fit`` must accept ``weights`` and ``dtype``. Returns notes.
    """
    spec = weights.spec
    config = tf1_config(spec.model)
    check_shapes(spec, weights.params, folder)
    notes = _write_notes(spec)
    names = tf1_names(spec)
    tf = _tensorflow()
    tensors = [
        tf.constant(np.ascontiguousarray(weights.params[name].T if entry.transpose else weights.params[name]))
        for name, entry in names.items()
    ]
    tf.raw_ops.SaveV2(
        prefix=str(folder / PREFIX), tensor_names=[entry.name for entry in names.values()],
        shape_and_slices=[""] * len(tensors), tensors=tensors,
    )  # fmt: skip
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / DETAILS_FILE).write_text(spec_to_json(spec), encoding="utf-8")
    if spec.tokenizer is not None and weights.tokenizer_content is not None:
        (folder / spec.tokenizer.file).write_bytes(weights.tokenizer_content)
    return notes


def _write_notes(spec: ModelSpec) -> list[str]:
    notes = []
    if spec.model.activation == "gelu":
        notes.append(
            "the activation is gelu (erf); google-research/bert's published code computes the tanh approximation "
            "for this name; the two functions differ by at most 5e-4"
        )
    if not spec.heads.pooler:
        notes.append("no pooler: google-research/bert creates one that is not initialized from this checkpoint")
    if spec.heads.sequence_labels:
        labels = ", ".join(spec.heads.sequence_labels)
        notes.append(f"TF1 checkpoints contain no labels; the labels in id order are: {labels}")
    if spec.tokenizer is None:
        notes.append("the model has no vocabulary: vocab.txt is not written")
    elif spec.tokenizer.file != "vocab.txt":
        notes.append(f"google-research/bert's tokenizer does not read {spec.tokenizer.file}")
    else:
        notes.append(f"google-research/bert's programs need --do_lower_case={spec.tokenizer.lower_case}")
    return notes


def check_tf1(folder: Path, weights: ModelBundle) -> dict[str, float]:
    """Read the variables with ``tf.train.load_checkpoint``; return {"arrays": 0.0} if they equal ``weights``,
    else {"arrays": inf}."""
    reader = _tensorflow().train.load_checkpoint(str(folder / PREFIX))
    stored = {entry.name: (name, entry.transpose) for name, entry in tf1_names(weights.spec).items()}

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for variable in reader.get_variable_to_shape_map():
            name, transpose = stored.get(variable, (variable, False))
            values = reader.get_tensor(variable)
            yield name, values.T if transpose else values

    return same_arrays(arrays(), weights)
