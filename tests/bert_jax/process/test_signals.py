"""A signal during minutes of C code, which lets no Python handler run, ends the process at once."""

import signal
import subprocess
import sys
import time

import pytest

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
    from bert_jax.process.signals import ends_at_once

    before = signal.set_wakeup_fd(-1)
    try:
        with ends_at_once("gone", lambda seconds: None):
            pass
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(before)
