"""Google's TF1 checkpoints (google-research/bert): ``PREFIX.{index,data-*}`` beside bert_config.json and vocab.txt.

The only module of the library that uses TensorFlow, inside its functions.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, spec_from_json, spec_to_json
from bert_jax.interop.exchange import ModelBundle, ReadOptions, StoredDtype, check_shapes
from bert_jax.interop.hf.config_json import default_labels, read_config
from bert_jax.interop.hf.read import check_vocabulary
from bert_jax.interop.npz import largest_difference
from bert_jax.interop.stored import FLOATS, check_stored, listed
from bert_jax.interop.tf1.names import CONFIG_FILE, HEADS, tf1_config, tf1_model, tf1_names
from bert_jax.interop.tokenizers.folder_files import read_tokenizer_files
from bert_jax.io.safetensors_file import aligned_empty
from bert_jax.io.untrusted_folder import inside, needed, read_small

PREFIX = "bert_model.ckpt"
# Settings without a key in bert_config.json: written by write_tf1 and read back if present.
DETAILS_FILE = "bert_jax.json"
EMA = "/ExponentialMovingAverage"
# State of optimizers and the step counter: no weights.
_SLOT = re.compile(
    r"(/(adam_[mv]|lamb_\w+|Adam(_1)?|AdamWeightDecayOptimizer(_1)?|LAMB(Optimizer)?(_1)?|Momentum)"
    r"|(^|/)(global_step|beta[12]_power))$"
)
_LAYER = re.compile(r"bert/encoder/layer_(\d{1,6})/")


def _tensorflow() -> Any:
    """TensorFlow, quiet and hidden from accelerators. Raises ``ValueError`` where it is not installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    try:
        import tensorflow as tf
    except ImportError:
        raise ValueError(
            "TF1 checkpoints need TensorFlow, which is not installed: pip install 'bert_jax[data]'"
        ) from None
    # Whoever started TensorFlow before us in this process keeps his devices.
    with contextlib.suppress(RuntimeError):
        for kind in ("GPU", "TPU"):
            tf.config.set_visible_devices([], kind)
    return tf


# ------------------------------------------------------------------ reading


def is_tf1(path: Path) -> bool:
    """Return True if ``path`` looks like a checkpoint prefix (or one of its files) or a folder that holds one."""
    if path.is_dir():
        return (path / CONFIG_FILE).exists() or any(path.glob("*.ckpt*.index"))
    return Path(f"{path}.index").exists() or ".ckpt" in path.name


def read_tf1(path: Path, options: ReadOptions) -> ModelBundle:
    """A checkpoint of google-research/bert, by its prefix or the one folder that holds it.

    Encoder, pooler, ``cls/*``, and the output layers of run_classifier.py and run_squad.py where they are there;
    slots of optimizers and moving averages are left out (``options.ema``: the averages are taken instead).
    Raises ``ValueError`` in one line: files missing or damaged, variables missing, left over or of another shape,
    and (unless ``options.allow_mismatch``) a contradiction between bert_config.json and variables.
    """
    prefix = _prefix(path)
    folder = prefix.parent
    config, notes = tf1_model(read_config(needed(folder, CONFIG_FILE)), folder / CONFIG_FILE)
    reader = _CheckpointReader(prefix, options, _Bundle.open(prefix), notes)
    model = reader.sizes(config)
    details = _details(folder, model)
    if options.activation is not None:
        model = dataclasses.replace(model, activation=options.activation)
    elif details is not None:
        model = dataclasses.replace(model, activation=details.model.activation)
    if options.activation is not None or details is not None:
        reader.notes = [note for note in reader.notes if " says gelu: " not in note]
    spec = ModelSpec(model=model, heads=reader.heads(details))
    params = reader.read(spec)
    tokenizer, content, tokenizer_notes = read_tokenizer_files(folder, options)
    if tokenizer is not None and content is not None:
        if details is not None and details.tokenizer is not None and options.lower_case is None:
            tokenizer, tokenizer_notes = dataclasses.replace(details.tokenizer, file=tokenizer.file), ()
        reader.notes += check_vocabulary(folder, tokenizer, content, model.vocab_size)
        spec = dataclasses.replace(spec, tokenizer=tokenizer)
    return ModelBundle(
        spec=spec,
        params=params,
        tokenizer_content=content,
        notes=(*reader.notes, *tokenizer_notes),
        origin={"format": "TF1 checkpoint", "name": f"{folder.absolute().name}/{prefix.name}"},
    )


def _prefix(path: Path) -> Path:
    """The checkpoint prefix that ``path`` means."""
    if path.is_dir():
        found = sorted(path.glob("*.index"))
        if len(found) != 1:
            names = ", ".join(file.name for file in found[:5]) or "none"
            raise ValueError(
                f"{path}: expected one checkpoint (PREFIX.index) there, found {names}; give its prefix"
            )
        return found[0].with_suffix("")
    return path.with_name(re.sub(r"\.(index|meta|data-\d{5}-of-\d{5})$", "", path.name))


def _details(folder: Path, model: ModelConfig) -> ModelSpec | None:
    """Description beyond bert_config.json in an export of this library, if it is of the same model."""
    file = inside(folder, DETAILS_FILE)
    if file is None:
        return None
    details = spec_from_json(read_small(file, "a model description"), str(file))
    if dataclasses.replace(details.model, activation=model.activation) != model or details.family != "bert":
        raise ValueError(f"{file}: describes another model than {CONFIG_FILE} and the checkpoint; remove it")
    return details


@dataclass(frozen=True)
class _Bundle:
    """An open checkpoint: shape and dtype of every variable, and its values on request."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    read: Callable[[str], np.ndarray]

    @classmethod
    def open(cls, prefix: Path) -> "_Bundle":
        """Raises ``ValueError`` when a file is missing, damaged or smaller than what the index declares."""
        folder, name = prefix.parent, prefix.name
        needed(folder, f"{name}.index")
        data = sorted(file.name for file in folder.glob(f"{name}.data-*") if file.name.startswith(f"{name}.data-"))
        if not data:
            raise ValueError(f"{prefix}.data-00000-of-00001: not there; get the checkpoint again")
        size = sum(needed(folder, file).stat().st_size for file in data)
        tf = _tensorflow()

        def guarded(work: Callable[[], Any]) -> Any:
            try:
                return work()
            # TensorFlow translates what its reader says into several types.
            except (tf.errors.OpError, RuntimeError, ValueError, LookupError, TypeError) as error:
                text = " ".join(str(getattr(error, "message", error)).split())
                raise ValueError(f"{prefix}: damaged or no TF1 checkpoint ({text[:200]})") from None

        reader = guarded(lambda: tf.train.load_checkpoint(str(prefix)))
        dtypes = {key: dtype.name for key, dtype in reader.get_variable_to_dtype_map().items()}
        shapes = {key: tuple(shape) for key, shape in reader.get_variable_to_shape_map().items()}
        for key, shape in shapes.items():
            if dtypes[key] in FLOATS and math.prod(shape) * np.dtype(dtypes[key].replace("b", "")).itemsize > size:
                raise ValueError(f"{prefix}: {key[:80]!r} is declared with shape {shape}, larger than its files")
        return cls(shapes, dtypes, lambda key: guarded(lambda: reader.get_tensor(key)))


@dataclass
class _CheckpointReader:
    """The variables of one checkpoint on their way to canonical parameters."""

    prefix: Path
    options: ReadOptions
    bundle: _Bundle
    notes: list[str] = field(default_factory=list)
    # Names of the weights, without slots.
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        averaged = [name for name in self.bundle.shapes if name.endswith(EMA)]
        slots = [name for name in self.bundle.shapes if _SLOT.search(name)]
        skipped = {*averaged, *slots}
        self.names = [name for name in self.bundle.shapes if name not in skipped]
        if slots:
            self.notes.append(f"{len(slots)} optimizer slots and counters are left out")
        if averaged and not self.options.ema:
            self.notes.append(f"{len(averaged)} moving averages are left out; --ema true takes them instead")
        if self.options.ema and not averaged:
            raise ValueError(f"{self.prefix}: no moving average there (variables {EMA[1:]})")

    def shape(self, name: str, rank: int = 2) -> tuple[int, ...] | None:
        shape = self.bundle.shapes.get(name)
        return shape if shape is not None and len(shape) == rank else None

    def sizes(self, config: ModelConfig) -> ModelConfig:
        """The model of bert_config.json; with ``allow_mismatch`` the variables' sizes take precedence."""
        real: dict[str, int] = {}
        for table, rows in (
            ("word", "vocab_size"), ("position", "max_position_embeddings"), ("token_type", "type_vocab_size")
        ):  # fmt: skip
            shape = self.shape(f"bert/embeddings/{table}_embeddings")
            if shape is not None:
                real[rows] = shape[0]
                real.setdefault("hidden_size", shape[1])
        layers = {int(match[1]) for name in self.names if (match := _LAYER.match(name))}
        if not layers or max(layers) >= len(self.names):
            raise ValueError(f"{self.prefix}: the variables are not those of BERT layers: {listed(self.names)}")
        real["num_layers"] = 1 + max(layers)
        shape = self.shape("bert/encoder/layer_0/intermediate/dense/kernel")
        if shape is not None:
            real["intermediate_size"] = shape[1]
        differing = {name: size for name, size in real.items() if size != getattr(config, name)}
        texts = [
            f"{name} is {getattr(config, name)} in {CONFIG_FILE}, {n} in the variables"
            for name, n in differing.items()
        ]
        if texts and not self.options.allow_mismatch:
            raise ValueError(f"{self.prefix}: {'; '.join(texts)}; with --allow_mismatch the variables decide")
        self.notes += [f"{text}: the variables decide" for text in texts]
        try:
            return dataclasses.replace(config, **differing)
        except ValueError as error:
            raise ValueError(f"{self.prefix}: the variables cannot decide: {error}") from None

    def heads(self, details: ModelSpec | None) -> HeadsConfig:
        """The heads whose variables are present."""
        outputs = {"nsp": "cls/seq_relationship/", "sequence": "", "span": "cls/squad/"}
        there = {head: self.shape(f"{name}output_weights") for head, name in outputs.items()}
        pooler = any(name.startswith("bert/pooler/") for name in self.names)
        mlm = any(name.startswith("cls/predictions/") for name in self.names)
        if not pooler:
            self.notes.append("no pooler there: pooled output is left out")
        if not mlm and not any(there.values()):
            self.notes.append("no output layers there (cls/*): the encoder alone")
        labels: tuple[str, ...] = ()
        problem = "single_label"
        dropout = None
        if there["sequence"] is not None:
            labels = self._labels(there["sequence"][0], details)
            problem = "regression" if len(labels) == 1 else "single_label"
        if details is not None:
            dropout = details.heads.dropout
            if len(details.heads.sequence_labels) == len(labels):
                problem = details.heads.problem
        try:
            return HeadsConfig(
                pooler=pooler, mlm=mlm, nsp=there["nsp"] is not None, sequence_labels=labels, problem=problem,
                span=there["span"] is not None, dropout=dropout,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"{self.prefix}: {error}") from None

    def _labels(self, count: int, details: ModelSpec | None) -> tuple[str, ...]:
        if details is not None and len(details.heads.sequence_labels) == count:
            return details.heads.sequence_labels
        self.notes.append(f"the checkpoint names no labels: {count}, called LABEL_0 and so on; --labels names them")
        return default_labels(count)

    def read(self, spec: ModelSpec) -> dict[str, np.ndarray]:
        """Read every canonical parameter of ``spec``; a left-over variable is an error."""
        suffix = EMA if self.options.ema else ""
        names = {
            canonical: dataclasses.replace(entry, name=f"{entry.name}{suffix}")
            for canonical, entry in tf1_names(spec).items()
        }
        expected = {entry.name.removesuffix(suffix) for entry in names.values()}
        left_over = [name for name in self.names if name not in expected]
        self.notes += check_stored(
            spec,
            names,
            {name: (shape, self.bundle.dtypes[name]) for name, shape in self.bundle.shapes.items()},
            left_over,
            allow_left_over=self.options.allow_mismatch,
            where=self.prefix,
            what="variables",
        )
        params: dict[str, np.ndarray] = {}
        bad, raised = [], []
        for canonical, entry in names.items():
            values = self.bundle.read(entry.name)
            raised += [] if values.dtype == np.float32 else [entry.name]
            # Memory of its own that jax uses without a copy; TensorFlow's goes with the next turn.
            params[canonical] = aligned_empty(values.shape[::-1] if entry.transpose else values.shape)
            with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, and is reported as that
                np.copyto(params[canonical], values.T if entry.transpose else values, casting="unsafe")
            bad += [] if np.isfinite(params[canonical]).all() else [entry.name]
        if raised:
            self.notes.append(f"not stored as float32, converted: {listed(raised)}")
        if bad:
            self.notes.append(f"WARNING: NaN or infinite values in {listed(bad)}")
        return params


# ------------------------------------------------------------------ writing


def write_tf1(folder: Path, weights: ModelBundle, *, dtype: StoredDtype = "float32") -> list[str]:
    """``bert_model.ckpt.*``, ``bert_config.json`` (eleven keys), the vocabulary, and ``bert_jax.json``.

    ``folder`` exists and is empty. Returns notes. Raises ``ValueError`` for what google-research/bert cannot
    compute, for heads that it has no variables for, and for bfloat16.
    """
    spec = weights.spec
    if dtype != "float32":
        raise ValueError("tf1: google-research/bert's variables are float32; export with dtype float32")
    if spec.family != "bert":
        raise ValueError(f"tf1: google-research/bert has no {spec.family}")
    foreign = [name for name in spec.heads.present() if name not in HEADS]
    if foreign or spec.sentence is not None:
        raise ValueError(f"tf1: google-research/bert has no variables for {', '.join([*foreign, 'sentence'])}")
    config = tf1_config(spec.model)
    check_shapes(spec, weights.params, folder)
    notes = _write_notes(spec)
    names = tf1_names(spec)
    values = [weights.params[name].T if entry.transpose else weights.params[name] for name, entry in names.items()]
    _save(folder / PREFIX, [entry.name for entry in names.values()], values)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / DETAILS_FILE).write_text(spec_to_json(spec), encoding="utf-8")
    if spec.tokenizer is not None and weights.tokenizer_content is not None:
        (folder / spec.tokenizer.file).write_bytes(weights.tokenizer_content)
    return notes


def _write_notes(spec: ModelSpec) -> list[str]:
    notes = []
    if spec.model.activation == "gelu":
        notes.append(
            "the activation is gelu (erf); google-research/bert's published code computes its tanh approximation "
            "under the same name, which differs by at most 5e-4"
        )
    if not spec.heads.pooler:
        notes.append("no pooler: google-research/bert creates one that is not initialized from this checkpoint")
    if spec.heads.sequence_labels:
        notes.append(
            f"labels have no place in a TF1 checkpoint; in id order: {', '.join(spec.heads.sequence_labels)}"
        )
    if spec.tokenizer is None:
        notes.append("the model has no vocabulary: vocab.txt is not written")
    elif spec.tokenizer.file != "vocab.txt":
        notes.append(f"google-research/bert's tokenizer does not read {spec.tokenizer.file}")
    else:
        notes.append(f"google-research/bert's programs want --do_lower_case={spec.tokenizer.lower_case}")
    return notes


def _save(prefix: Path, names: Sequence[str], values: Iterable[np.ndarray]) -> None:
    tf = _tensorflow()
    tensors = [tf.constant(np.ascontiguousarray(value, np.float32)) for value in values]
    tf.raw_ops.SaveV2(prefix=str(prefix), tensor_names=names, shape_and_slices=[""] * len(tensors), tensors=tensors)


def check_tf1(folder: Path, weights: ModelBundle) -> float:
    """Largest difference of any variable from ``weights``, read by ``tf.train.load_checkpoint``."""
    reader = _tensorflow().train.load_checkpoint(str(folder / PREFIX))
    names = tf1_names(weights.spec)
    if set(reader.get_variable_to_shape_map()) != {entry.name for entry in names.values()}:
        return math.inf
    worst = 0.0
    for name, entry in names.items():
        values = reader.get_tensor(entry.name)
        worst = max(worst, largest_difference(values.T if entry.transpose else values, weights.params[name]))
    return worst
