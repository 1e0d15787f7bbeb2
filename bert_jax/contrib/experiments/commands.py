"""Commands for finished runs and models: compare, submission, benchmark-inference."""

import argparse
import json
import os
from pathlib import Path

from bert_jax.commands.options import Command, model_or_place, option, read_options, reading, take_place
from bert_jax.io.hub import model_path


def compare_command(arguments: argparse.Namespace) -> None:
    """Compare two fine-tuning runs on one split. Prints the difference of their scores, its 95% interval (paired
    bootstrap) and a p-value: that of McNemar's exact test if the metric is the share of correct predictions, such
    as accuracy, and otherwise that of the bootstrap."""
    from bert_jax.contrib.experiments.compare import compare, table
    from bert_jax.io.storage import location

    comparison = compare(
        location(arguments.first), location(arguments.second), arguments.split, arguments.metric,
        seed=arguments.seed, resamples=arguments.resamples,
    )  # fmt: skip
    if arguments.json:
        print(json.dumps(comparison.as_dict(), ensure_ascii=False))
        return
    for line in table(comparison):
        print(line)


def submission_command(arguments: argparse.Namespace) -> None:
    """Write the files for the GLUE leaderboard, such as CoLA.tsv, from the test predictions of fine-tuning runs,
    and a zip file that contains them."""
    from bert_jax.contrib.experiments.submission import write_submission
    from bert_jax.io.storage import location

    for line in write_submission([location(name) for name in arguments.workdirs], arguments.output):
        print(line)


def benchmark_command(arguments: argparse.Namespace) -> None:
    """Measure how fast a model predicts on this machine, in JAX and as an exported program (--forms). Prints median
    and 99th percentile of the time per batch, texts per second, size on disk, and process memory. Each form runs
    alone in a separate process; the process of onnxruntime loads neither JAX nor bert_jax."""
    from bert_jax.contrib.experiments.latency import FORMS, Load, benchmark, installed_forms, table
    from bert_jax.inference.text_files import write_json_lines

    report, options = (lambda line: print(line, flush=True)), read_options(arguments)
    for name, (usual, quick) in _SIZES.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, quick if arguments.quick else usual)
    for name in ("batches", "lengths"):
        if min(getattr(arguments, name)) < 1:
            raise ValueError(f"--{name}: {min(getattr(arguments, name))} is not allowed; use 1 or more")
    if arguments.seconds <= 0 or arguments.repeats < 1:
        raise ValueError("--seconds must be above 0 and --repeats at least 1")
    if not 0 <= arguments.cpus <= (here := len(os.sched_getaffinity(0))):
        raise ValueError(f"--cpus: {arguments.cpus} is not allowed; use 1 to {here}, or 0 (all {here})")
    take_place(arguments)
    load = Load(arguments.batches, arguments.lengths, arguments.seconds, arguments.repeats, arguments.cpus)
    forms = arguments.forms or installed_forms()
    if missing := [form for form in FORMS if form not in forms and arguments.forms is None]:
        print(f"not installed here: {', '.join(f'{form} ({FORMS[form][1]})' for form in missing)}")
    lines = []
    try:
        for line in benchmark(model_path(arguments.model), forms, load, report, options):
            lines.append(line)
    finally:  # after a signal, the rows so far are kept
        memory = {line["form"]: line["peak_memory_mb"] for line in lines}
        lines = [line | {"peak_memory_mb": memory[line["form"]]} for line in lines]
        if lines:
            print("\n".join(table(lines)), flush=True)
        if lines and arguments.output is not None:
            write_json_lines(lines, arguments.output)


# Options of benchmark-inference: the default value, and the value with --quick.
_SIZES = {
    "batches": ([1, 8, 64], [1, 8]), "lengths": ([16, 128, 512], [16, 128]), "seconds": (3.0, 0.5),
    "repeats": (20, 5),
}  # fmt: skip


COMMANDS = (
    Command("compare", "test whether one fine-tuned model is better than another", compare_command, (
        option("first", metavar="A", help="workdir of a fine-tuning run"),
        option(
            "second", metavar="B",
            help="workdir of another fine-tuning run with the same records",
        ),
        option(
            "--split", default="dev",
            help="split to compare, named as in predictions_SPLIT.jsonl (default: dev)",
        ),
        option(
            "--metric", metavar="NAME",
            help="metric to compare, named as in metrics.json (default: task.metric, else the first metric)",
        ),
        option("--seed", type=int, default=0, metavar="N", help="seed of the bootstrap (default: 0)"),
        option(
            "--resamples", type=int, default=1000, metavar="N",
            help="number of bootstrap resamples (default: 1000)",
        ),
        option("--json", action="store_true", help="print the comparison as one JSON object"),
    ), group="train", example="runs/a runs/b --split dev"),
    Command("benchmark-inference", "measure the speed of a model, in JAX and exported", benchmark_command, (
        model_or_place,
        option(
            "--forms", nargs="+", metavar="FORM",
            help="forms of the model to measure: jax, jax-bfloat16, onnx, stablehlo, onnx-int8 (default: all "
            "whose packages are installed)",
        ),
        option(
            "--quick", action="store_true",
            help="measure batches of 1 and 8 texts with 16 and 128 tokens, each for 0.5 seconds"
        ),
        option("--batches", type=int, nargs="+", metavar="N", help="numbers of texts per batch (default: 1 8 64)"),
        option(
            "--lengths", type=int, nargs="+", metavar="N",
            help="numbers of tokens per text (default: 16 128 512, up to the maximum length of the model)",
        ),
        option(
            "--seconds", type=float, metavar="S",
            help="seconds of measurement for each batch size and length (default: 3)",
        ),
        option(
            "--repeats", type=int, metavar="N",
            help="minimum number of batches for each batch size and length (default: 20)",
        ),
        option("--cpus", type=int, default=0, metavar="N", help="number of processors to use (default: all)"),
        option(
            "--output", type=Path, metavar="FILE",
            help="file to which the results are also written, as JSON lines",
        ), reading(),
    ), is_whole=False, group="export and inspect", example="--model runs/sst2 --quick"),
    Command("submission", "write the files for the GLUE leaderboard", submission_command, (
        option("workdirs", nargs="+", metavar="WORKDIR", help="workdir of a fine-tuning run with a GLUE recipe"),
        option("--output", type=Path, required=True, metavar="DIR", help="folder for the files"),
    ), group="more", example="runs/cola runs/mnli --output submission"),
)  # fmt: skip
