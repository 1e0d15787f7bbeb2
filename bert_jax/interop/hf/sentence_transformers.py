"""Folders of sentence-transformers, in and out: a Hugging Face folder, pooling and what follows it.

Both spellings are read: that of releases up to 5 (``sentence_transformers.models.Pooling``, flags such as
``pooling_mode_mean_tokens``, the length in sentence_bert_config.json) and that of 6 (``pooling_mode: "mean"``, the
length in tokenizer_config.json). Written is the older one, which every release loads.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np

from bert_jax.config import HeadsConfig, ModelSpec, SentenceConfig, SentenceModule, TokenizerConfig
from bert_jax.config.spec import Activation, Pooling
from bert_jax.interop.exchange import ModelBundle, ReadOptions, StoredDtype, check_shapes
from bert_jax.interop.hf.config_json import read_config
from bert_jax.interop.hf.read import read_hf
from bert_jax.interop.hf.tensors import open_tensors, read_float32
from bert_jax.interop.hf.write import WEIGHTS_FILE, write_hf, write_safetensors
from bert_jax.interop.stored import FLOATS, StoredName, listed
from bert_jax.io.untrusted_folder import inside, needed, parse_json, read_small

MODULES_FILE = "modules.json"
MODEL_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
SUPPORTED = ("Transformer", "Pooling", "Dense", "Normalize")
_PACKAGES = ("models", "base.modules", "sentence_transformer.modules")
# More modules than any folder has; what a damaged or hostile list may cost.
_MOST_MODULES, _LARGEST_LIST, _MOST_FEATURES = 32, 1 << 20, 1 << 16
# The order in which the flags of releases up to 5 are put side by side.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLINGS = ("cls", "mean", "max")
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_ACTIVATIONS: dict[Activation, str] = {
    "identity": "torch.nn.modules.linear.Identity",
    "tanh": "torch.nn.modules.activation.Tanh",
    "relu": "torch.nn.modules.activation.ReLU",
    "gelu": "torch.nn.modules.activation.GELU",
    "sigmoid": "torch.nn.modules.activation.Sigmoid",
}
# What the file of the Transformer module may say and how it must be for the plain encoder.
_PLAIN = {
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "query_expansion": ({}, False),
    "processing_kwargs": ({},),
    "unpad_inputs": (False, True),
    "model_args": ({},), "model_kwargs": ({},), "tokenizer_args": ({},), "processor_kwargs": ({},),
    "config_args": ({},), "config_kwargs": ({},),
}  # fmt: skip


def is_sentence_transformers(path: Path) -> bool:
    """Return True if ``path`` is a folder with a list of sentence-transformers modules."""
    return (path / MODULES_FILE).is_file() or (path / MODULES_FILE).is_symlink()


def encoder_folder(path: Path) -> Path:
    """The folder of the Transformer module, which is a Hugging Face folder: often ``path`` itself."""
    return _modules(path)[0][1]


def read_sentence_transformers(path: Path, options: ReadOptions) -> ModelBundle:
    """The encoder, pooling, dense layers, prompts and length of a sentence-transformers folder.

    Padding and truncation are never taken from tokenizer.json. Raises ``ValueError`` in one line: modules or
    pooling modes other than those supported, a path out of the folder, damaged files.
    """
    modules = _modules(path)
    if [kind for kind, _ in modules[:2]] != ["Transformer", "Pooling"]:
        names = ", ".join(kind for kind, _ in modules)
        raise ValueError(
            f"{path / MODULES_FILE}: the modules are {names}; readable: Transformer, Pooling, then others"
        )
    encoder = read_hf(modules[0][1], options)
    width = encoder.spec.model.hidden_size
    sentence = _pooling(modules[1][1], width)
    params = dict(encoder.params)
    width *= len(sentence.pooling)
    steps: list[SentenceModule] = []
    for kind, folder in modules[2:]:
        if kind == "Normalize":
            _check_normalize(folder)
            steps.append(SentenceModule(kind="normalize"))
            continue
        if kind != "Dense":
            raise ValueError(
                f"{path / MODULES_FILE}: a second {kind} is not readable; readable after Pooling: Dense, Normalize"
            )
        number = sum(step.kind == "dense" for step in steps)
        step, values = _dense(folder, width)
        params |= {f"sentence_head/dense_{number}/{name}": array for name, array in values.items()}
        steps.append(step)
        width = step.features
    tokenizer, notes = _with_length(modules[0][1], encoder.spec.tokenizer)
    sentence = dataclasses.replace(sentence, modules=tuple(steps), **_model_settings(path))
    return ModelBundle(
        spec=dataclasses.replace(encoder.spec, sentence=sentence, tokenizer=tokenizer),
        params=params,
        tokenizer_content=encoder.tokenizer_content,
        notes=(*encoder.notes, *notes),
        origin={**encoder.origin, "format": "sentence-transformers folder", "name": path.absolute().name},
    )


# ------------------------------------------------------------------ reading


def _modules(path: Path) -> list[tuple[str, Path]]:
    """(class, folder) of every module, in order."""
    file = needed(path, MODULES_FILE)
    listing = parse_json(read_small(file, "a list of modules", _LARGEST_LIST), file)
    if not isinstance(listing, list) or not listing or len(listing) > _MOST_MODULES:
        raise ValueError(f"{file}: not a list of 1 to {_MOST_MODULES} modules")
    modules = []
    for entry in listing:
        kind, place = (entry.get(key) if isinstance(entry, dict) else None for key in ("type", "path"))
        if not isinstance(kind, str) or not isinstance(place, str):
            raise ValueError(f"{file}: a module needs a type and a path, both texts")
        modules.append((_module_class(kind, file), _module_folder(path, place)))
    return modules


def _module_class(kind: str, file: Path) -> str:
    """Name of the class that a ``type`` means; nothing is imported by it."""
    for name in SUPPORTED:
        for package in _PACKAGES:
            stem = f"sentence_transformers.{package}"
            if kind in (f"{stem}.{name}", f"{stem}.{name}.{name}", f"{stem}.{name.lower()}.{name}"):
                return name
    raise ValueError(
        f"{file}: the module {kind[:80]!r} is not readable; readable are {', '.join(SUPPORTED)} of "
        "sentence_transformers"
    )


def _module_folder(path: Path, place: str) -> Path:
    """The folder of a module, which must lie in ``path``; it may be absent (an empty module)."""
    parts = PurePosixPath(place).parts
    if place.startswith(("/", "\\")) or ".." in parts or "\\" in place or "\0" in place or ":" in place:
        raise ValueError(f"{path / MODULES_FILE}: the path {place[:80]!r} leads out of the folder")
    folder = path.joinpath(*parts)
    if not folder.resolve().is_relative_to(path.resolve()):
        raise ValueError(f"{folder}: a link out of the folder; replace the link by the folder")
    return folder


def _settings(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of a module; empty if the file is missing."""
    file = inside(folder, name)
    return {} if file is None else read_config(file)


def _pooling(folder: Path, width: int) -> SentenceConfig:
    file = needed(folder, "config.json")
    settings = read_config(file)
    modes = settings.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if settings.get(flag)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or len(modes) > len(_FLAGS):
        raise ValueError(f"{file}: pooling_mode is no name or list of names; readable: {', '.join(_POOLINGS)}")
    unknown = [str(mode)[:40] for mode in modes if mode not in _POOLINGS]
    if unknown:
        raise ValueError(f"{file}: the pooling mode {', '.join(unknown)} is not readable; readable: cls, mean, max")
    stated = settings.get("embedding_dimension", settings.get("word_embedding_dimension", width))
    if stated != width:
        raise ValueError(f"{file}: the dimension is {str(stated)[:40]}, the encoder's width {width}")
    include = settings.get("include_prompt", True)
    if not isinstance(include, bool):
        raise ValueError(f"{file}: include_prompt is {str(include)[:40]}; allowed: true, false")
    return SentenceConfig(pooling=tuple(cast(list[Pooling], modes)), include_prompt=include)


def _check_names(file: Path, settings: Mapping[str, Any]) -> None:
    """A module on anything but the sentence's vector computes another function."""
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key) not in (None, "sentence_embedding"):
            raise ValueError(f"{file}: {key} is {str(settings[key])[:40]!r}; readable: 'sentence_embedding'")


def _check_normalize(folder: Path) -> None:
    if folder.is_dir():
        _check_names(folder / "config.json", _settings(folder, "config.json"))


def _dense(folder: Path, width: int) -> tuple[SentenceModule, dict[str, np.ndarray]]:
    file = needed(folder, "config.json")
    settings = read_config(file)
    _check_names(file, settings)
    if settings.get("use_residual"):
        raise ValueError(f"{file}: use_residual is not readable; readable are dense layers without it")
    function = settings.get("activation_function", _ACTIVATIONS["tanh"])
    activation = next((name for name, full in _ACTIVATIONS.items() if full == function), None)
    if activation is None:
        raise ValueError(
            f"{file}: activation_function {str(function)[:80]!r} is not readable; readable: "
            f"{', '.join(_ACTIVATIONS.values())}"
        )
    features, bias = settings.get("out_features"), settings.get("bias", True)
    if settings.get("in_features") != width or type(features) is not int or not 0 < features <= _MOST_FEATURES:
        raise ValueError(
            f"{file}: {str(settings.get('in_features'))[:40]} to {str(features)[:40]} features; the input has "
            f"{width}"
        )
    if not isinstance(bias, bool):
        raise ValueError(f"{file}: bias is {str(bias)[:40]}; allowed: true, false")
    expected = {"linear.weight": (features, width)} | ({"linear.bias": (features,)} if bias else {})
    source, tensors = open_tensors(folder)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes != expected or any(tensor.dtype not in FLOATS for tensor in tensors.values()):
        raise ValueError(f"{folder / source}: holds {listed(list(shapes))}, not the weights of {expected}")
    values = {"kernel": read_float32(tensors["linear.weight"], transpose=True)}
    if bias:
        values["bias"] = read_float32(tensors["linear.bias"])
    return SentenceModule(kind="dense", features=features, bias=bias, activation=activation), values


def _with_length(folder: Path, tokenizer: TokenizerConfig | None) -> tuple[TokenizerConfig | None, tuple[str, ...]]:
    """The tokenizer with what sentence_bert_config.json says of it; tokenizer_config.json was read before."""
    settings, file = _settings(folder, LENGTH_FILE), folder / LENGTH_FILE
    for key, allowed in _PLAIN.items():
        if settings.get(key) is not None and settings[key] not in allowed:
            raise ValueError(f"{file}: {key} is {str(settings[key])[:80]}; readable: {allowed[0]}")
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    if settings.get("modality_config", {"text": text}) != {"text": text}:
        raise ValueError(f"{file}: modality_config is not that of plain text through an encoder")
    unknown = sorted(set(settings) - set(_PLAIN) - {"max_seq_length", "do_lower_case", "modality_config"})
    notes = (f"{file}: not applied: {listed(unknown)}",) if unknown else ()
    if tokenizer is None:
        return None, notes
    length = settings.get("max_seq_length")
    if length is not None:
        if type(length) is not int or length < 3:
            raise ValueError(f"{file}: max_seq_length is {str(length)[:40]}; allowed: 3 or more")
        tokenizer = dataclasses.replace(tokenizer, max_length=length)
    if settings.get("do_lower_case") is True and not tokenizer.lower_case and tokenizer.file.endswith(".txt"):
        # Lower-casing put before the tokenizer's own rules: accents stay unless those strip them.
        strip = bool(tokenizer.strip_accents)
        tokenizer = dataclasses.replace(tokenizer, lower_case=True, strip_accents=strip)
    return tokenizer, notes


def _model_settings(path: Path) -> dict[str, Any]:
    """Prompts and similarity of config_sentence_transformers.json."""
    settings, file = _settings(path, MODEL_FILE), path / MODEL_FILE
    kind = settings.get("model_type") or "SentenceTransformer"
    if kind != "SentenceTransformer":
        raise ValueError(f"{file}: model_type is {str(kind)[:40]}; readable: SentenceTransformer")
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ValueError(f"{file}: prompts are no texts by name")
    default = settings.get("default_prompt_name") or ""
    if default and default not in prompts:
        known = listed(list(prompts)) or "none"
        raise ValueError(f"{file}: default_prompt_name is {str(default)[:40]!r}; there are: {known}")
    similarity = settings.get("similarity_fn_name") or ""
    if similarity and similarity not in _SIMILARITIES:
        raise ValueError(
            f"{file}: similarity_fn_name is {str(similarity)[:40]!r}; allowed: {', '.join(_SIMILARITIES)}"
        )
    return {
        "prompts": tuple((name, text or "") for name, text in prompts.items()),
        "default_prompt": default,
        "similarity": similarity,
    }


# ------------------------------------------------------------------ writing


def write_sentence_transformers(folder: Path, weights: ModelBundle, *, dtype: StoredDtype = "float32") -> list[str]:
    """Write what ``sentence_transformers.SentenceTransformer`` loads: encoder, pooling, the modules after it.

    ``folder`` exists and is empty. A model without pooling of its own gets mean pooling, and the notes say so; task
    heads are left out. Raises ``ValueError`` for a model without a tokenizer.
    """
    spec, notes = weights.spec, []
    if spec.tokenizer is None or weights.tokenizer_content is None:
        raise ValueError("sentence-transformers: the model has no vocabulary, and its texts could not be read")
    check_shapes(spec, weights.params, folder)
    sentence = spec.sentence
    if sentence is None:
        sentence = SentenceConfig()
        notes.append("WARNING: the model says nothing of pooling: written with the mean over all tokens")
    left_out = [head for head in spec.heads.present() if head != "pooler"]
    if left_out:
        notes.append(f"left out, sentence-transformers has no place for it: {', '.join(left_out)}")
    encoder = dataclasses.replace(spec, heads=HeadsConfig(pooler=spec.heads.pooler), sentence=None)
    kept = ("embeddings/", "encoder/", *(("pooler/",) if spec.heads.pooler else ()))
    params = {name: values for name, values in weights.params.items() if name.startswith(kept)}
    notes += write_hf(folder, dataclasses.replace(weights, spec=encoder, params=params), dtype=dtype)
    _write_json(folder / LENGTH_FILE, {"max_seq_length": spec.max_length, "do_lower_case": False})
    _write_json(
        folder / MODEL_FILE,
        {
            "prompts": dict(sentence.prompts),
            "default_prompt_name": sentence.default_prompt or None,
            "similarity_fn_name": sentence.similarity or None,
        },
    )
    kinds = ["Transformer", "Pooling", *(module.kind.capitalize() for module in sentence.modules)]
    places = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
    listing = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
    _write_json(folder / MODULES_FILE, listing)
    for place in places[1:]:
        (folder / place).mkdir()
    _write_json(folder / places[1] / "config.json", _pooling_settings(spec, sentence))
    dense = 0
    for module, place in zip(sentence.modules, places[2:], strict=True):
        if module.kind == "dense":
            _write_dense(folder / place, module, f"sentence_head/dense_{dense}", weights, dtype)
            dense += 1
        else:
            _write_json(folder / place / "config.json", {})
    return notes


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _pooling_settings(spec: ModelSpec, sentence: SentenceConfig) -> dict[str, Any]:
    common = {"include_prompt": sentence.include_prompt}
    order = [mode for mode in _FLAGS.values() if mode in sentence.pooling]
    if list(sentence.pooling) == order:
        flags = {flag: mode in sentence.pooling for flag, mode in _FLAGS.items()}
        return {"word_embedding_dimension": spec.model.hidden_size, **flags, **common}
    # Flags have an order of their own; only release 6 can say another.
    return {"embedding_dimension": spec.model.hidden_size, "pooling_mode": list(sentence.pooling), **common}


def _write_dense(folder: Path, module: SentenceModule, name: str, weights: ModelBundle, dtype: str) -> None:
    names = {f"{name}/kernel": StoredName("linear.weight", True)}
    if module.bias:
        names[f"{name}/bias"] = StoredName("linear.bias", False)
    settings = {
        "in_features": weights.params[f"{name}/kernel"].shape[0],
        "out_features": module.features,
        "bias": module.bias,
        "activation_function": _ACTIVATIONS[module.activation],
    }
    _write_json(folder / "config.json", settings)
    write_safetensors(folder / WEIGHTS_FILE, weights.params, names, dtype)
