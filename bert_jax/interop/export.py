"""Weights out: any readable model as a folder of another format, complete or absent, read back before it counts."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import ml_dtypes
import numpy as np

from bert_jax.interop.exchange import ReadOptions, Weights
from bert_jax.interop.export_table import DTYPES, FORMATS, fit, keep_heads
from bert_jax.interop.hf.check import Differences, check_hf, check_sentence_transformers
from bert_jax.interop.hf.config_json import CONFIG_FILE
from bert_jax.interop.model_card import model_card
from bert_jax.interop.readers import read_weights
from bert_jax.io.files import whole_folder
from bert_jax.process.exits import VERIFICATION_FAILED, Stop

# Formats that this library reads back: their arrays must come back bit by bit.
READ_BACK = ("hf", "sentence-transformers", "tf1", "npz")
CARD = "README.md"


class Writer(Protocol):
    """Writes into an existing empty folder and returns what has to be said."""

    def __call__(self, folder: Path, weights: Weights, *, dtype: Literal["float32", "bfloat16"]) -> list[str]: ...


def export_model(
    source: Path,
    target: Path,
    format: str,
    *,
    dtype: str = "float32",
    force: bool = False,
    heads: Sequence[str] | None = None,
    options: ReadOptions | None = None,
    verify: bool = True,
    peer_python: str | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Read ``source`` (whatever its format) and write it to the folder ``target`` as ``format``.

    Args:
        dtype: in which the weights are stored, float32 or bfloat16.
        force: replace a ``target`` that is not empty, once the new folder is complete.
        heads: export these alone, with the pooler where one of them stands on it; None: all.
        verify: load the folder back, by the consumer's own route where it is installed, before it gets its name.
        peer_python: the Python that has the consumer (transformers, sentence-transformers); None: this one.

    Raises ``ValueError`` for a model that the format cannot hold (docs/weights.md) and a ``target`` that may not be
    replaced; ``exits.Stop`` with VERIFICATION_FAILED when what was written differs from the model. Either way
    ``target`` stays as it was.
    """
    if format not in FORMATS:
        raise ValueError(f"--format: {format!r} is not allowed; allowed: {', '.join(FORMATS)}")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: {dtype!r} is not allowed; allowed: {', '.join(DTYPES)}")
    target = target.resolve()
    _check_target(source, target, force)
    weights = read_weights(source, options)
    for note in weights.notes:
        report(note)
    if heads is not None:
        weights = keep_heads(weights, heads)
    weights, notes = fit(weights, format, dtype)
    with whole_folder(target, target.with_name(f".{target.name}.replaced")) as partial:
        notes += _writer(format)(partial, weights, dtype=dtype)
        (partial / CARD).write_text(
            model_card(weights, format, dtype, _architecture(partial), notes), encoding="utf-8"
        )
        for note in notes:
            report(note)
        if verify:
            _verify(partial, weights, format, dtype, peer_python, report)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    report(f"{target}: {format}, {size / 1e6:,.1f} MB")


def _check_target(source: Path, target: Path, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target}: a file; give a folder")
    if not target.exists() or not any(target.iterdir()):
        return
    if not force:
        raise ValueError(f"{target}: not empty; give a new folder, or --force to replace it")
    # What stands in the folder is deleted: never the model itself, nor where the user stands or lives.
    for place, what in ((source, "the source"), (Path.cwd(), "the working folder"), (Path.home(), "your home")):
        if place.resolve().is_relative_to(target):
            raise ValueError(f"{target}: --force would delete {what} ({place}); give another folder")


def _architecture(folder: Path) -> str | None:
    file = folder / CONFIG_FILE
    if not file.is_file():
        return None
    return next(iter(json.loads(file.read_text(encoding="utf-8")).get("architectures") or ()), None)


def _writer(format: str) -> Writer:
    match format:
        case "hf":
            from bert_jax.interop.hf.write import write_hf

            return write_hf
        case "sentence-transformers":
            from bert_jax.interop.hf.sentence_transformers import write_sentence_transformers

            return write_sentence_transformers
        case "tf1":
            from bert_jax.interop.tf1 import write_tf1

            return write_tf1
        case "onnx":
            from bert_jax.interop.programs.onnx_graph import write_onnx

            return write_onnx
        case "stablehlo":
            from bert_jax.interop.programs.stablehlo import write_stablehlo

            return write_stablehlo
        case "npz":
            from bert_jax.interop.npz import write_npz

            return write_npz
    raise AssertionError(format)


# ------------------------------------------------------------------ reading back


def as_stored(weights: Weights, dtype: str) -> Weights:
    """``weights`` with every value rounded as ``dtype`` stores it, in float32."""
    if dtype == "float32":
        return weights
    rounded = {name: _rounded(values) for name, values in weights.params.items()}
    return dataclasses.replace(weights, params=rounded)


def _rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def _verify(
    folder: Path, weights: Weights, format: str, dtype: str, peer_python: str | None, report: Callable[[str], None]
) -> None:
    weights = as_stored(weights, dtype)
    if format in READ_BACK:
        count = _compare_arrays(folder, weights)
        report(f"read back: {count} arrays, bitwise equal")
    given = _consumer_differences(folder, weights, format, peer_python)
    if isinstance(given, str):
        report(f"not compared with {given}")
        return
    shown = ", ".join(f"{name} {difference:.3g}" for name, (difference, _) in given.values.items())
    report(f"largest difference from {given.consumer}: {shown}")
    if given.problems:
        raise Stop(VERIFICATION_FAILED, f"{given.consumer} reports {'; '.join(given.problems[:10])}: not exported")
    over = [
        f"{name} by {difference:.3g} (allowed: {bar:.3g})"
        for name, (difference, bar) in given.values.items()
        if not difference <= bar
    ]
    if over:
        raise Stop(VERIFICATION_FAILED, f"{given.consumer} differs in {', '.join(over)}: not exported")


def _compare_arrays(folder: Path, weights: Weights) -> int:
    """Read ``folder`` by this library; raises ``Stop`` when a bit of an array or the description differs."""
    again = read_weights(folder, ReadOptions())
    if again.spec.model != weights.spec.model or again.spec.heads != weights.spec.heads:
        raise Stop(VERIFICATION_FAILED, f"read back: {again.spec} instead of {weights.spec}: not exported")
    for name, values in weights.params.items():
        if name not in again.params or not same_bits(values, again.params[name]):
            raise Stop(VERIFICATION_FAILED, f"read back: {name} differs from the model: not exported")
    return len(again.params)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two float32 arrays are equal in shape and every bit."""
    return one.shape == other.shape and np.array_equal(
        np.ascontiguousarray(one).view(np.uint32), np.ascontiguousarray(other).view(np.uint32)
    )


def _consumer_differences(
    folder: Path, weights: Weights, format: str, peer_python: str | None
) -> Differences | str:
    """By the consumer's own route; a text says why there was no comparison."""
    match format:
        case "hf":
            return check_hf(folder, weights, peer_python)
        case "sentence-transformers":
            return check_sentence_transformers(folder, weights, peer_python)
        case "npz":
            from bert_jax.interop.npz import check_npz

            return _arrays("numpy", check_npz(folder, weights))
        case "tf1":
            from bert_jax.interop.tf1 import check_tf1

            return _arrays("tf.train.load_checkpoint", check_tf1(folder, weights))
        case "onnx":
            from bert_jax.interop.programs.onnx_graph import check_onnx

            values = check_onnx(folder, weights)
            return "onnxruntime: it is not installed" if values is None else _bar("onnxruntime", values, 1e-4)
        case "stablehlo":
            from bert_jax.interop.programs.stablehlo import check_stablehlo

            values = check_stablehlo(folder, weights)
            return "jax.export: no device for it" if values is None else _bar("jax.export", values, 1e-5)
    raise AssertionError(format)


def _arrays(consumer: str, difference: float) -> Differences:
    return Differences(consumer, {"arrays": (difference, 0.0)})


def _bar(consumer: str, values: Mapping[str, float], bar: float) -> Differences:
    return Differences(consumer, {name: (value, bar) for name, value in values.items()})
