"""Tiny models of every kind that an exporter has to handle, with weights large enough for a mistake to show."""

import dataclasses

import numpy as np

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, SentenceConfig, SentenceModule, pretraining_heads
from bert_jax.interop.exchange import ModelBundle, parameter_shapes

MODEL = ModelConfig(
    vocab_size=101, hidden_size=32, num_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=40, hidden_dropout=0.5,
)  # fmt: skip
PLAIN = ModelSpec(model=MODEL, heads=HeadsConfig())
# As many positions as MODEL has after the offset: operations compiled for one model serve the others.
ROBERTA = dataclasses.replace(
    MODEL, position_offset=2, max_position_embeddings=42, type_vocab_size=1, norm_epsilon=1e-5
)
DENSE = SentenceConfig(
    pooling=("cls", "max", "mean"),
    modules=(
        SentenceModule(kind="dense", features=24, activation="tanh"),
        SentenceModule(kind="dense", features=20, activation="gelu", bias=False),
        SentenceModule(kind="dense", features=16, activation="sigmoid"),
        SentenceModule(kind="normalize"),
    ),
)


def _heads(**values) -> ModelSpec:
    return ModelSpec(model=MODEL, heads=HeadsConfig(**values))


def _model(**values) -> ModelSpec:
    return ModelSpec(model=dataclasses.replace(MODEL, **values), heads=HeadsConfig(mlm=True))


SPECS = {
    "plain": PLAIN,
    "pooler": _heads(pooler=True),
    "mlm": _heads(mlm=True),
    "pretraining": ModelSpec(model=MODEL, heads=pretraining_heads(True)),
    "nsp": _heads(pooler=True, nsp=True),
    "sequence": _heads(pooler=True, sequence_labels=("no", "yes", "maybe")),
    "regression": _heads(pooler=True, sequence_labels=("score",), problem="regression"),
    "token": _heads(token_labels=("O", "B-X", "I-X")),
    "span": _heads(span=True),
    "choice": _heads(pooler=True, choice=True),
    "several": _heads(pooler=True, mlm=True, sequence_labels=("a", "b"), token_labels=("O", "X"), span=True),
    "gelu_tanh": _model(activation="gelu_tanh"),
    "gelu_sigmoid": _model(activation="gelu_sigmoid"),
    "relu": _model(activation="relu"),
    "pre": _model(norm_position="pre"),
    "sinusoidal": _model(position_embeddings="sinusoidal"),
    "offset": _model(position_offset=3, max_position_embeddings=43),
    "roberta": ModelSpec(model=ROBERTA, heads=HeadsConfig(mlm=True), family="roberta"),
    "roberta_sequence": ModelSpec(
        model=ROBERTA, heads=HeadsConfig(pooler=True, sequence_labels=("a", "b")), family="roberta"
    ),
    "sentence": dataclasses.replace(PLAIN, sentence=SentenceConfig(modules=(SentenceModule(kind="normalize"),))),
    "sentence_dense": ModelSpec(model=MODEL, heads=HeadsConfig(pooler=True), sentence=DENSE),
}


def random_weights(spec: ModelSpec, seed: int = 0) -> ModelBundle:
    """Kernels that keep the variance, biases and LayerNorms that do something."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in parameter_shapes(spec).items():
        values = rng.standard_normal(shape, np.float32)
        if name.endswith("kernel"):
            values /= np.float32(np.sqrt(shape[0]))
        else:
            values *= np.float32(0.3)
        params[name] = values + np.float32(1) if name.endswith("scale") else values
    return ModelBundle(spec=spec, params=params)
