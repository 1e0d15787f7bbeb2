"""Workdirs in an object store, on fsspec's memory://: index and logs as in a local folder, retries, endings."""

import contextlib
import logging
import sys
import threading
import time

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from bert_jax.io import storage
from bert_jax.io.storage import ObjectPath, StorageError, location
from bert_jax.process.exits import Stop, run_command
from bert_jax.training import workdir as workdirs
from bert_jax.training.checkpoint.digest import check_files, write_checksums
from bert_jax.training.checkpoint.folder import finish_moves, move_aside, saved_steps
from bert_jax.training.checkpoint.restore import set_aside
from bert_jax.training.logging.metrics_file import MetricsWriter, read_metrics
from bert_jax.training.logging.progress import Progress
from bert_jax.training.workdir import hold_workdir

URL = "memory://bucket/run"
TAKEN = "another run is using this workdir"


@pytest.fixture(autouse=True)
def store(monkeypatch):
    """An empty store, waits of milliseconds."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(storage, "WAITS", (0.001, 0.001, 0.001))
    monkeypatch.setattr(workdirs, "RENEWAL", 0.03)
    monkeypatch.setattr(workdirs, "LEASE", 0.3)
    return MemoryFileSystem.store


class HttpError(Exception):
    """As gcsfs raises it."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class DefaultCredentialsError(Exception):
    __module__ = "google.auth.exceptions"


def refuse(monkeypatch, method, error, times=10**9):
    """The first ``times`` calls of a method of the store fail; returns the number of calls."""
    calls, real = [], getattr(MemoryFileSystem, method)

    def failing(self, *arguments, **options):
        calls.append(arguments)
        if len(calls) <= times:
            raise error
        return real(self, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, method, failing)
    return calls


def write_checkpoint(folder, content=b"values" * 1000, committed=True):
    """Files such as Orbax leaves in an object store (a local folder may have the last one too)."""
    for name, data in (("state/d/1", content), ("meta/metadata", b"{}")):
        path = folder / name
        if not isinstance(path, ObjectPath):
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    if committed:
        (folder / "commit_success.txt").write_text("done")


def write_logs(folder, lines=3, start=0):
    """What a run logs."""
    writer = MetricsWriter(folder, start)
    with contextlib.closing(Progress(10, start, folder / "train.log")) as progress:
        for step in range(start + 1, start + lines + 1):
            writer.write(step, {"loss": 1.5 / step})
            progress.line(f"step {step}")
    writer.close()
    (folder / "config.yaml").write_text("model: {}\n")
    (folder / "tensorboard").mkdir(exist_ok=True)
    (folder / "tensorboard" / "events").write_bytes(bytes(range(256)))


# ------------------------------------------------------------------ paths


def test_a_name_becomes_a_path_or_an_object():
    assert location("runs/a").name == "a" and not isinstance(location("runs/a"), ObjectPath)
    path = location("gs://bucket/runs/a/")
    assert isinstance(path, ObjectPath) and str(path) == "gs://bucket/runs/a" and path.name == "a"
    assert str(path / "config.yaml") == "gs://bucket/runs/a/config.yaml" and (path / "b.txt").suffix == ".txt"


def test_files_and_folders():
    folder = ObjectPath(URL)
    assert not folder.exists() and not (folder / "a").is_file()
    (folder / "a").write_text("ä")
    (folder / "b" / "c").write_bytes(b"0123456789" * 1000)
    assert (folder / "a").read_text() == "ä" and (folder / "a").is_file() and not (folder / "a").is_dir()
    assert (folder / "b").is_dir() and (folder / "b" / "c").stat().st_size == 10_000
    assert [path.name for path in folder.iterdir()] == ["a", "b"]
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*")) == ["a", "b/c"]
    with (folder / "b" / "c").open("rb") as file:
        assert file.read(12) == b"012345678901" and len(file.read()) == 9_988
    (folder / "a").unlink()
    (folder / "a").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (folder / "a").read_bytes()


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    "error", [HttpError(503, "Service Unavailable"), HttpError(429, "Rate limit"), TimeoutError("slow"),
              RuntimeError("UNAVAILABLE: try later"), ConnectionResetError("reset")],
)  # fmt: skip
def test_a_request_refused_for_the_moment_is_tried_again(monkeypatch, caplog, error):
    calls = refuse(monkeypatch, "pipe_file", error, times=2)
    (ObjectPath(URL) / "a").write_text("x")
    assert len(calls) == 3 and (ObjectPath(URL) / "a").read_text() == "x"
    assert sum("trying again" in record.message for record in caplog.records) == 2


@pytest.mark.parametrize(
    ("error", "text", "code", "tries"),
    [
        (HttpError(503, "Unavailable\nmore"), "Unavailable", 45, 4),
        (HttpError(403, "Forbidden"), "access refused (Forbidden)", 2, 1),
        (OSError("Forbidden: bucket/run/a\nno access"), "access refused (Forbidden: bucket/run/a)", 2, 1),
        (DefaultCredentialsError("none"), "access refused (none)", 2, 1),
        (HttpError(400, "Bad name"), "Bad name", 2, 1),
        (FileNotFoundError("bucket"), "bucket", 2, 1),
    ],
)  # fmt: skip
def test_a_lasting_failure_is_one_line(monkeypatch, capsys, error, text, code, tries):
    """A failure that may pass has the code after which supervisors start again."""
    calls = refuse(monkeypatch, "pipe_file", error)
    assert run_command(lambda: (ObjectPath(URL) / "a").write_text("x")) == code
    line = capsys.readouterr().err
    assert line.startswith(f"{'stopped' if code == 45 else 'error'}: {URL}/a: ") and text in line
    assert line.count("\n") == 1 and len(calls) == tries


def test_a_range_beyond_the_end_is_empty(monkeypatch):
    (ObjectPath(URL) / "a").write_bytes(b"0123")
    assert (ObjectPath(URL) / "a").read_range(2, 10) == b"23"
    refuse(monkeypatch, "cat_file", HttpError(416, "Requested range not satisfiable"))
    assert (ObjectPath(URL) / "a").read_range(9, 10) == b""


def test_existence_is_not_guessed_from_an_error(monkeypatch):
    refuse(monkeypatch, "info", HttpError(403, "Forbidden"))
    with pytest.raises(StorageError, match="access refused"):
        ObjectPath(URL).exists()


@pytest.mark.parametrize(
    ("url", "line"), [("gs://b/r", "bert_jax\\[gcs\\]"), ("nosuch://b/r", "allowed: local paths")]
)
def test_a_store_that_cannot_be_used_here(url, line, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as if it were not installed
    with pytest.raises(StorageError, match=line):
        ObjectPath(url).exists()


# ------------------------------------------------------------------ checkpoint index


def test_committed_steps_and_their_checksums_are_those_of_a_local_folder(tmp_path):
    listings = []
    for workdir in (tmp_path / "run", ObjectPath(URL)):
        assert saved_steps(workdir) == []
        for step in (20, 100):
            write_checkpoint(workdir / "checkpoints" / str(step))
        folder = workdir / "checkpoints" / "100"
        write_checksums(folder)
        assert saved_steps(workdir) == [20, 100] and check_files(folder) is None
        listings.append((folder / "checksums.json").read_bytes())
        (folder / "state" / "d" / "1").write_bytes(b"valuez" * 1000)
        assert check_files(folder) == "state/d/1 differs from its checksum"
        (folder / "state" / "d" / "1").unlink()
        assert check_files(folder) == "state/d/1 is missing"
    assert listings[0] == listings[1]


def test_a_save_that_was_not_committed_is_no_checkpoint():
    workdir = ObjectPath(URL)
    write_checkpoint(workdir / "checkpoints" / "5")
    write_checkpoint(workdir / "checkpoints" / "10", committed=False)
    assert saved_steps(workdir) == [5]


def test_files_are_shared_out_among_processes(tmp_path):
    write_checkpoint(tmp_path)
    write_checksums(tmp_path)
    (tmp_path / "state" / "d" / "1").write_bytes(b"")
    found = [check_files(tmp_path, (i, 3)) for i in range(3)]
    assert [problem is None for problem in found] == [True, True, False]


def test_a_bad_checkpoint_is_marked_first_and_then_moved(monkeypatch, store):
    workdir = ObjectPath(URL)
    for step in (5, 10):
        write_checkpoint(workdir / "checkpoints" / str(step))
    with monkeypatch.context() as patch:
        refuse(patch, "cp_file", KeyboardInterrupt())  # killed before the first file
        with pytest.raises(KeyboardInterrupt):
            move_aside(workdir, 10, "damaged_checkpoints")
    assert (workdir / "checkpoints" / "10" / "commit_success.txt").is_file()
    assert (workdir / "damaged_checkpoints" / "10").is_file() and saved_steps(workdir) == [5]
    finish_moves(workdir)
    assert not (workdir / "damaged_checkpoints" / "10").exists() and saved_steps(workdir) == [5]
    moved = workdir / "damaged_checkpoints" / "step_10"
    assert (moved / "state" / "d" / "1").read_bytes() == b"values" * 1000
    # The step comes again, is good this time, and is gone back behind later.
    write_checkpoint(workdir / "checkpoints" / "10")
    assert saved_steps(workdir) == [5, 10]
    set_aside(workdir, 6)
    assert saved_steps(workdir) == [5] and (workdir / "rolled_back_checkpoints" / "step_10").is_dir()
    write_checkpoint(workdir / "checkpoints" / "10")
    assert move_aside(workdir, 10, "damaged_checkpoints").name == "step_10.2"


# ------------------------------------------------------------------ logs


def logs_in_store(store):
    prefix = "/bucket/run/"
    return {key.removeprefix(prefix): bytes(file.getvalue()) for key, file in store.items() if ".lease" not in key}


def test_logs_reach_the_store_byte_for_byte_and_come_back(tmp_path, store):
    with hold_workdir(ObjectPath(URL), TAKEN) as logs:
        write_logs(logs.folder)
        first = logs.folder
        here = {p.relative_to(first).as_posix(): p.read_bytes() for p in first.rglob("*") if p.is_file()}
        assert logs_in_store(store) == {}
        logs.upload()
        assert logs_in_store(store) == here and len(here) == 4
        writer = MetricsWriter(first, 3)
        writer.write(4, {"loss": 0.5})
        writer.close()
        (first / "config.yaml").unlink()
    assert not first.exists()
    assert "config.yaml" not in logs_in_store(store)
    (ObjectPath(URL) / "checkpoints" / "3" / "big").write_bytes(b"x")
    with hold_workdir(ObjectPath(URL), TAKEN) as logs:
        assert [line["step"] for line in read_metrics(logs.folder)] == [1, 2, 3, 4]
        assert (logs.folder / "train.log").is_file() and not (logs.folder / "checkpoints").exists()
    # A local workdir is its own folder of logs.
    with hold_workdir(tmp_path / "run", TAKEN) as logs:
        write_logs(logs.folder)
        logs.upload()
        assert logs.folder == tmp_path / "run"
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == here["metrics.jsonl"]


def test_only_what_changed_is_sent(monkeypatch):
    with hold_workdir(ObjectPath(URL), TAKEN) as logs:
        write_logs(logs.folder)
        logs.upload()
        calls = refuse(monkeypatch, "pipe_file", None, times=0)
        logs.upload()
        assert [arguments for arguments in calls if ".lease" not in arguments[0]] == []


def test_an_early_end_brings_the_logs_too(store):
    with pytest.raises(Stop), hold_workdir(ObjectPath(URL), TAKEN) as logs:
        write_logs(logs.folder)
        raise Stop(42, "stopped")
    assert "metrics.jsonl" in logs_in_store(store) and not logs.folder.exists()


def test_a_lost_bucket_ends_in_one_line_that_names_what_is_left(monkeypatch, capsys):
    kept = []

    def run():
        with hold_workdir(ObjectPath(URL), TAKEN) as logs:
            kept.append(logs.folder)
            write_logs(logs.folder)
            refuse(monkeypatch, "pipe_file", FileNotFoundError("bucket"))
            logs.upload()

    capsys.readouterr()
    assert run_command(run) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "cannot be written" in captured.err
    assert str(kept[0]) in captured.err and len(read_metrics(kept[0])) == 3


def test_a_process_that_is_not_the_lead_writes_nothing(store):
    with hold_workdir(ObjectPath(URL), TAKEN, lead=False) as logs:
        (logs.folder / "profile").mkdir()
        logs.upload()
    assert store == {} and not logs.folder.exists()


# ------------------------------------------------------------------ lease


def test_a_workdir_in_use_is_refused():
    with hold_workdir(ObjectPath(URL), TAKEN):
        began = time.monotonic()
        with pytest.raises(ValueError, match=f"{URL}: {TAKEN}"), hold_workdir(ObjectPath(URL), TAKEN):
            raise AssertionError
        assert time.monotonic() - began < 3
    with hold_workdir(ObjectPath(URL), TAKEN):
        pass


def test_a_lease_that_nobody_renews_runs_out():
    (ObjectPath(URL) / ".lease").write_text("host 7 abc 12")
    with hold_workdir(ObjectPath(URL), TAKEN) as logs:
        (logs.folder / "a").write_text("1")
    assert (ObjectPath(URL) / "a").is_file() and not (ObjectPath(URL) / ".lease").exists()


def test_who_lost_the_lease_writes_no_more(caplog):
    with pytest.raises(StorageError, match=TAKEN), hold_workdir(ObjectPath(URL), TAKEN) as logs:
        (ObjectPath(URL) / ".lease").write_text("other 7 abc 12")
        limit = time.monotonic() + 5
        while "workdir-lease" in {thread.name for thread in threading.enumerate()}:
            assert time.monotonic() < limit
            time.sleep(0.01)
        (logs.folder / "a").write_text("1")
        logs.upload()
    assert not (ObjectPath(URL) / "a").exists() and (ObjectPath(URL) / ".lease").read_text().startswith("other")


def test_waits_are_said(monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    refuse(monkeypatch, "ls", HttpError(500, "Internal"), times=1)
    write_checkpoint(ObjectPath(URL) / "checkpoints" / "5")
    assert saved_steps(ObjectPath(URL)) == [5] and "Internal; trying again" in caplog.text
