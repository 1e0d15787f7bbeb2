"""Is every other process of the run still there? One that is gone would leave the others waiting for ever."""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from bert_jax.process import exits

FOLDER = "bert_jax/alive/"
# Seconds for which this comes before jax's own heartbeats, which abort without a line about who is gone.
JAX_LATER = 10
RESUME = "run the same command on all hosts to continue from the newest checkpoint"


class Peers:
    """A thread by which this process says that it lives, and hears it of the others, through the key-value store
    of jax's coordination service. One that is silent for ``limit`` seconds ends this process with code 45.

    Args:
        client: of the coordination service.
        address: HOST:PORT of that service, which the lead (process 0) holds.
        index, count: of this process, and of all.
        limit: seconds.
        leave: ends this process, given those that are lost and a line.
    """

    def __init__(
        self,
        client: Any,
        address: str,
        index: int,
        count: int,
        limit: float,
        leave: Callable[[list[int], str], Any],
    ) -> None:
        self._client, self._address, self._index = client, address, index
        self._limit, self._leave = limit, leave
        self.doing: Callable[[], str] = lambda: "starting"  # shown by the others when this process is lost
        self.before_leaving: Callable[[], None] = lambda: None
        self._interval = min(2.0, limit / 10)
        self._values = dict.fromkeys(range(count), "")  # the last one that was heard of each process
        self._silent = dict.fromkeys(range(count), 0.0)  # seconds since then
        self._heard = dict.fromkeys(range(count), 0)  # how often
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()
        self._catch_abort()

    def describe(self) -> str:
        """What is known of every other process, for a message."""
        return "; ".join(self._line(process) for process in self._values if process != self._index)

    def wait_for_verdict(self) -> None:
        """After an error in a collective: return when all others prove to be there (the error has another
        reason). If one is gone, the process ends here when the limit is over."""
        heard, limit = dict(self._heard), time.monotonic() + self._limit + JAX_LATER
        while time.monotonic() < limit and not self._closed.is_set():
            # Twice, because a message may have been under way.
            if all(count >= heard[process] + 2 for process, count in self._heard.items()):
                return
            time.sleep(self._interval / 4)

    def close(self) -> None:
        """Stop watching and speaking; the others must do so too, at a barrier."""
        self._closed.set()
        self._thread.join(timeout=self._interval + 1)

    def _line(self, process: int) -> str:
        _, host, doing = (*self._values[process].split("|"), "", "", "")[:3]
        name = f"process {process}{f' ({host})' if host else ''}"
        state = f"was last {doing}" if doing else "never said a word"
        return f"{name} {state}, {self._silent[process]:.0f} s ago"

    def _watch(self) -> None:
        count, before = 0, time.monotonic()
        while not self._closed.wait(self._interval):
            count += 1
            # Unreachable is the same as silent: nothing is heard of anybody.
            with contextlib.suppress(RuntimeError):
                own = f"{count}|{socket.gethostname()}|{self.doing()}"
                self._client.key_value_set(f"{FOLDER}{self._index}", own, allow_overwrite=True)
                self._listen(self._client.key_value_dir_get(FOLDER))
            now = time.monotonic()
            # A process that was itself stopped for a while has no right to call others silent.
            gap = min(now - before, self._limit / 4)
            before = now
            for process in self._silent:
                self._silent[process] += gap
            lost = [process for process, silent in self._silent.items() if silent > self._limit + self._interval]
            if lost and not self._closed.is_set():
                if self._index in lost:  # its own word did not come back either: it is the lead's service
                    lost = [0]
                self._leave(lost, self._verdict(lost))

    def _listen(self, values: list[tuple[str, str]]) -> None:
        for key, value in values:
            process = int(key.rpartition("/")[2])
            if value != self._values[process]:
                self._values[process] = value
                self._silent[process] = 0.0
                self._heard[process] += 1

    def _verdict(self, lost: list[int]) -> str:
        return f"stopped: {'; '.join(map(self._line, lost))}, and is gone; {RESUME}"

    def _catch_abort(self) -> None:
        """When the lead is gone its service is, and jax aborts this process at once: then too code 45 and a line.
        What aborts while nobody seems to be gone goes on doing so (code 134).

        A handler of Python's own would never run, because abort() does not return to it; this one runs inside
        abort(), in the thread of jax that called it.
        """

        def handle(number: int) -> None:
            lost = [process for process, silent in self._silent.items() if silent > self._limit / 2]
            if self._index > 0 and not self._lead_answers():
                lost = [0]
            if lost:
                self.before_leaving()
                os.write(2, f"{self._verdict(lost)}\n".encode())
                os._exit(exits.WATCHDOG)

        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
        # Typed, because a pointer does not fit the int that ctypes takes a result for.
        set_handler = ctypes.CDLL(None).signal
        set_handler.restype = ctypes.c_void_p
        set_handler(int(signal.SIGABRT), self._handler)

    def _lead_answers(self) -> bool:
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
        except OSError:
            return False
        return True
