"""``bert-jax factorize`` replaces the table of word embeddings by the product of two smaller tables."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bert_jax.contrib.compression.onnx.quality import model_score
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.io.files import new_folder, whole_folder

_TABLE, _FACTOR = "embeddings/word_embeddings/embedding", "embeddings/word_factor/embedding"


def factorized(weights: ModelBundle, rank: int) -> tuple[ModelBundle, float]:
    """Return ``weights`` with a word-embedding table of rank ``rank``, and the kept share of its squared norm.

    The factors are the best approximation of the table in least squares (Eckart and Young 1936).

    Both factors have the square roots of the singular values. Raises ``ValueError`` for a rank that saves nothing,
    and a model without such a table.
    """
    model = weights.spec.model
    if model.word_rank or not model.has_attention:
        has = "a table of that kind already" if model.word_rank else f"the encoder {model.encoder}"
        raise ValueError(f"cannot be factorized: the model has {has}")
    table = weights.params[_TABLE].astype(np.float64)
    rows, width = table.shape
    most = (rows * width - 1) // (rows + width)  # fewer parameters than the table
    if not 1 <= rank <= most:
        what = f"which make the table of {rows} x {width} smaller"
        raise ValueError(f"--rank: {rank} is not allowed; allowed: 1 to {most}, {what}")
    left, values, right = np.linalg.svd(table, full_matrices=False)
    roots = np.sqrt(values[:rank])
    factors = {_TABLE: left[:, :rank] * roots, _FACTOR: roots[:, None] * right[:rank]}
    params = {**weights.params, **{name: array.astype(np.float32) for name, array in factors.items()}}
    spec = dataclasses.replace(weights.spec, model=dataclasses.replace(model, word_rank=rank))
    kept = float(np.sum(values[:rank] ** 2) / np.sum(values**2))
    return dataclasses.replace(weights, spec=spec, params=params), kept


def factorize_model(
    source: Path,
    target: Path,
    rank: int,
    options: ReadOptions,
    *,
    examples: str | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Save the model ``source`` with :func:`factorized` word embeddings to the new folder ``target``.

    ``examples``: file of labeled examples on which both models are scored. ``report`` is called with each line of
    the log. Raises ``ValueError`` if the model cannot be read or factorized, if ``target`` is not empty, and for
    examples without labels.
    """
    target = new_folder(target)
    whole = read_weights(source, options)
    for note in whole.notes:
        report(note)
    try:
        smaller, kept = factorized(whole, rank)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    sizes = [sum(array.size for array in bundle.params.values()) for bundle in (whole, smaller)]
    lines = [
        f"word embeddings: rank {rank}, {kept:.1%} of the squares",
        f"parameters: {sizes[0]:,} to {sizes[1]:,} ({sizes[1] / sizes[0]:.0%})",
    ]
    smaller = dataclasses.replace(smaller, origin={**whole.origin, "factorized": lines[0]}, notes=())
    if examples is not None:
        (name, before, count), (_, after, _) = (model_score(bundle, examples) for bundle in (whole, smaller))
        lines.append(f"{examples}: {count:,} records: {name} {before:.4f} to {after:.4f} ({after - before:+.4f})")
    with whole_folder(target) as unverified:
        write_saved(unverified, smaller)
    for line in (*lines, f"saved: {target}"):
        report(line)
