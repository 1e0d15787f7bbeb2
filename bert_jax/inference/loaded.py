"""A model that is ready for use, loaded from a path in any supported format."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bert_jax.config import ExecutionConfig, ModelConfig
from bert_jax.inference.embed import embed, vector_width
from bert_jax.inference.engine import Engine
from bert_jax.inference.fill import fill_mask
from bert_jax.inference.forward import forward
from bert_jax.inference.predict import predict
from bert_jax.inference.score import score
from bert_jax.inference.zero_shot import Labels, zero_shot
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator


class LoadedModel(Engine):
    """A loaded model with a method for each use. ``model.apply({"params": params}, features)`` returns a
    ``BertOutput``."""

    @property
    def config(self) -> ModelConfig:
        """The ``ModelConfig`` of the network: its sizes and variants."""
        return self.spec.model

    def embed(self, texts: str | Iterable[str], **options: Any) -> np.ndarray:
        """Return float32[texts, E], one vector per text; float32[E] for a single text. See ``embed.embed``."""
        vectors = _answers(texts, lambda texts: embed(self, texts, **options))
        width = vector_width(self.spec, options.get("pooling"), options.get("width"))
        return np.array(vectors, np.float32).reshape(-1, width) if isinstance(vectors, list) else vectors

    def predict(self, texts: str | Iterable[Any], **options: Any) -> Any:
        """Return the predictions of the task head: a list of dicts, or one dict for a single text. See
        ``predict.predict``."""
        return _answers(texts, lambda texts: predict(self, texts, **options))

    def fill_mask(self, texts: str | Iterable[str], **options: Any) -> Any:
        """Return the best pieces for the masks: a list of ``FilledText``, or one ``FilledText`` for a single text.
        See ``fill.fill_mask``."""
        return _answers(texts, lambda texts: fill_mask(self, texts, **options))

    def score(self, texts: str | Iterable[str], **options: Any) -> Any:
        """Return the log-probability of texts: a list of ``ScoredText``, or one ``ScoredText`` for a single text.
        See ``score.score``."""
        return _answers(texts, lambda texts: score(self, texts, **options))

    def zero_shot(self, texts: str | Iterable[str], labels: Labels, **options: Any) -> Any:
        """Classify texts with ``labels`` on which the model was not trained. Return a list of dicts, or one dict
        for a single text. See ``zero_shot.zero_shot``."""
        return _answers(texts, lambda texts: zero_shot(self, texts, labels, **options))

    def forward(self, inputs: Mapping[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
        """Return every output for arrays of ids; see ``forward.forward``."""
        return forward(self, inputs, **options)


def _answers(texts: str | Iterable[Any], run: Callable[[Iterable[Any]], Iterator[Any]]) -> Any:
    """Return the result of ``run`` for a single text, or the list of results for several texts."""
    return next(run([texts])) if isinstance(texts, str) else list(run(texts))


def load(
    path: str | Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    options: ReadOptions | None = None,
) -> LoadedModel:
    """Read a model in any supported format: a workdir or saved model, a Hugging Face or sentence-transformers
    folder, a TF1 checkpoint prefix, or an npz export. ``dtype`` is the dtype of the computation. Raises
    ``ValueError`` with a one-line message for a path without a model, a damaged model, and an unsupported
    ``dtype``.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype: {dtype!r} is not allowed; use float32 or bfloat16")
    keep_to_cpu_without_accelerator()
    return prepare(read_weights(Path(path), options), dtype=dtype, name=str(path))


def prepare(
    weights: ModelBundle, *, dtype: Literal["float32", "bfloat16"] = "float32", name: str = "the model"
) -> LoadedModel:
    """Convert ``weights`` to a :class:`LoadedModel`, whose parameters are on the device."""
    return LoadedModel.of(weights, ExecutionConfig(vocab_multiple=1, dtype=dtype), name)
