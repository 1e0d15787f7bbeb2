"""Cost of window, block and causal attention per token against the length, and against attention over whole rows.

    python studies/attention_cost/attention_cost.py [--lengths 1024 2048 4096 8192 16384] [--v5e] [--seconds] [--blocks]

Compiles the forward and the backward pass of one attention layer (12 heads of size 64, window of 64 keys on each
side, without and with 16 global tokens; bfloat16 for v5e:1x1, which is compiled without the hardware, float32 on
the CPU) and prints one JSON line per length: operations and bytes per token of the compiled program, for windows,
causal and whole attention; with ``--seconds`` the time of the CPU program. ``--blocks``: instead, blocks of 64
tokens with three random ones, as in training, and without these, as in evaluation. Exit code 3 if operations or
bytes per token with windows vary by more than 10% between lengths (with blocks from 2,048 tokens on: in shorter
rows the first and the last block, which see all others, are a larger share), if causal attention costs more than
0.6 of whole attention from 2,048 tokens on, or if in float64 values or gradients differ from whole rows with the
same mask by more than 1e-6 of the largest value (at least 1). The rounding of float32 stands beside it, also that
of whole rows.
"""

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.contrib.planner.topology import parse_topology, prepare_environment, tpu_devices
from bert_jax.model.attention import block_scores, dot_product_attention, random_blocks
from bert_jax.model.local_attention import block_attention, local_attention, replace_global

HEADS, SIZE, WINDOW = 12, 64, 64
# Global tokens of a row, with windows.
GLOBAL = 16
# Tokens of a block, and random blocks of each, with ``--blocks``.
BLOCK, RANDOM = 64, 3
# Tokens of a program whose cost is counted.
TOKENS = 16_384
# Longest rows whose whole scores fit into the memory of the CPU, and of a v5e.
LONGEST_WHOLE, LONGEST_COUNTED = 4096, 8192


def attention(kind: str) -> Callable[..., jax.Array]:
    """Return the attention function of ``kind``."""
    plain: dict[str, Any] = {"dropout_rate": 0.0, "dropout_key": None}
    if kind == "whole":
        return functools.partial(dot_product_attention, **plain)
    if kind == "global":
        return functools.partial(with_global, **plain)
    if kind in ("blocks", "random_blocks"):
        return functools.partial(in_blocks, kind == "random_blocks", **plain)
    window, causal = (WINDOW, False) if kind == "window" else (0, True)
    return functools.partial(local_attention, window=window, causal=causal, **plain)


def with_global(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array, **plain: Any) -> jax.Array:
    """Return window attention with ``GLOBAL`` tokens at the beginning of each row, whose projections are those of
    the others."""
    slots = jnp.broadcast_to(jnp.arange(GLOBAL), (len(ids), GLOBAL))
    context = local_attention(query, key, value, ids, window=WINDOW, causal=False, slots_BxG=slots, **plain)
    return replace_global(context, query[:, :GLOBAL], key, value, ids, slots, **plain)


def plan(is_random: bool, length: int) -> jax.Array | None:
    """Return the random blocks of the first layer of a model for 4,096 tokens or more."""
    return jnp.asarray(random_blocks(0, HEADS, length, BLOCK, RANDOM, max(length, 4096))) if is_random else None


def in_blocks(
    is_random: bool, query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array, **plain: Any
) -> jax.Array:
    """Return attention in blocks, with random ones or without them."""
    blocks = {"block": BLOCK, "number": RANDOM, "random_AxMxR": plan(is_random, ids.shape[1])}
    return block_attention(query, key, value, ids, **blocks, **plain)


def statement(kind: str, query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the attention of ``kind`` from the scores of whole rows, in the dtype of ``query``."""
    length = ids.shape[1]
    queries, keys = np.arange(length)[:, None], np.arange(length)
    if kind == "causal":
        added = np.where(keys <= queries, 0, -np.inf)
    elif kind == "window":
        added = np.where(np.abs(queries - keys) <= WINDOW, 0, -np.inf)
    elif kind == "global":
        near = (np.abs(queries - keys) <= WINDOW) | (queries < GLOBAL) | (keys < GLOBAL)
        added = np.where(near, 0, -np.inf)
    else:
        added = block_scores(length, BLOCK, RANDOM, plan(kind == "random_blocks", length)).bias_AxSxT
    scores = jnp.einsum("BSAD,BTAD->BAST", query, key) / SIZE**0.5 + added
    return jnp.einsum("BAST,BTAD->BSAD", jax.nn.softmax(scores, axis=-1), value)


def program(kind: str, *, stated: bool = False) -> Callable[..., Any]:
    """Return forward and backward pass of the attention of ``kind``, or of its statement."""
    attend = functools.partial(statement, kind) if stated else attention(kind)

    def run(heads: list[jax.Array], ids: jax.Array, upstream: jax.Array) -> Any:
        context, pull = jax.vjp(lambda heads: attend(*heads, ids), heads)
        return context, pull(upstream)

    return run


def operands(length: int, dtype: str, rows: int = 1) -> list[Any]:
    shape = jax.ShapeDtypeStruct((rows, length, HEADS, SIZE), dtype)
    return [[shape] * 3, jax.ShapeDtypeStruct((rows, length), jnp.int32), shape]


def cost(kind: str, length: int, device: Any) -> tuple[float, float]:
    """Return operations and bytes per token of the compiled program for ``TOKENS`` tokens: what fits into the fast
    memory of a chip depends on the number of tokens."""
    rows = max(TOKENS // length, 1)
    sharding = jax.sharding.SingleDeviceSharding(device)
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    shaped = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), operands(length, dtype, rows)
    )
    analysis = jax.jit(program(kind)).lower(*shaped).compile().cost_analysis()
    return analysis["flops"] / (rows * length), analysis["bytes accessed"] / (rows * length)


def values(length: int) -> list[Any]:
    rng = np.random.default_rng(0)

    def draw(shape: Any) -> jax.Array:
        if shape.dtype == jnp.int32:
            return jnp.ones(shape.shape, jnp.int32)
        return jnp.asarray(rng.standard_normal(shape.shape), shape.dtype)

    return jax.tree.map(draw, operands(length, "float32"))


def seconds(kind: str, length: int) -> float:
    """Return the least of three times of the program on the CPU."""
    run, arguments = jax.jit(program(kind)), values(length)
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - began)
    return min(times)


def differences(kind: str, length: int) -> dict[str, float]:
    """Return the largest difference of values and gradients from the statement in float64, relative to the largest
    value of each (at least 1): of the attention of ``kind`` in float64 and in float32, and of the statement in
    float32."""
    arguments = values(length)

    def run(stated: bool, given: list[Any]) -> list[np.ndarray]:
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(program(kind, stated=stated))(*given))]

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, x.dtype if x.dtype == jnp.int32 else "float64"), arguments)
        stated, ours = run(True, wide), run(False, wide)
    assert all(x.dtype == np.float64 for x in (*stated, *ours))
    found = {"float64": ours, "float32": run(False, arguments), "whole_float32": run(True, arguments)}
    return {
        name: float(max(np.abs(a - b).max() / max(1.0, np.abs(b).max()) for a, b in zip(of, stated, strict=True)))
        for name, of in found.items()
    }


def add_differences(line: dict[str, Any], kinds: tuple[str, ...], length: int) -> bool:
    """Add the differences of ``kinds`` to ``line``; return True if all reach the bar."""
    line["difference"] = {kind: differences(kind, length) for kind in kinds}
    return max(found["float64"] for found in line["difference"].values()) <= 1e-6


def measure_blocks(place: str, device: Any, lengths: list[int], timed: bool) -> bool:
    """Print the lines of attention in blocks on ``device``; return True if it reaches the bars."""
    kinds, reached = ("blocks", "random_blocks"), True
    found: list[tuple[float, ...]] = []
    for length in lengths:
        costs = {kind: cost(kind, length, device) for kind in kinds}
        found.append(tuple(value for kind in kinds for value in costs[kind]))
        long = [values for values, tokens in zip(found, lengths, strict=False) if tokens >= 2048]
        line: dict[str, Any] = {"device": place, "length": length}
        line |= {kind: {"operations": costs[kind][0], "bytes": costs[kind][1]} for kind in kinds}
        line["of_shortest"] = [now / before for now, before in zip(found[-1], found[0], strict=True)]
        if place == "cpu" and length <= LONGEST_WHOLE:
            reached &= add_differences(line, kinds, length)
        if length <= LONGEST_COUNTED:
            whole = cost("whole", length, device)
            line["random_blocks_of_whole"] = [a / b for a, b in zip(costs["random_blocks"], whole, strict=True)]
        if place == "cpu" and timed:
            timed_kinds = (*kinds, *(["whole"] if length <= LONGEST_WHOLE else []))
            line["seconds"] = {kind: round(seconds(kind, length), 4) for kind in timed_kinds}
        reached &= all(max(values) <= 1.1 * min(values) for values in zip(*long, strict=True))
        print(json.dumps(line), flush=True)
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--v5e", action="store_true", help="also compile for v5e:1x1")
    parser.add_argument("--seconds", action="store_true", help="also run on the CPU")
    parser.add_argument("--blocks", action="store_true", help="measure attention in blocks instead")
    arguments = parser.parse_args()
    devices = {"cpu": jax.devices("cpu")[0]}
    if arguments.v5e:
        prepare_environment()
        devices["v5e"] = tpu_devices(parse_topology("v5e:1x1"))[0]
    if arguments.blocks:
        results = [measure_blocks(*pair, arguments.lengths, arguments.seconds) for pair in devices.items()]
        return 0 if all(results) else 3
    reached = True
    for place, device in devices.items():
        first: tuple[float, ...] | None = None
        for length in arguments.lengths:
            line: dict[str, Any] = {"device": place, "length": length}
            window, beside = cost("window", length, device), cost("global", length, device)
            first = first or (*window, *beside)
            line["window"] = {"operations": window[0], "bytes": window[1]}
            line["global"] = {"operations": beside[0], "bytes": beside[1]}
            line["of_shortest"] = [now / before for now, before in zip((*window, *beside), first, strict=True)]
            reached &= all(abs(ratio - 1) <= 0.1 for ratio in line["of_shortest"])
            if length <= LONGEST_COUNTED:
                causal, whole = cost("causal", length, device), cost("whole", length, device)
                line["causal_of_whole"] = [a / b for a, b in zip(causal, whole, strict=True)]
                line["window_of_whole"] = [a / b for a, b in zip(window, whole, strict=True)]
                reached &= length < 2048 or max(line["causal_of_whole"]) <= 0.6
            if place == "cpu" and length <= LONGEST_WHOLE:
                reached &= add_differences(line, ("window", "causal", "global"), length)
            if place == "cpu" and arguments.seconds:
                kinds = ("window", "global", *(["causal", "whole"] if length <= LONGEST_WHOLE else []))
                line["seconds"] = {kind: round(seconds(kind, length), 4) for kind in kinds}
            print(json.dumps(line), flush=True)
    return 0 if reached else 3


if __name__ == "__main__":
    sys.exit(main())
