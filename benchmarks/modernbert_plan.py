"""Training steps of ModernBERT-base compiled for a v5e slice of four chips, at 1,024 and 8,192 tokens.

    nice python benchmarks/modernbert_plan.py [--output JSONL]

Plans configs/modernbert_base.yaml with 8 rows of 1,024 tokens and one row of 8,192 tokens per chip
(``bert-jax plan --topology v5e:2x2``), which takes 5 to 20 minutes each on two cores. Prints one JSON line per
length: memory, predicted time, share of the peak (MFU), and bytes of the step. Lengths that are in the file are not
compiled again. Exit code 3 if a step does not compile or fit. Needs the extra ``tpu``; no TPU is used.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LENGTHS = {
    1024: "--training.global_batch_size 32",
    8192: "--training.global_batch_size 4 --data.seq_length 8192 --data.max_predictions 2458 "
    "--model.rotary_base 160_000",
}
KEPT = (
    "topology", "batch_per_device", "fits", "peak_bytes", "hbm_bytes", "argument_bytes", "temporary_bytes",
    "predicted_step_seconds", "predicted_mfu", "tokens_per_second", "compile_seconds",
)  # fmt: skip


def plan(length: int) -> dict[str, Any]:
    """Return the figures of the step with rows of ``length`` tokens; with ``error`` if it does not compile."""
    words = f"--config configs/modernbert_base.yaml --topology v5e:2x2 --json {LENGTHS[length]}"
    command = [sys.executable, "-m", "bert_jax.cli.main", "plan", *words.split(), "--training.batch_ramp_tokens"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"length": length, "fits": False, "error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    found = json.loads(done.stdout)
    return {"length": length} | {name: found[name] for name in KEPT}


def main() -> int:
    """Measure, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file of JSON lines, which is continued")
    parser.add_argument("--lengths", nargs="+", type=int, choices=LENGTHS, default=list(LENGTHS))
    arguments = parser.parse_args()
    output = arguments.output
    lines = [json.loads(line) for line in output.read_text().splitlines()] if output and output.exists() else []
    for length in arguments.lengths:
        if all(line["length"] != length for line in lines):
            lines.append(plan(length))
            if output:
                output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        print(json.dumps(line))
    return 0 if all(line["fits"] for line in lines) else 3


if __name__ == "__main__":
    sys.exit(main())
