"""Plans of BERT-base and BERT-large for every TPU generation as a table: memory, step time, MFU.

    nice python studies/tpu/plan_table.py --file plans.jsonl

Compiles 24 training steps ahead of time, one after the other, each in a separate process; takes some hours on two
cores. Each result is added to the file at once, and a result in the file is not compiled again, so the command can
be stopped and repeated at any time. ``--print`` only prints the table of the file. A step that does not fit is
compiled once more with twice the microbatches. Needs the extra ``tpu``; no TPU is used.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TOPOLOGIES = ("v5e:4x4", "v5e:16x16", "v4:2x2x4", "v5p:2x2x4", "v6e:4x4", "tpu7x:2x2x2")
LARGE = (
    "--model.hidden_size 1024 --model.num_layers 24 --model.num_attention_heads 16 --model.intermediate_size 4096"
)
MODELS = {"base": "", "large": LARGE}
# Length -> options, sequences per device.
LENGTHS = {
    128: ("--data.seq_length 128 --data.max_predictions 20", 64),
    512: ("--data.seq_length 512 --data.max_predictions 76", 16),
}
COMMON = "--execution.dtype bfloat16 --execution.prng rbg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--file", type=Path, default=Path("plans.jsonl"), help="file of results, one JSON object per line"
    )
    parser.add_argument("--print", action="store_true", dest="only_print", help="only print the table of the file")
    parser.add_argument(
        "--scan", action="store_true", help="scanned layers: compiles faster, predicts slower steps"
    )
    arguments = parser.parse_args()
    rows = read(arguments.file)
    if not arguments.only_print:
        for length, topology, model in ((n, t, m) for m in MODELS for n in LENGTHS for t in TOPOLOGIES):
            key = f"{model} {length} {topology}{' scanned' if arguments.scan else ''}"
            if key not in rows:
                row = {
                    "key": key,
                    "model": model,
                    "length": length,
                    **plan(model, length, topology, arguments.scan),
                }
                rows[key] = row
                with arguments.file.open("a", encoding="utf-8") as file:
                    file.write(f"\n{json.dumps(row)}")  # after a line that was cut off, if one was
                print(f"{key}: {words(row)}", file=sys.stderr, flush=True)
    print(table(list(rows.values())))


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results by key; an incomplete last line is ignored."""
    rows = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line.endswith("}"):
            row = json.loads(line)
            rows[row["key"]] = row
    return rows


def plan(model: str, length: int, topology: str, scan: bool) -> dict[str, Any]:
    """The plan's JSON, with more microbatches where the step does not fit; an error's last line otherwise."""
    options, per_device = LENGTHS[length]
    found: dict[str, Any] = {}
    for microbatches in (1, 2):
        batch = per_device * devices(topology)
        words = f"{COMMON} {MODELS[model]} {options} --training.global_batch_size {batch} --topology {topology}"
        words += f" --training.accumulation_steps {microbatches} --json --execution.scan_layers {str(scan).lower()}"
        done = subprocess.run(
            [sys.executable, "-m", "bert_jax.commands.main", "plan", *words.split()],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return {"topology": topology, "error": (done.stderr.strip().splitlines() or ["?"])[-1]}
        found = json.loads(done.stdout)
        if found["fits"]:
            break
    return found


def devices(topology: str) -> int:
    """Return the number of JAX devices of a slice."""
    from bert_jax.contrib.planner.topology import parse_topology

    return parse_topology(topology).num_devices


def words(row: dict[str, Any]) -> str:
    """Return one result in a few words."""
    if "error" in row:
        return str(row["error"])
    speed = (
        f"{1000 * row['predicted_step_seconds']:.1f} ms, {row['predicted_mfu']:.1%} MFU" if row["fits"] else "no"
    )
    return f"{speed}, {row['peak_bytes'] / 2**30:.1f} GiB, compiled in {row['compile_seconds']:.0f} s"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    head = (
        "| model | length | slice | per device | fits: GiB of GiB | step | MFU | sequences/s | communication |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
    )
    lines = []
    for row in rows:
        begin = f"| {row['model']} | {row['length']} | {row['topology']}"
        if "error" in row:
            lines.append(f"{begin} | | {row['error']} | | | | |")
            continue
        micro = f", {row['accumulation_steps']} microbatches" if row["accumulation_steps"] > 1 else ""
        memory = f"{row['peak_bytes'] / 2**30:.1f} of {row['hbm_bytes'] / 2**30:.1f}"
        begin += f" | {row['batch_per_device']:g}{micro} | "
        if not row["fits"]:
            lines.append(f"{begin}no: {memory} | | | | |")
            continue
        lines.append(
            f"{begin}{memory} | {1000 * row['predicted_step_seconds']:.1f} ms | {row['predicted_mfu']:.1%} | "
            f"{row['sequences_per_second']:,.0f} | {row['shares']['communication']:.0%} |"
        )
    return head + "\n".join(lines)


if __name__ == "__main__":
    main()
