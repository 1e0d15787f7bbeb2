"""Vectors of texts in 8 bits: speed and closeness beside those in float32.

    python benchmarks/embed_int8.py --model FOLDER --texts TEXT [--count 200] [--turns 9] [--cpus 1]

Takes the first ``--count`` lines of TEXT. In turns: ``embed`` in float32, ``embed`` with dtype int8, and the same
8-bit program in onnxruntime alone, from padded ids to hidden states, in batches of 16 of similar length. Prints a
JSON line for each with the texts per second of the fastest turn and the processor seconds of the cheapest one. A
last line has the medians over the turns of the ratios, the cosines of the vectors with those in float32, and the
share of the texts whose nearest other text is the same. With several processors the processor seconds include those
of waiting threads.

Exit code 3 for a cosine below 0.98, a mean cosine below 0.995 or a share below 0.9 and, on a processor with VNNI,
if int8 takes more than 0.67 of the seconds of float32.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import bert_jax

COST, COSINE, MEAN, SAME = 0.67, 0.98, 0.995, 0.9
BATCH = 16


def alone(model: bert_jax.LoadedModel, texts: list[str]) -> Callable[[], object]:
    """Return a function that runs the 8-bit program of ``model`` on the texts."""
    from bert_jax.inference.onnx_network import padded  # imports jax

    session = model.encoder_in_8_bits().session
    inputs = sorted(model.model_inputs(texts), key=lambda one: len(one.ids))
    batches = [padded(inputs[i : i + BATCH], model.need_tokenizer().pad_id) for i in range(0, len(inputs), BATCH)]
    return lambda: [session.run(None, batch) for batch in batches]


def nearest(vectors: np.ndarray) -> np.ndarray:
    """Return the index of the nearest other row of each row."""
    rows = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray((rows @ rows.T - 2 * np.eye(len(rows))).argmax(axis=1))


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--texts", required=True, type=Path, metavar="TEXT")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--cpus", type=int, default=1, help="0: all")
    options = parser.parse_args()
    if options.cpus:  # before JAX starts its threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.cpus :])
    with options.texts.open(encoding="utf-8") as lines:
        texts = list(itertools.islice((line.strip() for line in lines if line.strip()), options.count))
    model = bert_jax.load(options.model)
    runs: dict[str, Callable[[], object]] = {
        "float32": lambda: model.embed(texts),
        "int8": lambda: model.embed(texts, dtype="int8"),
        "onnxruntime": alone(model, texts),
    }
    expected, given = model.embed(texts), model.embed(texts, dtype="int8")
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(options.turns + 1):  # the first turn compiles
        for name, run in runs.items():
            wall, used = time.perf_counter(), time.process_time()
            run()
            seconds[name].append((time.perf_counter() - wall, time.process_time() - used))
    for name, turns in seconds.items():
        wall, used = (min(part) for part in zip(*turns[1:], strict=True))
        line = {"texts_per_second": round(len(texts) / wall, 1), "processor_seconds": round(used, 3)}
        print(json.dumps({"name": name, **line}))

    def ratio(name: str, other: str, part: int) -> float:
        pairs = zip(seconds[name][1:], seconds[other][1:], strict=True)
        return round(statistics.median(a[part] / b[part] for a, b in pairs), 3)

    cosines = (expected * given).sum(1) / np.linalg.norm(expected, axis=1) / np.linalg.norm(given, axis=1)
    found = {
        "seconds_of_float32": ratio("int8", "float32", 0),
        "processor_seconds_of_float32": ratio("int8", "float32", 1),
        "processor_seconds_of_onnxruntime": ratio("int8", "onnxruntime", 1),
        "least_cosine": round(float(cosines.min()), 5),
        "mean_cosine": round(float(cosines.mean()), 5),
        "same_nearest": round(float((nearest(expected) == nearest(given)).mean()), 3),
    }
    print(json.dumps(found))
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    has_vnni = bool({"avx512_vnni", "avx_vnni"} & set(flags))
    missed = [
        *(["speed"] if has_vnni and found["seconds_of_float32"] > COST else []),
        *(["cosine"] if found["least_cosine"] < COSINE or found["mean_cosine"] < MEAN else []),
        *(["nearest texts"] if found["same_nearest"] < SAME else []),
    ]
    for name in missed:
        print(f"below its bar: {name}")
    return 3 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
