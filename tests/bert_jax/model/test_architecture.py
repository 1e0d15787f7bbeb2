"""Switches of the network that BERT does not have: shapes, stacked layers, positions, dropout, initialization."""

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
        "input_ids": jnp.asarray(rng.integers(1, 40, (rows, length)) * kept, jnp.int32),
        "token_type_ids": jnp.asarray(rng.integers(0, 2, (rows, length)) * kept, jnp.int32),
        "sequence_ids": jnp.asarray(kept, jnp.int32),
        "position_ids": jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length)),
    }


def network(scan=False, remat="none", **switches):
    config = ModelConfig(**SIZES | switches)
    return BertModel(config, ExecutionConfig(scan_layers=scan, remat=remat, vocab_multiple=16), HEADS)


def drawn(model):
    """Parameters by canonical name; biases and scales, which are constant at the start, are drawn too."""
    rng = np.random.default_rng(1)
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in canonical_shapes(model).items()}


def run(model, params):
    tree = from_canonical(params, nn.unbox(abstract_params(model)), 40)
    batch = features()

    def loss(tree):
        output = model.apply({"params": tree}, batch)
        logits = output.mlm_logits[..., :40]
        total = jnp.mean(logits**2) + jnp.mean(output.sequence_logits**2) + jnp.mean(output.token_logits**2)
        return total, (logits, output.sequence_logits, output.token_logits)

    (_, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(tree)
    return list(map(np.asarray, outputs)), to_canonical(gradients, 40)


# Stacked layers of these show nothing that the others do not: their layers have no values of their own.
SLOW = ("electra", "gated", "rms", "buckets", "gpt", "low rank", "head")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SWITCHES]
)
def test_stacked_and_recomputed_layers_are_the_same_function(family):
    plain = network(**SWITCHES[family])
    params = drawn(plain)
    outputs, gradients = run(plain, params)
    assert all(np.abs(values).max() > 0 for name, values in gradients.items() if "position_emb" not in name)
    for other in (network(scan=True, **SWITCHES[family]), network(remat="full", **SWITCHES[family])):
        assert canonical_shapes(other) == canonical_shapes(plain)
        again, others = run(other, params)
        for a, b in zip(outputs, again, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(a).max()))
        for name, values in gradients.items():
            np.testing.assert_allclose(others[name], values, atol=2e-5 * max(1, np.abs(values).max()), err_msg=name)


def test_layers_that_differ_are_not_stacked():
    model = network(
        scan=True, norm_position="pre_skip_first", attention_windows=(0, 3), position_embeddings="rotary"
    )
    shapes = canonical_shapes(model)
    assert "encoder/layer_0/attention/layer_norm/scale" not in shapes
    assert "encoder/layer_1/attention/layer_norm/scale" in shapes
    params = drawn(model)
    for a, b in zip(
        run(model, params)[0],
        run(
            network(
                **{
                    "norm_position": "pre_skip_first",
                    "attention_windows": (0, 3),
                    "position_embeddings": "rotary",
                }
            ),
            params,
        )[0],
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_pruned_layers_of_one_size_are_stacked():
    sizes = {"layer_heads": (2, 2, 2), "layer_units": (9, 9, 9)}
    stacked, plain = network(scan=True, **sizes), network(**sizes)
    assert abstract_params(stacked)["encoder"]["layers"]["attention"]["query"]["kernel"].value.shape == (3, 24, 16)
    params = drawn(plain)
    for a, b in zip(run(stacked, params)[0], run(plain, params)[0], strict=True):
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


def test_a_window_hides_far_keys_and_has_its_own_rotary_base():
    """A change of the first token reaches a token after it by ``window`` positions per layer and no further."""
    model = network(attention_windows=(2,), position_embeddings="rotary", rotary_base=1e4, rotary_window_base=50.0)
    batch, apply = features(1), jax.jit(model.apply)
    tree = jax.jit(model.init)(jax.random.key(0), batch)["params"]
    before = apply({"params": tree}, batch).sequence_output
    after = apply({"params": tree}, batch | {"input_ids": batch["input_ids"].at[0, 0].add(1)}).sequence_output
    changed = np.abs(np.asarray(after) - np.asarray(before)).max(-1)[0] > 0
    assert changed.tolist() == [True] * (1 + 2 * 3) + [False] * 9
    assert [model.config.rotary_base_of(window) for window in (0, 2)] == [1e4, 50.0]


def test_a_larger_initial_scale_for_output_projections_only_without_megatron():
    for rule, share in (("bert", 1.0), ("megatron", 1 / np.sqrt(6))):
        tree = network(initialization=rule, hidden_size=96).init(jax.random.key(0), features(1))["params"]
        params = to_canonical(nn.unbox(tree), 40)
        for name in ("attention/output", "feed_forward/output"):
            spread = np.std(params[f"encoder/layer_1/{name}/kernel"]) / np.std(
                params["encoder/layer_1/feed_forward/intermediate/kernel"]
            )
            assert abs(spread / share - 1) < 0.1, (rule, name, spread)


def test_dropout_has_a_rate_per_place():
    config = ModelConfig(hidden_dropout=0.1, embedding_dropout=0.0, feed_forward_dropout=0.3)
    assert config.attention_output_dropout == -1
    assert [config.dropout_at(place) for place in ("embedding", "attention_output", "feed_forward")] == [
        0,
        0.1,
        0.3,
    ]
    quiet = dict(hidden_dropout=0.0, attention_dropout=0.0)
    key, batch, plain = jax.random.key(3), features(), network(**quiet)
    tree = plain.init(jax.random.key(0), batch)["params"]
    for place in ("embedding", "attention_output", "feed_forward"):
        rates = quiet | {f"{place}_dropout": 0.5}
        model = network(**rates)
        assert np.array_equal(
            plain.apply({"params": tree}, batch, key).mlm_logits, plain.apply({"params": tree}, batch).mlm_logits
        )
        with_dropout = model.apply({"params": tree}, batch, key).mlm_logits
        assert not np.array_equal(with_dropout, plain.apply({"params": tree}, batch).mlm_logits), place


@pytest.mark.parametrize("prng", [pytest.param("threefry", marks=pytest.mark.slow), "hash"])
def test_embeddings_of_distances_have_the_dropout_of_the_encoder(prng):
    elsewhere = dict.fromkeys(("attention", "embedding", "attention_output", "feed_forward"), 0.0)
    batch = features() | {"sequence_keys": jnp.arange(3, dtype=jnp.uint32)[:, None]}
    key = jax.random.key(3)
    if prng == "hash":
        key = TokenKey.of(key, *(batch[name] for name in TOKEN_FEATURES))
    for family, differs in (("disentangled", True), ("buckets", False)):
        rates = {"hidden_dropout": 0.5} | {f"{place}_dropout": rate for place, rate in elsewhere.items()}
        plain, scanned = (network(scan, **SWITCHES[family], **rates) for scan in (False, True))
        params = drawn(plain)
        logits = []
        for model, with_key in ((plain, None), (plain, key), (scanned, key)):
            tree = from_canonical(params, nn.unbox(abstract_params(model)), 40)
            logits.append(np.asarray(jax.jit(model.apply)({"params": tree}, batch, with_key).mlm_logits[..., :40]))
        assert (np.abs(logits[0] - logits[1]).max() > 1e-3) == differs
        np.testing.assert_allclose(logits[1], logits[2], atol=1e-5)


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
