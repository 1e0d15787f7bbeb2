"""Speed and memory of ``bert-data shards``: wall time from start-up to exit, and memory of all its processes.

    python benchmarks/build_speed.py --corpus TEXT --vocab VOCAB [--repeat 10] [--beam] [--workers 2]
        [--seq_length 128] [--dupe_factor 1]

``--repeat N`` also builds from N copies of the text and compares the memory. ``--beam`` also builds under Apache
Beam's embedded runner, in turn, and compares processor time and bytes. ``cpu_seconds`` sums all processes, so
it is meaningful on a busy machine too. Memory is the largest sum, over the process tree, of the proportional set
size (Pss in /proc/PID/smaps_rollup); Linux only. Exit code 3 if two builds differ, if Beam takes more than 1.6
times the processor time, or if N copies of the text take more than 1.5 times the memory.
"""

import argparse
import hashlib
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MOST_BEAM, MOST_MEMORY = 1.6, 1.5
_INTERVAL = 0.05  # seconds between samples


def process_tree(root: int) -> list[int]:
    """Return the ids of ``root`` and all its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # ended meanwhile
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def proportional_bytes(pid: int) -> int:
    """Return the proportional set size of a process in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def cpu_of_children() -> float:
    """Return the processor seconds of all finished child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def digest(folder: Path) -> str:
    """Return a digest of names and contents of all files in ``folder`` except locks."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"):
        total.update(f"{path.relative_to(folder)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _program() -> str:
    """Return the module of ``bert-data`` in the checkout that is measured, which may be an older one."""
    return "bert_jax.commands.data" if importlib.util.find_spec("bert_jax.commands") else "data_pipeline.cli"


def measure(corpus: Path, arguments: argparse.Namespace, runner: str = "processes") -> dict[str, Any]:
    """Build ``corpus`` once and return its figures: sizes in MB (10^6 bytes), time in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "corpus": corpus, "vocab": arguments.vocab, "output": f"{folder}/shards",
            "dupe_factor": arguments.dupe_factor, "seq_length": arguments.seq_length, "workers": arguments.workers,
            "runner": runner,
        }  # fmt: skip
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", _program(), "shards", *flags]
        start, cpu = time.monotonic(), cpu_of_children()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        peak = 0
        while process.poll() is None:
            peak = max(peak, sum(map(proportional_bytes, process_tree(process.pid))))
            time.sleep(_INTERVAL)
        seconds = time.monotonic() - start
        if process.returncode:
            raise SystemExit(process.returncode)
        made = digest(Path(folder))
        manifest = json.loads(Path(f"{folder}/shards/train/manifest.json").read_text())
    size = corpus.stat().st_size / 1e6
    return {
        "runner": runner,
        "text_mb": round(size, 1),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_of_children() - cpu, 2),
        "mb_per_second": round(size / seconds, 2),
        "peak_memory_mb": round(peak / 1e6, 1),
        "instances": manifest["counts"]["instances"],
        "digest": made[:16],
    }


def main() -> int:
    """Measure, print JSON lines and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--vocab", required=True)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--beam", action="store_true")
    parser.add_argument("--dupe_factor", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seq_length", type=int, default=128)
    arguments = parser.parse_args()
    small, beam = [], []
    for _ in range(arguments.runs):
        small.append(measure(arguments.corpus, arguments))
        print(json.dumps(small[-1]), flush=True)
        if arguments.beam:
            beam.append(measure(arguments.corpus, arguments, "beam"))
            print(json.dumps(beam[-1]), flush=True)
    passed = same = len({result["digest"] for result in (*small, *beam)}) == 1
    if beam:
        processes, threads = (min(result["cpu_seconds"] for result in results) for results in (small, beam))
        passed &= threads / processes <= MOST_BEAM
        print(json.dumps({"beam_cpu_ratio": round(threads / processes, 3), "same_bytes": same}))
    if arguments.repeat > 1:
        with tempfile.NamedTemporaryFile("wb", suffix=".txt") as file:
            text = arguments.corpus.read_bytes().strip()
            for _ in range(arguments.repeat):
                file.write(text + b"\n\n")
            file.flush()
            large = measure(Path(file.name), arguments)
        print(json.dumps(large))
        ratio = large["peak_memory_mb"] / max(result["peak_memory_mb"] for result in small)
        passed &= ratio <= MOST_MEMORY
        print(json.dumps({"memory_ratio": round(ratio, 3)}))
    return 0 if passed else 3


if __name__ == "__main__":
    sys.exit(main())
