"""Two processes of one run, and everything that may happen to one of them: signals, kill -9, standing still.

Whatever happens, the same command on both continues, and the result is that of an undisturbed run, bitwise.
BERT_JAX_FAULTS=full tries every moment on both processes and compares; without it, three faults.
"""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import command
import jax
import numpy as np
import pytest
import support

from bert_jax.config import MeshConfig
from bert_jax.parallel import make_mesh
from bert_jax.training.checkpoint.folder import checkpoint_folder, saved_steps
from bert_jax.training.checkpoint.restore import restore_newest
from bert_jax.training.logging.metrics_file import read_metrics

pytestmark = pytest.mark.entry
FULL = os.environ.get("BERT_JAX_FAULTS") == "full"

STEPS, SAVE, EVALUATE = 400, 5, 10
WATCHDOG, HEARTBEAT = 8, 24
RESUMES = "run the same command"


class Run:
    """Two processes of the run in ``workdir``; what they say is kept with its time."""

    def __init__(self, workdir: Path, *, fault: str = "", cached: bool = True, watchdog: int = 0) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        cache = os.environ["JAX_COMPILATION_CACHE_DIR"] if cached else "none"
        arguments = (
            support.TINY.split()
            + (
                f"--training.num_steps {STEPS} --training.log_interval 1 "
                f"--training.checkpoint_interval {SAVE} --training.eval_interval {EVALUATE} "
                f"--training.watchdog_seconds {watchdog} --workdir {workdir} --heartbeat_timeout {HEARTBEAT} "
                f"--training.compilation_cache {cache} --num_processes 2 --coordinator 127.0.0.1:{port}"
            ).split()
        )
        environment = command.environment(2, BERT_JAX_FAULT=fault)
        if not cached:
            del environment["JAX_COMPILATION_CACHE_DIR"]
        program = Path(__file__).with_name("run_with_faults.py")
        self.workdir = workdir
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-u", program, *arguments, "--process_id", str(index)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
            )
            for index in range(2)
        ]  # fmt: skip
        self.said: list[list[tuple[float, str]]] = [[], []]
        self._readers = [threading.Thread(target=self._read, args=(index,)) for index in range(2)]
        for reader in self._readers:
            reader.start()

    def _read(self, index: int) -> None:
        for line in self.processes[index].stdout:
            self.said[index].append((time.monotonic(), line))

    def text(self, index: int) -> str:
        return "".join(line for _, line in self.said[index])

    def logged(self, *, evaluations: bool = False) -> int:
        """Last step whose line the lead has said; what is on disk may be from the run before."""
        found = re.findall(rf"^{'eval ' * evaluations}step ([\d,]+)/", self.text(0), re.MULTILINE)
        return int(found[-1].replace(",", "")) if found else 0

    def saving(self) -> bool:
        folder = checkpoint_folder(self.workdir)
        return folder.is_dir() and any("orbax-checkpoint-tmp" in path.name for path in folder.iterdir())

    def when(self, condition: Callable[["Run"], bool]) -> None:
        limit = time.monotonic() + 300
        while not condition(self):
            assert all(p.poll() is None for p in self.processes), self.text(0) + self.text(1)
            assert time.monotonic() < limit, self.text(0) + self.text(1)
            time.sleep(0.002)

    def wait(self, index: int, timeout: float) -> tuple[int, float]:
        """Exit code of one process, and when it was there."""
        code = self.processes[index].wait(timeout)
        return code, time.monotonic()

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for reader in self._readers:
            reader.join()


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to process ``target``, and when: some steps after the step that the run continues from."""

    kind: str  # SIGTERM, SIGINT, SIGKILL, SIGSTOP; block: in Python
    moment: str  # start, compile, step, save, evaluation
    target: int

    def __str__(self) -> str:
        return f"{self.kind} in {self.moment} to {self.target}"


def moment(name: str, base: int) -> Callable[[Run], bool]:
    """Whether it has come, in a run that continues from step ``base``."""
    began = time.monotonic()
    return {
        "start": lambda run: time.monotonic() > began + 1.5,
        "compile": lambda run: "parameters," in run.text(0),  # said just before
        "step": lambda run: run.logged() >= base + 3,
        "save": lambda run: run.logged() > base and run.saving(),
        "evaluation": lambda run: (
            run.logged() > max(base, run.logged(evaluations=True)) and run.logged() % EVALUATE == 0
        ),
    }[name]


def meet(fault: Fault, workdir: Path) -> str:
    """Let the run in ``workdir`` meet the fault and end; returns what was measured."""
    base = max(saved_steps(workdir), default=0)
    blocked = f"block:{base + 3}:{fault.target}" if fault.kind == "block" else ""
    standstill = fault.kind in ("SIGSTOP", "block")
    run = Run(workdir, fault=blocked, cached=fault.moment != "compile", watchdog=WATCHDOG * standstill)
    other = 1 - fault.target
    try:
        run.when(moment(fault.moment, base) if not blocked else lambda run: "blocked" in run.text(fault.target))
        came = time.monotonic()
        if not blocked:
            run.processes[fault.target].send_signal(getattr(signal, fault.kind))
        code, ended = run.wait(other, 240)
        if fault.kind == "SIGSTOP":
            run.processes[fault.target].kill()
        own, own_ended = run.wait(fault.target, 60)
    finally:
        run.close()
    told = run.text(other)
    assert not base or fault.moment == "start" or f"continuing at step {base}\n" in run.text(0), run.text(0)
    reached = max((line["step"] for line in read_metrics(workdir) if "split" not in line), default=0)
    safe = max(saved_steps(workdir), default=0)
    seconds = ended - came
    if fault.kind in ("SIGTERM", "SIGINT"):
        assert code == own == (42 if fault.kind == "SIGTERM" else 130), (fault, code, own, run.text(0), run.text(1))
        for index in range(2):
            last = run.said[index][-1][1]
            assert RESUMES in last and f"s after {fault.kind} on host {fault.target}" in last, last
        compiled = [when for when, line in run.said[0] if "compiling the training step" in line and when > came]
        seconds = max(ended, own_ended) - max([came, *compiled])
        assert seconds < 30, (fault, seconds)
        assert reached == safe, (fault, reached, safe)  # no step is repeated
    elif fault.kind == "SIGKILL":
        assert code == 45, (fault, code, told)
        assert seconds <= HEARTBEAT + 15, (fault, seconds)
        assert re.search(rf"^stopped: .*process {fault.target} \(.+\).*{RESUMES}", told, re.MULTILINE), told
    else:
        assert code == 45, (fault, code, told)
        assert seconds <= 2 * WATCHDOG, (fault, seconds)
        assert "watchdog: no progress" in told and "most recent call first" in told
        # The main thread: in a step still, or out of it by the error of a collective and cleaning up.
        assert re.search(r"training.run\.py\", line \d+ in run$|in wait_for_verdict", told, re.MULTILINE), told
        assert f"process {fault.target} (" in told and RESUMES in told
    return f"{fault}: {seconds:.1f} s, {reached - safe} logged steps repeated"


def undisturbed(workdir: Path) -> None:
    run = Run(workdir)
    try:
        assert [run.wait(index, 600)[0] for index in range(2)] == [0, 0], run.text(0) + run.text(1)
    finally:
        run.close()


def state(workdir: Path):
    config = support.tiny_config()
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    return restore_newest(
        workdir,
        config,
        mesh,
        support.objective_of(config, mesh).model,
        read_only=True,
        may_change=set(),
        report=print,
    )


MOMENTS = ("start", "compile", "step", "save", "evaluation")
SIGNALS = [
    *(Fault("SIGTERM", moment, target) for moment in MOMENTS for target in (0, 1)),
    *(Fault("SIGTERM", moment, target) for target in (1, 0) for moment in MOMENTS[1:]),
    Fault("SIGINT", "step", 0),
    Fault("SIGINT", "evaluation", 1),
]
KILLS = [
    Fault("SIGKILL", moment, target)
    for moment, target in [("compile", 1), ("save", 0), ("step", 1), ("save", 1), ("step", 0)] * 2
]  # fmt: skip
STANDSTILLS = [
    Fault("SIGTERM", "step", 0),  # what is compiled once is not compiled again: the limit is short
    *(Fault(kind, "step", target) for kind in ("SIGSTOP", "block") for target in (0, 1)),
]
FEW = [Fault("SIGTERM", "evaluation", 1), Fault("SIGKILL", "save", 0), Fault("SIGSTOP", "step", 1)]


@pytest.mark.slow
def test_signals_kills_and_standstills(tmp_path):
    """One of each; every run continues from what the one before it saved."""
    support.write_vocabulary(tmp_path)
    for fault in FEW:
        print(meet(fault, tmp_path / "run"), flush=True)


@pytest.mark.skipif(not FULL, reason="takes half an hour: set BERT_JAX_FAULTS=full")
@pytest.mark.parametrize("faults", [SIGNALS, KILLS, STANDSTILLS], ids=["signals", "kills", "standstills"])
def test_faults_leave_the_result_bitwise_the_same(tmp_path, faults):
    support.write_vocabulary(tmp_path)
    for fault in faults:
        print(meet(fault, tmp_path / "run"), flush=True)
    for name in ("run", "whole"):
        undisturbed(tmp_path / name)
    first, second = state(tmp_path / "whole"), state(tmp_path / "run")
    assert first.step == second.step == STEPS
    jax.tree.map(np.testing.assert_array_equal, first.state, second.state)
    assert support.untimed(read_metrics(tmp_path / "whole")) == support.untimed(read_metrics(tmp_path / "run"))
