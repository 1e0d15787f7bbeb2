"""Probe every layer of a network: train a linear classifier that predicts a property of words or sentences from
frozen vectors (Tenney et al. 2019; Hewitt and Liang 2019; Conneau et al. 2018).

Shapes: L layers, R stored vectors, N examples, H width, C classes.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_jax.contrib.analysis.linear_probe import (
    CLASSIFIERS,
    Classifier,
    Splits,
    linear,
    nearest_centroid,
    standardized,
)
from bert_jax.contrib.analysis.probe_tasks import Examples
from bert_jax.contrib.analysis.word_vectors import checked_layers, hidden_layers, sentence_word_vectors
from bert_jax.inference.batching import BatchOptions
from bert_jax.inference.engine import Engine
from bert_jax.json_values import Json
from bert_jax.metrics.resampling import Interval, confidence_intervals
from bert_jax.metrics.score import Score, mean_of_groups, precision_recall_f1, repeats

# Every tenth training sentence chooses the weight decay.
_HELD_OUT = 10


@dataclass(frozen=True)
class Row:
    """The scores of a layer or a baseline on the test examples, with 95% intervals: bootstrap over sentences."""

    name: str
    # accuracy; with groups also macro_f1, with a control task also control and selectivity.
    scores: Mapping[str, Interval]
    layer: int | None = None
    # Weight decay of the classifier; None for baselines, nearest centroids and several classifiers.
    decay: float | None = None


@dataclass(frozen=True)
class Labels:
    """The labels of both splits as integers.

    The classes of one group are consecutive. Labels that do not occur in training are -1.
    """

    names: Sequence[tuple[str, str]]  # group and label of each class
    train: np.ndarray  # int64[N]
    test: np.ndarray  # int64[N]

    @classmethod
    def of(cls, train: Examples, test: Examples) -> "Labels":
        """Return the labels of both splits as integers."""
        pairs = [list(zip(_groups(own), own.labels, strict=True)) for own in (train, test)]
        names = sorted(set(pairs[0]))
        numbers = {name: i for i, name in enumerate(names)}
        return cls(names, *(np.array([numbers.get(pair, -1) for pair in own], np.int64) for own in pairs))


class Probe:
    """A probing task: examples of both splits, with control labels and baselines.

    Args:
        train, test: examples of :mod:`bert_jax.contrib.analysis.probe_tasks`.
        classifier: linear: logistic regression; its weight decay is selected on every tenth training sentence.
            centroid: the class with the nearest mean.
        seed: determines the control labels and the resamples of the intervals.

    Raises ``ValueError`` for fewer than two classes, ten training sentences or one test example, and for a
    test example of a group without training examples.
    """

    def __init__(
        self, train: Examples, test: Examples, *, classifier: Classifier = "linear", seed: int = 0
    ) -> None:
        if classifier not in CLASSIFIERS:
            raise ValueError(f"classifier: {classifier!r} is not allowed; use one of {', '.join(CLASSIFIERS)}")
        self.train, self.test, self.classifier, self.seed = train, test, classifier, seed
        self.labels = Labels.of(train, test)
        sentences = len(np.unique(train.sentence))
        if len(self.labels.names) < 2 or sentences < _HELD_OUT or not len(test):
            raise ValueError(
                f"too few words: {len(self.labels.names)} classes in {sentences} training sentences, {len(test)} "
                f"test examples; 2, {_HELD_OUT} and 1 or more are required; give longer files or a larger --limit"
            )
        missing = sorted(set(_groups(test)) - set(_groups(train)))
        if missing:
            raise ValueError(f"{missing[0]!r}: test examples, but no training examples; give both, or neither")
        self.control = self._control()

    def _control(self) -> Labels | None:
        """Return random labels, one per word type, sampled from the label distribution of the training examples
        (Hewitt and Liang 2019, section 2): a probe can only memorize them."""
        if self.train.types is None or self.test.types is None:
            return None
        shares = np.cumsum(np.bincount(self.labels.train)) / len(self.train)

        def of(types: Sequence[str]) -> np.ndarray:
            draws = {name: _uniform(self.seed, name) for name in set(types)}
            # The last share may be below 1 by rounding.
            return np.searchsorted(shares[:-1], [draws[name] for name in types], "right")

        return Labels(self.labels.names, of(self.train.types), of(self.test.types))

    # ------------------------------------------------------------------ results

    def baselines(self) -> list[Row]:
        """Return the rows of the most frequent label (of the group) and, with a control task, of the most frequent
        label of the word type (of all words for a type without training examples)."""
        frequent = _most_frequent(_groups(self.train), self.labels.train, _groups(self.test), None)
        rows = [Row("most frequent label", self._scores(frequent, None))]
        if self.control is not None and self.train.types is not None and self.test.types is not None:
            of_type, control = (
                _most_frequent(self.train.types, labels, self.test.types, frequent)
                for labels in (self.labels.train, self.control.train)
            )
            rows.append(Row("most frequent label of the word", self._scores(of_type, control)))
        return rows

    def layers(
        self, loaded: Engine, layers: Sequence[int] | None = None, batches: BatchOptions = BatchOptions()
    ) -> Iterator[Row]:
        """Yield the row of each of ``layers``: 0 for the embeddings, -1 for the last layer; None: all.

        The vectors are computed once and stored in a temporary folder (TMPDIR); only one layer is in memory at a
        time. Raises ``ValueError`` for a layer that does not exist, for layers of different widths, and for
        vectors that are not finite.
        """
        chosen = checked_layers(loaded, range(hidden_layers(loaded)) if layers is None else layers)
        with tempfile.TemporaryDirectory(prefix="probe") as folder:
            stored = [
                layer_vectors(loaded, own, chosen, Path(folder) / name, batches=batches)
                for name, own in (("train", self.train), ("test", self.test))
            ]
            for i, layer in enumerate(chosen):
                yield self._layer(layer, self.train.features(stored[0][i]), self.test.features(stored[1][i]))

    def _layer(self, layer: int, train: np.ndarray, test: np.ndarray) -> Row:
        decays: dict[str, float] = {}
        predicted = self._predicted(self.labels.train, train, test, decays)
        control = None
        if self.control is not None:
            # The control task has the weight decays of the task, so that it does not choose to memorize less.
            control = self._predicted(self.control.train, train, test, decays)
        decay = decays.get("") if self.train.groups is None else None
        return Row(f"layer {layer}" if layer else "embeddings", self._scores(predicted, control), layer, decay)

    def _predicted(
        self, labels: np.ndarray, train: np.ndarray, test: np.ndarray, decays: dict[str, float]
    ) -> np.ndarray:
        """Return the predicted classes int64[N] of the test examples, by one classifier per group. ``decays``
        contains the weight decay of each group, and receives those that it lacks."""
        predicted = np.full(len(self.test), -1, np.int64)
        groups = np.array(_groups(self.train)), np.array(_groups(self.test))
        for group in sorted(set(groups[1])):
            own, asked = groups[0] == group, groups[1] == group
            classes, numbers = np.unique(labels[own], return_inverse=True)
            if len(classes) == 1:
                predicted[asked] = classes[0]
            elif self.classifier == "centroid":
                # Not centered: the mean of frequent classes would be near 0, without a direction.
                fitted = nearest_centroid(train[own], test[asked], numbers, len(classes))
                predicted[asked] = classes[fitted.predicted]
            else:
                held = self.train.sentence[own] % _HELD_OUT == _HELD_OUT - 1
                splits = Splits(*standardized(train[own], test[asked]), held)
                choice = {"decays": (decays[group],)} if group in decays else {}
                fitted = linear(splits, numbers, len(classes), **choice)
                decays[group] = fitted.decay or 0.0
                predicted[asked] = classes[fitted.predicted]
        return predicted

    def _scores(self, predicted: np.ndarray, control: np.ndarray | None) -> dict[str, Interval]:
        """Return accuracy and, where they exist, macro F1, accuracy on the control task and selectivity, the
        accuracy minus control accuracy."""
        count, sentence = len(self.test.sentences), self.test.sentence
        hits = predicted == self.labels.test
        scores = [mean_of_groups("accuracy", hits, sentence, count)]
        if self.test.groups is not None:
            scores.append(self._macro_f1(predicted, count))
        if control is not None and self.control is not None:
            of_control = control == self.control.test
            difference = hits.astype(np.float64) - of_control
            scores.append(mean_of_groups("control", of_control, sentence, count))
            scores.append(mean_of_groups("selectivity", difference, sentence, count))
        intervals = confidence_intervals(scores, count, self.seed)
        return {score.name: interval for score, interval in zip(scores, intervals, strict=True)}

    def _macro_f1(self, predicted: np.ndarray, count: int) -> Score:
        """Average F1 over the classes in each group, and return the mean of these averages.

        A class that is neither in the labels nor in the predictions is skipped.
        """
        classes, names = len(self.labels.names), sorted({group for group, _ in self.labels.names})
        group_of = np.array([names.index(group) for group, _ in self.labels.names])
        hit = np.where(predicted == self.labels.test, predicted, -1)
        columns = [np.where(x < 0, classes, x) for x in (hit, self.labels.test, predicted)]

        def of(indices: np.ndarray) -> float:
            weights = repeats(indices, count)[self.test.sentence]
            counts = np.stack([np.bincount(x, weights, minlength=classes + 1)[:classes] for x in columns])
            occurs = counts[1:].any(axis=0)
            f1 = precision_recall_f1(counts)[2]
            sizes = np.bincount(group_of[occurs], minlength=len(names))
            sums = np.bincount(group_of[occurs], f1[occurs], minlength=len(names))
            return float((sums[sizes > 0] / sizes[sizes > 0]).mean())

        return Score("macro_f1", of)


def layer_vectors(
    loaded: Engine,
    examples: Examples,
    layers: Sequence[int],
    path: Path | None = None,
    batches: BatchOptions = BatchOptions(),
) -> np.ndarray:
    """Return the stored vectors of the examples at ``layers``, float32[L, R, H], from which
    :meth:`Examples.features` computes the features of a layer. With ``path``, they are an array on disk in this
    file. Raises ``ValueError`` if a vector is not finite."""
    rows = len(examples.sentences) if examples.averaged else sum(map(len, examples.stored))
    stored: np.ndarray | None = None
    first = 0
    vectors = sentence_word_vectors(loaded, examples.sentences, layers=layers, batches=batches)
    for words, own_LxWxH in zip(examples.stored, vectors, strict=True):
        chosen_LxRxH = own_LxWxH[:, list(words)]
        if examples.averaged:
            chosen_LxRxH = chosen_LxRxH.mean(axis=1, keepdims=True)
        if not np.isfinite(chosen_LxRxH).all():
            raise ValueError(
                f"{loaded.name}: a vector contains NaN or infinity, so the model is damaged or has diverged; give "
                "another model"
            )
        if stored is None:
            shape = (len(layers), rows, chosen_LxRxH.shape[-1])
            stored = np.empty(shape, np.float32) if path is None else np.memmap(path, np.float32, "w+", shape=shape)
        stored[:, first : first + chosen_LxRxH.shape[1]] = chosen_LxRxH
        first += chosen_LxRxH.shape[1]
    assert stored is not None
    return stored


def _groups(examples: Examples) -> Sequence[str]:
    return [""] * len(examples) if examples.groups is None else examples.groups


def _uniform(seed: int, name: str) -> float:
    """Return a number from 0 to below 1 that ``seed`` and ``name`` determine."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    # 53 bits: all of them are exact in a float.
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def _most_frequent(
    keys: Sequence[str], labels: np.ndarray, asked: Sequence[str], otherwise: np.ndarray | None
) -> np.ndarray:
    """Return for each of ``asked`` the most frequent of ``labels`` among the examples with this key (the lowest if
    tied); for a new key that of ``otherwise`` (None: -1)."""
    counts: dict[str, dict[int, int]] = {}
    for key, label in zip(keys, labels.tolist(), strict=True):
        own = counts.setdefault(key, {})
        own[label] = own.get(label, 0) + 1
    best = {key: min(own, key=lambda label: (-own[label], label)) for key, own in counts.items()}
    return np.array(
        [best.get(key, -1 if otherwise is None else int(otherwise[i])) for i, key in enumerate(asked)], np.int64
    )


# ------------------------------------------------------------------ lines


def row_line(task: str, row: Row) -> dict[str, Json]:
    """Return a row as a JSON-serializable object: task, name, layer, weight decay, and [value, low, high] of each
    score."""
    scores = {name: [round(x, 6) for x in interval] for name, interval in row.scores.items()}
    return {"task": task, "name": row.name, "layer": row.layer, "weight_decay": row.decay, **scores}


def printed(row: Row) -> str:
    """Return a row as a line of text."""
    columns = [f"{name} {value:.4f} [{low:.4f}, {high:.4f}]" for name, (value, low, high) in row.scores.items()]
    decay = "" if row.decay is None else f"  weight decay {row.decay:g}"
    return f"{row.name:32s}{'  '.join(columns)}{decay}"
