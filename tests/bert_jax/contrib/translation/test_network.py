"""The network: what the decoder sees, packed rows, the cache, shared parameters, loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import ExecutionConfig, HeadsConfig, ModelConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.options import extended
from bert_jax.config.task import TaskConfig
from bert_jax.contrib.translation.config import EncoderDecoderConfig, TranslationConfig, joined
from bert_jax.contrib.translation.records import pairs
from bert_jax.contrib.translation.task import TranslationTask
from bert_jax.inference.batching import Shape, pack_batch
from bert_jax.model import BertModel
from bert_jax.model.canonical import abstract_params
from bert_jax.model.dropout import TokenKey
from bert_jax.tokenization import WordPieceTokenizer
from bert_jax.training.state import initial_params

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
SMALL = {"vocab_size": len(PIECES), "hidden_size": 16, "num_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 24, "max_position_embeddings": 40, "initializer_range": 0.3}


def network(**options):
    return EncoderDecoderConfig(**{**SMALL, "encoder": "encoder_decoder", **options})


def task(beams=1, **options):
    search = TranslationConfig(beams=beams, **options)
    config = extended(FinetuneConfig)(
        task=TaskConfig(kind="translation", max_length=24), model=network(), translation=search
    )
    return TranslationTask(config, WordPieceTokenizer(PIECES, lower_case=False))


def model_of(config, seed=1):
    model = BertModel(config, ExecutionConfig(), HeadsConfig())
    return model, initial_params(model, seed)


def batch(task, texts, rows, training=False, length=32, units=4):
    units_ = task.featurize(pairs(*texts), training=training)
    packed = pack_batch(
        units_, rows, Shape(len(rows), length, units), pad_id=0, targets=task.targets,
        keys=range(len(units_)) if training else None,
    )  # fmt: skip
    return packed


TEXTS = (["a b c", "d e f g h i", "j"], ["k l m n", "o", "p q r s t"])


def test_a_token_sees_the_source_of_its_pair_and_earlier_tokens_only():
    own, (model, params) = task(), model_of(network())
    features = batch(own, TEXTS, [[0, 1], [2]], training=True).features
    logits = jax.jit(lambda features: model.apply({"params": params}, features).mlm_logits)
    base = logits(features)
    first, second = features["sequence_ids"][0] == 1, features["sequence_ids"][0] == 2
    later = {**features, "target_ids": features["target_ids"].copy()}
    later["target_ids"][0, 3] = 20
    changed = np.abs(np.asarray(logits(later) - base)).max(axis=-1)
    assert changed[0, :3].max() == 0 and changed[0, 3:5].min() > 1e-3 and changed[0, second].max() == 0
    other = {**features, "input_ids": features["input_ids"].copy()}
    other["input_ids"][0, 1] = 20
    changed = np.abs(np.asarray(logits(other) - base)).max(axis=-1)
    assert changed[0, first].min() > 1e-4 and changed[0, second].max() == 0 and changed[1].max() == 0
    # The second unit is longer in its source, the third in its target: padding of a source is not seen.
    padding = {**features, "input_ids": features["input_ids"].copy()}
    padding["input_ids"][(features["source_mask"] == 0) & (features["sequence_ids"] > 0)] = 9
    assert np.array_equal(logits(padding), base)


@pytest.mark.slow
def test_packed_pairs_have_the_logits_of_single_ones():
    own, (model, params) = task(), model_of(network())
    packed = batch(own, TEXTS, [[2, 0, 1]], training=True)
    alone = batch(own, TEXTS, [[0], [1], [2]], training=True)
    both = [model.apply({"params": params}, one.features).mlm_logits for one in (packed, alone)]
    for number, row, _, first in packed.places:
        length = int((packed.features["sequence_ids"][row] == packed.features["sequence_ids"][row, first]).sum())
        np.testing.assert_allclose(both[0][row, first : first + length], both[1][number, :length], atol=2e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "options", [{"shared": True}, {}, {"decoder": ("hidden_size=8", "num_layers=1")}, {"norm_position": "pre"}]
)
def test_the_search_with_a_cache_finds_what_whole_passes_find(options):
    own, (model, params) = task(), model_of(network(**options))
    packed = batch(own, TEXTS, [[0, 1], [2]])
    run = jax.jit(lambda features: model.apply({"params": params}, features))
    found = np.asarray(run(packed.features).translations)
    margins, texts = [], set()
    for number, row, slot, _ in packed.places:
        ids = [int(i) for i in found[row, slot] if i >= 0]
        limit = int(packed.features["most_tokens"][row, slot])
        ids += [own.tokenizer.end_id] if len(ids) < limit else []
        unit = own.featurize(pairs([TEXTS[0][number]], ["a " * 30]), training=True)
        features = pack_batch(unit, [[0]], Shape(1, 32, 1), pad_id=0, targets=own.targets, keys=[0]).features
        features["target_ids"][0, : len(ids)] = [own.tokenizer.cls_id, *ids[:-1]]
        logits = np.asarray(run(features).mlm_logits[0, : len(ids)])
        assert logits.argmax(axis=-1).tolist() == ids
        margins += np.diff(np.sort(logits)[:, -2:]).ravel().tolist()
        texts.add(tuple(ids))
    assert min(margins) > 1e-5 and len(texts) == 3


@pytest.mark.slow
def test_shared_parameters_are_those_of_the_encoder():
    plain, shared = (abstract_params(BertModel(network(shared=one), ExecutionConfig(), HeadsConfig()))
                     for one in (False, True))  # fmt: skip
    assert set(shared["encoder"]["target"]) == {"layer_0", "layer_1", "mlm_head"}
    assert set(shared["encoder"]["target"]["layer_0"]) == {"cross_attention"}
    assert "embeddings" in plain["encoder"]["target"]
    model, params = model_of(network(shared=True))
    features = batch(task(), TEXTS, [[0, 1, 2]], training=True).features
    grads = jax.grad(lambda params: model.apply({"params": params}, features).mlm_logits[0, 0].std())(params)
    table = grads["encoder"]["source"]["embeddings"]["word_embeddings"]["embedding"]
    assert np.abs(table[2]).max() > 0  # the start token of the decoder


@pytest.mark.slow
def test_a_shared_network_computes_what_its_copies_compute():
    shared, params = model_of(network(shared=True))
    plain = BertModel(network(), ExecutionConfig(), HeadsConfig())
    source, own = params["encoder"]["source"], params["encoder"]["target"]
    layers = {f"layer_{i}": {**source["encoder"][f"layer_{i}"], **own[f"layer_{i}"]} for i in range(2)}
    target = {"embeddings": source["embeddings"], "mlm_head": own["mlm_head"], **layers}
    features = batch(task(), TEXTS, [[0, 1, 2]]).features
    one = shared.apply({"params": params}, features)
    other = plain.apply({"params": {"encoder": {"source": source, "target": target}}}, features)
    assert np.array_equal(one.mlm_logits, other.mlm_logits)
    assert np.array_equal(one.translations, other.translations)


@pytest.mark.slow
def test_the_layers_in_a_loop_compute_the_same():
    config = network(shared=True)
    model, params = model_of(config)
    loop = BertModel(config, ExecutionConfig(scan_layers=True), HeadsConfig())
    features = batch(task(), TEXTS, [[0, 1, 2]], training=True).features
    ours = model.apply({"params": params}, features).mlm_logits
    np.testing.assert_allclose(
        loop.apply({"params": initial_params(loop, 1)}, features).mlm_logits, ours, atol=1e-5
    )


def test_the_loss_is_cross_entropy_smoothed_over_the_vocabulary():
    own, (model, params) = task(label_smoothing=0.1), model_of(network())
    features = batch(own, TEXTS, [[0, 1, 2]], training=True).features
    output = model.apply({"params": params}, features)
    sums, total = own.loss(output, features, axis=None), float(own.denominators(features)["loss"])
    logits = np.asarray(output.mlm_logits, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    labels = [[*own.tokenizer.encode(text), own.tokenizer.end_id] for text in TEXTS[1]]
    assert total == sum(map(len, labels)) == 4 + 1 + 5 + 3
    nll, smooth = 0.0, 0.0
    for number, target in enumerate(labels):
        first = int(np.argmax(features["sequence_ids"][0] == number + 1))
        for place, label in enumerate(target):
            nll -= log_p[0, first + place, label]
            smooth -= 0.9 * log_p[0, first + place, label] + 0.1 * log_p[0, first + place].mean()
    assert abs(float(sums["nll"][0]) - nll) < 1e-3
    assert abs(float(sums["loss"][0]) - smooth) < 1e-3


@pytest.mark.slow
def test_dropout_differs_between_encoder_and_decoder_and_is_absent_without_a_key():
    config = dataclasses.replace(network(), hidden_dropout=0.5)
    model, params = model_of(config)
    features = {
        name: jnp.asarray(x) for name, x in batch(task(), TEXTS, [[0, 1, 2]], training=True).features.items()
    }
    keys = [
        TokenKey.of(jax.random.key(i), *(features[n] for n in ("sequence_keys", "sequence_ids", "position_ids")))
        for i in (0, 0, 1)
    ]
    one, again, other = (model.apply({"params": params}, features, key).mlm_logits for key in keys)
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    assert not np.array_equal(model.apply({"params": params}, features).mlm_logits, one)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder": ("num_layers=x",)}, "num_layers=x"),
        ({"decoder": ("layers=2",)}, "NAME=VALUE"),
        ({"decoder": ("num_layers=2",)}, "nothing for this decoder"),
        ({"decoder": ("hidden_size=8",), "shared": True}, "another hidden_size"),
        ({"decoder": ("attention_windows=4",)}, "attention_windows"),
        ({"source_vocab_size": 99}, "vocab_size"),
        ({"attention": "causal"}, "bidirectional"),
    ],
)
def test_other_networks_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        network(**options)


def test_networks_are_joined_and_taken_apart():
    source = ModelConfig(**{**SMALL, "vocab_size": 20})
    target = ModelConfig(**{**SMALL, "activation": "relu", "attention": "causal", "num_layers": 3})
    model = joined(source, target)
    assert model.decoder == ("num_layers=3", "activation=relu") and model.source_vocab_size == 20
    assert (model.source, model.target) == (source, target)
    model = joined(target := dataclasses.replace(target, attention="bidirectional"), source)
    assert model.decoder[0] == "vocab_size=20" and (model.source, model.target.vocab_size) == (target, 20)
