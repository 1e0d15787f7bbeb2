"""A pool of processes for offline jobs, and the locks and scratch folders of builds."""

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
from itertools import islice
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from bert_jax.io.files import remove_tree, whole_file
from bert_jax.io.folder_lock import hold_folder
from bert_jax.io.storage import Location, ObjectPath

R = TypeVar("R")
_SCRATCH, _THREADS = "scratch-", "TOKENIZERS_PARALLELISM"
_PROCESS = uuid.uuid4().hex[:8]  # workers on several machines may share a folder and have equal process ids


def processor_count() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Context manager for a pool of ``count`` processes that run jobs; a job is a module-level function.

    If ``count`` is 1, jobs run in this process or, with ``apart``, in one child process, because a signal can
    interrupt the wait for a child process, but not a long library call. If ``count`` is above 1, the threads of the
    tokenizers library are disabled. An exception or an interrupt in the block kills the processes and discards
    their jobs. The environment variable that disables them is restored at the end of the block.
    """

    def __init__(self, count: int, *, apart: bool = False) -> None:
        self.count, self._apart = count, apart
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        self._threads = os.environ.get(_THREADS)
        if self.count > 1:
            os.environ[_THREADS] = "false"
        if self.count > 1 or self._apart:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self.count, mp_context=context, initializer=_start_worker)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._executor:
            if kind is not None:
                for process in list((self._executor._processes or {}).values()):
                    process.kill()
            self._executor.shutdown(wait=True, cancel_futures=True)
        if self.count > 1:
            os.environ.pop(_THREADS, None)
            os.environ |= {} if self._threads is None else {_THREADS: self._threads}

    def run(self, job: Callable[..., R], arguments: Iterable[tuple[Any, ...]]) -> Iterator[R]:
        """Yield ``job(*values)`` for each tuple ``values`` in ``arguments``, in order of completion.

        ``arguments`` is consumed lazily, as jobs finish. An exception of a job is re-raised. Raises ``ValueError``
        if a process was killed.
        """
        if self._executor is None:
            for values in arguments:
                yield job(*values)
            return
        pending: set[Future[R]] = set()
        remaining = iter(arguments)
        try:
            while True:
                for values in islice(remaining, self.count + 2 - len(pending)):
                    with _main_module_hidden(), _signals_held():
                        pending.add(self._executor.submit(job, *values))
                if not pending:
                    return
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            fewer = ", with fewer data.workers" if self.count > 1 else ""
            raise ValueError(
                f"one of {self.count} worker processes was killed, perhaps for lack of memory; "
                f"finished parts are kept; run again{fewer}"
            ) from None


def _start_worker() -> None:
    # If one process is killed, the pool stops the others with SIGTERM. SIGINT stays blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent exits: a killed parent cannot stop its workers, which would wait for jobs forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block, in which worker processes start.

    SIGINT stays blocked in the new processes: Ctrl-C sends it to the whole process group, but only the parent may
    handle it.
    """
    resource_tracker.ensure_running()  # if it started with the first worker, it would unblock the signals
    numbers = {signal.SIGINT, signal.SIGTERM}
    came: list[signal.Signals] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        # A signal blocked in this thread reaches another (of numpy), but its Python handler still runs in this one.
        handlers = {
            number: signal.signal(number, lambda number, _: came.append(signal.Signals(number)))
            for number in numbers
        }
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
    """Prevent spawned workers from importing the main script, which may import much more than they need."""
    main = sys.modules["__main__"]
    saved = {name: value for name, value in main.__dict__.items() if name in ("__file__", "__spec__")}
    main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(saved)


def exclusive(folder: Location) -> AbstractContextManager[None]:
    """Create ``folder`` if it is missing, and lock it for one build.

    A folder in an object store is not locked: two simultaneous builds do the same work and write the same bytes.
    Raises ``ValueError`` if another process holds the lock.
    """
    if isinstance(folder, ObjectPath):
        return nullcontext()
    return hold_folder(folder, "another process is building here; wait for it or choose another folder")


def scratch_file(final: Location) -> AbstractContextManager[Path]:
    """Return a :func:`whole_file` context manager that writes ``final``; several processes, even on several
    machines, can write this file at the same time."""
    return whole_file(final, None if isinstance(final, ObjectPath) else scratch_folder(final.parent))


def scratch_folder(folder: Path) -> Path:
    """Create a subfolder of ``folder``, with a globally unique name, for the unfinished files of this process."""
    scratch = folder / f"{_SCRATCH}{os.getpid()}-{_PROCESS}"
    scratch.mkdir(exist_ok=True)
    return scratch


def remove_scratch(folder: Location) -> None:
    """Remove the unfinished files of killed processes from ``folder``."""
    for path in folder.glob(f"{_SCRATCH}*"):
        remove_tree(path)
