"""``bert-jax doctor``: checks of a pretraining run."""

import argparse
import json
from pathlib import Path

from bert_jax.commands.options import Command, option


def doctor_command(arguments: argparse.Namespace) -> None:
    """Check a pretraining run: its shards, its log, its objective and its newest checkpoint. Prints a line for each
    check with its status (OK, LOOK or FAIL), what was found, what is expected, and what to try first. LOOK marks
    something unusual; FAIL marks an error in data, options or code. The most severe and most specific lines come
    first. The run may be in progress and needs no checkpoint. The results are also written to WORKDIR/doctor.json,
    and the report of the run shows them."""
    from bert_jax.contrib.doctor import findings
    from bert_jax.contrib.doctor.examine import examine_step

    step, found = examine_step(arguments.workdir, arguments.step)
    findings.write(Path(arguments.workdir), step, found)
    if arguments.json:
        print(json.dumps(findings.to_json(step, found), ensure_ascii=False))
        return
    for one in found:
        print(one)
    print(f"step {step:,}: {findings.summary(found)}")


COMMANDS = (
    Command("doctor", "find errors in the data, options or code of a pretraining run", doctor_command, (
        option("workdir", metavar="WORKDIR", help="workdir of a pretraining run"),
        option("--step", type=int, metavar="N", help="step of the checkpoint to check (default: the newest)"),
        option("--json", action="store_true", help="print the results as one JSON object"),
    ), group="train", example="runs/quickstart"),
)  # fmt: skip
