"""The process of ``benchmarks/gpu.py`` that measures: one JSON line per case on standard output.

    python benchmarks/gpu_worker.py REQUEST

REQUEST is JSON: ``section``, ``cases`` (their values by name), ``board`` and ``toy``.
"""

import contextlib
import functools
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# Tolerances in float32, those of tests/bert_jax/model (attention: of values and gradients; norm: of values, of
# gradients). In bfloat16 the bar of the error over that of the reference: compiled over interpreted kernels; in a
# toy the kernels of GPUs over those of TPUs.
ATTENTION_TOLERANCE, NORM_TOLERANCES = 2e-6, (5e-6, 2e-5)
ERROR_BAR = 1.1
# Size of a head, dropout rate, window, causal.
FORMS: dict[str, tuple[int, float, int, bool]] = {
    "plain": (64, 0.0, 0, False), "dropout": (64, 0.1, 0, False), "window": (32, 0.0, 10, False),
    "causal": (32, 0.1, 0, True), "causal window": (64, 0.1, 40, True), "wide heads": (128, 0.1, 0, False),
}  # fmt: skip
# Sequence ids of two rows, each with its 192nds of the row.
IDS = {
    "padding": (((1, 150), (0, 42)), ((1, 192),)),
    "packed": (((1, 70), (2, 60), (3, 50), (0, 12)), ((1, 10), (2, 182))),
}
# Rows of the sweep of blocks: window, dropout rate.
SWEPT = {128: (0, 0.1), 512: (0, 0.1), 1024: (0, 0.0), 8192: (64, 0.0)}
RECIPES = {"base": "bert_base_phase1", "large": "bert_large", "modernbert": "modernbert_base"}
TOY_LENGTHS = {128: 32, 192: 64, 512: 64, 1024: 96, 8192: 128}
Line = dict[str, Any]


def work(section: str, cases: dict[str, dict[str, Any]], board: str, toy: bool) -> None:
    """Print a line for each case. The process ends with the one that started it."""
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
    import jax

    measures = {"board": board_line, "kernels": kernel_line, "blocks": blocks_line, "plan": plan_line}
    for name, case in cases.items():
        line = {"section": section, "case": name, "board": board}
        line |= measures.get(section, step_line)(case, board if section == "plan" else toy)
        versions = {"jax": jax.__version__, "python": ".".join(map(str, sys.version_info[:3]))}
        print(json.dumps(line | versions), flush=True)


def board_line(case: dict[str, Any], toy: bool) -> Line:
    """Name the GPU as JAX does and as the table of chips does."""
    import jax

    from bert_jax.parallel.hardware import find_chip

    kind = jax.devices("cuda")[0].device_kind
    chip = find_chip(kind)
    return {"board": kind, "chip": chip.name if chip else None}


@dataclass
class Comparison:
    """A kernel, the one for TPUs, interpreted, and plain XLA: functions of ``inputs`` and of ``probes`` that return
    the result and the gradients."""

    inputs: list[Any]
    # Number of inputs with the dtype of the case; others are float32.
    short: int
    kernel: Callable[..., list[Any]]
    for_tpus: Callable[..., list[Any]]
    plain: Callable[..., list[Any]]
    # In float32, of differences over the largest value (if it is above 1 and ``relative``).
    tolerances: list[float]
    relative: bool
    # Inputs that show the bits, and from the outputs the values that dropout kept.
    probes: list[list[Any]]
    kept: Callable[[list[Any]], list[Any]]


def kernel_line(case: dict[str, Any], toy: bool) -> Line:
    """Compare a kernel with its interpretation on the CPU; in a toy the interpretation with plain XLA (float32) and
    with the kernel for TPUs (bfloat16)."""
    import jax
    import jax.numpy as jnp

    here, cpu, dtype = jax.devices()[0], jax.devices("cpu")[0], case["dtype"]
    compared = norm_comparison(**case) if "width" in case else attention_comparison(**case)
    interpreted, compiled = (functools.partial(compared.kernel, interpret) for interpret in (True, toy))
    reference = interpreted if not toy else compared.plain if dtype == "float32" else compared.for_tpus

    def run(device: Any, function: Any, inputs: list[Any], short: str = dtype) -> list[np.ndarray]:
        cast = [x.astype(short) if i < compared.short else x for i, x in enumerate(inputs)]
        return [np.asarray(x.astype(jnp.float32)) for x in jax.jit(function)(*jax.device_put(cast, device))]

    with jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext():
        ours, theirs = run(here, compiled, compared.inputs), run(cpu, reference, compared.inputs)
        largest = [max(1.0, float(np.abs(x).max())) if compared.relative else 1.0 for x in theirs]
        off = [float(np.abs(x - y).max()) / most for x, y, most in zip(ours, theirs, largest, strict=True)]
        shares = [x / bar for x, bar in zip(off, compared.tolerances, strict=True)]
        if dtype == "bfloat16":
            exact = run(cpu, compared.plain, compared.inputs, "float32")
            errors = [
                (float(np.mean((x - true) ** 2)), float(np.mean((y - true) ** 2)))
                for x, y, true in zip(ours, theirs, exact, strict=True)
            ]
            shares = [math.sqrt(x / y) / ERROR_BAR for x, y in errors]
        bits = [
            [compared.kept(run(device, function, probe)) for probe in compared.probes]
            for device, function in ((here, compiled), (cpu, reference))
        ]
    equal = np.array_equal(*map(np.array, bits)) if compared.probes else None
    line: Line = {"difference": max(off), "of_tolerance": round(max(shares), 3), "bits_equal": equal}
    return line | {"good": bool(np.isfinite(off).all()) and max(shares) <= 1 and equal is not False}


def attention_comparison(form: str, ids: str, length: int, dtype: str) -> Comparison:
    """Return the attention of two rows of two or three heads."""
    import jax
    import jax.numpy as jnp

    from bert_jax.model.attention import dot_product_attention
    from bert_jax.model.dropout import TokenKey
    from bert_jax.model.kernels import gpu_attention, tpu_attention
    from bert_jax.model.kernels.common import capability_of
    from bert_jax.model.kernels.ranges import visible_keys
    from bert_jax.model.kernels.tiles import Form

    shape = Form(*FORMS[form], capability=capability_of(None))
    size, places = shape.head_size, np.arange(length)
    # Longer and shorter rows sample those of 192 tokens.
    rows = [np.repeat(*np.array(row).T)[places * 192 // length] for row in IDS[ids]]
    ids_BxS, heads = jnp.asarray(np.array(rows), jnp.int32), 3 if dtype == "float32" else 2
    positions, slots = (jnp.asarray(np.stack([x, x]), jnp.int32) for x in (places % 60, places // 60))
    key = TokenKey(jax.random.key(3), slots + 7 * jnp.arange(2, dtype=jnp.int32)[:, None], positions)
    tokens = jnp.stack([ids_BxS, *key.words(), positions] if shape.dropout_rate else [ids_BxS], 1)
    seen = functools.partial(visible_keys, causal=shape.causal, window=shape.window)

    def kernel_context(interpret: bool, query: Any, key: Any, value: Any, biases: Any) -> Any:
        one = (jnp.stack([query, key, value], 2),)
        return gpu_attention.attend(one, biases, tokens, jnp.zeros(1, jnp.int32), shape, interpret)

    def tpu_context(*inputs: Any) -> Any:
        of_tokens = tokens[:, :3], jnp.moveaxis(tokens[:, ::3], 1, 2), (), jnp.zeros(1, jnp.int32)
        return tpu_attention.attend(*inputs, *of_tokens, shape, True)

    def plain_context(*inputs: Any) -> Any:
        biased = [(x + bias).astype(x.dtype) for x, bias in zip(inputs[:3], inputs[3], strict=True)]
        heads_of = [x.reshape(*x.shape[:2], -1, size) for x in biased]
        options = {"dropout_rate": shape.dropout_rate, "dropout_key": key if shape.dropout_rate else None}
        return dot_product_attention(*heads_of, ids_BxS, visible=seen, **options).reshape(inputs[0].shape)

    def with_gradients(context: Any, query: Any, key: Any, value: Any, gradient: Any, biases: Any) -> list[Any]:
        real = (ids_BxS > 0)[..., None]
        out, back = jax.vjp(context, query, key, value, biases)
        return [jnp.where(real, out, 0), *back(jnp.where(real, gradient, 0))]

    keys, sizes = jax.random.split(jax.random.key(0), 5), (2, length, heads * size)
    inputs = [jax.random.normal(key, sizes) for key in keys[:4]]
    biases = jax.random.normal(keys[4], (3, heads * size))
    zeros, no_biases = jnp.zeros_like(inputs[0]), jnp.zeros((3, heads * size))
    probes = []  # the context of uniform probabilities and values of an identity shows the probabilities
    for begin in sorted({0, length // 2 // size * size, length - size}) if shape.dropout_rate else ():
        identity = jnp.tile(jnp.eye(length, size, -begin), (2, 1, heads))
        probes.append([zeros, zeros, identity, identity, no_biases])
    kernels = functools.partial(with_gradients, tpu_context), functools.partial(with_gradients, plain_context)
    return Comparison(
        [*inputs, biases], 4,
        lambda interpret, *x: with_gradients(functools.partial(kernel_context, interpret), *x),
        *kernels, [ATTENTION_TOLERANCE] * 5, True, probes,
        lambda outputs: [outputs[0] != 0, outputs[3] != 0],
    )  # fmt: skip


def norm_comparison(width: int, rate: float, dtype: str) -> Comparison:
    """Return dropout, residual and LayerNorm of 48 tokens."""
    import jax
    import jax.numpy as jnp

    from bert_jax.model.dropout import TokenKey, dropout
    from bert_jax.model.kernels import gpu_norm, tpu_norm
    from bert_jax.model.kernels.add_norm import add_norm

    key = TokenKey(jax.random.key(3), jnp.full((1, 48), 7, jnp.int32), jnp.arange(48, dtype=jnp.int32)[None])
    words = (jnp.stack(key.words(), axis=-1)[0],) if rate else ()

    def kernel(module: Any, interpret: bool, product: Any, residual: Any, *vectors: Any) -> Any:
        return add_norm(product, residual, vectors, words, 1e-12, rate, module, interpret)

    def plain(product: Any, residual: Any, bias: Any, scale: Any, shift: Any) -> Any:
        dropped = dropout((product.astype(jnp.float32) + bias)[None], rate, key)[0]
        total = residual.astype(jnp.float32) + dropped
        centered = total - total.mean(-1, keepdims=True)
        normal = centered / jnp.sqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-12)
        return (normal * scale + shift).astype(residual.dtype)

    def with_gradients(function: Any, product: Any, residual: Any, gradient: Any, *vectors: Any) -> list[Any]:
        out, back = jax.vjp(function, product, residual, *vectors)
        return [out, *back(gradient)]

    draw = np.random.default_rng(0).standard_normal
    big = [jnp.asarray(draw((48, width)), jnp.float32) for _ in range(3)]
    vectors = [jnp.asarray(draw(width), jnp.float32) for _ in range(3)]
    zeros, ones = jnp.zeros(width), jnp.ones(width)
    probe = [jnp.ones((48, width)), jnp.zeros((48, width)), big[2], zeros, ones, zeros]
    value, gradients = NORM_TOLERANCES
    return Comparison(
        [*big, *vectors], 3,
        lambda interpret, *x: with_gradients(functools.partial(kernel, gpu_norm, interpret), *x),
        functools.partial(with_gradients, functools.partial(kernel, tpu_norm, True)),
        functools.partial(with_gradients, plain), [value] + [gradients] * 5, False, [probe] if rate else [],
        lambda outputs: [outputs[0] > 0, outputs[1] != 0],
    )  # fmt: skip


def blocks_line(case: dict[str, Any], toy: bool) -> Line:
    """Time the attention with several blocks of one kernel."""
    import jax
    import jax.numpy as jnp

    from bert_jax.model.kernels import gpu_attention, gpu_attention_bodies
    from bert_jax.model.kernels.common import capability_of
    from bert_jax.model.kernels.gpu_attention_bodies import Blocks, holds_row
    from bert_jax.model.kernels.tiles import Form

    default, kernel, (window, rate) = gpu_attention_bodies.block_sizes, case["kernel"], SWEPT[case["length"]]
    length = TOY_LENGTHS[case["length"]] if toy else case["length"]
    form = Form(32 if toy else 64, rate, window, capability=capability_of(None))
    if kernel == "for_rows" and not holds_row(length, form, jnp.bfloat16):
        kernel = "for_keys"
    rows, width = (1, 64) if toy else (32768 // length, 768)
    draw = np.random.default_rng(0).standard_normal
    heads = jnp.asarray(draw((rows, length, 3, width)), jnp.bfloat16)
    gradient, words = heads[:, :, 0], jnp.asarray(draw((rows, 3, length)) * 2**20, jnp.int32)
    tokens = jnp.concatenate([jnp.ones((rows, 1, length), jnp.int32), *[words] * (rate > 0)], 1)

    def seconds(blocks: Blocks) -> float | None:
        def both(heads: Any, gradient: Any) -> Any:
            attend = functools.partial(gpu_attention.attend, form=form, interpret=toy)
            rest = (jnp.zeros((3, width)), tokens, jnp.zeros(1, jnp.int32))
            out, back = jax.vjp(lambda x: attend((x,), *rest), heads)
            return out, *back(gradient)

        gpu_attention_bodies.block_sizes = lambda name, *x: blocks if name == kernel else default(name, *x)
        try:
            run = jax.jit(both).lower(heads, gradient).compile()
            return median_seconds(lambda: run(heads, gradient), *((1, 2) if toy else (10, 7)))
        except Exception as error:  # such as too much shared memory, which only the compiler knows
            print(f"{kernel} {blocks}: {error}"[:300], file=sys.stderr)
            return None
        finally:
            gpu_attention_bodies.block_sizes = default

    own = default(kernel, length, form, jnp.bfloat16)
    sizes = [(64, 32), (64, 64), (128, 32), (128, 64), (128, 128), (32, 128), (64, 128)]
    sizes = [(length, keys) for keys in (16, 32, 64)] if kernel == "for_rows" else sizes[: 2 if toy else None]
    tried = {Blocks(min(q, length), min(k, length), own.warps, own.stages) for q, k in sizes}
    tried.add(Blocks(own.queries, own.keys, 4, own.stages))
    times = {blocks: seconds(blocks) for blocks in [own, *sorted(tried - {own}, key=str)]}
    names = {blocks: f"{blocks.queries}x{blocks.keys} w{blocks.warps}" for blocks in times}
    timed = {blocks: each for blocks, each in times.items() if each is not None}
    best = min(timed, key=lambda blocks: timed[blocks])
    shown = {names[blocks]: each and round(each * 1e3, 4) for blocks, each in times.items()}
    return {"kernel": kernel, "default": names[own], "best": names[best], "milliseconds": shown}


def median_seconds(call: Callable[[], Any], calls: int, groups: int) -> float:
    """Return the median over ``groups`` of the mean seconds of ``calls`` calls. One more group comes before."""
    import jax

    times = []
    for _ in range(groups + 1):
        began = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times[1:])


def config_of(case: dict[str, Any], toy: bool) -> Any:
    """Return the recipe of ``case`` with its lengths and its batch, and in a toy with a tiny model."""
    from bert_jax.config import PretrainConfig, load_config

    model, length = case["model"], TOY_LENGTHS[case["length"]] if toy else case["length"]
    share = 0.3 if model == "modernbert" else 0.15
    rows = 2 if toy else (16384 if model == "large" else 32768) // length
    words = f"--data.packing none --data.seq_length {length} --data.max_predictions {math.ceil(share * length)}"
    words += f" --training.batch_unit sequences --training.global_batch_size {rows}"
    if model == "modernbert":
        words += " --training.batch_ramp --training.num_steps 1000000"
    if toy:
        words += " --model.hidden_size 64 --model.num_attention_heads 2 --model.vocab_size 512"
        words += f" --model.intermediate_size 64 --model.num_layers {2 if model == 'modernbert' else 1}"
    words += f" --execution.attention {case.get('attention', 'pallas' if toy else 'auto')}"
    return load_config(PretrainConfig, ["--config", str(ROOT / f"configs/{RECIPES[model]}.yaml"), *words.split()])


def step_line(case: dict[str, Any], toy: bool) -> Line:
    """Time training steps."""
    import jax
    from synthetic_batch import synthetic_batch

    from bert_jax.batch import RowShape
    from bert_jax.model.flops import training_flops_per_sequence
    from bert_jax.model.kernels import common
    from bert_jax.objectives.registry import objective_class
    from bert_jax.parallel import make_mesh, to_global
    from bert_jax.parallel.hardware import mfu
    from bert_jax.training.programs import train_programs
    from bert_jax.training.state import initial_state

    common.INTERPRETED = "gpu"
    config, device = config_of(case, toy), jax.devices()[0]
    data, rows, parts = config.data, config.training.global_batch_size, case.get("parts", (1.0,))
    mesh = make_mesh(config.mesh, [device])
    objective = objective_class(config.objective)(config, mesh)
    objective.row_shape = RowShape(data.seq_length, data.max_predictions, len(parts), len(parts), True)
    programs = train_programs(objective)
    lengths = [int(part * data.seq_length) for part in parts]
    batch = synthetic_batch(rows, data.seq_length, data.max_predictions, config.model.vocab_size, lengths=lengths)
    on_device = to_global({name: batch[name] for name in objective.features}, mesh, rows)
    state = initial_state(programs.model, programs.optimizer, programs.abstract, config.training.seed)
    step = programs.step_for(on_device)

    def call() -> Any:
        nonlocal state
        state, metrics = step(state, on_device)
        return metrics

    seconds = median_seconds(call, *((1, 2) if toy else (5, 7)))
    assert np.isfinite(call().unpack()["loss"]), "the loss is not finite"
    sizes = {"seq_length": data.seq_length, "max_predictions": data.max_predictions, "has_nsp": config.has_nsp}
    flops = rows * training_flops_per_sequence(config.model, **sizes)
    return {
        "rows": rows, "length": data.seq_length, "seconds": seconds,
        "tokens_per_second": round(rows * sum(lengths) / seconds),
        "mfu": mfu(flops / seconds, device.device_kind, 1) if "parts" not in case else None,
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "compile_seconds": round(programs.compile_seconds, 1),
    }  # fmt: skip


def plan_line(case: dict[str, Any], board: str) -> Line:
    """Plan the step of ``case`` for ``board``, a name in the table of chips."""
    from bert_jax.contrib.planner.plan import Asked, make_plan
    from bert_jax.contrib.planner.topology import Topology
    from bert_jax.parallel.hardware import GPUS

    chip = next(chip for _, chip in GPUS if chip.name == board)
    plan = make_plan(config_of(case, False), Topology(f"{board}:1", chip, (1,), (False,)), Asked())
    assert plan.method == "compiled", "a plan requires the extra gpu"
    return {"seconds": plan.predicted_step_seconds, "peak_bytes": plan.peak_bytes}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    work(**json.loads(sys.argv[1]))
