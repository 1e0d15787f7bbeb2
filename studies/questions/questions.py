"""The 24 questions about the Transformer and BERT: what this library answers to each, as a figure.

    python studies/questions/questions.py --list
    python studies/questions/questions.py NAME ... [--model FOLDER] [--sts FOLDER] [--output FILE]
    python studies/questions/questions.py exact                        # all questions of a class
    python studies/questions/questions.py --table NAME ... --folder DIR    # train the stored runs of a question

exact: arithmetic, or a network with random weights; seconds. measured: on a model at hand (``--model``, any folder
that bert-jax reads) and, for most, STS-B (``--sts``, a folder with its train.tsv and dev.tsv); at most two minutes.
trained: small networks; the table of three seeds is stored in trained.jsonl, and the command trains one pair of
arms with one more seed (``--seed``) and compares its difference with the stored ones; at most five minutes of one
core. ``--folder`` is the folder of text and runs.

``--table`` trains the missing runs of all seeds, one after the other, each at most three minutes of one core, and
prints the table of each question; a stopped command continues. ``--no_runs`` only prints the tables.

Each figure is printed with its expected band. ``--output`` appends a line of JSON for each question. Exit code 3 if
a figure is outside its band or a run is missing, 2 for a bad argument.
"""

import argparse
import datetime
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
import exact  # noqa: F401 (registers its questions)
import measured  # noqa: F401
import trained
from question import QUESTIONS, Question
from small_runs import Lines, report_missing

from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

KINDS = ("exact", "measured", "trained")
NEEDS_STS = ("heads", "poolings", "anisotropic_vectors", "sixty_five_hours")


def arguments() -> argparse.Namespace:
    """Return the options of the command line; exit code 2 if they are incomplete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="questions, or exact, measured, trained")
    parser.add_argument("--list", action="store_true", help="print the questions")
    parser.add_argument("--model", type=Path, help="folder of a model")
    parser.add_argument("--sts", type=Path, help="folder of STS-B")
    parser.add_argument("--folder", type=Path, default=Path("runs/questions"), help="text and runs (trained)")
    parser.add_argument("--seed", type=int, default=3, help="seed of the repeated pair (trained)")
    parser.add_argument("--table", action="store_true", help="make the stored runs of trained questions")
    parser.add_argument("--no_runs", action="store_true", help="with --table, print the tables only")
    parser.add_argument("--output", type=Path, help="append a line of JSON for each question there")
    options = parser.parse_args()
    known = [*KINDS, *QUESTIONS]
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"{unknown[0]}: no such question; use --list")
    if not options.names and not options.list:
        parser.error("no question; name some, or use --list")
    wanted = [each for name in options.names for each in QUESTIONS.values() if name in (each.name, each.kind)]
    options.wanted = list(dict.fromkeys(each.name for each in wanted))
    if options.table and any(QUESTIONS[name].kind != "trained" for name in options.wanted):
        parser.error("--table is for trained questions")
    for name in options.wanted:
        missing = [option for option in ("model", "sts") if name in NEEDS_STS and getattr(options, option) is None]
        if missing:
            parser.error(f"{name} needs --{missing[0]}")
    return options


def answer(one: Question, options: argparse.Namespace) -> bool:
    """Print the figures of a question; return True if all are inside their bands."""
    began = time.perf_counter()
    print(f"{one.name} ({one.number}, {one.kind}): {one.words}", flush=True)
    figures = {name: float(value) for name, value in one.answer(options).items()}
    seconds, misses = round(time.perf_counter() - began, 1), one.misses(figures)
    print("\n".join([*one.lines(figures), f"  {seconds} s"]), flush=True)
    for name in misses:
        print(f"  OUTSIDE: {name}", flush=True)
    if options.output:
        line = {
            "question": one.name, "date": datetime.date.today().isoformat(), "seconds": seconds,
            "model": options.model.name if options.model and one.kind == "measured" else None,
            "figures": {name: float(f"{value:.6g}") for name, value in figures.items()},
        }  # fmt: skip
        with options.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return not misses


def tables(options: argparse.Namespace) -> int:
    """Make the runs of the questions, if they are wanted, and print their tables; return the exit code."""
    table = trained.Table(options.folder, Lines(trained.STORED))
    missing = 0
    for name in options.wanted:
        for seed in trained.SEEDS:
            for arm in trained.ARMS[name]:
                if not options.no_runs:
                    table.line(name, arm, seed)
                missing += seed not in table.found(name, arm)
        lines = [f"{name}: {QUESTIONS[name].words}", "", *trained.table_lines(table, name), ""]
        print("\n".join(lines), flush=True)
    return report_missing(missing)


def main() -> int:
    """Run the command; return its exit code."""
    options = arguments()
    keep_to_cpu_without_accelerator()
    if options.list:
        for one in QUESTIONS.values():
            print(f"{one.number:>13}  {one.kind:<8}  {one.name:<20}  {one.words}")
        return 0
    if options.table:
        return tables(options)
    try:
        results = [answer(QUESTIONS[name], options) for name in options.wanted]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if all(results) else 3


if __name__ == "__main__":
    sys.exit(main())
