"""Paths that are no model: the line that says where one lies."""

import json

import pytest
from hf_folders import make_folder

from bert_jax.interop.readers import read_weights
from bert_jax.interop.tokenizers.json_format import bert_rules, wordpiece_json


def message(path) -> str:
    with pytest.raises(ValueError) as caught:
        read_weights(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folders_that_hold_models_name_one(tmp_path):
    for number in (500, 1000, 90):
        make_folder(tmp_path / "trainer" / f"checkpoint-{number}")
    assert "checkpoint-1000" in message(tmp_path / "trainer") and "3 checkpoints" in message(tmp_path / "trainer")
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    make_folder(snapshot)
    for root in (tmp_path / "hub", tmp_path / "hub" / "models--org--name", tmp_path):
        if root != tmp_path:
            assert str(snapshot) in message(root)
    make_folder(tmp_path / "several" / "first")
    assert str(tmp_path / "several" / "first") in message(tmp_path / "several")
    (tmp_path / "empty").mkdir()
    assert "supported formats" in message(tmp_path / "empty")


def test_folders_that_hold_a_format_of_a_room_name_one(tmp_path):
    (tmp_path / "vectors").mkdir()
    (tmp_path / "vectors" / "vectors.bin").write_bytes(b"1 1\na \0\0\0\0\n")
    assert f"name one, such as {tmp_path / 'vectors'}" in message(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "vocab.txt", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    folder = make_folder(tmp_path)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4aa4\nsize 117979485\n")
    assert "git lfs pull" in message(folder) and name in message(folder)


@pytest.mark.slow
def test_a_tokenizer_json_above_16_megabytes_is_read(tmp_path):
    folder = make_folder(tmp_path)
    pieces = (folder / "vocab.txt").read_text().split()
    state = wordpiece_json(pieces, bert_rules(lower_case=True, strip_accents=None, split_cjk=True))
    text = json.dumps(state)
    (folder / "tokenizer.json").write_text(text + " " * ((17 << 20) - len(text)))
    assert read_weights(folder).spec.tokenizer is not None
