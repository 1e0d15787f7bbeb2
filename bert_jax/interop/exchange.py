"""The form in which weights travel between formats: a spec, canonical float32 arrays, a tokenizer file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, SentenceConfig


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What a reader is told beside the path."""

    # Case of a vocabulary whose folder does not say it; None: guessed from the pieces, and said.
    lower_case: bool | None = None
    # Names of the task head's classes, in id order; None: as the source names them.
    labels: tuple[str, ...] | None = None
    # Go on where config and tensors contradict each other, and say so.
    allow_mismatch: bool = False
    # The moving average of the parameters (True), the parameters themselves (False), or what the format gives by
    # itself (None: of a pretraining run the average where it has one, else the parameters).
    ema: bool | None = None
    # Feed-forward activation where the source leaves it open (a TF1 checkpoint's "gelu"); None: as the reader says.
    activation: Literal["gelu", "gelu_tanh"] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelBundle:
    """A model in exchange form. Every reader returns one, every writer takes one."""

    spec: ModelSpec
    # Canonical name -> array. Exactly the names of parameter_shapes(spec). float32.
    params: Mapping[str, np.ndarray]
    # Content of the file that spec.tokenizer names; None where the source has no tokenizer.
    tokenizer_content: bytes | None = None
    # What the reader has to say, a line each: dtypes raised, names left out, heads that are absent.
    notes: tuple[str, ...] = ()
    # Where it comes from, for the model card: JSON-able ("format", "name", "recipe", "metrics", ...).
    origin: Mapping[str, Any] = field(default_factory=dict)


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name and shape of every parameter of a model, in a fixed order.

    Kernels are [in, out]; see docs/design/parameters.md.
    """
    return {
        **_encoder_shapes(spec.model),
        **_head_shapes(spec.model, spec.heads, _embedding_width(spec.model, spec.sentence)),
        **_sentence_shapes(spec.model, spec.sentence),
    }


def _dense(name: str, inputs: int, outputs: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}/kernel": (inputs, outputs), **({f"{name}/bias": (outputs,)} if bias else {})}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/scale": (width,), f"{name}/bias": (width,)}


def _encoder_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    width = model.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings/word_embeddings/embedding": (model.vocab_size, width),
        "embeddings/token_type_embeddings/embedding": (model.type_vocab_size, width),
    }
    if model.position_embeddings == "learned":
        shapes["embeddings/position_embeddings/embedding"] = (model.max_position_embeddings, width)
    if model.norm_position == "post":
        shapes |= _norm("embeddings/layer_norm", width)
    for i in range(model.num_layers):
        layer = f"encoder/layer_{i}"
        for name in ("query", "key", "value", "output"):
            shapes |= _dense(f"{layer}/attention/{name}", width, width)
        shapes |= _norm(f"{layer}/attention/layer_norm", width)
        shapes |= _dense(f"{layer}/feed_forward/intermediate", width, model.intermediate_size)
        shapes |= _dense(f"{layer}/feed_forward/output", model.intermediate_size, width)
        shapes |= _norm(f"{layer}/feed_forward/layer_norm", width)
    if model.norm_position == "pre":
        shapes |= _norm("encoder/final_layer_norm", width)
    return shapes


def _head_shapes(model: ModelConfig, heads: HeadsConfig, pooled: int) -> dict[str, tuple[int, ...]]:
    width, features = model.hidden_size, heads.feature_width(model)
    shapes: dict[str, tuple[int, ...]] = {}
    if heads.features.startswith("weighted"):
        count = heads.feature_count(model)
        shapes |= {"feature_mix/weights": (count,), "feature_mix/gamma": (1,)}
    if heads.pooler:
        shapes |= _dense("pooler", features, width)
    if heads.mlm:
        shapes |= _dense("mlm_head/transform", width, width) | _norm("mlm_head/layer_norm", width)
        shapes["mlm_head/output_bias"] = (model.vocab_size,)
    inputs = {"token": features, "span": features}
    if heads.bilstm:
        inputs["token"] = 2 * heads.bilstm
        for layer, before in enumerate((features, 2 * heads.bilstm)):
            for name in (f"bilstm/forward_{layer}", f"bilstm/backward_{layer}"):
                shapes |= _dense(name, before, 4 * heads.bilstm)
                shapes[f"{name}_recurrent"] = (heads.bilstm, 4 * heads.bilstm)
    for name, size in heads.output_sizes().items():
        shapes |= _dense(f"{name}_head", inputs.get(name, width), size)
    if heads.crf:
        tags = len(heads.token_labels)
        shapes |= {"crf/transitions": (tags, tags), "crf/start": (tags,), "crf/end": (tags,)}
    if heads.pair_labels:
        before = 3 * pooled
        if heads.pair_hidden:
            shapes |= _dense("pair_head/hidden", before, heads.pair_hidden)
        shapes |= _dense("pair_head/output", heads.pair_hidden or before, len(heads.pair_labels))
    return shapes


def _embedding_width(model: ModelConfig, sentence: SentenceConfig | None) -> int:
    if sentence is None:
        return model.hidden_size
    dense = [module.features for module in sentence.modules if module.kind == "dense"]
    return dense[-1] if dense else model.hidden_size * len(sentence.pooling)


def _sentence_shapes(model: ModelConfig, sentence: SentenceConfig | None) -> dict[str, tuple[int, ...]]:
    if sentence is None:
        return {}
    shapes: dict[str, tuple[int, ...]] = {}
    width = model.hidden_size * len(sentence.pooling)
    dense = [module for module in sentence.modules if module.kind == "dense"]
    for i, module in enumerate(dense):
        shapes |= _dense(f"sentence_head/dense_{i}", width, module.features, module.bias)
        width = module.features
    return shapes


def check_shapes(spec: ModelSpec, params: Mapping[str, np.ndarray], where: str | Path) -> None:
    """Raise ``ValueError`` with every missing, left-over or misshapen canonical parameter."""
    expected = parameter_shapes(spec)
    problems = [f"missing {name}" for name in expected if name not in params]
    problems += [f"left over {name}" for name in params if name not in expected]
    problems += [
        f"{name} has shape {tuple(params[name].shape)}, expected {shape}"
        for name, shape in expected.items()
        if name in params and tuple(params[name].shape) != shape
    ]
    if problems:
        raise ValueError(f"{where}: parameters do not fit the description: {'; '.join(problems)}")
