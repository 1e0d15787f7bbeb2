"""Ctrl-C and SIGTERM ask to save and stop. Imports nothing heavy: installed before anything else."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from bert_jax import exits

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Remembers the first signal; a second Ctrl-C quits at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._interrupts = False

    @classmethod
    def install(cls) -> "StopRequest":
        """Handle SIGINT and SIGTERM of this process from now on."""
        request = cls()
        for number in SIGNALS:
            signal.signal(number, request._handle)
        return request

    @contextlib.contextmanager
    def at_once(self, message: str) -> Iterator[None]:
        """For work that may be broken off anywhere: a signal ends the block within a moment with
        ``exits.Stop(message)``, also one that came before it. Handles both signals inside the block, installed or
        not; in the main thread only."""
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._interrupts = True
        try:
            if not self:
                yield
        except BaseException:
            if not self:  # else it is the interrupt, or what the interrupted work made of it
                raise
        finally:
            self._interrupts = False
            for number, handler in before.items():
                signal.signal(number, handler)
        if self:
            if sys.stderr.isatty():
                print(file=sys.stderr)  # the terminal has echoed ^C
            raise exits.Stop(self.exit_code, message)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if number == signal.SIGINT:
                os._exit(exits.INTERRUPTED)
            return
        self.signal = signal.Signals(number)
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
