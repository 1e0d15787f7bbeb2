"""The pretraining program inside the test's process: much faster than a process of its own."""

import importlib
import signal

import pytest


@pytest.fixture(scope="module")
def program():
    """``run_pretrain`` as a module; its signal handlers are taken back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    module = importlib.import_module("run_pretrain")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return module
