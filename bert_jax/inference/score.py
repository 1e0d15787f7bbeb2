"""Log-probability of texts, by a masked language model, which predicts one token at a time, or by a causal one.

* Masked models: the pseudo-log-likelihood (PLL) of a text is the sum over its tokens of log P(token | the rest),
  each from a copy of the text in which the token is masked (Salazar et al. 2020, arXiv:1910.14659).

  - ``PLL-original`` masks only the token itself. A rare word of several pieces then looks likely, because each
    piece follows from the others.
  - ``PLL-word-l2r`` also masks the later tokens of the same word (Kauf and Ivanova 2023, arXiv:2305.10588, section
    2), so that a word is scored from left to right.

* Causal models: the sum of log P(token | the tokens before it); the first token follows the first token of the
  tokenizer, as in ``generate`` for an empty text.

Probabilities are over the vocabulary of the network, and logarithms are natural. Special tokens are not scored.
Shapes: B rows, S tokens per row, U copies per row, L labels per copy, V vocabulary.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import HeadsConfig
from bert_jax.inference.batching import BatchOptions, DeviceOutputs, Outputs
from bert_jax.inference.engine import WINDOW, Engine, checked_texts
from bert_jax.io.text_lines import Each
from bert_jax.model import BertModel
from bert_jax.model.bert import bert_output, present
from bert_jax.model.canonical import Params
from bert_jax.tasks.task import Encoded, ModelInput, Target
from bert_jax.tokenization import Tokenizer

Method = Literal["PLL-word-l2r", "PLL-original"]
METHODS: tuple[Method, ...] = get_args(Method)
# The two sentences of a minimal pair that differ in one token share the copy in which this token is masked.
_LABELS = 2
# Logits over the vocabulary at every token are large, so fewer texts are processed together.
_CAUSAL_WINDOW = 1024


@dataclass(frozen=True)
class ScoredText:
    """A text, its pieces without special tokens, and the log-probability (nats) of each."""

    text: str
    pieces: tuple[str, ...]
    log_probabilities: tuple[float, ...]

    @property
    def score(self) -> float:
        """The sum of the log-probabilities, in nats."""
        return float(np.sum(self.log_probabilities))


@dataclass
class _Open:
    """A text whose tokens are being scored. ``first``: index of its first scored token in ``ids`` int32[S], with
    special tokens; ``ends`` int64[tokens]: index after the last token that is masked with each."""

    text: str
    ids: np.ndarray
    types: Sequence[int] | np.ndarray
    first: int
    ends: np.ndarray
    values: np.ndarray = field(init=False)
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.ends)
        self.values = np.zeros(self.left)

    def masked(self, token: int, mask_id: int) -> np.ndarray:
        """Return the ids of the copy from which the token of this number is predicted."""
        ids = self.ids.copy()
        ids[self.first + token : self.first + self.ends[token]] = mask_id
        return ids

    def scored(self, tokenizer: Tokenizer) -> ScoredText:
        pieces = tokenizer.pieces(self.ids[self.first : self.first + len(self.ends)].tolist())
        return ScoredText(self.text, tuple(pieces), tuple(self.values.tolist()))


# The number of a token in a text.
_Place = tuple[_Open, int]


def score(
    loaded: Engine, texts: Iterable[str], *, method: Method | None = None, batches: BatchOptions = BatchOptions()
) -> Iterator[ScoredText]:
    """Yield the log-probability of each text, in order; ``texts`` may be endless.

    Args:
        method: how a masked model masks; None: PLL-word-l2r. A causal model has no choice.
        batches: see ``BatchOptions``; ``progress`` counts the copies that were run.

    Raises ``ValueError`` for a model without a language-model head, a text without tokens, a text that exceeds the
    maximum length of the model, and another ``method``.
    """
    if method is not None and method not in METHODS:
        raise ValueError(f"method: {method!r} is not allowed; use one of {', '.join(METHODS)}")
    if loaded.spec.model.is_causal:
        if method is not None:
            raise ValueError(
                f"method: {method!r} is not allowed for {loaded.name}, a causal model without a mask token; omit "
                "method"
            )
        return _causal(loaded, texts, batches)
    if not loaded.spec.heads.mlm:
        raise ValueError(f"{loaded.name}: no language-model head; use a masked or causal language model")
    loaded.need_tokenizer().require_mask(loaded.name)
    return _masked(loaded, texts, method or METHODS[0], batches)


def _checked(loaded: Engine, number: int, text: str, tokens: int, special: int) -> None:
    limit = loaded.spec.max_length
    if not tokens:
        raise ValueError(f"text {number}: {text[:40]!r} has no tokens")
    if tokens + special > limit:
        length = f"{tokens + special} tokens, special tokens included"
        raise ValueError(f"text {number}: {text[:40]!r} has {length}; the maximum is {limit}")


# ------------------------------------------------------------------ masked models


def _masked(loaded: Engine, texts: Iterable[str], method: Method, batches: BatchOptions) -> Iterator[ScoredText]:
    tokenizer, waiting = loaded.need_tokenizer(), deque[_Open]()

    def places() -> Iterator[_Place]:
        numbers = itertools.count()
        for one in Each(checked_texts(texts), lambda text: _opened(loaded, next(numbers), text, method)):
            waiting.append(one)
            yield from ((one, token) for token in range(one.left))

    targets = {"masked": Target("position", np.int32), "labels": Target("unit", np.int32, (_LABELS,))}
    windows = loaded.windows(
        places(), lambda part: copies(part, tokenizer.mask_id), _masked_program(loaded),
        targets=targets, window=WINDOW, batches=batches,
    )  # fmt: skip
    for _, units, outputs in windows:
        for unit, output in zip(units, outputs, strict=True):
            for (one, token), label in unit.extra:
                one.values[token] = output["log_probabilities"][label]
                one.left -= 1
        while waiting and not waiting[0].left:
            yield waiting.popleft().scored(tokenizer)


def _opened(loaded: Engine, number: int, text: str, method: Method) -> _Open:
    tokenizer = loaded.need_tokenizer()
    ids, words = tokenizer.encode_with_words(text)
    _checked(loaded, number, text, len(ids), len(tokenizer.build_inputs([])[0]))
    encoded = loaded.build(ids)
    counting = np.arange(len(ids))
    # Words are consecutive, so their numbers are sorted.
    ends = counting + 1 if method == "PLL-original" else np.searchsorted(words, words, "right")
    return _Open(text, np.array(encoded.ids, np.int32), encoded.types, int(tokenizer.framed), ends)


def copies(places: Sequence[_Place], mask_id: int) -> list[ModelInput]:
    """Return the masked copies of texts from which the tokens at ``places`` are predicted.

    Equal copies are one, for at most ``_LABELS`` labels. ``extra`` of a copy contains its places, each with the
    number of its label."""
    found: list[tuple[ModelInput, list[int]]] = []
    last: dict[tuple[int, bytes], tuple[ModelInput, list[int]]] = {}
    for number, (one, token) in enumerate(places):
        ids, place = one.masked(token, mask_id), one.first + token
        label = int(one.ids[place])
        # With its place, because the text may contain masks itself.
        key = place, ids.tobytes()
        if key not in last or (label not in last[key][1] and len(last[key][1]) == _LABELS):
            last[key] = ModelInput(number, (Encoded(ids, one.types),), {"masked": place}, extra=[]), []
            found.append(last[key])
        unit, labels = last[key]
        labels += [] if label in labels else [label]
        unit.extra.append(((one, token), labels.index(label)))
    return [
        replace(unit, targets={**unit.targets, "labels": np.pad(labels, (0, _LABELS - len(labels)), "edge")})
        for unit, labels in found
    ]


def _masked_program(loaded: Engine) -> Callable[..., DeviceOutputs]:
    """Return the program of ``log_probabilities`` [B, U, L], that of each label at the masked token of each copy;
    only these tokens pass through the output layer."""
    model = loaded.model.clone(heads=HeadsConfig(mlm=True), sentence=None)

    def run(params: Params, batch: dict[str, jax.Array]) -> DeviceOutputs:
        output = bert_output(model.apply({"params": params}, {**batch, "mlm_positions": batch["masked"]}))
        logits_BxUxV = present(output.mlm_logits)
        return {"unit": {"log_probabilities": _log_probabilities(logits_BxUxV, batch["labels"])}}

    return loaded.program("score", run)


def _log_probabilities(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the logarithms of the probabilities of ``labels`` [..., L] by ``logits`` [..., V]."""
    chosen = jnp.take_along_axis(logits, labels, axis=-1)
    return chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


# ------------------------------------------------------------------ causal models


def _causal(loaded: Engine, texts: Iterable[str], batches: BatchOptions) -> Iterator[ScoredText]:
    tokenizer, model = loaded.need_tokenizer(), with_output_layer(loaded)

    def featurize(part: list[tuple[int, str]]) -> list[ModelInput]:
        units = []
        for (number, text), ids in zip(part, tokenizer.encode_batch([text for _, text in part]), strict=True):
            _checked(loaded, number, text, len(ids), 1)
            units.append(ModelInput(number, (Encoded([tokenizer.cls_id, *ids], [0] * (len(ids) + 1)),)))
        return units

    def run(params: Params, batch: dict[str, jax.Array]) -> DeviceOutputs:
        logits_BxSxV = present(bert_output(model.apply({"params": params}, batch)).mlm_logits)
        next_BxSx1 = jnp.roll(batch["input_ids"], -1, axis=1)[..., None]
        # The value of the last token of a text is meaningless.
        return {"token": {"log_probabilities": _log_probabilities(logits_BxSxV, next_BxSx1)[..., 0]}}

    def scored(text: str, unit: ModelInput, output: Outputs) -> ScoredText:
        pieces = tokenizer.pieces(unit.sequences[0].ids[1:])
        return ScoredText(text, tuple(pieces), tuple(output["log_probabilities"][:-1].astype(np.float64).tolist()))

    windows = loaded.windows(
        enumerate(checked_texts(texts)),
        featurize,
        loaded.program("score", run),
        window=_CAUSAL_WINDOW,
        batches=batches,
    )
    return (
        scored(text, unit, output)
        for part, units, outputs in windows
        for (_, text), unit, output in zip(part, units, outputs, strict=True)
    )


def with_output_layer(loaded: Engine) -> BertModel:
    """Return the network of a causal model with its output layer. A causal model without heads has the word
    embeddings as its output layer (``objective.name causal_lm``). Raises ``ValueError`` for a model with other
    heads only."""
    model, heads = loaded.spec.model, loaded.spec.heads
    if not heads.mlm and heads.present():
        held = ", ".join(heads.present())
        raise ValueError(f"{loaded.name}: no language-model head, only {held}; use a model that has one")
    config = model if heads.mlm else model.with_output_layer_only()
    return loaded.model.clone(config=config, heads=HeadsConfig(mlm=True), sentence=None)
