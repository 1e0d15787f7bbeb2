"""The workdir of a run: its lock, the local folder of its logs, and copies of the logs in an object store."""

import contextlib
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from bert_jax.config import RunConfig, dump_yaml
from bert_jax.config.former import current_fields
from bert_jax.io.errors import one_line
from bert_jax.io.files import write_whole
from bert_jax.io.folder_lock import hold_folder
from bert_jax.io.storage import Location, ObjectPath, StorageError
from bert_jax.process import exits
from bert_jax.training.checkpoint.folder import saved_steps
from bert_jax.training.launch import RECORD, Launch
from bert_jax.training.logging.run_files import remove_report

_log = logging.getLogger(__name__)

# A run renews its lease every RENEWAL seconds; a lease that has not changed for LEASE seconds has expired.
RENEWAL, LEASE = 15.0, 60.0
LEASE_NAME = ".lease"
# Format of the record.
_FORMAT = 1
# Entries of a workdir that are written directly to the object store.
NOT_LOGS = ("checkpoints", "damaged_checkpoints", "rolled_back_checkpoints", "compilation_cache", LEASE_NAME)


class Logs(NamedTuple):
    """The local folder with the logs of a run, and the function that copies changed logs to the workdir."""

    folder: Path
    upload: Callable[[], None]


@contextlib.contextmanager
def hold_workdir(
    workdir: Location, taken: str, *, lead: bool = True, check_stop: Callable[[], None] = lambda: None
) -> Iterator[Logs]:
    """Lock ``workdir`` for a run until the block ends; only the ``lead`` process acquires the lock.

    If the workdir is local, the logs are written directly to it. If it is a URL, the logs are first copied to a
    temporary folder. Changed files are copied back by ``upload`` and at the end of the block, even after an error.
    If a copy fails, the temporary folder is kept and the error names it. A URL is locked with a lease. If a lease
    exists, this function waits up to LEASE seconds to see whether another run renews it, and meanwhile calls
    ``check_stop``, which may raise. If two runs start in the same second, both acquire the lease; one of them
    detects the conflict within RENEWAL seconds and exits at its next upload.

    Raises:
        ValueError: another run has locked the workdir; the message starts with the workdir and the text ``taken``.
        StorageError: the logs could not be copied.
    """
    if not isinstance(workdir, ObjectPath):
        with hold_folder(workdir, taken) if lead else contextlib.nullcontext():
            yield Logs(workdir, lambda: None)
        return
    if not lead:
        with tempfile.TemporaryDirectory(prefix="bert_jax-", ignore_cleanup_errors=True) as own:
            yield Logs(Path(own), lambda: None)
        return
    folder = Path(tempfile.mkdtemp(prefix="bert_jax-"))
    with _Lease(workdir, taken, check_stop) as lease:
        mirror = _Mirror(workdir, folder, lease)
        mirror.download()
        kept = f"the logs since the last checkpoint are in {folder}"
        try:
            yield Logs(folder, mirror.upload)
        except StorageError as error:
            raise type(error)(f"{error}; {kept}") from None
        except BaseException:
            try:
                mirror.upload()
            except StorageError as error:
                _log.warning("%s; %s", error, kept)
                raise
            shutil.rmtree(folder)
            raise
        try:
            mirror.upload()
        except StorageError as error:
            raise type(error)(f"{error}; {kept}") from None
    shutil.rmtree(folder)


def describe_run(folder: Path, config: RunConfig, record: str) -> None:
    """Write the config and ``record`` to files in ``folder``, and delete the old report, if any.

    ``record`` describes the initial model. It is not written if it is empty.
    """
    write_whole(folder / "config.yaml", dump_yaml(config))
    if record:
        write_whole(folder / RECORD, record)
    remove_report(folder)


def read_record(workdir: Location) -> dict[str, Any] | None:
    """Return the content of ``WORKDIR/warm_start.yaml``, or None if the file does not exist.

    The keys are ``init_from``: the initial model; ``source`` and ``resolved``: dicts of the model options of the
    initial model and of the run; ``continue_from``: the workdir of the earlier phase, "" in the first phase;
    ``trained_global``: True if the initial model had separate projections of global tokens; ``kept``: other
    settings of the initial model that the run uses.

    Raises ``ValueError`` if the file is damaged.
    """
    path = workdir / RECORD
    if not path.is_file():
        return None
    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
        if record["format"] != _FORMAT:
            raise ValueError(f"format {record['format']}")
        others: dict[str, Any] = {"continue_from": "", "trained_global": False, "kept": {}}
        others = {name: record.get(name, value) for name, value in others.items()}
        options = {name: current_fields(record[name], "model.") for name in ("source", "resolved")}
        return {"init_from": record["init_from"], **options, **others}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, yaml.YAMLError) as error:
        remedy = f"delete it and give --config {workdir}/config.yaml"
        raise ValueError(f"{path}: not readable ({one_line(error)}); {remedy}") from None


def record_text(
    name: str, source: Mapping[str, Any], resolved: Mapping[str, Any],
    continue_from: str = "", trained_global: bool = False, kept: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """Return the text of a record that :func:`read_record` returns; ``name`` is the initial model."""
    record = {"format": _FORMAT, "init_from": name, "source": dict(source), "resolved": dict(resolved)}
    if continue_from:
        record["continue_from"] = continue_from
    if trained_global:
        record["trained_global"] = True
    if kept:
        record["kept"] = dict(kept)
    return yaml.safe_dump(record, sort_keys=False)


def stopped(launch: Launch, what: str) -> exits.Stop:
    """Return the exception that ends a run after a signal. Its message names the workdir if a checkpoint exists."""
    saved = f"saved in {launch.workdir}" if saved_steps(launch.workdir) else "no checkpoint is saved yet"
    line = f"{what}, {launch.stop.reason()}; {saved}; run the same command to continue"
    return exits.Stop(launch.stop.exit_code, line, agreed=True)


class _Mirror:
    """Local copy of the logs of a workdir that is in an object store."""

    def __init__(self, workdir: ObjectPath, folder: Path, lease: "_Lease") -> None:
        self._workdir, self._folder, self._lease = workdir, folder, lease
        self._known: dict[PurePosixPath, tuple[int, int]] = {}  # size and modification time of each uploaded file
        self._lock = threading.Lock()

    def download(self) -> None:
        """Copy the logs of the workdir, except profiles, to the local folder."""
        try:
            entries = [path for path in self._workdir.iterdir() if path.name not in (*NOT_LOGS, "profile")]
        except FileNotFoundError:
            return
        for entry in entries:
            for path in entry.rglob("*"):
                name = path.relative_to(self._workdir)
                local = self._folder / name
                local.parent.mkdir(parents=True, exist_ok=True)
                local.write_bytes(path.read_bytes())
                self._known[name] = _signature(local)

    def upload(self) -> None:
        """Copy every changed file to the object store, and delete objects whose local files were deleted."""
        with self._lock:
            self._lease.check()
            present = set()
            for local in sorted(self._folder.rglob("*")):
                with contextlib.suppress(FileNotFoundError):  # the file was renamed after the listing
                    name = PurePosixPath(local.relative_to(self._folder).as_posix())
                    if not local.is_file() or local.suffix == ".tmp":
                        continue
                    signature = _signature(local)
                    present.add(name)
                    if self._known.get(name) != signature:
                        (self._workdir / name).write_bytes(local.read_bytes())
                        self._known[name] = signature
            for name in self._known.keys() - present:
                (self._workdir / name).unlink(missing_ok=True)
                del self._known[name]


def _signature(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


class _Lease:
    """Lease of a workdir: an object in the store, which the run renews as long as it uses the workdir."""

    def __init__(self, workdir: ObjectPath, taken: str, check_stop: Callable[[], None]) -> None:
        self._check_stop = check_stop
        self._path, self._taken = workdir / LEASE_NAME, f"{workdir}: {taken}"
        self._name = f"{socket.gethostname()} {os.getpid()} {os.urandom(8).hex()}"
        self._renewals = 0
        self._lost, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._renew, name="workdir-lease", daemon=True)

    def __enter__(self) -> "_Lease":
        before = self._read()
        waited = 0.0
        while before and waited < LEASE:
            if not waited:
                _log.warning("%s: another run has a lease; waiting up to %.0f s for its expiry", self._path, LEASE)
            look = time.monotonic() + min(RENEWAL / 3, LEASE)
            while time.monotonic() < look:
                self._check_stop()
                time.sleep(min(0.2, RENEWAL / 3))
            waited += min(RENEWAL / 3, LEASE)
            now = self._read()
            if now and now != before:
                raise ValueError(f"{self._taken} (host and process: {now.rpartition(' ')[0].rpartition(' ')[0]})")
            before = now
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        self._thread.join()
        if not self._lost.is_set():
            with contextlib.suppress(StorageError):  # the lease expires anyway
                self._path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise ``StorageError`` if another run has acquired the lease."""
        if self._lost.is_set():
            raise StorageError(self._taken)

    def _read(self) -> str:
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return ""

    def _write(self) -> None:
        self._renewals += 1
        self._path.write_text(f"{self._name} {self._renewals}")

    def _renew(self) -> None:
        while not self._closing.wait(RENEWAL):
            try:
                if not self._read().startswith(self._name):
                    self._lost.set()
                    return
                self._write()
            except StorageError as error:  # the next save also fails and ends the run with this error
                _log.warning("%s", error)
