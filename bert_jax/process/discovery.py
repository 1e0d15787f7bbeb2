"""Detection of runs with several processes, from flags, environment variables or properties of the machine.

This module only detects the processes and their GPUs; ``jax.distributed.initialize`` connects the processes.
"""

import os
import re
import socket
import time
import urllib.error
import urllib.request

import jax

from bert_jax.config import RunOptions


def _platforms() -> str | None:
    """Return the platforms that JAX will use: JAX_PLATFORMS if set, or "tpu,cpu" on a machine with TPU chips."""
    platforms: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    return platforms


def configured(options: RunOptions) -> tuple[str, int, int] | None:
    """Return (coordinator address, number of processes, index of this process), or None if none of them is set.

    Flags have priority over environment variables. Raises ``ValueError`` if a value is missing or not allowed.
    """
    coordinator = options.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    processes = options.num_processes or _variable("JAX_NUM_PROCESSES", 0)
    process = options.process_id if options.process_id >= 0 else _variable("JAX_PROCESS_ID", -1)
    if not coordinator and not processes and process < 0:
        return None
    if process < 0:
        process = _variable("JOB_COMPLETION_INDEX", -1)  # set in a Kubernetes job
    parts = {"coordinator": coordinator, "num_processes": processes, "process_id": process >= 0}
    missing = [name for name, value in parts.items() if not value]
    if missing:
        raise ValueError(
            f"{missing[0]}: not set; set all of --coordinator HOST:PORT, --num_processes and --process_id (or all "
            "of JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID), or none of them"
        )
    if not re.fullmatch(r".+:\d{1,5}", coordinator) or not 0 < int(coordinator.rpartition(":")[2]) < 65536:
        raise ValueError(f"coordinator: {coordinator!r} is not allowed; use HOST:PORT of process 0")
    if processes < 1:
        raise ValueError(f"num_processes: {processes} is not allowed; use 1 or more")
    if process >= processes:
        raise ValueError(
            f"process_id: {process} is not allowed with --num_processes {processes}; allowed: 0 to {processes - 1}"
        )
    return coordinator, processes, process


def check_port(coordinator: str) -> None:
    """Raise ``ValueError`` if the port of the coordinator is in use on this host, because JAX would crash.

    Must be called by process 0 only.
    """
    port = int(coordinator.rpartition(":")[2])
    with socket.socket() as trial:
        # A run that has just ended may still occupy the port.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"coordinator: port {port} of this host is not free ({error.strerror}); use another port, "
                "the same on every host"
            ) from None


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not (text.isdecimal() and len(text) < 19):
        raise ValueError(f"{name}: {text!r} is not allowed; use a whole number")
    return int(text or default)


def is_tpu_pod() -> bool:
    """Return True on GKE or TPU VMs if the TPU slice has several hosts or the job has several slices."""
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
    """Return the attribute ``key`` of this TPU VM from Google's metadata server, or None if it is unavailable."""
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


def is_slurm_step() -> bool:
    """Return True if ``srun`` has started this process as one of several tasks.

    Return False in the shell of a batch job.
    """
    wanted = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    tasks = "SLURM_STEP_NUM_TASKS" if os.environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    return all(name in os.environ for name in wanted) and _variable(tasks, 1) > 1


def slurm_devices() -> list[int] | None:
    """Return the indices of the GPUs of this SLURM task, or None if the default of JAX is correct.

    By default, JAX uses the GPU whose index equals the local index of the task on its node. This is wrong in two
    cases: the only task of a node uses all GPUs, and a task that sees a single GPU uses the GPU with index 0.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = len(visible.split(",")) if visible else int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    alone = re.fullmatch(r"1(\(x\d+\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if not is_slurm_step() or not gpus or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    return list(range(gpus)) if alone or gpus == 1 else None
