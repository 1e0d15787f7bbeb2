"""Ctrl-C and SIGTERM ask the loop to save and stop. Imports nothing heavy: installed before anything else."""

import os
import signal
import sys
from types import FrameType

from bert_jax import exits


class StopRequest:
    """Remembers the first signal; a second Ctrl-C quits at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @classmethod
    def install(cls) -> "StopRequest":
        """Handle SIGINT and SIGTERM of this process from now on."""
        request = cls()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, request._handle)
        return request

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            os._exit(exits.INTERRUPTED)
        if self.signal is None:
            word = "stopping after this step to save (again: quit at once)"
            print(f"\n{signal.Signals(number).name}: {word}", file=sys.stderr, flush=True)
        self.signal = signal.Signals(number)

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 42 after SIGTERM."""
        return exits.INTERRUPTED if self.signal == signal.SIGINT else exits.PREEMPTED
