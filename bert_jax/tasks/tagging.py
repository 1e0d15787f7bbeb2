"""A tag for every word of a text: entities, chunks, parts of speech (Devlin et al. 2018, section 5.3).

Shapes: B rows, S tokens, U units per row (a unit is one window of a text), L tags.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import HeadsConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.metrics import Score, tag_accuracy, tagging_scores
from bert_jax.model.bert import BertOutput
from bert_jax.objectives.crf import crf_decode, crf_denominator, crf_loss
from bert_jax.objectives.label_losses import softmax_denominator, softmax_loss
from bert_jax.objectives.objective import Sums
from bert_jax.records import Record
from bert_jax.tasks.task import Level, ModelInput, Prediction, Target, Task
from bert_jax.tasks.words import Window, word_windows

# What entity tags begin with (B-PER), by the two readings of ``bert_jax.metrics.entities``.
PREFIXES, STRICT_PREFIXES = ("B", "I", "E", "S"), ("B", "I")
FIRST_SCORES = ("f1", "precision", "recall", "accuracy")


class TaggingTask(Task):
    """One tag per word. The first piece of a word carries it; its other pieces and special tokens have none.

    Too long a text goes through several windows, each a chain of its own for a CRF; a word is trained and tagged
    in the one where it has the most context. ``ModelInput.extra`` is the :class:`Window`. Records without tags have
    targets too (of weight 0): the device must know which tokens are scored.
    """

    targets: ClassVar[Mapping[str, Target]] = {
        "tag_labels": Target("token", np.int32),  # number of the tag where it is scored
        "tag_scored": Target("token", np.float32),  # 1: the first piece of a word, in the word's window
    }
    gold = ("tags",)

    @classmethod
    def from_data(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> FinetuneConfig:
        """Return ``config`` with ``data.tags`` from the training records (O first) if it is empty."""
        train = splits.get("train", ())
        seen = {tag for record in train for tag in _given(record)}
        tags = config.data.tags or tuple(sorted(seen, key=lambda tag: (tag != "O", tag)))
        for record in train:
            _labels(record, tags, training=True)
        if len(tags) < 2:
            raise ValueError(f"data.train: {len(tags)} tags ({', '.join(tags)}); give files with two or more")
        if are_entity_tags(tags):
            for records in splits.values():
                check_entity_tags(records, config.tagging.scoring)
        return dataclasses.replace(config, data=dataclasses.replace(config.data, tags=tags))

    @classmethod
    def notes(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> list[str]:
        """Lines to log about the records, with what :meth:`from_data` gave."""
        notes, tags = [], config.data.tags
        if not are_entity_tags(tags) and any(tag.startswith("B-") for tag in tags):
            other = next(tag for tag in tags if not are_entity_tags([tag]))
            notes.append(f"only the accuracy of tags is scored: {other!r} is none of O, B-, I-, E- and S-")
        for split, records in splits.items():
            found = {tag for record in records for tag in record.tags or ()}
            if unknown := found.difference(tags):
                notes.append(f"{split}: tags that are not learned count as misses: {', '.join(sorted(unknown))}")
        return notes

    @property
    def heads(self) -> HeadsConfig:
        return HeadsConfig(token_labels=self.config.data.tags, crf=self.config.tagging.crf)

    # ------------------------------------------------------------------ records to units

    def featurize(self, records: Sequence[Record], *, training: bool) -> list[ModelInput]:
        config = self.config
        windows = word_windows(
            records, self.tokenizer, config.task.max_length, context=config.tagging.document_context
        )
        units = []
        for number, (record, several) in enumerate(zip(records, windows, strict=True)):
            if training and not record.words:
                continue
            labels = _labels(record, config.data.tags, training)
            units += [window_input(number, window, labels) for window in several]
        return units

    # ------------------------------------------------------------------ on the device

    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        weights_BxS = tag_weights(batch)
        if self.config.tagging.crf:
            return {"tag_loss": crf_denominator(batch["sequence_ids"], weights_BxS > 0)}
        return {"tag_loss": softmax_denominator(batch["tag_labels"], weights_BxS)}

    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        weights_BxS, labels_BxS, options = tag_weights(batch), batch["tag_labels"], self.config.loss
        logits_BxSxL = output.token_logits
        assert logits_BxSxL is not None
        if self.config.tagging.crf:
            assert output.crf is not None
            sums = crf_loss(logits_BxSxL, labels_BxS, batch["sequence_ids"], weights_BxS > 0, *output.crf)
        else:
            smoothing, gamma = options.label_smoothing, options.focal_gamma
            sums = softmax_loss(logits_BxSxL, labels_BxS, weights_BxS, label_smoothing=smoothing, focal_gamma=gamma)
        return {f"tag_{name}": pair for name, pair in sums.items()}

    def outputs(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> dict[str, tuple[Level, jax.Array]]:
        """``tags`` int32[B, S]: of the best path with a CRF, else the likeliest, with ``scores`` float32[B, S], the
        probability of each. All logits would be L times as much to bring to the host.
        """
        logits_BxSxL = output.token_logits
        assert logits_BxSxL is not None
        if self.config.tagging.crf:
            assert output.crf is not None
            tags_BxS = crf_decode(logits_BxSxL, batch["sequence_ids"], batch["tag_scored"] > 0, *output.crf)
            return {"tags": ("token", tags_BxS)}
        tags_BxS = jnp.argmax(logits_BxSxL, axis=-1).astype(jnp.int32)
        scores_BxS = jnp.exp(jnp.max(logits_BxSxL, axis=-1) - jax.nn.logsumexp(logits_BxSxL, axis=-1))
        return {"tags": ("token", tags_BxS), "scores": ("token", scores_BxS)}

    # ------------------------------------------------------------------ outputs to predictions and metrics

    def decode(
        self, records: Sequence[Record], units: Sequence[ModelInput], outputs: Sequence[Mapping[str, np.ndarray]]
    ) -> list[Prediction]:
        """``tokens``, one per word: ``text``, ``label`` and, without a CRF, ``score``, its probability."""
        numbers = [np.zeros(len(record.words), np.int32) for record in records]
        scores = [np.zeros(len(record.words)) for record in records]
        for unit, output in zip(units, outputs, strict=True):
            window: Window = unit.extra
            numbers[unit.record][window.words] = output["tags"][window.tokens]
            if not self.config.tagging.crf:
                scores[unit.record][window.words] = output["scores"][window.tokens]
        tags, has_scores = self.config.data.tags, not self.config.tagging.crf
        return [
            {
                "tokens": [
                    {"text": word, "label": tags[number], **({"score": score} if has_scores else {})}
                    for word, number, score in zip(
                        record.words, of_words.tolist(), scores_of_words.tolist(), strict=True
                    )
                ]
            }
            for record, of_words, scores_of_words in zip(records, numbers, scores, strict=True)
        ]

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        """f1, precision and recall of entities, accuracy of tags, each type's; of other tags accuracy alone."""
        gold = [_given(record) for record in records]
        predicted = [predicted_tags(prediction) for prediction in predictions]
        if not are_entity_tags(self.config.data.tags):
            return [tag_accuracy(gold, predicted)]
        check_entity_tags(records, self.config.tagging.scoring)
        found = {s.name: s for s in tagging_scores(gold, predicted, self.config.tagging.scoring == "strict")}
        return [found.pop(name) for name in FIRST_SCORES] + list(found.values())


def tag_weights(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Return float32[B, S]: the weight of the unit of each scored token, 0 for other tokens."""
    weights_BxU = batch["weights"]
    is_of_BxSxU = batch["sequence_ids"][..., None] == 1 + jnp.arange(weights_BxU.shape[1])
    return batch["tag_scored"] * jnp.sum(jnp.where(is_of_BxSxU, weights_BxU[:, None], 0.0), axis=-1)


def are_entity_tags(tags: Iterable[str], prefixes: Sequence[str] = PREFIXES) -> bool:
    """Return True if tags mark entities: O, and one of ``prefixes`` with or without -TYPE."""
    return all(tag == "O" or tag.partition("-")[0] in prefixes for tag in tags)


def window_input(number: int, window: Window, labels: np.ndarray) -> ModelInput:
    """The unit of a window; ``labels`` are those of all words of the record, -1 where there is none."""
    here = labels[window.words]
    values = np.zeros(len(window.encoded.ids), np.int32)
    scored = np.zeros(len(window.encoded.ids), np.float32)
    values[window.tokens] = np.maximum(here, 0)
    scored[window.tokens] = 1
    # A chain with a tag that the model has not has no probability, so the loss leaves out the whole window.
    weight = float(len(here) > 0 and here.min() >= 0)
    targets = {"tag_labels": values, "tag_scored": scored}
    return ModelInput(number, (window.encoded,), targets, weight, window)


def predicted_tags(prediction: Prediction) -> list[str]:
    """The tag of each word."""
    return [token["label"] for token in prediction["tokens"]]


def _given(record: Record) -> tuple[str, ...]:
    """The tags of a record that must have them."""
    if record.tags is None:
        raise ValueError(f"{record.source}: the record has no tags; every word needs one tag")
    if len(record.tags) != len(record.words):
        raise ValueError(
            f"{record.source}: {len(record.tags)} tags for {len(record.words)} words; every word needs one tag"
        )
    return record.tags


def _labels(record: Record, tags: tuple[str, ...], training: bool) -> np.ndarray:
    """int32[words]: the number of each word's tag; -1 where it is not known, which ``training`` does not allow."""
    if record.tags is None and not training:
        return np.full(len(record.words), -1, np.int32)
    known = _known(tags)
    for tag in _given(record) if training else ():
        if tag not in known:
            raise ValueError(
                f"{record.source}: tag {tag!r} is not in data.tags; allowed: {', '.join(tags)}; correct one of them"
            )
    return np.array([known.get(tag, -1) for tag in _given(record)], np.int32)


@lru_cache(maxsize=8)
def _known(tags: tuple[str, ...]) -> dict[str, int]:
    return {tag: i for i, tag in enumerate(tags)}


def check_entity_tags(records: Sequence[Record], scoring: str) -> None:
    """``ValueError`` for a tag that ``scoring`` (``TaggingConfig.scoring``) finds no sense in."""
    prefixes = STRICT_PREFIXES if scoring == "strict" else PREFIXES
    for record in records:
        for tag in dict.fromkeys(record.tags or ()):
            if not are_entity_tags([tag], prefixes):
                raise ValueError(
                    f"{record.source}: {tag!r} is no entity tag of tagging.scoring {scoring}; allowed: O, and "
                    f"{', '.join(prefixes)} with or without -TYPE; correct the tag or the option"
                )
