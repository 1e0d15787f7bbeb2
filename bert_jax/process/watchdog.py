"""Watchdog that ends a run without progress. Without it, one stuck host would block all others forever."""

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from bert_jax.process import exits

P = ParamSpec("P")
R = TypeVar("R")

# Factor by which the limit is longer for work without beats (start-up, compilation, restoring, a save).
PHASE_FACTOR = 10
# Factor by which the limit is longer for a step during which a save is written. All processes exit within twice the
# limit, even if a save cannot finish because a process is stuck.
SAVE_FACTOR = 1.5
# Maximum seconds for writing the stacks, because a full pipe without a reader must not keep a stuck run alive.
DUMP_SECONDS = 10.0

STDERR = 2


class Watchdog:
    """A thread that writes the stacks of all threads and exits with code 45 if :meth:`beat` has not been called for
    ``limit`` seconds (0: never).

    Before the first beat and in a :meth:`phase`, the limit is ``PHASE_FACTOR`` times as long. The watchdog does not
    communicate with other hosts, so it works even if every collective is stuck. Time during which this process was
    suspended (Ctrl-Z, a sleeping machine) does not count. The watchdog cannot detect a main thread that never
    releases the interpreter lock.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.others: Callable[[], str] = lambda: ""  # activities of the other processes, for the message
        # True while a save is written during the steps, which then wait for memory and disk.
        self.is_writing: Callable[[], bool] = lambda: False
        # Seconds since the last beat: _stood counts all time, _idle divides the time of a save by SAVE_FACTOR.
        self._beats, self._idle, self._stood = 0, 0.0, 0.0
        self.doing, self._factor = "starting", PHASE_FACTOR
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if limit > 0:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def beat(self, doing: str) -> None:
        """Report progress; ``doing`` names the work that follows. Cheap enough to call at every step."""
        self.doing, self._factor = doing, 1
        self._beats += 1

    @contextlib.contextmanager
    def phase(self, doing: str) -> Iterator[None]:
        """Context manager for one long call, such as compilation, to which the longer limit applies."""
        before = self.doing, self._factor
        self.doing, self._factor = doing, PHASE_FACTOR
        self._beats += 1
        try:
            yield
        finally:
            self.doing, self._factor = before
            self._beats += 1

    def first_call(self, function: Callable[P, R], doing: str) -> Callable[P, R]:
        """Wrap ``function`` so that its first call, during which jit compiles it, is a :meth:`phase`."""
        called = False

        def call(*arguments: P.args, **named: P.kwargs) -> R:
            nonlocal called
            with contextlib.nullcontext() if called else self.phase(doing):
                called = True
                return function(*arguments, **named)

        return call

    def close(self) -> None:
        """Stop the watchdog thread; may be called twice."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self) -> None:
        interval = min(1.0, self._limit / 20)
        beats, before = self._beats, time.monotonic()
        while not self._closed.wait(interval):
            now = time.monotonic()
            # A suspended process resumes here; the pause is not caused by the main thread.
            passed = min(now - before, self._limit / 4)
            self._stood += passed
            self._idle += passed / SAVE_FACTOR if self.is_writing() and self._factor == 1 else passed
            before = now
            if self._beats != beats:
                beats, self._idle, self._stood = self._beats, 0.0, 0.0
            elif self._idle >= self._limit * self._factor:
                self._dump("The checkpoints are intact; run the same command on all hosts to continue")
                exits.end_now(exits.WATCHDOG)

    def dump_if_stuck(self) -> None:
        """Write the stacks of all threads if at least half of the limit has passed without progress.

        Called before this process exits because other processes are lost. Their own watchdogs may have ended them
        for the same lack of progress.
        """
        if self._limit > 0 and self._stood >= self._limit / 2:
            self._dump("")

    def _dump(self, advice: str) -> None:
        exit_anyway = threading.Timer(DUMP_SECONDS, exits.end_now, [exits.WATCHDOG])
        exit_anyway.daemon = True
        exit_anyway.start()
        others = self.others()
        line = (
            f"\nwatchdog: no progress for {self._stood:.0f} s (training.watchdog_seconds) in: {self.doing}"
            f"{f'; {others}' if others else ''}; the stacks of all threads follow. {advice}".rstrip()
        )
        os.write(STDERR, f"{line}\n".encode())
        faulthandler.dump_traceback(STDERR, all_threads=True)
        exit_anyway.cancel()
