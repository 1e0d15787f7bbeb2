"""Builders that many tests share: vocabularies, tiny models, drawn weights, a stop at a chosen moment."""

import signal
from collections.abc import Iterable

import numpy as np

from bert_jax.config import ModelConfig, ModelSpec
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.process.signals import StopRequest
from bert_jax.tokenization import SPECIAL_PIECES


def words(count: int) -> list[str]:
    """The special tokens and the pieces w0, w1, ...: so many words."""
    return [*SPECIAL_PIECES, *(f"w{i}" for i in range(count))]


def content(pieces: Iterable[str]) -> bytes:
    """A vocabulary file of ``pieces``."""
    return "".join(f"{piece}\n" for piece in pieces).encode()


def tiny_model(vocab_size: int, **sizes: int) -> ModelConfig:
    """Two layers of width 16; ``sizes`` override the fields."""
    tiny = {
        "hidden_size": 16, "num_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
        "max_position_embeddings": 64,
    }  # fmt: skip
    return ModelConfig.of(vocab_size=vocab_size, **tiny | sizes)


def drawn(
    spec: ModelSpec, deviation: float, pieces: Iterable[str] | None = None, *, seed: int = 0, center: float = 1.0
) -> ModelBundle:
    """Weights with every value drawn from a normal distribution, so that each of them shows in the outputs:
    LayerNorm scales around ``center``, all others around 0. ``pieces``: the vocabulary."""
    rng = np.random.default_rng(seed)
    params = {
        name: rng.normal(center if name.endswith("scale") else 0, deviation, shape).astype(np.float32)
        for name, shape in parameter_shapes(spec).items()
    }
    return ModelBundle(spec=spec, params=params, tokenizer_content=None if pieces is None else content(pieces))


class StopAt(StopRequest):
    """A stop request by signal ``number`` that comes when it is asked for more than ``times`` times: a run asks
    after restoring, before each step and before each evaluation batch."""

    def __init__(self, times: int, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.left, self.number = times, number

    def reached(self) -> bool:
        self.left -= 1
        if self.left < 0:
            self.signal = self.number
        return super().reached()

    def reason(self) -> str:
        self.signal = self.signal or self.number  # an evaluation that a test interrupts has had no signal
        return super().reason()
