"""A model ready for use: what :func:`load` makes of any readable path."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from bert_jax.config import ExecutionConfig, ModelConfig
from bert_jax.inference.embed import embed, vector_width
from bert_jax.inference.engine import Engine
from bert_jax.inference.fill import fill_mask
from bert_jax.inference.forward import forward
from bert_jax.inference.predict import predict
from bert_jax.inference.zero_shot import Labels, zero_shot
from bert_jax.interop.exchange import ModelBundle, ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.model import BertModel
from bert_jax.tokenization import build_tokenizer


class LoadedModel(Engine):
    """A model with its uses as methods. ``model.apply({"params": params}, features)`` gives a ``BertOutput``."""

    @property
    def config(self) -> ModelConfig:
        """Sizes of the network."""
        return self.spec.model

    def embed(self, texts: str | Iterable[str], **options: Any) -> np.ndarray:
        """float32[texts, E]: one vector per text, of one text float32[E]; see ``embed.embed``."""
        if isinstance(texts, str):
            return next(embed(self, [texts], **options))
        vectors = list(embed(self, texts, **options))
        return (
            np.stack(vectors) if vectors else np.zeros((0, vector_width(self.spec, options.get("pooling"))), "f4")
        )

    def predict(self, texts: str | Iterable[Any], **options: Any) -> Any:
        """What the task head says: a list of one dict per text, of one text its dict; see ``predict.predict``."""
        if isinstance(texts, str):
            return next(predict(self, [texts], **options))
        return list(predict(self, texts, **options))

    def fill_mask(self, texts: str | Iterable[str], **options: Any) -> Any:
        """The best pieces for the masks: a list of one ``FilledText`` per text, of one text it alone; see
        ``fill.fill_mask``."""
        if isinstance(texts, str):
            return next(fill_mask(self, [texts], **options))
        return list(fill_mask(self, texts, **options))

    def zero_shot(self, texts: str | Iterable[str], labels: Labels, **options: Any) -> Any:
        """Which of ``labels`` fit, without training: a list of one dict per text, of one text its dict; see
        ``zero_shot.zero_shot``."""
        if isinstance(texts, str):
            return next(zero_shot(self, [texts], labels, **options))
        return list(zero_shot(self, texts, labels, **options))

    def forward(self, inputs: Mapping[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
        """Every output on arrays of ids; see ``forward.forward``."""
        return forward(self, inputs, **options)


def load(
    path: str | Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    options: ReadOptions | None = None,
) -> LoadedModel:
    """Read a model from any readable path: a workdir or saved model, a folder of Hugging Face or
    sentence-transformers, a TF1 checkpoint prefix, an npz export. ``dtype`` is that of the computation.

    Raises ``ValueError`` in one line when there is none or it is damaged, and for another ``dtype``.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype: {dtype!r} is not allowed; allowed: float32, bfloat16")
    return prepare(read_weights(Path(path), options), dtype=dtype, name=str(path))


def prepare(
    weights: ModelBundle, *, dtype: Literal["float32", "bfloat16"] = "float32", name: str = "the model"
) -> LoadedModel:
    """A model in exchange form, ready for use."""
    spec = weights.spec
    execution = ExecutionConfig(vocab_multiple=1, dtype=dtype)
    on_device = {key: jnp.asarray(values) for key, values in weights.params.items()}
    tokenizer = None
    if spec.tokenizer is not None and weights.tokenizer_content is not None:
        tokenizer = build_tokenizer(spec.tokenizer, weights.tokenizer_content, spec.tokenizer.file)
    return LoadedModel(
        spec=spec,
        model=BertModel(spec.model, execution, spec.heads, spec.sentence),
        params=traverse_util.unflatten_dict(on_device, sep="/"),
        tokenizer=tokenizer,
        notes=weights.notes,
        name=name,
    )
