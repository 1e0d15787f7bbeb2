"""Fine-tuning of small models that are compared: texts of a seed for training, for the choice of a rate and for
results, and the score of a run."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from small_runs import REPOSITORY, Options, command, forget, report

from bert_jax.hashing import permutation

RATES = (3e-4, 1e-3, 3e-3)
RATE_SEED = 100  # of the runs that choose the rate
RATE_TEXTS = 700  # for the choice of the rate
SLOT_FILES = ("seq.in", "seq.out", "label")
# A pretraining run with these ends with the weights that were drawn: one step, whose update float32 rounds away.
DRAWN_WEIGHTS: Options = {"training.num_steps": 1, "optimizer.learning_rate": 1e-12, "optimizer.warmup_steps": 0}


@dataclass(frozen=True)
class SmallTask:
    """A task: its recipe, how its files are written from a folder of data for a seed, the file of a part, the
    metric of its score, and options of its runs."""

    recipe: str
    write: Callable[[Path, Path, int], None]
    file: str
    metric: str
    options: Options


def write_intents(source: Path, folder: Path, seed: int, count: int | None = None) -> None:
    """Write the parts of CLINC150 without its texts out of scope, with ``count`` training texts of each intent
    (None: all); the rest is the part ``unlabelled``."""
    splits = json.loads((source / "data_full.json").read_text())
    of_intent: dict[str, list[list[str]]] = {}
    for text, intent in splits["train"]:
        of_intent.setdefault(intent, []).append([text, intent])
    chosen, rest = [], []
    for number, (_, rows) in enumerate(sorted(of_intent.items())):
        order = permutation(len(rows), seed, number)
        chosen += [rows[place] for place in order[:count]]
        rest += [rows[place] for place in order[count:]] if count else []
    splits = {"train": chosen, "rates": splits["val"], "results": splits["test"], "unlabelled": rest}
    (folder / "texts.json").write_text(json.dumps(splits))


def write_slots(source: Path, folder: Path, seed: int, count: int) -> None:
    """Write the parts of SNIPS, with ``count`` training texts."""
    for name in SLOT_FILES:
        lines = (source / "train" / name).read_text().splitlines(keepends=True)
        order = permutation(len(lines), seed)
        parts = {
            "train": [lines[place] for place in order[:count]],
            "rates": [lines[place] for place in order[count : count + RATE_TEXTS]],
            "results": (source / "valid" / name).read_text().splitlines(keepends=True),
        }
        for part, texts in parts.items():
            (folder / part).mkdir(exist_ok=True)
            (folder / part / name).write_text("".join(texts))


def write_table(source: Path, folder: Path, seed: int, count: int | None = None) -> None:
    """Write the parts of train.tsv and dev.tsv in ``source``, with at most ``count`` training texts."""
    head, *lines = (source / "train.tsv").read_text().splitlines(keepends=True)
    order = permutation(len(lines), seed)
    rates, train = order[:RATE_TEXTS], order[RATE_TEXTS:][:count]
    for part, places in (("rates", rates), ("train", train)):
        (folder / f"{part}.tsv").write_text(head + "".join(lines[place] for place in places))
    (folder / "results.tsv").write_text((source / "dev.tsv").read_text())


def study_options(
    description: str, *, model: str, seeds: Sequence[int], **subsets: Sequence[str]
) -> argparse.Namespace:
    """Return the options of a command that tunes --model, ``model`` in words, on task files: model, data, folder,
    seeds and table, with which nothing is trained, so that neither model nor data are needed. Each of ``subsets``
    is one more option, whose values are some of those given (default: all)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help=model)
    parser.add_argument("--data", type=Path, help="folder of the task files")
    parser.add_argument("--folder", type=Path, required=True, help="texts, runs and finished lines")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*seeds])
    for name, values in subsets.items():
        parser.add_argument(f"--{name}", nargs="+", choices=values, default=[*values])
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    if not options.table and not (options.model and options.data):
        parser.error("--model, --data: name the model and the folder of the task files")
    return options


def texts(task: SmallTask, data: Path | None, folder: Path, seed: int) -> Path:
    """Return ``folder`` with the texts of ``seed``, which are written if they are missing."""
    if not (folder / "done").exists():
        if data is None:
            raise ValueError("--data: name the folder of the task files")
        folder.mkdir(parents=True, exist_ok=True)
        task.write(data, folder, seed)
        (folder / "done").touch()
    return folder


def score(
    task: SmallTask,
    part: str,
    texts: Path,
    model: Path,
    rate: float,
    seed: int,
    workdir: Path,
    *,
    keep: bool = False,
) -> dict[str, Any]:
    """Fine-tune ``model`` to its end (no checkpoint is chosen) and return its score on ``part``, its number of
    records and the seconds of the command; the score of a run whose loss is not finite is -inf. The workdir is
    deleted unless ``keep`` is True."""
    options = {
        "config": REPOSITORY / f"configs/finetune/{task.recipe}.yaml", "init_from": model,
        "data.dir": texts, "data.train": task.file.format("train"), "data.dev": task.file.format(part),
        "data.test": (), "optimizer.learning_rate": rate, "training.seed": seed,
        "training.eval_interval": 1_000_000, "training.checkpoint_interval": 1_000_000,
        "training.compilation_cache": workdir.parent / "compiled", **task.options,
    }  # fmt: skip
    line: dict[str, Any] = {"score": -math.inf}
    try:
        line["seconds"] = command("run_finetune.py", options, workdir)
        (result,) = json.loads((workdir / "metrics.json").read_text())
        line |= {"score": round(result["metrics"][task.metric]["value"], 5), "n": result["n"]}
    except FloatingPointError:
        report(f"{workdir.name}: the loss is not finite")
    if not keep:
        forget(workdir)
    return line
