"""Encoders before the Transformer: packed rows, dropout, states kept between calls, generation, tasks, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import tiny_model
from inference_models import make_weights
from support import objective_of, random_batch, random_params, tiny_config, untimed, whole_and_resumed

from bert_jax.config import HeadsConfig, ModelConfig
from bert_jax.contrib.generation.generate import generate_ids
from bert_jax.inference.embed import embed_tokens
from bert_jax.inference.forward import forward
from bert_jax.inference.loaded import load, prepare
from bert_jax.model import BertModel
from bert_jax.model.dropout import TokenKey, locked_dropout
from bert_jax.training.state import initial_params

COMMON = "--model.position_embeddings none --model.type_vocab_size 0 --data.next_sentence none "
NNLM = COMMON + "--model.encoder nnlm --model.num_layers 1 --model.context_size 3 --objective.name causal_lm"
LSTM = COMMON + "--model.encoder lstm --model.num_layers 2 --model.lstm_cells 24 --objective.name causal_lm"
ELMO = (
    COMMON
    + "--model.encoder bidirectional_lstm --model.num_layers 2 --model.embedding_size 16 --model.lstm_cells 24 "
    "--model.lstm_cell_clip 3 --model.lstm_projection_clip 3 --model.lstm_skip true "
    "--objective.name bidirectional_lm --model.mlm_layer none"
)
SYSTEMS = {"nnlm": NNLM, "lstm": LSTM, "elmo": ELMO}
ENCODERS = {
    "none": {"num_layers": 0},
    "nnlm": {"num_layers": 1},
    "lstm": {"num_layers": 2},
    "bidirectional_lstm": {"num_layers": 2, "embedding_size": 16},
}


@pytest.fixture(scope="module", params=ENCODERS)
def weights(request):
    """A drawn model of each encoder, with a head for tags and one for classes."""
    heads = HeadsConfig(pooler=True, sequence_labels=("a", "b"), token_labels=("x", "y", "z"))
    given = make_weights(HeadsConfig(), positions=40)
    model = tiny_model(
        given.spec.model.vocab_size, encoder=request.param, position_embeddings="none", type_vocab_size=0,
        embedding_norm="no", pooling="mean", **{"hidden_size": 32} | ENCODERS[request.param],
    )  # fmt: skip
    spec = dataclasses.replace(given.spec, model=model, heads=heads)
    network = BertModel(model, load_execution(), heads)
    params = {name: np.asarray(x) for name, x in flat_params(random_params(network, 3), model.vocab_size).items()}
    return dataclasses.replace(given, spec=spec, params=params)


def load_execution():
    from bert_jax.config import ExecutionConfig

    return ExecutionConfig(vocab_multiple=1)


def flat_params(tree, vocab_size):
    from bert_jax.model import to_canonical

    return to_canonical(tree, vocab_size)


@pytest.mark.slow
def test_predictions_of_packed_rows_are_those_of_single_texts(weights):
    loaded = prepare(weights)
    texts = ["red green", "blue", "red red green blue green", "green blue red"]
    together, alone = loaded.predict(texts, task="token"), [loaded.predict(text, task="token") for text in texts]
    assert together == alone
    one, many = loaded.embed(texts[2], pooling="mean"), loaded.embed(texts, pooling="mean")
    assert np.abs(one - many[2]).max() < 1e-6


@pytest.mark.cases(1)
def test_hidden_states_begin_with_the_embeddings(weights):
    loaded = prepare(weights)
    states = loaded.forward({"input_ids": np.array([[5, 6, 7]])}, hidden_states=True)["hidden_states"]
    assert states.shape == (1 + loaded.config.num_layers, 1, 3, 32)
    with pytest.raises(ValueError, match="has no attention"):
        loaded.forward({"input_ids": np.array([[5]])}, attentions=True)
    table = weights.params["embeddings/word_embeddings/embedding"][[5, 6, 7]]
    assert np.array_equal(states[0, 0], np.concatenate([table] * loaded.config.directions, axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("nnlm", "lstm")), "elmo"]
)
def test_a_run_resumes_bit_for_bit(name, tmp_path):
    lines = whole_and_resumed(tiny_config(SYSTEMS[name], "--model.hidden_dropout 0.2"), tmp_path, 5)
    assert untimed(lines)
    loaded = load(tmp_path / "whole")
    assert loaded.spec.heads == HeadsConfig(mlm=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nnlm", "lstm"])
def test_tokens_with_kept_states_are_those_of_whole_rows(name, tmp_path):
    config = tiny_config(SYSTEMS[name])
    objective = objective_of(config)
    params = jax.tree.map(lambda x: 3 * x, random_params(objective.model, 1))
    from bert_jax.config import ModelSpec
    from bert_jax.inference.engine import Engine

    model = BertModel(config.model, load_execution(), HeadsConfig(mlm=True))
    canonical = flat_params(params, config.model.vocab_size)
    from flax import traverse_util

    tree = traverse_util.unflatten_dict(canonical, sep="/")
    engine = Engine(ModelSpec(model=config.model, heads=HeadsConfig(mlm=True)), model, tree, None)
    prompts = [[5, 9, 11, 30], [7]]
    rows = generate_ids(engine, prompts, max_new_tokens=6)
    apply = jax.jit(model.apply)
    for prompt, (ids, _) in zip(prompts, rows, strict=True):
        # Each token is the best after those before it, which alone the network reads.
        text = np.zeros((1, 10), np.int32)
        text[0, : len(prompt) + len(ids)] = [*prompt, *ids]
        features = {
            "input_ids": text, "token_type_ids": 0 * text, "position_ids": np.arange(10)[None],
            "sequence_ids": np.int32(np.arange(10) < len(prompt) + len(ids))[None],
        }  # fmt: skip
        logits = np.asarray(apply({"params": tree}, features).mlm_logits[0])
        assert logits[len(prompt) - 1 :][: len(ids)].argmax(-1).tolist() == list(ids)
    assert len({tuple(ids) for ids, _ in rows}) == 2


@pytest.mark.slow
def test_layers_of_elmo_are_mixed_with_its_embeddings():
    config = tiny_config(ELMO)
    heads = HeadsConfig(token_labels=("a", "b"), features="weighted_with_embeddings")
    model, batch = BertModel(config.model, load_execution(), heads), random_batch(config, rows=2)
    params = random_params(model, 0)
    weights = np.array([0.3, -1.0, 0.8], np.float32)
    assert params["feature_mix"]["weights"].shape == weights.shape
    params = {**params, "feature_mix": {"weights": weights, "gamma": np.array([1.7], np.float32)}}
    every = jax.device_get(jax.jit(model.clone(all_layers=True).apply)({"params": params}, batch))
    mixed = 1.7 * np.einsum("n,nbsh->bsh", np.exp(weights) / np.exp(weights).sum(), every.hidden_states)
    head = jax.device_get(params["token_head"])
    assert np.abs(mixed @ head["kernel"] + head["bias"] - every.token_logits).max() < 1e-5


def test_elmo_fills_a_mask_from_both_sides():
    config = tiny_config(ELMO)
    objective = objective_of(config)
    params, batch = random_params(objective.model, 0), random_batch(config, rows=2)
    plain = BertModel(config.model, config.execution, HeadsConfig(mlm=True))
    apply = jax.jit(plain.apply)
    before = np.asarray(apply({"params": params}, batch).mlm_logits)
    at = int(batch["mlm_positions"][0, 0])
    for place, changes in ((at, False), (at - 1, True), (at + 1, True)):
        ids = batch["input_ids"].copy()
        ids[0, place] = (ids[0, place] + 1) % 200
        after = np.asarray(apply({"params": params}, batch | {"input_ids": ids}).mlm_logits)
        assert np.array_equal(before[0, 0], after[0, 0]) != changes, place


def test_elmo_does_not_read_the_neighbor_sequence_of_a_row():
    config = tiny_config(ELMO)
    model = BertModel(config.model, config.execution, HeadsConfig(mlm=True))
    params = random_params(objective_of(config).model, 0)
    ids, ones = np.array([[5, 6, 7, 8, 9]], np.int32), np.ones((1, 5), np.int32)
    features = {"token_type_ids": 0 * ones, "position_ids": np.arange(5)[None]}
    apply = jax.jit(model.apply)

    def logits(ids, sequences):
        return np.asarray(
            apply({"params": params}, features | {"input_ids": ids, "sequence_ids": sequences}).mlm_logits
        )

    sequences = np.array([[1, 1, 2, 2, 2]], np.int32)
    packed = logits(ids, sequences)[0]
    first = logits(np.array([[50, 60, 7, 8, 9]], np.int32), sequences)[0]
    second = logits(np.array([[5, 6, 70, 80, 90]], np.int32), sequences)[0]
    assert np.array_equal(packed[2:], first[2:]) and not np.array_equal(packed[:2], first[:2])
    assert np.array_equal(packed[:2], second[:2]) and not np.array_equal(packed[2:], second[2:])


@pytest.mark.slow
def test_the_directions_drop_other_weights():
    config = tiny_config(
        ELMO, "--model.lstm_weight_dropout 0.5 --model.hidden_dropout 0 --model.attention_dropout 0"
    )
    model = BertModel(config.model, config.execution, HeadsConfig())
    params = jax.tree.map(lambda x: x, random_params(model, 0))
    for layer in params["encoder"].values():
        layer["backward"] = layer["forward"]
    ids = np.array([[5, 6, 7, 6, 5]], np.int32)  # the same from both sides
    ones, keys = np.ones((1, 5), np.int32), np.array([[3]], np.uint32)
    features = {
        "input_ids": ids,
        "sequence_ids": ones,
        "token_type_ids": 0 * ones,
        "position_ids": np.arange(5)[None],
    }

    def directions(key):
        x = np.asarray(jax.jit(model.apply)({"params": params}, features, key).sequence_output)[0]
        return x[:, : x.shape[1] // 2], x[::-1, x.shape[1] // 2 :]

    forward, backward = directions(None)
    assert np.allclose(forward, backward, atol=1e-6)
    forward, backward = directions(
        TokenKey.of(jax.random.key(1), jnp.asarray(keys), jnp.asarray(ones), jnp.arange(5)[None])
    )
    assert not np.allclose(forward, backward, atol=1e-3)


def test_layers_of_different_widths_are_not_read_together():
    for options in (LSTM, NNLM + " --model.embedding_size 8 --model.tied_output false"):
        config = tiny_config(options)
        model = BertModel(config.model, load_execution(), HeadsConfig())
        from bert_jax.config import ModelSpec
        from bert_jax.inference.engine import Engine

        engine = Engine(ModelSpec(model=config.model, heads=HeadsConfig()), model, random_params(model, 0), None)
        message = r"^model: its embeddings and layers have different widths \(\d"
        with pytest.raises(ValueError, match=message):
            forward(engine, {"input_ids": np.array([[5, 6]])}, hidden_states=True)
        with pytest.raises(ValueError, match=message):
            initial_params(model.clone(all_layers=True), 0)
        with pytest.raises(ValueError, match=message):
            next(embed_tokens(engine, ["x"], layers=(-1,)))


@pytest.mark.slow
def test_locked_dropout_drops_the_same_columns_at_all_tokens_of_a_sequence():
    sequences = np.array([[1, 1, 1, 2, 2, 0]], np.int32)
    keys = np.array([[11, 12]], np.uint32)
    key = TokenKey.of(jax.random.key(1), jnp.asarray(keys), jnp.asarray(sequences), jnp.arange(6)[None])
    for own in (key, jax.random.key(1)):
        kept = np.asarray(locked_dropout(jnp.ones((1, 6, 64)), 0.5, own))[0] > 0
        assert (kept[:3] == kept[0]).all() and (kept[3:5] == kept[3]).all() and 10 < kept[0].sum() < 54
    assert (np.asarray(locked_dropout(jnp.ones((1, 6, 64)), 0.5, key))[0, 0] > 0).tolist() != kept[0].tolist()


@pytest.mark.slow
def test_weights_between_states_and_words_are_dropped():
    config = tiny_config(
        LSTM, "--model.lstm_weight_dropout 0.5 --model.hidden_dropout 0 --model.attention_dropout 0"
    )
    objective, batch = objective_of(config), random_batch(config, rows=2)
    params = random_params(objective.model, 0)
    key = TokenKey.of(
        jax.random.key(2), *(jnp.asarray(batch[n]) for n in ("sequence_keys", "sequence_ids", "position_ids"))
    )
    apply = jax.jit(objective.model.apply)
    with_key, without = (np.asarray(apply({"params": params}, batch, one)) for one in (key, None))
    assert not np.allclose(with_key, without)
    # The first token has no state before it, so the weights between states do not matter.
    assert np.allclose(with_key[:, 0], without[:, 0], atol=1e-6)
    words = tiny_config(LSTM, "--model.word_dropout 0.5 --model.hidden_dropout 0 --model.attention_dropout 0")
    dropped = np.asarray(jax.jit(objective_of(words).model.apply)({"params": params}, batch, key))
    assert not np.allclose(dropped[:, 0], without[:, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder": "none", "num_layers": 1}, "model.num_layers: 1 is not allowed; allowed: 0 with encoder none"),
        ({"encoder": "nnlm", "num_layers": 1, "position_embeddings": "rotary"}, "model.position_embeddings: "),
        ({"encoder": "lstm", "attention_windows": (3,)}, r"model.attention_windows: \(3,\) is not allowed"),
        ({"encoder": "bidirectional_lstm"}, r"model.embedding_size: 0 is not allowed; allowed: 384 "),
        ({"encoder": "lstm", "embedding_size": 8}, "model.tied_output: True is not allowed; allowed: false "),
        ({"encoder": "lstm", "character_filters": (1, 2, 3)}, "model.character_filters: "),
        ({"encoder": "lstm", "max_characters": 2}, "model.max_characters: 2 is not allowed; allowed: 3 or more"),
        ({"encoder": "lstm", "character_filters": (9, 2), "max_characters": 8}, "allowed: widths up to "),
        ({"encoder": "lstm", "lstm_cells": 9, "lstm_skip": True}, "model.lstm_skip: True is not allowed"),
        ({"encoder": "lstm", "relative_positions": "alibi"}, "model.relative_positions: 'alibi' is not allowed"),
    ],
)
def test_options_that_do_not_fit_an_encoder(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.of(**options)


def test_muon_is_refused_where_it_does_not_apply():
    with pytest.raises(
        ValueError, match=r"optimizer.name: 'muon' is not allowed; allowed: another name with model"
    ):
        tiny_config(LSTM, "--optimizer.name muon")
    assert tiny_config(NNLM, "--optimizer.name muon").optimizer.name == "muon"


def test_objectives_name_the_encoder_they_need():
    with pytest.raises(ValueError, match=r"^model.encoder: 'none' is not allowed with objective.name causal_lm"):
        objective_of(tiny_config(COMMON, "--model.encoder none --model.num_layers 0 --objective.name causal_lm"))
    with pytest.raises(ValueError, match=r"^model.encoder: 'lstm' is not allowed with .* bidirectional_lm"):
        objective_of(tiny_config(LSTM, "--objective.name bidirectional_lm"))
