"""npz folders: every model out and back bit for bit, read with numpy alone; no declared size is believed."""

import dataclasses
import io
import json
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest
from exported import SPECS, random_weights

from bert_jax.config import TokenizerConfig
from bert_jax.interop.model_bundle import ReadOptions, parameter_shapes
from bert_jax.interop.npz import read_npz, write_npz
from bert_jax.interop.readers import read_weights

NAME = "encoder/layer_1/attention/query/kernel"


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
def test_what_is_written_comes_back_bit_by_bit(name, dtype, tmp_path):
    weights = random_weights(SPECS[name])
    write_npz(tmp_path, weights, dtype=dtype)
    again = read_weights(tmp_path)
    assert again.spec == weights.spec and again.params.keys() == parameter_shapes(weights.spec).keys()
    assert any("converted to float32" in note for note in again.notes) == (dtype == "bfloat16")
    for key, values in weights.params.items():
        values = values.astype(ml_dtypes.bfloat16).astype(np.float32) if dtype == "bfloat16" else values
        np.testing.assert_array_equal(values.view(np.uint32), again.params[key].view(np.uint32), err_msg=key)


@pytest.fixture
def folder(tmp_path):
    """An export of an encoder with a vocabulary."""
    target = tmp_path / "export"
    target.mkdir()
    spec = dataclasses.replace(SPECS["pooler"], tokenizer=TokenizerConfig())
    weights = dataclasses.replace(random_weights(spec), tokenizer_content=b"[PAD]\n[UNK]\n")
    write_npz(target, weights)
    return target


def test_numpy_alone_reads_it_and_bytes_repeat(tmp_path):
    weights = random_weights(SPECS["pretraining"])
    for target in ("one", "two"):
        (tmp_path / target).mkdir()
        write_npz(tmp_path / target, weights, dtype="bfloat16")
    assert (tmp_path / "one/weights.npz").read_bytes() == (tmp_path / "two/weights.npz").read_bytes()
    dtypes = json.loads((tmp_path / "one/dtypes.json").read_text())
    with np.load(tmp_path / "one/weights.npz", allow_pickle=False) as arrays:
        assert set(arrays.files) == set(dtypes) == set(weights.params)
        for name, values in weights.params.items():
            assert dtypes[name] == "bfloat16" and arrays[name].dtype == np.uint16
            upper = (arrays[name].astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_array_equal(upper, values.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_the_vocabulary_comes_along(folder):
    assert (folder / "vocab.txt").read_bytes() == b"[PAD]\n[UNK]\n"
    for path in (folder, folder / "weights.npz"):
        assert read_weights(path).tokenizer_content == b"[PAD]\n[UNK]\n"
    assert read_weights(folder, ReadOptions(lower_case=True)).spec == read_weights(folder).spec
    with pytest.raises(ValueError, match="the vocabulary of the model is lower-cased"):
        read_weights(folder, ReadOptions(lower_case=False))
    with pytest.raises(ValueError, match="no moving average"):
        read_weights(folder, ReadOptions(ema=True))
    (folder / "vocab.txt").unlink()
    with pytest.raises(ValueError, match=r"vocab\.txt: the file is missing"):
        read_weights(folder)


def test_compressed_arrays_are_read(folder):
    with np.load(folder / "weights.npz") as arrays:
        changed = {name: arrays[name] for name in arrays.files}
    changed[NAME][0, 0] = 7
    np.savez_compressed(folder / "weights.npz", **changed)
    again = read_weights(folder)
    np.testing.assert_array_equal(again.params[NAME], changed[NAME])


def replace_array(folder, name, content: bytes | None, compression=zipfile.ZIP_STORED):
    """Rewrite weights.npz with other bytes for one member (None: without it)."""
    with zipfile.ZipFile(folder / "weights.npz") as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    members.pop(f"{name}.npy", None)
    if content is not None:
        members[f"{name}.npy"] = content
    with zipfile.ZipFile(folder / "weights.npz", "w", compression) as archive:
        for member, value in members.items():
            archive.writestr(member, value)


def array_bytes(values, **options) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, values, **options)
    return stream.getvalue()


def declared(shape) -> bytes:
    """A header alone, with whatever shape."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return stream.getvalue()


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("code of a file was run",))


RIGHT = array_bytes(np.zeros((32, 32), np.float32))
ARRAYS = {
    "missing": (None, f"missing {NAME}"),
    # As large as what is expected, so that its header is what gives it away.
    "objects": (
        array_bytes(np.array([Evil()], object), allow_pickle=True).ljust(4224, b"\0"),
        "arrays of Python objects are not allowed",
    ),
    "pickle": (pickle.dumps(Evil()).ljust(4224, b"\0"), "not an array in numpy's format"),
    "shape": (array_bytes(np.zeros((16, 64), np.float32)), r"stored as '<f4' \(16, 64\), expected <f4 \(32, 32\)"),
    "dtype": (array_bytes(np.zeros((32, 32), np.int32)), "stored as '<i4'"),
    "order": (array_bytes(np.asfortranarray(np.zeros((32, 32), np.float32))), "in C order"),
    "huge": (declared((1 << 40, 1 << 20)), r"stored as '<f4' \(1099511627776, 1048576\), expected"),
    "long": (RIGHT + b"x", "the array has 4225 bytes"),
    "short": (RIGHT[:-1], r"4223 bytes, but shape \(32, 32\) and dtype <f4 need 4224"),
    "bomb": (RIGHT + bytes(1 << 24), "the array has 16781440 bytes"),
    "header": (RIGHT[:9] + b"\xff" + RIGHT[10:], "not an array in numpy's format"),
    "literal": (RIGHT.replace(b"'descr'", b"1//0000"), "not an array in numpy's format"),
    "empty": (b"", "not an array in numpy's format"),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_that_is_not_as_expected_is_refused(kind, folder):
    content, message = ARRAYS[kind]
    replace_array(folder, NAME, content, zipfile.ZIP_DEFLATED if kind == "bomb" else zipfile.ZIP_STORED)
    with pytest.raises(ValueError, match=message) as caught:
        read_weights(folder)
    assert "\n" not in str(caught.value)


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def edit(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


DAMAGE = {
    "empty file": (lambda f: (f / "weights.npz").write_bytes(b""), "damaged or not an npz file"),
    "cut": (lambda f: cut(f / "weights.npz", 5000), "damaged or not an npz"),
    "flipped bit": (lambda f: flip(f / "weights.npz", 5000), "damaged or not an npz file .Bad CRC-32"),
    "no spec": (lambda f: (f / "model.json").unlink(), "model.json: the file is missing"),
    "empty spec": (lambda f: (f / "model.json").write_bytes(b""), "model.json: not JSON"),
    "other spec": (
        lambda f: edit(f / "model.json", '"vocab_size": 101', '"vocab_size": 99'),
        "word_embeddings/embedding: stored as",
    ),
    "far vocabulary": (
        lambda f: edit(f / "model.json", "vocab.txt", "../secret.txt"),
        "tokenizer.file: '../secret.txt' is not",
    ),
    "dtypes": (lambda f: (f / "dtypes.json").write_text('{"pooler/kernel": "object"}'), "not a map from names"),
    "empty dtypes": (lambda f: (f / "dtypes.json").write_text(""), "dtypes.json: not JSON"),
    "link": (
        lambda f: (f / "weights.npz").symlink_to((f / "weights.npz").rename(f.parent / "far.npz")),
        "points outside the folder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line(kind, folder):
    damage, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        read_weights(folder)
    assert "\n" not in str(caught.value)


def test_a_name_twice_and_a_name_too_many_are_refused(folder):
    with zipfile.ZipFile(folder / "weights.npz", "a") as archive:
        archive.writestr("surplus.npy", RIGHT)
    with pytest.raises(ValueError, match="unexpected 'surplus'"):
        read_npz(folder, ReadOptions())
    replace_array(folder, "surplus", None)
    with zipfile.ZipFile(folder / "weights.npz", "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(f"{NAME}.npy", RIGHT)
    with pytest.raises(ValueError, match="two arrays have the same name"):
        read_npz(folder, ReadOptions())
