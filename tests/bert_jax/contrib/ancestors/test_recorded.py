"""NNLM, LSTM, ELMo and GloVe against torch: losses, gradients of all parameters, states of all layers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from golden.ancestor_cases import (
    COUNT_POWER,
    ENTRIES,
    LARGEST_COUNT,
    MODELS,
    SEQUENCE_IDS,
    VECTORS,
    characters,
    token_ids,
    values,
    weights,
)
from support import objective_of, sums_of, tiny_config

from bert_jax.batch import feature_shapes
from bert_jax.config import ExecutionConfig, HeadsConfig, ModelConfig, PretrainConfig
from bert_jax.config.objective import ObjectiveConfig
from bert_jax.config.pretrain import DataConfig
from bert_jax.contrib.ancestors.encoders.characters import CHARACTER_IDS, STORED_OFFSET
from bert_jax.contrib.ancestors.objectives.bidirectional_lm import BidirectionalLm
from bert_jax.contrib.ancestors.objectives.glove import Glove
from bert_jax.model import BertModel, from_canonical, to_canonical
from bert_jax.model.canonical import abstract_params
from bert_jax.objectives.causal_lm import CausalLm

OBJECTIVES = {"nnlm": CausalLm, "lstm": CausalLm, "elmo": BidirectionalLm}
with np.load(Path(__file__).parents[3] / "golden" / "fixtures" / "ancestors.npz") as file:
    RECORDED = dict(file)


def batch_of(ids: np.ndarray) -> dict[str, np.ndarray]:
    batch = {name: np.zeros(shape, dtype) for name, (shape, dtype) in feature_shapes(*ids.shape, 2, 2).items()}
    return batch | {"input_ids": ids, "sequence_ids": SEQUENCE_IDS}


def config_of(name: str) -> PretrainConfig:
    return PretrainConfig(
        model=ModelConfig.of(**MODELS[name]),
        data=DataConfig(seq_length=9, next_sentence="none"),
        objective=ObjectiveConfig(name="bidirectional_lm" if name == "elmo" else "causal_lm"),
    )


def params_of(name: str) -> dict[str, np.ndarray]:
    given = weights(name)
    return given | ({CHARACTER_IDS: characters() - float(STORED_OFFSET)} if name == "elmo" else {})


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_are_those_of_torch(name: str):
    objective = OBJECTIVES[name](config_of(name), None)
    like = nn.unbox(abstract_params(objective.model))
    params, batch = from_canonical(params_of(name), like, 23), batch_of(token_ids())

    def loss(params):
        sums, under = sums_of(objective, params, batch), objective.denominators(batch)
        return sum(sums[key][0] / under[key] for key in under)

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    assert abs(float(value) - RECORDED[f"{name}/loss"]) < 1e-5
    ours = {key: np.asarray(x) for key, x in to_canonical(gradients, 23).items()}
    if name == "elmo":
        assert not ours.pop(CHARACTER_IDS).any()
    assert {f"{name}/gradient/{key}" for key in ours} == {key for key in RECORDED if key.startswith(f"{name}/grad")}
    for key, gradient in ours.items():
        theirs = RECORDED[f"{name}/gradient/{key}"]
        assert np.abs(gradient - theirs).max() < 1e-5, key
        assert np.abs(theirs).max() > 1e-4, key


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_states_are_those_of_torch(name: str):
    # The layers of lstm and nnlm have other widths than their inputs, so only the last states are an output.
    every = name == "elmo"
    model = BertModel(
        ModelConfig.of(**MODELS[name]), ExecutionConfig(vocab_multiple=1), HeadsConfig(), all_layers=every
    )
    encoder = {key: value for key, value in params_of(name).items() if not key.startswith("mlm_head")}
    params = from_canonical(encoder, nn.unbox(abstract_params(model)), 23)
    output = model.apply({"params": params}, batch_of(token_ids()))
    layers = len([key for key in RECORDED if key.startswith(f"{name}/layer_")])
    found = output.hidden_states[1:] if every else [output.sequence_output]
    for i, states in zip(range(layers)[-len(found) :], found, strict=True):
        difference = np.abs(np.asarray(states) - RECORDED[f"{name}/layer_{i}"])
        assert difference[SEQUENCE_IDS > 0].max() < 1e-5, i


def test_loss_of_glove_is_that_of_torch():
    config = tiny_config(
        "--objective.name glove --model.encoder none --model.num_layers 0 --model.hidden_size 6 "
        "--model.position_embeddings none --model.type_vocab_size 0 --model.embedding_norm no "
        f"--model.vocab_size 23 --data.next_sentence none --objective.largest_count {LARGEST_COUNT} "
        f"--objective.count_power {COUNT_POWER} --execution.vocab_multiple 1"
    )
    objective = objective_of(config)
    assert isinstance(objective, Glove)
    names = {
        "words": "embeddings/word_embeddings/embedding", "contexts": "context_embeddings/embedding",
        "word_bias": "vocabulary_bias", "context_bias": "context_embeddings/vocabulary_bias",
    }  # fmt: skip
    given = {names[name]: values(f"glove/{name}", shape) for name, shape in VECTORS.items()}
    params = from_canonical(given, nn.unbox(abstract_params(objective.model)), 23)
    entries = (jnp.asarray(part, dtype) for part, dtype in zip(ENTRIES, (int, int, float), strict=True))
    first, second, counts = entries

    def loss(params):
        return jnp.sum(objective.entry_losses(params, batch_of(token_ids()), first, second, counts))

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    assert abs(float(value) - RECORDED["glove/loss"]) < 1e-6 * abs(RECORDED["glove/loss"])
    ours = to_canonical(gradients, 23)
    for name, key in names.items():
        theirs = RECORDED[f"glove/gradient/{name}"]
        assert np.abs(np.asarray(ours[key]) - theirs).max() < 1e-5 * np.abs(theirs).max(), name
