"""Predictions of the commands, recorded with one version of the code and compared with those of another.

    PYTHONPATH=CHECKOUT:tests python studies/structure/same_predictions.py --models DIR     writes small models and files
    PYTHONPATH=CHECKOUT python studies/structure/same_predictions.py --record DIR           runs the commands on them
    PYTHONPATH=OTHER python studies/structure/same_predictions.py --compare DIR             the same, and compares

The models have drawn weights; fine-tuning trains each kind of task for a few steps. Numbers must agree within 1e-6
(relative above 1), everything else exactly, in the same order. Lines with the older names of fields are converted
first. Exit code 3 if an output differs.
"""

import argparse
import configparser
import contextlib
import importlib
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = 1e-6
# Of a number that was rounded to six digits.
ROUNDED = 5e-7
LABELS, TAGS = ("no", "perhaps", "yes"), ("O", "B-A", "I-A", "B-B")

TRAINING = (
    "--training.num_epochs 1 --training.global_batch_size 8 --training.compilation_cache none --training.seed 3 "
    "--execution.prng threefry "  # older versions do not have hash
    "--optimizer.learning_rate 5e-3 --task.max_length 32"
)
# Name of the run: its kind of task and options.
RUNS = {
    "classification": "classification",
    "windows": "classification --task.truncation windows --task.window_overlap 8",
    "regression": "regression", "multi_label": "multi_label", "choice": "choice",
    "qa": "qa", "qa_none": "qa --qa.no_answer true", "tagging": "tagging",
    "crf": "tagging --tagging.crf true", "joint": "joint",
    "pair_softmax": "sentence --sentence.loss softmax", "pair_negatives": "sentence --sentence.loss negatives",
}  # fmt: skip
_PREDICT = "predict --model {models}/%s --input {models}/%s.jsonl --output {output}"
COMMANDS = {
    **{
        f"predict_{name}_{inputs}": _PREDICT % (name, inputs)
        for name, inputs in (
            ("classes", "texts"), ("many", "texts"), ("value", "texts"), ("tags", "lines"), ("path", "lines"),
            ("tags", "words"), ("path", "words"), ("span", "questions"), ("choice", "choices"),
        )
    },
    "predict_both_sequence": _PREDICT % ("both", "lines") + " --task sequence",
    "predict_both_token": _PREDICT % ("both", "words") + " --task token",
    "embed": "embed --model {models}/sentence --input {models}/lines.jsonl --output {output}",
    "embed_cls": "embed --model {models}/classes --input {models}/lines.jsonl --pooling cls --normalize true "
    "--output {output}",
    "embed_tokens": "embed --model {models}/classes --input {models}/lines.jsonl --per_token "
    "--layers=-1,-2 --output {output}",
    "zero_shot": "zero-shot --model {models}/inference --input {models}/lines.jsonl --labels w1 w2=w3,w4 w5 "
    "--template w7|{{}}|w8 --output {output}",
    "zero_shot_many": "zero-shot --model {models}/inference --input {models}/lines.jsonl --labels w1 w2=w3,w4 "
    "--multi_label --output {output}",
    "zero_shot_prompt": "zero-shot --model {models}/masks --input {models}/lines.jsonl --labels w1 w2=w3,w4 "
    "--template {{text}}|w9|[MASK] --output {output}",
    "search": "search --model {models}/sentence --corpus {models}/corpus.jsonl --top 5 --output {output}",
    "fill_mask": "fill-mask --model {models}/masks --input {models}/masked.txt --top 3 --json",
}  # fmt: skip


# ------------------------------------------------------------------ models and files


def write_models(folder: Path) -> None:
    """Write saved models with drawn weights, inputs and records; needs the project's ``tests`` folder on the
    path."""
    from inference_models import make_weights

    from bert_jax.config import HeadsConfig, SentenceConfig, SentenceModule
    from bert_jax.interop.saved_model import write_saved

    heads = {
        "classes": HeadsConfig(pooler=True, sequence_labels=LABELS),
        "many": HeadsConfig(pooler=True, sequence_labels=LABELS, problem="multi_label"),
        "value": HeadsConfig(pooler=True, sequence_labels=("score",), problem="regression"),
        "tags": HeadsConfig(token_labels=TAGS), "path": HeadsConfig(token_labels=TAGS, crf=True),
        "span": HeadsConfig(span=True), "choice": HeadsConfig(pooler=True, choice=True),
        "both": HeadsConfig(pooler=True, sequence_labels=LABELS, token_labels=TAGS),
        "inference": HeadsConfig(pooler=True, sequence_labels=("contradiction", "neutral", "entailment")),
        "masks": HeadsConfig(mlm=True), "start": HeadsConfig(pooler=True),
    }  # fmt: skip
    for name, of_model in heads.items():
        write_saved(folder / name, make_weights(of_model))
    sentence = SentenceConfig(modules=(SentenceModule(kind="normalize"),))
    write_saved(folder / "sentence", make_weights(sentence=sentence))
    draw = random.Random(0)
    for name, lines in {**_inputs(draw), **_records(draw)}.items():
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    masked = [f"{_text(draw, 20)} [MASK] {_text(draw, 5)}" for _ in range(40)] + ["[MASK] " * 20]
    (folder / "masked.txt").write_text("\n".join(masked) + "\n", encoding="utf-8")


def _text(draw: random.Random, most: int, least: int = 0) -> str:
    ends = ("", "", "", "x", "xy", ",")
    return " ".join(f"w{draw.randrange(40)}{draw.choice(ends)}" for _ in range(draw.randint(least, most)))


def _inputs(draw: random.Random) -> dict[str, list[dict[str, Any]]]:
    """Return inputs of the commands, some of them longer than the limit of the models."""
    lines = [{"text": _text(draw, 20 if i % 9 else 120)} for i in range(60)]
    pairs = [{"text": _text(draw, 30), "text_pair": _text(draw, 60)} for _ in range(30)]
    return {
        "lines": lines,
        "texts": [*lines, *pairs],
        "words": [{"words": _text(draw, 20 if i % 9 else 200).split()} for i in range(60)],
        "questions": [
            {"text": _text(draw, 10, 1), "text_pair": _text(draw, 30 if i % 5 else 200)} for i in range(40)
        ],
        "choices": [
            {"text": _text(draw, 10, 1), "choices": [_text(draw, 15, 1) for _ in range(2 + i % 3)]}
            for i in range(30)
        ],
        "corpus": [{"id": i, "text": _text(draw, 12, 1)} for i in range(80)],
    }


def _records(draw: random.Random) -> dict[str, list[dict[str, Any]]]:
    """Return the files of each kind of task: ``KIND_train`` and ``KIND_dev``."""

    def tagged() -> dict[str, Any]:
        words = _text(draw, 12 if draw.random() < 0.8 else 60, 1).split()
        return {"words": words, "tags": [draw.choice(("O", "B-A", "B-B")) for _ in words]}

    def asked() -> dict[str, Any]:
        words = _text(draw, 50, 4).replace(",", "").split()
        at = draw.randrange(len(words) - 2)
        answer = " ".join(words[at : at + 2])
        start = len(" ".join(words[:at])) + bool(at)
        return {
            "text": _text(draw, 6, 2), "text_pair": " ".join(words),
            "answers": [{"text": answer, "answer_start": start}],
        }  # fmt: skip

    makers = {
        "classification": lambda: {"text": _text(draw, 60), "label": draw.choice(LABELS)},
        "regression": lambda: {
            "text": _text(draw, 9), "text_pair": _text(draw, 9), "label": round(draw.random() * 5, 2)
        },
        "multi_label": lambda: {"text": _text(draw, 20), "labels": draw.sample(LABELS, draw.randint(0, 3))},
        "choice": lambda: {
            "text": _text(draw, 8, 1), "choices": [_text(draw, 9, 1) for _ in range(3)], "label": draw.randrange(3)
        },
        "qa": asked,
        "tagging": tagged,
        "joint": lambda: {**tagged(), "label": draw.choice(LABELS)},
        "sentence": lambda: {
            "text": _text(draw, 9, 1), "text_pair": _text(draw, 9, 1), "label": draw.choice(LABELS)
        },
    }  # fmt: skip
    files = {}
    for kind, make in makers.items():
        for split, count in (("train", 24), ("dev", 40)):
            files[f"{kind}_{split}"] = [{"id": f"{split}{i}", **make()} for i in range(count)]
    for split in ("train", "dev"):
        files[f"pairs_{split}"] = [
            {name: value for name, value in line.items() if name != "label"} for line in files[f"sentence_{split}"]
        ]
    return files


# ------------------------------------------------------------------ commands


def run_all(models: Path, folder: Path, only: Sequence[str]) -> None:
    """Run every command whose output begins with one of ``only``; ``folder`` gets ``NAME.jsonl`` of each."""
    import bert_jax

    root = Path(bert_jax.__file__).resolve().parents[1]
    settings = configparser.ConfigParser()
    settings.read(root / "setup.cfg")
    scripts = settings["options.entry_points"]["console_scripts"].split("\n")
    module, _, function = next(line for line in scripts if line.startswith("bert-jax")).split("=")[1].partition(":")
    main = getattr(importlib.import_module(module.strip()), function.strip())
    for name, command in COMMANDS.items():
        if not name.startswith(tuple(only)):
            continue
        target = folder / f"{name}.jsonl"
        words = [word.replace("|", " ") for word in command.format(models=models, output=target).split()]
        with contextlib.ExitStack() as held:
            if "{output}" not in command:
                held.enter_context(contextlib.redirect_stdout(held.enter_context(target.open("w"))))
            if code := main(words):
                raise SystemExit(f"{name}: exit code {code}")
    runs = {name: words for name, words in RUNS.items() if f"finetune_{name}".startswith(tuple(only))}
    if not runs:
        return
    sys.path.insert(0, str(root))
    import run_finetune

    for name, options in runs.items():
        kind, *more = options.split()
        data = "pairs" if name == "pair_negatives" else kind
        with tempfile.TemporaryDirectory() as scratch:
            files = f"--data.train {models}/{data}_train.jsonl --data.dev {models}/{data}_dev.jsonl"
            places = f"--init_from {models}/start --workdir {scratch}/run {files}"
            sys.argv = ["run_finetune.py", "--task.kind", kind, *more, *places.split(), *TRAINING.split()]
            if code := run_finetune.main():
                raise SystemExit(f"{name}: exit code {code}")
            written = (Path(scratch) / "run" / "predictions_dev.jsonl").read_text(encoding="utf-8")
        (folder / f"finetune_{name}.jsonl").write_text(written, encoding="utf-8")


# ------------------------------------------------------------------ comparison


def new_form(name: str, line: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded line with current names; ``record``: the line of the task file."""
    if not name.startswith("finetune_"):
        return line
    if "null_odds" in line:
        line = dict(line)
        odds = line.pop("null_odds")
        best = {"best_answer": line.pop("best_text")} if "best_text" in line else {}
        return {
            "id": line["id"], "answer": line["text"], "start": line["start"], "end": line["end"],
            "score": line["score"], "no_answer_score": line["score"] + odds, **best,
        }  # fmt: skip
    if "tags" in line:
        line = dict(line)
        tags = line.pop("tags")
        scores = line.pop("tag_scores", None) or ([] if "prediction" in line else line.pop("scores", []))
        tokens = [{"text": word, "label": tag} for word, tag in zip(record["words"], tags, strict=True)]
        for token, score in zip(tokens, scores, strict=False):
            token["score"] = score
        rest = new_form(name, line, record) if "prediction" in line else {"id": line["id"]}
        return {**rest, "tokens": tokens}
    from bert_jax.finetuning.artifacts import in_new_form

    return in_new_form(line)


def differences(old: Any, new: Any, where: str) -> Iterator[str]:
    """Return the differences."""
    if isinstance(old, float) or isinstance(new, float):
        if not np.isclose(old, new, rtol=TOLERANCE, atol=TOLERANCE + ROUNDED):
            yield f"{where}: {old} -> {new}"
    elif isinstance(old, dict) and isinstance(new, dict):
        if list(old) != list(new) and set(old) != set(new):
            yield f"{where}: fields {list(old)} -> {list(new)}"
            return
        for key in old:
            yield from differences(old[key], new[key], f"{where}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{where}[{i}]")
    elif old != new:
        yield f"{where}: {str(old)[:80]} -> {str(new)[:80]}"


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def compare(folder: Path, fresh: Path) -> int:
    """Print the differences, and return the number of different outputs."""
    failed = 0
    for file in sorted((folder / "outputs").glob("*.jsonl")):
        if not (fresh / file.name).exists():
            continue
        name, old, new = file.stem, lines_of(file), lines_of(fresh / file.name)
        options = RUNS.get(name.removeprefix("finetune_"), "").split()
        data = "pairs" if name.endswith("pair_negatives") else (options or [""])[0]
        records = lines_of(folder / "models" / f"{data}_dev.jsonl") if options else [{}] * len(old)
        if len(old) == len(new):
            old = [new_form(name, line, record) for line, record in zip(old, records, strict=True)]
        # Of a text that was cut the older form of fine-tuning did not say so.
        for line in new if options else ():
            line.pop("truncated", None)
        found = list(differences(old, new, name))
        failed += bool(found)
        print(f"{name}: {len(old)} lines, {len(found)} differences")
        for line in found[:3]:
            print(f"    {line}")
    return failed


def main() -> int:
    """Write models, record, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    for name in ("models", "record", "compare"):
        mode.add_argument(f"--{name}", type=Path, metavar="DIR")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="beginnings of the names of the outputs"
    )
    arguments = parser.parse_args()
    if arguments.models is not None:
        (arguments.models / "models").mkdir(parents=True)
        write_models(arguments.models / "models")
        return 0
    folder = (arguments.record or arguments.compare).resolve()
    if arguments.record is not None:
        (folder / "outputs").mkdir(exist_ok=True)
        run_all(folder / "models", folder / "outputs", arguments.only)
        return 0
    with tempfile.TemporaryDirectory() as fresh:
        run_all(folder / "models", Path(fresh), arguments.only)
        return 3 if compare(folder, Path(fresh)) else 0


if __name__ == "__main__":
    sys.exit(main())
