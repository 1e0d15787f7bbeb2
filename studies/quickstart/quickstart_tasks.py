"""What a pretrained model is worth on tasks with few labels, against drawn weights that are trained alike.

    python studies/quickstart/quickstart_tasks.py --model runs/quickstart --data DIR --folder DIR [--seeds 0 1 2 3 4]
    python studies/quickstart/quickstart_tasks.py --model runs/quickstart --folder DIR --table

CLINC150 with 10 training texts for each of 150 intents (accuracy on the test texts that have an intent), SNIPS with
200 training texts (F1 of slots on its 700 dev texts) and STS-B (Spearman's correlation on dev). --data holds
clinc150/data_full.json, intent_slot/snips and glue/STS-B. Each seed has its own training texts, which both arms
share, and its own drawn weights. Each arm has the best of three learning rates on texts that are not scored, with
another seed. A run is trained to its end; no checkpoint is chosen.

The command may be stopped and started again: a finished run is a JSON line in FOLDER/lines.jsonl. Exit code 3
unless the mean differences of CLINC150 and of SNIPS are above two standard errors.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
from small_runs import Lines, cells, command, paired, report
from small_tasks import (
    DRAWN_WEIGHTS,
    RATE_SEED,
    RATES,
    SmallTask,
    score,
    texts,
    write_intents,
    write_slots,
    write_table,
)

from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

ARMS = ("pretrained", "drawn")
OF_INTENT, SLOT_TEXTS = 10, 200  # training texts


TASKS = {
    "clinc150": SmallTask(
        "clinc150",
        lambda data, folder, seed: write_intents(data / "clinc150", folder, seed, OF_INTENT),
        "texts.json:{}",
        "accuracy",
        {"training.num_epochs": 20.0},
    ),
    "snips": SmallTask(
        "snips",
        lambda data, folder, seed: write_slots(data / "intent_slot/snips", folder, seed, SLOT_TEXTS),
        "{}",
        "slot_f1",
        {"training.num_epochs": 60.0, "training.global_batch_size": 16},
    ),
    "stsb": SmallTask(
        "stsb", lambda data, folder, seed: write_table(data / "glue/STS-B", folder, seed), "{}.tsv", "spearman", {}
    ),
}


class Study:
    """The runs of all tasks and both arms."""

    def __init__(self, model: Path, data: Path | None, folder: Path) -> None:
        self.model, self.data, self.folder = model, data, folder
        self.lines = Lines(folder / "lines.jsonl")

    def files(self, task: str, seed: int) -> Path:
        return texts(TASKS[task], self.data, self.folder / "texts" / f"{task}-{seed}", seed)

    def start(self, arm: str, seed: int) -> Path:
        """Return the model that an arm starts from; drawn weights are a run of one step without an update."""
        if arm == "pretrained":
            return self.model
        workdir = self.folder / "drawn" / str(seed)
        if not (workdir / "done").exists():
            options = {
                "config": self.model / "config.yaml", "training.seed": seed, "training.eval_batches": 1,
                "data.vocab": self.model / "vocab.txt", "data.shards": self.folder / "shards", **DRAWN_WEIGHTS,
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
            workdir = self.folder / "runs" / key.replace("/", "-")
            files, model = self.files(task, seed), self.start(arm, seed)
            self.lines.add({"key": key} | score(TASKS[task], part, files, model, rate, seed, workdir))
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
