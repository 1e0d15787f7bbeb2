"""Reader of models in any supported format; the files of the folder determine the format."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bert_jax import registry
from bert_jax.interop.hf.details import read_details
from bert_jax.interop.hf.read import is_hf, read_hf
from bert_jax.interop.hf.sentence_transformers import is_sentence_transformers, read_sentence_transformers
from bert_jax.interop.hf.tensors import WEIGHT_FILES
from bert_jax.interop.model_bundle import Format, ModelBundle, ReadOptions, without_folders
from bert_jax.interop.npz import is_npz, read_npz
from bert_jax.interop.saved_files import is_native
from bert_jax.interop.stored_model import require_finite
from bert_jax.interop.tf1.checkpoint import is_tf1, read_tf1
from bert_jax.io.errors import near_path
from bert_jax.io.hub import local_folder

SUPPORTED = (
    "a saved model or workdir of this library, a Hugging Face folder (config.json), a sentence-transformers "
    "folder (modules.json), a TF1 checkpoint prefix (.../bert_model.ckpt with bert_config.json), an npz export "
    "(weights.npz)"
)
# Name of the program file of an export -> description for the message. Programs cannot be read.
_PROGRAMS = {
    "model.onnx": "an ONNX export for onnxruntime (model.onnx)",
    "program.bin": "a StableHLO export for jax.export (program.bin with weights.safetensors)",
}
Reader = Callable[[Path, ReadOptions], ModelBundle]


def _read_native(path: Path, options: ReadOptions) -> ModelBundle:
    from bert_jax.interop.saved_model import read_native  # with Optax and Orbax, which other formats do not need

    return read_native(path, options)


# The first reader whose test accepts the path is used, so the order matters: an npz export has a model.json like a
# saved model, a sentence-transformers folder is also a Hugging Face folder, and a Hugging Face folder may also
# contain the TF1 checkpoint of its weights.
_READERS: tuple[tuple[Callable[[Path], bool], Reader], ...] = (
    (is_npz, read_npz),
    (is_native, _read_native),
    (is_sentence_transformers, read_sentence_transformers),
    (is_hf, read_hf),
    (is_tf1, read_tf1),
)


def read_weights(path: Path, options: ReadOptions | None = None) -> ModelBundle:
    """Read the model at ``path``, or of this name on the Hugging Face Hub, in any supported format.

    Raises ``ValueError`` with a one-line message for an unknown format, for an option that does not apply to the
    format of the model, and for NaN and infinite weights.
    """
    options, name, path = options or ReadOptions(), path, local_folder(path)
    read = _reader(path)
    _check_options(path, options, read)
    weights = read(path, options)
    if read in (read_hf, read_sentence_transformers):
        weights = read_details(path, weights)
    require_finite(weights.params, path)
    weights = dataclasses.replace(weights, origin=without_folders(weights.origin))
    if path != name:
        weights = dataclasses.replace(weights, origin={**weights.origin, "name": name.as_posix()})
    tokenizer = weights.spec.tokenizer
    if options.lower_case is not None and tokenizer is not None and options.lower_case != tokenizer.lower_case:
        case = "lower-cased" if tokenizer.lower_case else "cased"
        raise ValueError(f"{path}: the vocabulary of the model is {case}; omit --do_lower_case")
    return weights if options.labels is None else _labelled(path, weights, options.labels)


def _labelled(path: Path, weights: ModelBundle, labels: tuple[str, ...]) -> ModelBundle:
    """Return ``weights`` with ``labels`` as the class names of the classification head."""
    heads = weights.spec.heads
    fields = [name for name in ("sequence_labels", "token_labels") if getattr(heads, name)]
    if len(fields) != 1:
        heads_found = "a sequence and a token head" if fields else "no sequence or token head"
        raise ValueError(f"{path}: --labels needs exactly one classification head; the model has {heads_found}")
    outputs = len(getattr(heads, fields[0]))
    if len(labels) != outputs:
        raise ValueError(f"{path}: {len(labels)} labels, but the head has {outputs} outputs; give one per output")
    named: dict[str, Any] = {fields[0]: labels}
    spec = dataclasses.replace(weights.spec, heads=dataclasses.replace(heads, **named))
    notes = (*weights.notes, f"names of the classes (--labels): {', '.join(labels)}")
    return dataclasses.replace(weights, spec=spec, notes=notes)


def leaves_activation_open(path: Path) -> bool:
    """Return True if the format of the files at ``path`` can leave the activation ambiguous (TF1 checkpoints)."""
    return _reader(local_folder(path)) is read_tf1


def leaves_case_open(path: Path) -> bool:
    """Return True if the format of the files at ``path`` can leave the case of the vocabulary unspecified (formats
    of other libraries)."""
    return _reader(local_folder(path)) not in (_read_native, read_npz)


def _reader(path: Path) -> Reader:
    for file, what in _PROGRAMS.items():
        has_weights = any((path / name).exists() for name in WEIGHT_FILES)
        if path.name == file or ((path / file).is_file() and not has_weights):
            problem = f"{what}; exported programs cannot be imported"
            raise ValueError(f"{path}: {problem}; use the model from which the program was exported")
    for knows, read in _readers():
        if knows(path):
            return read
    if re.match("[a-z][a-z0-9]*:/", str(path)) and not path.exists():  # pathlib merges the two slashes of a URL
        remedy = "copy the model first: gcloud storage cp -r URL ."
        raise ValueError(f"{path}: models are read from local folders; {remedy}")
    if not path.exists():
        raise ValueError(f"{path}: does not exist{near_path(path)}")
    if inner := _model_inside(path):
        raise ValueError(f"{path}: {inner}")
    supported = ", ".join([SUPPORTED, *(one.what for one in _other_formats())])
    raise ValueError(f"{path}: contains no model; supported formats: {supported}")


def _readers() -> Iterator[tuple[Callable[[Path], bool], Reader]]:
    """Yield the test and the reader of every format, those outside the trunk last."""
    return itertools.chain(_READERS, ((one.knows, one.read) for one in _other_formats()))


def _other_formats() -> Iterator[Format]:
    """Yield the formats outside the trunk."""
    return (registry.load("formats", name) for name in registry.names("formats"))


def _model_inside(path: Path) -> str:
    """Return a line about the models in subfolders of ``path``, where other libraries put them; empty: none."""
    steps = [place for place in path.glob("checkpoint-*") if place.name.removeprefix("checkpoint-").isdecimal()]
    if steps:
        last = max(steps, key=lambda place: int(place.name.removeprefix("checkpoint-")))
        return f"a folder of {len(steps)} checkpoints of a Trainer; name one of them, such as {last}"
    snapshots = sorted(path.glob("snapshots/*/")) or sorted(path.glob("models--*/snapshots/*/"))
    snapshots = snapshots or sorted(path.glob("hub/models--*/snapshots/*/"))
    if snapshots:
        return f"a cache of the Hugging Face Hub; name the snapshot of a model, such as {snapshots[-1]}"
    folders = [place for place in path.glob("*/") if place.is_dir()]
    inner = sorted(place for place in folders if any(knows(place) for knows, _ in _readers()))
    return f"contains no model, but {len(inner)} of its folders do; name one, such as {inner[0]}" if inner else ""


def _check_options(path: Path, options: ReadOptions, read: Reader) -> None:
    if options.ema and read not in (_read_native, read_tf1):
        sources = "only pretraining runs and TF1 checkpoints may have one"
        raise ValueError(f"{path}: no moving average; {sources}; omit --ema")
    if options.network and read is not _read_native:
        raise ValueError(f"{path}: one network; only pretraining runs may have several; omit --network")
    if options.step is not None and read is not _read_native:
        raise ValueError(f"{path}: not a pretraining run, which has checkpoints of several steps; omit step")
    if options.activation is not None and read is not read_tf1:
        remedy = "omit --activation, which applies to TF1 checkpoints only"
        raise ValueError(f"{path}: the model states its activation; {remedy}")
