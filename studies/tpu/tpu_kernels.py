"""Cycles that the TPU kernels state, beside the instructions that the compiler schedules for a v5e.

    python studies/tpu/tpu_kernels.py [--output JSONL]

Compiles the attention kernels (rows of 128 to 8,192 tokens, with and without dropout, a window, heads of 32, 64 and
128, rotary positions) and the kernels of dropout, residual and LayerNorm for one chip of a v5e, a process each of
about 4 s, and has libtpu write the final instructions of each kernel. An instruction (a bundle) takes a cycle, as
often as the loops around it run. Prints a JSON line per kernel: these cycles, those of
``bert_jax.contrib.planner.kernels.pallas_seconds`` without the transfer of its bytes, and the ratio. Exit code 3 if
a ratio is not within 0.85 and 1.2. Needs the extra ``tpu``; no TPU is used.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
LEAST, MOST = 0.85, 1.2
# Tokens of an attention layer, and of the kernel of the block end.
TOKENS = 8192


def cases() -> Iterator[dict[str, Any]]:
    """Yield the forms of the kernels."""
    for length, rate in itertools.product((128, 256, 512, 1024), (0.0, 0.1)):
        yield {"length": length, "rate": rate, "size": 64, "window": 0}
    for size in (32, 128):
        yield {"length": 512, "rate": 0.1, "size": size, "window": 0}
    for length, rate in ((1024, 0.0), (1024, 0.1), (8192, 0.0)):
        yield {"length": length, "rate": rate, "size": 64, "window": 64}
    yield {"length": 8192, "rate": 0.0, "size": 64, "window": 0}
    for length, window in ((512, 0), (1024, 0), (1024, 64), (8192, 64)):
        yield {"length": length, "rate": 0.0, "size": 64, "window": window, "rotary": True}
    for width, rate in itertools.product((768, 1024), (0.0, 0.1)):
        yield {"width": width, "rate": rate}
    for width in (768, 1024):
        yield {"width": width, "rate": 0.0, "before": True}


def main() -> int:
    """Compile, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file of JSON lines, which is continued")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        compile_case(json.loads(options.worker))
        return 0
    old = options.output.read_text().splitlines() if options.output and options.output.exists() else []
    lines = [json.loads(line) for line in old]
    for case in cases():
        if any(case.items() <= line.items() and len(line) == len(case) + 5 for line in lines):
            continue
        lines += measure(case)
        if options.output:
            options.output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        print(json.dumps(line))
    return 0 if all(LEAST <= line["ratio"] <= MOST for line in lines) else 3


def measure(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the figures of the two kernels of ``case``, forward and backward."""
    with tempfile.TemporaryDirectory() as folder:
        # Flags of libtpu 0.0.42: it writes every stage of every program of the device.
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        words = [sys.executable, __file__, "--worker", json.dumps(case)]
        environment = os.environ | {"LIBTPU_INIT_ARGS": flags}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{case}: {done.stderr.strip().splitlines()[-1]}")
        for kernel, stated in json.loads(done.stdout.splitlines()[-1]).items():
            (file,) = (path for path in Path(folder).glob(f"*{kernel}*-final_bundles.txt") if "<" not in path.name)
            cycles = scheduled_cycles(file.read_text(), stated["trips"])
            yield {"kernel": kernel} | case | {
                "scheduled_cycles": cycles,
                "stated_cycles": round(stated["cycles"]),
                "ratio": round(stated["cycles"] / cycles, 3),
                "bound_by_memory": stated["transfer"] > stated["cycles"],
            }  # fmt: skip


def scheduled_cycles(text: str, trips: list[int]) -> int:
    """Return the number of bundles of ``text`` that run if the loops run ``trips`` times, outermost first. A bundle
    has one ``>`` per loop around it."""
    depths = Counter(
        match[1].count(">")
        for match in re.finditer(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})?: ((?:> ?)*)\{", text, re.M)
    )
    if len(depths) > len(trips) + 1:
        raise SystemExit(f"The program has {len(depths) - 1} loops within each other; {len(trips)} are known.")
    total, times = depths[0], 1
    for depth, count in enumerate(trips, 1):
        times *= count
        total += depths[depth] * times
    return total


def compile_case(case: dict[str, Any]) -> None:
    """Compile the kernels of ``case``. Print, for each, the numbers of iterations of its loops, the cycles that it
    states, and those of the transfer of its bytes."""
    from bert_jax.contrib.planner.topology import parse_topology, prepare_environment, tpu_devices

    prepare_environment()
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from bert_jax.contrib.planner import hlo
    from bert_jax.contrib.planner.kernels import pallas_seconds, stated_numbers
    from bert_jax.parallel.hardware import TPUS

    mesh = Mesh(tpu_devices(parse_topology("v5e:2x2"))[:1], ("data",))
    placed = NamedSharding(mesh, PartitionSpec())

    def shape(sizes: tuple[int, ...], dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=placed)

    program, operands, trips = norm_case(case, shape) if "width" in case else attention_case(case, shape)
    with jax.set_mesh(mesh):
        module = hlo.parse(jax.jit(program).lower(*operands).compile().as_text())
    chip, found = TPUS["TPU v5e"], {}
    clock = chip.clock_ghz * 1e9
    for line in module.computations[module.entry].instructions.values():
        if (stated := stated_numbers(line)) and line.opcode == "custom-call":
            cycles = pallas_seconds(stated | {"bytes_accessed": 0}, chip) * clock
            transfer = stated["bytes_accessed"] / chip.device_memory_bandwidth * clock
            kernel = re.search(r"(?:attention|add_norm|norm)_(?:forward|backward)", line.name)[0]
            found[kernel] = {"trips": trips, "cycles": cycles, "transfer": transfer}
    print(json.dumps(found))


def attention_case(case: dict[str, Any], shape: Callable[..., Any]) -> tuple[Any, tuple[Any, ...], list[int]]:
    """Return attention forward and backward, its operands, and the iterations of its loops."""
    import jax

    from bert_jax.model.kernels import tpu_attention
    from bert_jax.model.kernels.tiles import Form
    from bert_jax.model.kernels.tpu_attention_bodies import Tiles

    length, width, rotary = case["length"], 768, case.get("rotary", False)
    form = Form(case["size"], case["rate"], case["window"], rotary=rotary)
    batch, dropped = TOKENS // length, bool(case["rate"])
    tiles, rows = Tiles(length, form), max(1024 // length, 1)
    loops = [rows, length // tiles.queries, length // tiles.keys if tiles.is_loop else 1]
    integers = [
        shape(x, "int32") for x in ((batch, 3 if dropped else 1, length), (batch, length, 1 + dropped), (1,))
    ]

    def program(query: Any, key: Any, value: Any, biases: Any, gradient: Any, *rest: Any) -> Any:
        def attend(*operands: Any) -> Any:
            return tpu_attention.attend(*operands, *rest[:2], rest[3:], rest[2], form, False)

        out, backward = jax.vjp(attend, query, key, value, biases)
        return out, backward(gradient)

    arrays = [shape((batch, length, width))] * 3
    turns = [shape((batch, length, 128), "float32")] * 2 * rotary
    operands = (*arrays, shape((3, width), "float32"), arrays[0], *integers, *turns)
    return program, operands, [batch // rows * width // 128, *(count for count in loops if count > 1)]


def norm_case(case: dict[str, Any], shape: Callable[..., Any]) -> tuple[Any, tuple[Any, ...], list[int]]:
    """Return the end of a block forward and backward, its operands, and the iterations of its loops."""
    from bert_jax.model.kernels import tpu_norm

    width, rate = case["width"], case["rate"]
    words = (shape((TOKENS, 2), "int32"),) if rate else ()

    def program(arrays: Any, vectors: Any, words: Any, gradient: Any) -> Any:
        if case.get("before"):
            out = tpu_norm.norm_forward(arrays[0], vectors[1:], 1e-12, False)
            return out, tpu_norm.norm_backward((*arrays, gradient), vectors[1:], 1e-12, False)
        common = (vectors, words, 1e-12, rate, False)
        return tpu_norm.forward(arrays, *common), tpu_norm.backward((*arrays, gradient), *common)

    array, vectors = shape((TOKENS, width)), (shape((width,), "float32"),) * 3
    return program, ((array, array), vectors, words, array), [TOKENS // 256]


if __name__ == "__main__":
    sys.exit(main())
