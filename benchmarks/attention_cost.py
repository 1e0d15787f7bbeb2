"""Cost of window and causal attention per token against the length, and against attention over whole rows.

    python benchmarks/attention_cost.py [--lengths 1024 2048 4096 8192 16384] [--v5e] [--seconds]

Compiles the forward and the backward pass of one attention layer (12 heads of size 64, window of 64 keys on each
side, without and with 16 global tokens; bfloat16 for v5e:1x1, which is compiled without the hardware, float32 on
the CPU) and prints one JSON line per length: operations and bytes per token of the compiled program, for windows,
causal and whole attention; with ``--seconds`` the time of the CPU program. Exit code 3 if operations or bytes per
token with windows vary by more than 10% between lengths, if causal attention costs more than 0.6 of whole attention
from 2,048 tokens on, or if values or gradients differ from whole attention by more than 1e-6 of the largest value
(at least 1).
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.model.attention import dot_product_attention, visible_keys
from bert_jax.model.local_attention import local_attention, replace_global
from bert_jax.planner.topology import parse_topology, prepare_environment, tpu_devices

HEADS, SIZE, WINDOW = 12, 64, 64
# Global tokens of a row, with windows.
GLOBAL = 16
# Tokens of a program whose cost is counted.
TOKENS = 16_384
# Longest rows whose whole scores fit into the memory of the CPU, and of a v5e.
LONGEST_WHOLE, LONGEST_COUNTED = 4096, 8192


def attention(kind: str) -> Callable[..., jax.Array]:
    """Return the attention function of ``kind``: window, causal, or the same function over whole rows."""
    name, _, whole = kind.partition(" ")
    if name == "global":
        return functools.partial(with_global, bool(whole))
    window, causal = (WINDOW, False) if name == "window" else (0, name == "causal")
    if whole or name == "whole":
        sees = functools.partial(visible_keys, causal=causal, window=window)
        return functools.partial(dot_product_attention, dropout_rate=0.0, dropout_key=None, visible=sees)
    return functools.partial(local_attention, dropout_rate=0.0, dropout_key=None, window=window, causal=causal)


def with_global(whole: bool, query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array) -> jax.Array:
    """Return window attention with ``GLOBAL`` tokens at the beginning of each row, whose projections are those of
    the others."""
    plain: dict[str, Any] = {"dropout_rate": 0.0, "dropout_key": None}
    if whole:
        is_global = jnp.broadcast_to(jnp.arange(ids.shape[1]) < GLOBAL, ids.shape)
        sees = functools.partial(visible_keys, window=WINDOW, is_global_BxS=is_global)
        context = dot_product_attention(query, key, value, ids, visible=sees, **plain)
        rows = dot_product_attention(query, key, value, ids, **plain)
        return jnp.where(is_global[:, :, None, None], rows, context)
    slots = jnp.broadcast_to(jnp.arange(GLOBAL), (len(ids), GLOBAL))
    context = local_attention(query, key, value, ids, window=WINDOW, causal=False, slots_BxG=slots, **plain)
    return replace_global(context, query[:, :GLOBAL], key, value, ids, slots, **plain)


def program(kind: str) -> Callable[..., Any]:
    """Return forward and backward pass of the attention of ``kind``."""
    attend = attention(kind)

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


def difference(name: str, length: int) -> float:
    """Return the largest difference of values and gradients from the same function over whole rows, relative to the
    largest value of each (at least 1)."""
    arguments = values(length)
    ours, whole = (jax.tree.leaves(jax.jit(program(kind))(*arguments)) for kind in (name, f"{name} whole"))
    return max(
        float(jnp.abs(a - b).max() / max(1.0, float(jnp.abs(b).max()))) for a, b in zip(ours, whole, strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--v5e", action="store_true", help="also compile for v5e:1x1")
    parser.add_argument("--seconds", action="store_true", help="also run on the CPU")
    arguments = parser.parse_args()
    devices = {"cpu": jax.devices("cpu")[0]}
    if arguments.v5e:
        prepare_environment()
        devices["v5e"] = tpu_devices(parse_topology("v5e:1x1"))[0]
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
                line["difference"] = {name: difference(name, length) for name in ("window", "causal", "global")}
                reached &= max(line["difference"].values()) <= 1e-6
            if place == "cpu" and arguments.seconds:
                kinds = ("window", "global", *(["causal", "whole"] if length <= LONGEST_WHOLE else []))
                line["seconds"] = {kind: round(seconds(kind, length), 4) for kind in kinds}
            print(json.dumps(line), flush=True)
    return 0 if reached else 3


if __name__ == "__main__":
    sys.exit(main())
