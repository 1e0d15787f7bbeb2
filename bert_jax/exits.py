"""How a command ends: exit codes, and the one place that turns an exception into one line."""

import errno
import os
import sys
from collections.abc import Callable

from bert_jax.batch import DataBudgetError

OK, USER_ERROR, VERIFICATION_FAILED, PREEMPTED, DATA_BUDGET, NON_FINITE = 0, 2, 3, 42, 43, 44
INTERRUPTED = 130

DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
FREE_SPACE = "what was complete before is kept: free some space and run again"


class Stop(Exception):
    """A run that ends early for a reason that has its own exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def run_command(command: Callable[[], int | None]) -> int:
    """Run ``command`` and return its exit code; a user's mistake becomes one line on stderr and code 2.

    A ``ValueError`` or ``OSError`` is the user's to mend. Anything else is ours and keeps its traceback, but
    for a full disk, which the checkpoint library reports in several types (``ValueError`` among them).
    """
    try:
        return command() or OK
    except Stop as stop:
        _say(str(stop))
        return stop.code
    except DataBudgetError as error:
        _say(f"error: {error}")
        return DATA_BUDGET
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone (for example `| head`): nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        _say(_os_error_line(error))
        return USER_ERROR
    except Exception as error:
        text = " ".join(str(error).split())
        full = next((reason for reason in DISK_FULL if reason in text), None)
        if full is None and not isinstance(error, ValueError):
            raise
        _say(f"error: {text}" if full is None else f"error: {full}; {FREE_SPACE}")
        return USER_ERROR


def _os_error_line(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    advice = {
        errno.ENOSPC: f"; {FREE_SPACE}",
        errno.EDQUOT: f"; {FREE_SPACE}",
        errno.EACCES: "; choose a folder that you may write to",
        errno.EROFS: "; choose a folder that you may write to",
    }.get(error.errno or 0, "")
    return f"error: {where}{error.strerror or error}{advice}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
