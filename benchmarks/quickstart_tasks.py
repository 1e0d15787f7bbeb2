"""What a pretrained model is worth on tasks with few labels, against drawn weights that are trained alike.

    python benchmarks/quickstart_tasks.py --model runs/quickstart --data DIR --folder DIR [--seeds 0 1 2 3 4]
    python benchmarks/quickstart_tasks.py --model runs/quickstart --folder DIR --table

CLINC150 with 10 training texts for each of 150 intents (accuracy on the test texts that have an intent), SNIPS with
200 training texts (F1 of slots on its 700 dev texts) and STS-B (Spearman's correlation on dev). --data holds
clinc150/data_full.json, intent_slot/snips and glue/STS-B. Each seed has its own training texts, which both arms
share, and its own drawn weights. Each arm has the best of three learning rates on texts that are not scored, with
another seed. A run is trained to its end; no checkpoint is chosen.

The command may be stopped and started again: a finished run is a JSON line in FOLDER/lines.jsonl. Exit code 3
unless the mean differences of CLINC150 and of SNIPS are above two standard errors.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from small_runs import REPOSITORY, Lines, Options, cells, command, forget, paired, report

from bert_jax.hashing import permutation
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

RATES = (3e-4, 1e-3, 3e-3)
RATE_SEED = 100
ARMS = ("pretrained", "drawn")
OF_INTENT, SLOT_TEXTS, OTHER_TEXTS = 10, 200, 700  # training texts; texts for the choice of the rate


def few_intents(data: Path, folder: Path, seed: int) -> None:
    splits = json.loads((data / "clinc150/data_full.json").read_text())
    of_intent: dict[str, list[list[str]]] = {}
    for text, intent in splits["train"]:
        of_intent.setdefault(intent, []).append([text, intent])
    chosen = []
    for number, (_, rows) in enumerate(sorted(of_intent.items())):
        chosen += [rows[place] for place in permutation(len(rows), seed, number)[:OF_INTENT]]
    splits = {"train": chosen, "rates": splits["val"], "results": splits["test"]}
    (folder / "texts.json").write_text(json.dumps(splits))


def few_slots(data: Path, folder: Path, seed: int) -> None:
    source = data / "intent_slot/snips"
    for name in ("seq.in", "seq.out", "label"):
        lines = (source / "train" / name).read_text().splitlines(keepends=True)
        order = permutation(len(lines), seed)
        parts = {
            "train": [lines[place] for place in order[:SLOT_TEXTS]],
            "rates": [lines[place] for place in order[SLOT_TEXTS : SLOT_TEXTS + OTHER_TEXTS]],
            "results": (source / "valid" / name).read_text().splitlines(keepends=True),
        }
        for part, texts in parts.items():
            (folder / part).mkdir(exist_ok=True)
            (folder / part / name).write_text("".join(texts))


def pairs_of_sentences(data: Path, folder: Path, seed: int) -> None:
    source = data / "glue/STS-B"
    head, *lines = (source / "train.tsv").read_text().splitlines(keepends=True)
    order = permutation(len(lines), seed)
    (folder / "rates.tsv").write_text(head + "".join(lines[place] for place in order[:OTHER_TEXTS]))
    (folder / "train.tsv").write_text(head + "".join(lines[place] for place in order[OTHER_TEXTS:]))
    (folder / "results.tsv").write_text((source / "dev.tsv").read_text())


@dataclass(frozen=True)
class Few:
    """A task: how its files are written, the file of a part, the metric, options of its runs."""

    write: Callable[[Path, Path, int], None]
    file: str
    metric: str
    options: Options


TASKS = {
    "clinc150": Few(few_intents, "texts.json:{}", "accuracy", {"training.num_epochs": 20.0}),
    "snips": Few(few_slots, "{}", "slot_f1", {"training.num_epochs": 60.0, "training.global_batch_size": 16}),
    "stsb": Few(pairs_of_sentences, "{}.tsv", "spearman", {}),
}


class Study:
    """The runs of all tasks and both arms."""

    def __init__(self, model: Path, data: Path | None, folder: Path) -> None:
        self.model, self.data, self.folder = model, data, folder
        self.lines = Lines(folder / "lines.jsonl")

    def files(self, task: str, seed: int) -> Path:
        """Return the folder with the texts of ``seed``, which is written if it is missing."""
        folder = self.folder / "texts" / f"{task}-{seed}"
        if not (folder / "done").exists():
            assert self.data is not None
            folder.mkdir(parents=True, exist_ok=True)
            TASKS[task].write(self.data, folder, seed)
            (folder / "done").touch()
        return folder

    def start(self, arm: str, seed: int) -> Path:
        """Return the model that an arm starts from; drawn weights are a run of one step without an update."""
        if arm == "pretrained":
            return self.model
        workdir = self.folder / "drawn" / str(seed)
        if not (workdir / "done").exists():
            options = {
                "config": self.model / "config.yaml", "training.num_steps": 1, "training.seed": seed,
                "optimizer.learning_rate": 1e-12, "optimizer.warmup_steps": 0, "training.eval_batches": 1,
                "data.vocab": self.model / "vocab.txt", "data.shards": self.folder / "shards",
            }  # fmt: skip
            report(f"drawn weights of seed {seed}")
            command("run_pretrain.py", options, workdir)
            (workdir / "done").touch()
        return workdir

    def key(self, part: str, task: str, arm: str, seed: int, rate: float) -> str:
        return f"{part}/{task}/{arm}/{seed}/{rate:g}"

    def line(self, part: str, task: str, arm: str, seed: int, rate: float) -> dict[str, Any]:
        """Return the line of a run, which is scored on the texts of ``part``; make the run if there is none."""
        key = self.key(part, task, arm, seed, rate)
        if key not in self.lines.found:
            report(f"run {key}")
            few, folder = TASKS[task], self.files(task, seed)
            options = {
                "config": REPOSITORY / f"configs/finetune/{task}.yaml", "init_from": self.start(arm, seed),
                "data.dir": folder, "data.train": few.file.format("train"), "data.dev": few.file.format(part),
                "data.test": (), "optimizer.learning_rate": rate, "training.seed": seed,
                "training.eval_interval": 1_000_000, "training.checkpoint_interval": 1_000_000, **few.options,
            }  # fmt: skip
            workdir = self.folder / "runs" / key.replace("/", "-")
            line: dict[str, Any] = {"key": key, "score": -math.inf}
            try:
                line["seconds"] = command("run_finetune.py", options, workdir)
                (found,) = json.loads((workdir / "metrics.json").read_text())
                line |= {"score": round(found["metrics"][few.metric]["value"], 5), "n": found["n"]}
            except FloatingPointError:
                report(f"{key}: the loss is not finite")
            forget(workdir)
            self.lines.add(line)
        return self.lines.found[key]

    def rate(self, task: str, arm: str) -> float:
        """Return the best of the three rates."""
        return max(RATES, key=lambda rate: self.line("rates", task, arm, RATE_SEED, rate)["score"])

    def scores(self, task: str, arm: str, seeds: list[int]) -> dict[int, float]:
        """Return the scores of the finished runs by seed."""
        keys = [self.key("rates", task, arm, RATE_SEED, rate) for rate in RATES]
        if not all(key in self.lines.found for key in keys):
            return {}
        rate = self.rate(task, arm)
        found = {seed: self.lines.found.get(self.key("results", task, arm, seed, rate)) for seed in seeds}
        return {seed: line["score"] for seed, line in found.items() if line}


def table(study: Study, seeds: list[int]) -> tuple[list[str], bool]:
    """Return the lines of the table, and whether both differences that count are clear."""
    head = ["task", "seeds", *ARMS, "difference", "standard errors"]
    lines, good = [cells(head), cells(["---"] * len(head))], True
    for task in TASKS:
        a, b = (study.scores(task, arm, seeds) for arm in ARMS)
        both = sorted(set(a) & set(b))
        if not both:
            lines.append(cells([task, 0, *"----"]))
            good &= task == "stsb"
            continue
        differences = [a[seed] - b[seed] for seed in both]
        error = statistics.stdev(differences) / math.sqrt(len(both)) if len(both) > 1 else math.nan
        errors = statistics.mean(differences) / error if error else math.nan
        means = [f"{statistics.mean(each[seed] for seed in both):.3f}" for each in (a, b)]
        lines.append(cells([task, len(both), *means, paired(differences), f"{errors:.1f}"]))
        good &= task == "stsb" or errors > 2
    return lines, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="workdir of a pretraining run")
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
        for seed in options.seeds:
            for arm in ARMS:
                study.line("results", task, arm, seed, study.rate(task, arm))
    lines, good = table(study, options.seeds)
    print("\n".join(lines))
    return 0 if good else 3


if __name__ == "__main__":
    sys.exit(main())
