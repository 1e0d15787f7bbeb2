"""Embedding short sentences on the CPU against sentence-transformers and onnxruntime, in one run.

    python studies/embedding/embed_speed.py --model FOLDER --sentences STS-B/train.tsv --peer_python PYTHON

FOLDER is a sentence-transformers folder; the sentences are the first 2,000 distinct ones of columns sentence1 and
sentence2. ``--peer_python`` has torch and sentence-transformers; onnxruntime is this Python's and runs the graph
that ``bert-jax export --format onnx`` writes. One process each, two threads; after one pass they take turns of one
pass, so that a slow minute of the machine hits all of them. The medians are compared. Exit code 3 below 1.2 x torch
or 0.8 x onnxruntime, above 8 compiled shapes, or if vectors differ by more than 1e-5.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
BARS = {"torch": 1.2, "onnxruntime": 0.8}


class Worker:
    """One implementation in its own process."""

    def __init__(self, kind: str, python: str, *arguments: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
        script = Path(__file__).with_name("embed_workers.py")
        self.kind = kind
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.process = subprocess.Popen(
            [python, str(script), kind, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        self.said = self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(
                f"{self.kind}: the worker stopped with code {self.process.wait()}; run it alone to see the error"
            )
        return json.loads(line)

    def ask(self, command: str) -> None:
        """Send one command and return its answer."""
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.seconds += answer.get("seconds", [])
        self.cpu_seconds += answer.get("cpu_seconds", [])
        self.said |= answer

    def vectors(self, file: Path) -> np.ndarray:
        """Return the vectors of the last pass."""
        self.ask(str(file))
        return np.load(file)

    def close(self) -> None:
        """End the process by closing its input."""
        self.process.stdin.close()
        self.process.wait()


def sentences(file: Path, count: int) -> list[str]:
    """Return the first ``count`` distinct sentences of a table with columns sentence1 and sentence2."""
    found: dict[str, None] = {}
    with file.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE):
            for column in ("sentence1", "sentence2"):
                found.setdefault(row[column], None)
    return list(found)[:count]


def export_onnx(model: str, folder: Path) -> str:
    """Export the graph of a model, and return its path."""
    from bert_jax.interop.programs.onnx_graph import write_onnx
    from bert_jax.interop.readers import read_weights

    write_onnx(folder, read_weights(Path(model)))
    return str(next(folder.glob("*.onnx")))


def main() -> int:
    """Run, and print one line per implementation and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="sentence-transformers folder")
    parser.add_argument("--sentences", required=True, type=Path, help="tab-separated table of sentence pairs")
    parser.add_argument("--peer_python", required=True, help="Python with torch and sentence-transformers")
    parser.add_argument("--count", type=int, default=2000, help="number of sentences")
    parser.add_argument("--rounds", type=int, default=5, help="timed passes of each implementation")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        texts = Path(scratch) / "texts.json"
        texts.write_text(json.dumps(sentences(arguments.sentences, arguments.count)), encoding="utf-8")
        graph = Path(scratch) / "onnx"
        graph.mkdir()
        common = (arguments.model, str(texts))
        workers = [
            Worker("ours", sys.executable, *common),
            Worker("torch", arguments.peer_python, *common),
            Worker("onnxruntime", sys.executable, *common, export_onnx(arguments.model, graph)),
        ]
        for _ in range(arguments.rounds):
            for worker in workers:
                worker.ask("1")
        vectors = [worker.vectors(Path(scratch) / f"{worker.kind}.npy") for worker in workers]
        for worker in workers:
            worker.close()

    ours = statistics.median(workers[0].seconds)
    for worker in workers:
        median, cpu = statistics.median(worker.seconds), statistics.median(worker.cpu_seconds)
        print(
            f"{worker.kind:12} {arguments.count / median:7.1f} sentences/s   {median:.2f} s, median of "
            f"{len(worker.seconds)} ({min(worker.seconds):.2f} to {max(worker.seconds):.2f}), "
            f"{cpu:.2f} processor seconds, ready after {worker.said['setup_seconds']:.0f} s"
        )
    passed = True
    for worker, peer in zip(workers[1:], vectors[1:], strict=True):
        ratio, bar = statistics.median(worker.seconds) / ours, BARS[worker.kind]
        difference = float(np.abs(vectors[0] - peer).max())
        passed &= ratio >= bar and difference <= 1e-5
        print(f"ours / {worker.kind}: {ratio:.2f} (bar {bar}), largest difference {difference:.1e}")
    shapes = workers[0].said["compiled_shapes"]
    print(f"compiled shapes: {shapes} (at most 8)")
    return 0 if passed and shapes <= 8 else 3


if __name__ == "__main__":
    sys.exit(main())
