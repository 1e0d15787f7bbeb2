"""Early exit against a smaller network, on SST-2: quality, layers and time.

    python studies/early_exit/early_exit.py --model MINILM --data DIR --folder DIR [--seeds 0 1 2] [--table]

``exits`` is --model (all-MiniLM-L6-v2, 6 layers) with a head on each lower layer, all trained together on the
labels. ``taught`` is the network of its layers 1, 3 and 5, taught by --model tuned on the same labels; ``three`` is
the same network with the labels alone. Heads read the mean of the tokens, as the vectors of --model do, since the
first token of its lower layers says nothing (README.md). All read the same 6,000 training texts of a
seed; the scored texts are dev and 10,000 other training texts. Rates are chosen on texts that are not scored, with
another seed. Each network predicts the scored texts in the same process, one after the other: the seconds are those
of the better of two passes.

The table shows the accuracy of early exit at several thresholds, and its accuracy at the layers and at the seconds
of ``taught``, linear between two thresholds, with differences paired over seeds, and none where every threshold
costs more. The command may be stopped and started again: a finished run is a JSON line in FOLDER/lines.jsonl. Exit
code 3 unless early exit is above ``taught`` by more than two standard errors at both costs.
"""

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "taught_tasks"))
from small_runs import Lines, Options, cells, forget, paired, report
from small_tasks import RATE_SEED, SmallTask, score, study_options, texts
from taught_tasks import write_sentiment

from bert_jax.contrib.compression.early_exit import ExitPoint, exit_curve, measured
from bert_jax.inference.loaded import load
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

LABELS = 6000
RATES = (3e-5, 1e-4, 3e-4, 1e-3)
ENTROPIES = tuple(round(share * math.log(2), 4) for share in (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9))
TASK = SmallTask(
    "sst2", lambda data, folder, seed: write_sentiment(data, folder, seed, LABELS), "{}.tsv", "accuracy",
    {"training.num_epochs": 3.0, "model.pooling": "mean"},
)  # fmt: skip
THREE: Options = {"init_layers": (1, 3, 5)}
ARMS: dict[str, Options] = {
    "teacher": {},
    "exits": {"loss.layers": (1, 2, 3, 4, 5), "loss.layer_heads": "own", "loss.layer_weight": 1.0},
    "three": THREE,
    "taught": THREE,
}


class Study:
    """The runs of all arms."""

    def __init__(self, model: Path | None, data: Path | None, folder: Path) -> None:
        self.model, self.data, self.folder = model, data, folder
        self.lines = Lines(folder / "lines.jsonl")

    def workdir(self, part: str, arm: str, seed: int, rate: float) -> Path:
        return self.folder / "runs" / f"{part}-{arm}-{seed}-{rate:g}"

    def train(self, part: str, arm: str, seed: int, rate: float) -> tuple[Path, float]:
        """Return the workdir and the score of a run."""
        options = dict(ARMS[arm])
        if arm == "taught":
            options["teacher"] = self.trained(part, "teacher", seed)
        files = texts(TASK, self.data, self.folder / "texts" / str(seed), seed)
        workdir = self.workdir(part, arm, seed, rate)
        own = dataclasses.replace(TASK, options={**TASK.options, **options})
        assert self.model is not None
        return workdir, score(own, part, files, self.model, rate, seed, workdir, keep=True)["score"]

    def trained(self, part: str, arm: str, seed: int) -> Path:
        """Return the workdir of a run with the best rate, which is made if it is missing."""
        rate = self.rate(arm)
        workdir = self.workdir(part, arm, seed, rate)
        return workdir if (workdir / "report_data.json").exists() else self.train(part, arm, seed, rate)[0]

    def rate(self, arm: str) -> float:
        def found(rate: float) -> float:
            key = f"rates/{arm}/{rate:g}"
            if key not in self.lines.found:
                report(f"run {key}")
                workdir, value = self.train("rates", arm, RATE_SEED, rate)
                if arm != "teacher":
                    forget(workdir)
                self.lines.add({"key": key, "score": value})
            return float(self.lines.found[key]["score"])

        return max(RATES, key=found)

    def measure(self, seed: int) -> None:
        """Train and measure all arms of a seed, unless they are measured."""
        key = f"results/{seed}"
        if key in self.lines.found:
            return
        report(f"run {key}")
        folders = {arm: self.trained("results", arm, seed) for arm in ARMS}
        head, *lines = (self.folder / "texts" / str(seed) / "results.tsv").read_text().splitlines()
        assert head.split("\t") == ["sentence", "label"]
        examples = self.folder / "texts" / str(seed) / "results.jsonl"
        pairs = (line.split("\t") for line in lines)
        examples.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in pairs))
        line: dict[str, Any] = {"key": key}
        curve = exit_curve(load(folders["exits"]), [str(examples)], ENTROPIES)
        line["exits"] = [_point(point) for point in curve]
        for arm in ("teacher", "three", "taught"):
            line[arm] = _point(measured(load(folders[arm]), [str(examples)]))
        self.lines.add(line)
        for folder in folders.values():
            forget(folder)


def _point(point: ExitPoint) -> dict[str, Any]:
    return {
        "entropy": point.entropy, "layers": round(point.layers, 3), "accuracy": round(point.metrics["accuracy"], 5),
        "seconds": round(point.seconds, 3),
    }  # fmt: skip


def at(curve: Sequence[dict[str, Any]], cost: str, value: float) -> float | None:
    """Return the accuracy of early exit at a cost (layers or seconds), linear between two thresholds; None outside
    of the costs of the curve."""
    points = sorted((point[cost], point["accuracy"]) for point in curve)
    costs, accuracies = zip(*points, strict=True)
    return float(np.interp(value, costs, accuracies)) if costs[0] <= value <= costs[-1] else None


def table(lines: Lines, seeds: Sequence[int]) -> tuple[list[str], bool]:
    """Return the lines of the tables, and whether all seeds are measured and early exit is clearly above."""
    found = [lines.found[f"results/{seed}"] for seed in seeds if f"results/{seed}" in lines.found]
    rows = [cells(["network", "entropy", "layers", "seconds", "accuracy"]), cells(["---"] * 5)]
    if not found:
        return rows, False

    def mean(points: Sequence[dict[str, Any]]) -> list[str]:
        names = {"layers": 2, "seconds": 2, "accuracy": 4}
        return [f"{statistics.mean(point[name] for point in points):.{n}f}" for name, n in names.items()]

    for arm in ("teacher", "three", "taught"):
        rows.append(cells([arm, "", *mean([line[arm] for line in found])]))
    for points in zip(*(line["exits"] for line in found), strict=True):
        entropy = points[0]["entropy"]
        rows.append(cells(["exits", "all layers" if entropy is None else f"{entropy:.3f}", *mean(points)]))
    rows += ["", cells(["exits - taught, at the same", "seeds", "difference"]), cells(["---"] * 3)]
    good = len(found) == len(seeds)
    for cost in ("layers", "seconds"):
        pairs = [(at(line["exits"], cost, line["taught"][cost]), line["taught"]["accuracy"]) for line in found]
        differences = [accuracy - taught for accuracy, taught in pairs if accuracy is not None]
        least = min(point[cost] for line in found for point in line["exits"])
        never = f"early exit costs at least {least:.2f}"
        difference = paired(differences) if differences else None
        rows.append(cells([cost, len(differences), difference or never]))
        good &= difference is not None and difference.mean > 2 * difference.error
    return rows, good


def main() -> int:
    options = study_options(__doc__, model="the model that is tuned", seeds=(0, 1, 2))
    keep_to_cpu_without_accelerator()
    study = Study(options.model, options.data, options.folder)
    for seed in () if options.table else options.seeds:
        study.measure(seed)
    rows, whole = table(study.lines, options.seeds)
    print("\n".join(rows))
    return 0 if whole else 3


if __name__ == "__main__":
    sys.exit(main())
