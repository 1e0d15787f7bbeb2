"""The speed of this checkout beside another one: five measurements of both, in alternating pairs.

    python benchmarks/pairs.py --base DIR --model FOLDER --corpus TEXT [--pairs 9] [--only NAME ...]

DIR is the other checkout, FOLDER a model with a tokenizer, TEXT some MB of text. Measured, in seconds:

* train_step_cpu: one step of BERT-base, as train_step_cpu.py (two steps a turn);
* embed_speed: vectors of 400 sentences of the text (one pass a turn), as studies/embedding/embed_speed.py;
* loop_overhead: one step of a tiny model in the whole training loop, as loop_overhead.py;
* build_speed: processor seconds of ``bert-data shards`` on the text, as build_speed.py;
* reader_speed: processor seconds of one million records of shards to host batches, as reader_speed.py --small.

Prints a JSON line for each: the median ratio (this checkout over the other) and its 95% interval, from order
statistics. Exit code 3 for a median above 1.03 whose interval lies above 1.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from math import comb
from pathlib import Path

from harness import ROOT, Worker, environment

MOST = 1.03
SENTENCES = 400
TINY = (
    "--model.hidden_size 32 --model.num_layers 1 --model.intermediate_size 64 --data.seq_length 32 "
    "--data.max_predictions 5 --training.global_batch_size 16 --training.log_interval 10"
)
Measure = Callable[[], list[float]]


def output_of(checkout: Path, *words: object) -> str:
    """Standard output of a benchmark of ``checkout``. ``CalledProcessError`` if it fails, except for a bar (3)."""
    command, quiet = [sys.executable, *map(str, words)], environment(checkout, PYTHONWARNINGS="ignore")
    done = subprocess.run(command, cwd=checkout, env=quiet, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 3):
        raise subprocess.CalledProcessError(done.returncode, command)
    return done.stdout


class Measurements:
    """Each method returns what measures once in ``checkout``."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder

    def train_step_cpu(self, checkout: Path) -> Measure:
        return Worker(2, "train_step_workers.py", "ours", checkout=checkout)

    def embed_speed(self, checkout: Path) -> Measure:
        texts = self._folder / "texts.json"
        if not texts.exists():
            lines = self._arguments.corpus.read_text(encoding="utf-8").splitlines()
            texts.write_text(json.dumps([line.strip() for line in lines if len(line) > 40][:SENTENCES]))
        words = ("ours", self._arguments.model.resolve(), texts)
        return Worker(1, "embed_workers.py", *words, checkout=checkout)

    def loop_overhead(self, checkout: Path) -> Measure:
        # The same recipe and the same shards for both; the older checkout makes them.
        recipe = self._arguments.base.resolve() / "configs/quickstart.yaml"
        shards = self._folder / "quickstart"
        words = ["--config", recipe, "--data.shards", shards, "--rounds", 5, "--steps", 300, *TINY.split()]
        loop = re.compile(r"loop: ([\d.]+) steps/s")
        return lambda: [1 / float(loop.search(output_of(checkout, "benchmarks/loop_overhead.py", *words))[1])]

    def build_speed(self, checkout: Path) -> Measure:
        vocabulary = self._folder / "vocab.txt"
        if not vocabulary.exists():
            words = ["--corpus", self._arguments.corpus.resolve(), "--output", vocabulary, "--vocab_size", 8192]
            output_of(ROOT, "-m", "bert_jax.commands.data", "vocab", *words)
        words = ["--corpus", self._arguments.corpus.resolve(), "--vocab", vocabulary, "--runs", 1]
        return lambda: [json.loads(output_of(checkout, "benchmarks/build_speed.py", *words))["cpu_seconds"]]

    def reader_speed(self, checkout: Path) -> Measure:
        words = ["--folder", self._folder / "reader", "--small", "--only", "length 128, 16", "--repeat", 2]

        def measure() -> list[float]:
            line = output_of(checkout, "benchmarks/reader_speed.py", *words).strip().splitlines()[-1]  # tf.data
            return [1e6 / json.loads(line[line.index("{") :])["examples_per_cpu_second"]]

        return measure


NAMES = ("train_step_cpu", "embed_speed", "loop_overhead", "build_speed", "reader_speed")


def interval(ratios: list[float]) -> tuple[float, float]:
    """Order statistics that enclose the median with a probability of at least 0.95 (binomial; 6 values or more)."""
    count, below, outside = len(ratios), 0, 0.0
    while outside + comb(count, below) / 2 ** (count - 1) <= 0.05:
        outside += comb(count, below) / 2 ** (count - 1)
        below += 1
    ordered = sorted(ratios)
    return ordered[max(0, below - 1)], ordered[min(count - 1, count - below)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="the other checkout")
    parser.add_argument("--model", type=Path, required=True, help="model with tokenizer, for embed_speed")
    parser.add_argument("--corpus", type=Path, required=True, help="text, for build_speed and embed_speed")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    arguments = parser.parse_args()
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            make = getattr(Measurements(arguments, Path(folder)), name)
            here, base = make(ROOT), make(arguments.base.resolve())
            base(), here()  # caches of both are warm
            pairs = []
            for number in range(arguments.pairs):
                first, second = (here, base) if number % 2 else (base, here)
                values = {one: statistics.median(one()) for one in (first, second)}
                pairs.append((values[here], values[base]))
            for worker in (here, base):
                if isinstance(worker, Worker):
                    worker.close()
            ratios = [ours / theirs for ours, theirs in pairs]
            median, (low, high) = statistics.median(ratios), interval(ratios)
            reached = median <= MOST or low <= 1
            passed &= reached
            sides = zip(("here", "base"), zip(*pairs, strict=True), strict=True)
            seconds = {side: round(statistics.median(values), 5) for side, values in sides}
            figures = {"ratio": round(median, 4), "interval": [round(low, 4), round(high, 4)], "reached": reached}
            print(json.dumps({"measurement": name, "pairs": len(pairs), **figures, "seconds": seconds}), flush=True)
    return 0 if passed else 3


if __name__ == "__main__":
    sys.exit(main())
