"""Defaults of fine-tuning against the best of six rates: small models on four tasks, three seeds.

    python studies/finetuning_defaults/run.py --models tiny=DIR quickstart=DIR minilm=DIR --data DIR --folder DIR
    python studies/finetuning_defaults/run.py --table

DATA holds glue/SST-2, clinc150, nli_sick and intent_slot/snips. Every finished run is a line of results.jsonl, and
a later start trains only what is missing. ``--rates`` and ``--steps`` add runs at the first seed and stop there.
"""

import argparse
import collections
import csv
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

import run_finetune  # noqa: E402 (from the root of the repository)

RATES = ("3e-5", "1e-4", "3e-4", "1e-3", "3e-3", "1e-2")
SEEDS = (1, 2, 3)
TASKS = ("sst2", "clinc150", "sick", "snips")
PARTS = ("train", "choice", "results")
RESULTS = HERE / "results.jsonl"
BAR = 0.9
Record = dict[str, str]


def table(path: Path, **columns: str) -> list[Record]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [{role: row[column] for role, column in columns.items()} for row in rows]


def records(task: str, data: Path) -> tuple[list[Record], list[Record]]:
    """Return the training and the dev records of a task."""
    if task == "sst2":
        train, dev = (
            table(data / f"glue/SST-2/{part}.tsv", text="sentence", label="label") for part in ("train", "dev")
        )
        return train[:5000], dev
    if task == "sick":
        columns = {"text": "sentence_A", "text_pair": "sentence_B", "label": "entailment_judgment"}
        train, dev = (table(data / f"nli_sick/{part}.tsv", **columns) for part in ("train", "dev"))
        return train, dev
    if task == "snips":
        folders = [data / "intent_slot/snips" / part for part in ("train", "valid")]
        both = [
            [(one / name).read_text(encoding="utf-8").splitlines() for name in ("seq.in", "label")]
            for one in folders
        ]
        train, dev = ([{"text": t, "label": l} for t, l in zip(*one, strict=True)] for one in both)
        return train, dev
    splits = json.loads((data / "clinc150/data_full.json").read_text(encoding="utf-8"))
    kept, seen = [], collections.Counter[str]()
    for text, label in splits["train"]:
        seen[label] += 1
        kept += [{"text": text, "label": label}] if seen[label] <= 10 else []
    return kept, [{"text": text, "label": label} for text, label in splits["val"]]


def write_parts(task: str, data: Path, folder: Path) -> dict[str, Any]:
    """Write the parts of a task as JSON lines: train, and every second dev record each for the choice of the rate
    and for the results. Return the accuracy of the most frequent training label on the results."""
    train, dev = records(task, data)
    parts = dict(zip(PARTS, (train, dev[::2], dev[1::2]), strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    ((label, _),) = collections.Counter(row["label"] for row in train).most_common(1)
    return {part: sum(row["label"] == label for row in parts[part]) / len(parts[part]) for part in PARTS}


def lines() -> Iterator[dict[str, Any]]:
    if RESULTS.exists():
        for line in RESULTS.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def _is_default(line: dict[str, Any], key: dict[str, Any]) -> bool:
    """Return True if ``line`` is a run with the defaults whose rate is that of ``key``, so that both are equal."""
    named = key | {"rate": "default"}
    return key["rate"] != "default" and line | named == line and line["used_rate"] == float(key["rate"])


def fine_tune(key: dict[str, Any], model: Path, folder: Path, share: dict[str, Any]) -> dict[str, Any]:
    """Train one run unless it is finished, add its line to the results, and return the line."""
    for line in lines():
        if line | key == line or _is_default(line, key):
            return line
    workdir, began = folder / "run", time.perf_counter()
    shutil.rmtree(workdir, ignore_errors=True)
    options = {
        "init_from": model, "data.train": folder / key["task"] / "train.jsonl",
        "data.dev": folder / key["task"] / "choice.jsonl", "data.test": folder / key["task"] / "results.jsonl",
        "task.max_length": 64, "training.seed": key["seed"], "workdir": workdir,
        "training.compilation_cache": folder / "compiled", "training.log_interval": 1000,
        **({} if key["rate"] == "default" else {"optimizer.learning_rate": key["rate"]}),
        **({} if not key["steps"] else {"training.num_steps": key["steps"]}),
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with mock.patch.object(sys, "argv", ["run_finetune.py", *words]):
        if code := run_finetune.main():
            raise SystemExit(code)
    import yaml

    config = yaml.safe_load((workdir / "config.yaml").read_text(encoding="utf-8"))
    scores = {
        one["split"].partition("_")[0]: one["metrics"]["accuracy"]["value"]
        for one in json.loads((workdir / "metrics.json").read_text(encoding="utf-8"))
    }
    line = key | {
        "used_rate": config["optimizer"]["learning_rate"], "used_steps": config["training"]["num_steps"],
        "choice": round(scores["dev"], 5), "results": round(scores["test"], 5),
        "majority": round(share["results"], 5), "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print("#", json.dumps(line), flush=True)
    return line


def cell(model: str, task: str) -> list[str]:
    """Return the row of a model and a task in the table; the values of runs that are missing are empty."""
    own = [one for one in lines() if (one["model"], one["task"], one["steps"]) == (model, task, 0)]
    tried = {one["rate"]: one["choice"] for one in own if one["seed"] == 0 and one["rate"] in RATES}
    if not tried:
        return [model, task, "no rates"]
    best = max(tried, key=lambda rate: (tried[rate], -RATES.index(rate)))
    key = {"model": model, "task": task, "steps": 0, "rate": best}
    seeds = [seed for seed in SEEDS if any(one["rate"] == "default" and one["seed"] == seed for one in own)]
    of = {
        "default": [one for one in own if one["rate"] == "default" and one["seed"] in seeds],
        best: [
            one
            for one in own
            if one["seed"] in seeds and (one["rate"] == best or _is_default(one, key | {"seed": one["seed"]}))
        ],
    }
    if not seeds or len(of[best]) < len(seeds):
        return [model, task, f"best of {len(tried)} rates: {best}", f"{len(seeds)} of {len(SEEDS)} seeds"]
    mean = {rate: statistics.mean(one["results"] for one in runs) for rate, runs in of.items()}
    majority = own[0]["majority"]
    share = (mean["default"] - majority) / (mean[best] - majority)
    used = of["default"][0]
    return [
        model, task, f"{used['used_rate']:.2g}", f"{used['used_steps']:,}", f"{best} of {len(tried)}",
        f"{majority:.3f}", f"{mean['default']:.3f}", f"{mean[best]:.3f}", f"{share:.2f}", str(len(seeds)),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--data", type=Path, help="folder of the task files")
    parser.add_argument("--folder", type=Path, help="task files, runs and compiled programs")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--rates", nargs="+", help="other rates, at the first seed only")
    parser.add_argument("--steps", type=int, default=0, help="other number of steps")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    if options.table:
        print("| model | task | default rate | steps | best rate | majority | default | best | share | seeds |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for model in dict.fromkeys(one["model"] for one in lines()):
            for task in TASKS:
                print(f"| {' | '.join(cell(model, task))} |")
        return
    folder = options.folder.resolve()
    for name, _, path in (one.partition("=") for one in options.models):
        for task in options.tasks:
            share = write_parts(task, options.data.resolve(), folder / task)
            key: dict[str, Any] = {"model": name, "task": task, "steps": options.steps}
            tried = {
                rate: fine_tune(key | {"rate": rate, "seed": 0}, Path(path).resolve(), folder, share)["choice"]
                for rate in options.rates or RATES
            }
            if options.rates or options.steps:
                continue
            best = max(tried, key=lambda rate: (tried[rate], -RATES.index(rate)))
            for seed in SEEDS:
                for rate in ("default", best):
                    fine_tune(key | {"rate": rate, "seed": seed}, Path(path).resolve(), folder, share)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
