"""Lines of text files, also compressed: ``bert_jax/io/text_lines.py`` and the commands that read texts."""

import gzip
import json

import pytest

from bert_jax.inference.text_files import read_texts
from bert_jax.io.text_lines import Each, numbered_lines, opened

TEXT = "\ufeffone\r\n\nzwei äöü\nthree".encode()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_plain_and_compressed_files_have_the_same_lines(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(gzip.compress(TEXT) if suffix else TEXT)
    with opened(path) as file:
        assert list(numbered_lines(file, path)) == [(1, "one"), (2, ""), (3, "zwei äöü"), (4, "three")]
    assert list(read_texts((), str(path), False)) == ["one", "zwei äöü", "three"]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n') if suffix else b'{"text": "a"}\n')
    assert list(read_texts((), str(path), False)) == [{"text": "a"}]


@pytest.mark.parametrize("name", ["a.txt", "a.JSONL", "a.ndjson"])
def test_carriage_returns_end_lines(tmp_path, name):
    texts = ["one", "two", "three"]
    lines = texts if name == "a.txt" else [json.dumps({"text": text}) for text in texts]
    (tmp_path / name).write_bytes("\r".join([*lines[:2], "", lines[2]]).encode() + b"\r")
    found = list(read_texts((), str(tmp_path / name), False))
    assert found == (texts if name == "a.txt" else [{"text": text} for text in texts])


def test_files_that_are_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntw\0o\n")
    with pytest.raises(ValueError, match=r"a\.txt:2: a NUL character"):
        list(read_texts((), str(tmp_path / "a.txt"), False))
    for name in ("a.CSV", "b.tsv.gz"):
        with pytest.raises(ValueError, match="a table; use texts"):
            read_texts((), name, False)


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(TEXT * 100)[:-20])
    with pytest.raises(ValueError, match=r"^.*a\.txt\.gz: the compressed file is damaged .*; copy it again$"):
        list(read_texts((), str(path), False))
    path.write_bytes(gzip.compress(b"a\n\xff\n"))
    with pytest.raises(ValueError, match=r"a\.txt\.gz:2: not valid UTF-8; convert the file to UTF-8"):
        list(read_texts((), str(path), False))


def test_an_error_about_an_input_names_its_place(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": null}\n')

    def text_of(value):
        if not isinstance(value["text"], str):
            raise ValueError("no text")
        return value["text"]

    texts = Each(Each(read_texts((), str(path), False), text_of), str.upper)
    assert next(texts) == "A" and texts.where == f"{path}:1"
    with pytest.raises(ValueError, match=rf"^{path}:3: no text$"):
        next(texts)
    with pytest.raises(ValueError, match=r"^no text$"):
        list(Each([{"text": 1}], text_of))
