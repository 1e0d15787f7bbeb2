"""Several processes, one run: how they find each other, agree on small things, and end together.

One process per host on TPU; one per host or per GPU elsewhere. Process 0 is the lead. What is exchanged here goes
through the coordination service of jax.distributed, which process 0 holds: no device takes part, every wait has
a time limit, and a process that fails tells the others, which then end with its line instead of hanging. With
one process every function is trivial.
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

from bert_jax.config.loader import RunOptions
from bert_jax.io.storage import Location
from bert_jax.process import discovery as cluster
from bert_jax.process import exits
from bert_jax.process.peers import JAX_LATER, Peers

FAILURE = "bert_jax/failure"
WATCH = "failure-watch"
# Seconds that the lead, which holds the service, stays for the others to read why the run ends.
LAST_WORDS = 20.0
# Seconds after which a file written by one host is seen by the others, if they share the folder at all.
SHARED_WITHIN = 10.0

_calls: collections.Counter[str] = collections.Counter()  # of each name, the same on every process
_leaving = threading.Event()
_peers: Peers | None = None  # with several processes


# ------------------------------------------------------------------ start


def start(options: RunOptions) -> None:
    """Join the run's other processes, if there are any; call it before anything asks jax for a device.

    There are when flags or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (or
    JOB_COMPLETION_INDEX) say so, or when a Cloud TPU pod or a SLURM step of several tasks is found; jax then finds
    the addresses by itself. ``ValueError`` for settings that do not fit together, or when the coordinator's port is
    taken. Processes that do not all come within ``options.host_timeout`` seconds end with one line and code 45.
    """
    given = cluster.given(options)
    if given is None and not cluster.is_tpu_pod() and not cluster.is_slurm_step():
        return
    found = "by the cluster's own variables" if given is None else f"{given[0]}, process {given[2]} of {given[1]}"

    def give_up() -> None:
        line = (
            f"stopped: hosts: not all processes came together within {options.host_timeout} s ({found}); start the "
            "same command on every host, see that process 0 is reachable from there, or raise --host_timeout"
        )
        print(line, file=sys.stderr, flush=True)
        os._exit(exits.WATCHDOG)

    if given is not None and given[2] == 0:
        cluster.check_port(given[0])
    # jax itself would abort with a stack trace, a little later.
    timer = threading.Timer(options.host_timeout, give_up)
    timer.daemon = True
    timer.start()
    limits: dict[str, Any] = {
        "initialization_timeout": options.host_timeout + 60,
        # Twice, because jax sends a heartbeat every half of it, so it may find a loss after half of it.
        "heartbeat_timeout_seconds": 2 * (options.heartbeat_timeout + JAX_LATER),
        "shutdown_timeout_seconds": options.host_timeout,
    }
    try:
        if given is None:
            jax.distributed.initialize(local_device_ids=cluster.slurm_devices(), **limits)
        else:
            address, processes, process = given
            jax.distributed.initialize(address, processes, process, cluster_detection_method="deactivate", **limits)
    except RuntimeError as error:
        raise ValueError(f"hosts: cannot join the other processes ({found}): {_first_line(error)}") from None
    finally:
        timer.cancel()
    threading.Thread(target=_watch, name=WATCH, daemon=True).start()
    global _peers
    service = _service()
    _peers = Peers(
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
    """Whether this process writes what is written once: logs, report, config."""
    return index() == 0


def barrier(name: str, timeout_seconds: float) -> None:
    """Wait until every process has come here; each calls it with the same names in the same order.

    Raises ``exits.Stop`` (45) after ``timeout_seconds``, naming the processes that did not come where it is known.
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


def gather(name: str, value: str, timeout_seconds: float) -> list[str]:
    """The ``value`` of every process, in their order; small texts only. Same rules as :func:`barrier`."""
    if count() == 1:
        return [value]
    client = _client()
    folder = f"bert_jax/{_unique(name)}/"
    client.key_value_set(f"{folder}{index():08d}", value)
    barrier(name, timeout_seconds)
    values = [text for _, text in sorted(client.key_value_dir_get(folder))]
    assert len(values) == count()
    # Whoever is here has read all earlier values of this name.
    if _calls[name] > 2:
        client.key_value_delete(f"bert_jax/{name}/{_calls[name] - 2}/{index():08d}")
    return values


def lead_says(name: str, value: bool, timeout_seconds: float) -> bool:
    """The lead's ``value``, on every process: for what is decided by files that only the lead writes."""
    return gather(name, str(value), timeout_seconds)[0] == "True"


def require_equal(name: str, value: str, advice: str, timeout_seconds: float) -> None:
    """``ValueError`` on every process unless all have the same ``value``; ``advice`` says what to do."""
    values = gather(name, value, timeout_seconds)
    odd = [i for i, other in enumerate(values) if other != values[0]]
    if odd:
        raise ValueError(f"{name}: not the same on process {', '.join(map(str, odd))} as on process 0; {advice}")


def require_shared(folder: Location, timeout_seconds: float) -> None:
    """``ValueError`` on every process unless all see what the lead writes in ``folder``, as checkpoints need it."""
    if count() == 1:
        return
    name = gather("mark", f".shared-{os.urandom(8).hex()}", timeout_seconds)[0]
    if is_lead():
        (folder / name).touch()
    try:
        barrier("marked", timeout_seconds)
        seen = [answer == "True" for answer in gather("seen", str(_appears(folder / name)), timeout_seconds)]
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
    """Whether ``path`` is there, or comes within the seconds for which a network file system may hide it."""
    limit = time.monotonic() + SHARED_WITHIN
    while not path.exists():
        if time.monotonic() > limit:
            return False
        time.sleep(0.2)
    return True


def _unique(name: str) -> str:
    _calls[name] += 1
    return f"{name}/{_calls[name]}"


def _service() -> Any:
    from jax._src.distributed import global_state  # jax has no public name for its key-value store

    return global_state


def _client() -> Any:
    return _service().client


# ------------------------------------------------------------------ end


@contextlib.contextmanager
def ends_together(timeout_seconds: float) -> Iterator[None]:
    """Around the whole run, after :func:`start`: an error here ends every process with a line that names this one.

    An error whose ``agreed`` is true was raised on every process at the same step, so nobody has to be told. The
    process that comes to its end waits for the others, at most ``timeout_seconds``. One that fails among several
    does not return from here.
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
        if known is None and _peers is not None:
            _peers.wait_for_verdict()  # perhaps a collective failed because a process is gone
        code, line = known or (1, f"{type(error).__name__}: {_first_line(error)}")
        _leaving.set()
        other = _tell(code, line)
        if other is not None:
            code, line = other["code"], _words(other)
        elif known is None:
            line = "".join(traceback.format_exception(error)).rstrip()
        print(line, file=sys.stderr, flush=True)
        # Here, not by way of the interpreter's end: that waits for threads, and jax's own shutdown for processes
        # that do not come any more.
        _quit(code)


def _part(timeout_seconds: float) -> None:
    """Leave each other at the end of a run: everybody has come here, nobody is told of a failure any more."""
    if not jax.distributed.is_initialized():
        return
    barrier("end", timeout_seconds)
    _leaving.set()
    if is_lead():
        _tell(exits.OK, "the end")
    # A thread that still waits for an answer of the service would abort the interpreter as it ends.
    for thread in threading.enumerate():
        if thread.name == WATCH:
            thread.join()
    assert _peers is not None
    _peers.close()
    jax.distributed.shutdown()


def _tell(code: int, line: str) -> dict[str, Any] | None:
    """Publish why this process ends; returns what another one published before, if one did."""
    record = {"process": index(), "host": socket.gethostname(), "code": code, "line": line}
    try:
        _client().key_value_set(FAILURE, json.dumps(record))
        return None
    except RuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            return None  # the lead is gone with its service
        return dict(json.loads(_client().blocking_key_value_get(FAILURE, 5000)))


def _words(record: dict[str, Any]) -> str:
    return f"process {record['process']} ({record['host']}) ended the run: {record['line']}"


def _watch() -> None:
    """Thread: end this process as soon as another one says that it failed, whatever the main thread waits for."""
    while True:
        try:
            record = json.loads(_client().blocking_key_value_get(FAILURE, 10_000))
            break
        except RuntimeError as error:
            if _leaving.is_set():
                return
            if "DEADLINE_EXCEEDED" not in str(error):
                time.sleep(1)  # the service did not answer: the lead is gone, which heartbeats find, or will answer
        except AttributeError:
            return  # shut down between two questions
    if record["code"] != exits.OK:  # else the lead has come to the end of the run, and so will this process
        leave(record["code"], _words(record))


def leave(code: int, line: str) -> None:
    """End this process with a line, from any thread: its main thread may be blocked for ever. Does nothing when the
    process is on its way out already."""
    if _leaving.is_set():
        return
    _leaving.set()
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a live bar hides it
    print(f"{show_cursor}{line}", file=sys.stderr, flush=True)
    _quit(code)


def _leave_without(lost: list[int], line: str) -> None:
    """Like :func:`leave`, when processes are ``lost``; the living ones are told where that is possible."""
    if _leaving.is_set():
        return
    _leaving.set()
    if _peers is not None:
        _peers.before_leaving()
    print(line, file=sys.stderr, flush=True)
    if 0 not in lost:  # else there is no service to tell it to
        _tell(exits.WATCHDOG, line)
        _quit(exits.WATCHDOG, lost)
    os._exit(exits.WATCHDOG)


def peers_doing(doing: Callable[[], str], before_leaving: Callable[[], None]) -> Callable[[], str]:
    """Let the other processes know what this one is ``doing``; returns what tells it of them. ``before_leaving`` is
    called when this process ends because others are gone."""
    if _peers is None:
        return lambda: ""
    _peers.doing, _peers.before_leaving = doing, before_leaving
    return _peers.describe


def _quit(code: int, lost: Sequence[int] = ()) -> NoReturn:
    """End this process; the lead after the others (but those that are ``lost``), because they abort when its
    service goes away."""
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(Exception):  # whatever it is, this process is at its end
        client = _client()
        if is_lead():
            limit = time.monotonic() + LAST_WORDS
            while time.monotonic() < limit and (
                len(client.key_value_dir_get(f"{FAILURE}_seen/")) < count() - 1 - len(lost)
            ):
                time.sleep(0.05)
        else:
            client.key_value_set(f"{FAILURE}_seen/{index()}", "")
    os._exit(code)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
