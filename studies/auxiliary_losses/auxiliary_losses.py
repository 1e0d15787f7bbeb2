"""Auxiliary losses, a moving average and the kind of weight decay, each against plain fine-tuning of
all-MiniLM-L6-v2.

    python studies/auxiliary_losses/auxiliary_losses.py --model MINILM --data DIR --folder DIR [--minutes N] [--tasks sst2]
    python studies/auxiliary_losses/auxiliary_losses.py --table

500 records of SST-2, STS-B, SICK and CLINC150 (20 intents), seeds 0 to 4. A failed run is at most two standard errors
better than the constant answer.

The command may be stopped and started again: a finished run is a line of auxiliary_losses.jsonl. --minutes: start no
run after this time. The table has a verdict for an arm whose runs are complete, and "not yet" for all others; exit
code 3 if there are such.
"""

import functools
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "shared"), str(Path(__file__).resolve().parents[2])]
from arms import PLAIN, RANDOM, Stopped, TaskOfArms, arm_options, runner, scored, table
from small_runs import Lines, Options, report, report_missing
from small_samples import clinc, sick, sst2, stsb

from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

LINES = Path(__file__).with_name("auxiliary_losses.jsonl")
COUNT, STEPS, SEEDS, BOUND = 500, 96, range(5), 0.01
ARMS: dict[str, Options] = {
    "masked tokens": {"loss.mlm_weight": 0.1},
    "dropped words": {"input.word_dropout": 0.1},
    "next part": {"loss.nsp_weight": 0.1},
    "lower layers": {"loss.layers": (2, 4), "loss.layer_weight": 0.1},
    "moving average": {"optimizer.ema_decay": 0.95},  # at most 1 - 5 / steps
    "L2 penalty": {"optimizer.weight_decay_type": "l2"},
    "no decay": {"optimizer.weight_decay": 0.0},
}
RECORDS = {"sst2": sst2, "stsb": stsb, "sick": sick, "clinc150": clinc}
LENGTHS = {"sst2": 64, "stsb": 96, "sick": 64, "clinc150": 32}
TASKS = {
    name: TaskOfArms(
        f"{name}-{COUNT}", "regression" if name == "stsb" else "classification",
        functools.partial(records, count=COUNT), LENGTHS[name], STEPS,
    )
    for name, records in RECORDS.items()
}  # fmt: skip


def main() -> int:
    options = arm_options(__doc__ or "", LINES, tasks=[*TASKS])
    lines, tasks = Lines(options.lines), [TASKS[name] for name in options.tasks]
    if not options.table:
        keep_to_cpu_without_accelerator()
        try:
            runner(options, lines, scored).all_arms(tasks, {PLAIN: {}, **ARMS, RANDOM: {}}, SEEDS)
        except Stopped:
            report("stopped: run the same command to continue")
    return report_missing(table(lines, tasks, [*ARMS], SEEDS, BOUND))


if __name__ == "__main__":
    sys.exit(main())
