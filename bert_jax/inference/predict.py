"""What a model's task head says of texts: classes, values, tags, answers, choices."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bert_jax.inference.batching import Encoded, Place, Progress
from bert_jax.inference.engine import Engine
from bert_jax.inference.spans import SpanPiece, best_answer, encode_spans

TASKS = ("sequence", "token", "span", "choice")
# Token logits are kept for every token of a window.
_WINDOW = 1024
_FIELDS = {
    "sequence": ("sequence_logits",),
    "token": ("token_logits",),
    "span": ("start_logits", "end_logits"),
    "choice": ("choice_logits",),
}


def predict(
    loaded: Engine,
    texts: Iterable[Any],
    *,
    task: str | None = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> Iterator[dict[str, Any]]:
    """One JSON-able object per input, in order; ``texts`` may be endless.

    An input is a text, a pair (text, text_pair), or an object with ``text`` and ``text_pair`` (of a span head the
    question and the passage) or ``choices``. By head:

    * sequence: ``label``, ``score`` and ``probabilities`` by label (softmax); with several labels per text
      ``labels`` (those of at least 0.5) and ``probabilities`` (sigmoid each); regression: ``value``.
    * token: ``tokens``, one per word: ``text``, ``start``, ``end``, ``label``, ``score``, from its first piece.
    * span: ``answer``, ``start``, ``end`` (characters of the passage), ``score``, ``no_answer_score``.
    * choice: ``choice`` (from 0) and ``probabilities``.

    ``truncated`` is true where the text was longer than the model. Raises ``ValueError`` for a model without a task
    head, one with several where ``task`` does not choose, and inputs of another form.
    """
    task = _task(loaded, task)
    model, fields = loaded.model.clone(sentence=None), _FIELDS[task]

    def run(params: Any, batch: dict[str, jax.Array]) -> list[jax.Array]:
        output = model.apply({"params": params}, batch)
        return [getattr(output, field) for field in fields]

    def take(arrays: Sequence[np.ndarray], place: Place, encoded: Encoded) -> tuple[Any, ...]:
        per_token = task in ("token", "span")
        cut = [values[place.row, place.tokens if per_token else place.slot] for values in arrays]
        return (*(values.astype(np.float64) for values in cut), encoded)

    def encode(part: list[Any]) -> list[list[Encoded]]:
        return [_ENCODERS[task](loaded, _parsed(one)) for one in part]

    results = loaded.stream(
        texts, encode, loaded.program(("predict", task), run), take,
        window=_WINDOW, batch_tokens=batch_tokens, progress=progress,
    )  # fmt: skip
    return (_FINISHERS[task](loaded, pieces) for pieces in results)


def _task(loaded: Engine, task: str | None) -> str:
    there = [head for head in loaded.spec.heads.present() if head in TASKS]
    if not there:
        heads = ", ".join(loaded.spec.heads.present()) or "none"
        raise ValueError(
            f"{loaded.name}: no task head there (heads: {heads}); fine-tune it, or use embed or fill-mask"
        )
    if task is None and len(there) > 1:
        raise ValueError(f"{loaded.name}: has several task heads; choose one: {', '.join(there)}")
    if task is not None and task not in there:
        raise ValueError(f"{loaded.name}: has no {task} head; it has: {', '.join(there)}")
    return task or there[0]


def _parsed(value: Any) -> tuple[str, str | None, tuple[str, ...]]:
    """(text, text_pair or None, choices) of an input."""
    if isinstance(value, str):
        return value, None, ()
    if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(text, str) for text in value):
        return value[0], value[1], ()
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        pair, choices = value.get("text_pair"), value.get("choices", ())
        texts = isinstance(choices, list | tuple) and all(isinstance(choice, str) for choice in choices)
        if isinstance(pair, str | None) and texts and not (pair and choices):
            return value["text"], pair, tuple(choices)
    raise ValueError(
        f"{str(value)[:80]!r} is no input; allowed: a text, or an object with text and text_pair or choices"
    )


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _rounded(value: float) -> float:
    return round(float(value), 6)


def _cut(result: dict[str, Any], truncated: bool) -> dict[str, Any]:
    return {**result, "truncated": True} if truncated else result


# ------------------------------------------------------------------ the heads


def _encode_sequence(loaded: Engine, value: tuple[str, str | None, tuple[str, ...]]) -> list[Encoded]:
    text, pair, choices = value
    if choices:
        raise ValueError(f"{text[:40]!r}: choices need a multiple-choice head, and the model has none")
    tokenizer = loaded.need_tokenizer()
    a, b = tokenizer.encode(text), None if pair is None else tokenizer.encode(pair)
    encoded = loaded.build(a, b)
    special = int(tokenizer.special[np.asarray(encoded.ids)].sum())
    return [Encoded(encoded.ids, encoded.types, len(encoded.ids) - special < len(a) + len(b or ()))]


def _finish_sequence(loaded: Engine, pieces: list[tuple[Any, ...]]) -> dict[str, Any]:
    ((logits, encoded),) = pieces
    heads, truncated = loaded.spec.heads, encoded.extra
    if heads.problem == "regression":
        return _cut({"value": _rounded(logits[0])}, truncated)
    return class_answer(heads.sequence_labels, logits, heads.problem == "multi_label", truncated)


def class_answer(labels: Sequence[str], logits: np.ndarray, several: bool, truncated: bool) -> dict[str, Any]:
    """What is said of one text by the logits [N] of its classes, one of which holds, or ``several`` or none."""
    chances = 1 / (1 + np.exp(-logits)) if several else _softmax(logits)
    named = {label: _rounded(p) for label, p in zip(labels, chances, strict=True)}
    if several:
        chosen = [label for label, p in zip(labels, chances, strict=True) if p >= 0.5]
        return _cut({"labels": chosen, "probabilities": named}, truncated)
    best = int(chances.argmax())
    return _cut({"label": labels[best], "score": _rounded(chances[best]), "probabilities": named}, truncated)


def _encode_tokens(loaded: Engine, value: tuple[str, str | None, tuple[str, ...]]) -> list[Encoded]:
    text, pair, choices = value
    if pair is not None or choices:
        raise ValueError(f"{text[:40]!r}: a tagging model takes one text, without text_pair or choices")
    ids, offsets = loaded.need_tokenizer().encode_with_offsets(text)
    return [loaded.build(ids, extra=(text, ids, offsets))]


def _finish_tokens(loaded: Engine, pieces: list[tuple[Any, ...]]) -> dict[str, Any]:
    ((logits, encoded),) = pieces
    text, ids, offsets = encoded.extra
    continues = loaded.need_tokenizer().continuation
    kept = len(encoded.ids) - 2
    words: list[dict[str, Any]] = []
    for i in range(kept):
        start, end = offsets[i]
        # A piece that continues the word before it, where there is one.
        if continues[ids[i]] and words:
            words[-1]["end"] = end
            continue
        chances = _softmax(logits[1 + i])
        best = int(chances.argmax())
        label = loaded.spec.heads.token_labels[best]
        words.append({"text": "", "start": start, "end": end, "label": label, "score": _rounded(chances[best])})
    for word in words:
        word["text"] = text[word["start"] : word["end"]]
    return _cut({"tokens": words}, kept < len(ids))


def _encode_span(loaded: Engine, value: tuple[str, str | None, tuple[str, ...]]) -> list[Encoded]:
    question, passage, _ = value
    if passage is None:
        raise ValueError(f"{question[:40]!r}: a span model takes the question as text and the passage as text_pair")
    return encode_spans(loaded, question, passage)


def _finish_span(loaded: Engine, pieces: list[tuple[Any, ...]]) -> dict[str, Any]:
    return best_answer([SpanPiece(starts, ends, encoded.extra) for starts, ends, encoded in pieces])


def _encode_choices(loaded: Engine, value: tuple[str, str | None, tuple[str, ...]]) -> list[Encoded]:
    text, _, choices = value
    if not choices:
        raise ValueError(f"{text[:40]!r}: a multiple-choice model takes an object with text and choices")
    return loaded.encode([(text, choice) for choice in choices])


def _finish_choices(loaded: Engine, pieces: list[tuple[Any, ...]]) -> dict[str, Any]:
    chances = _softmax(np.stack([logit for logit, _ in pieces]))
    return {"choice": int(chances.argmax()), "probabilities": [_rounded(p) for p in chances]}


_ENCODERS = {
    "sequence": _encode_sequence, "token": _encode_tokens, "span": _encode_span, "choice": _encode_choices
}  # fmt: skip
_FINISHERS = {
    "sequence": _finish_sequence, "token": _finish_tokens, "span": _finish_span, "choice": _finish_choices
}  # fmt: skip
