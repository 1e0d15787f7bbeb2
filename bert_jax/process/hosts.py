"""The processes of a run: start-up, agreement on small values, and a common end.

One process per host on TPU; one per host or per GPU elsewhere. Process 0 is the lead. Values are exchanged through
the coordination service of jax.distributed, which process 0 holds: no device takes part, every wait has a time
limit, and a process that fails publishes a line, with which the others end instead of hanging. With one process
every function is trivial.
"""

import collections
import contextlib
import dataclasses
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

from bert_jax.config.loader import RunOptions
from bert_jax.io.errors import first_line
from bert_jax.io.storage import Location
from bert_jax.process import discovery, exits
from bert_jax.process.heartbeats import JAX_LATER, HeartbeatMonitor

FAILURE = "bert_jax/failure"
WATCH = "failure-watch"
# Seconds for which the lead, which holds the service, waits until the others have read why the run ends.
LAST_WORDS = 20.0
# Seconds within which a file written by one host is visible to the others, if they share the folder at all.
SHARED_WITHIN = 10.0


@dataclasses.dataclass
class _State:
    """The part that this process has in the run."""

    calls: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )  # equal on all processes
    leaving: threading.Event = dataclasses.field(default_factory=threading.Event)
    heartbeats: HeartbeatMonitor | None = None  # with several processes


_state = _State()


# ------------------------------------------------------------------ start


def start(options: RunOptions) -> None:
    """Join the other processes of the run, if there are any; call it before jax is asked for a device.

    Other processes exist when flags or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (or
    JOB_COMPLETION_INDEX) name them, or in a Cloud TPU pod or a SLURM step of several tasks; there jax finds the
    addresses by itself. Processes that do not all arrive within ``options.host_timeout`` seconds end with one line
    and code 45.

    Raises:
        ValueError: the settings do not fit together, or the coordinator's port is taken.
    """
    configured = discovery.configured(options)
    if configured is None and not discovery.is_tpu_pod() and not discovery.is_slurm_step():
        return
    source = "found by the cluster's own variables"
    if configured is not None:
        source = f"{configured[0]}, process {configured[2]} of {configured[1]}"
    if configured is not None and configured[2] == 0:
        discovery.check_port(configured[0])
    line = (
        f"stopped: hosts: not all processes came together within {options.host_timeout} s ({source}); start the "
        "same command on every host, see that process 0 is reachable from there, or raise --host_timeout"
    )
    # jax itself would abort with a stack trace, a little later.
    timer = threading.Timer(options.host_timeout, exits.end_now, [exits.WATCHDOG, line])
    timer.daemon = True
    timer.start()
    limits: dict[str, Any] = {
        "initialization_timeout": options.host_timeout + 60,
        # Twice, because jax sends a heartbeat every half of it, so it may find a loss after half of it.
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
        _leave_without,
    )


# ------------------------------------------------------------------ agreement


def count() -> int:
    """Number of processes of the run. Asks no device."""
    return int(_service().num_processes)


def index() -> int:
    """Number of this process, from 0."""
    return int(_service().process_id)


def is_lead() -> bool:
    """Return True if this process writes logs, report and config, which are written once."""
    return index() == 0


def barrier(name: str, timeout_seconds: float) -> None:
    """Wait until every process has called this; each calls it with the same names in the same order.

    Raises ``exits.Stop`` (45) after ``timeout_seconds``, naming the missing processes where they are known.
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
            f"stopped: {who} did not come to {name!r} within {timeout_seconds:g} s; see its log, then run the same "
            "command on every host again",
        ) from None


def all_gather_text(name: str, value: str, timeout_seconds: float) -> list[str]:
    """Return the ``value`` (a short text) of every process, in process order; same rules as :func:`barrier`."""
    if count() == 1:
        return [value]
    client = _client()
    folder = f"bert_jax/{_unique(name)}/"
    client.key_value_set(f"{folder}{index():08d}", value)
    barrier(name, timeout_seconds)
    values = [text for _, text in sorted(client.key_value_dir_get(folder))]
    assert len(values) == count()
    # A process that arrives here has read all earlier values of this name.
    if _state.calls[name] > 2:
        client.key_value_delete(f"bert_jax/{name}/{_state.calls[name] - 2}/{index():08d}")
    return values


def broadcast_from_lead(name: str, value: bool, timeout_seconds: float) -> bool:
    """Return the lead's ``value`` on every process: for decisions by files that only the lead writes."""
    return all_gather_text(name, str(value), timeout_seconds)[0] == "True"


def require_equal(name: str, value: str, advice: str, timeout_seconds: float) -> None:
    """Raise ``ValueError``, ended by ``advice``, on every process unless all have the same ``value``."""
    values = all_gather_text(name, value, timeout_seconds)
    odd = [i for i, other in enumerate(values) if other != values[0]]
    if odd:
        raise ValueError(f"{name}: not the same on process {', '.join(map(str, odd))} as on process 0; {advice}")


def require_shared(folder: Location, timeout_seconds: float) -> None:
    """Raise ``ValueError`` on every process unless all see a file that the lead writes in ``folder``."""
    if count() == 1:
        return
    name = all_gather_text("mark", f".shared-{os.urandom(8).hex()}", timeout_seconds)[0]
    if is_lead():
        (folder / name).touch()
    try:
        barrier("marked", timeout_seconds)
        seen = [
            answer == "True" for answer in all_gather_text("seen", str(_appears(folder / name)), timeout_seconds)
        ]
    finally:
        if is_lead():
            (folder / name).unlink()
    blind = [str(i) for i, answer in enumerate(seen) if not answer]
    if blind:
        raise ValueError(
            f"{folder.absolute()}: process {', '.join(blind)} does not see what process 0 writes there; give a "
            "--workdir that all hosts share (a network file system or gs://)"
        )


def _appears(path: Location) -> bool:
    """Return True if ``path`` exists within the seconds for which a network file system may hide it."""
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
    from jax._src.distributed import global_state  # jax has no public name of its key-value store

    return global_state


def _client() -> Any:
    return _service().client


# ------------------------------------------------------------------ end


@contextlib.contextmanager
def ends_together(timeout_seconds: float) -> Iterator[None]:
    """Surround the whole run, after :func:`start`: an error in the block ends every process, with a line that names
    this one.

    An error whose ``agreed`` is true was raised on every process at the same step and is not published. A process
    that reaches the end waits for the others, at most ``timeout_seconds``. One that fails among several does not
    return.
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
            _state.heartbeats.wait_for_verdict()  # perhaps a collective failed because a process is gone
        code, line = known or (1, f"{type(error).__name__}: {first_line(error)}")
        _state.leaving.set()
        earlier = _publish(code, line)
        if earlier is not None:
            code, line = earlier["code"], _describe(earlier)
        elif known is None:
            line = "".join(traceback.format_exception(error)).rstrip()
        # Not by the interpreter's end: that waits for threads, and jax's own shutdown for processes that are gone.
        print(line, file=sys.stderr, flush=True)
        _quit(code)


def _part(timeout_seconds: float) -> None:
    """Leave the other processes at the end of a run; from here on no failure is published."""
    if not jax.distributed.is_initialized():
        return
    barrier("end", timeout_seconds)
    _state.leaving.set()
    if is_lead():
        _publish(exits.OK, "the end")
    # A thread that still waits for the service would abort the interpreter as it ends.
    for thread in threading.enumerate():
        if thread.name == WATCH:
            thread.join()
    assert _state.heartbeats is not None
    _state.heartbeats.close()
    jax.distributed.shutdown()


def _publish(code: int, line: str) -> dict[str, Any] | None:
    """Publish why this process ends; return the record of a process that did so before, if one did."""
    record = {"process": index(), "host": socket.gethostname(), "code": code, "line": line}
    try:
        _client().key_value_set(FAILURE, json.dumps(record))
        return None
    except RuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            return None  # the lead is gone with its service
        return dict(json.loads(_client().blocking_key_value_get(FAILURE, 5000)))


def _describe(record: dict[str, Any]) -> str:
    return f"process {record['process']} ({record['host']}) ended the run: {record['line']}"


def _watch() -> None:
    """Thread: end this process when another process publishes a failure, even while the main thread waits."""
    while True:
        try:
            record = json.loads(_client().blocking_key_value_get(FAILURE, 10_000))
            break
        except RuntimeError as error:
            if _state.leaving.is_set():
                return
            if "DEADLINE_EXCEEDED" not in str(error):
                time.sleep(1)  # the service did not answer: the lead is gone, which heartbeats find, or will answer
        except AttributeError:
            return  # shut down between two questions
    if record["code"] != exits.OK:  # else the lead has come to the end of the run, and so will this process
        leave(record["code"], _describe(record))


def leave(code: int, line: str) -> None:
    """End this process with a line, from any thread: its main thread may be blocked for ever. Does nothing when the
    process is ending already."""
    if _state.leaving.is_set():
        return
    _state.leaving.set()
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a live bar hides it
    print(f"{show_cursor}{line}", file=sys.stderr, flush=True)
    _quit(code)


def _leave_without(lost: list[int], line: str) -> None:
    """Like :func:`leave`, when processes are ``lost``; the failure is published where that is possible."""
    if _state.leaving.is_set():
        return
    _state.leaving.set()
    if _state.heartbeats is not None:
        _state.heartbeats.before_leaving()
    print(line, file=sys.stderr, flush=True)
    if 0 in lost:  # the service is gone too
        exits.end_now(exits.WATCHDOG)
    _publish(exits.WATCHDOG, line)
    _quit(exits.WATCHDOG, lost)


def exchange_activity(doing: Callable[[], str], before_leaving: Callable[[], None]) -> Callable[[], str]:
    """Show the other processes what this one is ``doing``; return a function that describes theirs.

    ``before_leaving`` is called when this process ends because others are gone.
    """
    if _state.heartbeats is None:
        return lambda: ""
    _state.heartbeats.doing, _state.heartbeats.before_leaving = doing, before_leaving
    return _state.heartbeats.describe


def _quit(code: int, lost: Sequence[int] = ()) -> NoReturn:
    """End this process; the lead after the others (but those that are ``lost``), which abort when its service goes
    away."""
    sys.stdout.flush()
    with contextlib.suppress(Exception):  # the process ends in any case
        client = _client()
        if is_lead():
            limit = time.monotonic() + LAST_WORDS
            while time.monotonic() < limit and (
                len(client.key_value_dir_get(f"{FAILURE}_seen/")) < count() - 1 - len(lost)
            ):
                time.sleep(0.05)
        else:
            client.key_value_set(f"{FAILURE}_seen/{index()}", "")
    exits.end_now(code)
