"""Schedules, decay mask and update rules against numpy statements; one table of what every parameter is."""

import dataclasses
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from support import masked_lm, random_batch, random_params, tiny_config, updater

from bert_jax.config import ExecutionConfig, MeshConfig, ModelConfig, OptimizerConfig
from bert_jax.config.finetune import FinetuneOptimizerConfig
from bert_jax.model import BertForPretraining, from_canonical, to_canonical
from bert_jax.model.canonical import path_name
from bert_jax.optim import decay_mask, lr_multipliers, make_optimizer, make_schedule, unfreeze_updates
from bert_jax.parallel import make_mesh, shardings
from bert_jax.training.state import TrainState, abstract_params, initial_params, key_words, make_prng_key
from bert_jax.training.step import make_train_step

TABLE = Path(__file__).resolve().parents[1] / "golden" / "parameters.txt"

# ------------------------------------------------------------------ schedules

PEAK = 2e-3


def rate(kind, step, *, warmup, end, final, wsd=0.25):
    """Learning rate by interpolation between the corners that define it."""
    if step < warmup:
        return PEAK * step / warmup
    low = PEAK * final
    match kind:
        case "constant":
            return PEAK
        case "linear":
            return np.interp(step, [warmup, end], [PEAK, low])
        case "wsd":
            return np.interp(step, [end - wsd * end, end], [PEAK, low])
        case "cosine":
            angle = np.pi * (min(step, end) - warmup) / (end - warmup)
            return low + (PEAK - low) * np.cos(angle / 2) ** 2
        case "inverse_sqrt":
            return max(low, PEAK / np.sqrt(max(step, warmup, 1) / max(warmup, 1)))
    raise AssertionError(kind)


@pytest.mark.parametrize("final", [0.0, 0.1])
@pytest.mark.parametrize(("warmup", "decay_steps"), [(0, 0), (12, 0), (12, 60)])
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "inverse_sqrt", "wsd"])
def test_schedules(kind, warmup, decay_steps, final):
    config = OptimizerConfig(
        schedule=kind, learning_rate=PEAK, warmup_steps=warmup, decay_steps=decay_steps, final_fraction=final,
        wsd_decay_fraction=0.25,
    )  # fmt: skip
    steps = np.arange(100)
    given = np.asarray(jax.jit(jax.vmap(make_schedule(config, num_steps=80)))(steps))
    expected = [rate(kind, step, warmup=warmup, end=decay_steps or 80, final=final) for step in steps]
    np.testing.assert_allclose(given, expected, rtol=3e-6, atol=PEAK * 1e-6)
    assert given[0] == (0 if warmup else np.float32(PEAK))
    assert given.dtype == np.float32


# ------------------------------------------------------------------ the table of parameters

# Vocabulary padded from 30 to 32 rows; every dimension that a mesh of 2 x 2 x 2 cuts is even.
MODEL = ModelConfig(
    vocab_size=30, hidden_size=64, num_layers=2, num_attention_heads=2, intermediate_size=96,
    max_position_embeddings=40,
)  # fmt: skip


def network(scan_layers, **options):
    return BertForPretraining(MODEL, ExecutionConfig(scan_layers=scan_layers, vocab_multiple=32), True, **options)


def named(tree):
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def start_of(values, rows):
    """How a parameter starts, told from its values; ``rows`` is the vocabulary's size where that is padded."""
    values = np.asarray(values, np.float64)
    if rows is not None and values.ndim == 2:
        assert not values[rows:].any()
        values = values[:rows]
    if not values.any():
        return "zeros"
    if (values == 1).all():
        return "ones"
    sigma = MODEL.initializer_range
    assert np.abs(values).max() <= 2 * sigma * (1 + 1e-6)
    # A normal cut at two sigma has 0.8796 of its standard deviation; allow four standard errors.
    assert abs(values.std() / sigma - 0.8796) < 4 / np.sqrt(2 * values.size), values.std() / sigma
    assert abs(values.mean()) < 4 * sigma / np.sqrt(values.size)
    return "truncated_normal"


def table():
    """A line for each parameter: path, shape, dtype, start, logical axes, cut on a 2 x 2 x 2 mesh, decay."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    lines = ["# path | shape | dtype | start | logical axes | mesh axes (2 x 2 x 2) | weight decay"]
    for scan_layers in (False, True):
        lines.append(f"# {'scanned' if scan_layers else 'unrolled'}")
        model = network(scan_layers, mesh=mesh)
        boxed = abstract_params(model)
        axes = {
            path_name(path).removesuffix("/value"): leaf.names
            for path, leaf in jax.tree_util.tree_leaves_with_path(
                boxed, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned)
            )
        }
        cuts, params = named(shardings(boxed, mesh)), named(initial_params(model, seed=0))
        decays = named(decay_mask(nn.unbox(boxed)))
        assert params.keys() == axes.keys() == cuts.keys() == decays.keys()
        for name, leaf in sorted(params.items()):
            rows = MODEL.vocab_size if axes[name][0] == "vocab" else None
            cut = ["-" if part is None else str(part) for part in cuts[name].spec]
            cut += ["-"] * (leaf.ndim - len(cut))
            fields = [
                name, "x".join(map(str, leaf.shape)), str(leaf.dtype), start_of(leaf, rows), ",".join(axes[name]),
                ",".join(cut), "decay" if decays[name] else "no decay",
            ]  # fmt: skip
            lines.append(" | ".join(fields))
    return "\n".join(lines) + "\n"


def test_table_of_parameters():
    """UPDATE_GOLDEN=1 writes the table anew."""
    found = table()
    if os.environ.get("UPDATE_GOLDEN"):
        TABLE.write_text(found)
    assert found == TABLE.read_text()


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_layer_norm_and_biases_alone_are_not_decayed(scan_layers, norm_position):
    config = tiny_config(f"--model.num_layers 2 --model.norm_position {norm_position}").model
    model = BertForPretraining(config, ExecutionConfig(scan_layers=scan_layers), True)
    decays = named(decay_mask(nn.unbox(abstract_params(model))))
    exempt = {"scale", "bias", "output_bias"}
    assert decays == {name: name.rpartition("/")[2] not in exempt for name in decays}
    kinds = {name.rpartition("/")[2] for name in decays}
    assert kinds == exempt | {"kernel", "embedding"}
    # The last part says it all only because every scale and bias is called so.
    assert all(name.split("/")[-2].endswith("layer_norm") for name in decays if name.endswith("/scale"))


def test_further_parameters_without_decay_by_name():
    shapes = {
        "embeddings": {"word_embeddings": {"embedding": 2.0}, "layer_norm": {"scale": 2.0}},
        "head": {"kernel": 2.0},
    }
    params = jax.tree.map(jnp.asarray, shapes)
    assert named(decay_mask(params, ("^embeddings/word",))) == {
        "embeddings/layer_norm/scale": False, "embeddings/word_embeddings/embedding": False, "head/kernel": True,
    }  # fmt: skip
    for text, reason in (("relu", "no parameter has 'relu' in its name; names with weight decay: embeddings/word_"),
                         ("(", "'(' is not a regular expression: ")):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(f"optimizer.without_decay: {reason}")):
            decay_mask(params, (text,))


@pytest.mark.parametrize("name", ["adamw", "lamb", "stable_adamw"])
@pytest.mark.parametrize("kind", ["decoupled", "l2"])
def test_updates_of_further_parameters_do_not_decay(name, kind):
    """A gradient of 0: the update is the decay alone."""
    config = OptimizerConfig(name=name, weight_decay_type=kind, weight_decay=0.5, without_decay=("word", "head"))
    params = {"word": {"kernel": jnp.ones(3)}, "head": {"kernel": jnp.ones(3)}, "other": {"kernel": jnp.ones(3)}}
    optimizer = make_optimizer(config)
    direction, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    moved = {name: bool(jnp.any(leaf != 0)) for name, leaf in named(direction).items()}
    assert moved == {"head/kernel": False, "other/kernel": True, "word/kernel": False}


def test_parameters_without_decay_have_no_trust_ratio():
    config = OptimizerConfig(name="lamb", weight_decay=0.0, without_decay=("word",), clip_norm=0.0)
    params = {"word": {"kernel": jnp.full(3, 5.0)}, "other": {"kernel": jnp.full(3, 5.0)}}
    optimizer = make_optimizer(config)
    direction, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)
    np.testing.assert_allclose(direction["word"]["kernel"], 1, rtol=1e-4)
    np.testing.assert_allclose(direction["other"]["kernel"], 5, rtol=1e-4)


# ------------------------------------------------------------------ update rules

VOCABULARY = 11
LAYERS = 3
CANONICAL = {
    "embeddings/word_embeddings/embedding": (VOCABULARY, 6),
    "embeddings/layer_norm/scale": (6,),
    **{f"encoder/layer_{i}/{name}": shape for i in range(LAYERS) for name, shape in {
        "attention/query/kernel": (6, 6), "attention/query/bias": (6,), "attention/layer_norm/scale": (6,),
        "feed_forward/output/kernel": (8, 6),
    }.items()},
    "mlm_head/output_bias": (VOCABULARY,),
}  # fmt: skip
LR = 1e-2


def nested(flat):
    tree = {}
    for name, value in flat.items():
        node = tree
        *parents, last = name.split("/")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def structure(scanned, rows):
    """Zeros of the running layout: unrolled or stacked, the vocabulary padded to ``rows``."""
    shapes = {}
    for name, shape in CANONICAL.items():
        if name.startswith(("embeddings/word", "mlm_head")):
            shape = (rows, *shape[1:])
        if scanned and name.startswith("encoder/layer_"):
            _, _, rest = name.removeprefix("encoder/").partition("/")
            name, shape = f"encoder/layers/{rest}", (LAYERS, *shape)
        shapes[name] = np.zeros(shape, np.float32)
    return nested(shapes)


def is_decayed(name):
    return name.endswith(("kernel", "embedding"))


class Numpy:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) and LAMB (You et al. 2019, algorithm 2) in float64.

    Parameters in ``joining`` take part after so many updates."""

    def __init__(self, config, params, joining=None):
        self.config, self.count, self.joining = config, 0, joining or {}
        self.params = {name: value.astype(np.float64) for name, value in params.items()}
        self.m = {name: np.zeros_like(value) for name, value in self.params.items()}
        self.v = {name: np.zeros_like(value) for name, value in self.params.items()}

    def step(self, grads):
        config, coupled = self.config, self.config.weight_decay_type == "l2"
        self.count += 1
        norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads.values()))
        scale = min(1.0, config.clip_norm / norm) if config.clip_norm else 1.0
        for name, w in self.params.items():
            count = self.count - self.joining.get(name, 0)
            if count <= 0:
                continue
            decay = config.weight_decay * w if is_decayed(name) else 0.0
            g = grads[name].astype(np.float64) * scale + (decay if coupled else 0.0)
            self.m[name] = config.beta1 * self.m[name] + (1 - config.beta1) * g
            self.v[name] = config.beta2 * self.v[name] + (1 - config.beta2) * g * g
            m_hat = self.m[name] / (1 - config.beta1**count)
            v_hat = self.v[name] / (1 - config.beta2**count)
            update = m_hat / (np.sqrt(v_hat) + config.epsilon) + (0.0 if coupled else decay)
            if config.name == "lamb" and is_decayed(name):
                sizes = np.linalg.norm(w.ravel()), np.linalg.norm(np.ravel(update))
                update = update * (sizes[0] / sizes[1] if min(sizes) > 0 else 1.0)
            self.params[name] = w - LR * update


@pytest.mark.parametrize(
    ("clip_norm", "scanned"),
    [
        (1.0, True),
        (0.0, False),
        pytest.param(1.0, False, marks=pytest.mark.slow),
        pytest.param(0.0, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ["decoupled", "l2"])
@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_updates(name, kind, clip_norm, scanned):
    """40 updates with sparse and, every third time, small gradients; layers of very unequal size."""
    config = OptimizerConfig(
        name=name, weight_decay_type=kind, clip_norm=clip_norm, weight_decay=0.1, beta1=0.8, beta2=0.95
    )
    rng = np.random.default_rng(0)
    start = {n: rng.normal(0, 0.5, shape).astype(np.float32) for n, shape in CANONICAL.items()}
    for i in range(LAYERS):
        start[f"encoder/layer_{i}/attention/query/kernel"] *= 10.0 ** (i - 1)
    start["encoder/layer_1/feed_forward/output/kernel"][:] = 0  # no trust ratio without a weight
    like = structure(scanned, rows=16)
    exact = Numpy(config, start)
    params = from_canonical(start, like, VOCABULARY)
    optimizer = make_optimizer(config)
    state, apply = jax.jit(optimizer.init)(params), updater(optimizer, LR)
    place = jax.jit(lambda grads: from_canonical(grads, like, VOCABULARY))
    canonical = jax.jit(lambda params: to_canonical(params, VOCABULARY))

    for step in range(40):
        size = 0.01 if step % 3 == 2 else 1.0
        grads = {n: rng.normal(0, size, shape).astype(np.float32) for n, shape in CANONICAL.items()}
        grads["embeddings/word_embeddings/embedding"][rng.integers(0, VOCABULARY, 4)] = 0
        params, state = apply(params, state, place(grads))
        exact.step(grads)
        for path, value in canonical(params).items():
            scale = max(1.0, float(np.abs(exact.params[path]).max()))
            np.testing.assert_allclose(
                value, exact.params[path], rtol=0, atol=3e-6 * scale, err_msg=f"{path} {step}"
            )
    rows = params["embeddings"]["word_embeddings"]["embedding"], params["mlm_head"]["output_bias"]
    assert all(not np.asarray(leaf)[VOCABULARY:].any() for leaf in rows)


@pytest.mark.parametrize(
    "scanned", [pytest.param(False, marks=pytest.mark.slow), True], ids=["unrolled", "scanned"]
)
@pytest.mark.parametrize("kind", ["decoupled", "l2"])
@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_layers_that_join_late_start_as_if_the_run_began_with_them(name, kind, scanned):
    """From the top, every 12 updates; until then their gradients are 0."""
    config = FinetuneOptimizerConfig(
        name=name, weight_decay_type=kind, clip_norm=0.0, weight_decay=0.1, beta2=0.99, unfreeze_every=3.0
    )
    rng = np.random.default_rng(0)
    start = {n: rng.normal(0, 0.5, shape).astype(np.float32) for n, shape in CANONICAL.items()}
    turns = {"embeddings": 4 * 12, **{f"encoder/layer_{i}": (LAYERS - i) * 12 for i in range(LAYERS)}}
    turns = {n: turns.get("/".join(n.split("/")[: 1 + n.startswith("encoder/")]), 0) for n in CANONICAL}
    like = structure(scanned, rows=16)
    exact = Numpy(config, start, turns)
    params = from_canonical(start, like, VOCABULARY)
    optimizer = make_optimizer(config, unfreeze_updates(config, LAYERS, like, steps_per_epoch=4))
    rates = lr_multipliers(config, LAYERS, like, steps_per_epoch=4)
    state = jax.jit(optimizer.init)(params)
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(make_optimizer(config).init, params))
    place = jax.jit(lambda grads: from_canonical(grads, like, VOCABULARY))
    canonical = jax.jit(lambda params: to_canonical(params, VOCABULARY))

    @jax.jit
    def apply(params, state, grads, step):
        factors = rates(step)
        grads = jax.tree.map(lambda g, f: jax.numpy.where(f == 0, 0.0, g), grads, factors)
        direction, state = optimizer.update(grads, state, params)
        return jax.tree.map(lambda p, d, f: p - LR * d * f, params, direction, factors), state

    for step in range(60):
        grads = {n: rng.normal(0.3, 1, shape).astype(np.float32) for n, shape in CANONICAL.items()}
        params, state = apply(params, state, place(grads), step)
        exact.step(grads)
        for path, value in canonical(params).items():
            np.testing.assert_allclose(value, exact.params[path], rtol=0, atol=1e-5, err_msg=f"{path} {step}")


def test_clipping_leaves_small_gradients_alone():
    grads = {"kernel": np.array([[0.3, 0.4]], np.float32)}
    for clip_norm, factor in ((1.0, 1.0), (0.5, 1.0), (0.25, 0.5), (0.0, 1.0)):
        config = OptimizerConfig(clip_norm=clip_norm, beta1=0.0, beta2=0.0, epsilon=1.0, weight_decay=0.0)
        optimizer = make_optimizer(config)
        direction, _ = optimizer.update(grads, optimizer.init(grads), grads)
        clipped = grads["kernel"] * factor
        np.testing.assert_allclose(direction["kernel"], clipped / (clipped + 1), rtol=1e-6)


# ------------------------------------------------------------------ the training step

RULES = ["--optimizer.name adamw", "--optimizer.name lamb", "--optimizer.name bert_adam",
         "--optimizer.name muon", "--optimizer.name adamw --optimizer.weight_decay_type l2",
         "--optimizer.name stable_adamw --optimizer.beta2 0.9"]  # fmt: skip


def train(config, steps):
    """States (numpy, the first one before any step) and gradient norms of ``steps`` training steps."""
    model = BertForPretraining(config.model, config.execution, config.has_nsp)
    optimizer = make_optimizer(config.optimizer, vocab_size=config.model.vocab_size)
    objective = masked_lm(model)
    training = dataclasses.replace(config.training, num_steps=steps, accumulation_steps=1, seed=0)
    objective.config = dataclasses.replace(config, training=training)
    run = jax.jit(make_train_step(objective, optimizer))
    words = key_words(make_prng_key(config.execution, 0))
    params = random_params(model)
    ema = params if config.optimizer.ema_decay else None
    state = TrainState(np.int32(0), params, jax.jit(optimizer.init)(params), ema)
    states, norms = [jax.device_get(state)], []
    for step in range(steps):
        state, metrics = run(state, random_batch(config, seed=step), objective.fixed, words)
        states.append(jax.device_get(state))
        norms.append(metrics.unpack()["grad_norm"])
    return states, norms


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=[] if rule in (RULES[1], RULES[-1]) else pytest.mark.slow) for rule in RULES]
)
def test_padded_rows_stay_zero_and_enter_no_norm(rule):
    """With clipping and LAMB every norm matters: a padded vocabulary must train as an unpadded one."""
    common = (
        rule, "--model.num_layers 1 --model.vocab_size 61 --optimizer.clip_norm 0.5 --optimizer.weight_decay 0.1",
        "--optimizer.ema_decay 0.5 --optimizer.warmup_steps 0 --optimizer.learning_rate 1e-2",
    )  # fmt: skip
    padded, norms = train(tiny_config(*common, "--execution.vocab_multiple 64"), steps=4)
    plain, plain_norms = train(tiny_config(*common, "--execution.vocab_multiple 1"), steps=4)
    np.testing.assert_allclose(norms, plain_norms, rtol=1e-5)
    assert norms[0] > 0.5
    found, expected = to_canonical(padded[-1], 61), to_canonical(plain[-1], 61)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    rows = {
        name: leaf
        for name, leaf in named(padded[-1]).items()
        if name.endswith(("word_embeddings/embedding", "mlm_head/output_bias"))
    }
    assert len(rows) == 2 * 4  # parameters, two moments, average
    for name, leaf in rows.items():
        assert leaf.shape[0] == 64 and leaf[:61].any() and not leaf[61:].any(), name


def test_moving_average_follows_the_parameters():
    config = tiny_config("--optimizer.ema_decay 0.75 --optimizer.warmup_steps 0")
    states, _ = train(config, steps=4)
    average = {name: np.float64(leaf) for name, leaf in named(states[0].params).items()}
    for state in states[1:]:
        params = named(state.params)
        average = {name: 0.75 * value + 0.25 * params[name] for name, value in average.items()}
        for name, value in named(state.ema).items():
            np.testing.assert_allclose(value, average[name], rtol=0, atol=4e-7, err_msg=name)
    first, last = named(states[0].params), named(states[-1].ema)
    assert all(not np.array_equal(first[name], last[name]) for name in first if "query/bias" in name)


def test_sgd_and_adagrad_are_their_formulas():
    params, rng = {"embedding": jnp.array([1.0, -2.0, 3.0])}, np.random.default_rng(0)
    expected = {"sgd": np.array(params["embedding"], np.float64), "adagrad": np.array([1.0, -2.0, 3.0])}
    squares = np.ones(3)
    found = {}
    for name in expected:
        config = OptimizerConfig(name=name, weight_decay=0.0, clip_norm=0.0, epsilon=1e-8)
        found[name] = make_optimizer(config), params, make_optimizer(config).init(params)
    for _ in range(4):
        gradient = rng.normal(size=3)
        squares += gradient**2
        expected["sgd"] -= 0.1 * gradient
        expected["adagrad"] -= 0.1 * gradient / np.sqrt(squares + 1e-8)
        for name, (optimizer, own, state) in found.items():
            step, state = optimizer.update({"embedding": jnp.asarray(gradient, jnp.float32)}, state, own)
            found[name] = optimizer, jax.tree.map(lambda p, d: p - 0.1 * d, own, step), state
    for name, (_, own, _) in found.items():
        assert np.abs(own["embedding"] - expected[name]).max() < 1e-6
