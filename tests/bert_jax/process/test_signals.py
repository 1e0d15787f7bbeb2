"""Handlers of signals; a signal during minutes of C code, which lets no Python handler run, ends the process."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from bert_jax.process.signals import SIGNALS, StopRequest, ends_at_once

PROGRAM = """
import hashlib, os, resource
from bert_jax.process.signals import StopRequest, ends_at_once

resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
kept = [os.dup(2) for _ in range(1100)]  # the next descriptors are above 1024, the limit of select()
with StopRequest().at_once("later"), ends_at_once("gone", lambda seconds: print(seconds, flush=True), 0.1):
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 42), (signal.SIGINT, 130)])
def test_a_signal_in_c_code(number, code):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert float(process.stdout.readline()) > 0.05
    process.send_signal(number)
    began = time.monotonic()
    assert process.communicate(timeout=60)[1] == "gone\n"
    assert process.returncode == code and time.monotonic() - began < 30


def test_work_that_ends_leaves_nothing_behind():
    before = signal.set_wakeup_fd(-1)
    try:
        with ends_at_once("gone", lambda seconds: None):
            pass
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(before)


def test_a_run_in_another_program():
    """Handlers are set in the main thread only, and restored; a second Ctrl-C interrupts, and nothing ends."""
    before, lines = [signal.getsignal(number) for number in SIGNALS], []
    stop = StopRequest(lines.append)
    with pytest.raises(KeyboardInterrupt), stop.handling():
        signal.raise_signal(signal.SIGINT)
        assert stop and lines == ["SIGINT: the run saves its state and stops before the next step"]
        signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    found = []

    def work():
        with StopRequest(lines.append).handling(), StopRequest(lines.append).at_once("ended"):
            found.extend(signal.getsignal(number) for number in SIGNALS)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == before


def test_sigterm_is_passed_on():
    passed = []
    before = signal.signal(signal.SIGTERM, lambda *_: passed.append(len(passed)))
    stop = StopRequest(lambda line: None)
    try:
        with stop.handling():
            signal.raise_signal(signal.SIGTERM)
            assert stop and not passed
        assert passed == [0]
    finally:
        signal.signal(signal.SIGTERM, before)
