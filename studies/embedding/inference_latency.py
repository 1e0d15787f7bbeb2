"""One short text at a time through ``embed``, warm, against onnxruntime on the exported graph.

    python studies/embedding/inference_latency.py --model FOLDER [--text TEXT] [--rounds 30] [--calls 20]

FOLDER is a sentence-transformers folder; the default text has 10 tokens. One process each, two threads; they take
turns of ``--calls`` calls, so that a slow minute of the machine hits both. A call goes from the text to the vector;
both use this library's tokenizer. Exit code 3 if the median over the rounds of the ratio of the medians is above
2.2, or if the vectors differ by more than 1e-5.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from embed_speed import Worker, export_onnx

MOST_RATIO = 2.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", default="the quick brown fox jumps over a dog")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--output", type=Path, help="write the line there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        texts, graph = Path(scratch) / "texts.json", Path(scratch) / "onnx"
        texts.write_text(json.dumps([options.text]), encoding="utf-8")
        graph.mkdir()
        workers = [
            Worker("ours", sys.executable, options.model, str(texts)),
            Worker("onnxruntime", sys.executable, options.model, str(texts), export_onnx(options.model, graph)),
        ]
        for _ in range(options.rounds):
            for worker in workers:
                worker.ask(str(options.calls))
        first, second = (worker.vectors(Path(scratch) / f"{worker.kind}.npy") for worker in workers)
        for worker in workers:
            worker.close()
    rounds = [
        [1000 * statistics.median(worker.seconds[i : i + options.calls]) for worker in workers]
        for i in range(0, options.rounds * options.calls, options.calls)
    ]
    ratio = statistics.median(ours / theirs for ours, theirs in rounds)
    line = {
        "ms": [round(statistics.median(one), 2) for one in zip(*rounds, strict=True)],
        "least_ms": [round(1000 * min(worker.seconds), 2) for worker in workers],
        "cpu_ms": [round(1000 * statistics.fmean(worker.cpu_seconds), 2) for worker in workers],
        "ratio": round(ratio, 3),
        "difference": float(np.abs(first - second).max()),
    }
    print(json.dumps(line))
    if options.output:
        options.output.write_text(json.dumps(line) + "\n")
    return 0 if ratio <= MOST_RATIO and line["difference"] <= 1e-5 else 3


if __name__ == "__main__":
    sys.exit(main())
