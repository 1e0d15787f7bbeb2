"""Options of fine-tuning that are compared with plain fine-tuning: several runs in one process, the choice of a
learning rate, and verdicts on differences that are paired over seeds.

A study has *arms*, sets of options, and one of them, ``plain``, has none. A seed determines the training records,
the new parameters and the order of the records for all arms. A run has a fixed number of steps, and its last
parameters predict two sets of records: those of ``choice``, on which each arm has the best of several learning
rates at one seed, and those of ``results``, on which other seeds are scored.
"""

import argparse
import collections
import gc
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy import stats
from small_runs import Lines, Options, cells, paired, report
from small_samples import Record, Texts, tfidf_answers

import bert_jax
from bert_jax.finetuning.artifacts import read_predictions
from bert_jax.process import exits

PLAIN, RANDOM, TFIDF = "plain", "random parameters", "TF-IDF"
RATES = (5e-5, 1e-4, 2e-4)
RATE_SEED = 100  # of the runs that choose a rate; never scored
SOME = 10**6  # steps between evaluations and checkpoints: none before the end of a run
FIXED: Options = {
    "model.pooling": "mean", "input.max_shapes": 2, "training.eval_interval": SOME,
    "training.checkpoint_interval": SOME, "training.log_interval": SOME,
}  # fmt: skip
# The network of all-MiniLM-L6-v2, for runs from random parameters.
NETWORK: Options = {
    "model.num_layers": 6, "model.hidden_size": 384, "model.num_attention_heads": 12, "model.intermediate_size": 1536,
}  # fmt: skip

Answer = dict[str, Any]  # a line of predictions_test.jsonl
Line = dict[str, Any]


@dataclass(frozen=True)
class TaskOfArms:
    """A task of a study. ``texts``: function from the folder of the data and a seed to the records; ``rates``: the
    learning rates from which each arm has the best one."""

    name: str
    kind: str
    texts: Callable[[Path, int], Texts]
    max_length: int
    steps: int
    batch_size: int = 16
    rates: Sequence[float] = RATES

    def key(self, arm: str, rate: float, seed: int) -> str:
        """Return the key of the line of a run."""
        return f"{self.name}/{arm}/{rate:g}/{seed}"


@dataclass
class Runner:
    """Runs in this process, whose results are ``lines``. ``measure``: function from the task, the records and the
    answers to ``choice`` and to ``results`` to the values of a line, which must contain ``choice``, the score that
    chooses rates. The answers are None if the loss of the run was not finite."""

    model: Path
    data: Path
    folder: Path
    lines: Lines
    measure: Callable[[TaskOfArms, Texts, Sequence[Answer] | None, Sequence[Answer] | None], Line]
    until: float = math.inf  # no run starts after this time (time.time())
    _texts: dict[tuple[str, int], Texts] = field(default_factory=dict)

    def texts(self, task: TaskOfArms, seed: int) -> Texts:
        if (task.name, seed) not in self._texts:
            self._texts = {(task.name, seed): task.texts(self.data, seed)}
        return self._texts[task.name, seed]

    def run(self, task: TaskOfArms, arm: str, options: Options, rate: float, seed: int) -> Line:
        """Return the line of a run; make the run if there is none. Raises ``Stopped`` after ``until``, and if a
        signal stops the run."""
        key = task.key(arm, rate, seed)
        if key in self.lines.found:
            return self.lines.found[key]
        if time.time() > self.until:
            raise Stopped
        report(f"run {key}")
        began, texts = time.perf_counter(), self.texts(task, seed)
        answers = self._answers(task, texts, arm, options, rate, seed)
        count = len(texts.choice)
        parts = (None, None) if answers is None else (answers[:count], answers[count:])
        line = {"key": key, **self.measure(task, texts, *parts), "diverged": answers is None}
        self.lines.add(line | {"seconds": round(time.perf_counter() - began, 1)})
        return self.lines.found[key]

    def _answers(
        self, task: TaskOfArms, texts: Texts, arm: str, options: Options, rate: float, seed: int
    ) -> list[Answer] | None:
        """Return the answers of the last parameters of a run to choice and results; None if its loss was not
        finite."""
        workdir = self.folder / "run"
        shutil.rmtree(workdir, ignore_errors=True)
        given: dict[str, Any] = {
            **FIXED, "training.num_steps": task.steps, "training.global_batch_size": task.batch_size,
            "training.compilation_cache": str(self.folder / "compiled"), **options,
        }  # fmt: skip
        if arm == RANDOM:
            given |= {**NETWORK, "data.vocab": str(self.model / "vocab.txt")}
        try:
            run = bert_jax.finetune(
                None if arm == RANDOM else self.model, task=task.kind, train=[*texts.train],
                test=[*texts.choice, *texts.results], workdir=workdir, max_length=task.max_length,
                learning_rate=rate, seed=seed, options=given, report=None,
            )  # fmt: skip
            if not run.results:  # Ctrl-C or SIGTERM
                raise Stopped
            return [answer for _, answer in read_predictions(workdir, "test")]
        except KeyboardInterrupt:  # before the first step
            raise Stopped from None
        except exits.Stop as stop:
            if stop.code != exits.NON_FINITE:
                raise
            return None
        finally:
            shutil.rmtree(workdir, ignore_errors=True)
            jax.clear_caches()
            gc.collect()

    def regression(self, task: TaskOfArms, seed: int) -> Line:
        """Return the line of TF-IDF with a linear model; make it if there is none."""
        key = f"{task.name}/{TFIDF}/{seed}"
        if key not in self.lines.found:
            texts = self.texts(task, seed)
            answers = tfidf_answers(task.kind, texts)
            self.lines.add({"key": key, **self.measure(task, texts, *answers)})
        return self.lines.found[key]

    def arm(self, task: TaskOfArms, arm: str, options: Options, seeds: Iterable[int]) -> None:
        """Make the missing runs of an arm: one for each rate, then one for each seed with the best rate."""
        rate = max(task.rates, key=lambda rate: self.run(task, arm, options, rate, RATE_SEED)["choice"])
        for seed in seeds:
            self.run(task, arm, options, rate, seed)

    def all_arms(self, tasks: Iterable[TaskOfArms], arms: Mapping[str, Options], seeds: Sequence[int]) -> None:
        """Make the missing runs of all arms, the baselines included, task by task."""
        for task in tasks:
            for seed in seeds:
                self.regression(task, seed)
            for arm, options in arms.items():
                self.arm(task, arm, options, seeds)


class Stopped(Exception):
    """The time for further runs is over, or a signal has come."""


def chosen_rate(lines: Lines, task: TaskOfArms, arm: str) -> float | None:
    """Return the rate that the finished runs choose; None if one of them is missing."""
    keys = {rate: task.key(arm, rate, RATE_SEED) for rate in task.rates}
    if not all(key in lines.found for key in keys.values()):
        return None
    return max(task.rates, key=lambda rate: lines.found[keys[rate]]["choice"])


def results_of(lines: Lines, task: TaskOfArms, arm: str, seeds: Sequence[int]) -> list[Line] | None:
    """Return the lines of an arm at its best rate in the order of ``seeds``; None if one of them is missing."""
    rate = chosen_rate(lines, task, arm)
    found = [lines.found.get(task.key(arm, rate, seed)) for seed in seeds] if rate is not None else [None]
    complete = [line for line in found if line is not None]
    return complete if len(complete) == len(found) else None


def differences_of(
    lines: Lines, task: TaskOfArms, arm: str, seeds: Sequence[int], part: str = "results"
) -> list[float] | None:
    """Return the differences to plain in ``part``, paired over seeds; None if a run is missing."""
    own, plain = (results_of(lines, task, one, seeds) for one in (arm, PLAIN))
    if own is None or plain is None:
        return None
    return [one[part] - other[part] for one, other in zip(own, plain, strict=True)]


# ------------------------------------------------------------------ scores and verdicts


def accuracy(answers: Sequence[Answer]) -> float:
    return float(np.mean([one["gold"] == one["label"] for one in answers]))


def pearson(answers: Sequence[Answer]) -> float:
    """Return the correlation of correct and predicted values; 0 if the predicted ones are constant."""
    gold, values = ([float(one[name]) for one in answers] for name in ("gold", "value"))
    return float(np.corrcoef(gold, values)[0, 1]) if np.ptp(values) > 0 else 0.0


def scored(
    task: TaskOfArms, texts: Texts, choice: Sequence[Answer] | None, results: Sequence[Answer] | None
) -> Line:
    """Return the scores of choice and results (accuracy, or Pearson's correlation), that of the constant answer to
    results, the number of these, and True for a failed run, which is at most two standard errors better than the
    constant answer. The score of a run whose loss was not finite is that of the constant answer."""
    n = len(texts.results)
    if task.kind == "regression":
        score, constant, error = pearson, 0.0, 1 / math.sqrt(n)
    else:
        ((label, _),) = collections.Counter(record["label"] for record in texts.train).most_common(1)
        score, constant = accuracy, statistics.mean(record["label"] == label for record in texts.results)
        error = math.sqrt(constant * (1 - constant) / n)
    values = [constant if answers is None else score(answers) for answers in (choice, results)]
    return {
        "choice": round(values[0], 5), "results": round(values[1], 5), "constant": round(constant, 5), "n": n,
        "failed": values[1] <= constant + 2 * error,
    }  # fmt: skip


def holm(p_values: Mapping[str, float], count: int) -> dict[str, float]:
    """Return the p-values adjusted by Holm's method for ``count`` hypotheses, of which those without a value count
    as the least significant, so that a missing value never makes another one smaller."""
    adjusted, highest = {}, 0.0
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda one: one[1])):
        highest = max(highest, min(1.0, (count - place) * p))
        adjusted[name] = highest
    return adjusted


def verdicts(differences: Mapping[str, Sequence[float] | None], bound: float) -> dict[str, tuple[str, str]]:
    """Return (mean difference with its 95% interval, verdict) of each arm from its paired differences to plain;
    ("-", "not yet") for None.

    A difference whose interval lies within ``bound`` of 0 is "within ±bound of plain"; another one "helps" or
    "harms" if its p-value (t-test over seeds), adjusted over all arms by Holm's method, is below 0.05; for all
    others, and for a single seed, which gives no interval, the verdict is "cannot tell".
    """
    known = {arm: values for arm, values in differences.items() if values is not None}
    p_values = {arm: _p_value(values) for arm, values in known.items()}
    adjusted, found = holm(p_values, len(differences)), {}
    for arm in differences:
        if arm not in known:
            found[arm] = ("-", "not yet")
            continue
        of = paired(known[arm])
        if abs(of.mean) + of.half <= bound:
            verdict = f"within ±{bound:g} of plain"
        elif adjusted[arm] < 0.05:
            verdict = "helps" if of.mean > 0 else "harms"
        else:
            verdict = "cannot tell"
        found[arm] = (str(of), verdict)
    return found


def _p_value(values: Sequence[float]) -> float:
    if len(values) < 2:  # shows nothing about other seeds
        return 1.0
    if len({*values}) == 1:  # no variance
        return 1.0 if values[0] == 0 else 0.0
    return float(stats.ttest_1samp(values, 0.0).pvalue)


def mean_and_deviation(values: Sequence[float]) -> str:
    """Return the mean with the standard deviation, which a single value does not have."""
    if len(values) < 2:
        return f"{statistics.mean(values):.3f}"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def table(
    lines: Lines, tasks: Sequence[TaskOfArms], arms: Sequence[str], seeds: Sequence[int], bound: float
) -> int:
    """Print the baselines, plain fine-tuning and ``arms`` on each task and, for the mean of the tasks, the verdicts
    on ``arms``. Values are means over seeds with standard deviations. Return the number of missing verdicts."""
    heads = ("task", "arm", "rate", "score", "failed runs", "difference to plain", "verdict")
    rows: list[Sequence[str]] = [heads, ["---"] * len(heads)]
    for task in tasks:
        plain = [lines.found.get(f"{task.name}/{TFIDF}/{seed}") for seed in seeds]
        if None not in plain:
            known = [line for line in plain if line]
            rows.append((task.name, "constant answer", "", f"{known[0]['constant']:.3f}", "", "", ""))
            rows.append((task.name, TFIDF, "", mean_and_deviation([line["results"] for line in known]), "", "", ""))
        found = verdicts({arm: differences_of(lines, task, arm, seeds) for arm in arms}, bound)
        for arm in (RANDOM, PLAIN, *arms):
            own, (difference, verdict) = results_of(lines, task, arm, seeds), found.get(arm, ("", ""))
            if own is None:
                rows.append((task.name, arm, "", "", "", "", "not yet"))
                continue
            failed = f"{sum(line['failed'] for line in own)} of {len(own)}"
            score = mean_and_deviation([line["results"] for line in own])
            rate = f"{chosen_rate(lines, task, arm):g}"
            rows.append((task.name, arm, rate, score, failed, difference, verdict))
    means: dict[str, list[float] | None] = {}
    for arm in arms:
        of_tasks = [differences_of(lines, task, arm, seeds) for task in tasks]
        known_tasks = [one for one in of_tasks if one is not None]
        is_known = len(known_tasks) == len(tasks)
        means[arm] = [statistics.mean(one) for one in zip(*known_tasks, strict=True)] if is_known else None
    for arm, (difference, verdict) in verdicts(means, bound).items():
        rows.append(("mean of tasks", arm, "", "", "", difference, verdict))
    print("\n".join(map(cells, rows)))
    return sum(row[-1] == "not yet" for row in rows)


def arm_options(description: str, folder: Path, **subsets: Sequence[str]) -> argparse.Namespace:
    """Return the options of a study: model, data, folder, minutes and table, and one for each of ``subsets``, whose
    values are some of those given (default: all). ``folder``: where the lines are."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path, help="folder of the task files")
    parser.add_argument("--folder", type=Path, help="compiled programs, and the current run")
    parser.add_argument("--lines", type=Path, default=folder, help="JSON lines of finished runs")
    parser.add_argument("--minutes", type=float, help="start no run after this time")
    parser.add_argument("--table", action="store_true", help="train nothing")
    for name, values in subsets.items():
        parser.add_argument(f"--{name}", nargs="+", choices=values, default=[*values])
    options = parser.parse_args()
    if not options.table and not (options.model and options.data and options.folder):
        parser.error("--model, --data, --folder: name the model, the data and a folder, or give --table")
    return options


def runner(options: argparse.Namespace, lines: Lines, measure: Callable[..., Line]) -> Runner:
    model, data, folder = (path.resolve() for path in (options.model, options.data, options.folder))
    folder.mkdir(parents=True, exist_ok=True)
    until = math.inf if options.minutes is None else time.time() + 60 * options.minutes
    return Runner(model, data, folder, lines, measure, until)
