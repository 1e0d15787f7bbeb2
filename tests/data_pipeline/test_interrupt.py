"""Ctrl-C and SIGTERM while data are prepared: they act within a moment, with one line and their exit codes."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from text_corpora import tree, write_corpus

from bert_jax.process.exits import Stop
from bert_jax.process.signals import StopRequest
from data_pipeline.build import workers as workers_module
from data_pipeline.build.workers import Workers

REPOSITORY = Path(__file__).parents[2]
LINE = "stopped while preparing data; finished parts are kept: run the same command to continue\n"
BOTH = [(signal.SIGINT, 130), (signal.SIGTERM, 42)]
# Between the signal and the end; a loaded machine is slow to take processes down.
MOMENT = 3.0


def stopped(
    words: list[str], number: signal.Signals, ready: str, wait: float, stop: Callable[[], bool] = lambda: False
) -> tuple[int, str]:
    """Exit code and stderr of a command whose whole group gets a signal ``wait`` seconds after it has printed
    ``ready`` (or when ``stop`` holds), which must end it within a moment."""
    process = subprocess.Popen(
        [sys.executable, *words], cwd=REPOSITORY, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    while ready not in (line := process.stdout.readline()):
        assert line, process.communicate()
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline and not stop():
        time.sleep(0.01)
    assert process.poll() is None, "the signal comes too late"
    os.killpg(process.pid, number)
    began = time.monotonic()
    try:
        _, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert time.monotonic() - began < MOMENT
    return process.returncode, err


WAITING = """
import sys, time
from bert_jax.process.exits import run_command
from bert_jax.process.signals import StopRequest
from data_pipeline.build import workers as workers_module
from data_pipeline.build.workers import Workers

def main():
    with StopRequest().at_once("stopped"), {workers} as workers:
        print("ready", flush=True)
        list(workers.run(time.sleep, [(100,)] * 5))

sys.exit(run_command(main))
"""


START, WORK = 0.02, 1.5  # the processes start, the processes work


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "number", "code", "wait"),
    [
        ("Workers(2)", *BOTH[1], WORK),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("Workers(1)", *BOTH[0], WORK),
                ("Workers(2)", *BOTH[0], START),
                ("Workers(2)", *BOTH[1], START),
                ("Workers(1, apart=True)", *BOTH[0], WORK),
                ("Workers(1, apart=True)", *BOTH[1], START),
            )
        ),
    ],
)
def test_the_wait_for_jobs_ends_at_once(workers: str, number: signal.Signals, code: int, wait: float) -> None:
    script = WAITING.format(workers=workers)
    assert stopped(["-c", script], number, "ready", wait) == (code, "stopped\n")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), BOTH)
def test_a_vocabulary_in_training(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """The trainer is one long call into a library, which no signal handler of Python's can break off."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    draws = random.Random(1)
    words = ["".join(draws.choices(letters, k=60)) for _ in range(60_000)]
    (tmp_path / "corpus.txt").write_text("\n\n".join(f"{word} {word} ." for word in words))
    command = ["-m", "bert_jax.commands.data", "vocab", "--corpus", str(tmp_path / "corpus.txt")]
    command += ["--vocab_size", "30000", "--output", str(tmp_path / "vocab.txt")]
    assert stopped(command, number, "training a wordpiece vocabulary", 2.5) == (code, LINE)
    assert not (tmp_path / "vocab.txt").exists()


@pytest.mark.slow
def test_shards_stopped_and_built_on_are_those_of_a_whole_build(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt", documents=200, sentences=50)
    options = "--seq_length 32 --max_predictions 5 --dupe_factor 6 --num_shards 8 --eval_fraction 0.1 --workers 2"

    def command(folder: Path) -> list[str]:
        corpus = ["--corpus", str(tmp_path / "corpus.txt"), "--output", str(folder)]
        return ["-m", "bert_jax.commands.data", "shards", *corpus, "--vocab_size", "500", *options.split()]

    folder = tmp_path / "stopped"
    # First among the chunks of the store, then among the parts.
    for ready in ("tokenizing", "train: "):
        code, err = stopped(
            command(folder),
            signal.SIGINT,
            ready,
            9,
            lambda: any(folder.rglob("*.npz")) or any(folder.rglob("*.table")),
        )
        assert (code, err) == (130, LINE)
        assert not (folder / "train").exists()
    for place in (folder, tmp_path / "whole"):
        subprocess.run([sys.executable, *command(place)], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    assert tree(folder) == tree(tmp_path / "whole")


def test_a_signal_before_the_work_and_handlers_after_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    request = StopRequest()
    with request.at_once("stopped"):
        assert signal.getsignal(signal.SIGTERM) == request._handle
    assert signal.getsignal(signal.SIGTERM) == before and not request
    request.signal = signal.SIGTERM
    with pytest.raises(Stop, match="stopped") as stop, request.at_once("stopped"):
        pytest.fail("the work was begun")
    assert stop.value.code == 42
    with pytest.raises(ValueError, match="another error"), StopRequest().at_once("stopped"):
        raise ValueError("another error")
    assert signal.getsignal(signal.SIGTERM) == before


def _held_signals() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, []))


@pytest.mark.slow
def test_ctrl_c_never_reaches_the_processes() -> None:
    """Else each would print a traceback of its own while it starts."""
    with Workers(2) as workers:
        held = list(workers.run(_held_signals, [(), ()]))
    assert all(signal.SIGINT in one and signal.SIGTERM not in one for one in held)
    assert not _held_signals() & {signal.SIGINT, signal.SIGTERM}


def test_a_start_of_processes_is_never_broken_off() -> None:
    """Whichever thread the signal comes to: numpy has threads that block none."""
    request = StopRequest()
    idle = threading.Event()
    thread = threading.Thread(target=idle.wait)
    thread.start()
    done = False
    try:
        with pytest.raises(Stop), request.at_once("stopped"):
            with workers_module._signals_held():
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)
                done = True
            pytest.fail("the signal was lost")
    finally:
        idle.set()
        thread.join()
    assert done
