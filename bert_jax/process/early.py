"""First import of each command.

A Python version that cannot run the command prints one line, and a signal during the other imports ends the command
without a traceback. This module imports nothing that takes time or that an old Python lacks.
"""

import importlib.util
import os
import signal
import sys
import time
from types import FrameType

# Start of the command, a value of time.perf_counter.
STARTED = time.perf_counter()

COMMANDS = (
    "run_pretrain.py", "run_finetune.py", "bert-jax", "bert-data", "bert_jax/commands/main.py",
    "bert_jax/commands/data.py",
)  # fmt: skip
_README = "activate its environment (source .venv/bin/activate), or run the first command of README.md"


def start() -> None:
    """Check the Python, and handle SIGINT and SIGTERM until the command installs other handlers. Does nothing if
    another program, such as a test, imports the command."""
    if not sys.argv[0].endswith(COMMANDS):
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if sys.version_info < (3, 11):  # noqa: UP036 - an installation checks it, a checkout does not
        sys.exit(_refusal(f"this is Python {sys.version.split()[0]}; bert_jax requires Python 3.11 or newer"))
    for name in ("numpy", "yaml", "jax"):
        if importlib.util.find_spec(name) is None:
            sys.exit(_refusal(f"{name} is not installed for {sys.executable}"))


def stop(number: int, frame: "FrameType | None") -> None:
    """End the process at once, because nothing is to be saved."""
    is_interrupt = number == signal.SIGINT
    os.write(2, b"interrupted\n" if is_interrupt else b"stopped; run the same command again\n")
    os._exit(130 if is_interrupt else 42)


def _refusal(problem: str) -> int:
    print(f"error: {problem}; {_README}", file=sys.stderr)
    return 2
