"""Processor time of runs on a CPU that keep the memory that they free, and of runs that return it to the system.

    python studies/cpu/kept_memory.py [--parts quickstart finetune base] [--minilm FOLDER --data GLUE/SST-2]
        [--steps N] [--times 3] [--output JSONL]

Starts the same run with ``--keep_memory true`` and ``false`` in turns: ``quickstart`` is configs/quickstart.yaml on
finished shards, ``finetune`` is configs/finetune/sst2.yaml from MiniLM (FOLDER, a Hugging Face folder), ``base`` is
BERT-base with 8 x 128 tokens, for which the memory is always returned. Prints a JSON line per run: seconds of the
processor (user, system) and of the clock, page faults, largest resident memory; then the ratio of the sums of the
seconds of the processor, and of the memory. Exit code 3 if the seconds of runs that return the memory are less
than 1.2 times (``quickstart``, ``finetune``) or 0.95 times (``base``) those of runs that keep it, or if the memory
of runs that keep it is more than 1.5 times (1.05 times) that of the others. Needs 7 GiB of free memory, without
which nothing is kept. About 15 minutes on two idle cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Least ratio of processor seconds and largest ratio of memory.
BARS = {"quickstart": (1.2, 1.5), "finetune": (1.2, 1.5), "base": (0.95, 1.05)}
STEPS = {"quickstart": 600, "finetune": 150, "base": 12}
BASE = (
    "--model.hidden_size 768 --model.num_layers 12 --model.num_attention_heads 12 --model.intermediate_size 3072 "
    "--data.seq_length 128 --data.max_predictions 20 --training.global_batch_size 8 --optimizer.name adamw"
)


def command(part: str, options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the command of a run of ``part``, without its workdir."""
    if part == "finetune":
        words = ["run_finetune.py", "--config", "configs/finetune/sst2.yaml", "--init_from", str(options.minilm)]
        words += ["--data.dir", str(options.data), "--training.eval_interval", "100000"]
    else:
        words = ["run_pretrain.py", "--config", "configs/quickstart.yaml", "--data.shards", str(folder / part)]
        words += BASE.split() if part == "base" else []
    return [sys.executable, *words, "--training.num_steps", str(options.steps or STEPS[part])]


def measure(words: list[str], keep: bool) -> dict[str, Any]:
    """Run ``words`` in a new workdir. Return the times, page faults and memory of the process."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as workdir:
        process = subprocess.Popen(
            [*words, "--keep_memory", str(keep).lower(), "--workdir", workdir],
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stderr is not None
        told = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)}: {(told.strip().splitlines() or ['?'])[-1]}")
    return {
        "keep": keep,
        "user_seconds": round(used.ru_utime, 2),
        "system_seconds": round(used.ru_stime, 2),
        "seconds": round(time.perf_counter() - began, 2),
        "page_faults": used.ru_minflt,
        "memory_bytes": used.ru_maxrss * 1024,
    }


def judge(part: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios of the runs of ``part``, and whether they are good."""

    def total(keep: bool) -> float:
        return sum(x["user_seconds"] + x["system_seconds"] for x in lines if x["keep"] is keep)

    def memory(keep: bool) -> float:
        return statistics.median(x["memory_bytes"] for x in lines if x["keep"] is keep)

    fewer, more = total(False) / total(True), memory(True) / memory(False)
    good = fewer >= BARS[part][0] and more <= BARS[part][1]
    return {"part": part, "processor_ratio": round(fewer, 3), "memory_ratio": round(more, 3), "good": good}


def main() -> int:
    """Measure, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=BARS, default=["quickstart", "base"])
    parser.add_argument("--minilm", type=Path, help="Hugging Face folder of MiniLM, for finetune")
    parser.add_argument("--data", type=Path, help="folder of SST-2, for finetune")
    parser.add_argument("--steps", type=int, default=0, help="steps of a run")
    parser.add_argument("--times", type=int, default=3, help="runs of each kind")
    parser.add_argument("--output", type=Path, help="file of JSON lines to add to")
    options = parser.parse_args()
    if "finetune" in options.parts and not (options.minilm and options.data):
        parser.error("finetune: give --minilm and --data")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts:
            words, lines = command(part, options, Path(folder)), []
            measure([*words, "--training.num_steps", "1"], True)  # prepares the data
            for _ in range(options.times):
                for keep in (True, False):
                    lines.append({"part": part} | measure(words, keep))
                    print(json.dumps(lines[-1]), flush=True)
            found += [*lines, judge(part, lines)]
            print(json.dumps(found[-1]), flush=True)
    if options.output:
        with options.output.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in found)
    return 0 if all(line.get("good", True) for line in found) else 3


if __name__ == "__main__":
    sys.exit(main())
