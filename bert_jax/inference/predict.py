"""What a model's task head says of texts: classes, values, tags, answers, choices."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.inference.batching import Encoded, Place, Progress
from bert_jax.inference.engine import Engine
from bert_jax.inference.spans import SpanPiece, best_answer, encode_spans
from bert_jax.inference.words import Window, word_windows
from bert_jax.records import Record

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
    question and the passage) or ``choices``, or with ``words``, which a tagging model was trained on. By head:

    * sequence: ``label``, ``score`` and ``probabilities`` by label (softmax); with several labels per text
      ``labels`` (those of at least 0.5) and ``probabilities`` (sigmoid each); regression: ``value``.
    * token: ``tokens``, one per word: ``text``, ``label`` and ``score``, from its first piece (with a CRF those of
      the best path, without ``score``). Of a text the words are the tokenizer's, which parts punctuation, and have
      ``start`` and ``end``; ``words`` may be longer than the model, in windows as in fine-tuning.
    * span: ``answer`` (of at most 30 tokens), ``start``, ``end`` (characters of the passage), ``score``,
      ``no_answer_score``.
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
        return [_encoded(loaded, task, _parsed(one)) for one in part]

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


class _Input(NamedTuple):
    text: str
    pair: str | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] | None = None


def _parsed(value: Any) -> _Input:
    if isinstance(value, str):
        return _Input(value)
    if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(text, str) for text in value):
        return _Input(value[0], value[1])
    if isinstance(value, Mapping) and _are_texts(value.get("words")) and "text" not in value:
        return _Input(" ".join(value["words"]), words=tuple(value["words"]))
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        pair, choices = value.get("text_pair"), value.get("choices", ())
        if isinstance(pair, str | None) and _are_texts(choices) and not (pair and choices):
            return _Input(value["text"], pair, tuple(choices))
    raise ValueError(
        f"{str(value)[:80]!r} is no input; allowed: a text, or an object with text and text_pair or choices, or "
        "with words"
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


def _encoded(loaded: Engine, task: str, given: _Input) -> list[Encoded]:
    if given.words is not None and task != "token":
        raise ValueError(f"{given.text[:40]!r}: words need a tagging model; give a text")
    return _ENCODERS[task](loaded, given)


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _rounded(value: float) -> float:
    return round(float(value), 6)


def _cut(result: dict[str, Any], truncated: bool) -> dict[str, Any]:
    return {**result, "truncated": True} if truncated else result


# ------------------------------------------------------------------ the heads


def _encode_sequence(loaded: Engine, given: _Input) -> list[Encoded]:
    text, pair, choices, _ = given
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


class _Text(NamedTuple):
    """What a tagging model sees of a text: its pieces, and where they stand."""

    text: str
    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]


class _Words(NamedTuple):
    """A window of words."""

    words: tuple[str, ...]
    window: Window


def _encode_tokens(loaded: Engine, given: _Input) -> list[Encoded]:
    tokenizer = loaded.need_tokenizer()
    if given.words is not None:
        record = Record(id="", source="", words=given.words)
        (windows,) = word_windows([record], tokenizer, loaded.spec.max_length, context=False)
        return [dataclasses.replace(window.encoded, extra=_Words(given.words, window)) for window in windows]
    if given.pair is not None or given.choices:
        raise ValueError(f"{given.text[:40]!r}: a tagging model takes one text, without text_pair or choices")
    ids, offsets = tokenizer.encode_with_offsets(given.text)
    return [loaded.build(ids, extra=_Text(given.text, ids, offsets))]


def _finish_tokens(loaded: Engine, pieces: list[tuple[Any, ...]]) -> dict[str, Any]:
    if isinstance(pieces[0][1].extra, _Words):
        tagged: dict[int, dict[str, Any]] = {}
        for logits, encoded in pieces:
            words, window = encoded.extra
            tagged |= zip(window.words.tolist(), _tags(loaded, logits[window.tokens]), strict=True)
        return {"tokens": [{"text": word, **tagged[i]} for i, word in enumerate(words)]}
    ((logits, encoded),) = pieces
    text, ids, offsets = encoded.extra
    continues = loaded.need_tokenizer().continuation
    kept = len(encoded.ids) - 2
    # A piece that continues the word before it, where there is one.
    begins = [i for i in range(kept) if not i or not continues[ids[i]]]
    ends, found = [*begins[1:], kept][: len(begins)], []
    for i, after, tag in zip(begins, ends, _tags(loaded, logits[1 + np.array(begins, int)]), strict=True):
        start, end = offsets[i][0], offsets[after - 1][1]
        found.append({"text": text[start:end], "start": start, "end": end, **tag})
    return _cut({"tokens": found}, kept < len(ids))


def _tags(loaded: Engine, logits_TxL: np.ndarray) -> list[dict[str, Any]]:
    """``label`` of each token, and its probability where no CRF has a say."""
    heads = loaded.spec.heads
    if heads.crf and len(logits_TxL):
        crf = {name: np.asarray(values, np.float64) for name, values in loaded.params["crf"].items()}
        path = _best_path(logits_TxL, crf["transitions"], crf["start"], crf["end"])
        return [{"label": heads.token_labels[i]} for i in path]
    return [
        {"label": heads.token_labels[int(chances.argmax())], "score": _rounded(chances.max())}
        for chances in map(_softmax, logits_TxL)
    ]


def _best_path(emissions: np.ndarray, transitions: np.ndarray, start: np.ndarray, end: np.ndarray) -> list[int]:
    """The tags of highest score of a chain (Viterbi); emissions [T, L], T > 0."""
    best, origins = start + emissions[0], []
    for emission in emissions[1:]:
        scores = best[:, None] + transitions
        origins.append(scores.argmax(axis=0))
        best = scores.max(axis=0) + emission
    path = [int((best + end).argmax())]
    for origin in reversed(origins):
        path.append(int(origin[path[-1]]))
    return path[::-1]


def _encode_span(loaded: Engine, given: _Input) -> list[Encoded]:
    question, passage = given.text, given.pair
    if passage is None:
        raise ValueError(f"{question[:40]!r}: a span model takes the question as text and the passage as text_pair")
    return encode_spans(loaded, question, passage)


def _finish_span(loaded: Engine, pieces: list[tuple[Any, ...]]) -> dict[str, Any]:
    return best_answer([SpanPiece(starts, ends, encoded.extra) for starts, ends, encoded in pieces])


def _encode_choices(loaded: Engine, given: _Input) -> list[Encoded]:
    text, choices = given.text, given.choices
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
