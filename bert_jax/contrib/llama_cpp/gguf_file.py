"""GGUF, the file format of llama.cpp (ggml-org/ggml, docs/gguf.md), for the encoders of BERT, ModernBERT and
NomicBERT.

The names of the tensors are those that the ``gguf`` package has for the names of Hugging Face folders, as in
llama.cpp's own converter.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from bert_jax.config import HeadsConfig, ModelSpec, SentenceConfig
from bert_jax.config.spec import Pooling
from bert_jax.config.switches import function_of
from bert_jax.contrib.llama_cpp import vocabulary
from bert_jax.contrib.llama_cpp.llama import check_llama
from bert_jax.interop.hf import config_json
from bert_jax.interop.hf.names import hf_names
from bert_jax.interop.model_bundle import (
    Format,
    ModelBundle,
    ReadOptions,
    check_shapes,
    check_sizes,
    parameter_shapes,
)
from bert_jax.interop.stored_model import StoredName, stored_array
from bert_jax.json_values import Json

FILE, MAGIC = "model.gguf", b"GGUF"
# Values of general.file_type.
_FILE_TYPES = {"float32": 0, "float16": 1, "int8": 7}
_POOLINGS: dict[Pooling, int] = {"mean": 1, "cls": 2}
# llama.cpp adds these to float32 values and refuses them in another type.
_FLOAT32 = ("token_types.weight", "position_embd.weight")
# A head with more values is damaged; 250,000 pieces with their types and merges have 3 million.
_MOST_VALUES = 8_000_000


@dataclass(frozen=True)
class Architecture:
    """A family in llama.cpp: its name, and the keys that describe a model of it."""

    name: str
    # Key of the file, without the name of the architecture -> key of config.json.
    keys: Mapping[str, str]
    # Keys that llama.cpp reads and that follow from the family.
    fixed: Mapping[str, str] = dataclasses.field(default_factory=dict)


_SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}  # fmt: skip
_EPSILON = "attention.layer_norm_epsilon"
ARCHITECTURES = {
    "bert": Architecture("bert", _SIZES | {_EPSILON: "layer_norm_eps"}),
    "modernbert": Architecture(
        "modern-bert",
        _SIZES
        | {
            _EPSILON: "norm_eps",
            "attention.sliding_window": "local_attention",
            "attention.sliding_window_pattern": "global_attn_every_n_layers",
            "rope.freq_base": "global_rope_theta",
            "rope.freq_base_swa": "local_rope_theta",
        },
        {"rope.scaling.type": "none"},
    ),
    "nomic_bert": Architecture("nomic-bert", _SIZES | {_EPSILON: "layer_norm_eps", "rope.freq_base": "rope_theta"}),
}
_TYPES = "tokenizer.ggml.token_type_count"
# Type of a tensor, a member of ``gguf.GGMLQuantizationType``, and its values in that type.
Tensor = tuple[IntEnum, np.ndarray]


def _library() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise ValueError("GGUF needs the gguf package: pip install 'bert_jax[gguf]'") from None
    return gguf


def _encoder(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, heads=HeadsConfig(), sentence=None)


def unsupported(spec: ModelSpec) -> list[str]:
    """Return a line for each property of the model that llama.cpp does not have; heads do not matter."""
    if spec.family not in ARCHITECTURES:
        return [f"the family {spec.family} is not supported by gguf (supported: {', '.join(ARCHITECTURES)})"]
    spec = _encoder(spec)
    if problems := config_json.unsupported(spec, "gguf"):
        return problems
    again = function_of(_network(_network_values(spec), spec.model.vocab_size, "gguf").model, spec.heads)
    return [
        f"model.{field}: {getattr(spec.model, field)} is not supported by gguf (supported: {again.get(field)})"
        for field, value in function_of(spec.model, spec.heads).items()
        if value != again.get(field)
    ]


def _network_values(spec: ModelSpec) -> dict[str, Json]:
    """Return the keys that describe the network."""
    kind, config = ARCHITECTURES[spec.family], config_json.hf_config(_encoder(spec), "float32")
    config |= {"rope_theta": spec.model.rotary_base}
    config |= {} if any(spec.model.layer_windows) else {"local_attention": 0}
    values = {f"{kind.name}.{key}": config[theirs] for key, theirs in kind.keys.items()}
    values |= {f"{kind.name}.{key}": value for key, value in kind.fixed.items()}
    types = {_TYPES: spec.model.type_vocab_size} if spec.model.type_vocab_size else {}
    return {"general.architecture": kind.name, **values, **types}


def _network(values: Mapping[str, Json], vocab_size: int, where: str) -> config_json.HfConfig:
    """Return the network that the keys of a file describe."""
    stated = values["general.architecture"]
    family = next((name for name, kind in ARCHITECTURES.items() if kind.name == stated), None)
    if family is None:
        known = ", ".join(kind.name for kind in ARCHITECTURES.values())
        raise ValueError(f"{where}: the architecture {stated!r} is not supported; supported: {known}")
    kind = ARCHITECTURES[family]
    config = {theirs: values[f"{kind.name}.{key}"] for key, theirs in kind.keys.items()}
    # The file holds float32: 1e-12 is 1e-12 again, not 9.999999960041972e-13.
    config = {key: float(str(np.float32(one))) if isinstance(one, float) else one for key, one in config.items()}
    config |= {"type_vocab_size": values[_TYPES]} if _TYPES in values else {}
    if config.get("local_attention") == 0:  # no layer has a window
        del config["local_attention"]
    return config_json.model_parts({"model_type": family, "vocab_size": vocab_size, **config}, where)


# ------------------------------------------------------------------ tensors


def _names(spec: ModelSpec) -> dict[str, StoredName]:
    """Return canonical names -> names in the file."""
    gguf = _library()
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[spec.family].name)
    table = gguf.get_tensor_name_map(arch, spec.model.num_layers)
    return {
        ours: dataclasses.replace(entry, name=table.get_name(entry.name, (".weight", ".bias")))
        for ours, entry in hf_names(_encoder(spec), "").items()
    }


def _tensors(weights: ModelBundle, dtype: str) -> dict[str, Tensor]:
    """Return name in the file -> (type, values in that type). Vectors and the tables that llama.cpp adds to float32
    values are float32."""
    gguf, places = _library(), dict[str, list[str]]()
    names = _names(weights.spec)
    for ours, entry in names.items():
        places.setdefault(entry.name, []).append(ours)
    kinds = gguf.GGMLQuantizationType
    tensors = {}
    for name, parts in places.items():
        values = np.ascontiguousarray(stored_array([(names[ours], weights.params[ours]) for ours in parts]), "<f4")
        kind = kinds.F32 if values.ndim < 2 or name in _FLOAT32 or dtype == "float32" else kinds.F16
        if dtype == "int8" and kind == kinds.F16 and values.shape[-1] % 32 == 0:
            kind = kinds.Q8_0  # blocks of 32 values, with a scale each
        tensors[name] = kind, gguf.quantize(values, kind)
    return tensors


def _params(spec: ModelSpec, tensors: Mapping[str, Tensor], where: str) -> dict[str, np.ndarray]:
    """Return the parameters in the ``tensors`` of a file, as float32."""
    gguf, params, shapes = _library(), {}, parameter_shapes(_encoder(spec))
    for ours, entry in _names(spec).items():
        if entry.name not in tensors:
            raise ValueError(f"{where}: the tensor {entry.name} is missing")
        kind, data = tensors[entry.name]
        values = gguf.dequantize(data, kind)
        if values.shape != entry.stored_shape(shapes[ours]):
            shape = entry.stored_shape(shapes[ours])
            raise ValueError(f"{where}: the tensor {entry.name} has shape {values.shape}, expected {shape}")
        params[ours] = np.ascontiguousarray(entry.take(values), np.float32)
    return params


def as_stored(weights: ModelBundle, dtype: str) -> ModelBundle:
    """Return ``weights`` with the values that a file of this ``dtype`` holds."""
    return dataclasses.replace(weights, params=_params(weights.spec, _tensors(weights, dtype), FILE))


# ------------------------------------------------------------------ files


def _pooling(sentence: SentenceConfig | None) -> tuple[int, list[str]]:
    """Return the value of pooling_type, and notes."""
    if sentence is None:
        return _POOLINGS["mean"], []
    dense = [module.kind for module in sentence.modules if module.kind != "normalize"]
    if dense or len(sentence.pooling) != 1 or sentence.pooling[0] not in _POOLINGS:
        problem = f"{' and '.join(sentence.pooling)} pooling{' with dense layers' if dense else ''}"
        raise ValueError(f"gguf: llama.cpp has no {problem}; supported: one of {', '.join(_POOLINGS)}")
    notes = ["prompts are not stored: begin the texts with them"] if sentence.prompts else []
    return _POOLINGS[sentence.pooling[0]], notes


def write_gguf(folder: Path, weights: ModelBundle, *, dtype: str = "float32") -> list[str]:
    """Write model.gguf; return notes. ``dtype`` int8 is llama.cpp's Q8_0.

    Raises ``ValueError`` if the gguf package is not installed, and for a tokenizer or a pooling that llama.cpp does
    not have.
    """
    gguf, spec = _library(), weights.spec
    pooling, notes = _pooling(spec.sentence)
    check_shapes(dataclasses.replace(spec, heads=HeadsConfig(), sentence=None), weights.params, folder)
    values = _network_values(spec)
    arch = values.pop("general.architecture")
    values |= {
        "general.type": "model", "general.name": str(weights.origin.get("name") or "encoder"),
        "general.file_type": _FILE_TYPES[dtype], "general.quantization_version": gguf.GGML_QUANT_VERSION,
        f"{arch}.vocab_size": spec.model.vocab_size, f"{arch}.attention.causal": False,
        f"{arch}.pooling_type": pooling,
        **vocabulary.written(spec.tokenizer, weights.tokenizer_content, spec.model.vocab_size),
    }  # fmt: skip
    writer = gguf.GGUFWriter(folder / FILE, arch)
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in values.items():
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)
    for name, (kind, data) in _tensors(weights, dtype).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [*notes, f"{FILE}: llama.cpp computes GELU with tanh"] if spec.family == "bert" else notes


def is_gguf(path: Path) -> bool:
    """Return True if ``path`` is a GGUF file or a folder with model.gguf."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path, options: ReadOptions) -> ModelBundle:
    """Read model.gguf, or another GGUF file of these families, quantized ones too.

    Raises ``ValueError`` for other files and for damaged ones.
    """
    file = path / FILE if path.is_dir() else path
    try:
        values, tensors = _contents(file)
        spec, content = _described(values, tensors, file)
    except (LookupError, TypeError, AttributeError, OverflowError, UnicodeDecodeError, MemoryError) as error:
        raise ValueError(f"{file}: not a whole GGUF file ({type(error).__name__}: {error})") from None
    return ModelBundle(
        spec=spec, params=_params(spec, tensors, str(file)), tokenizer_content=content,
        origin={"format": "gguf", "name": values.get("general.name") or file.absolute().stem},
    )  # fmt: skip


def _contents(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the keys and the tensors of ``file``; the values of tensors are views of the file."""

    class Reader(_library().GGUFReader):  # type: ignore[misc]
        count = 0

        def _get(self, offset: int, dtype: DTypeLike, count: int = 1, *more: str, **options: str) -> np.ndarray:
            # The package's reader continues beyond the end of a file, for as long as the file says.
            self.count += 1
            values: np.ndarray = super()._get(offset, dtype, count, *more, **options)
            if len(values) != int(count) or self.count > _MOST_VALUES:
                raise LookupError("it ends early")
            return values

    try:
        reader = Reader(file)
    except ValueError as error:
        raise ValueError(f"{file}: not a whole GGUF file ({error})") from None
    values = {key: field.contents() for key, field in reader.fields.items()}
    return values, {tensor.name: (tensor.tensor_type, tensor.data) for tensor in reader.tensors}


def _described(values: Mapping[str, Any], tensors: Mapping[str, Tensor], file: Path) -> tuple[ModelSpec, bytes]:
    """Return the description of the model in ``file`` and the content of its tokenizer."""
    model = _network(values, len(values["tokenizer.ggml.tokens"]), str(file)).model
    try:
        rules, content = vocabulary.read(values)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    pooled = values.get(f"{values['general.architecture']}.pooling_type", 0)
    pooling = next((name for name, number in _POOLINGS.items() if number == pooled), None)
    sentence = None if pooling is None else SentenceConfig(pooling=(pooling,))
    spec = ModelSpec(model=model, heads=HeadsConfig(), tokenizer=rules, family=model.family, sentence=sentence)
    check_sizes(spec, {name: data.shape for name, (_, data) in tensors.items()}, file)
    return spec, content


_SNIPPET = """import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.embedding = "DIR/model.gguf", True
print(xllamacpp.Server(params).handle_embeddings({"input": ["a text", "another"]}))

# Without Python: llama-embedding -m DIR/model.gguf -p "a text"
# As a server: llama-server -m DIR/model.gguf --embeddings"""
FORMAT = Format(
    "a GGUF file (model.gguf) of BERT, ModernBERT or NomicBERT", is_gguf, read_gguf, write_gguf, unsupported,
    _SNIPPET, ("float32", "float16", "int8"), frozenset({"family", "sentence"}), as_stored, check_llama,
)  # fmt: skip
