"""Ctrl-C and SIGTERM: save and stop. Imports nothing heavy, because it is installed before all other modules."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from bert_jax.process import exits

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds for which hosts wait for each other at the step where they stop: one may still compile or save.
AGREED_WITHIN = 900.0


class Interrupted(Exception):
    """Raised to end work other than a step (an evaluation) when the run must stop."""


class StopRequest:
    """Remembers the first signal; a second Ctrl-C quits at once. A signal to any host stops all of them, at the
    same step: see :meth:`share` and :meth:`reached`."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._came = 0.0  # when it came; monotonic clock
        self._interrupts = False
        self._notify: Callable[[int], object] | None = None  # sends the signal to the other hosts
        self._tick, self._reached = 0, False
        self._where = ""

    @classmethod
    def install(cls) -> "StopRequest":
        """Handle SIGINT and SIGTERM of this process from now on."""
        request = cls()
        for number in SIGNALS:
            signal.signal(number, request._handle)
        return request

    @contextlib.contextmanager
    def at_once(self, message: str) -> Iterator[None]:
        """Surround work that may be interrupted anywhere: a signal ends the block within a moment with
        ``exits.Stop(message)``, also one that came before it. Handles both signals inside the block, installed or
        not; in the main thread only."""
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._interrupts = True
        try:
            if not self:
                yield
        except BaseException:
            if not self:  # else it is the interrupt, or an error that follows from it
                raise
        finally:
            self._interrupts = False
            for number, handler in before.items():
                signal.signal(number, handler)
        if self:
            if sys.stderr.isatty():
                print(file=sys.stderr)  # the terminal has echoed ^C
            raise exits.Stop(self.exit_code, message)

    def share(self) -> None:
        """With several hosts: send the signals of this one to all. Call it right after
        ``jax.distributed.initialize``, whose preemption service has replaced the handler of SIGTERM: a signal then
        reaches the service alone, and one that came before would be lost. This puts the handler back in front.

        By ctypes: Python does not return a handler that C code has set (test_signals_kills_and_standstills).
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
        """Return True if the run stops here: the same on all hosts at the same call.

        Every host calls it equally often and at the same places: on joining, after restoring, before each
        step and each evaluation batch. The service agrees on the number of a call that no host has made yet.
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
        """Learn from all hosts which signal it was, where, and when."""
        from bert_jax.process import hosts

        own = f"{self.signal.name} {time.monotonic() - self._came}" if self.signal else ""
        answers = [answer.split() for answer in hosts.all_gather_text("stop", own, AGREED_WITHIN)]
        signaled = {host: answer for host, answer in enumerate(answers) if answer}
        # Ctrl-C wins: it comes from a person, and no supervisor is to start the run again.
        names = {name for name, _ in signaled.values()}
        self.signal = signal.SIGINT if "SIGINT" in names else signal.SIGTERM
        self._came = time.monotonic() - max((float(age) for _, age in signaled.values()), default=0.0)
        self._where = f" on host {', '.join(map(str, signaled))}" if signaled else ""

    def reason(self) -> str:
        """``2.3 s after SIGTERM on host 1``, for the last line of a run that was stopped."""
        assert self.signal is not None
        return f"{time.monotonic() - self._came:.1f} s after {self.signal.name}{self._where}"

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if number == signal.SIGINT:
                exits.end_now(exits.INTERRUPTED)
            return
        self.signal, self._came = signal.Signals(number), time.monotonic()
        if self._notify is not None:
            self._notify(signal.SIGTERM)
        if self._interrupts:
            raise KeyboardInterrupt
        word = "stopping before the next step, with the state saved (Ctrl-C now: quit at once)"
        print(f"\n{self.signal.name}: {word}", file=sys.stderr, flush=True)

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 42 after SIGTERM."""
        return exits.INTERRUPTED if self.signal == signal.SIGINT else exits.PREEMPTED
