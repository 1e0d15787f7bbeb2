"""The processes of a run: start-up, exchange of small values, and coordinated exit.

There is one process per host on TPU, and one per host or per GPU elsewhere. Process 0 is the lead. Values are
exchanged through the coordination service of jax.distributed in process 0: no device is involved, and every wait
has a time limit. A failing process publishes a one-line message, and the other processes exit with this message
instead of hanging. With one process, no function communicates.
"""

import collections
import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax

from bert_jax.config import RunOptions
from bert_jax.io.errors import first_line
from bert_jax.io.storage import Location
from bert_jax.json_values import Json
from bert_jax.process import discovery, exits
from bert_jax.process.heartbeats import JAX_LATER, HeartbeatMonitor

FAILURE = "bert_jax/failure"
WATCH = "failure-watch"
# Maximum seconds that the lead, which runs the service, waits for the others to read the published failure.
LAST_WORDS = 20.0
# Seconds that the lead leaves them between their last call to the service and their exit.
EXIT_WITHIN = 0.5
# Seconds within which a file that one host creates in a shared folder must become visible to the others.
SHARED_WITHIN = 10.0


class _State:
    """State of this process as a member of the run."""

    def __init__(self) -> None:
        self.calls = collections.Counter[str]()  # number of calls by name; the same on all processes
        self.leaving = threading.Event()
        self.heartbeats: HeartbeatMonitor | None = None  # only with several processes


_state = _State()


# ------------------------------------------------------------------ start


def start(options: RunOptions) -> None:
    """Join the other processes of a run with several processes. Must be called before JAX uses a device.

    A run has several processes if flags or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (or
    JOB_COMPLETION_INDEX) name them, or in a Cloud TPU pod or a SLURM step of several tasks, where JAX determines
    the addresses. If any process fails to join within ``options.host_timeout`` seconds, the others exit with one
    line and code 45.

    Raises:
        ValueError: the settings contradict each other, or the port of the coordinator is not free.
    """
    configured = discovery.configured(options)
    if configured is None and not discovery.is_tpu_pod() and not discovery.is_slurm_step():
        return
    source = "addresses from the environment variables of the cluster"
    if configured is not None:
        source = f"{configured[0]}, process {configured[2]} of {configured[1]}"
    if configured is not None and configured[2] == 0:
        discovery.check_port(configured[0])
    line = (
        f"stopped: hosts: not all processes connected within {options.host_timeout} s ({source}); start the "
        "same command on every host, check that all hosts can reach process 0, or increase --host_timeout"
    )
    # Without this timer, JAX would abort a little later with a stack trace.
    timer = threading.Timer(options.host_timeout, exits.end_now, [exits.WATCHDOG, line])
    timer.daemon = True
    timer.start()
    limits: dict[str, Any] = {
        "initialization_timeout": options.host_timeout + 60,
        # Doubled, because JAX sends a heartbeat every half timeout and may report a loss after that time.
        "heartbeat_timeout_seconds": 2 * (options.heartbeat_timeout + JAX_LATER),
        "shutdown_timeout_seconds": options.host_timeout,
    }
    try:
        if configured is None:
            jax.distributed.initialize(local_device_ids=discovery.slurm_devices(), **limits)
        else:
            address, processes, process = configured
            jax.distributed.initialize(address, processes, process, cluster_detection_method="deactivate", **limits)
    except RuntimeError as error:
        raise ValueError(f"hosts: cannot join the other processes ({source}): {first_line(error)}") from None
    finally:
        timer.cancel()
    threading.Thread(target=_watch, name=WATCH, daemon=True).start()
    service = _service()
    _state.heartbeats = HeartbeatMonitor(
        service.client,
        service.coordinator_address,
        service.process_id,
        service.num_processes,
        options.heartbeat_timeout,
        _leave,
    )


# ------------------------------------------------------------------ agreement


def count() -> int:
    """Return the number of processes of the run, without using a device."""
    return int(_service().num_processes)


def index() -> int:
    """Return the index of this process, from 0."""
    return int(_service().process_id)


def is_lead() -> bool:
    """Return True on process 0, which writes the logs, the report and the config."""
    return index() == 0


def barrier(name: str, timeout_seconds: float) -> None:
    """Wait until every process has called this function. All processes must use the same names in the same order.

    Raises ``exits.Stop`` (code 45) after ``timeout_seconds``; its message names the missing processes if known.
    """
    if count() == 1:
        return
    try:
        _client().wait_at_barrier(f"bert_jax/{_unique(name)}", timeout_in_ms=int(timeout_seconds * 1000))
    except RuntimeError as error:
        text = str(error)
        if "DEADLINE_EXCEEDED" not in text:
            raise
        late = re.search(r"timed out task names:\s*([\d\s]+)", text)
        who = f"process {', '.join(late[1].split())}" if late and late[1].strip() else "another process"
        raise exits.Stop(
            exits.WATCHDOG,
            f"stopped: {who} did not reach {name!r} within {timeout_seconds:g} s; read its log, then run the same "
            "command on every host again",
        ) from None


def all_gather_text(name: str, value: str, timeout_seconds: float) -> list[str]:
    """Return the ``value`` (a short text) of every process, in a list sorted by process index.

    The rules of :func:`barrier` apply.
    """
    if count() == 1:
        return [value]
    client = _client()
    folder = f"bert_jax/{_unique(name)}/"
    client.key_value_set(f"{folder}{index():08d}", value)
    barrier(name, timeout_seconds)
    values = [text for _, text in sorted(client.key_value_dir_get(folder))]
    assert len(values) == count()
    # Delete old values: a process that reaches this call has read the values of all earlier calls of this name.
    if _state.calls[name] > 2:
        client.key_value_delete(f"bert_jax/{name}/{_state.calls[name] - 2}/{index():08d}")
    return values


def broadcast_from_lead(name: str, value: bool, timeout_seconds: float) -> bool:
    """Return the ``value`` of the lead on every process, for decisions that depend on files on the lead's host."""
    return all_gather_text(name, str(value), timeout_seconds)[0] == "True"


def require_equal(name: str, value: str, advice: str, timeout_seconds: float) -> None:
    """Raise ``ValueError`` on every process unless ``value`` is the same on all processes.

    The message ends with ``advice``.
    """
    values = all_gather_text(name, value, timeout_seconds)
    odd = [i for i, other in enumerate(values) if other != values[0]]
    if odd:
        raise ValueError(f"{name}: not the same on process {', '.join(map(str, odd))} as on process 0; {advice}")


def require_shared(folder: Location, timeout_seconds: float) -> None:
    """Raise ``ValueError`` on every process unless all processes see a file that the lead creates in ``folder``."""
    if count() == 1:
        return
    name = all_gather_text("mark", f".shared-{os.urandom(8).hex()}", timeout_seconds)[0]
    if is_lead():
        (folder / name).touch()
    try:
        barrier("marked", timeout_seconds)
        seen = all_gather_text("seen", str(_appears(folder / name)), timeout_seconds)
    finally:
        if is_lead():
            (folder / name).unlink()
    blind = [str(i) for i, answer in enumerate(seen) if answer != "True"]
    if blind:
        raise ValueError(
            f"{folder.absolute()}: process {', '.join(blind)} does not see the files of process 0; use a "
            "--workdir that all hosts share (a network file system or gs://)"
        )


def _appears(path: Location) -> bool:
    """Wait until ``path`` exists and return True, or return False after ``SHARED_WITHIN`` seconds.

    A network file system may show new files late.
    """
    limit = time.monotonic() + SHARED_WITHIN
    while not path.exists():
        if time.monotonic() > limit:
            return False
        time.sleep(0.2)
    return True


def _unique(name: str) -> str:
    _state.calls[name] += 1
    return f"{name}/{_state.calls[name]}"


def _service() -> Any:
    from jax._src.distributed import global_state  # JAX has no public interface to its key-value store

    return global_state


def _client() -> Any:
    return _service().client


# ------------------------------------------------------------------ end


@contextlib.contextmanager
def ends_together(timeout_seconds: float) -> Iterator[None]:
    """Context manager for a run, used after :func:`start`. An error in the block ends every process with a message
    that names the failing process.

    An error whose attribute ``agreed`` is true is raised by every process at the same step and is not published. A
    process that reaches the end of the block waits for the others, at most ``timeout_seconds``. With several
    processes, a failing process exits in this context manager.
    """
    try:
        try:
            yield
        except BaseException as error:
            if not getattr(error, "agreed", False):
                raise
            _part(timeout_seconds)
            raise
        _part(timeout_seconds)
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        known = exits.outcome(error)
        if known is None and _state.heartbeats is not None:
            _state.heartbeats.wait_for_verdict()  # a lost process may be the cause of a failed collective
        code, line = known or (1, f"{type(error).__name__}: {first_line(error)}")
        _state.leaving.set()
        earlier = _publish(code, line)
        if earlier is not None:
            code, line = earlier["code"], _describe(earlier)
        elif known is None:
            line = "".join(traceback.format_exception(error)).rstrip()
        # The regular end of the interpreter waits for threads, and the shutdown of JAX for lost processes.
        print(line, file=sys.stderr, flush=True)
        _quit(code)


def _part(timeout_seconds: float) -> None:
    """Disconnect from the other processes at the end of a run. Later failures are not published."""
    if not jax.distributed.is_initialized():
        return
    barrier("end", timeout_seconds)
    _state.leaving.set()
    if is_lead():
        _publish(exits.OK, "the end")
    # A thread that still waits for the service would abort the interpreter at exit.
    for thread in threading.enumerate():
        if thread.name == WATCH:
            thread.join()
    assert _state.heartbeats is not None
    _state.heartbeats.close()
    jax.distributed.shutdown()


def _publish(code: int, line: str) -> dict[str, Any] | None:
    """Publish the exit of this process. Return the record of another process that exited earlier, or None."""
    record = {"process": index(), "host": socket.gethostname(), "code": code, "line": line}
    try:
        _client().key_value_set(FAILURE, json.dumps(record))
        return None
    except RuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            return None  # the lead and its service are lost
        return dict(json.loads(_client().blocking_key_value_get(FAILURE, 5000)))


def _describe(record: dict[str, Json]) -> str:
    return f"process {record['process']} ({record['host']}) ended the run: {record['line']}"


def _watch() -> None:
    """Wait until another process publishes a failure, then end this process. Runs in a separate thread."""
    while True:
        try:
            record = json.loads(_client().blocking_key_value_get(FAILURE, 10_000))
            break
        except RuntimeError as error:
            if _state.leaving.is_set():
                return
            if "DEADLINE_EXCEEDED" not in str(error):
                time.sleep(1)  # no answer: the heartbeats detect a lost lead
        except AttributeError:
            return  # shut down between two calls
    if record["code"] != exits.OK:  # OK: the lead has finished the run, and this process will finish too
        _leave([], _describe(record), record["code"])


def _leave(lost: list[int], line: str, code: int = exits.WATCHDOG) -> None:
    """Print ``line`` and exit this process. May be called from any thread, because the main thread may be blocked.

    ``lost`` lists the indices of lost processes. If it is not empty and does not contain the lead, the failure is
    published. Does nothing if this process is already exiting.
    """
    if _state.leaving.is_set():
        return
    _state.leaving.set()
    if lost and _state.heartbeats is not None:
        _state.heartbeats.before_leaving()
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar hides the cursor
    print(f"{show_cursor}{line}", file=sys.stderr, flush=True)
    if 0 in lost:  # the service is lost too
        exits.end_now(code)
    if lost:
        _publish(code, line)
    _quit(code, lost)


def exchange_activity(doing: Callable[[], str], before_leaving: Callable[[], None]) -> Callable[[], str]:
    """Publish the result of ``doing``, the current activity of this process, in the heartbeats. Return a function
    that describes the activities of the other processes.

    ``before_leaving`` is called before this process exits because other processes are lost.
    """
    if _state.heartbeats is None:
        return lambda: ""
    _state.heartbeats.doing, _state.heartbeats.before_leaving = doing, before_leaving
    return _state.heartbeats.describe


def _quit(code: int, lost: Sequence[int] = ()) -> NoReturn:
    """Exit this process. The lead waits until all processes that are not ``lost`` are about to exit, because they
    would abort without its coordination service. The others close stderr first: JAX would report the end of the
    service there, after the line of this process."""
    sys.stdout.flush()
    with contextlib.suppress(Exception):  # the process ends in any case
        client = _client()
        if is_lead():
            limit = time.monotonic() + LAST_WORDS
            while time.monotonic() < limit and (
                len(client.key_value_dir_get(f"{FAILURE}_seen/")) < count() - 1 - len(lost)
            ):
                time.sleep(0.05)
            time.sleep(EXIT_WITHIN)
        else:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            client.key_value_set(f"{FAILURE}_seen/{index()}", "")
    exits.end_now(code)
