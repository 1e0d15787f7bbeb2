"""Vectors that may be cut: training that expects it against training that does not, on STS-B.

    python studies/matryoshka/matryoshka.py --model MINILM --data DIR --folder DIR [--seeds 0 1 2] [--table]
        [--losses cosine cosent]

--model (all-MiniLM-L6-v2, vectors of 384 values) is tuned on STS-B's training pairs with each loss: ``plain``, and
``nested`` with sentence.matryoshka 96 48. Both are scored on dev at 384, 96 and 48 values: Spearman's correlation
of the cosines of the first values. Rates are chosen on 700 training pairs that no run is trained on, with another
seed, by the score of whole vectors. --data holds glue/STS-B.

The command may be stopped and started again: a finished run is a JSON line in FOLDER/lines.jsonl. Exit code 3
unless ``nested`` is better by more than two standard errors at 96 and at 48, and at most 0.003 worse at 384, with
each of --losses.
"""

import csv
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
from small_runs import Lines, Options, cells, forget, paired, report
from small_tasks import RATE_SEED, SmallTask, score, study_options, texts, write_table

from bert_jax.inference.loaded import load
from bert_jax.metrics.correlation import regression_scores
from bert_jax.metrics.score import value
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

WIDTHS = (384, 96, 48)
RATES = (1e-5, 3e-5, 1e-4)
# The arms of each loss: without and with nested vectors.
ARMS = {"cosine": ("plain", "nested"), "cosent": ("plain, cosent", "nested, cosent")}
ALLOWED = 0.003
TASK = SmallTask(
    "sbert_sts", lambda data, folder, seed: write_table(data / "glue/STS-B", folder, seed), "{}.tsv", "spearman",
    {"training.num_epochs": 2.0},
)  # fmt: skip


def scores(model: Path, file: Path) -> dict[str, float]:
    """Return Spearman's correlation of the cosines of the pairs in ``file`` at each width."""
    with file.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    sentences = [row[name] for name in ("sentence1", "sentence2") for row in rows]
    labels, found = np.array([float(row["score"]) for row in rows]), {}
    loaded = load(model)
    for width in WIDTHS:
        vectors = loaded.embed(sentences, normalize=True, width=width)
        cosines = np.sum(vectors[: len(rows)] * vectors[len(rows) :], axis=1)
        named = {one.name: one for one in regression_scores(labels, cosines)}
        found[str(width)] = round(value(named["spearman"], len(rows)), 5)
    return found


def arm_options(arm: str) -> Options:
    """Return the options by which the runs of an arm differ from the recipe."""
    loss = next(loss for loss, arms in ARMS.items() if arm in arms)
    return {"sentence.loss": loss} | ({"sentence.matryoshka": WIDTHS[1:]} if arm == ARMS[loss][1] else {})


class Study:
    """The runs of all arms."""

    def __init__(self, model: Path | None, data: Path | None, folder: Path) -> None:
        self.model, self.data, self.folder = model, data, folder
        self.lines = Lines(folder / "lines.jsonl")

    def line(self, part: str, arm: str, seed: int, rate: float) -> dict[str, Any]:
        """Return the line of a run; make the run if there is none."""
        key = f"{part}/{arm}/{seed}/{rate:g}"
        if key not in self.lines.found:
            report(f"run {key}")
            files = texts(TASK, self.data, self.folder / "texts" / str(seed), seed)
            own = dataclasses.replace(TASK, options={**TASK.options, **arm_options(arm)})
            workdir = self.folder / "runs" / key.replace("/", "-")
            assert self.model is not None
            line = score(own, part, files, self.model, rate, seed, workdir, keep=True)
            self.lines.add({"key": key, **line, **scores(workdir, files / TASK.file.format(part))})
            forget(workdir)
        return self.lines.found[key]

    def rate(self, arm: str) -> float:
        """Return the best of the three rates."""
        return max(RATES, key=lambda rate: self.line("rates", arm, RATE_SEED, rate)[str(WIDTHS[0])])

    def results(self, arm: str, seeds: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return the finished runs by seed."""
        keys = [f"rates/{arm}/{RATE_SEED}/{rate:g}" for rate in RATES]
        if not all(key in self.lines.found for key in keys):
            return {}
        rate = self.rate(arm)
        found = {seed: self.lines.found.get(f"results/{arm}/{seed}/{rate:g}") for seed in seeds}
        return {seed: line for seed, line in found.items() if line}


def table(study: Study, seeds: Sequence[int], losses: Sequence[str] = tuple(ARMS)) -> tuple[list[str], bool]:
    """Return the lines of the table, and whether it is above the bars."""
    rows, good = [cells(["loss", "values", "seeds", "plain", "nested", "nested - plain"]), cells(["---"] * 6)], True
    for loss in losses:
        found = [study.results(arm, seeds) for arm in ARMS[loss]]
        both = sorted(set(found[0]) & set(found[1]))
        good &= bool(both)
        for width in map(str, WIDTHS if both else ()):
            means = [f"{statistics.mean(each[seed][width] for seed in both):.4f}" for each in found]
            difference = paired([found[1][seed][width] - found[0][seed][width] for seed in both])
            plus_minus = f"{difference.mean:+.4f} ± {difference.half:.4f}"
            rows.append(cells([loss, width, len(both), *means, plus_minus]))
            is_whole = width == str(WIDTHS[0])
            good &= difference.mean >= -ALLOWED if is_whole else difference.mean > 2 * difference.error
    return rows, good


def main() -> int:
    options = study_options(__doc__, model="the model that is tuned", seeds=(0, 1, 2), losses=tuple(ARMS))
    keep_to_cpu_without_accelerator()
    study = Study(options.model, options.data, options.folder)
    for seed in () if options.table else options.seeds:
        for arm in (arm for loss in options.losses for arm in ARMS[loss]):
            study.line("results", arm, seed, study.rate(arm))
    rows, good = table(study, options.seeds, options.losses)
    print("\n".join(rows))
    return 0 if good else 3


if __name__ == "__main__":
    sys.exit(main())
