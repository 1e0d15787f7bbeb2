"""Times one form of a model in a separate process: ``latency_worker.py FORM FOLDER --batches N ...``.

Run by :mod:`bert_jax.contrib.experiments.latency`, and not imported by it, so that this process uses only the
memory of the form: with onnxruntime, neither jax nor this library is loaded. Prints a JSON line for each size, with
the largest memory so far.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
NAMES = ("input_ids", "attention_mask", "token_type_ids")


def with_jax(folder: Path, dtype: str, words: list[str]) -> Callable[[Arrays], Any]:
    import bert_jax
    from bert_jax.commands.options import take_encoder

    take_encoder(words)
    return bert_jax.load(folder, dtype=dtype).forward  # type: ignore[arg-type]


def with_onnx(folder: Path, cpus: int) -> Callable[[Arrays], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cpus
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    names = {one.name for one in session.get_inputs()}
    return lambda arrays: session.run(None, {name: x for name, x in arrays.items() if name in names})


def with_stablehlo(folder: Path) -> Callable[[Arrays], Any]:
    import jax
    import jax.export
    from safetensors.numpy import load_file

    program = jax.export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    params = {name: jax.numpy.asarray(values) for name, values in load_file(folder / "weights.safetensors").items()}
    call = jax.jit(program.call)

    def run(arrays: Arrays) -> Any:
        outputs = call(params, *(arrays[name].astype(np.int32) for name in NAMES))
        return {name: np.asarray(values) for name, values in outputs.items()}

    return run


def peak_memory() -> int:
    """Return the largest resident memory of this process, in bytes. (That of ``getrusage`` includes the parent.)"""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("form")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--cpus", type=int)
    parser.add_argument("--vocab_size", type=int)
    given, words = parser.parse_known_args()
    available = sorted(os.sched_getaffinity(0))
    cpus = given.cpus or len(available)
    os.sched_setaffinity(0, available[:cpus])  # before any library starts its threads
    if given.form.startswith("onnx"):
        run = with_onnx(given.folder, cpus)
    elif given.form == "stablehlo":
        run = with_stablehlo(given.folder)
    else:
        run = with_jax(given.folder, "bfloat16" if given.form.endswith("bfloat16") else "float32", words)
    rng = np.random.default_rng(0)
    for batch in given.batches:
        for length in given.lengths:
            shape = batch, length
            ids = rng.integers(0, given.vocab_size, shape)
            arrays = dict(zip(NAMES, (ids, np.ones(shape, np.int64), np.zeros(shape, np.int64)), strict=True))
            for _ in range(3):  # compiles, and fills caches
                run(arrays)
            seconds: list[float] = []
            began = time.perf_counter()
            while len(seconds) < given.repeats or time.perf_counter() - began < given.seconds:
                start = time.perf_counter()
                run(arrays)
                seconds.append(time.perf_counter() - start)
            median, high = 1e3 * np.quantile(seconds, (0.5, 0.99))
            line = {"batch": batch, "length": length, "median_ms": round(median, 3), "p99_ms": round(high, 3)}
            line |= {"texts_per_second": round(1e3 * batch / median, 2), "runs": len(seconds)}
            print(json.dumps(line | {"peak_memory_mb": round(peak_memory() / 1e6, 1)}), flush=True)


if __name__ == "__main__":
    main()
