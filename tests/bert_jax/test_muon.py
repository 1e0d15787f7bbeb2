"""Muon against a float64 statement of it, on stacked and cut parameters, and through a checkpoint."""

import math

import jax
import numpy as np
import pytest
from architectures import SIZES, SWITCHES
from builders import StopAt
from flax import linen as nn
from support import (
    objective_of,
    random_batch,
    random_params,
    relative_difference,
    tiny_config,
    train_synthetic,
    updater,
)

from bert_jax.config import ExecutionConfig, MeshConfig, ModelConfig, OptimizerConfig
from bert_jax.config.finetune import FinetuneOptimizerConfig
from bert_jax.model import BertForPretraining, from_canonical, to_canonical
from bert_jax.model.canonical import canonical_shapes, path_name
from bert_jax.optim import (
    is_muon_matrix,
    make_optimizer,
    orthogonalize,
    scale_by_orthogonal_momentum,
    unfreeze_updates,
)
from bert_jax.parallel import make_mesh, to_global
from bert_jax.process.exits import Stop
from bert_jax.training.checkpoint.folder import saved_steps
from bert_jax.training.checkpoint.restore import restore_newest
from bert_jax.training.programs import train_programs
from bert_jax.training.state import abstract_params, initial_state

LR = 3e-3
FAMILIES = ("gated", "albert", "disentangled", "longformer")


def network(*arguments):
    config = tiny_config("--model.num_layers 3", *arguments)
    return BertForPretraining(config.model, config.execution, config.has_nsp)


def matrices(model):
    params = nn.unbox(abstract_params(model))
    return {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params) if is_muon_matrix(path)}


def newton_schulz(matrix):
    """Jordan's quintic iteration, one matrix, float64."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Numpy:
    """Muon with AdamW beside it and decoupled decay, float64, one canonical parameter at a time."""

    def __init__(self, config, params):
        self.config, self.count = config, 0
        self.params = {name: np.float64(value) for name, value in params.items()}
        self.m = {name: np.zeros_like(value) for name, value in self.params.items()}
        self.v = {name: np.zeros_like(value) for name, value in self.params.items()}

    def direction(self, name, g):
        config = self.config
        if name.startswith("encoder/layer_") and name.endswith("/kernel"):
            self.m[name] = 0.95 * self.m[name] + 0.05 * g
            return 0.2 * math.sqrt(max(g.shape)) * newton_schulz(0.95 * self.m[name] + 0.05 * g)
        self.m[name] = config.beta1 * self.m[name] + (1 - config.beta1) * g
        self.v[name] = config.beta2 * self.v[name] + (1 - config.beta2) * g * g
        m_hat = self.m[name] / (1 - config.beta1**self.count)
        v_hat = self.v[name] / (1 - config.beta2**self.count)
        return m_hat / (np.sqrt(v_hat) + config.epsilon)

    def step(self, grads):
        self.count += 1
        norm = math.sqrt(sum(float((np.float64(g) ** 2).sum()) for g in grads.values()))
        scale = min(1.0, self.config.clip_norm / norm) if self.config.clip_norm else 1.0
        for name, w in self.params.items():
            update = self.direction(name, np.float64(grads[name]) * scale)
            if not name.endswith(("bias", "scale")):
                update = update + self.config.weight_decay * w
            self.params[name] = w - LR * update


@pytest.mark.parametrize("clip_norm", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "scan_layers", [pytest.param(False, marks=pytest.mark.slow), True], ids=["unrolled", "scanned"]
)
def test_updates_are_those_of_float64(scan_layers, clip_norm):
    """20 updates of a whole model; every third gradient is small, layers have gradients of very unequal size."""
    compare(network(f"--execution.scan_layers {str(scan_layers).lower()}"), clip_norm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scan_layers"),
    [
        *((name, False) for name in FAMILIES),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in FAMILIES),
    ],
)
def test_updates_of_the_matrices_of_other_families_are_those_of_float64(name, scan_layers):
    """Gates, shared layers, embeddings of distances, and the projections of global tokens."""
    switches = SWITCHES.get(name, {"attention_windows": (4,), "global_tokens": 2})
    model = ModelConfig(**SIZES, **switches)
    whole = BertForPretraining(model, ExecutionConfig(vocab_multiple=1, scan_layers=scan_layers), True)
    own = {"gated": "gate/kernel", "longformer": "query_global/kernel"}.get(name, "query/kernel")
    assert any(matrix.endswith(own) for matrix in matrices(whole))
    compare(whole, 1.0, 4)


def compare(model, clip_norm, updates=20):
    """Compare ``updates`` updates of the parameters of ``model`` with the float64 statement."""
    config = OptimizerConfig(name="muon", clip_norm=clip_norm, weight_decay=0.1, beta1=0.8, beta2=0.95)
    vocab_size = model.config.vocab_size
    rng, like = np.random.default_rng(0), nn.unbox(abstract_params(model))
    start = {n: np.float32(rng.normal(0, 0.3, shape)) for n, shape in canonical_shapes(model).items()}
    exact = Numpy(config, start)
    place = jax.jit(lambda flat: from_canonical(flat, like, vocab_size))
    params, optimizer = place(start), make_optimizer(config)
    state, apply = jax.jit(optimizer.init)(params), updater(optimizer, LR)

    for step in range(updates):
        grads = {n: rng.normal(0, 0.01 if step % 3 == 2 else 1.0, v.shape) for n, v in start.items()}
        grads = {n: np.float32(g * 100.0 ** ("layer_1" in n)) for n, g in grads.items()}
        params, state = apply(params, state, place(grads))
        exact.step(grads)
    found = to_canonical(jax.device_get(params), vocab_size)
    for name, expected in exact.params.items():
        off = np.linalg.norm(found[name] - expected) / np.linalg.norm(expected)
        assert off <= 1e-6, (name, off)


def test_matrices_are_the_kernels_of_the_layers_and_nothing_else():
    expected = {
        f"{part}/kernel"
        for part in (
            "attention/query", "attention/key", "attention/value", "attention/output", "feed_forward/intermediate",
            "feed_forward/output",
        )
    }  # fmt: skip
    assert matrices(network("--execution.scan_layers true")) == {f"encoder/layers/{name}" for name in expected}
    assert matrices(network("--execution.scan_layers false --model.norm_position pre")) == {
        f"encoder/layer_{i}/{name}" for i in range(3) for name in expected
    }


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (32, 32)])
def test_orthogonalize_sets_singular_values_near_one_and_leaves_zero_alone(shape):
    matrix = np.random.default_rng(0).normal(0, 1, (2, *shape)).astype(np.float32)
    matrix[1] *= 1e-6
    first, second = np.asarray(jax.jit(orthogonalize)(matrix))
    values = np.linalg.svd(first, compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.3
    left, _, right = np.linalg.svd(matrix[0], full_matrices=False)
    rotated = left.T @ first @ right.T  # the singular vectors stay
    assert np.abs(rotated - np.diag(np.diag(rotated))).max() < 1e-4
    assert abs(np.linalg.norm(second) / np.linalg.norm(first) - 1) < 0.1  # whatever the size of the gradient
    assert not np.asarray(jax.jit(orthogonalize)(np.zeros(shape, np.float32))).any()


def steps_on(sizes, scan_layers, shard_optimizer=True):
    """Canonical parameters and momentum after two steps on a mesh (data, fsdp, tensor)."""
    config = tiny_config(
        "--model.num_layers 2 --optimizer.name muon --optimizer.warmup_steps 0 --optimizer.epsilon 1e-3 "
        "--training.global_batch_size 16 --model.hidden_dropout 0 --model.attention_dropout 0 "
        f"--execution.scan_layers {str(scan_layers).lower()} --mesh.shard_optimizer {str(shard_optimizer).lower()}"
    )
    data, fsdp, tensor = sizes
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: math.prod(sizes)])
    programs = train_programs(objective_of(config, mesh))
    state = initial_state(programs.model, programs.optimizer, programs.abstract, 3)
    for seed in (1, 2):
        batch = to_global(random_batch(config, seed), mesh, 16)
        state, _ = programs.step_for(batch)(state, batch)
    return to_canonical(jax.device_get(state.params), 211), to_canonical(jax.device_get(state.opt_state), 211)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "scan_layers", "shard_optimizer"),
    [
        ((1, 8, 1), True, True),
        pytest.param((8, 1, 1), True, True, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), False, True, marks=pytest.mark.slow),
        pytest.param((4, 2, 1), False, False, marks=pytest.mark.slow),
    ],
)
def test_cut_matrices_update_as_on_one_device(sizes, scan_layers, shard_optimizer):
    params, moments = steps_on(sizes, scan_layers, shard_optimizer)
    expected_params, expected_moments = steps_on((1, 1, 1), scan_layers=False)
    assert params.keys() == expected_params.keys() and moments.keys() == expected_moments.keys()
    assert relative_difference(params, expected_params) <= 2e-6
    assert relative_difference(moments, expected_moments) <= 1e-5


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_undisturbed_one(tmp_path):
    whole = tiny_config(
        "--model.num_layers 2 --optimizer.name muon --optimizer.warmup_steps 0 --training.num_steps 6"
    )
    train_synthetic(whole, tmp_path / "whole")
    with pytest.raises(Stop):
        train_synthetic(whole, tmp_path / "parts", stop=StopAt(3))
    assert 0 < saved_steps(tmp_path / "parts")[-1] < 6
    train_synthetic(whole, tmp_path / "parts")
    mesh, options = make_mesh(MeshConfig()), {"read_only": False, "may_change": set(), "report": print}
    restored = [
        restore_newest(tmp_path / name, whole, mesh, objective_of(whole).model, **options)
        for name in ("whole", "parts")
    ]
    expected, other = (to_canonical(run.state, 211) for run in restored)
    assert expected.keys() == other.keys()
    assert any("muon" in name and name.endswith("layer_1/attention/query/kernel") for name in expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.slow
def test_layers_that_join_late_stand_still_until_then():
    config = FinetuneOptimizerConfig(name="muon", weight_decay=0.0, unfreeze_every=1.0)
    params = random_params(network())
    optimizer = make_optimizer(config, unfreeze_updates(config, 3, params, steps_per_epoch=2))
    init, update = jax.jit(optimizer.init), jax.jit(optimizer.update)
    state = init(params)
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(make_optimizer(config).init, params))
    grads = jax.tree.map(np.ones_like, params)
    zeros = jax.tree.map(np.zeros_like, params)
    # The training step sets the gradients of what has not joined to 0.
    direction, state = update(zeros, state, params)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(direction))
    direction, _ = update(grads, state, params)
    fresh, _ = update(grads, init(params), params)
    found, expected = (tree["encoder"]["layer_0"]["attention"]["query"]["kernel"] for tree in (direction, fresh))
    np.testing.assert_array_equal(found, expected)
    assert np.any(found)


def test_a_stack_that_is_deeper_than_its_matrices_is_scaled_by_their_sides():
    stack = np.random.default_rng(0).normal(size=(40, 6, 4)).astype(np.float32)
    transform = scale_by_orthogonal_momentum()
    together, _ = transform.update(stack, transform.init(stack))
    for one, expected in zip(stack, together, strict=True):
        alone, _ = transform.update(one, transform.init(one))
        np.testing.assert_allclose(alone, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(alone), 0.2 * 6**0.5 * 4**0.5, rtol=0.3)


def test_coupled_decay_is_refused():
    with pytest.raises(ValueError, match=r"^optimizer\.weight_decay_type: 'l2'.*muon"):
        OptimizerConfig(name="muon", weight_decay_type="l2")
