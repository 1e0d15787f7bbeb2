"""Training step of BERT-base on v5e with its layers in a loop (``execution.scan_layers``) and written out.

    nice python studies/tpu/scan_layers.py [--output studies/tpu/scan_layers.jsonl] [--layers 4]

Plans both steps ahead of time (``bert-jax plan``): 64 x 128 per chip, bfloat16, dropout 0.1, rbg, no
recomputation. Prints a JSON line per form, and one with the ratio of their compute times (without communication).
Exit code 3 if the ratio is above its bar. 12 layers take 5 to 10 minutes on two cores, 4 layers 2 to 3. Lines of
the same topology and number of layers in the file are replaced. Needs the extra ``tpu``; no TPU is used.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BAR = 1.15
OPTIONS = (
    "--execution.dtype bfloat16 --execution.prng rbg --execution.remat none --data.seq_length 128 "
    "--data.max_predictions 20"
)
ROWS = 64


def plan(topology: str, layers: int, is_loop: bool) -> dict[str, Any]:
    """Return the figures of one form; times are seconds of a step."""
    command = [sys.executable, "-m", "bert_jax.commands.main", "plan", "--json", *OPTIONS.split()]
    chips = 1
    for size in topology.partition(":")[2].split("x"):
        chips *= int(size)
    command += ["--topology", topology, "--training.global_batch_size", str(ROWS * chips)]
    command += ["--model.num_layers", str(layers), "--execution.scan_layers", str(is_loop).lower()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    communication = found["communication_seconds"]
    return {
        "form": "loop" if is_loop else "written out",
        "topology": topology,
        "layers": layers,
        "compute_seconds": found["predicted_step_seconds"] - communication,
        "communication_seconds": communication,
        "peak_bytes": found["peak_bytes"],
        "compile_seconds": found["compile_seconds"],
    }


def main() -> int:
    """Measure, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file of JSON lines")
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    loop, plain = (plan(arguments.topology, arguments.layers, is_loop) for is_loop in (True, False))
    ratio = loop["compute_seconds"] / plain["compute_seconds"]
    place = {"topology": arguments.topology, "layers": arguments.layers}
    lines = [loop, plain, {"form": "ratio", **place, "ratio": ratio, "bar": BAR}]
    output, kept = arguments.output, []
    if output:
        if output.exists():
            kept = [json.loads(line) for line in output.read_text().splitlines()]
            kept = [line for line in kept if {key: line[key] for key in place} != place]
        output.write_text("".join(json.dumps(line) + "\n" for line in kept + lines))
    for line in lines:
        print(json.dumps(line))
    return 0 if ratio <= BAR else 3


if __name__ == "__main__":
    sys.exit(main())
