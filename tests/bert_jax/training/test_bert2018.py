"""``bert2018`` mode's optimizer and schedule against a float64 statement of google-research/bert's."""

import jax
import numpy as np
import pytest

from bert_jax.config import OptimizerConfig
from bert_jax.config.schema import PRESETS
from bert_jax.optim import make_optimizer, make_schedule

PEAK, WARMUP, STEPS = 1e-3, 20, 120
SHAPES = {
    "embeddings": {"word_embeddings": {"embedding": (11, 6)}, "layer_norm": {"scale": (6,), "bias": (6,)}},
    "encoder": {
        "layers": {"attention": {"query": {"kernel": (2, 6, 6), "bias": (2, 6)}, "layer_norm": {"scale": (2, 6)}}}
    },
    "mlm_head": {"output_bias": (11,)},
}
# Stacked biases and scales have two dimensions: only names can tell what is decayed.
DECAYED = {("embeddings", "word_embeddings", "embedding"), ("encoder", "layers", "attention", "query", "kernel")}


def config(**other) -> OptimizerConfig:
    """The preset's choices, as a run in this mode gets them."""
    preset = {
        name.removeprefix("optimizer."): value
        for name, value in PRESETS["bert2018"].items()
        if name.startswith("optimizer.")
    }
    return OptimizerConfig(**preset, learning_rate=PEAK, warmup_steps=WARMUP, **other)


def rate(step: int) -> float:
    """Linear decay from step 0 to the end, overwritten by a linear warmup from 0."""
    if step < WARMUP:
        return PEAK * step / WARMUP
    return PEAK * (1 - step / STEPS)


def leaves(tree: dict, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    flat = {}
    for name, value in tree.items():
        flat |= leaves(value, (*path, name)) if isinstance(value, dict) else {(*path, name): value}
    return flat


def unflatten(flat: dict[tuple[str, ...], np.ndarray]) -> dict:
    tree: dict = {}
    for path, value in flat.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value.astype(np.float32)
    return tree


def test_schedule() -> None:
    schedule = make_schedule(config(), STEPS)
    given = [float(schedule(step)) for step in range(STEPS + 1)]
    np.testing.assert_allclose(given, [rate(step) for step in range(STEPS + 1)], rtol=1e-6, atol=1e-12)
    # The drop where warmup ends: one more step of warmup would give the peak.
    assert given[WARMUP] < given[WARMUP - 1] < PEAK


@pytest.mark.parametrize("size", [0.05, 3.0])
def test_updates(size: float) -> None:
    """100 updates from random gradients, with (3.0) and without (0.05) clipping at a global norm of 1."""
    rng = np.random.default_rng(0)
    exact = {path: rng.normal(0, 0.5, shape) for path, shape in leaves(SHAPES).items()}
    params = unflatten(exact)
    exact = {path: value.astype(np.float32).astype(np.float64) for path, value in exact.items()}
    m = {path: np.zeros_like(value) for path, value in exact.items()}
    v = {path: np.zeros_like(value) for path, value in exact.items()}

    optimizer, schedule = make_optimizer(config()), make_schedule(config(), STEPS)
    state = optimizer.init(params)

    @jax.jit
    def apply(params, state, grads, step):
        direction, state = optimizer.update(grads, state, params)
        return jax.tree.map(lambda p, d: p - schedule(step) * d, params, direction), state

    clipped = 0
    for step in range(100):
        grads = {path: rng.normal(0, size, value.shape) for path, value in exact.items()}
        params, state = apply(params, state, unflatten(grads), step)
        grads = {path: value.astype(np.float32).astype(np.float64) for path, value in grads.items()}
        norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
        clipped += norm > 1
        for path, g in grads.items():
            g = g / max(norm, 1.0)
            m[path] = 0.9 * m[path] + 0.1 * g
            v[path] = 0.999 * v[path] + 0.001 * g**2
            update = m[path] / (np.sqrt(v[path]) + 1e-6)
            if path in DECAYED:
                update = update + 0.01 * exact[path]
            exact[path] = exact[path] - rate(step) * update
        for path, value in leaves(params).items():
            np.testing.assert_allclose(value, exact[path], rtol=0, atol=1e-6, err_msg=f"{path} at step {step}")
    assert clipped == (100 if size == 3.0 else 0)
