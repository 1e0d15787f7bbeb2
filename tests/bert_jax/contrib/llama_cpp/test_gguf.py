"""GGUF: files that llama.cpp has read, with its vectors; files written, read back and refused."""

import dataclasses
import re
import sys

import numpy as np
import pytest
from exported import mostly_slow
from golden import record_llama
from golden.record_llama import DTYPES, FOLDER, PIECES, TEXTS, model

from bert_jax.commands.main import main
from bert_jax.config import SentenceConfig, SentenceModule, TokenizerConfig
from bert_jax.contrib.llama_cpp import gguf_file, llama, llama_process, vocabulary
from bert_jax.inference.loaded import prepare
from bert_jax.interop.export import export_model
from bert_jax.interop.model_bundle import parameter_shapes
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.process.exits import Stop
from bert_jax.tokenization.byte_bpe import ROBERTA_PIECES, byte_bpe_content

gguf = pytest.importorskip("gguf", reason="the gguf extra brings it")


def export(folder, weights, **options):
    """Export ``weights``; the folder and the lines of the log."""
    lines = []
    write_saved(folder / "model", weights)
    export_model(folder / "model", folder / "exported", "gguf", report=lines.append, **options)
    return folder / "exported", lines


def contents(path):
    """Keys and tensors by the package's own reader."""
    reader = gguf.GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    return values, {one.name: (one.tensor_type.name, one.data.tobytes()) for one in reader.tensors}


@pytest.mark.parametrize("family", mostly_slow(DTYPES, ("modernbert",)))
def test_vectors_are_those_of_llama_cpp(family, tmp_path):
    recorded = FOLDER / family / "model.gguf"
    with np.load(FOLDER / "vectors.npz") as arrays:
        theirs = arrays[family]
    weights = read_weights(recorded)
    assert weights.spec.model == model(family).spec.model and weights.spec.sentence == model(family).spec.sentence
    ours = prepare(weights).embed(TEXTS, normalize=True)
    # llama.cpp computes GELU with tanh (BERT), and rounds to the dtype of the weights.
    assert np.abs(ours - theirs).max() < {"float32": 1e-6, "float16": 1e-3, "int8": 1e-2}[DTYPES[family]]
    gguf_file.write_gguf(tmp_path, model(family), dtype=DTYPES[family])
    assert contents(tmp_path / "model.gguf") == contents(recorded)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("modernbert", "int8"),
        pytest.param("nomic_bert", "float16", marks=pytest.mark.slow),
        pytest.param("bert", "float32", marks=pytest.mark.slow),
    ],
)
def test_a_file_is_read_back(family, dtype, tmp_path, capsys):
    weights = model(family)
    target, lines = export(tmp_path, weights, dtype=dtype)
    assert f"read back: {len(parameter_shapes(weights.spec))} arrays, bitwise equal" in lines
    assert any("lacks xllamacpp" in line for line in lines)
    found = read_weights(target)
    assert found.tokenizer_content == weights.tokenizer_content and found.spec.tokenizer == weights.spec.tokenizer
    for name, values in weights.params.items():
        if dtype == "float32" or values.ndim == 1:
            assert np.array_equal(found.params[name], values)
        else:
            step = 2.0**-11 * np.abs(values) + 2.0**-25 if dtype == "float16" else np.abs(values).max() / 127
            assert np.all(np.abs(found.params[name] - values) <= step)
    card = (target / "README.md").read_text()
    assert "xllamacpp" in card and f"parameters ({dtype})" in card
    assert main(["embed", "--model", str(target / "model.gguf"), "the rivers"]) == 0


def test_a_byte_level_bpe(tmp_path):
    pieces, merges = [*ROBERTA_PIECES, "a", "b", "Ġ", "ab", "Ġab"], [("a", "b"), ("Ġ", "ab")]
    content = byte_bpe_content(pieces, merges)
    values = vocabulary.written(TokenizerConfig(file="tokenizer.json"), content, 12)
    assert values["tokenizer.ggml.tokens"] == [*pieces, "[PAD10]", "[PAD11]"]
    assert values["tokenizer.ggml.merges"] == ["a b", "Ġ ab"] and values["tokenizer.ggml.bos_token_id"] == 2
    assert values["tokenizer.ggml.token_type"] == [3, 3, 3, 3, 3, 1, 1, 1, 1, 1, 3, 3]
    assert vocabulary.read(values) == (TokenizerConfig(file="tokenizer.json"), content)
    with pytest.raises(ValueError, match="its tokenizer is 'gpt2', without"):
        vocabulary.read({"tokenizer.ggml.model": "gpt2"})
    with pytest.raises(ValueError, match=r"gguf: llama\.cpp does not support the tokenizer of this model; "):
        prefixed = byte_bpe_content(pieces, merges, add_prefix_space=True)
        vocabulary.written(TokenizerConfig(file="tokenizer.json"), prefixed, 12)


def test_layers_without_windows_and_without_bias(tmp_path):
    kinds = {"layer_types": ["full_attention"] * 3}
    weights = model("modernbert", **kinds, classifier_pooling="mean")  # of the heads, which the file does not hold
    assert weights.spec.model.pooling == "mean"
    target, _ = export(tmp_path, weights)
    values, _ = contents(target / "model.gguf")
    assert values["modern-bert.attention.sliding_window"] == 0  # llama.cpp ends if no layer has the window
    assert read_weights(target).spec.model == dataclasses.replace(weights.spec.model, pooling="first")


@pytest.mark.parametrize(
    ("family", "rules", "keys", "message"),
    [
        ("bert", TokenizerConfig(lower_case=False), {}, "gguf: llama.cpp lower-cases texts"),
        ("modernbert", None, {"norm_bias": True}, "model.without_bias"),
        ("modernbert", None, {"layer_types": ["sliding_attention"] * 3}, "model.attention_windows"),
        ("bert", None, {"hidden_act": "relu"}, "model.activation: relu is not supported by gguf"),
        ("electra", None, {}, "the family electra is not supported by gguf (supported: bert, modernbert, nomic"),
    ],
)  # fmt: skip
def test_what_is_refused(family, rules, keys, message, tmp_path, monkeypatch):
    monkeypatch.setitem(record_llama.FAMILIES, "electra", {})
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        export(tmp_path, model(family, rules=rules, **keys))
    assert "\n" not in str(error.value) and not (tmp_path / "exported").exists()


def test_pieces_and_poolings_that_llama_cpp_lacks(tmp_path):
    with pytest.raises(ValueError, match=re.escape("gguf: the piece '##[x]' of the vocabulary has the name")):
        vocabulary.written(TokenizerConfig(), "".join(f"{one}\n" for one in [*PIECES, "##[x]"]).encode(), 22)
    with pytest.raises(ValueError, match="gguf: the model has no vocabulary"):
        vocabulary.written(None, None, 22)
    dense = SentenceConfig(modules=(SentenceModule(kind="dense", features=4),))
    for sentence, problem in ((SentenceConfig(pooling=("max",)), "max pooling"), (dense, "dense layers")):
        with pytest.raises(ValueError, match=f"gguf: llama.cpp has no .*{problem}"):
            gguf_file._pooling(sentence)


def test_a_damaged_file_is_one_line(tmp_path, capsys):
    data = (FOLDER / "bert" / "model.gguf").read_bytes()
    file = tmp_path / "damaged.gguf"
    head = data.index(b"blk.0") + 400
    damaged = [data[:place] for place in (8, 20, 100, 700, head, len(data) - 100)]
    # A list of 2^60 values, and 2^40 keys.
    place = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 4
    damaged.append(data[: place + 4] + (1 << 60).to_bytes(8, "little") + data[place + 12 :])
    damaged.append(data[:16] + (1 << 40).to_bytes(8, "little") + data[24:])
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged\.gguf: ") as error:
            read_weights(file)
        assert "\n" not in str(error.value)
    rng = np.random.default_rng(0)
    for _ in range(60):
        changed = bytearray(data)
        for place in rng.integers(8, head, 3):
            changed[place] = rng.integers(256)
        file.write_bytes(changed)
        try:
            read_weights(file)
        except ValueError as error:
            assert "\n" not in str(error)
    file.write_bytes(data.replace(b"\4\0\0\0\0\0\0\0bert", b"\4\0\0\0\0\0\0\0gpt2", 1))
    assert main(["embed", "--model", str(file), "a text"]) == 2
    assert "the architecture 'gpt2' is not supported; supported: bert, modern-bert" in capsys.readouterr().err


@pytest.mark.slow
def test_the_comparison_with_llama_cpp(tmp_path, monkeypatch):
    weights = model("modernbert")
    answers = {}

    def vectors(file, texts, python):
        found = prepare(read_weights(file.parent)).embed(texts, normalize=True)
        return "llama.cpp 1", np.roll(found, 1, axis=1) if python == "wrong" else found

    monkeypatch.setattr(llama, "llama_vectors", vectors)
    _, lines = export(tmp_path, weights)
    assert any(
        re.search("1 - cosine: largest difference from llama.cpp 1 .*allowed 1.0e-04", line) for line in lines
    )
    with pytest.raises(Stop, match=r"llama\.cpp 1 differs in vectors of texts, 1 - cosine"):
        export_model(tmp_path / "model", tmp_path / "other", "gguf", peer_python="wrong", report=answers.get)
    assert not (tmp_path / "other").exists()


def test_llama_cpp_is_asked_in_a_process_of_its_own(tmp_path):
    fake = tmp_path / "python"
    answer = '{"version": "llama.cpp 2", "vectors": [[1.0, 0.0]]}'
    fake.write_text(f"#!/bin/sh\ncp \"$4/texts.json\" '{tmp_path}'\necho '{answer}' > \"$4/vectors.json\"\n")
    fake.chmod(0o755)
    version, vectors = llama.llama_vectors(tmp_path / "model.gguf", ["é"], str(fake))
    assert version == "llama.cpp 2" and vectors.tolist() == [[1.0, 0.0]]
    assert (tmp_path / "texts.json").read_text() == '["\\u00e9"]'
    fake.write_text(f"#!/bin/sh\nexit {llama_process.MISSING}\n")
    assert llama.llama_vectors(tmp_path / "model.gguf", ["é"], str(fake)) is None
    fake.write_text("#!/bin/sh\necho '1 E load: wrong tensor' >&2; echo 'the end' >&2; exit 1\n")
    with pytest.raises(ValueError, match=r"llama\.cpp cannot load the model: 1 E load: wrong tensor"):
        llama.llama_vectors(tmp_path / "model.gguf", ["é"], str(fake))
    with pytest.raises(ValueError, match="nothing: not a Python executable"):
        llama.llama_vectors(tmp_path / "model.gguf", ["é"], "nothing")


def test_without_the_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"GGUF needs the gguf package: pip install 'bert_jax\[gguf\]'"):
        export(tmp_path, model("bert"))
    assert main(["embed", "--model", str(FOLDER / "bert"), "a text"]) == 2
    assert "GGUF needs the gguf package" in capsys.readouterr().err
