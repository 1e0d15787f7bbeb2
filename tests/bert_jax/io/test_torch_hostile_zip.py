"""Zip files of torch.save that are damaged or made to harm, and heads of old files."""

import struct
import zipfile
from pathlib import Path

import pytest
from torch_files import (
    ARRAYS,
    MAGIC,
    SYSTEM,
    VERSION,
    pickled,
    save_old,
    save_zip,
    state_of,
    storage,
    tensor,
)

from bert_jax.io import torch_file
from bert_jax.io.torch_file import LARGEST_DIRECTORY


def rezip(file: Path, change, compression: int = zipfile.ZIP_STORED) -> Path:
    """Write ``file`` again with the members that ``change`` returns for (name, content) pairs."""
    with zipfile.ZipFile(file) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in change(members):
            archive.writestr(name, content)
    return file


@pytest.fixture
def file(tmp_path):
    return save_zip(tmp_path / "x.bin", *state_of(ARRAYS))


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_members(file, refused, compression):
    refused(rezip(file, lambda members: members, compression), "compressed")


def test_zip_bomb(file, refused):
    """100 MB of zeros in 100 KB; and two members that lie in the same bytes."""
    bomb = [("archive/data/0", bytes(100 << 20))]
    rezip(file, lambda members: [m for m in members if m[0] != bomb[0][0]] + bomb, zipfile.ZIP_DEFLATED)
    refused(file, "compressed", megabytes=1)
    save_zip(file, *state_of(ARRAYS))
    content = bytearray(file.read_bytes())
    entries = [i for i in range(len(content)) if content[i : i + 4] == b"PK\1\2"]
    content[entries[3] + 42 : entries[3] + 46] = content[entries[2] + 42 : entries[2] + 46]
    file.write_bytes(content)
    refused(file, "overlap")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_with_one_name(file, refused):
    refused(rezip(file, lambda members: [*members, members[0]]), "two members")
    save_zip(file, *state_of(ARRAYS))
    refused(rezip(file, lambda members: [*members, ("b/data.pkl", members[0][1])]), "2 members data.pkl")
    save_zip(file, *state_of(ARRAYS))
    refused(rezip(file, lambda members: members[1:]), "0 members data.pkl")


@pytest.mark.parametrize(
    "name", ["../evil", "archive/../../evil", "/etc/evil", "archive//evil", "a\\..\\evil", "archive/.."]
)
def test_names_that_lead_out(tmp_path, file, refused, name):
    refused(rezip(file, lambda members: [*members, (name, b"x")]), "a member with the name")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin"]


def test_nested_zips(file, tmp_path, refused):
    """A zip file as the pickle, as a storage, and behind other bytes."""
    inner = file.read_bytes()
    # "P" begins a name that ends with the line: it depends on the bytes after it whether there is one.
    words = "not a torch file of plain tensors"
    refused(rezip(file, lambda members: [(n, inner if n.endswith("pkl") else c) for n, c in members]), words)
    save_zip(file, *state_of(ARRAYS))
    refused(
        rezip(file, lambda members: [(n, inner if n.endswith("/0") else c) for n, c in members]), "is not the size"
    )
    file.write_bytes(b"#!/bin/sh\n" + inner)
    refused(file)
    file.write_bytes(inner + inner)
    refused(file, "first byte")


def test_fields_of_the_zip_file(file, refused):
    """Sizes, positions and flags in the list of members that lie."""
    content = file.read_bytes()
    entry = content.index(b"PK\1\2")
    end = content.index(b"PK\5\6")
    huge = struct.pack("<I", 0xFFFFFFF0)
    for position, value in (
        (entry + 8, b"\1\0"), (entry + 10, b"\x63\0"), (entry + 20, huge), (entry + 24, huge), (entry + 42, huge),
        (entry + 42, struct.pack("<I", 5)), (end + 12, huge), (end + 16, huge), (0, b"PK\3\5"),
        (26, b"\xff\xff"), (28, b"\xff\xff"), (entry + 28, b"\xff\xff"), (entry + 30, b"\xff\xff"),
        (content.rindex(b"PK\3\4") + 28, b"\xff\xff"), (entry + 20, b"\xff" * 8),
        (entry + 42, b"\xff" * 4), (entry + 6, b"\xff"),
    ):  # fmt: skip
        file.write_bytes(content[:position] + value + content[position + len(value) :])
        refused(file)


def test_list_of_members_that_is_too_long(file, refused, monkeypatch):
    monkeypatch.setattr(torch_file, "LARGEST_DIRECTORY", 200)
    refused(file, "the list of the zip file's members")
    assert LARGEST_DIRECTORY >= 1 << 20


def test_big_endian(file, tmp_path, refused):
    state, data = state_of(ARRAYS)
    refused(save_zip(file, state, data, more=[("byteorder", b"big")]), "big-endian")
    refused(save_zip(file, state, data, more=[("byteorder", b"x" * 100)]), "byteorder has 100 bytes")
    refused(save_old(file, state, data, head=(MAGIC, VERSION, SYSTEM | {"little_endian": False})), "big-endian")


def test_heads_of_old_files(tmp_path, refused):
    state, data = state_of(ARRAYS)
    file = tmp_path / "x.bin"
    for head, words in (
        ((MAGIC + 1, VERSION, SYSTEM), "magic"), (("x", VERSION, SYSTEM), "magic"),
        ((MAGIC, 1002, SYSTEM), "version"), ((MAGIC, VERSION, []), "big-endian"), ((MAGIC, VERSION), ""),
    ):  # fmt: skip
        refused(save_old(file, state, data, head=head), words)
    for keys in (["0"], ["0", "1", "2"], ["0", "0", "1"], ["0", 1], {"0": 1}, "01", []):
        refused(save_old(file, state, data, keys=keys), "the keys of the storages")
    large = {"a": tensor(storage("0", "float64", (1 << 63) - 1), (1,)), "b": state["b"]}
    refused(save_old(file, large, data, counts={"0": (1 << 63) - 1}), "not inside the file, which is truncated")
    for count in (-1, 11, 13, 1 << 62):
        refused(save_old(file, state, data, counts={"0": count}), "elements, not 12")


def test_bytes_after_the_pickle(file, refused):
    state, data = state_of(ARRAYS)
    refused(save_zip(file, pickled(state) + b"cposix\nsystem\n", data), "bytes follow")
