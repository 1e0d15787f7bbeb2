"""Switches of the network that BERT does not have: shapes, stacked layers, positions, dropout, initialization."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import SIZES, SWITCHES
from flax import linen as nn

from bert_jax.config import ExecutionConfig, HeadsConfig, ModelConfig, PretrainConfig, load_config
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.model import BertModel, to_canonical
from bert_jax.model.canonical import abstract_params, canonical_shapes, from_canonical
from bert_jax.model.dropout import TOKEN_FEATURES, TokenKey
from bert_jax.model.positions import alibi_slopes, bucket_index, disentangled_index

HEADS = HeadsConfig(mlm=True, pooler=True, sequence_labels=("a", "b"), token_labels=("x", "y"))


def features(rows=3, length=16):
    rng = np.random.default_rng(0)
    kept = np.arange(length) < np.array([[length], [length - 5], [4]])[:rows]
    return {
        "input_ids": np.int32(rng.integers(1, 40, (rows, length)) * kept),
        "token_type_ids": np.int32(rng.integers(0, 2, (rows, length)) * kept),
        "sequence_ids": np.int32(kept),
        "position_ids": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    }


def network(scan=False, remat="none", **switches):
    config = ModelConfig(**SIZES | switches)
    return BertModel(config, ExecutionConfig(scan_layers=scan, remat=remat, vocab_multiple=16), HEADS)


def drawn(model):
    """Parameters by canonical name; biases and scales, which are constant at the start, are drawn too."""
    rng = np.random.default_rng(1)
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in canonical_shapes(model).items()}


def tree_of(model, params):
    return from_canonical(params, nn.unbox(abstract_params(model)), 40)


def outputs_of(model, tree, key=None, batch=None):
    output = model.apply({"params": tree}, batch or features(), key)
    return output.mlm_logits[..., :40], output.sequence_logits, output.token_logits


def forward(model, params, key=None, batch=None):
    return jax.device_get(jax.jit(functools.partial(outputs_of, model))(tree_of(model, params), key, batch))


def run(model, params):
    tree = tree_of(model, params)

    def loss(tree):
        outputs = outputs_of(model, tree)
        return sum(jnp.mean(x**2) for x in outputs), outputs

    (_, outputs), gradients = jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(tree))
    return outputs, to_canonical(gradients, 40)


# Stacked layers of these show nothing that the others do not: their layers have no values of their own.
SLOW = ("electra", "gated", "rms", "alibi", "buckets", "blocks", "gpt", "low rank", "pruned", "head")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SWITCHES]
)
def test_stacked_and_recomputed_layers_are_the_same_function(family):
    plain = network(**SWITCHES[family])
    params = drawn(plain)
    outputs, gradients = run(plain, params)
    assert all(np.abs(values).max() > 0 for name, values in gradients.items() if "position_emb" not in name)
    # Both at once but for one family: each program is compiled.
    ways = [{"scan": True}, {"remat": "full"}] if family == "albert" else [{"scan": True, "remat": "full"}]
    for other in (network(**way, **SWITCHES[family]) for way in ways):
        assert canonical_shapes(other) == canonical_shapes(plain)
        again, others = run(other, params)
        for a, b in zip(outputs, again, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(a).max()))
        for name, values in gradients.items():
            np.testing.assert_allclose(others[name], values, atol=2e-5 * max(1, np.abs(values).max()), err_msg=name)


@pytest.mark.slow
def test_layers_that_differ_are_not_stacked():
    model = network(
        scan=True, norm_position="pre_skip_first", attention_windows=(0, 3), position_embeddings="rotary"
    )
    shapes = canonical_shapes(model)
    assert "encoder/layer_0/attention/layer_norm/scale" not in shapes
    assert "encoder/layer_1/attention/layer_norm/scale" in shapes
    params = drawn(model)
    plain = model.clone(execution=network().execution)
    for a, b in zip(forward(model, params), forward(plain, params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_pruned_layers_of_one_size_are_stacked():
    sizes = {"layer_heads": (2, 2, 2), "layer_units": (9, 9, 9)}
    stacked, plain = network(scan=True, **sizes), network(**sizes)
    assert abstract_params(stacked)["encoder"]["layers"]["attention"]["query"]["kernel"].value.shape == (3, 24, 16)
    params = drawn(plain)
    for a, b in zip(forward(stacked, params), forward(plain, params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(a).max()))


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"layer_heads": (1, 2)}, r"layer_heads: \(1, 2\) is not allowed; allowed: one number from 1 to 3"),
        ({"layer_heads": (1, 2, 4)}, "one number from 1 to 3 for each of the 3 layers"),
        ({"layer_heads": (1, 2, 0)}, "one number from 1 to 3"),
        ({"layer_units": (21, 1, 1)}, "one number from 1 to 20"),
        ({"layer_units": (2, 2, 2), "shared_layers": True}, "no numbers unless encoder is transformer"),
        ({"layer_heads": (2, 2, 2), "relative_positions": "alibi"}, "no numbers unless relative_positions is none"),
        ({"layer_heads": (2, 2, 2), "attention_block": 2}, "no numbers unless relative_positions is none"),
    ],
)
def test_sizes_of_layers_that_are_refused(switches, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**SIZES | switches)


@pytest.mark.parametrize("config_type", [PretrainConfig, FinetuneConfig])
def test_one_loop_does_not_compute_layers_of_different_sizes(config_type):
    words = "--execution.scan_layers true --model.num_layers 2 --model.layer_units"
    assert load_config(config_type, [*words.split(), "9", "9"]).model.has_equal_layers
    with pytest.raises(ValueError, match=r"execution\.scan_layers: True is not allowed; allowed: false with"):
        load_config(config_type, [*words.split(), "9", "8"])


@pytest.mark.slow
def test_a_window_hides_far_keys_and_has_its_own_rotary_base():
    """A change of the first token reaches a token after it by ``window`` positions per layer and no further."""
    model = network(attention_windows=(2,), position_embeddings="rotary", rotary_base=1e4, rotary_window_base=50.0)
    batch, apply, tree = features(1), jax.jit(model.apply), tree_of(model, drawn(model))
    before = apply({"params": tree}, batch).sequence_output
    other = batch["input_ids"] + (np.arange(16) == 0)
    after = apply({"params": tree}, batch | {"input_ids": other}).sequence_output
    changed = np.abs(np.asarray(after) - np.asarray(before)).max(-1)[0] > 0
    assert changed.tolist() == [True] * (1 + 2 * 3) + [False] * 9
    assert [model.config.rotary_base_of(window) for window in (0, 2)] == [1e4, 50.0]


@pytest.mark.slow
def test_a_larger_initial_scale_for_output_projections_only_without_megatron():
    for rule, share in (("bert", 1.0), ("megatron", 1 / np.sqrt(6))):
        model = network(initialization=rule, hidden_size=96)
        tree = jax.jit(model.init)(jax.random.key(0), features(1))["params"]
        params = to_canonical(jax.device_get(nn.unbox(tree)), 40)
        for name in ("attention/output", "feed_forward/output"):
            spread = np.std(params[f"encoder/layer_1/{name}/kernel"]) / np.std(
                params["encoder/layer_1/feed_forward/intermediate/kernel"]
            )
            assert abs(spread / share - 1) < 0.1, (rule, name, spread)


@pytest.mark.slow
def test_dropout_has_a_rate_per_place():
    config = ModelConfig(hidden_dropout=0.1, embedding_dropout=0.0, feed_forward_dropout=0.3)
    assert config.attention_output_dropout == -1
    assert [config.dropout_at(place) for place in ("embedding", "attention_output", "feed_forward")] == [
        0,
        0.1,
        0.3,
    ]
    quiet = dict(hidden_dropout=0.0, attention_dropout=0.0)
    key, plain = jax.random.key(3), network(**quiet)
    params = drawn(plain)
    expected = forward(plain, params)[0]
    assert np.array_equal(forward(plain, params, key)[0], expected)
    for place in ("embedding", "attention_output", "feed_forward"):
        model = network(**quiet | {f"{place}_dropout": 0.5})
        assert not np.array_equal(forward(model, params, key)[0], expected), place


@pytest.mark.slow
@pytest.mark.parametrize("prng", [pytest.param("threefry", marks=pytest.mark.slow), "hash"])
def test_embeddings_of_distances_have_the_dropout_of_the_encoder(prng):
    elsewhere = dict.fromkeys(("attention", "embedding", "attention_output", "feed_forward"), 0.0)
    batch = features() | {"sequence_keys": np.arange(3, dtype=np.uint32)[:, None]}
    key = jax.random.key(3)
    if prng == "hash":
        key = TokenKey.of(key, *(batch[name] for name in TOKEN_FEATURES))
    for family, differs in (("disentangled", True), ("buckets", False)):
        rates = {"hidden_dropout": 0.5} | {f"{place}_dropout": rate for place, rate in elsewhere.items()}
        plain, scanned = (network(scan, **SWITCHES[family], **rates) for scan in (False, True))
        params = drawn(plain)
        logits = [forward(plain, params, with_key, batch)[0] for with_key in (None, key)]
        assert (np.abs(logits[0] - logits[1]).max() > 1e-3) == differs
        if differs:
            np.testing.assert_allclose(logits[1], forward(scanned, params, key, batch)[0], atol=1e-5)


def test_rows_of_distances():
    distance = np.arange(-40, 41)
    buckets = bucket_index(distance, 32, 128)
    # Keys before the query: buckets 0 to 15; after it: 16 to 31; small distances have a bucket each.
    assert buckets[40 - 7 : 41].tolist() == [7, 6, 5, 4, 3, 2, 1, 0] and buckets[41:48].tolist() == list(
        range(17, 24)
    )
    assert buckets[0] == 12 and buckets[-1] == 28 and bucket_index(np.array([500]), 32, 128)[0] == 31
    rows = disentangled_index(np.arange(-600, 601), 512, 512)
    assert rows[600] == 256 and (np.diff(rows) <= 0).all() and rows.min() >= 0 and rows.max() == 511
    assert rows[600 - 128 : 600].tolist() == list(range(384, 256, -1))
    assert disentangled_index(np.arange(-20, 21), 16, 8).tolist() == [15] * 14 + list(range(14, 0, -1)) + [0] * 13


def test_slopes_of_alibi():
    assert alibi_slopes(8).tolist() == [2.0**-k for k in range(1, 9)]
    np.testing.assert_allclose(alibi_slopes(12)[8:], [2.0 ** -(k + 0.5) for k in range(4)], rtol=1e-6)
