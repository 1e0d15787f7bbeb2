"""A format outside the project, by entry point: GGUF of docs/examples, written, read back, embedded and refused."""

import re

import numpy as np
import pytest
from builders import drawn, tiny_model
from outside import EXAMPLES, fresh, install  # noqa: F401 (fresh is a fixture)

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.interop.export import export_model
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved

PIECES = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "river", "##s", "bank", "é", "中", "[unused0]", "##,", ",",
]  # fmt: skip
TEXTS = ["the rivers, bank", "中 é"]


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    points = {"formats": "gguf = gguf_format:FORMAT"}
    monkeypatch.syspath_prepend(install(tmp_path / "installed", EXAMPLES / "gguf_format.py", points))


def model(folder, pieces=PIECES, rules=None, **fields):
    """A saved model with weights that all show in its outputs."""
    network = tiny_model(len(pieces), norm_epsilon=1e-12, **fields)
    spec = ModelSpec(model=network, heads=HeadsConfig(pooler=True), tokenizer=rules or TokenizerConfig())
    weights = drawn(spec, 0.2, pieces)
    write_saved(folder, weights)
    return weights


def vectors(path, capsys):
    """The vectors that ``bert-jax embed`` prints for the texts."""
    capsys.readouterr()
    assert main(["embed", "--model", str(path), *TEXTS]) == 0
    return capsys.readouterr().out


def test_it_is_written_read_back_and_embeds(tmp_path, capsys):
    weights = model(tmp_path / "model")
    expected = vectors(tmp_path / "model", capsys)
    target = tmp_path / "exported"
    assert main(["export", "--model", str(tmp_path / "model"), "--format", "gguf", "--to", str(target)]) == 0
    said = capsys.readouterr().out
    assert "the export contains: the encoder" in said and "read back: 37 arrays, bitwise equal" in said
    for path in (target, target / "model.gguf"):
        found = read_weights(path)
        assert found.spec.model == weights.spec.model and found.tokenizer_content == weights.tokenizer_content
        assert all(np.array_equal(values, weights.params[name]) for name, values in found.params.items())
    assert vectors(path, capsys) == expected
    assert "xllamacpp" in (target / "README.md").read_text()


def test_the_layout_of_the_file(tmp_path):
    weights = model(tmp_path / "model")
    export_model(tmp_path / "model", tmp_path / "exported", "gguf", report=lambda line: None)
    data = (tmp_path / "exported" / "model.gguf").read_bytes()
    assert data.startswith(b"GGUF" + bytes([3, 0, 0, 0, 37, 0, 0, 0, 0, 0, 0, 0])) and len(data) % 32 == 0
    for piece in ("\u2581river", "s", "[unused0]", "\u2581,", ","):
        assert len(piece.encode()).to_bytes(8, "little") + piece.encode() in data
    name = b"blk.1.ffn_up.weight"
    sizes, place = np.frombuffer(data, "<u8", 2, data.index(name) + len(name) + 4), data.index(name) + len(name)
    assert sizes.tolist() == [16, 24]  # inputs vary fastest
    offset = int(np.frombuffer(data, "<u8", 1, place + 24)[0])
    kernel = weights.params["encoder/layer_1/feed_forward/intermediate/kernel"].T.astype("<f4").tobytes()
    assert offset % 32 == 0 and data.index(kernel) % 32 == 0


def test_values_in_float16(tmp_path):
    weights, lines = model(tmp_path / "model"), list[str]()
    export_model(tmp_path / "model", tmp_path / "exported", "gguf", dtype="float16", report=lines.append)
    assert "read back: 37 arrays, bitwise equal" in lines
    file = tmp_path / "exported" / "model.gguf"
    for name, values in read_weights(file).params.items():
        assert np.array_equal(values, weights.params[name].astype(np.float16).astype(np.float32))
    data = file.read_bytes()
    table = weights.params["embeddings/word_embeddings/embedding"].astype("<f2").tobytes()
    assert table in data
    for name in ("layer_norm/scale", "position_embeddings/embedding", "token_type_embeddings/embedding"):
        assert weights.params[f"embeddings/{name}"].astype(np.float16).astype("<f4").tobytes() in data
    kind = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 20
    assert data[kind] == 1
    file.write_bytes(data[:kind] + b"\2" + data[kind + 1 :])
    with pytest.raises(ValueError, match=r"model\.gguf: token_embd\.weight is quantized; only float32 and float16"):
        read_weights(file)
    with pytest.raises(ValueError, match="gguf: stored as bfloat16: not supported"):
        export_model(tmp_path / "model", tmp_path / "other", "gguf", dtype="bfloat16", report=lines.append)


def test_a_damaged_file_is_one_line(tmp_path, capsys):
    model(tmp_path / "model")
    export_model(tmp_path / "model", tmp_path / "exported", "gguf", report=lambda line: None)
    data = (tmp_path / "exported" / "model.gguf").read_bytes()
    file = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(0)
    head = data.index(b"blk.0") + 400
    for place in [8, 20, 100, 700, head, len(data) - 100]:
        file.write_bytes(data[:place])
        with pytest.raises(ValueError, match=r"damaged\.gguf: ") as error:
            read_weights(file)
        assert "\n" not in str(error.value)
    for _ in range(200):
        changed = bytearray(data)
        for place in rng.integers(8, head, 3):
            changed[place] = rng.integers(256)
        file.write_bytes(changed)
        try:
            read_weights(file)
        except ValueError as error:
            assert "\n" not in str(error)
    file.write_bytes(
        data.replace(b"architecture\x08\0\0\0\4\0\0\0\0\0\0\0bert", b"architecture\x08\0\0\0\4\0\0\0\0\0\0\0gpt2")
    )
    assert main(["embed", "--model", str(file), "a text"]) == 2
    assert "not a model of BERT with WordPiece" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pieces", "rules", "fields", "message"),
    [
        (PIECES, TokenizerConfig(lower_case=False), {}, "gguf: llama.cpp lower-cases texts"),
        ([*PIECES, "##[x]"], None, {}, "gguf: the piece '##[x]' of the vocabulary cannot be told from another one"),
        (PIECES, None, {"norm_position": "pre"}, "model.norm_position: pre is not supported by gguf"),
    ],
)
def test_what_is_refused(pieces, rules, fields, message, tmp_path):
    model(tmp_path / "model", pieces, rules, **fields)
    with pytest.raises(ValueError, match=re.escape(message)):
        export_model(tmp_path / "model", tmp_path / "exported", "gguf", report=lambda line: None)
    assert not (tmp_path / "exported").exists()
