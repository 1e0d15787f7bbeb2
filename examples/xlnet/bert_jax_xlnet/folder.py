"""Folders of XLNet of transformers: ``config.json``, weights, and ``spiece.model``, the SentencePiece model.

Names and layouts of the tensors are those of ``XLNetModel``, ``XLNetLMHeadModel`` and
``XLNetForSequenceClassification``. Special pieces are renamed in the SentencePiece model: this library calls
``<cls>`` [CLS], and so on. Their ids stay the same.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.interop.hf.config_json import CONFIG_FILE, read_config
from bert_jax.interop.hf.tensors import open_tensors
from bert_jax.interop.hf.write import WEIGHTS_FILE, write_json, write_safetensors
from bert_jax.interop.model_bundle import ModelBundle, check_shapes, parameter_shapes
from bert_jax.interop.stored_model import StoredName, listed, read_float32, require_finite
from bert_jax.io.protobuf import read_fields, write_varint
from bert_jax.io.untrusted_folder import inside, needed, read_small
from bert_jax.tokenization import build_tokenizer
from bert_jax_xlnet.config import XlnetConfig, xlnet_config

MODEL_TYPE, PIECES_FILE = "xlnet", "spiece.model"
# Pieces of XLNet -> pieces of this library.
PIECES = {"<pad>": "[PAD]", "<unk>": "[UNK]", "<cls>": "[CLS]", "<sep>": "[SEP]", "<mask>": "[MASK]"}
# Names of activations in config.json.
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu"}
# Key of config.json -> field of the section model.
_SIZES = {
    "vocab_size": "vocab_size", "d_model": "hidden_size", "n_layer": "num_layers", "n_head": "num_attention_heads",
    "d_inner": "intermediate_size",
}  # fmt: skip
# Key -> the only values with which the network is the one of this package.
_REQUIRED: dict[str, tuple[Any, ...]] = {"attn_type": ("bi",), "bi_data": (False,)}
# Keys that only the class with a sequence head reads -> the only values of this package.
_SUMMARY: dict[str, Any] = {"summary_type": "last", "summary_use_proj": True, "summary_activation": "tanh"}
_LARGEST_PIECES = 16 << 20
_TIED = "lm_loss.weight"


def is_folder(path: Path) -> bool:
    """Return True if ``path`` is a folder of XLNet of transformers."""
    file = path / CONFIG_FILE
    return file.is_file() and read_config(file).get("model_type") == MODEL_TYPE


# ------------------------------------------------------------------ tensors


def _names(model: XlnetConfig, heads: HeadsConfig) -> dict[str, tuple[str, bool, tuple[int, ...]]]:
    """Return canonical name -> (name of the tensor, whether it is the transpose, its shape)."""
    width, inner, count, size = (
        model.hidden_size,
        model.intermediate_size,
        model.num_attention_heads,
        model.head_size,
    )
    start = "transformer." if heads.mlm or heads.sequence_labels else ""
    split, vector = (width, count, size), (width,)
    names: dict[str, tuple[str, bool, tuple[int, ...]]] = {
        "embeddings/word_embeddings/embedding": (f"{start}word_embedding.weight", False, (model.vocab_size, width)),
        "encoder/mask_embedding": (f"{start}mask_emb", False, (1, 1, width)),
    }
    for i in range(model.num_layers):
        ours, theirs = f"encoder/layer_{i}", f"{start}layer.{i}"
        for name, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("distance", "r"), ("output", "o")):
            names[f"{ours}/attention/{name}/kernel"] = f"{theirs}.rel_attn.{letter}", name == "output", split
        for name, letter in (("content", "w"), ("distance", "r"), ("segment", "s")):
            names[f"{ours}/attention/{name}_bias"] = f"{theirs}.rel_attn.r_{letter}_bias", False, (count, size)
        names[f"{ours}/attention/segment_embeddings"] = f"{theirs}.rel_attn.seg_embed", False, (2, count, size)
        for block, module in (("attention", "rel_attn"), ("feed_forward", "ff")):
            names[f"{ours}/{block}/layer_norm/scale"] = f"{theirs}.{module}.layer_norm.weight", False, vector
            names[f"{ours}/{block}/layer_norm/bias"] = f"{theirs}.{module}.layer_norm.bias", False, vector
        for name, number, shape in (("intermediate", 1, (inner, width)), ("output", 2, (width, inner))):
            module = f"{theirs}.ff.layer_{number}"
            names[f"{ours}/feed_forward/{name}/kernel"] = f"{module}.weight", True, shape
            names[f"{ours}/feed_forward/{name}/bias"] = f"{module}.bias", False, shape[:1]
    if heads.mlm:
        names["mlm_head/output_bias"] = "lm_loss.bias", False, (model.vocab_size,)
        if not model.tied_output:
            names["mlm_head/output_embeddings/embedding"] = _TIED, False, (model.vocab_size, width)
    if heads.sequence_labels:
        labels = len(heads.sequence_labels)
        for name, module, rows in (
            ("pooler", "sequence_summary.summary", width), ("sequence_head", "logits_proj", labels),
        ):  # fmt: skip
            names[f"{name}/kernel"] = f"{module}.weight", True, (rows, width)
            names[f"{name}/bias"] = f"{module}.bias", False, (rows,)
    return names


def to_tensors(spec: ModelSpec, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of transformers by name for the canonical ``params``."""
    assert isinstance(spec.model, XlnetConfig)
    return {
        theirs: (params[ours].T if is_turned else params[ours]).reshape(shape)
        for ours, (theirs, is_turned, shape) in _names(spec.model, spec.heads).items()
    }


def _from_tensor(values: np.ndarray, is_turned: bool, shape: tuple[int, ...]) -> np.ndarray:
    """Return a canonical parameter of ``shape`` from the tensor ``values``."""
    whole = values.reshape(shape[::-1]).T if is_turned else values.reshape(shape)
    return np.ascontiguousarray(whole, np.float32)


# ------------------------------------------------------------------ SentencePiece


def renamed(model: bytes, names: Mapping[str, str], where: str) -> bytes:
    """Return the SentencePiece ``model`` in which the pieces in ``names`` have other names. Raises ``ValueError``,
    which begins with ``where``, for other content."""
    try:
        parts = []
        for tag, start, end in read_fields(model, 0, len(model)):
            value = model[start:end]
            if tag == _PIECE:
                value = b"".join(
                    _field(inner, _renamed(value[first:last], names) if inner == _TEXT else value[first:last])
                    for inner, first, last in read_fields(value, 0, len(value))
                )
            parts.append(_field(tag, value))
        return b"".join(parts)
    except (ValueError, IndexError):
        raise ValueError(f"{where}: not a SentencePiece model; copy the file again") from None


# Tags of the fields "pieces" of a model and "piece" of an entry, which are byte strings.
_PIECE = _TEXT = 1 << 3 | 2


def _field(tag: int, value: bytes) -> bytes:
    return write_varint(tag) + (write_varint(len(value)) if tag & 7 == 2 else b"") + value


def _renamed(piece: bytes, names: Mapping[str, str]) -> bytes:
    text = piece.decode()
    return names.get(text, text).encode()


# ------------------------------------------------------------------ reading


def read_folder(path: Path) -> ModelBundle:
    """Read a folder of XLNet: the encoder, and the heads whose tensors are present.

    Raises ``ValueError`` with one line for another type of model, settings that this package does not have,
    damaged files, and missing, unexpected and wrong tensors.
    """
    file = needed(path, CONFIG_FILE)
    content = read_config(file)
    if content.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{file}: model_type is {content.get('model_type')!r}; allowed: {MODEL_TYPE!r}")
    source, tensors = open_tensors(path)
    heads = HeadsConfig(
        mlm="lm_loss.bias" in tensors,
        pooler="logits_proj.bias" in tensors,
        sequence_labels=_labels(content, tensors["logits_proj.bias"].shape)
        if "logits_proj.bias" in tensors
        else (),
    )
    is_tied = bool(content.get("tie_word_embeddings", True)) or _TIED not in tensors
    model = _model(content, file, is_tied, heads)
    spec = ModelSpec(model=model, heads=heads)
    names = _names(model, heads)
    ignored = {_TIED} if is_tied and heads.mlm else set()
    expected = {theirs: shape for theirs, _, shape in names.values()}
    problems = [f"missing {name}" for name in expected if name not in tensors]
    problems += [f"unexpected {name[:80]}" for name in tensors if name not in expected and name not in ignored]
    problems += [
        f"{name} has the shape {tensors[name].shape}, expected {shape}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if problems:
        raise ValueError(f"{path / source}: the tensors do not match {CONFIG_FILE}: {listed(problems)}")
    shapes = parameter_shapes(spec)
    params = {
        ours: _from_tensor(read_float32(tensors[names[ours][0]]), names[ours][1], shape)
        for ours, shape in shapes.items()
    }
    require_finite(params, path)
    tokenizer, pieces, notes = _tokenizer(path, model.vocab_size)
    return ModelBundle(
        spec=ModelSpec(model=model, heads=heads, tokenizer=tokenizer), params=params, tokenizer_content=pieces,
        notes=notes, origin={"format": "XLNet folder", "name": path.absolute().name},
    )  # fmt: skip


def _labels(content: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[str, ...]:
    count = shape[0] if shape else 0
    stated = content.get("id2label")
    names = {str(key): name for key, name in stated.items()} if isinstance(stated, dict) else {}
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))


def _model(content: Mapping[str, Any], file: Path, is_tied: bool, heads: HeadsConfig) -> XlnetConfig:
    """Return the section ``model`` that ``config.json`` describes. Raises ``ValueError`` for other values."""
    required = _REQUIRED | ({key: (value,) for key, value in _SUMMARY.items()} if heads.sequence_labels else {})
    for key, allowed in required.items():
        if content.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{file}: {key} is {content[key]!r}; allowed: {allowed[0]!r}")
    activation = content.get("ff_activation", "gelu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{file}: ff_activation is {activation!r}; allowed: {', '.join(_ACTIVATIONS)}")
    try:
        rate = float(content.get("dropout", 0.1))
        return xlnet_config(
            **{ours: content[theirs] for theirs, ours in _SIZES.items()},
            activation=_ACTIVATIONS[activation], hidden_dropout=rate, attention_dropout=rate,
            norm_epsilon=float(content.get("layer_norm_eps", 1e-12)),
            initializer_range=float(content.get("initializer_range", 0.02)),
            memory_length=content.get("mem_len") or 0, largest_distance=max(content.get("clamp_len", -1), 0),
            tied_output=is_tied,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: not the description of an XLNet ({error})") from None


def _tokenizer(path: Path, rows: int) -> tuple[TokenizerConfig | None, bytes | None, tuple[str, ...]]:
    file = inside(path, PIECES_FILE)
    if file is None:
        return None, None, (f"the folder has no {PIECES_FILE}: the inputs of the model are ids",)
    content = renamed(read_small(file, "a SentencePiece model", _LARGEST_PIECES), PIECES, str(file))
    tokenizer = build_tokenizer(TokenizerConfig(file="tokenizer.model"), content, str(file))
    if tokenizer.vocab_size > rows:
        problem = f"{tokenizer.vocab_size} pieces, but the model has {rows} word embeddings"
        raise ValueError(f"{file}: {problem}; use the vocabulary of this model")
    return TokenizerConfig(file="tokenizer.model", lower_case=tokenizer.lower_case), content, ()


# ------------------------------------------------------------------ writing


def write_folder(folder: Path, weights: ModelBundle) -> list[str]:
    """Write a folder that the class of transformers for the heads of ``weights`` loads; return notes.

    ``folder`` must exist and be empty. Raises ``ValueError`` for another encoder, and for heads that no class has.
    """
    spec, model, heads = weights.spec, weights.spec.model, weights.spec.heads
    if not isinstance(model, XlnetConfig):
        raise ValueError(f"model.encoder: {model.encoder!r} is not allowed in a folder of XLNet; allowed: xlnet")
    name, fits = class_of(heads), spec.sentence is None and set(heads.present()) <= {"pooler", "mlm", "sequence"}
    if not fits or (heads.mlm and heads.sequence_labels) or heads.problem != "single_label":
        what = ", ".join(heads.present()) or "the sentence head"
        raise ValueError(
            f"heads: no class of XLNet has {what}; allowed: mlm, or one sequence head of single labels"
        )
    check_shapes(spec, weights.params, folder)
    write_json(folder / CONFIG_FILE, _config(model, heads, name) | _special_ids(weights))
    tensors = to_tensors(spec, weights.params)
    entries = {key: StoredName(key, False) for key in tensors}
    write_safetensors(folder / WEIGHTS_FILE, tensors, entries, "float32")
    return [f"{CONFIG_FILE}, {WEIGHTS_FILE}: {name}, {len(tensors)} tensors", *_write_tokenizer(folder, weights)]


def class_of(heads: HeadsConfig) -> str:
    """Return the name of the class of transformers for these heads."""
    name = "XLNetForSequenceClassification" if heads.sequence_labels else "XLNetModel"
    return "XLNetLMHeadModel" if heads.mlm else name


def _config(model: XlnetConfig, heads: HeadsConfig, name: str) -> dict[str, Any]:
    activation = next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == model.activation)
    content: dict[str, Any] = {"architectures": [name], "model_type": MODEL_TYPE}
    content |= {theirs: getattr(model, ours) for theirs, ours in _SIZES.items()}
    content |= {"d_head": model.head_size, "ff_activation": activation, "attn_type": "bi", "untie_r": True}
    content |= {"dropout": model.hidden_dropout, "layer_norm_eps": model.norm_epsilon}
    content |= {"initializer_range": model.initializer_range, "mem_len": model.memory_length or None}
    content |= {"clamp_len": model.largest_distance or -1, "bi_data": False, "same_length": False}
    content |= {"tie_word_embeddings": model.tied_output, **_SUMMARY}
    labels = {str(i): label for i, label in enumerate(heads.sequence_labels)}
    return content | ({"id2label": labels, "label2id": {v: int(k) for k, v in labels.items()}} if labels else {})


def _special_ids(weights: ModelBundle) -> dict[str, int]:
    tokenizer = weights.spec.tokenizer
    if tokenizer is None or weights.tokenizer_content is None:
        return {}
    built = build_tokenizer(tokenizer, weights.tokenizer_content, tokenizer.file)
    return {"pad_token_id": built.pad_id}


def _write_tokenizer(folder: Path, weights: ModelBundle) -> list[str]:
    tokenizer, content = weights.spec.tokenizer, weights.tokenizer_content
    if tokenizer is None or content is None:
        return ["the model has no tokenizer: the inputs are ids"]
    if not tokenizer.file.endswith(".model"):
        (folder / tokenizer.file).write_bytes(content)
        return [f"{tokenizer.file}: XLNetTokenizer of transformers reads SentencePiece models only"]
    back = {ours: theirs for theirs, ours in PIECES.items()}
    (folder / PIECES_FILE).write_bytes(renamed(content, back, tokenizer.file))
    return []
