"""Predictions of the task head of a model: classes, values, tags, answers, choices."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import jax
import numpy as np
from scipy.special import entr, softmax

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.task import PairOrder
from bert_jax.inference.batching import HIDDEN, Outputs, RunOptions, Stages, by_level
from bert_jax.inference.engine import Engine
from bert_jax.model import BertOutput
from bert_jax.model.pooling import ACTIVATIONS
from bert_jax.records import Record
from bert_jax.tasks.registry import TASKS
from bert_jax.tasks.tagging import window_input
from bert_jax.tasks.task import Level, ModelInput, Task
from bert_jax.tasks.words import Window

HEADS = ("sequence", "token", "span", "choice")
_KINDS = {"token": "tagging", "span": "qa", "choice": "choice", "sentence": "sentence"}
_PROBLEMS = {"single_label": "classification", "multi_label": "multi_label", "regression": "regression"}
# Number of inputs processed together; the outputs of all their tokens are in memory.
_WINDOW = 1024
# The same with stages, which keep the hidden states of all tokens between them.
EXIT_WINDOW = 256


def predict(
    loaded: Engine,
    texts: Iterable[Any],
    *,
    task: str | None = None,
    exit_entropy: float | None = None,
    **options: Unpack[RunOptions],
) -> Iterator[dict[str, Any]]:
    """Yield one JSON-serializable object per input, in order; ``texts`` may be endless.

    An input is a text, a pair (text, text_pair), or an object with ``text`` and optionally ``text_pair`` (question
    and passage for a span head) or ``choices``, or with ``words`` for a tagging model. Predictions are those of
    ``Task.decode`` for the head, as in fine-tuning:

    * sequence: ``label``, ``score`` and ``probabilities`` by label (softmax). Multi-label: ``labels`` (those with
      a probability of at least 0.5) and ``probabilities`` (a sigmoid for each label). Regression: ``value``.
    * token: ``tokens``, one per word: ``text``, ``label`` and ``score`` of its first piece (with a CRF the label on
      the best path, without ``score``). The tokenizer splits a text into words and punctuation, with ``start`` and
      ``end``. ``words`` that exceed the maximum length of the model are split into windows as in fine-tuning.
    * span: ``answer`` (of at most 30 tokens), ``start``, ``end`` (character offsets in the passage), ``score``,
      ``no_answer_score``.
    * choice: ``choice`` (an index, from 0) and ``probabilities``.

    ``truncated`` is true for a text that was truncated to the maximum length of the model.

    ``exit_entropy`` (nats): a prediction stops at the first layer with a head whose probabilities have a lower
    entropy (Xin et al. 2020); ``layers`` in the prediction is the number of layers that ran. Each stage runs on new
    batches of the texts that are left.

    Raises ``ValueError`` for a model without a task head, several task heads without ``task``, inputs that the head
    does not accept, and ``exit_entropy`` below 0 or with a model whose lower layers have no heads.
    """
    head = task_head(loaded, task)
    decoder = task_of(loaded, head)
    run = task_program(loaded, decoder, head, exit_entropy)

    def featurize(part: list[_Input]) -> list[ModelInput]:
        if head != "token":
            return decoder.featurize([one.record for one in part], training=False)
        return [
            dataclasses.replace(unit, record=i)
            for i, one in enumerate(part)
            for unit in one.units or decoder.featurize([one.record], training=False)
        ]

    results = loaded.windows(
        (_input(loaded, head, value) for value in texts), featurize, run,
        sequences=decoder.sequences_of, targets=decoder.targets,
        window=_WINDOW if exit_entropy is None else EXIT_WINDOW, **options,
    )  # fmt: skip

    def decoded() -> Iterator[dict[str, Any]]:
        for part, units, outputs in results:
            predictions = decoder.decode([one.record for one in part], units, outputs)
            if exit_entropy is not None:
                for unit, layers in zip(units, layers_run(loaded, outputs), strict=True):
                    predictions[unit.record]["layers"] = layers
            yield from (_with_places(prediction, one) for prediction, one in zip(predictions, part, strict=True))

    return decoded()


def task_program(loaded: Engine, task: Task, head: str, exit_entropy: float | None = None) -> Any:
    """Return the program that computes the outputs of ``task``, or its stages, which end at the layers with a head
    and at the last layer; see :func:`predict`."""
    model = loaded.model.clone(sentence=None)

    def run(params: Any, batch: dict[str, jax.Array]) -> Any:
        return by_level(_activated(loaded, task.outputs(model.apply({"params": params}, batch), batch)))

    if exit_entropy is None:
        return loaded.program(("predict", head), run)
    if head != "sequence":
        raise ValueError(f"exit_entropy: not allowed with the {head} head; allowed with the sequence head")
    if not loaded.spec.heads.exits:
        remedy = "fine-tune it with loss.layers and loss.layer_heads own"
        raise ValueError(f"{loaded.name}: the lower layers have no heads for early exit; {remedy}")
    if not exit_entropy >= 0:
        raise ValueError(f"exit_entropy: {exit_entropy} is not allowed; allowed: from 0, in nats")
    ends = _ends(loaded)

    def stage(first: int, last: int) -> Any:
        def run(params: Any, batch: dict[str, jax.Array]) -> Any:
            hidden, logits = model.apply({"params": params}, batch, first, last, method="run_layers")
            output = BertOutput(sequence_output=hidden, sequence_logits=logits)
            outputs = _activated(loaded, task.outputs(output, batch))
            return by_level(outputs if last == ends[-1] else {**outputs, HIDDEN: ("token", hidden)})

        return loaded.program(("stage", first, last), run)

    programs = [stage(first, last) for first, last in zip((0, *ends), ends, strict=False)]
    return Stages(programs, lambda outputs: entr(softmax(outputs["logits"])).sum() < exit_entropy)


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
    """Return the name of the task head ``task``; None: of the only one. Raises ``ValueError`` if the model has no
    such head, or several."""
    present = [head for head in loaded.spec.heads.present() if head in HEADS]
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


def task_of(loaded: Engine, head: str) -> Task:
    """Return the task of a head (``sentence``: of vectors of texts), with the options that the saved model defines
    and defaults for all other options."""
    spec, plain = loaded.spec, FinetuneConfig()
    kind = _PROBLEMS[spec.heads.problem] if head == "sequence" else _KINDS[head]
    order: PairOrder = "both" if head == "sequence" and spec.heads.both_orders else "given"
    config = dataclasses.replace(
        plain,
        task=dataclasses.replace(plain.task, kind=kind, max_length=spec.max_length, pair_order=order),
        data=dataclasses.replace(plain.data, labels=spec.heads.sequence_labels, tags=spec.heads.token_labels),
        tagging=dataclasses.replace(plain.tagging, crf=spec.heads.crf),
        model=spec.model,
    )
    return TASKS[kind](config, loaded.need_tokenizer())


# ------------------------------------------------------------------ inputs


@dataclass(frozen=True)
class _Input:
    """A record and, for a text that the tokenizer splits into words, its model input and the character offsets
    of each word."""

    record: Record
    units: Sequence[ModelInput] = ()
    places: Sequence[tuple[int, int]] | None = None
    truncated: bool = False


def _input(loaded: Engine, head: str, value: Any) -> _Input:
    """Return ``value`` as an input of the head. Raises ``ValueError`` for a value that the head does not accept."""
    record = _record(value)
    start = f"{(record.text or ' '.join(record.words))[:40]!r}"
    if isinstance(value, Mapping) and "words" in value and "text" not in value:
        if head != "token":
            raise ValueError(f"{start}: words require a tagging model; give a text")
        return _Input(record)
    if head == "token":
        if record.text_pair is not None or record.choices:
            raise ValueError(f"{start}: a tagging model accepts one text, without text_pair or choices")
        return _tagged_text(loaded, record.text)
    if head == "sequence" and record.choices:
        raise ValueError(f"{start}: choices require a multiple-choice head, and the model has none")
    if head == "sequence" and loaded.spec.heads.both_orders and record.text_pair is None:
        raise ValueError(f"{start}: the model reads both orders of a pair; give text and text_pair")
    if head == "span" and record.text_pair is None:
        raise ValueError(f"{start}: a span model requires the question as text and the passage as text_pair")
    if head == "choice" and not record.choices:
        raise ValueError(f"{start}: a multiple-choice model requires an object with text and choices")
    return _Input(record)


def _record(value: Any) -> Record:
    if isinstance(value, str):
        return Record(id="", source="", text=value)
    if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(text, str) for text in value):
        return Record(id="", source="", text=value[0], text_pair=value[1])
    if isinstance(value, Mapping) and _are_texts(value.get("words")) and "text" not in value:
        return Record(id="", source="", words=tuple(value["words"]))
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        pair, choices = value.get("text_pair"), value.get("choices", ())
        if isinstance(pair, str | None) and _are_texts(choices) and not (pair and choices):
            return Record(id="", source="", text=value["text"], text_pair=pair, choices=tuple(choices))
    allowed = "a text, or an object with words, or with text and text_pair or choices"
    raise ValueError(f"{str(value)[:80]!r} is not a valid input; allowed: {allowed}")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


def _tagged_text(loaded: Engine, text: str) -> _Input:
    tokenizer = loaded.need_tokenizer()
    ids, offsets = tokenizer.encode_with_offsets(text)
    encoded = loaded.build(ids)
    first = int(tokenizer.framed)  # the special pieces before and after the text
    kept, whole = len(encoded.ids) - 2 * first, len(ids)
    ids, offsets = tokenizer.cut(ids, kept), tokenizer.cut(offsets, kept)
    # A piece that continues the word before it does not begin a word, unless it is the first piece.
    begins = [i for i in range(kept) if not i or not tokenizer.continuation[ids[i]]]
    ends = [*begins[1:], kept][: len(begins)]
    places = [(offsets[i][0], offsets[after - 1][1]) for i, after in zip(begins, ends, strict=True)]
    words = tuple(text[start:end] for start, end in places)
    window = Window(encoded, np.arange(len(words)), first + np.array(begins, np.int64))
    unit = window_input(0, window, np.full(len(words), -1, np.int32))
    return _Input(Record(id="", source="", words=words), (unit,), places, kept < whole)


def _with_places(prediction: dict[str, Any], one: _Input) -> dict[str, Any]:
    """Return ``prediction`` with the character offsets (``start``, ``end``) of each word of a text."""
    if one.places is None:
        return prediction
    tokens = [
        {"text": token.pop("text"), "start": start, "end": end, **token}
        for token, (start, end) in zip(prediction["tokens"], one.places, strict=True)
    ]
    return {"tokens": tokens, **({"truncated": True} if one.truncated else {})}
