"""Heartbeats of the processes of a run. Without heartbeats, the processes would wait forever for a lost process."""

import contextlib
import ctypes
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from bert_jax.process import exits

FOLDER = "bert_jax/alive/"
# Seconds by which the timeout of JAX's own heartbeats is longer, because JAX does not name the lost process.
JAX_LATER = 10
RESUME = "run the same command on all hosts to continue from the newest checkpoint"


class HeartbeatMonitor:
    """A thread that writes the heartbeats of this process to the key-value store of jax's coordination service and
    reads the heartbeats of the other processes.

    If a process sends no heartbeat for ``limit`` seconds, this process exits with code 45.

    Args:
        client: client of the coordination service.
        address: HOST:PORT of the service, which runs in the lead (process 0).
        index: index of this process.
        count: number of processes.
        limit: maximum seconds without a heartbeat.
        leave: function that ends this process; its arguments are the indices of the lost processes and a message.
    """

    def __init__(
        self,
        client: Any,
        address: str,
        index: int,
        count: int,
        limit: float,
        leave: Callable[[list[int], str], None],
    ) -> None:
        self._client, self._address, self._index = client, address, index
        self._limit, self._leave = limit, leave
        self.doing: Callable[[], str] = lambda: "starting"  # activity of this process, for other processes
        self.before_leaving: Callable[[], None] = lambda: None
        self._interval = min(2.0, limit / 10)
        self._values = dict.fromkeys(range(count), "")  # last value of each process
        self._silent = dict.fromkeys(range(count), 0.0)  # seconds since this value changed
        self._heard = dict.fromkeys(range(count), 0)  # number of values received
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeats", daemon=True)
        self._thread.start()
        self._catch_abort()

    def describe(self) -> str:
        """Return the last known activities of the other processes as text for a message."""
        return "; ".join(self._line(process) for process in self._values if process != self._index)

    def wait_for_verdict(self) -> None:
        """Wait, after an error in a collective, until all processes have sent two heartbeats.

        If another process is lost, this process exits when the heartbeat timeout expires, and the method does not
        return.
        """
        heard, limit = dict(self._heard), time.monotonic() + self._limit + JAX_LATER
        while time.monotonic() < limit and not self._closed.is_set():
            # Two heartbeats, because the first may have been sent before the error.
            if all(count >= heard[process] + 2 for process, count in self._heard.items()):
                return
            time.sleep(self._interval / 4)

    def close(self) -> None:
        """Stop the heartbeats. Must be called by every process, after a barrier that all processes have passed."""
        self._closed.set()
        self._thread.join(timeout=self._interval + 1)

    def _line(self, process: int) -> str:
        _, host, doing = (*self._values[process].split("|"), "", "", "")[:3]
        name = f"process {process}{f' ({host})' if host else ''}"
        seconds = f"{self._silent[process]:.0f} s"
        if not doing:
            return f"{name} has sent no heartbeat for {seconds}"
        return f"{name} sent its last heartbeat {seconds} ago (activity: {doing})"

    def _watch(self) -> None:
        count, before = 0, time.monotonic()
        while not self._closed.wait(self._interval):
            count += 1
            # If the service is unreachable, all processes count as silent.
            with contextlib.suppress(RuntimeError):
                own = f"{count}|{socket.gethostname()}|{self.doing()}"
                self._client.key_value_set(f"{FOLDER}{self._index}", own, allow_overwrite=True)
                self._listen(self._client.key_value_dir_get(FOLDER))
            now = time.monotonic()
            # Time during which this process was suspended does not count as silence of the others.
            gap = min(now - before, self._limit / 4)
            before = now
            for process in self._silent:
                self._silent[process] += gap
            lost = [process for process, silent in self._silent.items() if silent > self._limit + self._interval]
            if lost and not self._closed.is_set():
                if self._index in lost:  # its own value is missing too, so the lead and its service are lost
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
        return f"stopped: lost contact: {'; '.join(map(self._line, lost))}; {RESUME}"

    def _catch_abort(self) -> None:
        """Exit with a message and code 45 if JAX aborts this process because the lead and its service are lost.

        Aborts for other reasons proceed (code 134). The SIGABRT handler is installed with ctypes, because a handler
        that the module ``signal`` installs runs only after control returns to the interpreter, and abort() never
        returns. A ctypes handler runs inside abort(), in the JAX thread that called abort().
        """

        def handle(number: int) -> None:
            lost = [process for process, silent in self._silent.items() if silent > self._limit / 2]
            if self._index > 0 and not self._lead_answers():
                lost = [0]
            if lost:
                self.before_leaving()
                exits.end_now(exits.WATCHDOG, self._verdict(lost))

        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
        # The default result type of ctypes, int, cannot represent a pointer.
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
