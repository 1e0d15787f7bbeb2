"""Advice on fine-tuning with few records, each against plain fine-tuning of all-MiniLM-L6-v2.

    python studies/small_data/small_data.py --model MINILM --data DIR --folder DIR [--minutes N] [--tasks sst2]
    python studies/small_data/small_data.py --model MINILM --data DIR --folder DIR --stages 2
    python studies/small_data/small_data.py --table

Stage 1: 500 records of SST-2, STS-B, SICK and QNLI, seeds 0 to 4. Stage 2, once stage 1 is complete: the two best
arms of stage 1 and plain fine-tuning with 100 and with 500 records, of CLINC150 (20 intents) and RTE too, seeds 10
to 19. Both choose the best arms by the records that choose the rates. A failed run is at most two standard errors
better than the constant answer.

The command may be stopped and started again: a finished run is a line of small_data.jsonl. --minutes: start no run
after this time. The table has a verdict for an arm whose runs are complete, and "not yet" for all others; exit code
3 if there are such.
"""

import functools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "shared"), str(Path(__file__).resolve().parents[2])]
from arms import PLAIN, RANDOM, Runner, Stopped, TaskOfArms, arm_options, differences_of, runner, scored, table
from small_runs import Lines, Options, report, report_missing
from small_samples import clinc, qnli, rte, sick, sst2, stsb

from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

LINES = Path(__file__).with_name("small_data.jsonl")
STEPS, BOUND = 96, 0.01
BOTH = "best two"
# Single arms in the order in which they are run; README.md says where the values come from.
ARMS: dict[str, Options] = {
    "no bias correction": {"optimizer.name": "bert_adam"},
    "new top layer": {"regularization.reinit_layers": 1},
    "layer rates": {"optimizer.layer_decay": 0.8},
    "mixout": {"regularization.mixout": 0.1},
    "decay to start": {
        "optimizer.decay_to_start": True, "optimizer.weight_decay": 0.01,
        "optimizer.weight_decay_type": "independent",
    },
    "longer": {"training.num_steps": 3 * STEPS},
}  # fmt: skip
BASELINES: dict[str, Options] = {PLAIN: {}, RANDOM: {}}
# Task -> kind, records, tokens.
TASKS = {
    "sst2": ("classification", sst2, 64),
    "stsb": ("regression", stsb, 96),
    "sick": ("classification", sick, 64),
    "qnli": ("classification", qnli, 128),
    "clinc150": ("classification", clinc, 32),
    "rte": ("classification", rte, 192),
}
SEEDS = {"1": range(5), "2": range(10, 20)}


def task_of(name: str, count: int) -> TaskOfArms:
    kind, texts, length = TASKS[name]
    return TaskOfArms(f"{name}-{count}", kind, functools.partial(texts, count=count), length, STEPS)


STAGES = {
    "1": [task_of(name, 500) for name in ("sst2", "stsb", "sick", "qnli")],
    "2": [task_of(name, count) for count in (100, 500) for name in TASKS],
}


def best_two(lines: Lines) -> dict[str, Options] | None:
    """Return the two single arms with the highest mean gain over plain in the records of choice, best first; None
    if stage 1 is not complete."""
    gains = {}
    for arm in ARMS:
        found = [differences_of(lines, task, arm, SEEDS["1"], "choice") for task in STAGES["1"]]
        if None in found:
            return None
        gains[arm] = statistics.mean(value for own in found for value in own or ())
    return {arm: ARMS[arm] for arm in sorted(gains, key=gains.__getitem__, reverse=True)[:2]}


def together(best: dict[str, Options]) -> Options:
    return {name: value for options in best.values() for name, value in options.items()}


def make(run: Runner, stage: str, names: Sequence[str]) -> None:
    """Make the missing runs of a stage on the tasks ``names``."""
    tasks = [task for task in STAGES[stage] if task.name.partition("-")[0] in names]
    if stage == "1":
        run.all_arms(tasks, {PLAIN: {}, **ARMS, RANDOM: {}}, SEEDS["1"])
    best = best_two(run.lines)
    if best is not None:
        arms = {BOTH: together(best)} if stage == "1" else {**BASELINES, **best, BOTH: together(best)}
        run.all_arms(tasks, arms, SEEDS[stage])


def print_table(lines: Lines, stage: str) -> int:
    """Print the table of a stage; return the number of missing verdicts."""
    best = best_two(lines)
    if stage == "2" and best is None:
        print("stage 2: not yet, because stage 1 is not complete")
        return 1
    missing = table(lines, STAGES[stage], [*(ARMS if stage == "1" else best or ()), BOTH], SEEDS[stage], BOUND)
    if best is not None:
        print(f"best two: {', '.join(best)}")
    return missing


def main() -> int:
    options = arm_options(__doc__ or "", LINES, stages=[*STAGES], tasks=[*TASKS])
    lines = Lines(options.lines)
    if not options.table:
        keep_to_cpu_without_accelerator()
        run = runner(options, lines, scored)
        try:
            for stage in options.stages:
                make(run, stage, options.tasks)
        except Stopped:
            report("stopped: run the same command to continue")
    return report_missing(sum(print_table(lines, stage) for stage in options.stages))


if __name__ == "__main__":
    sys.exit(main())
