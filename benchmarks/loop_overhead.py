"""Cost of logging and input: the training loop against the same compiled step on one batch, in one process.

    python benchmarks/loop_overhead.py --config configs/quickstart.yaml [--rounds 5] [--steps 200]

The two take turns, so that a slow minute of the machine hits both; evaluation and saves are excluded. The
shards of the recipe must exist. Prints steps per second of each, their ratio and the share of time spent
waiting for data. Exit code 3 below 97% or above 1%.
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax

from bert_jax.config import PretrainConfig, load_config
from bert_jax.objectives.registry import objective_class
from bert_jax.parallel import host_rows, make_mesh
from bert_jax.parallel.prefetch import DevicePrefetcher
from bert_jax.process.signals import StopRequest
from bert_jax.process.watchdog import Watchdog
from bert_jax.start.start import Start
from bert_jax.tokenization import load_tokenizer
from bert_jax.training.launch import Launch
from bert_jax.training.logging.logger import make_loggers
from bert_jax.training.logging.meter import IntervalMeter, Recorder
from bert_jax.training.logging.run_log import RunLog
from bert_jax.training.loop import Loop, ProfilerWindow
from bert_jax.training.programs import train_programs
from bert_jax.training.spikes import LossGuard
from bert_jax.training.state import initial_state
from data_pipeline.build.ensure import ensure_data
from data_pipeline.read.pretrain_input import ShardSource


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    options, rest = parser.parse_known_args()
    config = load_config(PretrainConfig, rest)
    training = config.training
    tokenizer = load_tokenizer(
        ensure_data(config.data, vocab_size=config.model.vocab_size, report=print),
        lower_case=config.data.lower_case,
    )
    mesh = make_mesh(config.mesh)
    programs = train_programs(objective_class(config.objective)(config, mesh))
    state = initial_state(programs.model, programs.optimizer, programs.abstract, training.seed)
    source = ShardSource(config, tokenizer)
    batches = DevicePrefetcher(
        source.train(host_rows(mesh, training.global_batch_size)), mesh, 1.0, config.data.prefetch
    )
    one, _ = next(batches)
    run = programs.step_for(one)
    waits: list[float] = []
    seconds: dict[str, list[float]] = {"step": [], "loop": []}
    with tempfile.TemporaryDirectory() as folder:
        launch = Launch(
            workdir=Path(folder), stop=StopRequest(), start=Start(), loggers=make_loggers(["tensorboard"])
        )
        log = RunLog(launch.workdir, config, launch, 0, programs.objective.display)

        def write(step: int, values: dict) -> None:
            waits.append(values["data_wait_fraction"])
            log.write(step, values)

        first = 0
        for number in range(options.rounds + 1):  # the first round warms both up
            began = time.perf_counter()
            for _ in range(options.steps):
                state, metrics = run(state, one)
            jax.block_until_ready((state, metrics))
            alone = time.perf_counter() - began
            window = dataclasses.replace(training, num_steps=first + options.steps)
            recorder = Recorder(window, IntervalMeter(0), LossGuard(window), write)
            began = time.perf_counter()
            loop = Loop(
                window, step_for=programs.step_for, batches=batches, recorder=recorder,
                evaluate=lambda state, step: False, ends_early=lambda: False, save=lambda state, step: None,
                finish_pending_save=lambda: None, poll=log.tick,
                profiler=ProfilerWindow(Path(folder), ()), stop=StopRequest(),
                watchdog=Watchdog(training.watchdog_seconds),
            )  # fmt: skip
            state = loop.run(state, first)
            jax.block_until_ready(state)
            whole = time.perf_counter() - began
            first += options.steps
            if number:
                seconds["step"].append(alone / options.steps)
                seconds["loop"].append(whole / options.steps)
            else:
                waits.clear()
        log.close()
    batches.close()
    ratio = statistics.median(a / b for a, b in zip(seconds["step"], seconds["loop"], strict=True))
    wait = statistics.mean(waits)
    for name, values in seconds.items():
        print(f"{name}: {1 / statistics.median(values):.2f} steps/s, median of {len(values)} rounds")
    print(f"loop / step: {ratio:.4f} (bar 0.97); data_wait_fraction {wait:.5f} (bar 0.01)")
    return 0 if ratio >= 0.97 and wait <= 0.01 else 3


if __name__ == "__main__":
    sys.exit(main())
