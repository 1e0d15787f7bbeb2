"""Hugging Face folders with pytorch_model.bin, whole and sharded, in both formats of torch.save, without torch."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hf_folders import load, make_folder, rename
from torch_files import Global, Raw, opcodes, save_old, save_zip, state_of

from bert_jax.interop.hf.names import recognized_family
from bert_jax.interop.import_model import import_model
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.process import exits

FORMATS = {"zip": save_zip, "old": save_old}
FILE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
WORDS, DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"


def as_torch(folder: Path, form: str, *, shards: int = 1) -> Path:
    """Replace the safetensors file of ``folder`` by torch files, the output layer tied to the word embeddings."""
    tensors = load(folder)
    (folder / "model.safetensors").unlink()
    places = {}
    for shard in range(shards):
        state, data = state_of(dict([*tensors.items()][shard::shards]))
        if WORDS in state:
            state[DECODER] = state[WORDS]
        name = FILE if shards == 1 else f"pytorch_model-{shard + 1:05d}-of-{shards:05d}.bin"
        FORMATS[form](folder / name, state, data)
        places |= dict.fromkeys(state, name)
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return folder


def refused(folder: Path, capsys, *words: str) -> None:
    """``bert-jax import`` of ``folder`` ends with code 2 and one line, and leaves nothing."""
    target = folder.parent / "imported"
    code = exits.run_command(lambda: import_model(folder, target, ReadOptions(), verify=False, report=print))
    err = capsys.readouterr().err
    assert code == exits.USER_ERROR and err.count("\n") == 1 and all(word in err for word in words), err
    assert not target.exists()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shards", [1, 3])
def test_values_are_those_of_safetensors(tmp_path, monkeypatch, form, shards):
    monkeypatch.setitem(sys.modules, "torch", None)
    expected = read_weights(make_folder(tmp_path / "a"), ReadOptions())
    weights = read_weights(as_torch(make_folder(tmp_path / "b"), form, shards=shards), ReadOptions())
    assert weights.spec == expected.spec and weights.params.keys() == expected.params.keys()
    for name, values in expected.params.items():
        assert values.tobytes() == weights.params[name].tobytes(), name


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shards", [1, 3])
def test_code_in_a_folder(tmp_path, capsys, form, shards):
    folder = as_torch(make_folder(tmp_path / "model"), form, shards=shards)
    touched = tmp_path / "touched"
    code = Raw(opcodes(Global("posix", "system")) + opcodes(f"touch {touched}") + b"\x85R")
    last = sorted(folder.glob("*.bin"))[-1]
    FORMATS[form](last, {"a": code}, {})
    refused(folder, capsys, str(last), "it names posix.system", "no code is run")
    assert not touched.exists()


@pytest.mark.parametrize("form", FORMATS)
def test_files_outside_the_folder(tmp_path, capsys, form):
    folder = as_torch(make_folder(tmp_path / "model"), form)
    (folder / FILE).rename(tmp_path / "elsewhere.bin")
    (folder / FILE).symlink_to(tmp_path / "elsewhere.bin")
    refused(folder, capsys, "points outside the folder")
    (folder / FILE).unlink()
    for name in ("../elsewhere.bin", str(tmp_path / "elsewhere.bin")):
        (folder / INDEX).write_text(json.dumps({"weight_map": {WORDS: name}}))
        refused(folder, capsys, "points outside the folder")


def test_a_shard_that_is_damaged_or_missing(tmp_path, capsys):
    folder = as_torch(make_folder(tmp_path / "model"), "zip", shards=3)
    last = sorted(folder.glob("*.bin"))[-1]
    last.write_bytes(last.read_bytes()[:-100])
    refused(folder, capsys, last.name, "truncated")
    last.unlink()
    refused(folder, capsys, last.name, "is missing")


@pytest.mark.parametrize("name", ["a\nerror: all is well", "\x1b[2J", "\ud800", "\u202eevil"])
def test_names_that_cannot_be_printed(tmp_path, capsys, name):
    folder = make_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    save_zip(folder / FILE, *state_of({name: np.zeros(1, np.float32)}))
    refused(folder, capsys, "cannot be printed")


def test_integers_in_place_of_floats(tmp_path, capsys):
    folder = make_folder(tmp_path / "model")
    state, data = state_of({name: values.astype(np.int64) for name, values in load(folder).items()})
    (folder / "model.safetensors").unlink()
    save_zip(folder / FILE, state, data)
    refused(folder, capsys, "has the dtype int64")


# ------------------------------------------------------------------ folders of 2019


UNNAMED = {"model_type": None, "architectures": None}


@pytest.mark.parametrize("name", ["BertForPreTraining", "BertForMaskedLM", "RobertaForMaskedLM"])
@pytest.mark.parametrize("form", FORMATS)
def test_family_from_the_names_of_the_tensors(tmp_path, name, form):
    """config.json has neither model_type nor architectures, and LayerNorm has gamma and beta."""
    expected = read_weights(make_folder(tmp_path / "a", name, vocabulary=None), ReadOptions())

    def change(tensors):
        rename("LayerNorm.weight", "LayerNorm.gamma")(tensors)
        rename("LayerNorm.bias", "LayerNorm.beta")(tensors)

    folder = make_folder(tmp_path / "b", name, config=UNNAMED, change=change, vocabulary=None)
    tensors = load(folder)
    (folder / "model.safetensors").unlink()
    FORMATS[form](folder / FILE, *state_of(tensors))
    weights = read_weights(folder, ReadOptions())
    assert weights.spec == expected.spec
    assert all(values.tobytes() == weights.params[key].tobytes() for key, values in expected.params.items())
    family = expected.spec.family
    assert any(f"the tensor names match {family}" in note for note in weights.notes)


def test_families_that_are_not_recognized(tmp_path, capsys):
    """Tensors without the prefix of a family may be of BERT or of RoBERTa."""
    folder = make_folder(tmp_path / "model", config=UNNAMED, change=rename("bert.", ""))
    refused(folder, capsys, "config.json", "neither model_type nor architectures", "add model_type")
    folder = make_folder(tmp_path / "model", config=UNNAMED, change=rename("bert.", "bart."))
    refused(folder, capsys, "neither model_type nor architectures")
    folder = make_folder(tmp_path / "model", config=UNNAMED | {"architectures": ["T5Model"]})
    refused(folder, capsys, "neither model_type nor a known class")


def test_recognition():
    bert, roberta = "bert.embeddings.LayerNorm.gamma", "roberta.encoder.layer.0.output.dense.bias"
    assert recognized_family([bert, "cls.predictions.bias"]) == "bert"
    assert recognized_family(["lm_head.bias", f"module.{roberta}"]) == "roberta"
    assert recognized_family([bert, roberta]) is None
    assert recognized_family(["xlnet.embeddings.x", "model.bert.embeddings.x"]) is None
    assert recognized_family([]) is None
