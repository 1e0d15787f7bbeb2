"""The watchdog ends a process that stands still, and no other."""

import subprocess
import sys
import time

import pytest

from bert_jax.process.watchdog import PHASE_FACTOR, Watchdog

SCRIPT = """
import os, signal, sys, threading, time
from bert_jax.process.watchdog import Watchdog

def stuck_here():
    {stuck}

began = time.monotonic()  # the watchdog counts from its start
watchdog = Watchdog(0.4)
watchdog.others = lambda: "process 1 was last compiling, 0 s ago"
{before}
print("began", began, flush=True)
stuck_here()
print("alive", flush=True)
"""


def run(stuck: str, before: str = "watchdog.beat('step 12')") -> tuple[int, float, str, str]:
    """Exit code, seconds from the start of the watchdog to the end, output, errors."""
    script = SCRIPT.format(stuck=stuck, before=before)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    out, err = process.communicate(timeout=60)
    return process.returncode, time.monotonic() - float(out.split()[1]), out, err


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "stuck",
    ["time.sleep(60)", "threading.Lock().acquire() and threading.Event().wait()", "[0 for _ in iter(int, 1)]"],
)
def test_a_blocked_main_thread_ends_with_every_stack(stuck):
    code, seconds, _, err = run(stuck)
    assert code == 45
    assert 0.4 <= seconds < 4
    assert "in: step 12; process 1 was last compiling, 0 s ago; the stacks" in err
    assert "run the same command on all hosts" in err
    assert "in stuck_here" in err and "in _watch" in err  # its own thread and the main one


def test_beats_phases_and_the_end_keep_it_quiet():
    code, _, out, err = run(
        "[(time.sleep(0.1), watchdog.beat('step')) for _ in range(12)]\n"
        "    with watchdog.phase('compiling'): time.sleep(1.5)\n"
        "    time.sleep(0.2)\n"
        "    watchdog.close()\n"
        "    time.sleep(1.5)"
    )
    assert (code, err) == (0, "") and "alive" in out


def test_a_phase_has_its_own_limit_and_none_is_for_ever():
    code, seconds, _, err = run("time.sleep(60)", before="")
    assert code == 45 and "in: starting" in err
    assert 0.4 * PHASE_FACTOR <= seconds < 0.4 * PHASE_FACTOR + 4


def test_a_process_that_was_stopped_is_not_blamed_for_it():
    code, _, out, err = run(
        "threading.Thread(target=os.system, args=(f'sleep 2; kill -CONT {os.getpid()}',)).start()\n"
        "    time.sleep(0.05); os.kill(os.getpid(), signal.SIGSTOP); watchdog.beat('step 13')"
    )
    assert (code, err) == (0, "") and "alive" in out


def test_nothing_runs_when_it_is_off():
    with Watchdog(0) as watchdog:
        assert watchdog._thread is None
        watchdog.beat("step 1")
        assert watchdog.first_call(lambda x: x + 1, "compiling")(1) == 2


def test_who_ends_for_another_reason_shows_its_stacks_if_it_stood_still_too():
    code, _, out, err = run(
        "watchdog.dump_if_stuck()\n"  # nothing is wrong yet
        "    print('fresh', flush=True)\n"
        "    time.sleep(0.3)\n"
        "    watchdog.dump_if_stuck()\n"
        "    watchdog.close()"
    )
    assert code == 0 and "alive" in out
    assert err.count("watchdog: no progress") == 1
    assert "in: step 12" in err and "most recent call first" in err and "run the same command" not in err


LOOP = """
import contextlib, time
import numpy as np
from bert_jax.batch import BatchInfo
from bert_jax.config import TrainingConfig
from bert_jax.training.loop import Loop, ProfilerWindow
from bert_jax.training.logging.meter import IntervalMeter, Recorder
from bert_jax.process.signals import StopRequest
from bert_jax.training.spikes import LossGuard
from bert_jax.process.watchdog import Watchdog

class State:
    step = 0

class Late:  # the metrics of a step, there when the step is done
    def __init__(self, step): self.step = step
    def unpack(self):
        time.sleep(2.5 if self.step in {slow} else 0.01)
        scalars = dict(loss=1.0, tokens=1.0, finite=True, blank_rows=0, grad_norm=1.0)
        return dict(scalars, sums=dict(), last=dict(learning_rate=0.0))

steps = iter(range(1, 100))
config = TrainingConfig(num_steps=6, global_batch_size=1, checkpoint_interval=2)
watchdog = Watchdog(2.0)

def write(state, step):  # takes 2.5 s, beside the steps
    done = time.monotonic() + 2.5
    watchdog.is_writing = lambda: time.monotonic() < done

recorder = Recorder(config, IntervalMeter(0), LossGuard(config), lambda step, line: None, watchdog.beat)
Loop(
    config, recorder=recorder, watchdog=watchdog, stop=StopRequest(),
    step_for=lambda batch: lambda state, batch: (state, Late(next(steps))),
    batches=(({{"input_ids": np.zeros((1, 1))}}, BatchInfo(0, 0.0, 0, 1)) for _ in iter(int, 1)),
    evaluate=lambda state, step: False, ends_early=lambda: False, save=write,
    finish_pending_save=lambda: None, poll=lambda step: None, profiler=ProfilerWindow(None, ()),
).run(State(), 0)
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "code"), [([3, 5], 0), ([2], 45), ([3, 4], 45)], ids=["beside a save", "else", "after a save"]
)
def test_a_step_beside_which_the_state_is_written_may_take_longer(slow, code):
    done = subprocess.run(
        [sys.executable, "-c", LOOP.format(slow=slow)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("done" in done.stdout) == (code == 0)
    assert f"in: step {max(slow)};" in done.stderr if code else not done.stderr
