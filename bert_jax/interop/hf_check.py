"""A Hugging Face folder in transformers against the model that it was written from or read into."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_jax.interop.exchange import Weights
from bert_jax.interop.hf_peer import BAR, peer_outputs
from bert_jax.interop.serving import largest_differences, output_names, sample_inputs


@dataclass(frozen=True)
class Differences:
    """What the consumer's own reading of a folder gave."""

    # "transformers 5.23.0", ...
    consumer: str
    # Output -> (largest absolute difference, the largest that is allowed).
    values: Mapping[str, tuple[float, float]]
    # What the consumer itself complained of.
    problems: tuple[str, ...] = ()


def check_hf(folder: Path, weights: Weights, peer_python: str | None = None) -> Differences | str:
    """Outputs of ``folder`` in transformers against those of ``weights`` (values as stored, no sentence head), in
    float32: one token, padded rows, full length. A text where transformers or torch is not installed.

    Raises ``ValueError`` when transformers cannot load the folder or gives other outputs.
    """
    spec = weights.spec
    peer = peer_outputs(folder, list(sample_inputs(spec)), peer_python)
    if peer is None:
        python = f"{peer_python} has" if peer_python else "this Python has"
        return f"transformers: {python} not both transformers and torch (--peer_python names a Python that has)"
    names = list(output_names(spec))
    missing = [name for name in names if name not in peer.outputs[0]]
    if missing:
        raise ValueError(f"{folder}: transformers gives {', '.join(peer.outputs[0])}, but not {', '.join(missing)}")
    answers = iter(peer.outputs)

    def program(_: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        answer = next(answers)
        return {name: answer[name] for name in names}

    values = largest_differences(spec, weights.params, program)
    largest = {name: max(float(np.max(np.abs(answer[name]))) for answer in peer.outputs) for name in names}
    bars = {name: BAR * max(1.0, largest[name]) for name in names}
    return Differences(
        f"transformers {peer.version}", {name: (values[name], bars[name]) for name in names}, peer.problems
    )
