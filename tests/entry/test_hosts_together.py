"""Processes of one run find each other, agree, and end together, whatever happens to one of them."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import command
import pytest

from bert_jax.config import RunOptions
from bert_jax.config.loader import take_options
from bert_jax.process import discovery, hosts
from bert_jax.process.accelerators import DEVICE_FILES

PROGRAM = Path(__file__).with_name("one_of_several.py")


LATE = r".*process 1 did not reach 'the meeting' within 2 s; .*"


def run(case, folder, count=2, devices=1, *arguments):
    return command.run_hosts(count, devices, case, folder, *arguments, program=PROGRAM, timeout=400)


@pytest.mark.slow
def test_processes_agree_and_end_well(tmp_path):
    results = run("agree", tmp_path, 3)
    for code, out, err in results:
        assert (code, err) == (42, "stopped at step 3\n")  # agreed: each says it for itself
        turns = [line.split()[1:] for line in out.splitlines() if line.startswith("gathered")]
        assert turns == [[f"{turn}.{process}" for process in range(3)] for turn in range(3)]
        assert "lead says True" in out
        refused = [line for line in out.splitlines() if line.startswith("refused")]
        assert refused[0] == "refused recipe: not the same on process 1 as on process 0; give the same"
        assert "process 1, 2 does not see the files of process 0; use a --workdir that all" in refused[1]
        assert len(refused) == 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, code, own, told",
    [
        ("fail", 2, r"error: my own disk is gone", r"process 1 \(.+\) ended the run: error: my own disk is gone"),
        pytest.param("come_late", 45, LATE, LATE, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_failing_process_ends_all_with_its_line(tmp_path, case, code, own, told):
    began = time.monotonic()
    results = run(case, tmp_path)
    lines = [told, own]  # of process 0 and of process 1, which fails
    for (got, _, err), line in zip(results, lines, strict=True):
        assert got == code, err
        assert re.fullmatch(line, err.strip()), err
    assert time.monotonic() - began < 60, "nobody waits for the barrier's limit"


@pytest.mark.slow
@pytest.mark.entry
def test_the_first_gradients_of_two_processes_are_those_of_one(tmp_path):
    """The reduce-scatter of jaxlib's gloo gives wrong ends of arrays when a program runs for the first time."""
    for code, out, err in run("learn", tmp_path, 2, 2):
        assert code == 0, err
        assert "the same gradients" in out


@pytest.mark.slow
@pytest.mark.entry
def test_a_process_that_loses_its_data_ends_all(tmp_path):
    for code, _, err in run("lose_data", tmp_path):
        assert code == 2, err
        assert "the shard is gone" in err
        assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.entry
def test_damaged_records_of_all_processes_count(tmp_path):
    results = run("read_damage", tmp_path)
    for code, _, err in results:
        assert code == 43, err
        assert "data.max_blank_records: 6 records are damaged, but at most 5 " in err


def refused(*arguments):
    options, _ = take_options(RunOptions, [str(word) for word in arguments])
    with pytest.raises(ValueError) as error:
        discovery.configured(options)
    return str(error.value)


@pytest.fixture
def bare(monkeypatch):
    """An environment that says nothing of other processes."""
    for name in list(os.environ):
        if name.startswith(
            ("SLURM_", "TPU_", "MEGASCALE_", "CUDA_VISIBLE", "JAX_COORD", "JAX_NUM", "JAX_PROC", "JOB_")
        ):
            monkeypatch.delenv(name)
    return monkeypatch


def test_flags_that_do_not_fit_together_are_refused(bare):
    both = ("--coordinator", "host:1234", "--num_processes", 2)
    assert refused(*both).startswith("process_id: not set; set all of --coordinator HOST:PORT, --num_processes and")
    assert refused("--process_id", 0).startswith("coordinator: not set")
    assert refused("--coordinator", "host:1234", "--process_id", 0).startswith("num_processes: not set")
    assert "allowed: 0 to 1" in refused(*both, "--process_id", 2)
    assert "use HOST:PORT" in refused("--coordinator", "host", "--num_processes", 2, "--process_id", 0)
    bare.setenv("JAX_NUM_PROCESSES", "two")
    assert "use 1 or more" in refused("--coordinator", "h:1", "--num_processes", -2, "--process_id", 0)
    assert "use HOST:PORT" in refused("--coordinator", "h:99999", "--num_processes", 2, "--process_id", 0)
    assert "JAX_NUM_PROCESSES: 'two' is not allowed" in refused("--process_id", 0)
    with pytest.raises(ValueError, match="host_timeout: 0 is not allowed"):
        take_options(RunOptions, ["--host_timeout", "0"])


def test_the_environment_tells_of_other_processes(bare):
    assert discovery.configured(RunOptions()) is None
    bare.setenv("JOB_COMPLETION_INDEX", "3")  # of any Kubernetes job: says nothing alone
    assert discovery.configured(RunOptions()) is None
    bare.setenv("JAX_COORDINATOR_ADDRESS", "job-0.jobs:1234")
    bare.setenv("JAX_NUM_PROCESSES", "4")
    assert discovery.configured(RunOptions()) == ("job-0.jobs:1234", 4, 3)
    bare.setenv("JAX_PROCESS_ID", "1")
    assert discovery.configured(RunOptions()) == ("job-0.jobs:1234", 4, 1)
    assert discovery.configured(RunOptions(num_processes=2, process_id=0)) == ("job-0.jobs:1234", 2, 0)


def test_a_slurm_step_of_several_tasks_is_found(bare):
    assert not discovery.is_slurm_step()
    step = {"JOB_ID": "7", "STEP_NODELIST": "n[1-2]", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, value in step.items():
        bare.setenv(f"SLURM_{name}", value)
    assert discovery.is_slurm_step()
    assert discovery.slurm_devices() is None  # no GPU
    bare.setenv("SLURM_GPUS_ON_NODE", "8")
    assert discovery.slurm_devices() is None  # eight tasks a node: jax's rule, one GPU each
    bare.setenv("SLURM_STEP_TASKS_PER_NODE", "1(x2)")
    assert discovery.slurm_devices() == list(range(8))
    bare.setenv("SLURM_STEP_TASKS_PER_NODE", "8(x2)")
    bare.setenv("CUDA_VISIBLE_DEVICES", "5")  # --gpus-per-task=1
    assert discovery.slurm_devices() == [0]
    bare.setenv("SLURM_STEP_NUM_TASKS", "1")  # a shell inside an allocation of two tasks
    assert not discovery.is_slurm_step()
    bare.delenv("SLURM_STEP_NUM_TASKS")
    bare.delenv("SLURM_STEP_NODELIST")  # a batch script
    assert not discovery.is_slurm_step()


def test_a_tpu_pod_is_found_and_nothing_else_is_one(bare):
    answers = {}
    bare.setattr(discovery, "_metadata", answers.get)
    bare.setattr(discovery, "_platforms", lambda: "cpu")
    bare.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    assert not discovery.is_tpu_pod()  # no TPU in this machine
    bare.setattr(discovery, "_platforms", lambda: "tpu,cpu")
    assert discovery.is_tpu_pod()  # GKE
    bare.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert not discovery.is_tpu_pod()
    bare.setenv("MEGASCALE_NUM_SLICES", "2")
    assert discovery.is_tpu_pod()  # two slices of one host
    bare.delenv("MEGASCALE_NUM_SLICES")
    bare.delenv("TPU_WORKER_HOSTNAMES")
    assert not discovery.is_tpu_pod()  # no metadata server
    answers["worker-network-endpoints"] = "unknown:unknown:10.0.0.1"
    assert not discovery.is_tpu_pod()  # one TPU VM
    answers["worker-network-endpoints"] = "a:b:10.0.0.1,a:b:10.0.0.2"
    assert discovery.is_tpu_pod()
    answers |= {"worker-network-endpoints": "10.0.0.1", "tpu-env": "MEGASCALE_NUM_SLICES: '2'"}
    assert discovery.is_tpu_pod()


@pytest.mark.slow
def test_processes_that_do_not_all_come_end_with_one_line():
    words = ["--coordinator", "127.0.0.1:9", "--num_processes", "2", "--process_id", "1", "--host_timeout", "2"]
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, PROGRAM, "agree", ".", *words], capture_output=True, text=True, timeout=100,
        env=command.environment(1),
    )  # fmt: skip
    assert result.returncode == 45
    assert re.fullmatch(
        r"stopped: hosts: not all processes connected within 2 s \(127.0.0.1:9, .*\n", result.stderr
    )
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_coordinators_port_that_is_taken_is_one_line():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        words = ["--coordinator", address, "--num_processes", "2", "--process_id", "0"]
        result = subprocess.run(
            [sys.executable, PROGRAM, "agree", ".", *words], capture_output=True, text=True, timeout=100,
        env=command.environment(1),
        )  # fmt: skip
    assert result.returncode == 2
    assert re.fullmatch(r"error: coordinator: port \d+ of this host is not free .*; use another.*\n", result.stderr)


def test_one_process_needs_nobody(tmp_path):
    assert (hosts.count(), hosts.index(), hosts.is_lead()) == (1, 0, True)
    assert hosts.all_gather_text("name", "value", 1) == ["value"]
    hosts.barrier("name", 1)
    hosts.require_shared(tmp_path, 1)
    with hosts.ends_together(1):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_machine_without_accelerator_starts_quietly(bare):
    """libtpu may be there for planning; JAX must not try to start it."""
    program = (
        "import json, sys, run_pretrain, run_finetune, bert_jax.commands.main\nassert 'jax' not in sys.modules\n"
        "bert_jax.commands.main.keep_to_cpu_without_accelerator()\n"
        "import jax\nprint(json.dumps([jax.default_backend(), jax.process_count()]))"
    )
    bare.delenv("JAX_PLATFORMS")
    if any(any(Path("/").glob(pattern)) for pattern in DEVICE_FILES):
        pytest.skip("this machine has an accelerator")
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=command.REPOSITORY
    )
    assert (json.loads(result.stdout), result.stderr) == (["cpu", 1], "")
