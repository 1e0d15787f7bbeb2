"""Exit codes of commands, and the conversion of exceptions to an exit code and one line on stderr."""

import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from bert_jax.batch import DataBudgetError
from bert_jax.io.errors import one_line
from bert_jax.io.storage import StorageUnavailable
from bert_jax.process import early

OK, USER_ERROR, VERIFICATION_FAILED, PREEMPTED, DATA_BUDGET, NON_FINITE, WATCHDOG = 0, 2, 3, 42, 43, 44, 45
INTERRUPTED = 130

DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
FREE_SPACE = "complete files are kept; free some space and run the command again"


class Stop(Exception):
    """Raised to end a run early with the exit code ``code``."""

    def __init__(self, code: int, message: str, *, agreed: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.agreed = agreed  # True: all processes of the run raise this at the same step, so it is not published


def end_now(code: int, line: str = "") -> NoReturn:
    """Write ``line`` to stderr and exit this process immediately, from any thread, without waiting for threads or
    devices."""
    if line:
        os.write(2, f"{line}\n".encode())
    os._exit(code)


def run_command(command: Callable[[], int | None]) -> int:
    """Run ``command`` and return its exit code. For a known error, print one line on stderr and return the code of
    the error.

    An exception that :func:`outcome` does not recognize is a bug, so its traceback is printed. The threshold for
    garbage collection is raised, because tracing creates millions of long-lived objects and every collection visits
    them.
    """
    gc.set_threshold(100_000, 20, 50)
    logging.basicConfig(format="%(message)s")
    try:
        if signal.getsignal(signal.SIGINT) is early.stop:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # temporary files are removed from here on
        return command() or OK
    except BrokenPipeError:
        # The reader of the output has closed the pipe (for example `| head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (Exception, KeyboardInterrupt) as error:
        known = outcome(error)
        if known is None:
            raise
        code, line = known
        print(line, file=sys.stderr, flush=True)
        return code


def outcome(error: BaseException) -> tuple[int, str] | None:
    """Return the exit code and the line for stderr if ``error`` ends a command, or None if ``error`` is a bug.

    ``ValueError`` and ``OSError`` are user errors. A full disk is a user error too, although Orbax raises
    exceptions of several types for it.
    """
    if isinstance(error, Stop):
        return error.code, str(error)
    if isinstance(error, DataBudgetError):
        return DATA_BUDGET, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, StorageUnavailable):
        return WATCHDOG, f"stopped: {error}"
    if isinstance(error, OSError):
        return USER_ERROR, _os_error_line(error)
    text = one_line(error)
    if (platforms := os.environ.get("JAX_PLATFORMS")) and _starts_jax(error):
        reason = (
            text.partition(" (set JAX_PLATFORMS")[0].strip(".")
            if isinstance(error, RuntimeError)
            else "not installed"
        )
        remedy = "install JAX for it (pip install 'jax[cuda12]' or 'jax[tpu]'), or unset JAX_PLATFORMS"
        return USER_ERROR, f"error: JAX_PLATFORMS: JAX cannot use {platforms}: {reason}; {remedy}"
    full = next((reason for reason in DISK_FULL if reason in text), None)
    if full is None and not isinstance(error, ValueError):
        return None
    return USER_ERROR, f"error: {text}" if full is None else f"error: {full}; {FREE_SPACE}"


def _starts_jax(error: BaseException) -> bool:
    """Return True if ``error`` was raised where JAX starts its platforms, with an assertion for one that it has no
    program for."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and at.tb_frame.f_code.co_filename.endswith("xla_bridge.py")


def _os_error_line(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    advice = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = f"; {FREE_SPACE}"
    elif error.errno in (errno.EACCES, errno.EROFS):
        advice = "; choose a folder that you may write to"
    return f"error: {where}{error.strerror or error}{advice}"
