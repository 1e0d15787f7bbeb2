"""What the assembler says of the GPU kernels, for GPUs that are not there: registers, spills, shared memory.

    python studies/gpu/gpu_kernels.py [--boards h100 a100 b200] [--output JSONL]

Compiles the attention kernels (rows of 128 and 512 tokens, with and without dropout, a window, heads of 32, 64 and
128, bfloat16 and float32) and the kernels of dropout, residual and LayerNorm for each board, a process each of
about 5 s, assembles their PTX again with ``ptxas -v``, and prints a JSON line per kernel. Exit code 3 if a register
is spilled, if a block needs more shared memory than it may have, or if an attention kernel has no instruction of
the tensor cores. Needs the extra ``gpu``; no GPU is used.
"""

import argparse
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
ARCHITECTURES = {"a100": "sm_80", "h100": "sm_90a", "b200": "sm_100a"}
# Most bytes of shared memory of a block (CUDA C++ Programming Guide, compute capabilities 8.0, 9.0 and 10.0).
SHARED = {"a100": 166912, "h100": 232448, "b200": 232448}
TENSOR_CORES = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b")


def cases() -> Iterator[dict[str, Any]]:
    """Yield the forms of the kernels."""
    for length, rate, size, dtype in itertools.product(
        (128, 512), (0.0, 0.1), (32, 64, 128), ("bfloat16", "float32")
    ):
        if not (dtype == "float32" and size == 128):
            yield {"length": length, "rate": rate, "size": size, "dtype": dtype}
    yield {"length": 1024, "rate": 0.0, "size": 64, "dtype": "bfloat16", "window": 64}
    for width, rate in itertools.product((768, 1024), (0.0, 0.1)):
        yield {"width": width, "rate": rate, "dtype": "bfloat16"}


def main() -> int:
    """Compile, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boards", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--output", type=Path, help="file of JSON lines, which is continued")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        compile_case(options.worker[0], json.loads(options.worker[1]))
        return 0
    old = options.output.read_text().splitlines() if options.output and options.output.exists() else []
    lines = [json.loads(line) for line in old]
    for board, case in itertools.product(options.boards, cases()):
        if any(all(line.get(key) == value for key, value in ({"board": board} | case).items()) for line in lines):
            continue
        for line in measure(board, case):
            lines.append(line)
            print(json.dumps(line), flush=True)
        if options.output:
            options.output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    wrong = [line for line in lines if not line["good"]]
    print(f"{len(lines)} kernels, {len(wrong)} of them not as they must be")
    return 3 if wrong else 0


def measure(board: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a line for each kernel of ``case``."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", board, json.dumps(case)]
        flags = f"--xla_dump_to={folder} {os.environ.get('XLA_FLAGS', '')}"
        environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        sequence = next(Path(folder).glob("*jit_loss*thunk_sequence.txt")).read_text()
        shared = dict(re.findall(r"\] (\w+) grid: .*shared_memory: (\d+) bytes", sequence))
        for path in sorted(Path(folder).glob("*jit_loss*.ptx")):
            text = path.read_text()
            entry = re.search(r"\.entry (attention_\w+|add_norm_\w+)\(", text)
            if entry is None:
                continue
            told = subprocess.run(
                [ptxas(), "-v", f"-arch={ARCHITECTURES[board]}", str(path), "-o", os.devnull],
                capture_output=True, text=True, check=True,
            ).stderr  # fmt: skip
            line: dict[str, Any] = {"board": board, "kernel": entry[1], **case}
            line["registers"] = int(re.findall(r"Used (\d+) registers", told)[0])
            line["spilled"] = sum(map(int, re.findall(r"(\d+) bytes spill", told)))
            line["shared"] = int(shared[entry[1]])
            line["tensor_cores"] = len(TENSOR_CORES.findall(text))
            fits = line["spilled"] == 0 and line["shared"] <= SHARED[board]
            line["good"] = fits and (line["tensor_cores"] > 0 or "width" in case)
            lines.append(line)
    assert lines, case
    return lines


def ptxas() -> str:
    """Return the assembler of the CUDA compiler that JAX installs."""
    spec = importlib.util.find_spec("nvidia")
    assert spec is not None and spec.submodule_search_locations
    return str(next(path for root in spec.submodule_search_locations for path in Path(root).glob("*/bin/ptxas")))


def compile_case(board: str, case: dict[str, Any]) -> None:
    """Compile the forward and the backward pass of ``case`` for ``board``."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from bert_jax.contrib.planner.topology import parse_topology, topology_devices
    from bert_jax.model.kernels import gpu_attention, gpu_norm
    from bert_jax.model.kernels.add_norm import add_norm
    from bert_jax.model.kernels.tiles import Form

    mesh = Mesh(np.array(topology_devices(parse_topology(f"{board}:1"))), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())

    def shape(*sizes: int, dtype: str = case["dtype"]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=whole)

    rate = case["rate"]
    if "width" in case:
        width = case["width"]
        vectors = (shape(width, dtype="float32"),) * 3
        words = (shape(4096, 2, dtype="int32"),) if rate else ()

        def loss(*x: Any) -> jax.Array:
            return jnp.sum(add_norm(*x, 1e-12, rate, gpu_norm, False).astype(jnp.float32))

        shapes: tuple[Any, ...] = (shape(4096, width), shape(4096, width), vectors, words)
        gradient = jax.value_and_grad(loss, (0, 1, 2))
    else:
        length, form = (
            case["length"],
            Form(
                case["size"], rate, case.get("window", 0), capability=float(mesh.devices.flat[0].compute_capability)
            ),
        )
        width = 4 * case["size"]

        def loss(heads: jax.Array, biases: jax.Array, tokens: jax.Array) -> jax.Array:
            out = gpu_attention.attend((heads,), biases, tokens, jnp.zeros(1, jnp.int32), form, False)
            return jnp.sum(out.astype(jnp.float32))

        tokens = shape(4, 4 if rate else 1, length, dtype="int32")
        shapes = (shape(4, length, 3, width), shape(3, width, dtype="float32"), tokens)
        gradient = jax.value_and_grad(loss, (0, 1))
    gradient.__name__ = "loss"
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(gradient, out_shardings=whole).lower(*shapes)
    lowered.compile()


if __name__ == "__main__":
    sys.exit(main())
