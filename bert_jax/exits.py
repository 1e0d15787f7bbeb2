"""How a command ends: exit codes, and the one place that turns an exception into one line."""

import errno
import os
import sys
from collections.abc import Callable

from bert_jax.batch import DataBudgetError

OK, USER_ERROR, VERIFICATION_FAILED, PREEMPTED, DATA_BUDGET, NON_FINITE = 0, 2, 3, 42, 43, 44
INTERRUPTED = 130


class Stop(Exception):
    """A run that ends early for a reason that has its own exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def run_command(command: Callable[[], int | None]) -> int:
    """Run ``command`` and return its exit code; a user's mistake becomes one line on stderr and code 2.

    A ``ValueError`` or ``OSError`` is the user's to mend. Anything else is ours and keeps its traceback, but
    for a full disk, which the checkpoint library reports in several types.
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
    except ValueError as error:
        _say(f"error: {' '.join(str(error).split())}")
        return USER_ERROR
    except Exception as error:
        if "No space left on device" not in str(error):
            raise
        _say("error: No space left on device; what was complete before is kept: free some space and run again")
        return USER_ERROR


def _os_error_line(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    advice = {
        errno.ENOSPC: "; what was complete before is kept: free some space and run again",
        errno.EACCES: "; choose a folder that you may write to",
        errno.EROFS: "; choose a folder that you may write to",
    }.get(error.errno or 0, "")
    return f"error: {where}{error.strerror or error}{advice}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
