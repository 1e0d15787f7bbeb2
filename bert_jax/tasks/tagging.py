"""Tagging of every word of a text: entities, chunks, parts of speech (Devlin et al. 2018, section 5.3).

Shapes: B rows, S tokens, U units per row (a unit is one window of a text), L tags.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import HeadsConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.metrics import Score
from bert_jax.metrics.entities import entities, tag_accuracy, tagging_scores
from bert_jax.model.bert import BertOutput, present
from bert_jax.objectives.crf import crf_decode, crf_denominator, crf_loss
from bert_jax.objectives.label_losses import softmax_denominator
from bert_jax.objectives.objective import Sums
from bert_jax.records import Record
from bert_jax.tasks import task
from bert_jax.tasks.classes import class_lines, class_order, field_values
from bert_jax.tasks.task import Level, ModelInput, Outputs, Prediction, Target, Task, Token, class_loss
from bert_jax.tasks.word_windows import WordWindow, word_windows

# Prefixes of entity tags (such as B-PER) in default and in strict scoring; see ``bert_jax.metrics.entities``.
PREFIXES, STRICT_PREFIXES = ("B", "I", "E", "S"), ("B", "I")


class TaggingTask(Task):
    """One tag per word, on its first piece; other pieces and special tokens have no tag.

    A text that exceeds the maximum length is split into windows, each a separate chain for a CRF. Each word is used
    in training and tagged only in the window in which it has the most context. ``ModelInput.extra`` is the
    :class:`WordWindow`. Records without tags also have targets (with weight 0), because the computation on the
    device requires the positions of the scored tokens.
    """

    targets: ClassVar[Mapping[str, Target]] = {
        "tag_labels": Target("token", np.int32),  # index of the tag of a scored token
        "tag_scored": Target("token", np.float32),  # 1 at the first piece of each word that the window tags
    }
    gold: ClassVar[tuple[str, ...]] = ("tags",)
    logs_loss = True

    @classmethod
    def from_data(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> FinetuneConfig:
        """Return ``config`` with ``data.tags`` filled in: if this option is empty, it is set to the tags of the
        training records, with O first."""
        seen = {tag for record in splits["train"] for tag in _required_tags(record)}
        outside = ("O",) if "O" in seen else ()
        tags = config.data.tags or outside + class_order(seen - {"O"})
        if len(tags) < 2:
            known = ", ".join(tags) or "none"
            raise ValueError(
                f"data.train: tags in the training files: {known}; two or more are required; check data.columns "
                "(role tags), or list all tags in data.tags"
            )
        if are_entity_tags(tags):
            for records in splits.values():
                check_entity_tags(records, config.tagging.scoring)
        return dataclasses.replace(config, data=dataclasses.replace(config.data, tags=tags))

    @classmethod
    def notes(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> list[str]:
        tags, train = config.data.tags, splits.get("train", ())
        notes = class_lines(tags, Counter(field_values(train, "tags")), "tags") if train else []
        if train and are_entity_tags(tags):
            counts = Counter(kind for record in train for kind, *_ in entities(record.tags or ()))
            notes += class_lines(sorted(counts), counts, "types of entities")[: len(counts) > 1]
        if not are_entity_tags(tags) and all(map(str.isdecimal, tags)):
            notes.append(
                "only tag accuracy is scored, because the tags are numbers; for the F1 of entities, replace them "
                "by their names (O, B-PER, ...)"
            )
        if not are_entity_tags(tags) and any(tag.startswith("B-") for tag in tags):
            other = next(tag for tag in tags if not are_entity_tags([tag]))
            notes.append(
                f"only tag accuracy is scored, because {other!r} is not O and has no prefix B-, I-, E- or S-"
            )
        tags_of_splits = {
            split: {tag for one in records for tag in one.tags or ()} for split, records in splits.items()
        }
        return notes + not_learned("tags", tags_of_splits, tags)

    @property
    def heads(self) -> HeadsConfig:
        return HeadsConfig(token_labels=self.settings.tags, crf=self.settings.crf)

    # ------------------------------------------------------------------ records to units

    def featurize(self, records: Sequence[Record], *, training: bool) -> list[ModelInput]:
        context, numbers = self.settings.document_context, {t: i for i, t in enumerate(self.settings.tags)}
        windows = word_windows(records, self.tokenizer, self.settings.max_length, context=context)
        units = []
        for number, (record, several) in enumerate(zip(records, windows, strict=True)):
            if training and not record.words:
                continue
            labels = _labels(record, numbers, training)
            units += [window_input(number, window, labels) for window in several]
        return units

    # ------------------------------------------------------------------ on the device

    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        weights_BxS = tag_weights(batch)
        if self.settings.crf:
            return {"tag_loss": crf_denominator(batch["sequence_ids"], weights_BxS > 0)}
        return {"tag_loss": softmax_denominator(batch["tag_labels"], weights_BxS)}

    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        weights_BxS, labels_BxS = tag_weights(batch), batch["tag_labels"]
        logits_BxSxL = present(output.token_logits)
        if self.settings.crf:
            crf = present(output.crf)
            sums = crf_loss(logits_BxSxL, labels_BxS, batch["sequence_ids"], weights_BxS > 0, *crf)
        else:
            sums = class_loss(self.loss_options, logits_BxSxL, labels_BxS, weights_BxS)
        return {f"tag_{name}": pair for name, pair in sums.items()}

    def outputs(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> dict[str, tuple[Level, jax.Array]]:
        """Return ``tags`` int32[B, S]: with a CRF the best path, otherwise the most probable tags. Without a CRF,
        also return their probabilities ``scores`` float32[B, S]. Logits are not returned, because they would be L
        times as much data to copy to the host."""
        logits_BxSxL = present(output.token_logits)
        if self.settings.crf:
            crf = present(output.crf)
            tags_BxS = crf_decode(logits_BxSxL, batch["sequence_ids"], batch["tag_scored"] > 0, *crf)
            return {"tags": ("token", tags_BxS)}
        tags_BxS = jnp.argmax(logits_BxSxL, axis=-1).astype(jnp.int32)
        scores_BxS = jnp.exp(jnp.max(logits_BxSxL, axis=-1) - jax.nn.logsumexp(logits_BxSxL, axis=-1))
        return {"tags": ("token", tags_BxS), "scores": ("token", scores_BxS)}

    # ------------------------------------------------------------------ outputs to predictions and metrics

    def decode(self, records: Sequence[Record], units: Sequence[ModelInput], outputs: Outputs) -> list[Prediction]:
        """Return for each record ``tokens``, with one entry per word: its ``text``, its ``label`` and, without a
        CRF, ``score``, the probability of the label."""
        tokens: list[list[Token]] = [[{"text": word} for word in record.words] for record in records]
        tags = self.settings.tags
        for unit, output in zip(units, outputs, strict=True):
            window: WordWindow = unit.extra
            columns = {"label": [tags[number] for number in output["tags"][window.tokens]]}
            if not self.settings.crf:
                columns["score"] = output["scores"][window.tokens].tolist()
            for name, column in columns.items():
                for word, entry in zip(window.words, column, strict=True):
                    tokens[unit.record][word][name] = entry
        return [{"tokens": words} for words in tokens]

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        """Return the f1, precision and recall of entities, the accuracy of tags, and the scores of each entity
        type. If the tags are not entity tags, return only the accuracy."""
        gold = [_required_tags(record) for record in records]
        predicted = [predicted_tags(prediction) for prediction in predictions]
        if not are_entity_tags(self.settings.tags):
            return [tag_accuracy(gold, predicted)]
        check_entity_tags(records, self.settings.tag_scoring)
        return tagging_scores(gold, predicted, self.settings.tag_scoring == "strict")

    def constant(self, train: Sequence[Record]) -> task.Constant:
        tag = task.most_frequent(tag for record in train for tag in record.tags or ())
        return f"tag {tag} for all", lambda one: {**one, "tokens": [{**w, "label": tag} for w in one["tokens"]]}


def tag_weights(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Return float32[B, S]: for each scored token, the weight of its model input; 0 for all other tokens."""
    weights_BxU = batch["weights"]
    is_of_BxSxU = batch["sequence_ids"][..., None] == 1 + jnp.arange(weights_BxU.shape[1])
    return batch["tag_scored"] * jnp.sum(jnp.where(is_of_BxSxU, weights_BxU[:, None], 0.0), axis=-1)


def are_entity_tags(tags: Iterable[str], prefixes: Sequence[str] = PREFIXES) -> bool:
    """Return True if every tag is O or one of ``prefixes``, with or without the suffix -TYPE."""
    return all(tag == "O" or tag.partition("-")[0] in prefixes for tag in tags)


def window_input(number: int, window: WordWindow, labels: np.ndarray) -> ModelInput:
    """Return the model input for a window of the record with the index ``number``. ``labels`` int32[words] contains
    the tag index of every word of the record, or -1 for an unknown tag."""
    here = labels[window.words]
    values = np.zeros(len(window.encoded.ids), np.int32)
    scored = np.zeros(len(window.encoded.ids), np.float32)
    values[window.tokens] = np.maximum(here, 0)
    scored[window.tokens] = 1
    # A CRF has no probability for a chain with an unknown tag, so the loss ignores the whole window.
    weight = float(len(here) > 0 and here.min() >= 0)
    targets = {"tag_labels": values, "tag_scored": scored}
    return ModelInput(number, (window.encoded,), targets, weight, window)


def predicted_tags(prediction: Prediction) -> list[str]:
    """Return the tags of the words in ``prediction``."""
    return [token["label"] for token in prediction["tokens"]]


def not_learned(kind: str, values_of_splits: Mapping[str, Set[str | None]], learned: Sequence[str]) -> list[str]:
    """Return a note for each split with values that are not in ``learned``; ``kind`` is "labels" or "tags"."""
    unknown = {split: sorted(map(str, values - {*learned})) for split, values in values_of_splits.items()}
    return [
        f"{split}: {kind} that do not occur in training are scored as errors: {', '.join(names)}"
        for split, names in unknown.items()
        if names
    ]


def _required_tags(record: Record) -> tuple[str, ...]:
    """Return the tags of a record; raise ``ValueError`` if there is not exactly one tag for each word."""
    if record.tags is None or len(record.tags) != len(record.words):
        count = "no" if record.tags is None else len(record.tags)
        raise ValueError(f"{record.source}: {count} tags for {len(record.words)} words; every word needs one tag")
    return record.tags


def _labels(record: Record, numbers: Mapping[str, int], training: bool) -> np.ndarray:
    """Return int32[words], the index of the tag of each word; -1 if the tag is unknown or missing.

    With ``training``, raise ``ValueError`` for an unknown or missing tag.
    """
    if record.tags is None and not training:
        return np.full(len(record.words), -1, np.int32)
    tags = _required_tags(record)
    unknown = next((tag for tag in tags if tag not in numbers), None)
    if training and unknown is not None:
        raise ValueError(
            f"{record.source}: tag {unknown!r} is not in data.tags; allowed: {', '.join(numbers)}; correct it, or "
            "add it to data.tags"
        )
    return np.array([numbers.get(tag, -1) for tag in tags], np.int32)


def check_entity_tags(records: Sequence[Record], scoring: str) -> None:
    """Raise ``ValueError`` for a tag that ``scoring``, a value of ``tagging.scoring``, does not allow."""
    prefixes = STRICT_PREFIXES if scoring == "strict" else PREFIXES
    for record in records:
        for tag in dict.fromkeys(record.tags or ()):
            if not are_entity_tags([tag], prefixes):
                raise ValueError(
                    f"{record.source}: tag {tag!r} is not allowed with tagging.scoring {scoring}; allowed: O, and "
                    f"{', '.join(prefixes)} with or without -TYPE; correct the tag, or change tagging.scoring"
                )
