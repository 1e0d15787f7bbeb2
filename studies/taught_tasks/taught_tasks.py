"""A small student of a task: labels alone, a teacher too, and a teacher with texts that have no labels.

    python studies/taught_tasks/taught_tasks.py --model MINILM --data DIR --folder DIR [--seeds 0 1 2 3 4] [--tasks clinc150]
    python studies/taught_tasks/taught_tasks.py --model MINILM --folder DIR --table

The teacher is --model (all-MiniLM-L6-v2, 6 layers) tuned on the labels; the student starts from its layers 1, 3 and
5 before they were tuned. Heads read the mean of the tokens, as the vectors of --model do. CLINC150: 10 labels for
each of 150 intents, 90 texts of each without labels, accuracy on the test texts that have an intent. SST-2: 1,000
labels, 20,000 texts without, accuracy on dev and 10,000 other training texts. --data holds clinc150/data_full.json
and glue/SST-2. Each seed has its own labels, which all arms share. Each arm has the best of three learning rates on
texts that are not scored, with another seed; with the rate of the arm `taught`, other temperatures, weights and
numbers of epochs are scored on the same texts.

The command may be stopped and started again: a finished run is a JSON line in FOLDER/lines.jsonl. Exit code 3
unless each step (labels, taught, more) is better than the one before it by more than two standard errors in both
tasks.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
from small_runs import Lines, Options, cells, forget, paired, report
from small_tasks import RATE_SEED, RATE_TEXTS, SmallTask, score, texts, write_intents

from bert_jax.hashing import permutation
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

OF_INTENT, SST2_LABELS, SST2_UNLABELLED, SST2_SCORED = 10, 1000, 20_000, 10_000
RATES = {"clinc150": (1e-4, 3e-4, 1e-3), "sst2": (3e-5, 1e-4, 3e-4)}
MEAN: Options = {"model.pooling": "mean"}
STUDENT: Options = {"init_layers": (1, 3, 5)}
# Arm -> options beside those of the task; the epochs of "more" see each text about as often as the time allows.
ARMS: dict[str, Options] = {"teacher": {}, "labels": STUDENT, "taught": STUDENT, "more": STUDENT}
STEPS = (("labels", "taught"), ("taught", "more"))
VARIANTS: dict[str, Options] = {
    "temperature 1": {"distillation.temperature": 1.0},
    "temperature 4": {"distillation.temperature": 4.0},
    "weight 0.9": {"distillation.weight": 0.9},
    "weight 1": {"distillation.weight": 1.0},
    "twice the epochs": {"training.num_epochs": 40.0},
    "twice the epochs, weight 1": {"training.num_epochs": 40.0, "distillation.weight": 1.0},
}


def write_sentiment(data: Path, folder: Path, seed: int, count: int = SST2_LABELS) -> None:
    """Write SST-2 with ``count`` labeled training texts; the scored texts are dev and 10,000 training texts, the
    same for every seed."""
    source = data / "glue/SST-2"
    head, *lines = (source / "train.tsv").read_text().splitlines(keepends=True)
    _, *dev = (source / "dev.tsv").read_text().splitlines(keepends=True)
    order = permutation(len(lines), 0)
    left = [lines[place] for place in order[SST2_SCORED:]]
    chosen = [left[place] for place in permutation(len(left), seed, 1)]
    rates, rest = chosen[:RATE_TEXTS], chosen[RATE_TEXTS:]
    parts = {
        "rates": rates, "train": rest[:count], "unlabelled": rest[count:][:SST2_UNLABELLED],
        "results": dev + [lines[place] for place in order[:SST2_SCORED]],
    }  # fmt: skip
    for part, own in parts.items():
        (folder / f"{part}.tsv").write_text(head + "".join(own))


# Task, and the epochs of the arm "more", whose texts are ten and twenty times as many.
TASKS: dict[str, tuple[SmallTask, float]] = {
    "clinc150": (
        SmallTask(
            "clinc150", lambda data, folder, seed: write_intents(data / "clinc150", folder, seed, OF_INTENT),
            "texts.json:{}", "accuracy", {"training.num_epochs": 20.0, **MEAN},
        ),
        6.0,
    ),
    "sst2": (
        SmallTask("sst2", write_sentiment, "{}.tsv", "accuracy", {"training.num_epochs": 10.0, **MEAN}), 3.0,
    ),
}  # fmt: skip


class Study:
    """The runs of all tasks and arms."""

    def __init__(self, model: Path, data: Path | None, folder: Path) -> None:
        self.model, self.data, self.folder = model, data, folder
        self.lines = Lines(folder / "lines.jsonl")

    def options(self, task: str, arm: str, seed: int) -> Options:
        """Return the options of a run of an arm."""
        small, epochs = TASKS[task]
        options = {**small.options, **ARMS[arm]}
        if arm in ("taught", "more"):
            options["teacher"] = self.teacher(task, seed)
        if arm == "more":
            options |= {"data.unlabelled": small.file.format("unlabelled"), "training.num_epochs": epochs}
        return options

    def teacher(self, task: str, seed: int) -> Path:
        """Return the workdir of the teacher of a seed, which is trained if it is missing."""
        part, rate = "rates" if seed == RATE_SEED else "results", self.rate(task, "teacher")
        workdir = self.workdir(self.key(part, task, "teacher", seed, rate))
        if not (workdir / "report_data.json").exists():
            self.run(part, task, "teacher", seed, rate, {})
        return workdir

    def workdir(self, key: str) -> Path:
        return self.folder / "runs" / key.replace("/", "-").replace(" ", "_")

    def key(self, part: str, task: str, arm: str, seed: int, rate: float, variant: str = "") -> str:
        return f"{part}/{task}/{arm}/{seed}/{rate:g}" + (f"/{variant}" if variant else "")

    def run(self, part: str, task: str, arm: str, seed: int, rate: float, changes: Options) -> dict[str, Any]:
        small, _ = TASKS[task]
        files = texts(small, self.data, self.folder / "texts" / f"{task}-{seed}", seed)
        own = dataclasses.replace(small, options={**self.options(task, arm, seed), **changes})
        workdir = self.workdir(self.key(part, task, arm, seed, rate, "".join(map(str, changes.values()))))
        return score(own, part, files, self.model, rate, seed, workdir, keep=arm == "teacher")

    def line(self, part: str, task: str, arm: str, seed: int, rate: float, variant: str = "") -> dict[str, Any]:
        """Return the line of a run, which is scored on the texts of ``part``; make the run if there is none."""
        key = self.key(part, task, arm, seed, rate, variant)
        if key not in self.lines.found:
            report(f"run {key}")
            changes = VARIANTS[variant] if variant else {}
            self.lines.add({"key": key} | self.run(part, task, arm, seed, rate, changes))
        return self.lines.found[key]

    def rate(self, task: str, arm: str) -> float:
        """Return the best of the three rates."""
        return max(RATES[task], key=lambda rate: self.line("rates", task, arm, RATE_SEED, rate)["score"])

    def make(self, task: str, seeds: Sequence[int]) -> None:
        """Make the missing runs of a task."""
        for seed in seeds:
            for arm in ARMS:
                self.line("results", task, arm, seed, self.rate(task, arm))
            key = self.key("results", task, "teacher", seed, self.rate(task, "teacher"))
            forget(self.workdir(key))
        rate = self.rate(task, "taught")
        for variant in VARIANTS:
            self.line("rates", task, "taught", RATE_SEED, rate, variant)
        for rate in RATES[task]:
            forget(self.workdir(self.key("rates", task, "teacher", RATE_SEED, rate)))

    def scores(self, task: str, arm: str, seeds: Sequence[int]) -> dict[int, float]:
        """Return the scores of the finished runs by seed."""
        keys = [self.key("rates", task, arm, RATE_SEED, rate) for rate in RATES[task]]
        if not all(key in self.lines.found for key in keys):
            return {}
        rate = self.rate(task, arm)
        found = {seed: self.lines.found.get(self.key("results", task, arm, seed, rate)) for seed in seeds}
        return {seed: line["score"] for seed, line in found.items() if line}

    def variants(self, task: str) -> dict[str, float]:
        """Return the scores of the finished variants of the arm ``taught``, and its own."""
        if not self.scores(task, "taught", [0]):
            return {}
        rate = self.rate(task, "taught")
        keys = {name: self.key("rates", task, "taught", RATE_SEED, rate, name) for name in ("", *VARIANTS)}
        lines = {name or "as it is": self.lines.found.get(key) for name, key in keys.items()}
        return {name: line["score"] for name, line in lines.items() if line}


def table(study: Study, seeds: Sequence[int]) -> tuple[list[str], bool]:
    """Return the lines of the tables, and whether every step is clear."""
    head = ["task", "seeds", *ARMS, *(f"{b} - {a}" for a, b in STEPS)]
    lines, good = [cells(head), cells(["---"] * len(head))], True
    for task in TASKS:
        scores = {arm: study.scores(task, arm, seeds) for arm in ARMS}
        both = sorted(set.intersection(*map(set, scores.values())))
        if not both:
            lines.append(cells([task, 0, *"-" * (len(ARMS) + len(STEPS))]))
            good = False
            continue
        steps = [paired([scores[b][seed] - scores[a][seed] for seed in both]) for a, b in STEPS]
        means = [f"{statistics.mean(scores[arm][seed] for seed in both):.3f}" for arm in ARMS]
        lines.append(cells([task, len(both), *means, *steps]))
        good &= len(both) == len(seeds) and all(step.mean > 2 * step.error for step in steps)
    for task in TASKS:
        found = study.variants(task)
        if found:
            lines += ["", cells([f"{task}, taught", "score"]), cells(["---"] * 2)]
            lines += [cells([name, f"{score:.3f}"]) for name, score in found.items()]
    return lines, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the model that is tuned to be the teacher")
    parser.add_argument("--data", type=Path, help="folder of the task files")
    parser.add_argument("--folder", type=Path, required=True, help="texts, runs and finished lines")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    if not options.table and options.data is None:
        parser.error("--data: name the folder of the task files")
    keep_to_cpu_without_accelerator()
    study = Study(options.model, options.data, options.folder)
    for task in () if options.table else options.tasks:
        study.make(task, options.seeds)
    lines, good = table(study, options.seeds)
    print("\n".join(lines))
    return 0 if good else 3


if __name__ == "__main__":
    sys.exit(main())
