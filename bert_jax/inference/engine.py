"""A model and its tokenizer as the functions of this package use them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from bert_jax.config import ModelSpec
from bert_jax.inference.batching import WINDOW, Encoded, Progress, Take, stream
from bert_jax.model import BertModel
from bert_jax.tokenization import Tokenizer

# A text, or a text and the one that it stands beside.
Text = str | tuple[str, str]


def checked_texts(texts: Iterable[Any], *, pairs: bool = False) -> Iterator[Any]:
    """``texts`` as they are. Raises ``ValueError`` at the first that is no text (nor, with ``pairs``, a pair)."""
    for number, value in enumerate(texts):
        parts = value if pairs and isinstance(value, tuple | list) and len(value) == 2 else (value,)
        if not all(isinstance(part, str) for part in parts):
            allowed = "texts and pairs of texts" if pairs else "texts"
            raise ValueError(f"input {number}: {type(value).__name__} {str(value)[:40]!r}; allowed: {allowed}")
        yield value


@dataclass
class Engine:
    """Spec, network, parameters (on the device, in the network's layout) and tokenizer of a model, with the way
    from texts to batches to compiled programs."""

    spec: ModelSpec
    model: BertModel
    params: Any
    tokenizer: Tokenizer | None
    # What there is to say of how it was read.
    notes: tuple[str, ...] = ()
    name: str = "the model"
    _programs: dict[Any, Callable[..., Any]] = field(default_factory=dict, repr=False)

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
