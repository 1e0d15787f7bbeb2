"""StableAdamW against a float64 statement of it, on stacked and cut parameters, and through a checkpoint."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from builders import StopAt
from flax import linen as nn
from support import objective_of, random_batch, relative_difference, tiny_config, train_synthetic, updater

from bert_jax.config import MeshConfig, OptimizerConfig
from bert_jax.config.finetune import FinetuneOptimizerConfig
from bert_jax.model import BertForPretraining, from_canonical, to_canonical
from bert_jax.model.canonical import abstract_params, canonical_shapes
from bert_jax.optim import make_optimizer, unfreeze_updates
from bert_jax.parallel import make_mesh, to_global
from bert_jax.process.exits import Stop
from bert_jax.training.checkpoint.restore import restore_newest
from bert_jax.training.programs import train_programs
from bert_jax.training.state import initial_state

LR = 3e-3
VOCABULARY = 211
KINDS = ("decoupled", "independent", "l2")


class Numpy:
    """optimi.StableAdamW, float64, one canonical parameter at a time; ``rms``: the last root mean squares."""

    def __init__(self, config, params, joining=None):
        self.config, self.count, self.joining, self.rms = config, 0, joining or {}, {}
        self.params = {name: np.float64(value) for name, value in params.items()}
        self.m = {name: np.zeros_like(value) for name, value in self.params.items()}
        self.v = {name: np.zeros_like(value) for name, value in self.params.items()}

    def step(self, grads, rate=LR):
        config = self.config
        self.count += 1
        norm = math.sqrt(sum(float((np.float64(g) ** 2).sum()) for g in grads.values()))
        scale = min(1.0, config.clip_norm / norm) if config.clip_norm else 1.0
        for name, p in self.params.items():
            t = self.count - self.joining.get(name, 0)
            if t <= 0:
                continue
            decay = 0.0 if name.endswith(("bias", "scale")) else config.weight_decay
            g = np.float64(grads[name]) * scale + (decay * p if config.weight_decay_type == "l2" else 0.0)
            beta1, beta2 = ((b - b**t) / (1 - b**t) for b in (config.beta1, config.beta2))
            self.m[name] = beta1 * self.m[name] + (1 - beta1) * g
            self.v[name] = beta2 * self.v[name] + (1 - beta2) * g * g
            self.rms[name] = math.sqrt(np.mean(g * g / np.maximum(self.v[name], config.epsilon**2)))
            lr = rate / max(1.0, self.rms[name])
            factor = {"decoupled": lr, "independent": lr / config.learning_rate, "l2": 0.0}
            p = p * (1 - factor[config.weight_decay_type] * decay)
            self.params[name] = p - lr * self.m[name] / (np.sqrt(self.v[name]) + config.epsilon)


def start_of(scan_layers, rng):
    """Parameters of a model of three layers (211 pieces in 256 rows), and their canonical values."""
    flags = f"--execution.scan_layers {str(scan_layers).lower()}"
    config = tiny_config("--model.num_layers 3", flags)
    model = BertForPretraining(config.model, config.execution, config.has_nsp)
    flat = {name: np.float32(rng.normal(0, 0.3, x)) for name, x in sorted(canonical_shapes(model).items())}
    return placing(nn.unbox(abstract_params(model)))(flat), flat


def placing(like):
    """A compiled function of canonical arrays: the same arrays in the layout of ``like``."""
    shapes = jax.eval_shape(lambda: like)
    return jax.jit(lambda flat: from_canonical(flat, shapes, VOCABULARY))


def gradients(flat, step, rng):
    """Gradients with rows of zeros, parameters without any, and sizes that jump up and down."""
    size = (1.0, 30.0, 0.01)[step % 3]
    grads = {n: rng.normal(0, size, v.shape).astype(np.float32) for n, v in flat.items()}
    grads["embeddings/word_embeddings/embedding"][rng.integers(0, VOCABULARY, 200)] = 0
    grads["nsp_head/kernel"][:] = 0
    grads["encoder/layer_1/feed_forward/output/kernel"] *= step % 5 == 0
    return {n: g * np.float32(100.0 ** ("layer_1" in n)) for n, g in grads.items()}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "scan_layers", [pytest.param(False, marks=pytest.mark.slow), True], ids=["unrolled", "scanned"]
)
@pytest.mark.parametrize(
    ("kind", "clip_norm"),
    [*((kind, 0.0) for kind in KINDS), pytest.param("decoupled", 1.0, marks=pytest.mark.slow)],
)
def test_updates_are_those_of_float64(scan_layers, kind, clip_norm):
    config = OptimizerConfig(
        name="stable_adamw", weight_decay_type=kind, clip_norm=clip_norm, weight_decay=0.1, beta2=0.98
    )
    config = dataclasses.replace(config, learning_rate=0.1 if kind == "independent" else LR)
    rng = np.random.default_rng(0)
    params, flat = start_of(scan_layers, rng)
    exact = Numpy(config, flat)
    optimizer = make_optimizer(config, vocab_size=VOCABULARY)
    state, apply, sizes, place = jax.jit(optimizer.init)(params), updater(optimizer, LR), [], placing(params)
    for step in range(30):
        grads = gradients(flat, step, rng)
        params, state = apply(params, state, place(grads))
        exact.step(grads)
        sizes += exact.rms.values()
    assert min(sizes) < 0.5 and max(sizes) > 2 and 0.3 < np.mean(np.float64(sizes) > 1) < 0.8
    found = to_canonical(params, VOCABULARY)
    off = {n: np.linalg.norm(found[n] - e) / max(np.linalg.norm(e), 1e-9) for n, e in exact.params.items()}
    print(f"worst difference from float64: {max(off.values()):.1e}")
    assert max(off.values()) <= 1e-6, max(off, key=off.get)


@pytest.mark.slow
def test_stacked_layers_are_updated_as_unstacked_ones():
    config, results = OptimizerConfig(name="stable_adamw", clip_norm=0.0), []
    for scan_layers in (False, True):
        rng = np.random.default_rng(0)
        params, flat = start_of(scan_layers, rng)
        optimizer = make_optimizer(config, vocab_size=VOCABULARY)
        state, apply, place = jax.jit(optimizer.init)(params), updater(optimizer, LR), placing(params)
        for step in range(10):
            params, state = apply(params, state, place(gradients(flat, step, rng)))
        results.append(to_canonical(params, VOCABULARY))
    assert relative_difference(*results) <= 2e-7


def steps_on(sizes, scan_layers, shard_optimizer=True):
    """Canonical parameters and moments after four steps on a mesh (data, fsdp, tensor)."""
    config = tiny_config(
        "--model.num_layers 2 --optimizer.name stable_adamw --optimizer.clip_norm 0 --optimizer.warmup_steps 0 "
        "--optimizer.epsilon 1e-3 --optimizer.beta2 0.98 --training.global_batch_size 16 --model.hidden_dropout 0 "
        "--model.attention_dropout 0 "
        f"--execution.scan_layers {str(scan_layers).lower()} --mesh.shard_optimizer {str(shard_optimizer).lower()}"
    )
    data, fsdp, tensor = sizes
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: math.prod(sizes)])
    programs = train_programs(objective_of(config, mesh))
    state = initial_state(programs.model, programs.optimizer, programs.abstract, 3)
    for seed in (1, 2, 3, 4):
        batch = to_global(random_batch(config, seed), mesh, 16)
        state, _ = programs.step_for(batch)(state, batch)
    return to_canonical(jax.device_get(state.params), 211), to_canonical(jax.device_get(state.opt_state), 211)


@pytest.mark.parametrize(
    ("sizes", "scan_layers", "shard_optimizer"),
    [
        pytest.param((1, 8, 1), True, True, marks=pytest.mark.slow),
        pytest.param((8, 1, 1), False, True, marks=pytest.mark.slow),
        pytest.param((8, 1, 1), True, True, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), False, True, marks=pytest.mark.slow),
        pytest.param((4, 2, 1), True, False, marks=pytest.mark.slow),
    ],
    ids=["fsdp", "zero1", "zero1 scanned", "all", "whole moments"],
)
def test_cut_parameters_are_updated_as_on_one_device(sizes, scan_layers, shard_optimizer):
    params, moments = steps_on(sizes, scan_layers, shard_optimizer)
    expected_params, expected_moments = steps_on((1, 1, 1), scan_layers=False)
    assert params.keys() == expected_params.keys() and moments.keys() == expected_moments.keys()
    assert relative_difference(params, expected_params) <= 2e-6
    assert relative_difference(moments, expected_moments) <= 1e-5


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_undisturbed_one(tmp_path):
    whole = tiny_config(
        "--model.num_layers 2 --optimizer.name stable_adamw --optimizer.clip_norm 0 --training.num_steps 6"
    )
    train_synthetic(whole, tmp_path / "whole")
    with pytest.raises(Stop):
        train_synthetic(whole, tmp_path / "parts", stop=StopAt(3))
    train_synthetic(whole, tmp_path / "parts")
    mesh, options = make_mesh(MeshConfig()), {"read_only": False, "may_change": set(), "report": print}
    restored = [
        restore_newest(tmp_path / name, whole, mesh, objective_of(whole).model, **options)
        for name in ("whole", "parts")
    ]
    expected, other = (to_canonical(run.state, 211) for run in restored)
    assert expected.keys() == other.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.slow
def test_layers_that_join_late_start_as_if_the_run_began_with_them():
    config = FinetuneOptimizerConfig(name="stable_adamw", clip_norm=0.0, weight_decay=0.0, unfreeze_every=1.0)
    rng = np.random.default_rng(0)
    params, flat = start_of(True, rng)
    turns = {f"encoder/layer_{i}": (3 - i) * 4 for i in range(3)} | {"embeddings": 16}
    joining = {n: next((t for part, t in turns.items() if n.startswith(f"{part}/")), 0) for n in flat}
    exact = Numpy(config, flat, joining)
    optimizer = make_optimizer(config, unfreeze_updates(config, 3, params, steps_per_epoch=4), VOCABULARY)
    state, update, place = jax.jit(optimizer.init)(params), jax.jit(optimizer.update), placing(params)
    flatten = jax.jit(lambda tree: to_canonical(tree, VOCABULARY))
    move = jax.jit(lambda params, moved: jax.tree.map(lambda p, d: p - LR * d, params, moved))
    for step in range(30):
        grads = gradients(flat, step, rng)
        direction, state = update(place(grads), state, params)
        moved = {n: np.asarray(d) * (exact.count >= joining[n]) for n, d in flatten(direction).items()}
        params = move(params, place(moved))
        exact.step(grads)
    assert relative_difference(to_canonical(params, VOCABULARY), exact.params) <= 1e-6
