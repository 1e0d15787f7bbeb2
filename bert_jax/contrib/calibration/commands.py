"""``bert-jax calibrate``."""

import argparse
from pathlib import Path

from bert_jax.commands.options import SOURCE, Command, option, read_options, reading
from bert_jax.io.hub import model_path


def calibrate_command(arguments: argparse.Namespace) -> None:
    """Save a classifier with calibrated probabilities. Its logits are divided by the temperature that has the
    lowest log loss on labeled examples that the classifier was not trained on; the predicted classes stay the same.
    With --equal_classes, the probabilities are those for texts among which all classes are equally frequent, so
    rare classes are predicted more often. Prints log loss, calibration error, accuracy and macro F1 before and
    after calibration."""
    from bert_jax.contrib.calibration.calibrate import calibrate_model

    calibrate_model(
        model_path(arguments.source), arguments.target, arguments.examples, read_options(arguments),
        equal_classes=arguments.equal_classes, check=arguments.check,
    )  # fmt: skip


COMMANDS = (
    Command("calibrate", "calibrate the probabilities of a classifier on labeled examples", calibrate_command, (
        SOURCE,
        option("--to", dest="target", required=True, type=Path, metavar="WORKDIR", help="new folder"),
        option(
            "--examples", required=True, nargs="+", metavar="FILE",
            help="labeled examples as bert-data records prints them (.jsonl), such as the dev split",
        ),
        option(
            "--equal_classes", action="store_true",
            help="divide the probability of each class by its frequency in --examples, which must equal its "
            "frequency in the training records",
        ),
        option(
            "--check", nargs="+", default=(), metavar="FILE",
            help="other labeled examples, on which the printed values are computed (default: --examples, on which "
            "the values are slightly too good)",
        ),
        reading(),
    ), group="more", example="--model runs/reviews --to calibrated/ --examples dev.jsonl --check test.jsonl"),
)  # fmt: skip
