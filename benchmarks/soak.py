"""Endurance: the outcome of every kind of job after kills -9 at random moments, and the memory of a long run.

    python benchmarks/soak.py FOLDER [--kinds KIND ...] [--kills 10] [--steps 40] [--seed 0]
    python benchmarks/soak.py FOLDER --memory_steps 5000

Each kind of ``soak_kinds.py`` runs undisturbed once. Then chains of the same command get kill -9 (the process and
its children) at random moments of the time that the undisturbed job took, at most five each, until --kills of them
hit a job that had not ended; the last command of a chain runs to its end. The outcome must be that of the
undisturbed job: every array of the newest checkpoint, its digest and data position, metrics without times,
predictions, files. Outputs that appear only when they are complete are also compared after each kill. A line in
FOLDER/soak.jsonl for each undisturbed job and each chain lets the same command continue after a kill of its own.
Prints a table; exit code 3 if an outcome differs or a command ends with another code.

With --memory_steps, one run samples its resident memory, threads and open files (Linux only): exit code 3 if at the
end they are more than 5% above those at a tenth of the way (medians over neighboring steps).
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, environment
from soak_kinds import PRETRAIN, Kind, kinds, recipe, write_inputs

sys.path.insert(0, str(ROOT))
GROWTH = 1.05
MOST_KILLS = 5  # of one chain
PATIENCE = 1800.0  # seconds until a command counts as stuck


def start(words: Sequence[str], out: Path) -> subprocess.Popen[bytes]:
    """Start a job in a session of its own, its output appended to ``out`` with the suffix .log."""
    with out.with_name(f"{out.name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *words], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
            env=environment(XLA_FLAGS=""), start_new_session=True,
        )  # fmt: skip


def end(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Wait for the end of a job; kill it and its children after ``seconds``. Return its code, None if killed."""
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def differences(kind: Kind, whole: Mapping[str, str], out: Path) -> list[str]:
    """Return the names of the parts of the outcome that differ from those of the undisturbed job."""
    found = kind.outcome(out)
    return sorted(name for name in {*whole, *found} if whole.get(name) != found.get(name))


def empty(name: str, kind: Kind, out: Path) -> None:
    """Remove the output of an earlier job, and make the folder if the job expects one."""
    shutil.rmtree(out, ignore_errors=True)
    (out if kind.whole and name != "export_hf" else out.parent).mkdir(parents=True, exist_ok=True)


def undisturbed(name: str, kind: Kind, out: Path) -> dict[str, Any]:
    """Run a job to its end; return its line."""
    empty(name, kind, out)
    if end(start(kind.command(out), out), PATIENCE) != 0:  # makes the shards and the compilation cache
        raise SystemExit(f"{name}: the undisturbed job failed; see {out}.log")
    first = kind.outcome(out)
    empty(name, kind, out)
    began = time.monotonic()
    code = end(start(kind.command(out), out), PATIENCE)
    seconds = time.monotonic() - began
    unstable = differences(kind, first, out)
    if code != 0 or unstable:
        raise SystemExit(f"{name}: two undisturbed jobs differ in {unstable[:5]} (code {code}); see {out}.log")
    return {"kind": name, "whole": dict(first), "seconds": round(seconds, 2)}


def chain(
    name: str, kind: Kind, line: Mapping[str, Any], out: Path, kills: int, rng: random.Random
) -> dict[str, Any]:
    """Run a job through at most ``kills`` kills to its end; return the line of the chain."""
    empty(name, kind, out)
    delays, different, code = list[float](), list[str](), None
    while code is None:
        delay = rng.uniform(0.05, 1.0) * line["seconds"] if len(delays) < kills else PATIENCE
        code = end(start(kind.command(out), out), delay)
        if code is None and delay == PATIENCE:
            raise SystemExit(f"{name}: stuck after {delays}; see {out}.log")
        if code is None:
            delays.append(round(delay, 2))
            visible = out.exists() and any(not path.name.startswith(".") for path in out.iterdir())
            if kind.whole and visible:
                parts = [part for part in kind.outcome(out) if not Path(part).name.startswith(".")]
                wrong = [part for part in differences(kind, line["whole"], out) if part in parts]
                different += [f"after kill {len(delays)}: {part}" for part in wrong]
    different += [f"exit code {code}"] if code else differences(kind, line["whole"], out)
    return {"kind": name, "kills": delays, "different": different}


def run_matrix(folder: Path, chosen: Sequence[str], kills: int, steps: int, seed: int) -> int:
    """Run the undisturbed jobs and the chains that FOLDER/soak.jsonl lacks, and print the table."""
    inputs, log = folder / "inputs", folder / "soak.jsonl"
    write_inputs(inputs)
    every = kinds(inputs, steps)
    if unknown := [name for name in chosen if name not in every]:
        raise SystemExit(f"--kinds: {unknown[0]} is not allowed; allowed: {', '.join(every)}")
    texts = log.read_text().splitlines() if log.exists() else []
    lines = [json.loads(text) for text in texts if text.endswith("}")]

    def add(line: dict[str, Any]) -> dict[str, Any]:
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        lines.append(line)
        return line

    for name in chosen or every:
        kind, place = every[name], folder / name
        whole = next((line for line in lines if line["kind"] == name and "whole" in line), None)
        whole = whole or add(undisturbed(name, kind, place / "whole"))
        done = [line for line in lines if line["kind"] == name and "kills" in line]
        while (left := kills - sum(len(line["kills"]) for line in done)) > 0 and len(done) < 3 * kills:
            rng = random.Random(f"{seed} {name} {len(done)}")
            line = chain(name, kind, whole, place / f"chain_{len(done)}", min(left, MOST_KILLS), rng)
            done.append(add(line))
            print(f"{name}: {len(line['kills'])} kills, different: {line['different'] or 'none'}", file=sys.stderr)
            if not line["different"]:
                shutil.rmtree(place / f"chain_{len(done) - 1}", ignore_errors=True)
    print("| kind | undisturbed, s | kills | chains | different |\n|---|---|---|---|---|")
    failed = False
    for name in chosen or every:
        own = [line for line in lines if line["kind"] == name]
        seconds = next(line["seconds"] for line in own if "whole" in line)
        chains = [line for line in own if "kills" in line]
        different = [part for line in chains for part in line["different"]]
        failed = failed or bool(different)
        count = sum(len(line["kills"]) for line in chains)
        print(f"| {name} | {seconds} | {count} | {len(chains)} | {', '.join(different[:3]) or 0} |")
    return 3 if failed else 0


# ------------------------------------------------------------------ memory


def newest_step(workdir: Path) -> int:
    """Return the last step in the metrics file."""
    path = workdir / "metrics.jsonl"
    lines = path.read_bytes()[-4096:].splitlines() if path.exists() else []
    return next((json.loads(line)["step"] for line in reversed(lines) if line.endswith(b"}")), 0)


def resources(pid: int) -> dict[str, int]:
    """Return resident bytes, threads and open files of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "memory": int(status["VmRSS"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


def run_for_memory(folder: Path, steps: int) -> int:
    """Run one long pretraining, print its resources early and late, and return the exit code."""
    write_inputs(folder / "inputs")
    workdir, samples = folder / "long", list[dict[str, int]]()
    intervals = ["--training.checkpoint_interval", "50", "--training.eval_interval", "200"]
    words = [*PRETRAIN, *recipe(folder / "inputs", "masked", steps), "--workdir", str(workdir), *intervals]
    process = start(words, workdir)
    try:
        while process.poll() is None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, KeyError):  # it has just ended
                samples.append({"step": newest_step(workdir), **resources(process.pid)})
            time.sleep(0.25)
    finally:
        process.kill()
    if process.wait() != 0:
        raise SystemExit(f"the run ended with code {process.returncode}; see {workdir}.log")
    early, width = steps // 10, max(steps // 25, 50)
    result: dict[str, Any] = {"samples": len(samples), "grown": []}
    for name in ("memory", "threads", "files"):
        first = [sample[name] for sample in samples if abs(sample["step"] - early) <= width]
        last = [sample[name] for sample in samples if steps - 2 * width <= sample["step"] < steps]
        result[name] = {"early": statistics.median(first), "late": statistics.median(last)}
        result["grown"] += [name] if result[name]["late"] > GROWTH * result[name]["early"] else []
    print(json.dumps(result, indent=1))
    return 3 if result["grown"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", default=[], metavar="KIND")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory_steps", type=int, default=0)
    options = parser.parse_args()
    folder: Path = options.folder.absolute()
    if options.memory_steps:
        return run_for_memory(folder, options.memory_steps)
    return run_matrix(folder, options.kinds, options.kills, options.steps, options.seed)


if __name__ == "__main__":
    sys.exit(main())
