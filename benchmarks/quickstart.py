"""Loss and time of the quickstart, compared with the recipe of the paper at the same size.

    python benchmarks/quickstart.py [--seeds 0 1 2] [--folder DIR]    # about 35 minutes on two idle cores
    python benchmarks/quickstart.py --short                           # about 8 minutes
    python benchmarks/quickstart.py --workdir runs/quickstart         # only the loss of an existing run
    python benchmarks/quickstart.py --times 3                         # only the time, 3 pairs of 150 steps

configs/quickstart.yaml and configs/quickstart_bert.yaml take turns, each as a whole command (vocabulary and shards
included) in a separate folder. Both models are evaluated on the same rows: single segments of the documents that
quickstart_bert.yaml holds out, 15% of the tokens masked when the rows are built. A JSON line for each run, then one
for all. Exit code 3 if the mean loss of the quickstart is above 4.3 nats or less than 2.2 below that of the
training targets' unigram distribution on these rows, or if its median time is more than 1.05 times that of the
other.

--short: one seed of the quickstart, and one pair of --times. A command of 150 steps still makes vocabulary and
shards, compiles and evaluates.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from bert_jax.config import PretrainConfig, load_config
from bert_jax.interop.readers import read_weights
from bert_jax.model import from_canonical
from bert_jax.objectives.registry import objective_class
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from bert_jax.tokenization import load_tokenizer
from bert_jax.training.state import initial_params
from bert_jax.training.step import make_eval_step
from data_pipeline.build.ensure import ensure_data
from data_pipeline.read.pretrain_input import ShardSource

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPES = ("quickstart", "quickstart_bert")
LARGEST_LOSS, SMALLEST_GAIN, LARGEST_RATIO = 4.3, 2.2, 1.05
SHORT_STEPS = 150


class Rows:
    """The rows that every model is evaluated on, built in ``folder``."""

    def __init__(self, folder: Path) -> None:
        arguments = ["--config", str(REPOSITORY / "configs/quickstart_bert.yaml"), "--data.shards", str(folder)]
        self._config = load_config(PretrainConfig, [*arguments, "--data.next_sentence", "none"])
        data = self._config.data
        self._vocabulary = ensure_data(data, vocab_size=self._config.model.vocab_size, report=report)
        tokenizer = load_tokenizer(self._vocabulary, lower_case=data.lower_case)
        self._source = ShardSource(self._config, tokenizer)
        self.unigram = self._source.unigram_cross_entropy()

    def evaluate(self, workdir: Path) -> dict[str, float]:
        """Return loss and accuracy of the newest parameters in ``workdir``."""
        config = load_config(PretrainConfig, ["--config", str(workdir / "config.yaml")])
        if (workdir / "vocab.txt").read_bytes() != Path(self._vocabulary).read_bytes():
            raise ValueError(
                f"{workdir}: its vocabulary is not that of configs/quickstart_bert.yaml; give a run of that recipe"
            )
        objective = objective_class(config.objective)(config, None)
        weights = dict(read_weights(workdir).params)
        params = from_canonical(weights, initial_params(objective.model, 0), config.model.vocab_size)
        eval_step = jax.jit(make_eval_step(objective))
        size = self._config.training.global_batch_size
        totals: dict[str, np.ndarray] = {}
        for batch in self._source.held_out(size, list(range(size)), 0) or ():
            for name, pair in eval_step(params, batch).items():
                totals[name] = totals.get(name, np.zeros(2)) + np.asarray(pair, np.float64)
        values = objective.evaluation(totals)
        return {name: values[name] for name in ("mlm_loss", "mlm_accuracy", "targets")}


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show(values: dict[str, object]) -> None:
    print(json.dumps(values), flush=True)


def run(recipe: str, seed: int, folder: Path, *options: str) -> tuple[Path, float]:
    """Make a whole run of ``recipe``; return its workdir and the seconds of the command."""
    workdir = folder / f"{recipe}-{seed}{'-short' if options else ''}"
    words = [
        "--config", str(REPOSITORY / f"configs/{recipe}.yaml"), "--workdir", str(workdir / "run"),
        "--data.shards", str(workdir / "shards"), "--training.seed", str(seed), *options,
    ]  # fmt: skip
    began = time.perf_counter()
    command = [sys.executable, str(REPOSITORY / "run_pretrain.py"), *words]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return workdir / "run", time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, help="keep everything here (default: a temporary folder)")
    parser.add_argument("--short", action="store_true", help="one seed, times of a few steps")
    parser.add_argument("--times", type=int, help="measure only times of a few steps, so many pairs")
    parser.add_argument("--workdir", type=Path, help="evaluate this run and train nothing")
    options = parser.parse_args()
    keep_to_cpu_without_accelerator()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        if options.times:
            return 0 if time_ratio(options.times, folder) <= LARGEST_RATIO else 3
        rows = Rows(folder / "rows")
        if options.workdir:
            show({"workdir": str(options.workdir), "unigram": rows.unigram, **rows.evaluate(options.workdir)})
            return 0
        return compare(rows, options.seeds, folder, short=options.short)


def ratio_of(times: dict[str, list[float]]) -> float:
    return statistics.median(times["quickstart"]) / statistics.median(times["quickstart_bert"])


def time_ratio(pairs: int, folder: Path) -> float:
    """Ratio of the median times of ``pairs`` short commands of each recipe."""
    times: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
    for seed in range(pairs):
        for recipe in RECIPES if seed % 2 else reversed(RECIPES):
            _, seconds = run(recipe, seed, folder, "--training.num_steps", str(SHORT_STEPS))
            times[recipe].append(seconds)
            show({"recipe": recipe, "steps": SHORT_STEPS, "seconds": round(seconds, 1)})
    show({"pairs": pairs, "time_ratio": round(ratio_of(times), 3)})
    return ratio_of(times)


def compare(rows: Rows, seeds: list[int], folder: Path, *, short: bool) -> int:
    """Train and evaluate; return the exit code."""
    losses: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
    times: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
    for seed in seeds[:1] if short else seeds:
        for recipe in RECIPES[:1] if short else RECIPES:
            workdir, seconds = run(recipe, seed, folder)
            values = rows.evaluate(workdir)
            losses[recipe].append(values["mlm_loss"])
            if not short:
                times[recipe].append(seconds)
            show({"recipe": recipe, "seed": seed, "seconds": round(seconds, 1), **values})
    loss = statistics.mean(losses["quickstart"])
    ratio = time_ratio(1, folder) if short else ratio_of(times)
    reached = loss <= LARGEST_LOSS and rows.unigram - loss >= SMALLEST_GAIN and ratio <= LARGEST_RATIO
    show(
        {
            "mean_loss": round(loss, 4),
            "unigram": round(rows.unigram, 4),
            "gain": round(rows.unigram - loss, 4),
            "time_ratio": round(ratio, 3),
            "reached": reached,
        }
    )
    return 0 if reached else 3


if __name__ == "__main__":
    sys.exit(main())
