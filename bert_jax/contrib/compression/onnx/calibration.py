"""Ranges of the inputs of 8-bit products, from texts (post-training static quantization)."""

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bert_jax.inference.engine import Text
from bert_jax.inference.loaded import prepare
from bert_jax.inference.onnx_network import open_session, padded
from bert_jax.inference.text_files import read_texts
from bert_jax.interop.model_bundle import ModelBundle
from bert_jax.interop.programs.onnx_graph import write_calibration

# The first texts of the files, which determine the ranges closely; each file has an equal share.
TEXTS = 1000
_BATCH = 16


def calibrated(weights: ModelBundle, files: Sequence[str], report: Callable[[str], None]) -> ModelBundle:
    """Return ``weights`` with ``ranges``: the least and the greatest value of the inputs of each product while
    onnxruntime runs the float32 model on the first texts of ``files``, 1,000 in all.

    A file has one text per line (``.gz``: packed), or (``.jsonl``) objects with text and, for models of pairs,
    text_pair. Raises ``ValueError`` for a file without texts, a table, a model without a tokenizer, and if
    onnxruntime is not installed.
    """
    share = -(-TEXTS // len(files))
    texts = [text for name in files for text in itertools.islice(_texts(name), share)]
    ranges: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bert_jax-") as scratch:
        engine = prepare(weights)
        sequences = engine.model_inputs(texts)
        inputs = write_calibration(Path(scratch), weights)
        session = open_session(Path(scratch))
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i].ids))
        for start in range(0, len(order), _BATCH):
            part = [sequences[i] for i in order[start : start + _BATCH]]
            batch = padded(part, engine.need_tokenizer().pad_id)
            for name, values in zip(inputs, session.run(list(inputs), batch), strict=True):
                _widen(ranges, inputs[name], values, batch["attention_mask"])
    report(f"calibration: {len(texts):,} texts, {sum(len(one.ids) for one in sequences):,} tokens")
    return dataclasses.replace(weights, ranges=ranges)


def _widen(
    ranges: dict[str, tuple[float, float]], products: Sequence[str], values: np.ndarray, mask: np.ndarray
) -> None:
    # The values of padding are no input of any result; a table of distances has no tokens.
    visible = values[mask != 0] if values.shape[:2] == mask.shape else values
    least, greatest = float(visible.min()), float(visible.max())
    for product in products:
        low, high = ranges.get(product, (least, greatest))
        ranges[product] = min(low, least), max(high, greatest)


def _texts(name: str) -> Iterator[Text]:
    for number, value in enumerate(read_texts((), name, False), 1):
        if isinstance(value, str):
            yield value
            continue
        text, pair = value.get("text"), value.get("text_pair")
        if not isinstance(text, str) or not isinstance(pair, str | None):
            raise ValueError(
                f'{name}: entry {number}: no text; write {{"text": "..."}}, with "text_pair" for a pair'
            )
        yield text if pair is None else (text, pair)
