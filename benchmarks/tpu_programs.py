"""Training steps of BERT and ModernBERT compiled for slices of v5e: time, share of the peak, memory.

    nice python benchmarks/tpu_programs.py [--output JSONL] [--programs base_128 ...]

Plans each step ahead of time (``bert-jax plan``), all layers written out, bfloat16, in 2 to 5 minutes on two cores.
Prints a JSON line per program: predicted time, share of the peak (MFU), memory. Programs that are in the file are
not compiled again. Exit code 3 if a step does not fit, if its MFU is below its bar, or if rows with packed
sequences take more than 1 / 0.9 of the time of rows with one sequence. Needs the extra ``tpu``; no TPU is used.

The bars of BERT are the figures of the commit d042623 under the same cost model, with its attention kernels charged
by the instructions that libtpu 0.0.42 schedules for them (``studies/tpu/tpu_kernels.py``).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import ROOT, json_lines, write_json_lines

_BASE = "--execution.dtype bfloat16 --execution.prng rbg --topology v5e:4x4"
_LARGE = (
    "--model.hidden_size 1024 --model.num_layers 24 --model.num_attention_heads 16 --model.intermediate_size 4096"
)
_128 = "--data.seq_length 128 --data.max_predictions 20 --training.global_batch_size 1024"
_512 = "--data.seq_length 512 --data.max_predictions 76 --training.global_batch_size 256"
_MODERN = "--config configs/modernbert_base.yaml --topology v5e:2x2 --training.batch_ramp"
# Least rate of packed rows, beside rows of one sequence.
PACKED = 0.9
# Options of each plan, and the least MFU.
PROGRAMS = {
    "base_128": (f"{_BASE} {_128}", 0.5217),
    "large_128": (f"{_BASE} {_LARGE} {_128}", 0.6496),
    "base_512": (f"{_BASE} {_512}", 0.5091),
    "base_512_packed": (
        f"{_BASE} {_512} --data.packing best_fit --data.sequences_per_row 20 --training.batch_unit rows",
        0.0,
    ),
    "modernbert_1024": (f"{_MODERN} --training.global_batch_size 32", 0.4),
    "modernbert_8192": (
        f"{_MODERN} --training.global_batch_size 4 --data.seq_length 8192 --data.max_predictions 2458 "
        "--model.rotary_base 160_000",
        0.3,
    ),
}
KEPT = (
    "topology", "batch_per_device", "fits", "peak_bytes", "hbm_bytes", "argument_bytes", "temporary_bytes",
    "predicted_step_seconds", "predicted_mfu", "tokens_per_second", "compile_seconds",
)  # fmt: skip


def plan(name: str) -> dict[str, Any]:
    """Return the figures of a program; with ``error`` if it does not compile."""
    command = [sys.executable, "-m", "bert_jax.commands.main", "plan", "--json", *PROGRAMS[name][0].split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"program": name, "fits": False, "error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    found = json.loads(done.stdout)
    return {"program": name} | {key: found[key] for key in KEPT}


def is_good(line: dict[str, Any], lines: list[dict[str, Any]]) -> bool:
    """Return whether a program fits and is as fast as its bar says."""
    plain = next((x for x in lines if f"{x['program']}_packed" == line["program"]), line)
    if not (line["fits"] and plain["fits"]):
        return False
    is_quick = line["tokens_per_second"] >= PACKED * plain["tokens_per_second"]
    return is_quick and line["predicted_mfu"] >= PROGRAMS[line["program"]][1]


def main() -> int:
    """Measure, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file of JSON lines, which is continued")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    arguments = parser.parse_args()
    output = arguments.output
    lines = json_lines(output) if output else []
    for name in arguments.programs:
        if all(line["program"] != name for line in lines):
            lines.append(plan(name))
            if output:
                write_json_lines(output, lines)
    for line in lines:
        print(json.dumps(line))
    return 0 if all(is_good(line, lines) for line in lines) else 3


if __name__ == "__main__":
    sys.exit(main())
