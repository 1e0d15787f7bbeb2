"""Weights that are not finite: refused by every reader, which names the first array; buffers do not count."""

import dataclasses

import numpy as np
import pytest
from builders import drawn, tiny_model, words
from hf_folders import load, make_folder, save
from torch_files import save_zip, state_of

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, SentenceConfig, SentenceModule, TokenizerConfig
from bert_jax.contrib.ancestors.encoders.characters import CHARACTER_IDS, stored_ids
from bert_jax.contrib.ancestors.formats.allennlp import write_allennlp
from bert_jax.interop.hf.sentence_transformers import write_sentence_transformers
from bert_jax.interop.model_bundle import ModelBundle
from bert_jax.interop.npz import write_npz
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.interop.tf1.checkpoint import PREFIX, write_tf1

SPEC = ModelSpec(model=tiny_model(40), heads=HeadsConfig(pooler=True), tokenizer=TokenizerConfig())
KERNEL = "encoder/layer_1/attention/query/kernel"


def damaged(spec: ModelSpec, name: str, value: float, pieces=None) -> ModelBundle:
    weights = drawn(spec, 0.1, pieces or words(35))
    weights.params[name].reshape(-1)[-1] = value
    return weights


def refused(path, name: str) -> None:
    with pytest.raises(ValueError, match="NaN or infinite") as error:
        read_weights(path)
    assert name in str(error.value) and "\n" not in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("write", [write_saved, write_npz])
def test_own_formats(write, tmp_path, value):
    folder = tmp_path / "model"
    if write is write_npz:
        folder.mkdir()
    write(folder, damaged(SPEC, KERNEL, value))
    refused(folder, KERNEL)


@pytest.mark.parametrize(("name", "value"), [("cls.predictions.bias", np.nan), ("LayerNorm.weight", np.inf)])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_hugging_face(form, tmp_path, name, value):
    changed = []

    def change(tensors):
        changed.append(next(key for key in tensors if key.endswith(name)))
        tensors[changed[0]][3] = value

    folder = make_folder(tmp_path, change=change)
    if form == "bin":
        save_zip(folder / "pytorch_model.bin", *state_of(load(folder)))
        (folder / "model.safetensors").unlink()
    refused(folder, changed[0])


def test_a_value_beyond_float32(tmp_path):
    folder, name = make_folder(tmp_path), "bert.encoder.layer.0.output.dense.bias"
    tensors = load(folder)
    tensors[name] = tensors[name].astype(np.float64) + 1e39
    save(folder, tensors)
    refused(folder, name)


def test_buffers_may_be_anything(tmp_path):
    def change(tensors):
        tensors["bert.embeddings.position_ids"] = np.full((1, 64), np.nan, np.float32)
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].copy()

    assert read_weights(make_folder(tmp_path, change=change)).params


def test_dense_layers_of_sentences(tmp_path):
    sentence = SentenceConfig(modules=(SentenceModule(kind="dense", features=4),))
    weights = damaged(dataclasses.replace(SPEC, sentence=sentence), "sentence_head/dense_0/kernel", np.inf)
    write_sentence_transformers(tmp_path, weights)
    refused(tmp_path, "sentence_head/dense_0/kernel")


@pytest.mark.parametrize("value", ["nan", "-inf", "1e39"])
@pytest.mark.parametrize("header", ["2 2\n", ""])
def test_vectors(tmp_path, value, header):
    path = tmp_path / "v.txt"
    path.write_text(f"{header}river 1 2\nbank 0.5 {value}\n")
    refused(path, "'bank'")


def test_binary_vectors(tmp_path):
    path = tmp_path / "v.bin"
    path.write_bytes(b"1 2\nriver " + np.array([1, np.nan], "<f4").tobytes() + b"\n")
    refused(path, "'river'")


def test_elmo(tmp_path):
    pytest.importorskip("h5py")
    pieces = words(4)
    model = ModelConfig.of(
        vocab_size=len(pieces), encoder="bidirectional_lstm", num_layers=1, hidden_size=8, embedding_size=4,
        lstm_cells=4, character_filters=(1, 4), character_size=4, max_characters=8, highway_layers=1,
        position_embeddings="none", type_vocab_size=0, embedding_norm="no", final_norm="no", mlm_layer="none",
    )  # fmt: skip
    name = "encoder/layer_0/backward/projection_kernel"
    weights = damaged(
        ModelSpec(model=model, heads=HeadsConfig(), tokenizer=TokenizerConfig()), name, np.nan, pieces
    )
    weights.params[CHARACTER_IDS] = stored_ids(pieces, len(pieces), model.max_characters)
    write_allennlp(tmp_path, weights)
    refused(tmp_path, name)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_tf1(tmp_path, value):
    pytest.importorskip("tensorflow", reason="the data extra brings TensorFlow")
    write_tf1(tmp_path, damaged(SPEC, "pooler/bias", value))
    refused(tmp_path / PREFIX, "bert/pooler/dense/bias")


def test_commands_end_with_one_line(tmp_path, capsys):
    model, vectors, out = map(str, (tmp_path / "model", tmp_path / "v.npy", tmp_path / "out"))
    write_saved(tmp_path / "model", damaged(SPEC, KERNEL, np.nan))
    assert main(["embed", "w1", "--model", model, "--output", vectors]) == 2
    assert KERNEL in capsys.readouterr().err and not (tmp_path / "v.npy").exists()
    assert main(["export", "--from", model, "--to", out, "--format", "npz"]) == 2
    assert KERNEL in capsys.readouterr().err and not (tmp_path / "out").exists()
