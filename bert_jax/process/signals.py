"""Handlers of Ctrl-C and SIGTERM, which make the run save its state and stop. This module does not import jax at
the top level, because the handlers are installed before JAX is imported."""

import contextlib
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from bert_jax.process import exits

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED = "stopped; run the same command again"
_CODES: dict[int, int] = {signal.SIGINT: exits.INTERRUPTED, signal.SIGTERM: exits.PREEMPTED}
# Maximum seconds that hosts wait for each other at the step where they stop: a host may still compile or save.
AGREED_WITHIN = 900.0


class Interrupted(Exception):
    """Raised to interrupt work other than a training step, such as an evaluation, if the run must stop."""


@contextlib.contextmanager
def ends_at_once(message: str, tick: Callable[[float], None], every: float = 30.0) -> Iterator[None]:
    """Context manager for work in C code that handles no signal for minutes, such as a compilation: a signal ends
    the process, without cleaning up, with ``message`` and the code of the signal. ``tick`` is called with the
    seconds since the start, every ``every`` seconds, in a thread."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before, began = signal.set_wakeup_fd(writing, warn_on_full_buffer=False), time.monotonic()

    def watch() -> None:
        ready = selectors.DefaultSelector()  # select() refuses descriptors from 1024 on
        ready.register(reading, selectors.EVENT_READ)
        while True:
            if not ready.select(every):
                tick(time.monotonic() - began)
                continue
            numbers = os.read(reading, 1)
            if not numbers:
                ready.close()
                os.close(reading)
                return
            if numbers[0] in _CODES:
                exits.end_now(_CODES[numbers[0]], message)

    threading.Thread(target=watch, name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)


@contextlib.contextmanager
def _handled_by(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context manager: ``handle`` handles both signals. Does nothing outside the main thread, which alone may set
    handlers and gets all signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StopRequest:
    """Request to stop a run. It is true after the first SIGINT or SIGTERM; a later Ctrl-C exits immediately.

    A signal to any host stops all hosts at the same step (:meth:`share`, :meth:`reached`). If the run is a part of
    another program, ``say`` is called with a line after the first signal, and nothing ends the process: a later
    Ctrl-C raises ``KeyboardInterrupt``.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say, self.ends_process = say, say is None
        self.signal: signal.Signals | None = None
        self._came = 0.0  # time of the signal by the monotonic clock
        self._interrupts = False
        self._notify: Callable[[int], object] | None = None  # sends the signal to the other hosts
        self._tick, self._reached = 0, False
        self._where = ""

    @classmethod
    def install(cls) -> "StopRequest":
        """Install handlers for SIGINT and SIGTERM in this process; return the request that they set."""
        request = cls()
        for number in SIGNALS:
            signal.signal(number, request._handle)
        return request

    @contextlib.contextmanager
    def handling(self) -> Iterator[None]:
        """Context manager for a run in another program: in the main thread, both signals set this request until the
        block ends. A SIGTERM is then passed on to the handler of the program."""
        try:
            with _handled_by(self._handle):
                yield
        finally:
            if self.signal == signal.SIGTERM:
                signal.raise_signal(signal.SIGTERM)

    @contextlib.contextmanager
    def at_once(self, message: str) -> Iterator[None]:
        """Context manager for work that may be interrupted anywhere: a signal, even one received before the block,
        ends the block immediately with ``exits.Stop(message)``.

        In the main thread, both signals are handled inside the block, even without :meth:`install`.
        """
        with _handled_by(self._handle):
            self._interrupts = True
            try:
                if not self:
                    yield
            except BaseException:
                if not self:  # after a signal, the error is the interrupt or was caused by it
                    raise
            finally:
                self._interrupts = False
        if self:
            if self.ends_process and sys.stderr.isatty():
                print(file=sys.stderr)  # a new line after the ^C that the terminal has echoed
            raise exits.Stop(self.exit_code, message)

    def share(self) -> None:
        """Start forwarding the signals of this host to all hosts.

        Must be called directly after ``jax.distributed.initialize``, whose preemption service replaces the handler
        of SIGTERM. This method restores the handler and forwards signals, including one received earlier, to the
        service. ctypes is used because Python does not return a handler that C code has installed.
        """
        import ctypes

        library = ctypes.CDLL(None)
        library.signal.restype = ctypes.c_void_p
        self._notify = ctypes.CFUNCTYPE(None, ctypes.c_int)(library.signal(signal.SIGTERM, None))
        signal.signal(signal.SIGTERM, self._handle)
        if self:
            self._notify(signal.SIGTERM)
        self.reached()

    def reached(self) -> bool:
        """Return True if the run must stop now. The n-th call returns the same value on all hosts.

        Every host must make the same calls: after joining, after restoring, before each step and before each
        evaluation batch. The service determines the number of the first call that returns True; no host has made
        this call yet.
        """
        if self._notify is None or self._reached:
            return bool(self)
        from jax.experimental import multihost_utils

        tick, self._tick = self._tick, self._tick + 1
        self._reached = multihost_utils.reached_preemption_sync_point(tick)
        if self._reached:
            self._agree()
        return self._reached

    def _agree(self) -> None:
        """Exchange the signals and their ages with all hosts, and choose the same signal on every host."""
        from bert_jax.process import hosts

        own = f"{self.signal.name} {time.monotonic() - self._came}" if self.signal else ""
        answers = [answer.split() for answer in hosts.all_gather_text("stop", own, AGREED_WITHIN)]
        signaled = {host: answer for host, answer in enumerate(answers) if answer}
        # Ctrl-C has priority: a person has pressed it, so no supervisor may restart the run.
        names = {name for name, _ in signaled.values()}
        self.signal = signal.SIGINT if "SIGINT" in names else signal.SIGTERM
        self._came = time.monotonic() - max((float(age) for _, age in signaled.values()), default=0.0)
        self._where = f" on host {', '.join(map(str, signaled))}" if signaled else ""

    def reason(self) -> str:
        """Return the reason for a stop, for the last line of a run, such as ``2.3 s after SIGTERM on host 1``."""
        assert self.signal is not None
        return f"{time.monotonic() - self._came:.1f} s after {self.signal.name}{self._where}"

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if number == signal.SIGINT and self.ends_process:
                exits.end_now(exits.INTERRUPTED)
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.signal, self._came = signal.Signals(number), time.monotonic()
        if self._notify is not None:
            self._notify(signal.SIGTERM)
        if self._interrupts:
            raise KeyboardInterrupt
        line = f"{self.signal.name}: the run saves its state and stops before the next step"
        if self._say is None:
            print(f"\n{line} (press Ctrl-C now to exit immediately)", file=sys.stderr, flush=True)
        else:
            with contextlib.suppress(RuntimeError):  # of a print that the signal has interrupted
                self._say(line)

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """Exit code of the stop: 130 after Ctrl-C, 42 after SIGTERM."""
        return _CODES[signal.SIGINT if self.signal == signal.SIGINT else signal.SIGTERM]
