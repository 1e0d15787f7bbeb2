"""Tiny models of every kind that an exporter has to handle, with weights large enough for a mistake to show."""

import dataclasses
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np
import pytest
from builders import content, words

from bert_jax.config import (
    HeadsConfig,
    ModelConfig,
    ModelSpec,
    SentenceConfig,
    SentenceModule,
    TokenizerConfig,
    pretraining_heads,
)
from bert_jax.interop.export import export_model
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.interop.npz import write_npz

VOCABULARY = content(words(96))
MODEL = ModelConfig(
    vocab_size=101, hidden_size=32, num_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=40, hidden_dropout=0.5,
)  # fmt: skip
PLAIN = ModelSpec(model=MODEL, heads=HeadsConfig())
# As many positions as MODEL has after the offset: operations compiled for one model serve the others.
ROBERTA = dataclasses.replace(
    MODEL,
    family="roberta",
    mlm_layer="gelu",
    position_offset=2,
    max_position_embeddings=42,
    type_vocab_size=1,
    norm_epsilon=1e-5,
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
    "rotary": _model(position_embeddings="rotary", rotary_base=500.0),
    "offset": _model(position_offset=3, max_position_embeddings=43),
    "roberta": ModelSpec(model=ROBERTA, heads=HeadsConfig(mlm=True), family="roberta"),
    "roberta_sequence": ModelSpec(
        model=ROBERTA, heads=HeadsConfig(pooler=True, sequence_labels=("a", "b")), family="roberta"
    ),
    "rtd": ModelSpec(
        model=dataclasses.replace(MODEL, family="electra", pooler_layer=("gelu",), mlm_layer="gelu"),
        heads=HeadsConfig(rtd=True),
        family="electra",
    ),
    "sentence": dataclasses.replace(PLAIN, sentence=SentenceConfig(modules=(SentenceModule(kind="normalize"),))),
    "sentence_dense": ModelSpec(model=MODEL, heads=HeadsConfig(pooler=True), sentence=DENSE),
}


QUICK = {"several", "roberta", "sentence_dense"}


def mostly_slow(names: Iterable[str], quick: Collection[str] = QUICK) -> list:
    """Parameters of a test that compiles programs of its own for each: all but ``quick`` are slow tests."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


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


def source(folder: Path, spec: ModelSpec, tokenizer: bool = False) -> Path:
    """A model to export."""
    folder.mkdir()
    spec = dataclasses.replace(spec, tokenizer=TokenizerConfig() if tokenizer else None)
    weights = dataclasses.replace(random_weights(spec), tokenizer_content=VOCABULARY if tokenizer else None)
    write_npz(folder, weights)
    return folder


def exported(tmp_path, format, **options) -> list[str]:
    """Export tmp_path/source to tmp_path/target; returns what was said."""
    said: list[str] = []
    options = {"verify": False, "report": said.append, **options}
    export_model(tmp_path / "source", tmp_path / "target", format, **options)
    return said
