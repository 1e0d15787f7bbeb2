"""Hugging Face folders that are damaged or made to harm: one line, no code run, nothing read outside."""

import json
import resource
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hf_folders import load, make_folder, save

from bert_jax.interop.import_model import import_model
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.io.safetensors_file import LARGEST_HEADER, read_header, read_values
from bert_jax.process import exits

INDEX = "model.safetensors.index.json"


def refused(folder: Path, words: str) -> None:
    """``folder`` is refused in one line that holds ``words``."""
    with pytest.raises(ValueError) as error:
        read_weights(folder, ReadOptions())
    assert words in str(error.value) and "\n" not in str(error.value), str(error.value)


def parts(folder: Path) -> tuple[dict, bytes]:
    content = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put(folder: Path, header: dict | bytes, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def first_two(header: dict) -> tuple[str, str]:
    """The tensors that lie first in the file."""
    names = sorted((name for name in header if name != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    return names[0], names[1]


class TestSafetensors:
    def test_reader_agrees_with_the_library(self, tmp_path):
        make_folder(tmp_path)
        header, expected = read_header(tmp_path / "model.safetensors"), load(tmp_path)
        assert set(header) == set(expected)
        for name, tensor in header.items():
            np.testing.assert_array_equal(read_values(tensor), expected[name])

    @pytest.mark.parametrize("size", [0, 3, 8, 2000, -1])
    def test_cut_off(self, tmp_path, size):
        file = make_folder(tmp_path) / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:size])
        refused(tmp_path, "model.safetensors")

    def test_cut_off_between_header_and_reading(self, tmp_path):
        file = make_folder(tmp_path) / "model.safetensors"
        last = max(read_header(file).values(), key=lambda tensor: tensor.end)
        file.write_bytes(file.read_bytes()[:-4])
        with pytest.raises(ValueError, match="truncated while it was read"):
            read_values(last)

    @pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, LARGEST_HEADER + 1])
    def test_huge_header(self, tmp_path, length):
        file = make_folder(tmp_path) / "model.safetensors"
        file.write_bytes(struct.pack("<Q", length) + b"{" * 64)
        refused(tmp_path, "not a complete safetensors file")

    @pytest.mark.parametrize(
        "text",
        [
            b"[]",
            b"{",
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"a": 1}',
            b'{"a": {}, "a": {}}',
            b'{"a": 1' + b"0" * 5000 + b"}",
        ],
    )
    def test_header_that_is_none(self, tmp_path, text):
        refused(put(make_folder(tmp_path), text, b""), "model.safetensors")

    @pytest.mark.parametrize(
        "change",
        [
            {"dtype": "F128"}, {"dtype": ["F32"]}, {"shape": [-1, 16]}, {"shape": [1.5]}, {"shape": "16"},
            {"shape": [1 << 40, 1 << 40]}, {"shape": [True]}, {"shape": [17]}, {"data_offsets": [0]},
            {"data_offsets": None}, {"data_offsets": [64, 0]}, {"data_offsets": [0, 1 << 60]},
            {"data_offsets": [-64, 0]},
        ],
    )  # fmt: skip
    def test_entry_that_lies(self, tmp_path, change):
        header, data = parts(make_folder(tmp_path))
        header[first_two(header)[0]] |= change
        refused(put(tmp_path, header, data), "not a safetensors file, or damaged")

    def test_too_many_dimensions(self, tmp_path):
        header, data = parts(make_folder(tmp_path))
        name = first_two(header)[0]
        header[name]["shape"] = [1] * 8 + header[name]["shape"]
        refused(put(tmp_path, header, data), "at most 8 sizes")

    def test_a_name_that_appears_twice(self, tmp_path):
        header, data = parts(make_folder(tmp_path))
        name = first_two(header)[0]
        entry = f"{json.dumps(name)}: {json.dumps(header[name])}, "
        refused(put(tmp_path, b"{" + entry.encode() + json.dumps(header).encode()[1:], data), "twice")

    def test_overlap(self, tmp_path):
        header, data = parts(make_folder(tmp_path))
        first, _ = first_two(header)
        other = next(n for n, e in header.items() if n != first and e.get("shape") == header[first]["shape"])
        header[other]["data_offsets"] = header[first]["data_offsets"]
        refused(put(tmp_path, header, data), "not a safetensors file, or damaged")

    def test_hole_and_rest(self, tmp_path):
        header, data = parts(make_folder(tmp_path))
        refused(put(tmp_path, header, data + b"\0" * 4), "not a safetensors file, or damaged")
        del header[first_two(header)[0]]
        refused(put(tmp_path, header, data), "not a safetensors file, or damaged")

    def test_no_memory_for_what_is_only_declared(self, tmp_path):
        """A file of a few bytes that declares 8 TB, and a config with two billion layers, labels and rows."""
        big = {"a": {"dtype": "F32", "shape": [1 << 41], "data_offsets": [0, 1 << 43]}}
        put(make_folder(tmp_path / "a"), big, b"")
        huge = {"num_hidden_layers": 2**31 - 1, "vocab_size": 2**31 - 1, "num_labels": 2**31 - 1}
        make_folder(tmp_path / "b", config=huge)
        make_folder(tmp_path / "c", config=huge, change=lambda t: [t.pop(n) for n in list(t) if ".layer." in n])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for name in "abc":
            refused(tmp_path / name, str(tmp_path / name))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


class TestNames:
    """A shard index names files: they must be in the folder."""

    def sharded(self, folder: Path, name: object) -> Path:
        make_folder(folder)
        (folder / "model.safetensors").rename(folder / "shard.safetensors")
        places = dict.fromkeys(read_header(folder / "shard.safetensors"), name)
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))
        return folder

    @pytest.mark.parametrize(
        "name",
        [
            "/etc/passwd", "../outside.safetensors", "a/../../outside.safetensors", "..\\outside.safetensors",
            "C:outside", "\\\\host\\share", "a\0b", "",
        ],
    )  # fmt: skip
    def test_outside(self, tmp_path, name):
        save(tmp_path, {"a": np.zeros(1, np.float32)})
        (tmp_path / "model.safetensors").rename(tmp_path / "outside.safetensors")
        refused(self.sharded(tmp_path / "model", name), "points outside the folder")

    @pytest.mark.parametrize("name", [3, None, ["shard.safetensors"], {}])
    def test_no_text(self, tmp_path, name):
        refused(self.sharded(tmp_path, name), INDEX)

    def test_absent(self, tmp_path):
        refused(self.sharded(tmp_path, "other.safetensors"), "other.safetensors: the file is missing")

    def test_folder_in_place_of_a_file(self, tmp_path):
        folder = self.sharded(tmp_path, "sub")
        (folder / "sub").mkdir()
        refused(folder, "not a regular file")

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": 3}', "[" * 100_000])
    def test_index_that_is_none(self, tmp_path, text):
        folder = self.sharded(tmp_path, "shard.safetensors")
        (folder / INDEX).write_text(text)
        refused(folder, INDEX if text != '{"weight_map": []}' else "")

    def test_tensor_in_two_shards_or_in_none(self, tmp_path):
        folder = self.sharded(tmp_path, "shard.safetensors")
        index = json.loads((folder / INDEX).read_text())
        (folder / "twin.safetensors").write_bytes((folder / "shard.safetensors").read_bytes())
        index["weight_map"]["cls.predictions.bias"] = "twin.safetensors"
        (folder / INDEX).write_text(json.dumps(index))
        refused(folder, "which another shard contains too")
        index["weight_map"] = dict.fromkeys([*index["weight_map"], "absent"], "shard.safetensors")
        (folder / INDEX).write_text(json.dumps(index))
        refused(folder, "lacks absent")

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.txt"])
    def test_link_out_of_the_folder(self, tmp_path, name):
        folder = make_folder(tmp_path / "model")
        (folder / name).rename(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")
        refused(folder, "points outside the folder")

    def test_links_of_a_cache_are_followed(self, tmp_path):
        folder = make_folder(tmp_path / "models--x" / "snapshots" / "abc")
        blobs = tmp_path / "models--x" / "blobs"
        blobs.mkdir()
        for file in list(folder.iterdir()):
            file.rename(blobs / file.name)
            file.symlink_to(Path("../../blobs") / file.name)
        assert read_weights(folder, ReadOptions()).params

    def test_link_to_nothing(self, tmp_path):
        folder = make_folder(tmp_path)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(folder / "gone")
        refused(folder, "points to a missing file")


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000, '{"a": 1' + "0" * 5000 + "}"])
def test_config_that_is_none(tmp_path, text):
    (make_folder(tmp_path) / "config.json").write_text(text)
    refused(tmp_path, "config.json")


def test_config_of_many_megabytes(tmp_path):
    with (make_folder(tmp_path) / "config.json").open("w") as file:
        file.truncate(17 << 20)
    refused(tmp_path, "at most")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.txt"])
def test_empty_files(tmp_path, name):
    (make_folder(tmp_path) / name).write_bytes(b"")
    refused(tmp_path, name)


def test_no_weights(tmp_path):
    (make_folder(tmp_path) / "model.safetensors").unlink()
    refused(tmp_path, "looked for model.safetensors")
    (tmp_path / "tf_model.h5").touch()
    refused(tmp_path, "tf_model.h5")


def test_vocabulary_that_is_missing(tmp_path):
    """Settings of a tokenizer without its pieces."""
    make_folder(tmp_path, vocabulary=None)
    assert any("no tokenizer" in note for note in read_weights(tmp_path, ReadOptions()).notes)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    refused(tmp_path, "vocabulary is missing")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("bert.encoder.layer.1.output.dense.weight", np.zeros((16, 16)), "{name} has the shape"),
        ("bert.encoder.layer.1.output.dense.weight", np.zeros((24, 16)), "{name} has the shape"),
        ("bert.embeddings.word_embeddings.weight", np.zeros((40, 16, 1)), "{name} has the shape"),
        ("cls.predictions.bias", np.zeros(39), "{name} has the shape"),
        ("bert.embeddings.LayerNorm.weight", np.zeros(()), "{name} has the shape"),
        ("bert.encoder.layer.0.intermediate.dense.weight", np.zeros(24), "{name} has the shape"),
        ("bert.embeddings.LayerNorm.weight", np.zeros(0), "is empty"),
        ("bert.embeddings.LayerNorm.weight", np.zeros(16, np.int8), "{name} has the dtype int8"),
        ("bert.encoder.layer.999999.output.dense.bias", np.zeros(16), "of a BERT encoder"),
        ("bert.embeddings.LayerNorm.gamma", np.zeros(16), "two tensors have the name"),
    ],
)
def test_a_wrong_tensor(tmp_path, name, tensor, message):
    tensor = tensor.astype(np.float32) if tensor.dtype == np.float64 else tensor
    refused(make_folder(tmp_path, change=lambda t: t.update({name: tensor})), message.format(name=name))


def test_import_of_a_damaged_folder_leaves_nothing(tmp_path, capsys):
    make_folder(tmp_path / "model", config={"vocab_size": 41})
    code = exits.run_command(
        lambda: import_model(tmp_path / "model", tmp_path / "out", ReadOptions(), verify=True, report=print)
    )
    assert code == exits.USER_ERROR and "vocab_size" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_reading_runs_no_other_program(tmp_path, monkeypatch, capsys):
    """auto_map and a module beside the weights: neither is looked at by the import of this library."""
    folder = make_folder(tmp_path / "model", config={"auto_map": {"AutoModel": "modeling.Evil"}})
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')")
    monkeypatch.syspath_prepend(str(folder))
    code = exits.run_command(lambda: read_weights(folder) and 0)
    error = capsys.readouterr().err
    assert (code, len(error.strip().splitlines())) == (exits.USER_ERROR, 1), error
    assert "auto_map" in error and "modeling" not in sys.modules and not (tmp_path / "touched").exists()
