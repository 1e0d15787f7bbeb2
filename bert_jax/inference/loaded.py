"""A model ready for use: what :func:`load` makes of any readable path."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from bert_jax.config import ExecutionConfig, ModelSpec
from bert_jax.inference.batching import WINDOW, Encoded, Progress, Take, stream
from bert_jax.interop.exchange import ReadOptions, Weights
from bert_jax.interop.readers import read_weights
from bert_jax.model import BertModel
from bert_jax.tokenization import Tokenizer, build_tokenizer

if TYPE_CHECKING:
    from bert_jax.training.fill import FilledText

# A text, or a text and the one that it stands beside.
Text = str | tuple[str, str]


@dataclass
class LoadedModel:
    """Spec, network, parameters (on the device, in the network's layout) and tokenizer of a model.

    ``model.apply({"params": params}, features)`` gives a ``BertOutput``; the methods take texts.
    """

    spec: ModelSpec
    model: BertModel
    params: Any
    tokenizer: Tokenizer | None
    # What there is to say of how it was read.
    notes: tuple[str, ...] = ()
    name: str = "the model"
    _programs: dict[Any, Callable[..., Any]] = field(default_factory=dict, repr=False)

    # ---- texts

    def embed(self, texts: str | Iterable[str], **options: Any) -> np.ndarray:
        """float32[texts, E]: one vector per text, of one text float32[E]; see ``embed.embed``."""
        from bert_jax.inference.embed import embed

        if isinstance(texts, str):
            return next(embed(self, [texts], **options))
        vectors = list(embed(self, texts, **options))
        return np.stack(vectors) if vectors else np.zeros((0, 0), np.float32)

    def predict(self, texts: Iterable[Any], **options: Any) -> list[dict[str, Any]]:
        """What the task head says of each text; see ``predict.predict``."""
        from bert_jax.inference.predict import predict

        return list(predict(self, texts, **options))

    def fill_mask(self, texts: Iterable[str], **options: Any) -> "list[FilledText]":
        """The best pieces for the masks of each text; see ``fill.fill_mask``."""
        from bert_jax.inference.fill import fill_mask

        return list(fill_mask(self, texts, **options))

    def forward(self, inputs: Mapping[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
        """Every output on arrays of ids; see ``forward.forward``."""
        from bert_jax.inference.forward import forward

        return forward(self, inputs, **options)

    # ---- parts

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; ``ValueError`` when the model came without one."""
        if self.tokenizer is None:
            raise ValueError(f"{self.name}: no vocabulary there, so it takes ids only (bert-jax forward)")
        return self.tokenizer

    def encode(self, texts: Sequence[Text]) -> list[Encoded]:
        """Model inputs of texts and pairs, cut to the model's length."""
        tokenizer = self.need_tokenizer()
        firsts = tokenizer.encode_batch([text if isinstance(text, str) else text[0] for text in texts])
        pairs = [i for i, text in enumerate(texts) if not isinstance(text, str)]
        seconds = dict(zip(pairs, tokenizer.encode_batch([texts[i][1] for i in pairs]), strict=True))
        return [self.build(first, seconds.get(i)) for i, first in enumerate(firsts)]

    def build(self, a: Sequence[int], b: Sequence[int] | None = None, extra: Any = None) -> Encoded:
        """One model input from ids of a text or pair, cut to the model's length."""
        ids, types = self.need_tokenizer().build_inputs(a, b, self.spec.max_length)
        if self.spec.model.type_vocab_size == 1:
            types = [0] * len(ids)
        return Encoded(ids, types, extra)

    def program(self, key: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function(params, ...)`` compiled, kept under ``key``. Matrix products of float32 stay float32 on every
        device (accelerators round their inputs otherwise)."""
        if key not in self._programs:
            exact = self.model.execution.dtype == "float32"

            def traced(*arguments: Any) -> Any:
                with jax.default_matmul_precision("float32" if exact else "default"):
                    return function(*arguments)

            self._programs[key] = jax.jit(traced)
        return self._programs[key]

    def stream(
        self,
        inputs: Iterable[Any],
        encode: Callable[[list[Any]], list[list[Encoded]]],
        run: Callable[..., Any],
        take: Take,
        *arguments: Any,
        window: int = WINDOW,
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> Iterator[list[Any]]:
        """``batching.stream`` of the compiled ``run(params, features, *arguments)``."""
        return stream(
            inputs, encode, lambda batch: run(self.params, batch, *arguments), take,
            limit=self.spec.max_length, pad_id=self.need_tokenizer().pad_id, window=window,
            batch_tokens=batch_tokens, progress=progress,
        )  # fmt: skip


def load(
    path: str | Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    options: ReadOptions | None = None,
) -> LoadedModel:
    """Read a model from any readable path: a workdir or saved model, a folder of Hugging Face or
    sentence-transformers, a TF1 checkpoint prefix, an npz export. ``dtype`` is that of the computation.

    Raises ``ValueError`` in one line when there is none or it is damaged.
    """
    return prepare(read_weights(Path(path), options), dtype=dtype, name=str(path))


def prepare(
    weights: Weights, *, dtype: Literal["float32", "bfloat16"] = "float32", name: str = "the model"
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
