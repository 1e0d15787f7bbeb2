"""Ways to treat unequal classes, each against plain fine-tuning of all-MiniLM-L6-v2.

    python studies/unequal_classes/unequal_classes.py --model MINILM --data DIR --folder DIR [--minutes N] [--tables clinc150]
    python studies/unequal_classes/unequal_classes.py --table

clinc150: 150 intents; the intent of rank r has max(2, 100 / r) training records, and the ranks are drawn by the
seed. All classes are equally frequent in the results. reuters_r8: 1,000 training records whose 8 classes, from 470
records to 7, are as frequent in the results.

Four arms change the training: class weights, focal loss, balanced sampling, label smoothing. Five change the
probabilities p of plain fine-tuning, with values from the records of choice, whose classes are as frequent as in
training (π): "adjusted" p / π; "adjusted in part" p / π**t with the best t; "class biases" p * b with the b of each
class from a coordinate search; these t and b have the best macro F1 of choice. "temperature" p ** (1 / t) has the
lowest log loss of choice; "adjusted, temperature" is p ** (1 / t) / π. Rates have the best macro F1 of choice. Seeds
0 to 9. Rare classes are the third of the classes with the fewest training records.

The command may be stopped and started again: a finished run is a line of unequal_classes.jsonl. --minutes: start no
run after this time. The tables have a verdict on macro F1 for an arm whose runs are complete, and "not yet" for all
others; exit code 3 if there are such.
"""

import collections
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "shared"), str(Path(__file__).resolve().parents[2])]
import numpy as np
from scipy.special import softmax
from arms import (
    PLAIN,
    RANDOM,
    TFIDF,
    Answer,
    Line,
    Stopped,
    TaskOfArms,
    arm_options,
    chosen_rate,
    mean_and_deviation,
    results_of,
    runner,
    verdicts,
)
from small_runs import Lines, Options, cells, report, report_missing
from small_samples import Record, Texts
from small_samples import table as read_table

from bert_jax.contrib.calibration.calibrate import fitted_temperature, log_loss
from bert_jax.hashing import permutation
from bert_jax.metrics.classification import calibration_error
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

LINES = Path(__file__).with_name("unequal_classes.jsonl")
SEEDS, BOUND = range(10), 0.01
MOST, LEAST, MOST_DEV = 100, 2, 20  # records of an intent
REUTERS_RECORDS = 1000
ARMS: dict[str, Options] = {
    PLAIN: {},
    "class weights": {"loss.class_weights": "balanced"},
    "balanced sampling": {"input.balanced": True},
    "focal loss": {"loss.focal_gamma": 2.0},
    "label smoothing": {"loss.label_smoothing": 0.1},
    RANDOM: {},
}
CHANGED = ("adjusted", "adjusted in part", "class biases", "temperature", "adjusted, temperature")
SHARES, OFFSETS, SWEEPS = np.arange(0, 2.01, 0.25), np.arange(-3, 3.01, 0.5), 2
TFIDF_ADJUSTED = f"{TFIDF}, adjusted"
METRICS = ("macro_f1", "rare_f1", "accuracy", "log_loss", "calibration_error")


# ------------------------------------------------------------------ records


def clinc(data: Path, seed: int) -> Texts:
    splits = json.loads((data / "clinc150/data_full.json").read_text(encoding="utf-8"))
    names = sorted({intent for _, intent in splits["train"]})
    rank = {names[place]: number for number, place in enumerate(permutation(len(names), seed, 1), 1)}

    def cut(part: str, most: int, least: int) -> list[Record]:
        left = {name: max(least, round(most / rank[name])) for name in names}
        kept = []
        for place in permutation(len(splits[part]), seed, 2):
            text, intent = splits[part][place]
            if left[intent] > 0:
                left[intent] -= 1
                kept.append({"text": text, "label": intent})
        return kept

    test = [{"text": text, "label": intent} for text, intent in splits["test"]]
    return Texts(cut("train", MOST, LEAST), cut("val", MOST_DEV, 1), test)


def reuters(data: Path, seed: int) -> Texts:
    """Each class keeps its share of the training records."""
    parts = {
        part: read_table(data / f"reuters_r8/{part}.tsv.gz", text="sentence", label="label")
        for part in ("train", "dev", "test")
    }
    train = parts["train"]
    counts = collections.Counter(record["label"] for record in train)
    left = {label: round(REUTERS_RECORDS * count / len(train)) for label, count in counts.items()}
    kept = []
    for place in permutation(len(train), seed):
        if left[train[place]["label"]] > 0:
            left[train[place]["label"]] -= 1
            kept.append(train[place])
    return Texts(kept, parts["dev"], parts["test"])


TABLES = {
    "clinc150": TaskOfArms("clinc150", "classification", clinc, 32, 400, 32, (2e-4, 4e-4, 8e-4)),
    "reuters_r8": TaskOfArms("reuters_r8", "classification", reuters, 64, 190, 16),
}


# ------------------------------------------------------------------ probabilities


def macro_f1(gold: np.ndarray, predicted: np.ndarray, classes: int, kept: np.ndarray | None = None) -> float:
    """Return the mean of the F1 of all classes, or of the classes ``kept``; an F1 without any record is 0."""
    hits = np.bincount(gold[gold == predicted], minlength=classes)
    both = np.bincount(gold, minlength=classes) + np.bincount(predicted, minlength=classes)
    return float(np.mean((2 * hits / np.maximum(both, 1))[slice(None) if kept is None else kept]))


def fitted_biases(gold: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Return the biases of the classes that a coordinate search finds for the best macro F1; of equally good ones
    the smallest."""
    classes = logits.shape[1]
    biases = np.zeros(classes)
    best = macro_f1(gold, logits.argmax(-1), classes)
    for _ in range(SWEEPS):
        for c in range(classes):
            for offset in sorted(OFFSETS, key=abs):
                tried = biases.copy()
                tried[c] = offset
                value = macro_f1(gold, (logits + tried).argmax(-1), classes)
                if value > best + 1e-12:
                    biases, best = tried, value
    return biases


def changes(gold: np.ndarray, logits: np.ndarray, prior: np.ndarray) -> dict[str, tuple[float, np.ndarray]]:
    """Return (factor, biases) of the logits of each arm of ``CHANGED``; ``gold`` and ``logits`` are of choice."""
    classes, log_prior = len(prior), np.log(prior)

    def value(share: float) -> float:
        return macro_f1(gold, (logits - share * log_prior).argmax(-1), classes)

    share = max(SHARES, key=value)  # of equally good ones the smallest
    factor = 1 / fitted_temperature(gold, logits)
    none = np.zeros(classes)
    return dict(
        zip(
            CHANGED,
            ((1.0, -log_prior), (1.0, -share * log_prior), (1.0, fitted_biases(gold, logits)), (factor, none),
             (factor, -log_prior)),
            strict=True,
        )
    )  # fmt: skip


def measure(
    task: TaskOfArms, texts: Texts, choice: Sequence[Answer] | None, results: Sequence[Answer] | None
) -> Line:
    """Return the metrics of results by name and, under ``changed``, those of each change of the probabilities;
    ``choice``: macro F1 of choice. A run whose loss was not finite has the probabilities of the classes in
    training."""
    counts = collections.Counter(record["label"] for record in texts.train)
    labels = sorted(counts)
    prior = np.array([counts[label] for label in labels]) / len(texts.train)
    by_count = sorted(range(len(labels)), key=lambda c: counts[labels[c]])
    rare = np.array(by_count[: len(labels) // 3])

    def arrays(records: Sequence[Record], answers: Sequence[Answer] | None) -> tuple[np.ndarray, np.ndarray]:
        gold = np.array([labels.index(record["label"]) for record in records])
        if answers is None:
            return gold, np.tile(np.log(prior), (len(records), 1))
        p = np.array([[one["probabilities"][label] for label in labels] for one in answers])
        return gold, np.log(np.maximum(p, 1e-12))

    gold, logits = arrays(texts.choice, choice)
    of_changes = changes(gold, logits, prior)
    chosen = macro_f1(gold, logits.argmax(-1), len(labels))
    gold, logits = arrays(texts.results, results)

    def metrics(logits: np.ndarray) -> dict[str, float]:
        predicted = logits.argmax(-1)
        values = (
            macro_f1(gold, predicted, len(labels)), macro_f1(gold, predicted, len(labels), rare),
            float(np.mean(gold == predicted)), log_loss(gold, logits), calibration_error(gold, softmax(logits, -1)),
        )  # fmt: skip
        return {name: round(value, 5) for name, value in zip(METRICS, values, strict=True)}

    changed = {name: metrics(factor * logits + biases) for name, (factor, biases) in of_changes.items()}
    constant = metrics(np.tile(np.log(prior), (len(gold), 1)))
    return {"choice": round(chosen, 5), **metrics(logits), "constant": constant, "changed": changed}


# ------------------------------------------------------------------ table


def metrics_of(lines: Lines, task: TaskOfArms, arm: str) -> list[dict[str, float]] | None:
    """Return the metrics of an arm for each seed; None if a run is missing."""
    if arm in (TFIDF, TFIDF_ADJUSTED):
        keys = [f"{task.name}/{TFIDF}/{seed}" for seed in SEEDS]
        found = [lines.found[key] for key in keys] if lines.found.keys() >= {*keys} else None
    else:
        found = results_of(lines, task, PLAIN if arm in CHANGED else arm, SEEDS)
    if found is None:
        return None
    change = "adjusted" if arm == TFIDF_ADJUSTED else arm
    return [line["changed"][change] if change in CHANGED else line for line in found]


def print_table(lines: Lines, task: TaskOfArms) -> int:
    """Print the table of a task; return the number of missing verdicts."""
    compared = [*(arm for arm in ARMS if arm not in (PLAIN, RANDOM)), *CHANGED]
    plain, missing = metrics_of(lines, task, PLAIN), 0
    differences = {}
    for arm in compared:
        own = metrics_of(lines, task, arm)
        known = own is not None and plain is not None
        differences[arm] = (
            [one["macro_f1"] - other["macro_f1"] for one, other in zip(own, plain, strict=True)] if known else None
        )
    found = verdicts(differences, BOUND)
    print(task.name)
    heads = ("arm", "rate", *(name.replace("_", " ") for name in METRICS), "macro F1 - plain", "verdict")
    print(cells(heads))
    print(cells(["---"] * len(heads)))
    first = next((line for key, line in lines.found.items() if key.startswith(f"{task.name}/")), None)
    if first is not None:
        print(cells(("constant answer", "", *(f"{first['constant'][name]:.3f}" for name in METRICS), "", "")))
    for arm in (TFIDF, TFIDF_ADJUSTED, RANDOM, PLAIN, *compared):
        own, (difference, verdict) = metrics_of(lines, task, arm), found.get(arm, ("", ""))
        if own is None:
            missing += 1
            print(cells((arm, "", *("" for _ in METRICS), "", "not yet")))
            continue
        rate = "" if arm in (TFIDF, TFIDF_ADJUSTED, *CHANGED) else f"{chosen_rate(lines, task, arm):g}"
        values = [mean_and_deviation([one[name] for one in own]) for name in METRICS]
        print(cells((arm, rate, *values, difference, verdict)))
    return missing


def main() -> int:
    options = arm_options(__doc__ or "", LINES, tables=[*TABLES])
    lines = Lines(options.lines)
    tasks = [TABLES[name] for name in options.tables]
    if not options.table:
        keep_to_cpu_without_accelerator()
        try:
            runner(options, lines, measure).all_arms(tasks, ARMS, SEEDS)
        except Stopped:
            report("stopped: run the same command to continue")
    return report_missing(sum(print_table(lines, task) for task in tasks))


if __name__ == "__main__":
    sys.exit(main())
