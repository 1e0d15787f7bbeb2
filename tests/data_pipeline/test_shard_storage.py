"""Shards in an object store: the same batches as from local files, retries, and one line for a lost bucket.

fsspec's ``memory://`` file system stands in for ``gs://``: the code above it is the same.
"""

import logging
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from input_shards import assert_equal, config, make_shards, record_numbers, stream, take

from bert_jax.commands.data import main
from bert_jax.io import storage
from bert_jax.io.files import local_copy, remove_tree
from bert_jax.io.storage import ObjectPath, StorageError, location
from bert_jax.process.exits import run_command
from data_pipeline.read import pretrain_input as reading
from data_pipeline.shards.shard_files import INDEX_NAME, index_folder, read_index


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return make_shards(tmp_path / "shards", 150, 70, 260)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectPath]:
    """An empty folder of a store; waits between tries take no time."""
    monkeypatch.setattr(storage, "WAITS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = ObjectPath(f"memory://{uuid.uuid4().hex}")
    yield folder
    if folder.exists():
        remove_tree(folder)


def upload(folder: Path, bucket: ObjectPath) -> ObjectPath:
    target = bucket / folder.name
    for file in folder.iterdir():
        (target / file.name).upload(file)
    return target


class HttpError(Exception):
    """As gcsfs raises it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"status {code} of the test\nmore")
        self.code = code


def break_reads(
    folder: ObjectPath, monkeypatch: pytest.MonkeyPatch, error: Exception, times: int, name: str = ""
) -> list[str]:
    """The next ``times`` reads of the folder's files whose names hold ``name`` raise ``error``.

    Returns their keys. Reads of other folders pass: threads of a stream that an earlier test dropped may still
    be at work.
    """
    real, broken = MemoryFileSystem.cat_file, []

    def reading(self, path: str, *arguments, **options):
        if folder.parent.name in path and name in path and len(broken) < times:
            broken.append(path)
            raise error
        return real(self, path, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", reading)
    return broken


# ------------------------------------------------------------------ the reader


@pytest.mark.slow
@pytest.mark.parametrize("rows", [None, range(4, 12)])
def test_the_same_batches_as_from_local_files(local: Path, bucket: ObjectPath, rows) -> None:
    remote = upload(local, bucket)
    assert_equal(take(stream(local, rows=rows), 60), take(stream(remote, rows=rows), 60))
    resumed = stream(remote, rows=rows)
    resumed.restore(resumed.state() | {"data_step": 37})
    assert_equal(take(stream(local, rows=rows), 45)[37:], take(resumed, 8))
    options = {"batch_size": 16, "rows": rows}
    both = [list(reading.eval_batches(config(), folder=folder, **options)) for folder in (local, remote)]
    assert_equal(*both)


@pytest.mark.slow
def test_a_503_is_tried_again(local: Path, bucket: ObjectPath, monkeypatch, caplog) -> None:
    remote = upload(local, bucket)
    expected = take(stream(local), 20)
    for error in (HttpError(503), HttpError(429), RuntimeError("ABORTED: status of the test\nmore")):
        batches = stream(remote)
        broken = break_reads(remote, monkeypatch, error, 3, "tfrecord")
        with caplog.at_level(logging.WARNING):
            assert_equal(expected, take(batches, 20))
        batches.close()
        assert len(broken) == 3
        assert "of the test; trying again" in caplog.text and "more" not in caplog.text
        monkeypatch.undo()
        monkeypatch.setattr(storage, "WAITS", (0.0, 0.0, 0.0))


def test_damage_becomes_the_same_blank_rows(local: Path, bucket: ObjectPath, caplog) -> None:
    first, second, third = sorted(local.glob("*.tfrecord"))
    second.unlink()
    third.write_bytes(third.read_bytes()[:-3000])
    content = bytearray(first.read_bytes())
    content[1000] ^= 1
    first.write_bytes(content)
    remote = upload(local, bucket)
    data = config(max_blank_records=10_000)
    with caplog.at_level(logging.WARNING):
        batches = {folder: stream(folder, data) for folder in (local, remote)}
        taken = [take(one, 40) for one in batches.values()]
    assert_equal(*taken)
    blanks = [one.state()["blank_records"] for one in batches.values()]
    assert blanks[0] == blanks[1] > 70
    for text in ("is missing, but", "cannot be read", "beyond the end", "contents"):
        lines = [record.message for record in caplog.records if text in record.message]
        assert sum(str(remote) in line for line in lines) == sum(str(local) in line for line in lines) > 0


@pytest.mark.parametrize("lost", ["folder", "connection"])
def test_a_lost_bucket_ends_with_one_line(local: Path, bucket: ObjectPath, lost: str, monkeypatch, capsys) -> None:
    remote = upload(local, bucket)
    batches = stream(remote)
    next(batches)
    if lost == "folder":
        remove_tree(remote)
    else:
        break_reads(remote, monkeypatch, HttpError(503), 10**9)
    assert run_command(lambda: take(batches, 1000) and None) == (2 if lost == "folder" else 45)
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if line.startswith(("error: ", "stopped: "))]
    assert len(said) == 1 and not any("Traceback" in line for line in lines)
    assert ("the shards are missing" if lost == "folder" else "not reachable, tried 4 times") in said[0]


def test_refused_access_and_other_schemes(local: Path, bucket: ObjectPath, monkeypatch) -> None:
    remote = upload(local, bucket)
    broken = break_reads(remote, monkeypatch, HttpError(403), 10**9)
    with pytest.raises(StorageError, match=r"access refused .*gcloud auth application-default login.*permissions$"):
        stream(remote)
    assert len(broken) == 1  # asking again would not help
    with pytest.raises(StorageError, match=r"^nosuch://b/shards: .*allowed: local paths and gs://"):
        read_index("nosuch://b/shards")
    with pytest.raises(ValueError, match="no such folder of shards"):
        read_index(f"{bucket}/other")


def test_index_and_inspect(local: Path, bucket: ObjectPath, capsys) -> None:
    (local / INDEX_NAME).unlink()
    remote = upload(local, bucket)
    assert main(["inspect", str(remote)]) == 2
    assert f"run: bert-data index {remote}" in capsys.readouterr().err
    assert main(["index", str(remote)]) == 0
    assert "indexed 480 records in 3 shard(s)" in capsys.readouterr().out
    index_folder(local)
    assert (remote / INDEX_NAME).read_bytes() == (local / INDEX_NAME).read_bytes()
    assert main(["inspect", str(remote), "--examples", "0"]) == 0
    assert f"folder                 {remote}" in capsys.readouterr().out


# ------------------------------------------------------------------ paths


def test_locations(bucket: ObjectPath, tmp_path: Path) -> None:
    assert location("gs://b/folder/") == ObjectPath("gs://b/folder")
    assert location(str(tmp_path)) == tmp_path
    (tmp_path / "x").write_bytes(bytes(range(200)))
    path = bucket / "a/b.txt.gz"
    path.upload(tmp_path / "x")
    assert (path.name, path.stem, path.suffix, str(path.parent)) == ("b.txt.gz", "b.txt", ".gz", f"{bucket}/a")
    assert path.is_file() and not path.is_dir() and (bucket / "a").is_dir() and not (bucket / "b").exists()
    assert path.stat().st_size == 200
    assert path.read_range(190, 100) == bytes(range(190, 200)) and path.read_range(300, 5) == b""
    assert list(bucket.rglob("*.gz")) == [path] and list((bucket / "none").glob("*")) == []
    with path.open() as file:
        assert file.read(3) + file.read() == bytes(range(200))
    copy = local_copy(path)
    assert copy.read_bytes() == path.read_bytes() and local_copy(path) == copy and local_copy(copy) == copy
    (tmp_path / "x").write_bytes(b"other")
    path.upload(tmp_path / "x")
    assert local_copy(path).read_bytes() == b"other"
    path.replace(bucket / "moved")
    assert [p.name for p in bucket.glob("mov*")] == ["moved"] and not path.exists()


def test_a_location_is_no_local_path(bucket: ObjectPath) -> None:
    assert str(ObjectPath("gs://b").parent) == "gs://" and str(ObjectPath("gs://b/a:/c")) == "gs://b/a:/c"
    (bucket / "a").write_bytes(b"1")
    assert bucket in list(bucket.parent.iterdir())
    with pytest.raises(TypeError, match="ObjectPath"):
        os.fspath(bucket / "a")
    assert list(bucket.rglob("*")) == [bucket / "a"]
    MemoryFileSystem().pipe_file(f"/{bucket.name}//lost", b"1")
    with pytest.raises(StorageError, match="empty name between slashes"):
        list(bucket.rglob("*"))


def test_numbers_of_a_remote_stream_are_an_epoch(local: Path, bucket: ObjectPath) -> None:
    seen = np.concatenate([record_numbers(batch) for batch in take(stream(upload(local, bucket)), 30)])
    assert sorted(seen.tolist()) == list(range(480))
