"""``bert-jax benchmark-inference`` measures time, size and memory of a model in every form that can run here."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_jax.interop.export import export_model
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions, StoredDtype
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.json_values import Json
from bert_jax.registry import module_option

WORKER = Path(__file__).with_name("latency_worker.py")
# Form -> format of the export that it runs ("": a saved model), package that runs it, description.
FORMS = {
    "jax": ("", "jax", "this library, float32"),
    "jax-bfloat16": ("", "jax", "this library, bfloat16"),
    "onnx": ("onnx", "onnxruntime", "onnxruntime, float32"),
    "stablehlo": ("stablehlo", "jax", "the exported program, run by JAX"),
    "onnx-int8": ("onnx", "onnxruntime", "onnxruntime, int8 with a scale for each token"),
}


@dataclass(frozen=True)
class Load:
    """Batch sizes (``batches``, in texts) and lengths (``lengths``, in tokens) to measure.

    Each combination runs for ``seconds`` and at least ``repeats`` times, on ``cpus`` processors (0: all).
    """

    batches: Sequence[int] = (1, 8, 64)
    lengths: Sequence[int] = (16, 128, 512)
    seconds: float = 3.0
    repeats: int = 20
    cpus: int = 0


def installed_forms() -> tuple[str, ...]:
    """Return the forms whose package is installed."""
    return tuple(form for form, (_, package, _) in FORMS.items() if importlib.util.find_spec(package))


def benchmark(
    source: Path, forms: Sequence[str], load: Load, report: Callable[[str], None], options: ReadOptions
) -> Iterator[dict[str, Json]]:
    """Yield a line for each form and size: ``form``, ``batch``, ``length``, ``median_ms``, ``p99_ms`` (of the time
    of a batch, from arrays of ids to arrays of outputs), ``texts_per_second`` (from the median), ``megabytes`` on
    disk and ``peak_memory_mb``, the peak resident memory so far of a process that runs only this form.

    The forms run one after the other, each in a separate process. Lengths beyond the task maximum are skipped.
    A form that does not support the model is skipped. ``report`` is called with each line of the log. Raises
    ``ValueError`` for an unknown or not installed form, and if a form fails.
    """
    for form in forms:
        if form not in FORMS:
            raise ValueError(f"--forms: {form!r} is not allowed; use one of {', '.join(FORMS)}")
        if form not in installed_forms():
            raise ValueError(f"--forms: {form}: requires the package {FORMS[form][1]}; install it, or omit {form}")
    weights = read_weights(source, options)
    for note in weights.notes:
        report(note)
    longest = weights.spec.task_length
    lengths = [length for length in load.lengths if length <= longest]
    if not lengths:
        raise ValueError(f"--lengths: texts of the model have at most {longest} tokens; give a smaller length")
    if beyond := [str(length) for length in load.lengths if length not in lengths]:
        report(f"lengths skipped: {', '.join(beyond)}; texts of the model have at most {longest} tokens")
    minutes = _seconds(weights, lengths, load) * len(forms) / 60
    report(f"about {max(minutes, 1):.0f} min: {len(forms)} forms of {len(load.batches) * len(lengths)} sizes")
    with tempfile.TemporaryDirectory(prefix="bert_jax-") as scratch:
        for form in forms:
            format, folder = FORMS[form][0], Path(scratch) / form
            try:
                if format:
                    dtype: StoredDtype = "int8" if form.endswith("int8") else "float32"
                    export_model(
                        source, folder, format, options=options, dtype=dtype, verify=False, report=lambda line: None
                    )
                else:
                    write_saved(folder, weights)
            except ValueError as error:
                report(f"{form}: skipped; {error}")
                continue
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
            report(f"{form}: {FORMS[form][2]}, {size:,.1f} MB")
            for line in _run(form, folder, weights.spec.model.vocab_size, lengths, load):
                report(f"  {line['batch']} x {line['length']}: {line['median_ms']:.2f} ms")
                yield {"form": form, "megabytes": round(size, 3), **line}


def _seconds(weights: ModelBundle, lengths: Sequence[int], load: Load) -> float:
    """Return a rough duration of one form: the export, the start, and runs at 50 GFLOP/s."""
    values = sum(array.size for name, array in weights.params.items() if not name.startswith("embeddings/"))
    runs = (2 * values * batch * length / 5e10 for batch in load.batches for length in lengths)
    return 10 + sum(3 * run + max(load.seconds, load.repeats * run) for run in runs)


def _run(form: str, folder: Path, vocab_size: int, lengths: Sequence[int], load: Load) -> Iterator[dict[str, Json]]:
    # -P: the folder of the worker does not hide installed packages.
    words = [sys.executable, "-P", str(WORKER), form, str(folder), "--seconds", str(load.seconds)]
    words += ["--vocab_size", str(vocab_size), *module_option()]
    words += ["--repeats", str(load.repeats), "--cpus", str(load.cpus)]
    words += ["--batches", *map(str, load.batches), "--lengths", *map(str, lengths)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            yield from map(json.loads, process.stdout)
            if process.wait():
                errors.seek(0)
                raise ValueError(f"{form}: {(errors.read().strip().splitlines() or ['no message'])[-1]}")
        finally:
            process.kill()
            process.wait()


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return readable rows: median and 99th percentile of the milliseconds of a batch, and texts per second."""
    rows = [("form", "batch x length", "median ms", "p99 ms", "texts/s", "MB on disk", "peak MB")]
    for line in lines:
        size, times = f"{line['batch']} x {line['length']}", (line["median_ms"], line["p99_ms"])
        figures = *(f"{ms:.2f}" for ms in times), f"{line['texts_per_second']:,.0f}"
        rows.append((line["form"], size, *figures, f"{line['megabytes']:,.1f}", f"{line['peak_memory_mb']:,.0f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
