"""Read and write ELMo's files: ``options.json``, HDF5 weights as in AllenNLP and bilm-tf, and ``vocab.txt``.

Names and layouts of the weights: ``allennlp/modules/elmo.py`` and ``elmo_lstm.py``, ``bilm/training.py`` of
github.com/allenai/bilm-tf. These files contain no output layer. AllenNLP reads the characters of any word; a model
here reads the words of its vocabulary, one per line, which the folder must contain.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.config.switches import ANY, Supported, check_fields
from bert_jax.contrib.ancestors.config import BidirectionalLstmConfig
from bert_jax.contrib.ancestors.encoders.characters import CHARACTER_IDS, CHARACTERS, stored_ids
from bert_jax.interop.model_bundle import (
    Format,
    ModelBundle,
    ReadOptions,
    StoredDtype,
    check_shapes,
    parameter_shapes,
)
from bert_jax.io.errors import one_line
from bert_jax.io.untrusted_folder import inside, needed, parse_json, read_small
from bert_jax.json_values import Json
from bert_jax.tokenization import SPECIAL_PIECES

OPTIONS_FILE, WEIGHTS_FILE, VOCABULARY_FILE = "options.json", "weights.hdf5", "vocab.txt"
SUPPORTED: Supported = {field.name: ANY for field in dataclasses.fields(BidirectionalLstmConfig)} | {
    "encoder": ("bidirectional_lstm",), "position_embeddings": ("none",), "type_vocab_size": (0,),
    "embedding_norm": ("no",), "embedding_scale": (False,), "character_size": tuple(range(1, 1025)),
}  # fmt: skip
# Largest size that options.json may state (ELMo: 4,096 cells).
LARGEST_SIZE, MOST_LAYERS = 1 << 16, 64
# Most characters of a word (ELMo: 50); no array in the file has this size.
MOST_CHARACTERS = 256
# An HDF5 file may expand to so many times its size.
MOST_EXPANSION = 16
_CHARACTERS, _RNN = "embeddings/characters", "RNN_{}/RNN/MultiRNNCell/Cell{}/LSTMCell"
# Marks of bilm-tf in vocabularies -> pieces of this library.
_MARKS = {"<S>": "[CLS]", "</S>": "[SEP]", "<UNK>": "[UNK]"}


def is_allennlp(path: Path) -> bool:
    """Return True if ``path`` is a folder with ELMo's options and weights."""
    return path.is_dir() and (path / OPTIONS_FILE).is_file() and _weights_file(path) is not None


def _weights_file(folder: Path) -> Path | None:
    found = sorted(folder.glob("*.hdf5"))
    return found[0] if len(found) == 1 else None


def names_of(model: BidirectionalLstmConfig) -> dict[str, str]:
    """Return a dict from the name of each array in the HDF5 file to the parameter name. The first dimension
    of the arrays W_0 holds the inputs, then the recurrent inputs."""
    names = {"char_embed": f"{_CHARACTERS}/character_embeddings"}
    for i in range(len(model.character_filters) // 2):
        names |= {
            f"CNN/W_cnn_{i}": f"{_CHARACTERS}/filter_{i}_kernel",
            f"CNN/b_cnn_{i}": f"{_CHARACTERS}/filter_{i}_bias",
        }
    for i in range(model.highway_layers):
        for part in ("transform", "carry"):
            own = f"{_CHARACTERS}/highway_{i}_{part}"
            names |= {f"CNN_high_{i}/W_{part}": f"{own}_kernel", f"CNN_high_{i}/b_{part}": f"{own}_bias"}
    names |= {
        "CNN_proj/W_proj": f"{_CHARACTERS}/projection_kernel",
        "CNN_proj/b_proj": f"{_CHARACTERS}/projection_bias",
    }
    for i in range(model.num_layers):
        for number, direction in enumerate(("forward", "backward")):
            theirs, ours = _RNN.format(number, i), f"encoder/layer_{i}/{direction}"
            names |= {f"{theirs}/W_0": f"{ours}/kernel", f"{theirs}/B": f"{ours}/bias"}
            names[f"{theirs}/W_P_0"] = f"{ours}/projection_kernel"
    return names


def to_file(model: BidirectionalLstmConfig, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of the HDF5 file by name."""
    arrays = {}
    for theirs, ours in names_of(model).items():
        if ours.endswith("/kernel"):
            base = ours.removesuffix("kernel")
            arrays[theirs] = _swap(
                np.concatenate([params[f"{base}input_kernel"], params[f"{base}recurrent_kernel"]])
            )
        elif theirs.endswith("/B"):
            arrays[theirs] = _swap(params[ours])
        else:
            arrays[theirs] = params[ours][None] if "/W_cnn_" in theirs else params[ours]
    return arrays


def from_file(model: BidirectionalLstmConfig, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters, without the ids of the characters, from the arrays of the HDF5 file."""
    params = {}
    for theirs, ours in names_of(model).items():
        values = arrays[theirs]
        if ours.endswith("/kernel"):
            base, inputs = ours.removesuffix("kernel"), model.hidden_size // 2
            both = _swap(values)
            params[f"{base}input_kernel"], params[f"{base}recurrent_kernel"] = both[:inputs], both[inputs:]
        elif theirs.endswith("/B"):
            params[ours] = _swap(values)
        else:
            params[ours] = values[0] if "/W_cnn_" in theirs else values
    return {name: np.ascontiguousarray(values, np.float32) for name, values in params.items()}


def _swap(gates: np.ndarray) -> np.ndarray:
    """Exchange the second and the third quarter of the last dimension: TensorFlow's gates are input, cell, forget,
    output."""
    first, second, third, last = np.split(gates, 4, axis=-1)
    return np.concatenate([first, third, second, last], axis=-1)


def options_of(model: BidirectionalLstmConfig) -> dict[str, Json]:
    """Return the content of ``options.json``."""
    filters = model.character_filters
    return {
        "lstm": {
            "use_skip_connections": model.lstm_skip, "projection_dim": model.hidden_size // 2,
            "cell_clip": model.lstm_cell_clip, "proj_clip": model.lstm_projection_clip, "dim": model.lstm_cells,
            "n_layers": model.num_layers,
        },
        "char_cnn": {
            "activation": model.character_activation,
            "filters": [list(pair) for pair in zip(filters[::2], filters[1::2], strict=True)],
            "n_highway": model.highway_layers, "embedding": {"dim": model.character_size},
            "n_characters": CHARACTERS + 1, "max_characters_per_token": model.max_characters,
        },
    }  # fmt: skip


def _model_of(options: Any, vocab_size: int, file: Path) -> BidirectionalLstmConfig:
    try:
        lstm, cnn = options["lstm"], options["char_cnn"]
        sizes = [
            lstm["projection_dim"],
            lstm["dim"],
            lstm["n_layers"],
            *(n for pair in cnn["filters"] for n in pair),
        ]
        sizes += [cnn["embedding"]["dim"], cnn["max_characters_per_token"], cnn["n_highway"]]
        counts = [lstm["n_layers"], cnn["n_highway"], len(cnn["filters"])]
        if (
            not all(isinstance(size, int) and 0 <= size <= LARGEST_SIZE for size in sizes)
            or max(counts) > MOST_LAYERS
        ):
            raise TypeError(f"sizes up to {LARGEST_SIZE:,}, and up to {MOST_LAYERS} layers and filters, are read")
        if cnn["max_characters_per_token"] > MOST_CHARACTERS or not lstm["projection_dim"] * lstm["dim"]:
            raise TypeError(f"max_characters_per_token up to {MOST_CHARACTERS}, and sizes above 0, are read")
        if cnn.get("n_characters", CHARACTERS) not in (CHARACTERS, CHARACTERS + 1):
            raise TypeError(f"n_characters is {cnn['n_characters']!r}; allowed: {CHARACTERS} or {CHARACTERS + 1}")
        return BidirectionalLstmConfig(
            encoder="bidirectional_lstm", vocab_size=vocab_size, hidden_size=2 * lstm["projection_dim"],
            embedding_size=lstm["projection_dim"], num_layers=lstm["n_layers"], lstm_cells=lstm["dim"],
            lstm_cell_clip=float(lstm.get("cell_clip") or 0),
            lstm_projection_clip=float(lstm.get("proj_clip") or 0), lstm_skip=bool(lstm["use_skip_connections"]),
            position_embeddings="none", type_vocab_size=0, embedding_norm="no", final_norm="no",
            mlm_layer="none", character_filters=tuple(n for pair in cnn["filters"] for n in pair),
            character_size=cnn["embedding"]["dim"], max_characters=cnn["max_characters_per_token"],
            highway_layers=cnn["n_highway"], character_activation=cnn["activation"],
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{file}: not the options of an ELMo model with character convolutions ({error})"
        ) from None


def shapes_of(model: BidirectionalLstmConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array of the HDF5 file by name."""
    own = parameter_shapes(ModelSpec(model=model, heads=HeadsConfig()))
    shapes: dict[str, tuple[int, ...]] = {}
    for theirs, ours in names_of(model).items():
        if ours.endswith("/kernel"):
            base = ours.removesuffix("kernel")
            inputs, gates = own[f"{base}input_kernel"]
            shapes[theirs] = (inputs + own[f"{base}recurrent_kernel"][0], gates)
        else:
            shapes[theirs] = (1, *own[ours]) if "/W_cnn_" in theirs else own[ours]
    return shapes


def _read_arrays(file: Path, model: BidirectionalLstmConfig) -> dict[str, np.ndarray]:
    """Return the arrays of the HDF5 file. Their sizes and shapes are checked before an array is read."""
    h5py, arrays, expected = _h5py(), {}, shapes_of(model)
    needed_bytes = 4 * sum(map(math.prod, expected.values()))
    if needed_bytes > MOST_EXPANSION * file.stat().st_size:
        size = f"{needed_bytes:,} bytes, but the file has {file.stat().st_size:,}"
        raise ValueError(f"{file}: {OPTIONS_FILE} describes arrays of {size}; copy the file again")
    try:
        with h5py.File(file) as stored:
            for name, shape in expected.items():
                item = stored.get(name, getlink=True)
                if item is None:
                    raise ValueError(f"{file}: the array {name} is missing; {OPTIONS_FILE} describes another model")
                found = stored[name] if isinstance(item, h5py.HardLink) else None
                if not isinstance(found, h5py.Dataset) or found.external or found.is_virtual:
                    raise ValueError(f"{file}: {name} is not an array of this file")
                if found.shape != shape or found.dtype.kind != "f":
                    kind = f"has shape {found.shape}, {found.dtype}"
                    raise ValueError(f"{file}: {name} {kind}; {OPTIONS_FILE} describes {shape}, floating-point")
                with np.errstate(over="ignore"):  # values beyond float32 become infinite and are refused
                    arrays[name] = np.asarray(found, np.float32)
    except (OSError, RuntimeError, KeyError) as error:
        raise ValueError(f"{file}: cannot be read ({one_line(error)}); copy the file again") from None
    return arrays


def read_allennlp(path: Path, options: ReadOptions) -> ModelBundle:
    """Read a folder with ``options.json``, one ``.hdf5`` file and ``vocab.txt``. Raises ``ValueError`` with one
    line for a missing or damaged file."""
    file = _weights_file(path)
    assert file is not None
    file = needed(path, file.name)
    if inside(path, VOCABULARY_FILE) is None:
        raise ValueError(
            f"{path}: {VOCABULARY_FILE} is missing; add the words that the model shall know, one a line"
        )
    content = read_small(needed(path, VOCABULARY_FILE), "a vocabulary")
    try:
        words = [_MARKS.get(word, word) for word in content.decode("utf-8").split("\n") if word]
    except UnicodeDecodeError:
        raise ValueError(f"{path / VOCABULARY_FILE}: not UTF-8; convert the file") from None
    words = [*(piece for piece in SPECIAL_PIECES if piece not in words), *words]
    stated = parse_json(read_small(needed(path, OPTIONS_FILE), "options"), path / OPTIONS_FILE)
    model = _model_of(stated, len(words), path / OPTIONS_FILE)
    spec = ModelSpec(
        model=model, heads=HeadsConfig(),
        tokenizer=TokenizerConfig(lower_case=bool(options.lower_case)),
    )  # fmt: skip
    params = from_file(model, _read_arrays(file, model))
    params[CHARACTER_IDS] = stored_ids(words, len(words), model.max_characters)
    check_shapes(spec, params, file)
    content = "".join(f"{word}\n" for word in words).encode()
    return ModelBundle(
        spec=spec, params={name: params[name] for name in parameter_shapes(spec)}, tokenizer_content=content,
        origin={"format": "AllenNLP", "name": path.absolute().name},
    )  # fmt: skip


def _h5py() -> ModuleType:
    try:
        import h5py
    except ImportError:
        raise ValueError(
            "the files of AllenNLP need the package h5py, which is not installed; pip install h5py"
        ) from None
    return h5py


def write_allennlp(folder: Path, weights: ModelBundle, *, dtype: StoredDtype = "float32") -> list[str]:
    """Write ``options.json``, ``weights.hdf5`` and ``vocab.txt`` to the empty ``folder``. Raises ``ValueError`` for
    a model that AllenNLP's ELMo cannot be."""
    h5py = _h5py()
    model, tokenizer = weights.spec.model, weights.spec.tokenizer
    check_fields(model, SUPPORTED, "allennlp")
    assert isinstance(model, BidirectionalLstmConfig)
    check_shapes(weights.spec, weights.params, folder)
    if not model.character_filters or not model.lstm_cells:
        raise ValueError("allennlp: only models with character_filters and lstm_cells; use the format npz")
    if tokenizer is None or weights.tokenizer_content is None or not tokenizer.file.endswith(".txt"):
        raise ValueError("allennlp: the model has no vocab.txt; use the format npz")
    (folder / OPTIONS_FILE).write_text(json.dumps(options_of(model), indent=2) + "\n", encoding="utf-8")
    (folder / VOCABULARY_FILE).write_bytes(weights.tokenizer_content)
    with h5py.File(folder / WEIGHTS_FILE, "w", track_order=False) as stored:
        for name, values in to_file(model, weights.params).items():
            stored.create_dataset(name, data=np.asarray(values, np.float32))
    return [f"{OPTIONS_FILE}, {WEIGHTS_FILE}: as AllenNLP's Elmo reads them; the output layer is not written"]


FORMAT = Format(
    "a folder of ELMo (options.json, one .hdf5)",
    is_allennlp,
    read_allennlp,
    write_allennlp,
    SUPPORTED,
    "from allennlp.modules.elmo import Elmo\n\n"
    'elmo = Elmo("DIR/options.json", "DIR/weights.hdf5", num_output_representations=1)',
)
