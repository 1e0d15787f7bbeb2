"""Folders of ``EncoderDecoderModel`` of transformers: reader and writer.

Names and layouts are those of the families of both parts (``bert_jax.interop.hf``). The decoder is of a family with
cross-attention. Layers that both parts share are stored twice, with ``tie_encoder_decoder``.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bert_jax.config import HeadsConfig, ModelSpec
from bert_jax.config.architecture import ModelConfig
from bert_jax.contrib.translation.config import EncoderDecoderConfig, joined
from bert_jax.contrib.translation.start import SOURCE, target_name
from bert_jax.interop.hf.config_json import CONFIG_FILE, hf_config, model_parts, read_config
from bert_jax.interop.hf.families import FAMILIES
from bert_jax.interop.hf.names import BUFFERS, hf_names
from bert_jax.interop.hf.read import with_tokenizer
from bert_jax.interop.hf.tensors import open_tensors
from bert_jax.interop.hf.write import WEIGHTS_FILE, write_json, write_safetensors
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions, check_shapes
from bert_jax.interop.stored_model import StoredModel, StoredName
from bert_jax.interop.tokenizers.folder_files import read_tokenizer_files
from bert_jax.interop.tokenizers.folder_writer import write_tokenizer_files
from bert_jax.io.untrusted_folder import needed
from bert_jax.json_values import Json
from bert_jax.tokenization import build_tokenizer

MODEL_TYPE, CLASS = "encoder-decoder", "EncoderDecoderModel"
# Family of the decoder -> its class; these have cross-attention under the same names.
DECODERS = {
    "bert": "BertLMHeadModel", "roberta": "RobertaForCausalLM", "xlm-roberta": "XLMRobertaForCausalLM",
    "camembert": "CamembertForCausalLM",
}  # fmt: skip
# Keys of the description of a decoder that are true there, and of each part that name its class.
_OF_DECODER = ("is_decoder", "add_cross_attention")
_MODULES = ("query", "key", "value", "output")


def is_folder(path: Path) -> bool:
    """Return True if ``path`` is a folder of ``EncoderDecoderModel``."""
    file = path / CONFIG_FILE
    return file.is_file() and read_config(file).get("model_type") == MODEL_TYPE


# ------------------------------------------------------------------ names


def stored_names(model: EncoderDecoderConfig) -> dict[str, StoredName]:
    """Return a dict from the canonical names of the parameters, none of them shared, to the stored ones."""
    source, target = _parts(model)
    names = {f"{SOURCE}{name}": _within("encoder.", entry) for name, entry in hf_names(source, "").items()}
    for name, entry in hf_names(target).items():
        names[target_name(name)] = _within("decoder.", entry)
        if "/attention/" in name:
            crossed = entry.name.replace(".attention.", ".crossattention.")
            cross = dataclasses.replace(entry, name=f"decoder.{crossed}")
            names[target_name(name).replace("/attention/", "/cross_attention/")] = cross
    if model.source.hidden_size != model.target.hidden_size:
        for leaf, stored in (("kernel", "weight"), ("bias", "bias")):
            names[f"encoder/projection/{leaf}"] = StoredName(f"enc_to_dec_proj.{stored}", leaf == "kernel")
    return names


def _within(prefix: str, entry: StoredName) -> StoredName:
    return dataclasses.replace(entry, name=prefix + entry.name)


def _parts(model: EncoderDecoderConfig) -> tuple[ModelSpec, ModelSpec]:
    """Return the models of encoder and decoder, without cross-attention. Raises ``ValueError`` for a decoder of
    another family."""
    target = dataclasses.replace(model.target, attention="bidirectional")
    family = target.family_name
    if family not in DECODERS:
        raise ValueError(f"a decoder of the family {family} is not supported; supported: {', '.join(DECODERS)}")
    heads = HeadsConfig(mlm=True)
    return (
        ModelSpec(model=model.source, heads=HeadsConfig(), family=model.source.family_name),
        ModelSpec(model=target, heads=heads, family=family),
    )


# ------------------------------------------------------------------ shared parameters


def unshared(weights: ModelBundle) -> ModelBundle:
    """Return a model with a copy of each parameter that its decoder shares with the encoder; another model is
    unchanged."""
    model = weights.spec.model
    assert isinstance(model, EncoderDecoderConfig)
    if not model.shared:
        return weights
    own = {name.removeprefix(SOURCE): values for name, values in weights.params.items() if name.startswith(SOURCE)}
    params = {**weights.params, **{target_name(name): values for name, values in own.items()}}
    spec = dataclasses.replace(weights.spec, model=dataclasses.replace(model, shared=False))
    return dataclasses.replace(weights, spec=spec, params=params)


def _with_shared(weights: ModelBundle) -> ModelBundle:
    """Return ``weights`` with shared parameters if those of encoder and decoder are equal. Otherwise the result has
    a note."""
    model, params = weights.spec.model, weights.params
    assert isinstance(model, EncoderDecoderConfig)
    pairs = {
        target_name(name.removeprefix(SOURCE)): values for name, values in params.items() if name.startswith(SOURCE)
    }
    if not all(name in params and np.array_equal(params[name], values) for name, values in pairs.items()):
        note = "tie_encoder_decoder is true, but the tensors of encoder and decoder differ: they are not shared"
        return dataclasses.replace(weights, notes=(*weights.notes, note))
    spec = dataclasses.replace(weights.spec, model=dataclasses.replace(model, shared=True))
    kept = {name: values for name, values in params.items() if name not in pairs}
    return dataclasses.replace(weights, spec=spec, params=kept)


# ------------------------------------------------------------------ reading


@dataclass
class _FolderReader(StoredModel):
    """Reader of the tensors of one folder."""

    what: ClassVar[str] = "tensors"
    config_file: ClassVar[str] = CONFIG_FILE


def read_folder(path: Path, options: ReadOptions | None = None) -> ModelBundle:
    """Read a folder of ``EncoderDecoderModel``: both parts, cross-attention, tokenizer.

    Raises ``ValueError`` with a one-line message for another model, parts or keys that are not supported, damaged
    files, and missing or unexpected tensors.
    """
    options, file = options or ReadOptions(), needed(path, CONFIG_FILE)
    config = read_config(file)
    if config.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{file}: model_type is {config.get('model_type')!r}; supported: {MODEL_TYPE}")
    source, target = (_network(config, part, str(file), options) for part in ("encoder", "decoder"))
    try:
        model = joined(source, target)
        names = stored_names(model)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    is_tied = config.get("tie_encoder_decoder") is True
    reader = _FolderReader(path, options)
    reader.tensors = {n: tensor for n, tensor in open_tensors(path)[1].items() if not n.endswith(BUFFERS)}
    _complete(reader, model, names, is_tied)
    spec = ModelSpec(model=model, heads=HeadsConfig(), family=source.family_name)
    ignored = [name for name in reader.tensors if name.startswith("encoder.pooler.")]
    params = reader.read(spec, names, [*ignored, *_copies(model)])
    tokenizer, pieces, notes = read_tokenizer_files(path, options)
    origin: dict[str, Json] = {"format": "Hugging Face folder", "name": path.absolute().name, "class": CLASS}
    weights = ModelBundle(spec=spec, params=params, notes=(*reader.notes, *notes), origin=origin)
    return with_tokenizer(_with_shared(weights) if is_tied else weights, path, tokenizer, pieces)


def _network(config: Mapping[str, Json], part: str, name: str, options: ReadOptions) -> ModelConfig:
    """Return the network that ``config`` describes under ``part``."""
    described = config.get(part)
    if not isinstance(described, dict):
        raise ValueError(f"{name}: {part} is missing; it describes a part of the model")
    if described.get("cross_attention_hidden_size") is not None:
        raise ValueError(f"{name}: cross_attention_hidden_size of the {part} is not supported; remove the key")
    own = {key: value for key, value in described.items() if key not in (*_OF_DECODER, "architectures")}
    model = model_parts(own, f"{name}: {part}", allow_unknown=options.allow_mismatch).model
    return dataclasses.replace(model, attention="causal") if part == "decoder" else model


def _copies(model: EncoderDecoderConfig) -> dict[str, str]:
    """Return the stored names of tensors that are copies -> the canonical name of the parameter in the decoder."""
    tied = FAMILIES[model.target.family_name].tied if model.target.tied_output else {}
    return {f"decoder.{name}": target_name(ours) for name, ours in tied.items()}


def _complete(
    reader: _FolderReader, model: EncoderDecoderConfig, names: Mapping[str, StoredName], is_tied: bool
) -> None:
    """Add the tensors that are stored under the name of a copy only."""
    places = {**_copies(model)}
    found = {ours: reader.tensors[name] for name, ours in places.items() if name in reader.tensors}
    if is_tied:
        for name, entry in names.items():
            twin = names.get(target_name(name.removeprefix(SOURCE))) if name.startswith(SOURCE) else None
            if twin is not None and (entry.name in reader.tensors) != (twin.name in reader.tensors):
                stored = reader.tensors.get(entry.name) or reader.tensors[twin.name]
                reader.tensors |= {entry.name: stored, twin.name: stored}
    for ours, tensor in found.items():
        reader.tensors.setdefault(names[ours].name, tensor)


# ------------------------------------------------------------------ writing


def write_folder(folder: Path, weights: ModelBundle) -> list[str]:
    """Write a folder that ``EncoderDecoderModel.from_pretrained`` loads, with a tokenizer. ``folder`` must be
    empty. Returns notes. Raises ``ValueError`` if transformers has no class for a part."""
    model = weights.spec.model
    if not isinstance(model, EncoderDecoderConfig):
        raise ValueError(f"no translation model (model.encoder {model.encoder}); use bert-jax export")
    check_shapes(weights.spec, weights.params, folder)
    whole = unshared(weights)
    assert isinstance(whole.spec.model, EncoderDecoderConfig)
    write_json(folder / CONFIG_FILE, _described(weights, model))
    names, params = stored_names(whole.spec.model), dict(whole.params)
    pooler = FAMILIES[model.source.family_name].heads.get("pooler", {}).get("pooler")
    if pooler:  # no output depends on it, but the class of the encoder has it
        size = model.source.hidden_size
        for leaf, shape in (("weight", (size, size)), ("bias", (size,))):
            params[f"idle/{leaf}"] = np.zeros(shape, np.float32)
            names[f"idle/{leaf}"] = StoredName(f"encoder.{pooler.format(prefix='')}.{leaf}", False)
    write_safetensors(folder / WEIGHTS_FILE, params, names, "float32")
    return write_tokenizer_files(folder, weights.spec, weights.tokenizer_content)


def _described(weights: ModelBundle, model: EncoderDecoderConfig) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    source, target = _parts(model)
    encoder, decoder = hf_config(source, "float32"), hf_config(target, "float32")
    decoder |= {"architectures": [DECODERS[target.family]], **dict.fromkeys(_OF_DECODER, True)}
    found: dict[str, Any] = {
        "architectures": [CLASS], "model_type": MODEL_TYPE, "is_encoder_decoder": True, "encoder": encoder,
        "decoder": decoder, "tie_encoder_decoder": model.shared, "tie_word_embeddings": model.target.tied_output,
        "vocab_size": model.target.vocab_size, "dtype": "float32",
    }  # fmt: skip
    rules, content, task = weights.spec.tokenizer, weights.tokenizer_content, weights.spec.task
    if rules is not None and content is not None:
        tokenizer = build_tokenizer(rules, content, rules.file)
        found |= {
            "decoder_start_token_id": tokenizer.cls_id, "eos_token_id": tokenizer.end_id,
            "pad_token_id": tokenizer.pad_id,
        }  # fmt: skip
    if task is not None:
        # The start token counts there.
        found |= {"num_beams": task.beams, "length_penalty": task.length_penalty, "max_length": 1 + task.max_length}
    return found
