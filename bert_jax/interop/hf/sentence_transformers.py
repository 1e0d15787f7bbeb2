"""Reader and writer of sentence-transformers folders: a Hugging Face folder with pooling and further modules.

The reader accepts two layouts of the settings: the layout of releases up to 5
(``sentence_transformers.models.Pooling``, flags such as ``pooling_mode_mean_tokens``, the maximum length in
sentence_bert_config.json) and the layout of release 6 (``pooling_mode: "mean"``, the maximum length in
tokenizer_config.json). The writer uses the older layout, which every release loads.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

import numpy as np

from bert_jax.config import HeadsConfig, ModelSpec, SentenceConfig, SentenceModule, TokenizerConfig
from bert_jax.config.spec import Pooling
from bert_jax.interop.hf.config_json import TORCH_ACTIVATIONS, cross_encoder_activation, read_config
from bert_jax.interop.hf.read import activation_notes, read_hf
from bert_jax.interop.hf.tensors import open_tensors
from bert_jax.interop.hf.write import WEIGHTS_FILE, write_hf, write_json, write_safetensors
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions, StoredDtype, check_shapes, parameter_shapes
from bert_jax.interop.stored_model import FLOATS, StoredName, listed, read_float32
from bert_jax.interop.tokenizers.json_format import lower_cased, lowers_first, sentencepiece_json
from bert_jax.io.untrusted_folder import inside, needed, parse_json, read_small
from bert_jax.json_values import Json
from bert_jax.tokenization.json_parts import serialized

T = TypeVar("T")
MODULES_FILE = "modules.json"
MODEL_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
SUPPORTED = ("Transformer", "Pooling", "Dense", "Normalize")
# The type of a module; a Python module with the name of the class may precede the class.
_TYPE = re.compile(r"sentence_transformers\.(?:models|(?:base|sentence_transformer)\.modules)\.(?:(\w+)\.)?(\w+)")
# Limits that no real folder reaches; they protect against damaged or hostile files.
_MOST_MODULES, _LARGEST_LIST, _MOST_FEATURES = 32, 1 << 20, 1 << 16
# Flag of releases up to 5 -> pooling mode, in the order in which the pooled vectors are concatenated.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLINGS: tuple[Pooling, ...] = ("cls", "mean", "max")
_SIMILARITIES = ("", "cosine", "dot", "euclidean", "manhattan")
# Settings of the Transformer module -> values that leave the encoder unchanged.
_PLAIN = {
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "query_expansion": ({}, False),
    "processing_kwargs": ({},),
    "unpad_inputs": (False, True),
    "model_args": ({},), "model_kwargs": ({},), "tokenizer_args": ({},), "processor_kwargs": ({},),
    "config_args": ({},), "config_kwargs": ({},),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}},),
}  # fmt: skip
# Those that name the task, which differs for a cross-encoder.
_OF_TASK = ("transformer_task", "module_output_name", "modality_config")


def is_sentence_transformers(path: Path) -> bool:
    """Return True if ``path`` is a folder with a list of sentence-transformers modules."""
    return (path / MODULES_FILE).is_file() or (path / MODULES_FILE).is_symlink()


def encoder_folder(path: Path) -> Path:
    """Return the folder of the Transformer module. It is a Hugging Face folder, often ``path`` itself."""
    return _modules(path)[0][1]


def read_sentence_transformers(path: Path, options: ReadOptions) -> ModelBundle:
    """Read the encoder, pooling, dense layers, prompts and maximum length from a sentence-transformers folder.

    A cross-encoder of release 6 is the sequence classifier in the folder of its Transformer module. The padding and
    truncation settings of tokenizer.json are ignored. Raises ``ValueError`` with a one-line message for unsupported
    modules or pooling modes, a path that points outside the folder, and damaged files.
    """
    modules = _modules(path)
    if _settings(path, MODEL_FILE).get("model_type") == "CrossEncoder":
        return _cross_encoder(path, modules, options)
    if [kind for kind, _ in modules[:2]] != ["Transformer", "Pooling"]:
        names = ", ".join(kind for kind, _ in modules)
        expected = "the first two must be Transformer and Pooling"
        raise ValueError(f"{path / MODULES_FILE}: the modules are {names}; {expected}")
    encoder = read_hf(modules[0][1], options)
    width = encoder.spec.model.hidden_size
    sentence = _pooling(modules[1][1], width)
    params = dict(encoder.params)
    width *= len(sentence.pooling)
    steps: list[SentenceModule] = []
    for kind, folder in modules[2:]:
        if kind == "Normalize":
            if folder.is_dir():
                _check_names(folder / "config.json", _settings(folder, "config.json"))
            steps.append(SentenceModule(kind="normalize"))
            continue
        if kind != "Dense":
            problem = f"the module {kind} is not supported after Pooling"
            raise ValueError(f"{path / MODULES_FILE}: {problem}; supported: Dense, Normalize")
        number = sum(step.kind == "dense" for step in steps)
        step, values = _dense(folder, width)
        params |= {f"sentence_head/dense_{number}/{name}": array for name, array in values.items()}
        steps.append(step)
        width = step.features
    weights = _with_settings(encoder, modules[0][1], path, _PLAIN)
    sentence = _with_model_settings(dataclasses.replace(sentence, modules=tuple(steps)), path)
    return dataclasses.replace(
        weights, spec=dataclasses.replace(weights.spec, sentence=sentence), params=params
    )  # fmt: skip


def _cross_encoder(path: Path, modules: list[tuple[str, Path]], options: ReadOptions) -> ModelBundle:
    """Read the folder of a ``CrossEncoder``: its Transformer module, and the activation of its score."""
    file, settings = path / MODEL_FILE, _settings(path, MODEL_FILE)
    if [kind for kind, _ in modules] != ["Transformer"]:
        names = ", ".join(kind for kind, _ in modules)
        problem = f"the modules of the CrossEncoder are {names}"
        raise ValueError(f"{path / MODULES_FILE}: {problem}; only a single Transformer module is supported")
    plain = {key: values for key, values in _PLAIN.items() if key not in _OF_TASK}
    weights = _with_settings(read_hf(modules[0][1], options), modules[0][1], path, plain)
    heads, notes = weights.spec.heads, weights.notes
    if not heads.sequence_labels:
        raise ValueError(
            f"{path}: the CrossEncoder has no classifier; use a model of a class ForSequenceClassification"
        )
    activation = cross_encoder_activation({"sentence_transformers": settings}, str(file), 0) or heads.activation
    if not activation and heads.problem == "regression":
        activation = "sigmoid"  # the default of CrossEncoder for one label
    if prompts := settings.get("prompts"):
        names = listed(list(map(str, prompts))) if isinstance(prompts, dict) else str(prompts)[:40]
        notes = (*notes, f"{file}: the prompts of a cross-encoder are not used: {names}")
    heads = dataclasses.replace(heads, activation=activation)
    notes = tuple(dict.fromkeys((*notes, *activation_notes(heads))))
    return dataclasses.replace(weights, spec=dataclasses.replace(weights.spec, heads=heads), notes=notes)


# ------------------------------------------------------------------ reading


def _modules(path: Path) -> list[tuple[str, Path]]:
    """Return (class name, folder) of every module, in the order of modules.json."""
    file = needed(path, MODULES_FILE)
    listing = parse_json(read_small(file, "a list of modules", _LARGEST_LIST), file)
    if not isinstance(listing, list) or not listing or len(listing) > _MOST_MODULES:
        raise ValueError(f"{file}: not a list of 1 to {_MOST_MODULES} modules")
    modules = []
    for entry in listing:
        kind, place = (entry.get(key) if isinstance(entry, dict) else None for key in ("type", "path"))
        if not isinstance(kind, str) or not isinstance(place, str):
            raise ValueError(f"{file}: the type and the path of every module must be strings")
        modules.append((_module_class(kind, file), _module_folder(path, place)))
    return modules


def _module_class(kind: str, file: Path) -> str:
    """Return the class name in ``kind``, the type of a module, without importing the module."""
    match = _TYPE.fullmatch(kind)
    if match and match[2] in SUPPORTED and match[1] in (None, match[2], match[2].lower()):
        return match[2]
    raise ValueError(f"{file}: the module type {kind[:80]!r} is not supported; supported: {', '.join(SUPPORTED)}")


def _module_folder(path: Path, place: str) -> Path:
    """Return the folder of a module. Raises ``ValueError`` if the folder is not inside ``path``.

    The folder need not exist, because a module may have no files.
    """
    parts = PurePosixPath(place).parts
    if place.startswith(("/", "\\")) or ".." in parts or "\\" in place or "\0" in place or ":" in place:
        raise ValueError(f"{path / MODULES_FILE}: the path {place[:80]!r} points outside the folder")
    folder = path.joinpath(*parts)
    if not folder.resolve().is_relative_to(path.resolve()):
        remedy = "replace the link with a copy of its target"
        raise ValueError(f"{folder}: the link points outside the folder; {remedy}")
    return folder


def _settings(folder: Path, name: str) -> dict[str, Json]:
    """Return the JSON object in the file ``name`` of a module folder, or an empty dict if the file does not
    exist."""
    file = inside(folder, name)
    return {} if file is None else read_config(file)


def _one_of(file: Path, settings: Mapping[str, Json], key: str, *allowed: T) -> T:
    """Return the setting ``key``, or the first of ``allowed`` if the setting is missing or null. A null is not
    allowed for include_prompt, bias and activation_function. Raises ``ValueError`` if the value is not allowed."""
    value = settings.get(key)
    if value is None and not (key in settings and key in ("include_prompt", "bias", "activation_function")):
        return allowed[0]
    for one in allowed:
        if type(value) is type(one) and value == one:
            return one
    supported = listed([str(one) for one in allowed if one != ""]) or "none"
    raise ValueError(f"{file}: {key} is {str(value)[:80]!r}; supported: {supported}")


def _pooling(folder: Path, width: int) -> SentenceConfig:
    file = needed(folder, "config.json")
    settings = read_config(file)
    modes = settings.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if settings.get(flag)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or len(modes) > len(_FLAGS):
        raise ValueError(f"{file}: pooling_mode is not a name or list of names; supported: {', '.join(_POOLINGS)}")
    pooling = tuple(one for mode in modes for one in _POOLINGS if mode == one)
    if len(pooling) != len(modes):
        unknown = ", ".join(str(mode)[:40] for mode in modes if mode not in pooling)
        raise ValueError(f"{file}: pooling mode {unknown} is not supported; supported: cls, mean, max")
    for key in ("embedding_dimension", "word_embedding_dimension"):
        _one_of(file, settings, key, width)
    include = _one_of(file, settings, "include_prompt", True, False)
    return SentenceConfig(pooling=pooling, include_prompt=include)


def _check_names(file: Path, settings: Mapping[str, Json]) -> None:
    """Raise ``ValueError`` unless the input and the output of a module are the sentence vector."""
    for key in ("module_input_name", "module_output_name"):
        _one_of(file, settings, key, "sentence_embedding")


def _dense(folder: Path, width: int) -> tuple[SentenceModule, dict[str, np.ndarray]]:
    file = needed(folder, "config.json")
    settings = read_config(file)
    _check_names(file, settings)
    _one_of(file, settings, "use_residual", False)
    _one_of(file, settings, "in_features", width)
    bias = _one_of(file, settings, "bias", True, False)
    activation = TORCH_ACTIVATIONS[_one_of(file, settings, "activation_function", *TORCH_ACTIVATIONS)]
    features = settings.get("out_features")
    if type(features) is not int or not 0 < features <= _MOST_FEATURES:
        raise ValueError(f"{file}: out_features is {str(features)[:40]}; allowed: 1 to {_MOST_FEATURES}")
    expected = {"linear.weight": (features, width)} | ({"linear.bias": (features,)} if bias else {})
    source, tensors = open_tensors(folder)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes != expected or any(tensor.dtype not in FLOATS for tensor in tensors.values()):
        raise ValueError(f"{folder / source}: contains {listed(list(shapes))}; expected {expected}")
    values = {"kernel": read_float32(tensors["linear.weight"], StoredName("linear.weight", True))}
    if bias:
        values["bias"] = read_float32(tensors["linear.bias"])
    return SentenceModule(kind="dense", features=features, bias=bias, activation=activation), values


def _with_settings(
    weights: ModelBundle, folder: Path, path: Path, plain: Mapping[str, Sequence[Json]]
) -> ModelBundle:
    """Return ``weights``, read from ``folder``, with the maximum length and the case setting of
    sentence_bert_config.json, and a note on others. ``path`` is the whole folder; ``plain`` are settings with the
    values that change nothing."""
    settings, file = _settings(folder, LENGTH_FILE), folder / LENGTH_FILE
    for key, allowed in plain.items():
        _one_of(file, settings, key, *allowed)
    unknown = sorted(set(settings) - set(_PLAIN) - {"max_seq_length", "do_lower_case"})
    notes = (f"{file}: these settings are ignored: {listed(unknown)}",) if unknown else ()
    origin = {**weights.origin, "format": "sentence-transformers folder", "name": path.absolute().name}
    weights = dataclasses.replace(weights, notes=(*weights.notes, *notes), origin=origin)
    tokenizer, content = weights.spec.tokenizer, weights.tokenizer_content
    if tokenizer is None or content is None:
        return weights
    length = settings.get("max_seq_length")
    if length is not None:
        if type(length) is not int or length < 3:
            raise ValueError(f"{file}: max_seq_length is {str(length)[:40]}; allowed: 3 or more")
        tokenizer = dataclasses.replace(tokenizer, max_length=length)
    if settings.get("do_lower_case") is True and not tokenizer.lower_case:
        tokenizer, content = _lower_cased(tokenizer, content)
    spec = dataclasses.replace(weights.spec, tokenizer=tokenizer)
    return dataclasses.replace(weights, spec=spec, tokenizer_content=content)


def _lower_cased(tokenizer: TokenizerConfig, content: bytes) -> tuple[TokenizerConfig, bytes]:
    """Return a tokenizer that lower-cases the text before all other rules; only these may strip accents."""
    if tokenizer.file.endswith(".txt"):
        return dataclasses.replace(tokenizer, lower_case=True, strip_accents=bool(tokenizer.strip_accents)), content
    state = sentencepiece_json(content) if tokenizer.file.endswith(".model") else json.loads(content)
    tokenizer = dataclasses.replace(tokenizer, file="tokenizer.json", lower_case=True)
    return tokenizer, serialized(lower_cased(state))


def _with_model_settings(sentence: SentenceConfig, path: Path) -> SentenceConfig:
    """Return ``sentence`` with the prompts, the default prompt and the similarity function in
    config_sentence_transformers.json."""
    settings, file = _settings(path, MODEL_FILE), path / MODEL_FILE
    _one_of(file, settings, "model_type", "SentenceTransformer")
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ValueError(f"{file}: prompts is not a map from names to strings")
    return dataclasses.replace(
        sentence,
        prompts=tuple((name, text or "") for name, text in prompts.items()),
        default_prompt=_one_of(file, settings, "default_prompt_name", "", *prompts),
        similarity=_one_of(file, settings, "similarity_fn_name", *_SIMILARITIES),
    )


# ------------------------------------------------------------------ writing


def write_sentence_transformers(folder: Path, weights: ModelBundle, *, dtype: StoredDtype = "float32") -> list[str]:
    """Write a folder that ``sentence_transformers.SentenceTransformer`` loads: encoder, pooling, further modules.

    ``folder`` must exist and be empty. A model without pooling is written with mean pooling, and a note reports
    this. Task heads are omitted. Raises ``ValueError`` for a model without a tokenizer.
    """
    spec, notes = weights.spec, []
    if spec.tokenizer is None or weights.tokenizer_content is None:
        raise ValueError("sentence-transformers: the model has no vocabulary, which the format requires")
    check_shapes(spec, weights.params, folder)
    sentence = spec.sentence
    if sentence is None:
        sentence = SentenceConfig()
        notes.append("WARNING: the model has no pooling: mean pooling over all tokens is written")
    encoder = dataclasses.replace(spec, heads=HeadsConfig(pooler=spec.heads.pooler), sentence=None)
    params = {name: weights.params[name] for name in parameter_shapes(encoder)}
    notes += write_hf(folder, dataclasses.replace(weights, spec=encoder, params=params), dtype=dtype)
    is_json = spec.tokenizer.file == "tokenizer.json"
    lowers = is_json and lowers_first(json.loads(weights.tokenizer_content))
    write_json(folder / LENGTH_FILE, {"max_seq_length": spec.max_length, "do_lower_case": lowers})
    write_json(
        folder / MODEL_FILE,
        {
            "prompts": dict(sentence.prompts),
            "default_prompt_name": sentence.default_prompt or None,
            "similarity_fn_name": sentence.similarity or None,
        },
    )
    kinds = ["Transformer", "Pooling", *(module.kind.capitalize() for module in sentence.modules)]
    places = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
    listing: list[Json] = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
    write_json(folder / MODULES_FILE, listing)
    for place in places[1:]:
        (folder / place).mkdir()
    write_json(folder / places[1] / "config.json", _pooling_settings(spec, sentence))
    dense = 0
    for module, place in zip(sentence.modules, places[2:], strict=True):
        if module.kind == "dense":
            _write_dense(folder / place, module, f"sentence_head/dense_{dense}", weights, dtype)
            dense += 1
        else:
            write_json(folder / place / "config.json", {})
    return notes


def _pooling_settings(spec: ModelSpec, sentence: SentenceConfig) -> dict[str, Json]:
    common = {"include_prompt": sentence.include_prompt}
    order = [mode for mode in _FLAGS.values() if mode in sentence.pooling]
    if list(sentence.pooling) == order:
        flags = {flag: mode in sentence.pooling for flag, mode in _FLAGS.items()}
        return {"word_embedding_dimension": spec.model.hidden_size, **flags, **common}
    # The flags imply a fixed order; only the layout of release 6 can store another order.
    return {"embedding_dimension": spec.model.hidden_size, "pooling_mode": list(sentence.pooling), **common}


def _write_dense(folder: Path, module: SentenceModule, name: str, weights: ModelBundle, dtype: str) -> None:
    names = {f"{name}/kernel": StoredName("linear.weight", True)}
    if module.bias:
        names[f"{name}/bias"] = StoredName("linear.bias", False)
    settings = {
        "in_features": weights.params[f"{name}/kernel"].shape[0],
        "out_features": module.features,
        "bias": module.bias,
        "activation_function": next(name for name, ours in TORCH_ACTIVATIONS.items() if ours == module.activation),
    }
    write_json(folder / "config.json", settings)
    write_safetensors(folder / WEIGHTS_FILE, weights.params, names, dtype)
