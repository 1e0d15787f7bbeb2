"""Measurements on a GPU: kernels against the interpreter, sizes of their blocks, training steps beside their plans.

    python benchmarks/gpu.py [--sections kernels blocks base large modernbert packed] [--output JSONL]
    python benchmarks/gpu.py --predict h100:1    # on any machine: the plans of the steps, which need no GPU
    python benchmarks/gpu.py --table             # the lines as Markdown

* kernels: attention, and dropout with residual and LayerNorm: values, gradients and dropout bits of the compiled
  kernels against the same kernels interpreted on the CPU. In float32 by the tolerances of tests/bert_jax/model,
  with jax_default_matmul_precision highest (training rounds products to TF32); in bfloat16 by the error, which
  may be 1.1 times that of the interpreted kernel. A minute or two.
* blocks: attention, forward and backward, by the blocks of one kernel; the other kernels keep their defaults.
* base, large, modernbert: steps of the recipes in bfloat16, full rows, 16,384 or 32,768 tokens.
* packed: rows of three sequences, and rows half of which is padding; tokens per second count no padding.

A case is a line of JSONL (default studies/gpu/gpu.jsonl) and is measured once per board, failed ones again: the
same command continues. A section ends after 8 minutes (--seconds), the command after 25, and names the cases that
are left. Steps run in a process each. Plans that were not made before follow the measurements of a section; they
assume full rows, so packed rows have none. --toy: tiny models and interpreted kernels on the CPU.

Exit code 2: no GPU; 3: a case failed, a kernel is beyond its tolerance, dropout bits differ, or measured /
predicted is outside 0.98 to 1.25 (time: a lower bound) or 0.9 to 1.1 (peak memory); 42: cases are left.
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gpu_worker import FORMS, IDS, ROOT, Line

STEPS = ("base", "large", "modernbert", "packed")
SECTIONS = ("kernels", "blocks", *STEPS)
WORKER = ROOT / "benchmarks/gpu_worker.py"
SECTION_SECONDS, ALL_SECONDS = 480, 1500
TIME_BARS, MEMORY_BARS = (0.98, 1.25), (0.9, 1.1)
DTYPES = ("float32", "bfloat16")
# Shares of a row that its sequences take.
PARTS = {"packed": (0.5, 0.3, 0.2), "padded": (0.5,)}


def cases(section: str, toy: bool) -> dict[str, dict[str, Any]]:
    """Return the cases of ``section`` by name."""
    if section == "kernels":
        names = ("form", "ids", "length", "dtype")
        exact = [form for form in FORMS if form != "wide heads"]  # too large for the registers in float32
        values = [*itertools.product(exact, IDS, (192,), DTYPES[:1])]
        values += itertools.product(FORMS, ("packed",), (128, 1024), DTYPES[1:])
        if toy:
            ids, (float32, bfloat16) = "packed", DTYPES
            values = [("dropout", ids, 192, float32), ("causal window", ids, 192, float32)]
            values += [("dropout", ids, 128, bfloat16)]
        all_cases = [dict(zip(names, each, strict=True)) for each in values]
        norms = itertools.product((64,) if toy else (768, 1024), (0.1,) if toy else (0.0, 0.1), DTYPES)
        all_cases += [dict(zip(("width", "rate", "dtype"), each, strict=True)) for each in norms]
        return {" ".join(("norm" if "width" in c else "attention", *map(str, c.values()))): c for c in all_cases}
    if section == "blocks":
        kernels = ("forward", "for_queries", "for_keys")
        # One kernel computes the gradients of rows of 128 tokens.
        swept = [(128, "forward"), (128, "for_rows"), *itertools.product((512, 1024, 8192), kernels)]
        swept = [(512, "forward"), (8192, "for_keys")] if toy else swept
        return {f"{length} {kernel}": {"length": length, "kernel": kernel} for length, kernel in swept}
    if section == "packed":
        rows = [("base", 512, "packed"), ("base", 512, "padded")]
        rows += [("modernbert", 1024, "padded")] * (not toy)
        rows += [("modernbert", length, "packed") for length in ((8192,) if toy else (1024, 8192, 512, 128))]
        return {
            f"{model} {length} {rest}": {"model": model, "length": length, "parts": PARTS[rest]}
            for model, length, rest in rows
        }
    lengths = [128, 512, 1024, 8192] if section == "modernbert" else [128, 512]
    lengths = lengths[-1:] if toy else lengths
    steps = {f"{section} {length}": {"model": section, "length": length} for length in lengths}
    if section == "base":
        steps["base 512 xla"] = {"model": "base", "length": 512, "attention": "xla"}
    return steps


class Record:
    """Lines by section, case and board, in a file or, without one, of this call."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.lines = path, dict[tuple[str, str, str], Line]()
        for text in path.read_text(encoding="utf-8").splitlines() if path and path.exists() else ():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # the end of a line that was cut off
                line = json.loads(text)
                self.lines[line["section"], line["case"], line["board"]] = line

    def add(self, line: Line) -> None:
        """Store and print ``line``."""
        self.lines[line["section"], line["case"], line["board"]] = line
        if self.path:
            from bert_jax.io.files import write_whole

            write_whole(self.path, "".join(json.dumps(each) + "\n" for each in self.lines.values()))
        print(json.dumps(line), flush=True)

    def left(self, section: str, names: Iterable[str], board: str) -> list[str]:
        """Return the cases without a line, and those that failed."""
        return [name for name in names if "error" in self.lines.get((section, name, board), {"error": ""})]


def main() -> int:
    """Measure, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--output", type=Path, help="file of JSON lines, which is continued")
    parser.add_argument("--seconds", type=float, default=SECTION_SECONDS, help="most seconds of a section")
    parser.add_argument("--toy", action="store_true", help="tiny models on the CPU; without --output, no file")
    parser.add_argument(
        "--predict", metavar="TOPOLOGY", help="compute only the plans, for one board, such as h100:1"
    )
    parser.add_argument("--table", action="store_true", help="print the lines as Markdown and exit")
    options = parser.parse_args()
    record = Record(options.output or (None if options.toy else ROOT / "studies/gpu/gpu.jsonl"))
    if options.table:
        print("\n".join(tables(record)))
        return 0
    try:
        board, chip = find_board(options.predict, options.toy)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    end, left = time.monotonic() + ALL_SECONDS, []
    for section in (section for section in SECTIONS if section in options.sections):
        deadline = min(end, time.monotonic() + options.seconds)
        own = cases(section, options.toy)
        if not options.predict:
            left += measure(section, own, board, chip, options.toy, deadline, record)
        if chip and section in STEPS and section != "packed":
            left += measure("plan", own, chip, chip, False, deadline, record)
    missed = list(missed_bars(record, {board, chip or board}))
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    if left:
        print(f"the time is over; left: {', '.join(left)}; run the same command again", file=sys.stderr)
    return 3 if missed else 42 if left else 0


def find_board(predict: str | None, toy: bool) -> tuple[str, str | None]:
    """Return the name of the board, and its name in the table of chips (None: there is no plan for it)."""
    if predict:
        from bert_jax.contrib.planner.gpu_devices import can_compile
        from bert_jax.contrib.planner.topology import parse_topology

        topology = parse_topology(predict)
        if topology.is_tpu or topology.num_devices != 1 or not can_compile():
            raise ValueError(
                f"--predict: {predict} is not possible; use one GPU, such as h100:1, and the extra gpu"
            )
        return topology.chip.name, topology.chip.name
    if toy:
        return "toy", None
    request = {"section": "board", "cases": {"board": {}}, "board": "", "toy": False}
    lines, error = run_worker(request, time.monotonic() + 300)
    if not lines:
        raise ValueError(
            f"gpu: JAX finds no NVIDIA GPU ({error}); allowed: one GPU, or --toy on the CPU; install the extra gpu "
            "and the driver for its CUDA, or add --toy"
        )
    return lines[0]["board"], lines[0]["chip"]


def measure(
    section: str, cases: dict[str, Any], board: str, chip: str | None, toy: bool, deadline: float, record: Record
) -> list[str]:
    """Measure until ``deadline`` the ``cases`` that have no line, and store their lines; return those that are
    left."""
    left = record.left(section, cases, board)
    while left and time.monotonic() < deadline:  # a process ends with a line for each case, an error, or late
        group = left[:1] if section in STEPS and not toy else left
        request = {"section": section, "cases": {name: cases[name] for name in group}, "board": board, "toy": toy}
        lines, error = run_worker(request, deadline, lambda line: record.add(line | {"chip": chip}))
        done = {line["case"] for line in lines}
        failed = next((name for name in group if name not in done), None)
        if error and failed:
            record.add({"section": section, "case": failed, "board": board, "error": error})
            done.add(failed)
        left = [name for name in left if name not in done]
    return [f"{section}: {name}" for name in left]


def run_worker(
    request: dict[str, Any], deadline: float, add: Callable[[Line], None] = lambda _: None
) -> tuple[list[Line], str]:
    """Run a process that measures the cases of ``request`` one after the other, at most until ``deadline``. Return
    its lines, and the error with which it ended by itself."""
    plans = request["section"] == "plan"
    cache = Path(tempfile.gettempdir()) / f"bert_jax-gpu-{os.getuid()}"
    environment = {"JAX_COMPILATION_CACHE_DIR": str(cache)} | os.environ
    environment["JAX_PLATFORMS"] = "cpu" if plans or request["toy"] else "cuda,cpu"
    if request["toy"]:  # tiny programs: quick compilation rather than quick programs
        environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    if plans:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # a plan is the same with and without a GPU
    command, lines = [sys.executable, str(WORKER), json.dumps(request)], list[Line]()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
            late = threading.Timer(max(deadline - time.monotonic(), 0), process.kill)
            late.start()
            for text in process.stdout or ():
                if text.startswith('{"section"'):
                    lines.append(json.loads(text))
                    add(lines[-1])
            late.cancel()
        errors.seek(0)
        texts = [text.strip() for text in errors if text.strip()]
        last = next((text for text in reversed(texts) if "Error" in text), (texts or ["no message"])[-1])
    ended_itself = process.returncode and time.monotonic() < deadline
    return lines, f"code {process.returncode}: {last[:300]}" if ended_itself else ""


def rows_of(record: Record, section: str) -> Iterator[Line]:
    """Yield the lines of ``section`` with, for steps, the figures of the plan and measured / predicted."""
    for (kind, case, _), line in record.lines.items():
        if kind == section:
            plan = record.lines.get(("plan", case, line.get("chip") or ""), {})
            ratios = {}
            for name in ("seconds", "peak_bytes"):
                measured, planned = line.get(name), plan.get(name)
                ratios[f"plan_{name}"] = planned
                ratios[f"{name}_ratio"] = measured / planned if measured and planned else None
            yield line | ratios


def missed_bars(record: Record, boards: set[str]) -> Iterator[str]:
    """Yield a line for each case of ``boards`` that failed or is outside its bars."""
    for section in (*SECTIONS, "plan"):
        for line in rows_of(record, section):
            name = f"{section}: {line['case']}"
            if line["board"] not in boards:
                continue
            if "error" in line:
                yield f"{name} failed: {line['error']}"
            if not line.get("good", True):
                yield f"{name}: {line['of_tolerance']} of the tolerance, dropout bits equal: {line['bits_equal']}"
            for figure, bars in (("seconds", TIME_BARS), ("peak_bytes", MEMORY_BARS)):
                ratio = line[f"{figure}_ratio"]
                if ratio and not bars[0] <= ratio <= bars[1]:
                    yield f"{name}: {figure} measured / predicted {ratio:.3f}, allowed {bars[0]} to {bars[1]}"


def tables(record: Record) -> Iterator[str]:
    """Yield the lines of Markdown tables, a row per case."""

    def shown(value: Any, form: str = "", scale: float = 1.0) -> str:
        return "" if value is None else format(value * scale if form else value, form)

    columns: dict[str, dict[str, Callable[[Line], str]]] = {
        "kernels": {
            "largest difference": lambda x: shown(x["difference"], ".1e"),
            "of the tolerance": lambda x: shown(x["of_tolerance"]),
            "dropout bits": lambda x: {True: "equal", False: "different", None: ""}[x["bits_equal"]],
        },
        "blocks": {
            "default": lambda x: f"{x['default']}: {shown(x['milliseconds'][x['default']], '.3f')} ms",
            "best": lambda x: f"{x['best']}: {shown(x['milliseconds'][x['best']], '.3f')} ms",
        },
    }
    steps: dict[str, Callable[[Line], str]] = {
        "batch": lambda x: f"{x['rows']} x {x['length']}",
        "step, plan, ratio": lambda x: three(x, "seconds", 1e3, "ms"),
        "memory, plan, ratio": lambda x: three(x, "peak_bytes", 1e-9, "GB"),
        "tokens/s": lambda x: shown(x["tokens_per_second"], ",.0f"),
        "MFU": lambda x: shown(x["mfu"], ".1%"),
    }

    def three(line: Line, name: str, scale: float, unit: str) -> str:
        measured, planned = (shown(line[key], ".1f", scale) for key in (name, f"plan_{name}"))
        rest = f", {planned}, {shown(line[f'{name}_ratio'], '.2f')}" if planned else ""
        return f"{measured} {unit}{rest}" if measured else ""

    for board in sorted({line["board"] for line in record.lines.values() if line["section"] in SECTIONS}):
        for sections in (("kernels",), ("blocks",), STEPS):
            lines = [line for section in sections for line in rows_of(record, section) if line["board"] == board]
            shape = columns.get(sections[0], steps)
            if lines:
                yield from ("", f"| {board} | {' | '.join(shape)} |", "|---" * (len(shape) + 1) + "|")
            for line in lines:
                failed = [line["error"], *[""] * (len(shape) - 1)] if "error" in line else None
                yield f"| {line['case']} | {' | '.join(failed or [make(line) for make in shape.values()])} |"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
