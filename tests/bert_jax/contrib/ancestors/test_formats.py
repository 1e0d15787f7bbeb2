"""Vectors of word2vec and GloVe and the files of AllenNLP: round trips bit for bit, damaged files, refusals."""

import gzip
import json
import struct

import numpy as np
import pytest
from inference_models import make_weights
from support import write_vocabulary

from bert_jax.config import ExecutionConfig, HeadsConfig, ModelConfig, ModelSpec, TokenizerConfig
from bert_jax.contrib.ancestors.encoders.characters import (
    CHARACTER_IDS,
    PADDING,
    SENTENCE_BEGIN,
    TOKEN_BEGIN,
    TOKEN_END,
    character_ids,
    stored_ids,
)
from bert_jax.contrib.ancestors.formats.allennlp import from_file, names_of, to_file
from bert_jax.inference.loaded import load
from bert_jax.interop.export import export_model
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.tokenization import SPECIAL_PIECES

WORDS = ["the", "river", "bank", "münchen", "don't", "[MASK]"]
VECTORS = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
ELMO = {
    "encoder": "bidirectional_lstm", "num_layers": 2, "hidden_size": 12, "embedding_size": 6, "lstm_cells": 8,
    "lstm_cell_clip": 3.0, "lstm_projection_clip": 3.0, "lstm_skip": True, "character_filters": (1, 4, 2, 6),
    "character_size": 5, "max_characters": 12, "highway_layers": 1, "character_activation": "tanh",
    "position_embeddings": "none", "type_vocab_size": 0, "embedding_norm": "no", "final_norm": "no",
    "mlm_layer": "none",
}  # fmt: skip


def text_file(path, header=True):
    lines = [" ".join([word, *map(str, vector)]) for word, vector in zip(WORDS, VECTORS, strict=True)]
    path.write_text("\n".join(["6 4"] * header + lines) + "\n", encoding="utf-8")
    return path


def binary_file(path, end=b"\n"):
    rows = [word.encode() + b" " + vector.tobytes() for word, vector in zip(WORDS, VECTORS, strict=True)]
    path.write_bytes(b"6 4\n" + b"".join(row + end for row in rows))
    return path


def elmo(**options) -> ModelBundle:
    words = [*SPECIAL_PIECES, "bank", "of", "münchen", "river", "##s", "abcdefghijklmnop"]
    spec = ModelSpec(
        model=ModelConfig.of(**ELMO | {"vocab_size": len(words)} | options), heads=HeadsConfig(mlm=True),
        tokenizer=TokenizerConfig(),
    )  # fmt: skip
    rng = np.random.default_rng(1)
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in parameter_shapes(spec).items()}
    params[CHARACTER_IDS] = stored_ids(words, len(words), spec.model.max_characters)
    return ModelBundle(spec=spec, params=params, tokenizer_content="".join(f"{w}\n" for w in words).encode())


# ------------------------------------------------------------------ word2vec


@pytest.mark.parametrize("make", [
    lambda folder: text_file(folder / "v.txt"),
    lambda folder: text_file(folder / "glove.6B.4d.txt", header=False),
    lambda folder: binary_file(folder / "v.bin"),
    lambda folder: binary_file(folder / "google.bin", end=b""),
])  # fmt: skip
def test_vectors_are_read_bit_by_bit(make, tmp_path):
    path = make(tmp_path)
    bundle = read_weights(path)
    table = bundle.params["embeddings/word_embeddings/embedding"]
    vocabulary = bundle.tokenizer_content.decode().splitlines()
    assert vocabulary[-6:] == WORDS and vocabulary[:4] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    assert np.array_equal(table[-6:], VECTORS) and not table[:4].any()
    assert "2 words are not found in texts, which are split at punctuation" in bundle.notes
    loaded = load(path)
    assert np.allclose(loaded.embed("Bank München", pooling="mean"), (VECTORS[2] + VECTORS[3]) / 2)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(text_file(tmp_path / "w.txt").read_bytes()))
    assert np.array_equal(read_weights(tmp_path / "packed.txt.gz").params[next(iter(bundle.params))][-6:], VECTORS)


@pytest.mark.parametrize(("make", "file"), [(text_file, "vectors.txt"), (binary_file, "vectors.bin")])
def test_a_file_that_is_read_and_written_keeps_its_bytes(make, file, tmp_path, capsys):
    source = make(tmp_path / f"source{file[-4:]}")
    export_model(source, tmp_path / "out", "word2vec")
    assert (tmp_path / "out" / file).read_bytes() == source.read_bytes()
    assert "read back: 1 arrays, bitwise equal" in capsys.readouterr().out
    assert read_weights(tmp_path / "out").spec == read_weights(source).spec


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.txt", b"2 2\nw 1 2\n", r"1 words; the first line states 2"),
    ("a.txt", b"2 2\nw 1 2\nv 1\n", r"a\.txt:3: 1 values after the word; expected 2"),
    ("a.txt", b"2 2\nw 1 2\nv 1 x\n", r"a\.txt:3: none values after the word; expected 2"),
    ("a.txt", b"2 2\nw 1 2\nw 1 2\n", r"the word 'w' occurs twice"),
    ("a.bin", b"2 2\nw " + struct.pack("<2f", 1, 2), r"ends or is damaged at word 2 of 2"),
    ("a.bin", b"1 2\n\xff\xfe " + struct.pack("<2f", 1, 2), r"is not UTF-8"),
    ("a.bin", b"900000 2\n" + b"w" * 6000, r"ends or is damaged at word 1 of 900,000"),
    ("a.txt", b"1 2\n 1 2\n", r"a vector without a word"),
])  # fmt: skip
def test_damaged_files_of_vectors(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_weights(tmp_path / name)


@pytest.mark.slow
def test_word2vec_refuses_a_transformer_and_a_model_without_words(tmp_path):
    write_saved(tmp_path / "bert", make_weights())
    with pytest.raises(ValueError, match=r"^word2vec: model.encoder: transformer is not supported"):
        export_model(tmp_path / "bert", tmp_path / "out", "word2vec")
    write_saved(tmp_path / "elmo", elmo())
    with pytest.raises(ValueError, match=r"supports? this model|formats that support this model: .*allennlp"):
        export_model(tmp_path / "elmo", tmp_path / "out", "word2vec")


def test_words_that_begin_or_end_with_a_space_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("3 2\nbank 1 2\n\u3000bank 3 4\nriver\u00a0 5 6\n", encoding="utf-8")
    bundle = read_weights(tmp_path / "a.txt")
    assert bundle.tokenizer_content.decode().splitlines()[5:] == ["bank"]
    assert "2 words that begin or end with white space are skipped" in bundle.notes


@pytest.mark.parametrize("cut", [5, 60, -4])
def test_a_damaged_compressed_file_is_one_line(cut, tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text_file(tmp_path / "w.txt").read_bytes())[:cut])
    with pytest.raises(ValueError, match=r"a.txt.gz: the compressed file is damaged"):
        read_weights(tmp_path / "a.txt.gz")


# ------------------------------------------------------------------ AllenNLP


def test_characters_of_words():
    ids = character_ids(["[CLS]", "ab", "é", "abcdef"], 5)
    assert ids.tolist() == [
        [TOKEN_BEGIN, SENTENCE_BEGIN, TOKEN_END, PADDING, PADDING],
        [TOKEN_BEGIN, 97, 98, TOKEN_END, PADDING],
        [TOKEN_BEGIN, 0xC3, 0xA9, TOKEN_END, PADDING],
        [TOKEN_BEGIN, 97, 98, 99, TOKEN_END],
    ]


def test_allennlp_files_come_back_bit_by_bit(tmp_path, capsys):
    h5py = pytest.importorskip("h5py")
    source = elmo()
    write_saved(tmp_path / "saved", source)
    export_model(tmp_path / "saved", tmp_path / "out", "allennlp")
    assert "bitwise equal" in capsys.readouterr().out
    again = read_weights(tmp_path / "out")
    encoder = {name: x for name, x in source.params.items() if not name.startswith("mlm_head")}
    assert again.params.keys() == encoder.keys()
    assert all(np.array_equal(again.params[name], x) for name, x in encoder.items())
    with h5py.File(tmp_path / "out" / "weights.hdf5") as file:
        arrays = {name: np.asarray(file[name]) for name in names_of(source.spec.model)}
        seen: list[str] = []
        file.visititems(lambda name, item: seen.append(name) if isinstance(item, h5py.Dataset) else None)
    assert sorted(seen) == sorted(arrays)
    write_saved(tmp_path / "again", again)
    export_model(tmp_path / "again", tmp_path / "twice", "allennlp")
    with h5py.File(tmp_path / "twice" / "weights.hdf5") as file:
        assert all(np.array_equal(np.asarray(file[name]), values) for name, values in arrays.items())
    options = json.loads((tmp_path / "out" / "options.json").read_text())
    assert options["lstm"] == {
        "use_skip_connections": True, "projection_dim": 6, "cell_clip": 3.0, "proj_clip": 3.0, "dim": 8,
        "n_layers": 2,
    }  # fmt: skip
    assert options["char_cnn"]["filters"] == [[1, 4], [2, 6]] and options["char_cnn"]["n_characters"] == 262
    assert options["char_cnn"]["activation"] == "tanh" and options["char_cnn"]["n_highway"] == 1
    # Shapes and order of gates of bilm-tf: inputs and states below each other; input, cell, forget, output.
    kernel = arrays["RNN_0/RNN/MultiRNNCell/Cell1/LSTMCell/W_0"]
    ours = np.concatenate(
        [source.params[f"encoder/layer_1/forward/{part}_kernel"] for part in ("input", "recurrent")]
    )
    assert kernel.shape == (12, 32) and np.array_equal(kernel[:, 8:16], ours[:, 16:24])
    assert arrays["CNN/W_cnn_1"].shape == (1, 2, 5, 6) and arrays["char_embed"].shape == (261, 5)


def test_to_file_and_back():
    model = elmo().spec.model
    params = {
        name: x for name, x in elmo().params.items() if not name.startswith("mlm_head") and name != CHARACTER_IDS
    }
    again = from_file(model, to_file(model, params))
    assert again.keys() == params.keys() and all(np.array_equal(again[name], x) for name, x in params.items())


@pytest.mark.slow
def test_embeddings_of_characters_do_not_depend_on_the_place_in_the_vocabulary(tmp_path):
    from bert_jax.model import BertModel

    bundle = elmo()
    model = BertModel(bundle.spec.model, ExecutionConfig(vocab_multiple=1), HeadsConfig(mlm=True))
    shuffled = dict(bundle.params) | {CHARACTER_IDS: bundle.params[CHARACTER_IDS][::-1]}
    from flax import traverse_util

    features = {
        "token_type_ids": np.zeros((1, 3), np.int32), "position_ids": np.arange(3)[None],
        "sequence_ids": np.ones((1, 3), np.int32),
    }  # fmt: skip
    outputs = [
        model.apply(
            {"params": traverse_util.unflatten_dict(dict(params), sep="/")},
            features | {"input_ids": np.array([ids], np.int32)},
        ).sequence_output
        for params, ids in ((bundle.params, [5, 7, 8]), (shuffled, [5, 3, 2]))
    ]
    assert np.abs(outputs[0] - outputs[1]).max() < 1e-6


def test_a_model_with_as_many_cells_as_outputs_has_a_projection(tmp_path, capsys):
    pytest.importorskip("h5py")
    write_saved(tmp_path / "saved", elmo(lstm_cells=6))
    export_model(tmp_path / "saved", tmp_path / "out", "allennlp")
    assert "bitwise equal" in capsys.readouterr().out


def hostile_link(h5py, file, other):
    del file["char_embed"]
    file["char_embed"] = h5py.ExternalLink(str(other), "char_embed")


def hostile_scalar(h5py, file, other):
    del file["CNN/W_cnn_0"]
    file["CNN/W_cnn_0"] = np.float32(1)


def hostile_size(h5py, file, other):
    del file["CNN_proj/b_proj"]
    file.create_dataset("CNN_proj/b_proj", shape=(1 << 40,), dtype="f4", chunks=(1 << 20,))


def hostile_kind(h5py, file, other):
    del file["CNN_proj/b_proj"]
    file["CNN_proj/b_proj"] = np.array([b"abc"] * 6)


def hostile_group(h5py, file, other):
    del file["CNN_proj/b_proj"]
    file.create_group("CNN_proj/b_proj")


@pytest.mark.cases(1)
@pytest.mark.parametrize(("change", "message"), [
    (hostile_link, "char_embed is not an array of this file"),
    (hostile_group, "CNN_proj/b_proj is not an array of this file"),
    (hostile_scalar, r"CNN/W_cnn_0 has shape \(\), float32; options.json describes \(1, 1, 5, 4\)"),
    (hostile_size, r"CNN_proj/b_proj has shape \(1099511627776,\)"),
    (hostile_kind, r"CNN_proj/b_proj has shape \(6,\), \|S3"),
])  # fmt: skip
def test_arrays_that_are_not_what_they_should_be(change, message, tmp_path):
    h5py = pytest.importorskip("h5py")
    write_saved(tmp_path / "saved", elmo())
    export_model(tmp_path / "saved", tmp_path / "out", "allennlp")
    export_model(tmp_path / "saved", tmp_path / "other", "allennlp")
    with h5py.File(tmp_path / "out" / "weights.hdf5", "a") as file:
        change(h5py, file, tmp_path / "other" / "weights.hdf5")
    with pytest.raises(ValueError, match=message):
        read_weights(tmp_path / "out")


@pytest.mark.cases(1)
@pytest.mark.parametrize(("part", "key", "value", "message"), [
    ("lstm", "n_layers", 1 << 30, "sizes up to 65,536"),
    ("lstm", "dim", 60_000, "describes arrays of [0-9,]+ bytes, but the file has"),
    ("char_cnn", "n_highway", 65, "up to 64 layers and filters"),
    ("char_cnn", "max_characters_per_token", "50", "sizes up to 65,536"),
    ("char_cnn", "filters", [[1, "x"]], "sizes up to 65,536"),
])  # fmt: skip
def test_options_of_impossible_sizes(part, key, value, message, tmp_path):
    pytest.importorskip("h5py")
    write_saved(tmp_path / "saved", elmo())
    export_model(tmp_path / "saved", tmp_path / "out", "allennlp")
    file = tmp_path / "out" / "options.json"
    options = json.loads(file.read_text())
    options[part][key] = value
    file.write_text(json.dumps(options))
    with pytest.raises(ValueError, match=message):
        read_weights(tmp_path / "out")


def test_weights_outside_the_folder_are_refused(tmp_path):
    pytest.importorskip("h5py")
    write_saved(tmp_path / "saved", elmo())
    export_model(tmp_path / "saved", tmp_path / "out", "allennlp")
    (tmp_path / "out" / "weights.hdf5").rename(tmp_path / "weights.hdf5")
    (tmp_path / "out" / "weights.hdf5").symlink_to(tmp_path / "weights.hdf5")
    with pytest.raises(ValueError, match="points outside the folder"):
        read_weights(tmp_path / "out")


@pytest.mark.slow
def test_missing_and_damaged_files_of_allennlp(tmp_path):
    pytest.importorskip("h5py")
    write_saved(tmp_path / "saved", elmo())
    export_model(tmp_path / "saved", tmp_path / "out", "allennlp")
    weights = tmp_path / "out" / "weights.hdf5"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"weights.hdf5: cannot be read"):
        read_weights(tmp_path / "out")
    weights.write_bytes(whole)
    options = json.loads((tmp_path / "out" / "options.json").read_text())
    options["lstm"]["n_layers"] = 3
    (tmp_path / "out" / "options.json").write_text(json.dumps(options))
    with pytest.raises(ValueError, match=r"Cell2/LSTMCell/W_0 is missing; options.json describes another model"):
        read_weights(tmp_path / "out")
    for name, value in (("cell_clip", "x"), ("proj_clip", 10**400)):
        changed = {**options, "lstm": {**options["lstm"], "n_layers": 2, name: value}}
        (tmp_path / "out" / "options.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"options.json: not the options of an ELMo model"):
            read_weights(tmp_path / "out")
    (tmp_path / "out" / "options.json").write_text("{}")
    with pytest.raises(ValueError, match=r"options.json: not the options of an ELMo model"):
        read_weights(tmp_path / "out")
    (tmp_path / "out" / "vocab.txt").unlink()
    with pytest.raises(ValueError, match=r"vocab.txt is missing; add the words"):
        read_weights(tmp_path / "out")
    write_vocabulary(tmp_path / "out")
    plain = elmo(character_filters=())
    params = {name: x for name, x in plain.params.items() if name in parameter_shapes(plain.spec)}
    import dataclasses

    write_saved(tmp_path / "plain", dataclasses.replace(plain, params=params))
    with pytest.raises(ValueError, match=r"^allennlp: only models with character_filters"):
        export_model(tmp_path / "plain", tmp_path / "none", "allennlp")
