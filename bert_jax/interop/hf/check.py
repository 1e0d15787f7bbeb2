"""Folders of transformers and sentence-transformers, loaded by those, against the model that was written."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import ModelSpec, SentenceConfig
from bert_jax.interop.exchange import ModelBundle
from bert_jax.interop.hf.peer import BAR, PeerOutputs, peer_outputs
from bert_jax.interop.programs.serving import INPUTS, forward, output_names, sample_inputs

# Largest allowed difference of a sentence vector from sentence-transformers'.
SENTENCE_BAR = 1e-5


@dataclass(frozen=True)
class Differences:
    """What the consumer's own reading of a folder gave."""

    # "transformers 5.23.0", ...
    consumer: str
    # Output -> (largest absolute difference, the largest that is allowed).
    values: Mapping[str, tuple[float, float]]
    # What the consumer itself complained of.
    problems: tuple[str, ...] = ()


def check_hf(folder: Path, weights: ModelBundle, peer_python: str | None = None) -> Differences | str:
    """Outputs of ``folder`` in transformers against those of ``weights`` (values as stored, no sentence head), in
    float32: one token, padded rows, full length. A text where transformers or torch is not installed.

    Raises ``ValueError`` when transformers cannot load the folder or gives other outputs.
    """
    batches = list(sample_inputs(weights.spec))
    peer = peer_outputs(folder, batches, peer_python)
    if peer is None:
        return _absent("transformers", peer_python)
    values = _differences(folder, weights.spec, weights, batches, peer, list(output_names(weights.spec)))
    bars = {name: BAR * max(1.0, largest) for name, (_, largest) in values.items()}
    return Differences(f"transformers {peer.version}", {n: (values[n][0], bars[n]) for n in values}, peer.problems)


def check_sentence_transformers(
    folder: Path, weights: ModelBundle, peer_python: str | None = None
) -> Differences | str:
    """Like :func:`check_hf` with sentence-transformers: one vector per row, of rows padded right."""
    spec = dataclasses.replace(weights.spec, sentence=weights.spec.sentence or SentenceConfig())
    batches = []
    for batch in sample_inputs(spec):
        # It takes column 0 for the first token, so padding may not come first.
        order = np.argsort(1 - batch["attention_mask"], axis=1, kind="stable")
        batches.append({name: np.take_along_axis(values, order, axis=1) for name, values in batch.items()})
    peer = peer_outputs(folder, batches, peer_python, sentences=True)
    if peer is None:
        return _absent("sentence-transformers", peer_python)
    values = _differences(folder, spec, weights, batches, peer, ["sentence_embedding"])
    bars = {name: SENTENCE_BAR * max(1.0, largest) for name, (_, largest) in values.items()}
    consumer = f"sentence-transformers {peer.version}"
    return Differences(consumer, {n: (values[n][0], bars[n]) for n in values}, peer.problems)


def _absent(package: str, peer_python: str | None) -> str:
    python = peer_python or "this Python"
    return f"{package}: {python} does not have both it and torch (--peer_python names a Python that has)"


def _differences(
    folder: Path,
    spec: ModelSpec,
    weights: ModelBundle,
    batches: list[dict[str, np.ndarray]],
    peer: PeerOutputs,
    names: list[str],
) -> dict[str, tuple[float, float]]:
    """Of every output the largest absolute difference (infinite: another shape or not finite) and value."""
    params = {name: jnp.asarray(values) for name, values in weights.params.items()}
    ours = jax.jit(lambda params, *inputs: forward(spec, params, *inputs))
    worst = dict.fromkeys(names, (0.0, 0.0))
    for batch, given in zip(batches, peer.outputs, strict=True):
        missing = [name for name in names if name not in given]
        if missing:
            raise ValueError(f"{folder}: loaded, it gives {', '.join(given)}, but not {', '.join(missing)}")
        expected = ours(params, *(jnp.asarray(batch[name], jnp.int32) for name in INPUTS))
        for name in names:
            difference, largest = worst[name]
            worst[name] = (
                max(difference, _largest(given[name], np.asarray(expected[name]))),
                max(largest, float(np.max(np.abs(given[name])))),
            )
    return worst


def _largest(given: np.ndarray, expected: np.ndarray) -> float:
    if given.shape != expected.shape:
        return float("inf")
    largest = float(np.max(np.abs(given - expected)))
    return largest if np.isfinite(largest) else float("inf")
