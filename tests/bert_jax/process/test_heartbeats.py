"""Heartbeats through a key-value store that refuses to set a key again unless told to, as that of JAX does."""

import socket
import threading
import time

import pytest

from bert_jax.process import heartbeats
from bert_jax.process.discovery import check_port


class Store:
    def __init__(self):
        self.values, self.lock = {}, threading.Lock()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.lock:
            if key in self.values and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value

    def key_value_dir_get(self, folder):
        with self.lock:
            return [item for item in self.values.items() if item[0].startswith(folder)]


@pytest.fixture
def start(monkeypatch):
    """Function that starts the monitor of a process of two; what ``leave`` received is in its list ``left``."""
    monkeypatch.setattr(heartbeats.HeartbeatMonitor, "_catch_abort", lambda self: None)
    monitors = []

    def started(store, index, limit):
        left = []
        monitor = heartbeats.HeartbeatMonitor(
            store, "", index, 2, limit, lambda lost, line: left.append((lost, line))
        )
        monitors.append(monitor)
        return monitor, left

    yield started
    for monitor in monitors:
        monitor.close()


def test_processes_that_beat_are_not_lost_and_a_silent_one_is(start):
    store = Store()
    (one, left), (other, _) = start(store, 0, 1.0), start(store, 1, 1.0)
    other.doing = lambda: "training"
    one.wait_for_verdict()  # two heartbeats of each
    time.sleep(1.5)
    assert left == [] and "activity: training" in one.describe()
    other.close()
    began = time.monotonic()
    while not left and time.monotonic() < began + 20:
        time.sleep(0.02)
    lost, line = left[0]
    assert lost == [1] and line.startswith(
        f"stopped: lost contact: process 1 ({socket.gethostname()}) sent its last"
    )
    assert time.monotonic() - began > 0.9


def test_a_port_in_use_is_refused():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port {port} of this host is not free"):
            check_port(f"localhost:{port}")
    check_port(f"localhost:{port}")
