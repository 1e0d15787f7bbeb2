"""Fine-tuning against transformers' Trainer: the same start model, inputs, batches, schedule and seeds.

    python studies/finetuning/finetune_quality.py --out FOLDER --peer_python PYTHON --seeds 0 1 2 -- \\
        --config configs/finetune/rte.yaml --init_from MODEL --data.dir glue/RTE --optimizer.learning_rate 5e-5

The arguments after ``--`` are options of run_finetune.py; MODEL is a Hugging Face folder. Prints a table of each
seed and their mean: metrics of the last parameters (without selection on the dev split), decoded
and scored by this library for both sides, and seconds. The standard error of the difference of a seed is that of a
bootstrap over the records, the standard error of the mean that over the seeds. Each side draws its own new head and
its own dropout.

``training s`` is without start-up, reading and evaluation; ours includes compilation. ``command s`` is the whole
process; ours evaluates, predicts, exports and reports. Each seed of a side is kept in FOLDER and not run again:
the same command with other ``--seeds`` or without ``--only`` adds to it.

``--losses N`` compares instead the losses of the first N steps without dropout, from the same head. In transformers
the softmax of question answering is also over padding, which is excluded here. Exit code 3 if a loss differs by
more than 1e-4.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from finetune_runs import Prepared, prepare, run_ours, run_torch, write_features, write_start

from bert_jax.config import RunOptions
from bert_jax.config.loader import take_options
from bert_jax.finetuning.evaluation import scores_of
from bert_jax.metrics import Score, value
from bert_jax.metrics.resampling import paired_bootstrap
from bert_jax.metrics.squad import squad_scores
from bert_jax.tasks.task import Prediction

# Of the losses of --losses.
BAR = 1e-4
# A 95% interval is so many standard errors wide.
WIDTH = 2 * 1.96


# ------------------------------------------------------------------ scores


def predictions(run: Prepared, folder: Path, split: str) -> list[Prediction]:
    """Return the predictions of our run in ``folder``, or those that the task decodes from the logits of the other
    side."""
    if (folder / f"predictions_{split}.jsonl").exists():
        lines = (folder / f"predictions_{split}.jsonl").read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line]
    units = run.units(split)
    with np.load(folder / f"logits_{split}.npz") as stored:
        arrays = dict(stored)
    if run.config.task.kind == "tagging":
        logits = arrays.pop("logits")
        chances = 1 / np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
        arrays = {"tags": logits.argmax(-1), "scores": chances}
    if run.config.task.kind in ("tagging", "qa"):
        ends = np.cumsum([unit.length for unit in units])[:-1]
        columns: dict[str, Any] = {name: np.split(values, ends) for name, values in arrays.items()}
    else:
        columns = arrays
    outputs = [{name: values[i] for name, values in columns.items()} for i in range(len(units))]
    return run.task.decode(run.splits[split], units, outputs)


def null_odds(prediction: Prediction) -> float:
    """Return the score of no answer minus that of the best span."""
    return prediction["no_answer_score"] - prediction["score"]


@dataclass(frozen=True)
class Scored:
    """A metric of ``count`` records."""

    score: Score
    count: int

    @property
    def value(self) -> float:
        return value(self.score, self.count)


def scored(run: Prepared, split: str, predictions: Sequence[Prediction]) -> dict[str, Scored]:
    """By name. Where some questions have no answer also f1 and exact of every second article: as they are
    (NAME/same_half), and at the threshold that is best for f1 on the other articles (NAME/chosen_threshold)."""
    records = run.splits[split]
    scores, count = scores_of(run.task, records, predictions)
    found = {score.name: Scored(score, count) for score in scores}
    titles = sorted({record.group for record in records if record.group})
    if "f1/no_answer" not in found or len(titles) < 2:
        return found
    choosing = set(titles[::2])
    halves = [
        [
            (one["best_answer"], [answer.text for answer in record.answers or ()], null_odds(one))
            for record, one in zip(records, predictions, strict=True)
            if record.answers is not None and (record.group in choosing) is chooses
        ]
        for chooses in (True, False)
    ]
    choosing_scores = {score.name: score for score in squad_scores(*zip(*halves[0], strict=True))}
    best = value(choosing_scores["f1/best_threshold_value"], len(halves[0]))
    scores = squad_scores(*zip(*halves[1], strict=True), best)
    plain = squad_scores(*zip(*halves[1], strict=True), run.config.qa.null_threshold)
    for name, several in (("chosen_threshold", scores), ("same_half", plain)):
        found |= {f"{s.name}/{name}": Scored(s, len(halves[1])) for s in several if s.name in ("f1", "exact")}
    return found


# ------------------------------------------------------------------ table


@dataclass(frozen=True)
class Side:
    """Results of one seed of one side."""

    scores: dict[tuple[str, str], Scored]  # by split and metric
    seconds: dict[str, float]

    @property
    def training(self) -> float:
        return self.seconds["steps"] + self.seconds.get("compiling", 0.0)


def read_sides(run: Prepared, ours: Path, peer: Path, seeds: Sequence[int]) -> dict[int, tuple[Side, Side]]:
    """Return both sides of every seed that both have finished."""
    found = {}
    for seed in seeds:
        folders = [side / f"seed{seed}" for side in (ours, peer)]
        if not all((folder / "seconds.json").exists() for folder in folders):
            print(f"seed {seed}: not finished on both sides")
            continue
        sides = []
        for folder in folders:
            scores = {}
            for split in run.predicted:
                given = predictions(run, folder, split)
                scores |= {(split, name): one for name, one in scored(run, split, given).items()}
            sides.append(Side(scores, json.loads((folder / "seconds.json").read_text())))
        found[seed] = (sides[0], sides[1])
    return found


def table(sides: Mapping[int, tuple[Side, Side]], metrics: Sequence[tuple[str, str]]) -> list[str]:
    """Return a row per metric and seed, with seconds in the row of the first metric."""
    head = ["split", "metric", "seed", "ours", "torch", "difference", "s.e.", "training s: ours (compiling)",
            "torch", "torch / ours", "command s: ours", "torch", "torch / ours"]  # fmt: skip
    lines = [cells(head), cells(["---"] * len(head))]
    for number, key in enumerate(metrics):
        rows = {seed: [side.scores[key] for side in pair] for seed, pair in sides.items()}
        differences = []
        for seed, (a, b) in rows.items():
            found = paired_bootstrap(a.score, b.score, a.count, seed)
            differences.append(found.difference)
            error = (found.high - found.low) / WIDTH
            row = [*key, str(seed), f"{a.value:.4f}", f"{b.value:.4f}", f"{found.difference:+.4f}", f"{error:.4f}"]
            lines.append(cells(row + (times([sides[seed]]) if not number else [""] * 6)))
        means = [statistics.mean(pair[side].value for pair in rows.values()) for side in (0, 1)]
        error = statistics.stdev(differences) / len(rows) ** 0.5 if len(rows) > 1 else float("nan")
        row = [*key, "mean", *(f"{mean:.4f}" for mean in means), f"{means[0] - means[1]:+.4f}", f"{error:.4f}"]
        lines.append(cells(row + (times(list(sides.values())) if not number else [""] * 6)))
    return lines


def times(pairs: Sequence[tuple[Side, Side]]) -> list[str]:
    """Return the means of the seconds and their ratios."""
    mean = statistics.mean
    ours, peers = zip(*pairs, strict=True)
    training = [mean(side.training for side in several) for several in (ours, peers)]
    command = [mean(side.seconds["command"] for side in several) for several in (ours, peers)]
    compiling = mean(side.seconds["compiling"] for side in ours)
    return [
        f"{training[0]:.1f} ({compiling:.1f})", f"{training[1]:.1f}", f"{training[1] / training[0]:.2f}",
        f"{command[0]:.1f}", f"{command[1]:.1f}", f"{command[1] / command[0]:.2f}",
    ]  # fmt: skip


def cells(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def shown(run: Prepared, given: Sequence[str], there: Mapping[tuple[str, str], Scored]) -> list[tuple[str, str]]:
    """Return the metrics of the table, grouped by split."""
    if not given and run.config.task.kind == "qa":
        given = ["f1", "exact", "f1/same_half", "f1/chosen_threshold"]
    first = run.config.task.metric or next(iter(there))[1]
    names = list(given) or [first]
    return [(split, name) for split in run.predicted for name in names if (split, name) in there]


def compare_losses(options: argparse.Namespace) -> int:
    """Print the largest difference of the losses of the first steps, in a schedule of as many steps."""
    steps, seed, out = options.losses, options.seeds[0], options.out
    arguments = [*options.arguments, "--training.num_steps", str(steps), "--data.dev", "--data.test"]
    run, start = prepare([*arguments, "--training.seed", str(seed)]), out / "start"
    write_start(run, start)
    shutil.rmtree(out / "features", ignore_errors=True)
    write_features(run, out / "features", [seed], [])
    masking = ["--mask_padding"] if run.config.task.kind == "qa" else []
    for side in ("ours", "torch"):
        shutil.rmtree(out / side, ignore_errors=True)
    more = ["--init_from", str(start), "--training.log_interval", "1"]
    run_ours(arguments, out / "ours" / f"seed{seed}", seed, *more)
    torch_folder = out / "torch" / f"seed{seed}"
    run_torch(
        options.peer_python, out / "features", str(start), torch_folder, seed, "--losses", str(steps), *masking
    )
    lines = (out / "ours" / f"seed{seed}" / "metrics.jsonl").read_text().splitlines()
    ours = np.array([json.loads(line)["loss"] for line in lines])
    peers = np.array(json.loads((torch_folder / "result.json").read_text())["losses"])
    assert len(ours) == len(peers) == steps
    differences = np.abs(ours - peers)
    for step in dict.fromkeys([0, 1, *range(9, steps, 10), steps - 1]):
        print(
            f"step {step + 1}: ours {ours[step]:.6f}, torch {peers[step]:.6f}, |difference| {differences[step]:.1e}"
        )
    print(f"largest |difference| of {steps} steps: {differences.max():.2e} (bar {BAR:.0e})")
    return 0 if differences.max() <= BAR else 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="folder for all files")
    parser.add_argument("--peer_python", required=True, help="Python with transformers, torch and accelerate")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--only", choices=("ours", "torch"), help="run one side; the table shows all finished runs")
    parser.add_argument("--padding", choices=("dynamic", "group_by_length", "fixed"), default="dynamic")
    parser.add_argument(
        "--metrics", nargs="+", default=(), help="metrics of the table (default: the first one of the task)"
    )
    parser.add_argument("--losses", type=int, default=0, help="compare the losses of this many steps instead")
    parser.add_argument("arguments", nargs="+", metavar="-- OPTIONS", help="options of run_finetune.py")
    options = parser.parse_args()
    options.out = options.out.resolve()
    os.environ.setdefault("USE_FLAX", "0")  # or transformers imports what it does not use
    if options.losses:
        return compare_losses(options)

    options.out.mkdir(parents=True, exist_ok=True)
    note, given = options.out / "arguments.json", json.dumps(options.arguments)
    if note.exists() and note.read_text() != given:
        sys.exit(f"{options.out}: contains runs with other options ({note.read_text()}); use another --out")
    note.write_text(given)
    run = prepare(options.arguments)
    ours, peer, features = options.out / "ours", options.out / f"torch_{options.padding}", options.out / "features"
    model = take_options(RunOptions, options.arguments)[0].init_from
    if options.only != "torch":
        for seed in options.seeds:
            run_ours(options.arguments, ours / f"seed{seed}", seed)
    if options.only != "ours":
        write_features(run, features, options.seeds, run.predicted)
        for seed in options.seeds:
            run_torch(
                options.peer_python, features, model, peer / f"seed{seed}", seed, "--padding", options.padding
            )
    sides = read_sides(run, ours, peer, options.seeds)
    if sides:
        first = next(iter(sides.values()))[0]
        print("\n".join(table(sides, shown(run, options.metrics, first.scores))))
        padding = [statistics.mean(pair[i].seconds["padding"] for pair in sides.values()) for i in (0, 1)]
        print(f"\npadding: ours {padding[0]:.1%} of the tokens, torch {padding[1]:.1%} ({options.padding})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
