"""Predictions of the task of a model: classes, values, tags, answers, choices, cosines of pairs."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import jax
import numpy as np
import scipy

from bert_jax.batch import Batch
from bert_jax.config.spec import TaskKind
from bert_jax.inference.batching import HIDDEN, BatchOptions, DeviceOutputs, Function, Outputs, Stages, by_level
from bert_jax.inference.engine import Engine
from bert_jax.io.text_lines import Each
from bert_jax.json_values import Json
from bert_jax.model import BertOutput
from bert_jax.model.bert import bert_output
from bert_jax.model.canonical import Params
from bert_jax.model.pooling import ACTIVATIONS
from bert_jax.records import Record
from bert_jax.tasks.multiple_choice import choice_labels
from bert_jax.tasks.registry import task_of_kind
from bert_jax.tasks.tagging import window_input
from bert_jax.tasks.task import Encoded, Level, ModelInput, Prediction, Task, Token
from bert_jax.tasks.word_windows import WordWindow

HEADS = ("sequence", "token", "span", "choice")
_KINDS: dict[str, TaskKind] = {
    "token": "tagging", "span": "qa", "choice": "choice", "joint": "joint", "sentence": "sentence",
    "translation": "translation",
}  # fmt: skip
_PROBLEMS: dict[str, TaskKind] = {
    "single_label": "classification", "multi_label": "multi_label", "regression": "regression",
}  # fmt: skip
_TAGGING = ("token", "joint")
# Number of inputs processed together; the outputs of all their tokens are in memory.
_WINDOW = 1024
# The same with stages, which keep the hidden states of all tokens between them.
EXIT_WINDOW = 256


def predict(
    loaded: Engine,
    texts: Iterable[Json],
    *,
    task: str | None = None,
    exit_entropy: float | None = None,
    batches: BatchOptions = BatchOptions(),
) -> Iterator[Prediction]:
    """Yield one JSON-serializable object per input, in order; ``texts`` may be endless.

    An input is a text, a pair (text, text_pair), or an object with ``text`` and optionally ``text_pair`` (question
    and passage for a span head), ``negative`` (of a triplet) or ``choices``, or with ``words`` for a tagging model.
    Texts are converted and outputs decoded as in the run that trained the model, whose settings are stored with it
    (``ModelSpec.settings_of``), and ``Task.decode`` defines the predictions:

    * sequence: ``label``, ``score`` and ``probabilities`` by label (softmax). Multi-label: ``labels`` (those with
      a probability of at least 0.5) and ``probabilities`` (a sigmoid for each label). Regression: ``value``.
    * token: ``tokens``, one per word: ``text``, ``label`` and ``score`` of its first piece (with a CRF the label on
      the best path, without ``score``). The tokenizer splits a text into words and punctuation, with ``start`` and
      ``end``; a text is truncated. ``words`` that exceed the maximum length are split into windows. If the task has
      document context, consecutive ``words`` with equal ``document`` (or without one) are a document.
    * sequence and token of one run: ``label`` and the other fields of the text, and ``tokens``.
    * span: ``answer`` (empty: no answer), ``start``, ``end`` (character offsets in the passage), ``score``,
      ``no_answer_score``.
    * choice: ``choice`` (an index, from 0) and ``probabilities``.
    * translation: ``label``, the translation.
    * pairs of texts, whose vectors are compared: ``cosine`` and, with a classifier of pairs, the fields of classes.

    ``truncated`` is true for a text that was truncated to the maximum length.

    ``task``: the head to use if the model has several; None: the task of the run, or the single head.
    ``exit_entropy`` (nats): a prediction stops at the first layer with a head whose probabilities have a lower
    entropy (Xin et al. 2020); ``layers`` in the prediction is the number of layers that ran. Each stage runs on new
    batches of the texts that are left.

    Raises ``ValueError`` for a model without a task head, several task heads without ``task``, inputs that the head
    does not accept, and ``exit_entropy`` below 0 or with a model whose lower layers have no heads.
    """
    head = task_head(loaded, task)
    decoder = task_of(loaded, head)
    run = task_program(loaded, decoder, head, exit_entropy)
    length = decoder.settings.max_length if decoder.settings.document_context else 0
    size = _WINDOW if exit_entropy is None else EXIT_WINDOW
    chunks = _chunks(Each(texts, lambda value: _input(decoder, head, value)), size, length)
    results = loaded.windows(
        chunks, lambda part: _units(decoder, part[0]), run,
        sequences=decoder.sequences_of, targets=decoder.targets, window=1, batches=batches,
    )  # fmt: skip

    def decoded() -> Iterator[Prediction]:
        for (chunk,), units, outputs in results:
            predictions = decoder.decode([one.record for one in chunk.own], units, outputs)
            if exit_entropy is not None:
                for unit, layers in zip(units, layers_run(loaded, outputs), strict=True):
                    predictions[unit.record]["layers"] = layers
            yield from (_finished(prediction, one) for prediction, one in zip(predictions, chunk.own, strict=True))

    return decoded()


def task_program(loaded: Engine, task: Task, head: str, exit_entropy: float | None = None) -> Function | Stages:
    """Return the program that computes the outputs of ``task``, or its stages, which end at the layers with a head
    and at the last layer; see :func:`predict`."""
    model = loaded.model if head == "sentence" else loaded.model.clone(sentence=None)

    def run(params: Params, batch: Batch) -> DeviceOutputs:
        output = bert_output(model.apply({"params": params}, batch))
        return by_level(_activated(loaded, task.outputs(output, batch)))

    if exit_entropy is None:
        return loaded.program(("predict", head), run)
    if head != "sequence":
        raise ValueError(f"exit_entropy requires the sequence head, not the {head} head")
    if not loaded.spec.heads.exits:
        remedy = "fine-tune it with loss.layers and loss.layer_heads own"
        raise ValueError(f"{loaded.name}: the lower layers have no heads for early exit; {remedy}")
    if not exit_entropy >= 0:
        raise ValueError(f"exit_entropy: {exit_entropy} is not allowed; use 0 or more, in nats")
    ends = _ends(loaded)

    def stage(first: int, last: int) -> Function:
        def run(params: Params, batch: Batch) -> DeviceOutputs:
            hidden, logits = model.apply({"params": params}, batch, first, last, method="run_layers")
            assert isinstance(logits, jax.Array)
            output = BertOutput(sequence_output=hidden, sequence_logits=logits)
            outputs = _activated(loaded, task.outputs(output, batch))
            return by_level(outputs if last == ends[-1] else {**outputs, HIDDEN: ("token", hidden)})

        return loaded.program(("stage", first, last), run)

    programs = [stage(first, last) for first, last in zip((0, *ends), ends, strict=False)]
    return Stages(
        programs, lambda outputs: scipy.special.entr(scipy.special.softmax(outputs["logits"])).sum() < exit_entropy
    )


def _activated(
    loaded: Engine, outputs: Mapping[str, tuple[Level, jax.Array]]
) -> dict[str, tuple[Level, jax.Array]]:
    """Return ``outputs`` with the value of a regression head passed through the activation of the model."""
    heads = loaded.spec.heads
    if not heads.activation or heads.problem != "regression" or "logits" not in outputs:
        return dict(outputs)
    level, values = outputs["logits"]
    return {**outputs, "logits": (level, ACTIVATIONS[heads.activation](values))}


def layers_run(loaded: Engine, outputs: Sequence[Outputs]) -> list[int]:
    """Return the number of layers through which each input passed, for the outputs of the stages of
    :func:`task_program`."""
    ends = _ends(loaded)
    return [ends[int(one["stage"])] for one in outputs]


def _ends(loaded: Engine) -> tuple[int, ...]:
    """Return the layers after which a prediction may stop, counted from 1."""
    return (*loaded.spec.heads.exits, loaded.spec.model.num_layers)


def task_head(loaded: Engine, task: str | None = None) -> str:
    """Return the name of the task head ``task``. None: the single head; ``joint`` for a model whose run predicted
    classes and tags together; ``sentence`` if the run predicted pairs of texts. Raises ``ValueError`` if the model
    has no such head, or several."""
    spec = loaded.spec
    present = [head for head in spec.heads.present() if head in HEADS]
    kind = spec.task.kind if spec.task is not None else "sentence" if spec.heads.pair_labels else ""
    if task is None and kind == "joint" and present == ["sequence", "token"]:
        return kind
    if task is None and kind == "sentence" and spec.sentence is not None and not present:
        return kind
    if task is None and kind == "translation":
        return kind
    if not present:
        heads = ", ".join(loaded.spec.heads.present()) or "none"
        raise ValueError(
            f"{loaded.name}: no task head (heads: {heads}); fine-tune the model, or use embed or fill-mask"
        )
    if task is None and len(present) > 1:
        raise ValueError(f"{loaded.name}: several task heads; set task to one of {', '.join(present)}")
    if task is not None and task not in present:
        raise ValueError(f"{loaded.name}: the model has no {task} head; set task to one of {', '.join(present)}")
    return task or present[0]


def task_of(loaded: Engine, head: str, records: Sequence[Record] = (), max_length: int | None = None) -> Task:
    """Return the task of a head (``sentence``: of vectors of texts) with the settings of the model.

    ``records``: examples that the task is to score or to learn from; the number of choices is theirs.
    ``max_length``: the longest input; None: that of the settings. Raises ``ValueError`` if the records have
    different numbers of choices.
    """
    kind = _PROBLEMS[loaded.spec.heads.problem] if head == "sequence" else _KINDS[head]
    settings = loaded.spec.settings_of(kind)
    if max_length is not None:
        settings = dataclasses.replace(settings, max_length=max_length)
    if kind == "choice" and records:
        settings = dataclasses.replace(settings, labels=choice_labels(records))
    return task_of_kind(kind)(settings, loaded.need_tokenizer(), records)


# ------------------------------------------------------------------ inputs


@dataclass(frozen=True)
class _Input:
    """A record and, for a text that the tokenizer splits into words, its model input and the character offsets
    of each word."""

    record: Record
    units: Sequence[ModelInput] = ()
    places: Sequence[tuple[int, int]] | None = None
    truncated: bool = False


@dataclass(frozen=True)
class _Chunk:
    """Inputs that are predicted together, and inputs before and after them, which may be their context."""

    before: Sequence[_Input]
    own: Sequence[_Input]
    after: Sequence[_Input]


def _chunks(inputs: Iterator[_Input], size: int, context: int) -> Iterator[_Chunk]:
    """Yield the inputs in chunks of ``size``, each with inputs around it that have ``context`` words or more."""
    before, ahead = list[_Input](), list[_Input]()
    while own := [*itertools.islice(itertools.chain(ahead, inputs), size)]:
        ahead = ahead[len(own) :]
        words = sum(len(one.record.words) for one in ahead)
        while words < context and (one := next(inputs, None)) is not None:
            ahead.append(one)
            words += len(one.record.words)
        yield _Chunk(before, own, ahead)
        before = _last([*before, *own], context)


def _last(inputs: Sequence[_Input], context: int) -> list[_Input]:
    """Return the last inputs, which have ``context`` words or more in total, or all."""
    words, first = 0, len(inputs)
    while first and words < context:
        first -= 1
        words += len(inputs[first].record.words)
    return [*inputs[first:]]


def _units(decoder: Task, chunk: _Chunk) -> list[ModelInput]:
    """Return the model inputs of the own inputs of ``chunk``, in order."""
    around = [*chunk.before, *chunk.own, *chunk.after]
    converted = [i for i, one in enumerate(around) if not one.units]
    units = [[*one.units] for one in around]
    for unit in decoder.featurize([around[i].record for i in converted], training=False):
        units[converted[unit.record]].append(unit)
    first = len(chunk.before)
    return [dataclasses.replace(unit, record=i) for i in range(len(chunk.own)) for unit in units[first + i]]


def _input(decoder: Task, head: str, value: Json) -> _Input:
    """Return ``value`` as an input of the head. Raises ``ValueError`` for a value that the head does not accept."""
    record = _record(value)
    start = record.source
    if isinstance(value, Mapping) and "words" in value and "text" not in value:
        if head not in _TAGGING:
            raise ValueError(f"{start}: words require a tagging model; give a text")
        return _Input(record)
    if head in _TAGGING:
        if record.text_pair is not None or record.choices:
            raise ValueError(f"{start}: a tagging model accepts one text, without text_pair or choices")
        return _tagged_text(decoder, record.text)
    if head == "sequence" and record.choices:
        raise ValueError(f"{start}: choices require a multiple-choice head, and the model has none")
    if head == "sequence" and decoder.settings.pair_order == "both" and record.text_pair is None:
        raise ValueError(f"{start}: the model reads both orders of a pair; give text and text_pair")
    if head == "sentence" and record.text_pair is None:
        raise ValueError(f"{start}: the model compares two texts; give text and text_pair, or use embed")
    if head == "span" and record.text_pair is None:
        raise ValueError(f"{start}: a span model requires the question as text and the passage as text_pair")
    if head == "translation" and (record.text_pair is not None or record.choices):
        raise ValueError(f"{start}: a translation model reads one text, without text_pair or choices")
    if head == "choice" and not record.choices:
        raise ValueError(f"{start}: a multiple-choice model requires an object with text and choices")
    return _Input(record)


def _record(value: Json) -> Record:
    if isinstance(value, str):
        return Record(id="", source=f"{value[:40]!r}", text=value)
    if _are_texts(value) and len(value) == 2:
        return Record(id="", source=f"{value[0][:40]!r}", text=value[0], text_pair=value[1])
    if isinstance(value, Mapping):
        text, words = value.get("text"), value.get("words")
        if _are_texts(words) and "text" not in value:
            document = f"document {value.get('group', value.get('document'))}"
            return Record(id="", source=f"{' '.join(words)[:40]!r}", words=tuple(words), group=document)
        pair, choices = value.get("text_pair"), value.get("choices", ())
        negatives = value.get("negative", value.get("negatives", ()))
        negatives = (negatives,) if isinstance(negatives, str) else negatives
        if (
            isinstance(text, str)
            and isinstance(pair, str | None)
            and not (pair and choices)
            and _are_texts(choices)
            and _are_texts(negatives)
        ):
            return Record(
                id="", source=f"{text[:40]!r}", text=text, text_pair=pair, choices=tuple(choices),
                negatives=tuple(negatives),
            )  # fmt: skip
    remedy = "give a string, or an object with words, or with text and text_pair or choices"
    raise ValueError(f"{str(value)[:80]!r} is not a valid input; {remedy}")


def _are_texts(value: Json) -> TypeGuard[Sequence[str]]:
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


def _tagged_text(decoder: Task, text: str) -> _Input:
    tokenizer = decoder.tokenizer
    all_ids, all_offsets = tokenizer.encode_with_offsets(text)
    encoded = Encoded(*tokenizer.build_inputs(all_ids, None, decoder.settings.max_length))
    first = int(tokenizer.framed)  # the special pieces before and after the text
    kept, whole = len(encoded.ids) - 2 * first, len(all_ids)
    ids, offsets = tokenizer.cut(all_ids, kept), tokenizer.cut(all_offsets, kept)
    # A piece that continues the word before it does not begin a word, unless it is the first piece.
    begins = [i for i in range(kept) if not i or not tokenizer.continuation[ids[i]]]
    ends = [*begins[1:], kept][: len(begins)]
    places = [(offsets[i][0], offsets[after - 1][1]) for i, after in zip(begins, ends, strict=True)]
    words = tuple(text[start:end] for start, end in places)
    window = WordWindow(encoded, np.arange(len(words)), first + np.array(begins, np.int64))
    unit = window_input(0, window, np.full(len(words), -1, np.int32))
    return _Input(Record(id="", source="", words=words), (unit,), places, kept < whole)


def _finished(prediction: Prediction, one: _Input) -> Prediction:
    """Return ``prediction`` with the character offsets (``start``, ``end``) of each word of a text, and without
    ``rank``, which depends on the other inputs."""
    prediction.pop("rank", None)
    if one.places is None:
        return prediction
    tokens: list[Token] = [
        {"text": token.pop("text"), "start": start, "end": end, **token}
        for token, (start, end) in zip(prediction["tokens"], one.places, strict=True)
    ]
    return {**prediction, "tokens": tokens, **({"truncated": True} if one.truncated else {})}
