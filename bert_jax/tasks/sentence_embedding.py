"""Sentence embeddings: texts of similar meaning have similar vectors (Reimers and Gurevych 2019).

Shapes: B rows, U units per row, K texts per unit, E width of a vector.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import jax
import numpy as np

from bert_jax.config import HeadsConfig, SentenceConfig, SentenceModule, TaskSettings
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.metrics.correlation import regression_scores
from bert_jax.metrics.retrieval import COLLAPSED, RESOLUTION, first_rank_scores, mean_ranks, unit_vectors
from bert_jax.metrics.score import Score, mean_score
from bert_jax.model.bert import BertOutput, present
from bert_jax.objectives.objective import Sums
from bert_jax.records import Record
from bert_jax.tasks.classes import Splits
from bert_jax.tasks.sentence_training import TRAININGS, record_texts, texts_of_classes
from bert_jax.tasks.task import Encoded, Level, ModelInput, Outputs, Prediction, Prepared, Target, Task
from bert_jax.tasks.text_classification import (
    class_number,
    class_predictions,
    class_scores,
    notes_on_classes,
    number_of,
    round_significant,
    with_labels,
)
from bert_jax.tasks.truncation import cut_text
from bert_jax.tokenization import Tokenizer

# Maximum number of scored texts of a record: the pair and the first negative.
_SCORED_TEXTS = 3
# Maximum number of cosines in memory while ranks are computed.
_COSINES = 2**22


class SentenceTask(Task):
    """Siamese training with the loss ``sentence.loss``.

    The kind of records in a split determines its scores. Pairs with numeric labels: the correlation of the cosines
    with the labels. Pairs with class labels: the scores of the classifier. Triplets: the share of triplets whose
    positive is closer to the anchor than the negative is. Pairs without labels: the retrieval of each second text
    among all second texts of the split.
    """

    targets: ClassVar[Mapping[str, Target]] = {}

    def __init__(
        self, config: FinetuneConfig | TaskSettings, tokenizer: Tokenizer, records: Sequence[Record] = ()
    ) -> None:
        super().__init__(config, tokenizer, records)
        if isinstance(config, TaskSettings):
            return
        self._training = TRAININGS[config.sentence.loss](config, records)
        if self._training.label_type is not None:
            self.targets = {"labels": Target("unit", self._training.label_type)}  # type: ignore[misc]
        if self._training.differs:
            self.targets = {**self.targets, "texts": Target("unit", np.int32)}  # type: ignore[misc]

    @classmethod
    def prepare(cls, config: FinetuneConfig, splits: Splits, tests: Sequence[str]) -> Prepared:
        """Prepare the records; with ``sentence.pairs_from_classes``, labeled single texts that are not for training
        become triplets with another text of the class and a text of another class, as in training. With the loss
        softmax, those of all splits become two pairs instead: with the text of the class (label 1), and with that
        of another (label 0). The only text of a class is not scored."""
        config, prepared, lines = super().prepare(config, splits, tests)
        as_pairs = config.sentence.loss == "softmax"
        for split in [one for one in prepared if config.sentence.pairs_from_classes]:
            if split == "train" and not as_pairs:
                continue
            records = prepared[split]
            singles = [one for one in records if one.text_pair is None and one.label is not None]
            counts = Counter(one.label for one in singles)
            used = [one for one in singles if split == "train" or 1 < counts[one.label] < len(singles)]
            used = used if split == "train" or len({one.label for one in used}) > 1 else []
            changed = {id(one): [replace(one, label=None)] for one in singles}
            groups = texts_of_classes(used, config.data.split_seed) if used else []
            for one, texts in zip(used, groups, strict=True):
                changed[id(one)] = _labelled_pairs(one, texts) if as_pairs else [_triplet(one, texts)]
            prepared[split] = [made for one in records for made in changed.get(id(one), [one])]
            if singles:
                made = "pairs (1: same class, 0: another)" if as_pairs else "triplets"
                use = "make" if split == "train" else "are scored as"
                lines.append(f"{split}: {len(used):,} of {len(records):,} texts {use} {made}")
        return config, prepared, lines

    @classmethod
    def from_data(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> FinetuneConfig:
        training = TRAININGS[config.sentence.loss](config, splits["train"])
        for record in splits["train"]:
            training.check(record)
        if training.label_type is not np.int32:
            return config
        return with_labels(config, splits, least=2 if config.sentence.loss == "softmax" else 1)

    @property
    def sequences_per_unit(self) -> int:
        return self._training.texts

    def sequences_of(self, units: Sequence[ModelInput]) -> int:
        most = max(len(unit.sequences) for unit in units)
        # The classifier reads the texts of a row in pairs.
        return most + most % 2 if self.settings.labels else most

    @property
    def heads(self) -> HeadsConfig:
        if not self.settings.labels:
            return HeadsConfig()
        return HeadsConfig(pair_labels=self.settings.labels, pair_hidden=self.config.sentence.hidden_size)

    @property
    def sentence(self) -> SentenceConfig:
        options = self.config.sentence
        modules = (SentenceModule(kind="normalize"),) if options.normalize else ()
        return SentenceConfig(pooling=(options.pooling,), modules=modules, similarity="cosine")

    # ------------------------------------------------------------------ records to units

    def featurize(self, records: Sequence[Record], *, training: bool) -> list[ModelInput]:
        if not training:
            self._check_scored([records[i] for i in self.scored(records)])
        groups = self._training.examples(records) if training else [_scored_texts(record) for record in records]
        flat = [text for group in groups for text in group]
        ids = iter(self.tokenizer.encode_batch(flat))
        units = []
        for i, (record, group) in enumerate(zip(records, groups, strict=True)):
            inputs = tuple(self._input(text, next(ids)) for text in group)
            targets = {"labels": self._training.label(record)} if training and "labels" in self.targets else {}
            targets |= {"texts": len(inputs)} if training and "texts" in self.targets else {}
            units.append(ModelInput(i, inputs, targets, float(training)))
        return units

    def _input(self, text: str, ids: Sequence[int]) -> Encoded:
        settings, tokenizer = self.settings, self.tokenizer
        room = settings.max_length - len(tokenizer.build_inputs([])[0])
        (kept,) = cut_text(text, ids, room, settings, tokenizer)
        return Encoded(*tokenizer.build_inputs(kept))

    def _check_scored(self, records: Sequence[Record]) -> None:
        """Raise ``ValueError`` if the records are not all triplets or all pairs, or if a label cannot be scored."""
        without = [record for record in records if not record.negatives]
        if 0 < len(without) < len(records):
            raise ValueError(
                f"{without[0].source}: the record has no negative, but other records of the split have one; "
                "a split has triplets only or pairs only: add a negative (role negative), or move the triplets to "
                "a separate file"
            )
        for record in records:
            if record.text_pair is None:
                raise ValueError(
                    f"{record.source}: the record has a label but no second text; name its column (role "
                    "text_pair) in data.columns"
                )
        self._gold(records)

    def _gold(self, records: Sequence[Record]) -> np.ndarray | None:
        """Return the labels of the records, as class indices int[n] or as values float64[n]; None for triplets and
        for records without labels. Raises ``ValueError`` if only some of the labels are classes, or if a value is
        not a finite number."""
        if all(record.negatives for record in records) or all(record.label is None for record in records):
            return None
        labels = self.settings.labels
        if any(record.label in labels for record in records):
            return np.array([class_number(record, labels) for record in records])
        return np.array([number_of(record) for record in records])

    # ------------------------------------------------------------------ on the device

    def _embeddings(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> jax.Array:
        vectors = present(output.sentence_embeddings)
        rows, sequences, width = vectors.shape
        units = batch["weights"].shape[1]
        return vectors.reshape(rows, units, sequences // units, width)

    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        return self._training.loss_of_widths(self._embeddings(output, batch), output.pair_logits, batch, axis)

    def outputs(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> dict[str, tuple[Level, jax.Array]]:
        embeddings_BxUxKxE = self._embeddings(output, batch)
        arrays: dict[str, tuple[Level, jax.Array]] = {"embeddings": ("unit", embeddings_BxUxKxE)}
        if output.pair_logits is not None:
            # The logits of the first two texts of each unit.
            arrays["logits"] = ("unit", output.pair_logits[:, :: embeddings_BxUxKxE.shape[2] // 2])
        return arrays

    # ------------------------------------------------------------------ outputs to predictions and metrics

    def decode(self, records: Sequence[Record], units: Sequence[ModelInput], outputs: Outputs) -> list[Prediction]:
        """Return for each record ``cosine``, the cosine of its first two texts, ``cosine_N`` of their first N
        values for each width of ``sentence.matryoshka``, and, with a classifier, its :func:`class_predictions`.

        For a triplet, the prediction also contains ``cosine_negative``, the cosine of its first text and its
        negative. For a pair without a label, it contains ``rank``, the rank (from 1) of its second text among all
        second texts of the split.
        """
        if not units:
            return []
        unit_NxKxE = unit_vectors(np.stack([output["embeddings"] for output in outputs]).astype(np.float64))
        pairs = [i for i, unit in enumerate(units) if len(unit.sequences) > 1]
        unlabelled = [i for i in pairs if records[i].label is None and len(units[i].sequences) == 2]
        predictions: list[Prediction] = [{} if one.label is None else {"gold": one.label} for one in records]
        for one, unit, output, unit_KxE in zip(predictions, units, outputs, unit_NxKxE, strict=True):
            texts = len(unit.sequences)
            if texts > 1:
                one["cosine"] = round_significant(unit_KxE[0] @ unit_KxE[1])
                for width in self.settings.matryoshka:
                    part_KxE = unit_vectors(unit_KxE[:, :width])
                    cosine = round_significant(part_KxE[0] @ part_KxE[1])
                    one[f"cosine_{width}"] = cosine  # type: ignore[literal-required]
            if texts > 2:
                one["cosine_negative"] = round_significant(unit_KxE[0] @ unit_KxE[2])
            if "logits" in output and texts == 2:
                one |= class_predictions(self.settings.labels, output["logits"][None].astype(np.float64))[0]
        if unlabelled:
            seconds = [tuple(units[i].sequences[1].ids) for i in pairs]
            own = np.searchsorted(pairs, unlabelled)
            ranks = _ranks(unit_NxKxE[unlabelled, 0], unit_NxKxE[pairs, 1], seconds, own)
            for i, rank in zip(unlabelled, ranks.tolist(), strict=True):
                predictions[i]["rank"] = None if np.isnan(rank) else int(rank) if rank.is_integer() else rank
        return predictions

    @classmethod
    def is_labelled(cls, record: Record) -> bool:
        return record.label is not None or record.text_pair is not None

    @classmethod
    def scored(cls, records: Sequence[Record]) -> list[int]:
        """Return the indices of the scored records. If any record has a label and not all records are triplets, the
        labeled records are scored; otherwise, all records with a label or a second text are scored."""
        numbers = super().scored(records)
        labelled = [i for i in numbers if records[i].label is not None]
        return numbers if not labelled or all(records[i].negatives for i in numbers) else labelled

    @classmethod
    def notes(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> list[str]:
        training = TRAININGS[config.sentence.loss](config, splits["train"])
        notes = notes_on_classes(config, splits, "label") if training.label_type is np.int32 else []
        for split, records in splits.items():
            known = sum(cls.is_labelled(record) for record in records)
            if split != "train" and (without := known - len(cls.scored(records))):
                notes.append(f"{split}: {without:,} of {len(records):,} pairs have no label and are not scored")
        return notes

    def remarks(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[str]:
        different = [i for i, one in enumerate(records) if one.text_pair is not None and one.text != one.text_pair]
        cosines = [predictions[i]["cosine"] for i in different]
        cosines += [predictions[i]["cosine_negative"] for i in different if "cosine_negative" in predictions[i]]
        wrong = any(predictions[i].get("rank") != 1 for i in different)
        if len(different) < 3 or not wrong or min(cosines) < COLLAPSED:
            return []
        return ["the vectors of different texts are equal (cosines above 0.999999): the model has collapsed"]

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        gold, labels = self._gold(records), self.settings.labels
        if all(record.negatives for record in records):
            nearer = [one["cosine"] > one["cosine_negative"] + RESOLUTION for one in predictions]
            return [mean_score("triplet_accuracy", np.array(nearer, float))]
        if gold is None:
            return first_rank_scores(np.array([one["rank"] for one in predictions], np.float64))
        if gold.dtype.kind == "i":
            return class_scores(records, predictions, labels, labels)
        scores = []
        for suffix in ("", *(f"_{width}" for width in self.settings.matryoshka)):
            cosines = np.array([one[f"cosine{suffix}"] for one in predictions])  # type: ignore[literal-required]
            if np.ptp(cosines) <= RESOLUTION:  # equal but for rounding: correlations are undefined
                cosines = np.full_like(cosines, cosines[0])
            named = {score.name: score for score in regression_scores(gold, cosines)}
            scores += [replace(named[name], name=f"{name}{suffix}") for name in ("spearman", "pearson")]
        return scores


def _triplet(record: Record, texts: tuple[str, ...]) -> Record:
    """Return the triplet ``texts``: the text of ``record``, one of its class and one of another class."""
    return replace(record, text_pair=texts[1], negatives=texts[2:])


def _labelled_pairs(record: Record, texts: tuple[str, ...]) -> list[Record]:
    """Return the pairs of the text of ``record`` with the other ones of ``texts``: one of its class, with label 1,
    and one of another class, with label 0."""
    pairs = (("1", texts[1]), ("0", texts[2]))
    return [
        replace(record, id=f"{record.id}/{label}", text_pair=text, negatives=(), label=label)
        for label, text in pairs
    ]


def _scored_texts(record: Record) -> tuple[str, ...]:
    """Return the texts of a record that are scored. If there is no second text, the negatives are ignored."""
    return record_texts(record)[:_SCORED_TEXTS] if record.text_pair is not None else (record.text,)


def _ranks(
    queries_QxE: np.ndarray, candidates_NxE: np.ndarray, texts: Sequence[tuple[int, ...]], own_Q: np.ndarray
) -> np.ndarray:
    """Return float64[Q]: for each query, the rank (from 1) of the right candidate among all N candidates by cosine
    (``metrics.retrieval.mean_ranks``).

    ``own_Q``: index of the own candidate of each query. ``texts``: token ids of each candidate; candidates with
    equal texts are equally right, and the first of them determines the rank.
    """
    # Equal texts are one candidate: their vectors may differ in the last digits if they come from different rows.
    numbers: dict[tuple[int, ...], int] = {}
    number_N = np.array([numbers.setdefault(text, len(numbers)) for text in texts])
    different_MxE = candidates_NxE[np.unique(number_N, return_index=True)[1]]
    ranks = np.empty(len(own_Q))
    size = max(1, _COSINES // len(different_MxE))
    for start in range(0, len(own_Q), size):
        cosines = queries_QxE[start : start + size] @ different_MxE.T
        for i, cosines_M in enumerate(cosines, start):
            ranks[i] = mean_ranks(cosines_M[number_N], number_N == number_N[own_Q[i]])[0]
    return ranks
