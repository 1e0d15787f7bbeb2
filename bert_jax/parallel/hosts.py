"""Several processes, one run: how they find each other, agree on small things, and end together.

One process per host on TPU; one per host or per GPU elsewhere. Process 0 is the lead. What is exchanged here goes
through the coordination service of jax.distributed, which process 0 holds: no device takes part, every wait has
a time limit, and a process that fails tells the others, which then end with its line instead of hanging. With
one process every function is trivial.
"""

import atexit
import collections
import contextlib
import importlib.util
import json
import os
import re
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax

from bert_jax import exits
from bert_jax.config.loader import RunOptions

# Device files of accelerators: TPU (accel, vfio), NVIDIA (also in Windows' Linux), AMD.
ACCELERATORS = ("dev/accel*", "dev/vfio/[0-9]*", "dev/nvidia[0-9]*", "dev/nvidiactl", "dev/dxg", "dev/kfd")
FAILURE = "bert_jax/failure"
WATCH = "failure-watch"
# Seconds that the lead, which holds the service, stays for the others to read why the run ends.
LAST_WORDS = 10.0

_calls: collections.Counter[str] = collections.Counter()  # of each name, the same on every process
_leaving = threading.Event()


# ------------------------------------------------------------------ start


def start(options: RunOptions) -> None:
    """Join the run's other processes, if there are any; call it before anything asks jax for a device.

    There are when flags or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (or
    JOB_COMPLETION_INDEX) say so, or when a Cloud TPU pod or a SLURM step of several tasks is found; jax then finds
    the addresses by itself. ``ValueError`` for settings that do not fit together. Processes that do not all come
    within ``options.host_timeout`` seconds end with one line and code 2.
    """
    prefer_cpu_without_accelerator()
    given = _given(options)
    if given is None and not _is_tpu_pod() and not _is_slurm_step():
        return
    found = "by the cluster's own variables" if given is None else f"{given[0]}, process {given[2]} of {given[1]}"

    def give_up() -> None:
        line = (
            f"error: hosts: not all processes came together within {options.host_timeout} s ({found}); start the "
            "same command on every host, see that process 0 is reachable from there, or raise --host_timeout"
        )
        print(line, file=sys.stderr, flush=True)
        os._exit(exits.USER_ERROR)

    # jax itself would abort with a stack trace, a little later.
    timer = threading.Timer(options.host_timeout, give_up)
    timer.daemon = True
    timer.start()
    limits: dict[str, Any] = {
        "initialization_timeout": options.host_timeout + 60,
        "heartbeat_timeout_seconds": options.heartbeat_timeout,
        "shutdown_timeout_seconds": options.host_timeout,
    }
    try:
        if given is None:
            jax.distributed.initialize(local_device_ids=_slurm_devices(), **limits)
        else:
            address, processes, process = given
            jax.distributed.initialize(address, processes, process, cluster_detection_method="deactivate", **limits)
    except RuntimeError as error:
        raise ValueError(f"hosts: cannot join the other processes ({found}): {_first_line(error)}") from None
    finally:
        timer.cancel()
    threading.Thread(target=_watch, name=WATCH, daemon=True).start()


def prefer_cpu_without_accelerator() -> None:
    """On a machine with libtpu (for planning) but no accelerator at all, keep jax from starting libtpu, which
    fails with a page of errors before jax falls back to the CPU. JAX_PLATFORMS, and what jax found, are kept."""
    untouched = _platforms() is None and importlib.util.find_spec("libtpu") is not None
    if untouched and not any(any(Path("/").glob(pattern)) for pattern in ACCELERATORS):
        jax.config.update("jax_platforms", "cpu")


def _platforms() -> str | None:
    """What jax is to run on: from JAX_PLATFORMS, else jax says tpu,cpu where it finds TPU chips."""
    platforms: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    return platforms


def _given(options: RunOptions) -> tuple[str, int, int] | None:
    """(coordinator, processes, index) from the flags, else from the environment; None when nothing is given."""
    coordinator = options.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    processes = options.num_processes or _variable("JAX_NUM_PROCESSES", 0)
    process = options.process_id if options.process_id >= 0 else _variable("JAX_PROCESS_ID", -1)
    if not coordinator and not processes and process < 0:
        return None
    if process < 0:
        process = _variable("JOB_COMPLETION_INDEX", -1)  # of a Kubernetes job
    given = {"coordinator": coordinator, "num_processes": processes, "process_id": process >= 0}
    missing = [name for name, value in given.items() if not value]
    if missing:
        raise ValueError(
            f"{missing[0]}: not given; --coordinator HOST:PORT, --num_processes and --process_id belong together "
            "(or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID); give all three, or none"
        )
    if not re.fullmatch(r".+:\d{1,5}", coordinator):
        raise ValueError(f"coordinator: {coordinator!r} is not allowed; allowed: HOST:PORT of process 0")
    if process >= processes:
        raise ValueError(
            f"process_id: {process} is not allowed with --num_processes {processes}; allowed: 0 to {processes - 1}"
        )
    return coordinator, processes, process


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise ValueError(f"{name}: {text!r} is not a whole number")
    return int(text or default)


def _is_tpu_pod() -> bool:
    """Whether this is one of several hosts of a TPU slice or of several slices, on GKE or on TPU VMs."""
    if not (_platforms() or "").startswith("tpu"):
        return False
    if int(os.environ.get("MEGASCALE_NUM_SLICES") or 1) > 1:
        return True
    workers = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    if workers is None and "TPU_SKIP_MDS_QUERY" not in os.environ:
        workers = _metadata("worker-network-endpoints")
        if workers and "MEGASCALE_NUM_SLICES" in (_metadata("tpu-env") or ""):
            return True
    return len((workers or "").split(",")) > 1


def _metadata(key: str) -> str | None:
    """An attribute of this TPU VM from Google's metadata server; None where there is no such server or key."""
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    for attempt in range(3):
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError:
            return None
        except OSError:
            time.sleep(attempt)
    return None


def _is_slurm_step() -> bool:
    """Whether ``srun`` started this as one of several tasks. A batch script's own shell is not one of them."""
    wanted = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS", "1")
    return all(name in os.environ for name in wanted) and int(tasks) > 1


def _slurm_devices() -> list[int] | None:
    """GPUs of this task where jax's rule (GPU number = task number on its node) does not hold: a task that is
    alone on its node has all of them, and one that SLURM shows a single GPU has that."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = len(visible.split(",")) if visible else int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    alone = re.fullmatch(r"1(\(x\d+\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if not _is_slurm_step() or not gpus or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    return list(range(gpus)) if alone or gpus == 1 else None


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


def require_equal(name: str, value: str, explain: str, timeout_seconds: float) -> None:
    """``ValueError`` on every process unless all have the same ``value``; ``explain`` says what to do."""
    values = gather(name, value, timeout_seconds)
    odd = [i for i, other in enumerate(values) if other != values[0]]
    if odd:
        raise ValueError(f"{name}: process {', '.join(map(str, odd))} differs from process 0; {explain}")


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
    process that comes to its end waits for the others, at most ``timeout_seconds``.
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
        code, line = exits.outcome(error) or (1, f"{type(error).__name__}: {_first_line(error)}")
        _leaving.set()
        other = _tell(code, line)
        # jax's own shutdown would wait for processes that do not come any more.
        atexit.register(_quit, code if other is None else other["code"])
        if other is not None:
            raise exits.Stop(other["code"], _words(other)) from None
        raise


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
            if "DEADLINE_EXCEEDED" not in str(error):
                return  # the run is over, or the lead is gone
        except AttributeError:
            return  # shut down between two questions
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


def _quit(code: int) -> NoReturn:
    """End this process; the lead after the others, because they abort when its service goes away."""
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(Exception):  # whatever it is, this process is at its end
        client = _client()
        if is_lead():
            limit = time.monotonic() + LAST_WORDS
            while time.monotonic() < limit and len(client.key_value_dir_get(f"{FAILURE}_seen/")) < count() - 1:
                time.sleep(0.05)
        else:
            client.key_value_set(f"{FAILURE}_seen/{index()}", "")
    os._exit(code)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
