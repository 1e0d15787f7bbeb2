"""A pool of processes for offline jobs, and the lock and scratch folders that make killed builds harmless."""

import multiprocessing
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from bert_jax.io.files import remove_tree, whole_file
from bert_jax.io.folder_lock import hold_folder
from bert_jax.io.storage import Location, ObjectPath

R = TypeVar("R")
_SCRATCH = "scratch-"
_PROCESS = uuid.uuid4().hex[:8]  # workers on several machines may share a folder, and have equal process numbers


def processor_count() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """``count`` processes (1: none, jobs run here); a context manager. Jobs are module-level functions.

    A block that ends with an exception, an interrupt among them, kills the processes and drops their jobs.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        if self.count > 1:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            self._start()
        return self

    def _start(self) -> None:
        self._executor = ProcessPoolExecutor(
            self.count, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker
        )

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._executor:
            if kind is not None:
                for process in list((self._executor._processes or {}).values()):
                    process.kill()
            self._executor.shutdown(wait=True, cancel_futures=True)

    def run(self, job: Callable[..., R], arguments: Iterable[tuple[Any, ...]]) -> Iterator[R]:
        """Results of ``job(*a)`` for every a, as they finish; arguments are drawn no faster than jobs finish.

        An exception of a job is raised here; ``ValueError`` if a process was killed.
        """
        if self._executor is None:
            for values in arguments:
                yield job(*values)
            return
        pending: set[Future[R]] = set()
        try:
            for values in arguments:
                with _main_module_hidden(), _signals_held():
                    pending.add(self._executor.submit(job, *values))
                while len(pending) > self.count + 1:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            fewer = ", with fewer data.workers" if self.count > 1 else ""
            raise ValueError(
                f"one of {self.count} worker processes was killed (out of memory?); "
                f"what is finished is kept: run again{fewer}"
            ) from None


class OneApart(Workers):
    """One process of its own, for a job that stays in a library for long: a signal cannot break it off there,
    but it can break off the wait for it, and then the process is killed. The library may use all processors."""

    def __init__(self) -> None:
        super().__init__(1)

    def __enter__(self) -> "OneApart":
        self._start()
        return self


def _start_worker() -> None:
    # The pool ends its processes with SIGTERM when one was killed. SIGINT stays blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """A killed parent cannot stop its workers: they watch it, or they would wait for jobs forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Starts of processes are never broken off halfway, and the processes never get Ctrl-C, which reaches the
    whole group: the parent alone decides. To the parent the signals come when the block ends."""
    resource_tracker.ensure_running()  # starting with the first process, it would let the signals through
    numbers = {signal.SIGINT, signal.SIGTERM}
    came: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        # Blocked here, a signal comes to another thread (numpy has some), and its handler would still run here.
        handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keeps spawned workers from importing the main script, which may import much more than they need."""
    main = sys.modules["__main__"]
    saved = {name: main.__dict__[name] for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(saved)


def exclusive(folder: Location) -> AbstractContextManager[None]:
    """Hold ``folder`` (made if missing) for one build; ``ValueError`` when another process holds it.

    Nothing is held in an object store: two builds there do the same work twice and write the same bytes.
    """
    if isinstance(folder, ObjectPath):
        folder.mkdir()
        return nullcontext()
    return hold_folder(folder, "another process is building here; wait for it or choose another folder")


def scratch_file(final: Location) -> AbstractContextManager[Path]:
    """:func:`whole_file` that several processes, on any machine, may use for one file."""
    return whole_file(final, None if isinstance(final, ObjectPath) else scratch_folder(final.parent))


def scratch_folder(folder: Path) -> Path:
    """A folder in ``folder`` for unfinished files, one for every process on any machine."""
    scratch = folder / f"{_SCRATCH}{os.getpid()}-{_PROCESS}"
    scratch.mkdir(exist_ok=True)
    return scratch


def remove_scratch(folder: Location) -> None:
    """Remove the unfinished files of killed processes in ``folder``."""
    for path in folder.glob(f"{_SCRATCH}*"):
        remove_tree(path)
