"""One short text at a time: this library against onnxruntime on the same model.

    python benchmarks/inference_latency.py --model MODEL [--cpus 2] [--rounds 3]

`bert-jax benchmark-inference` with batch 1, 32 tokens and at least 200 runs of each form, in turns. Exit code 3 if
the median of the ratios of the medians is above 1.5.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from bert_jax.experiments.latency import Load, benchmark
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

MOST_RATIO = 1.5
FORMS = ("jax", "onnx")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the lines there")
    options = parser.parse_args()
    keep_to_cpu_without_accelerator()
    load = Load(batches=(1,), lengths=(32,), seconds=1.0, repeats=200, cpus=options.cpus)
    rounds = []
    for _ in range(options.rounds):
        found = {line["form"]: line for line in benchmark(options.model, FORMS, load, lambda line: None)}
        rounds.append({form: found[form]["median_ms"] for form in FORMS})
        print(json.dumps(rounds[-1]), flush=True)
    ratio = statistics.median(one["jax"] / one["onnx"] for one in rounds)
    line = {"rounds": rounds, "ratio": round(ratio, 3)}
    print(json.dumps(line))
    if options.output:
        options.output.write_text(json.dumps(line) + "\n")
    return 0 if ratio <= MOST_RATIO else 3


if __name__ == "__main__":
    sys.exit(main())
