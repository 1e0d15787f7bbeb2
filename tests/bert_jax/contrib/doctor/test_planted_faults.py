"""Faults of layers, objectives and rows, by patches: each is in the first two lines, and a network without faults
has none."""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import objective_of, tiny_config, write_vocabulary

from bert_jax.contrib.doctor.audit import audit
from bert_jax.contrib.doctor.examine import check_network
from bert_jax.contrib.doctor.findings import diagnosis
from bert_jax.contrib.doctor.network import Network, rounded_weights, states_and_attention, updates
from bert_jax.contrib.doctor.probes import Subject, Total, word_order
from bert_jax.model import attention, bert, layers, task_layers
from bert_jax.model.kernels.ranges import visible_keys
from bert_jax.objectives import masked_lm
from bert_jax.objectives import objective as objectives
from bert_jax.tokenization import load_tokenizer
from bert_jax.training.checkpoint.parameters import random_parameters

PACKED = "--data.packing best_fit --data.next_sentence none --model.num_layers 2"
CAUSAL = "--objective.name causal_lm --model.attention causal"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_vocabulary(tmp_path_factory.mktemp("vocabulary")))


def packed_rows(count=16, length=32, masks=6):
    """Rows of two or three sequences and padding, with 80% masks, 10% random and 10% unchanged tokens."""
    rng = np.random.default_rng(0)
    shape = (count, length)
    rows = {
        name: np.zeros(shape, np.int32) for name in ("input_ids", "token_type_ids", "sequence_ids", "position_ids")
    }
    rows |= {name: np.zeros((count, masks), np.int32) for name in ("mlm_positions", "mlm_labels")}
    rows |= {"mlm_weights": np.zeros((count, masks), np.float32), "nsp_weights": np.zeros((count, 3), np.float32)}
    rows |= {name: np.zeros((count, 3), np.int32) for name in ("cls_positions", "nsp_labels", "document_classes")}
    rows["sequence_keys"] = rng.integers(0, 2**32, (count, 3), dtype=np.uint32)
    for row in range(count):
        at = 0
        for number, size in enumerate(rng.integers(6, 11, 3), 1):
            part = slice(at, at + size)
            rows["input_ids"][row, part] = rng.integers(5, 211, size)
            rows["input_ids"][row, at], rows["input_ids"][row, at + size - 1] = 2, 3
            rows["sequence_ids"][row, part] = number
            rows["position_ids"][row, part] = np.arange(size)
            rows["cls_positions"][row, number - 1] = at
            places = at + 1 + rng.permutation(size - 2)[:2]
            slots = slice(2 * number - 2, 2 * number)
            rows["mlm_positions"][row, slots] = places
            rows["mlm_labels"][row, slots] = rows["input_ids"][row, places]
            rows["mlm_weights"][row, slots] = 1
            kind = rng.random(2)
            other = np.where(
                kind < 0.8, 4, np.where(kind < 0.9, rng.integers(5, 211, 2), rows["input_ids"][row, places])
            )
            rows["input_ids"][row, places] = other
            at += size
    return rows


def examined(tokenizer, options="", rows=None):
    """The results of all checks of a network with initial parameters, the most severe first."""
    rows = packed_rows() if rows is None else rows
    config = tiny_config(PACKED, "--data.seq_length 32 --data.max_predictions 6 --data.mask_fraction 0.25", options)
    objective = objective_of(config)
    name = "mlm_loss" if "mlm_loss" in objective.display.keys else "lm_loss"
    start = random_parameters(config, objective.model, tokenizer).arrays
    found = audit(config.data, tokenizer, rows, predicts_masks=name == "mlm_loss")
    return diagnosis(found + check_network(objective, name, tokenizer, rows, start, start, None))


def named(found):
    """The checks of the first two lines that are FAIL."""
    return [one.check for one in found[:2] if one.status == "FAIL"]


def scores_of(*, packed=True, padded=True):
    """``visible_keys`` without the limits of packed rows or with the mask of padded rows inverted."""

    def visible(ids_BxS, causal=False, window=0, is_global_BxS=None):
        if not packed:
            ids_BxS = jnp.minimum(ids_BxS, 1)
        found = visible_keys(ids_BxS, causal, window, is_global_BxS)
        return found if padded else jnp.where(jnp.any(ids_BxS == 0, axis=1)[:, None, None, None], ~found, found)

    return mock.patch.object(layers, "visible_keys", visible)


@contextlib.contextmanager
def one_dropout_key():
    key_of = layers.site_key
    with mock.patch.object(layers, "site_key", lambda key, layer, site: key_of(key, 1, site)):
        yield


@contextlib.contextmanager
def other_table():
    """An output layer whose table is no parameter."""
    product = task_layers.matmul_f32_grad

    def of_other(x, table, axis, dtype):
        return product(x, jax.random.normal(jax.random.key(1), table.shape) * 0.02, axis, dtype)

    with mock.patch.object(task_layers, "matmul_f32_grad", of_other):
        yield


@contextlib.contextmanager
def shifted_labels():
    """An objective that compares the output at a place with the label of the next one."""
    entropy = masked_lm.weighted_cross_entropy

    def shifted(name, logits, labels, weights):
        return entropy(name, logits, jnp.roll(labels, -1, axis=1) if name == "mlm" else labels, weights)

    with mock.patch.object(masked_lm, "weighted_cross_entropy", shifted):
        yield


@contextlib.contextmanager
def positions_of_rows():
    """Positions that do not restart in the network."""
    from bert_jax.model.embeddings import Embeddings

    call = Embeddings.__call__

    def of_rows(self, ids, types, positions, key):
        return call(self, ids, types, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), key)

    with mock.patch.object(Embeddings, "__call__", of_rows):
        yield


@contextlib.contextmanager
def no_positions():
    """Embeddings that give all tokens the first position."""
    from bert_jax.model.embeddings import Embeddings

    call = Embeddings.__call__
    with mock.patch.object(
        Embeddings, "__call__", lambda self, ids, types, places, key: call(self, ids, types, 0 * places, key)
    ):
        yield


@contextlib.contextmanager
def all_weights():
    """An objective that counts unused slots."""
    entropy = masked_lm.weighted_cross_entropy

    def of_all(name, logits, labels, weights):
        return entropy(name, logits, labels, jnp.ones_like(weights))

    with mock.patch.object(masked_lm, "weighted_cross_entropy", of_all):
        yield


@contextlib.contextmanager
def first_microbatch():
    """Accumulation that reads the first microbatch each time."""
    split = objectives.split_microbatches

    def first(batch, count):
        return {name: jnp.broadcast_to(x[:1], x.shape) for name, x in split(batch, count).items()}

    with mock.patch.object(objectives, "split_microbatches", first):
        yield


@contextlib.contextmanager
def mixed_rows():
    """Dense layers whose outputs depend on the mean of the batch."""
    product = task_layers.matmul_f32_grad
    with mock.patch.object(
        task_layers, "matmul_f32_grad", lambda x, *rest: product(x - x.mean(axis=0, keepdims=True), *rest)
    ):
        yield


@contextlib.contextmanager
def no_attention():
    """Attention that reads nothing."""
    with mock.patch.object(
        layers.local, "attention_function", lambda *_: (lambda q, k, v, *a, **b: 0 * q, None, None)
    ):
        yield


@contextlib.contextmanager
def softmax_over_queries():
    """Attention whose weights sum to 1 over the queries of a key."""
    softmax = jax.nn.softmax
    with mock.patch.object(attention.jax.nn, "softmax", lambda x, axis: softmax(x, axis=-2)):
        yield


@contextlib.contextmanager
def cut_gradient():
    product = layers.matmul_f32_grad
    with mock.patch.object(
        layers, "matmul_f32_grad", lambda x, w, *rest: product(x, jax.lax.stop_gradient(w), *rest)
    ):
        yield


@contextlib.contextmanager
def first_row():
    """Outputs that are all gathered from the first row of the batch."""
    gathered = bert.gather_positions
    with mock.patch.object(
        bert, "gather_positions", lambda x, places: gathered(jnp.broadcast_to(x[:1], x.shape), places)
    ):
        yield


@contextlib.contextmanager
def no_types():
    """Embeddings that give all tokens the first type."""
    from bert_jax.model.embeddings import Embeddings

    call = Embeddings.__call__
    with mock.patch.object(
        Embeddings, "__call__", lambda self, ids, types, places, key: call(self, ids, 0 * types, places, key)
    ):
        yield


FAULTS = {
    "padding": (lambda: scores_of(padded=False), ""),
    "neighbors": (lambda: scores_of(packed=False), ""),
    "tied table": (other_table, ""),
    "dropout": (one_dropout_key, ""),
    "other labels": (shifted_labels, ""),
    "place in the row": (positions_of_rows, ""),
    "word order": (no_positions, ""),
    "attention sums": (softmax_over_queries, ""),
    "loss weights": (all_weights, ""),
    "accumulation": (first_microbatch, "--training.accumulation_steps 4"),
    "other rows": (mixed_rows, ""),
    "context": (no_attention, ""),
    "gradients": (cut_gradient, ""),
    "updates": (contextlib.nullcontext, "--optimizer.learning_rate 0.1"),
    "first loss": (contextlib.nullcontext, "--model.initializer_range 2"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("check", FAULTS)
def test_a_fault_of_the_code_is_named_first(tokenizer, check):
    fault, options = FAULTS[check]
    with fault():
        found = examined(tokenizer, options)
    assert check in named(found), "\n".join(map(str, found))


@pytest.mark.cases(1)
def test_weights_that_are_ignored_have_no_other_line(tokenizer):
    with all_weights():
        found = examined(tokenizer)
    assert [one.check for one in found if one.status != "OK"] == ["loss weights"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("fault", ["", "rows", "network"])
def test_token_types_that_are_lost(tokenizer, fault):
    """Rows of pairs without the types of the second sentences, and a network that does not read the types."""
    rows = packed_rows()
    rows["nsp_weights"] = np.ones_like(rows["nsp_weights"])
    if fault != "rows":
        rows["token_type_ids"] = ((rows["position_ids"] > 3) & (rows["sequence_ids"] > 0)).astype(np.int32)
    with no_types() if fault == "network" else contextlib.nullcontext():
        found = examined(tokenizer, rows=rows)
    if fault:
        assert named(found) == ["token types"]
        assert ("rows are read" in found[0].advice) == (fault == "rows")
    else:
        assert [one for one in found if one.status != "OK"] == []
        assert "token types" in {one.check for one in found}
        # Without token types or pairs, nothing is probed.
        types = examined(tokenizer, "--model.type_vocab_size 0", rows)
        assert "token types" not in {one.check for one in (*types, *examined(tokenizer))}


@pytest.mark.cases(1)
def test_outputs_of_the_first_row_are_named(tokenizer):
    with first_row():
        found = examined(tokenizer)
    assert "other rows" in named(found), "\n".join(map(str, found))


@pytest.mark.slow
@pytest.mark.parametrize("causal, other", [("neighbors", {"packed": False}), ("padding", {"padded": False})])
def test_a_fault_of_causal_attention_is_named(tokenizer, causal, other):
    with scores_of(**other):
        assert causal in named(examined(tokenizer, CAUSAL))


@pytest.mark.slow
def test_attention_to_later_tokens_is_named(tokenizer):
    see = visible_keys
    with mock.patch.object(layers, "visible_keys", lambda ids, causal=False, **more: see(ids, False, **more)):
        assert named(examined(tokenizer, CAUSAL))[0] == "later tokens"


@pytest.mark.parametrize("rate, is_random, status", [(2e-5, True, "LOOK"), (2e-5, False, "OK"), (1e-4, True, "OK")])
def test_a_rate_that_is_too_low_for_random_parameters(rate, is_random, status):
    arrays = {"encoder/layer_0/kernel": np.full((4, 4), 0.02, np.float32)}
    found = updates(tiny_config(f"--optimizer.learning_rate {rate}").optimizer, arrays, is_random=is_random)
    assert found.status == status


def test_parameters_that_are_rounded_are_named():
    values = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    rounded = np.asarray(jnp.asarray(values, jnp.bfloat16).astype(jnp.float32))
    initial = {"scale": np.ones(64, np.float32), "bias": np.zeros(64, np.float32), "ids": np.arange(64)}
    assert rounded_weights(initial | {"kernel": values}).status == "OK"
    assert rounded_weights(initial | {"kernel": rounded}).status == "FAIL"
    assert rounded_weights(initial).status == "OK"


@pytest.mark.slow
def test_collapsed_states_and_heads_are_named(tokenizer):
    config = tiny_config(PACKED)
    objective = objective_of(config)
    arrays = random_parameters(config, objective.model, tokenizer).arrays

    def statuses(changes):
        network = Network(config.model, objective.model.heads, arrays | changes, packed_rows())
        return {one.check: one.status for one in states_and_attention(network)}

    sharp = {name: 1e4 * x for name, x in arrays.items() if "/query/kernel" in name or "/key/kernel" in name}
    equal = {name: 0 * x + (x[0] if "word" in name else 0) for name, x in arrays.items() if "embeddings/" in name}
    equal |= {"embeddings/layer_norm/scale": arrays["embeddings/layer_norm/scale"]}
    assert statuses({}) == {"token states": "OK", "attention heads": "OK"}
    assert statuses(sharp)["attention heads"] == "LOOK"
    assert statuses(equal)["token states"] == "FAIL"


def test_a_trained_network_without_order_is_named(tokenizer):
    """A loss of 1 nat per predicted token whatever the order, and one that rises with each moved token."""
    rows = packed_rows()

    def bag(params, other):
        return Total(96.0, 96.0)

    def ordered_words(params, other):
        return Total(96.0 + (other["input_ids"] != rows["input_ids"]).sum(), 96.0)

    for total, status in ((bag, "FAIL"), (ordered_words, "OK")):
        subject = Subject(tiny_config(PACKED), tokenizer, total, None, {}, {}, rows, unigram=5.0)
        assert word_order(subject).status == status
    learns_nothing = Subject(tiny_config(PACKED), tokenizer, bag, None, {}, {}, rows, unigram=1.5)
    assert word_order(learns_nothing) is None


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "options",
    [
        "",
        CAUSAL,
        "--model.norm_position pre --model.feed_forward gated --model.position_embeddings rotary "
        "--model.without_bias norm qkv attention_output feed_forward",
        "--objective.name replaced_tokens --objective.generator_size 0.5",
        "--model.attention_windows 0 8 --model.norm_position pre_skip_first --execution.scan_layers false",
        "--model.shared_layers true --model.embedding_size 16",
        "--model.relative_positions buckets --training.accumulation_steps 4",
    ],
)
def test_a_network_without_faults_has_no_fail(tokenizer, options):
    found = examined(tokenizer, options)
    assert [one for one in found if one.status != "OK"] == []
    assert len(found) >= 12
