"""Predictions of saved models beside those of the fine-tuning runs that trained them, for all kinds of tasks.

    PYTHONPATH=.:tests python benchmarks/predict_equals_run.py [--only NAME ...] [--keep DIR]

Each run trains a tiny model on drawn records for a few steps, with the options that decide how texts become
predictions away from their defaults. Then the model in ``best/`` and its exports (npz, and hf or
sentence-transformers) predict the same records by ``bert_jax.load(...).predict``, and the workdir also by
``bert-jax predict --input``. Labels, spans and their order must be equal (ties excepted) and scores within
1e-5 x max(1, |score|). Exit code 3 if they are not.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ROOT, json_lines, write_json_lines

BAR = 1e-5
# Fields of ``predictions_SPLIT.jsonl`` that depend on the record or on the split; the command gives the id too.
OF_SPLIT = ("id", "gold", "rank")
FORMS = ("best", "command", "npz", "hf", "sentence-transformers")


@dataclass(frozen=True)
class Run:
    """A fine-tuning run: its kind of task, records by name, options, and the export besides npz."""

    kind: str
    data: str
    options: str = ""
    export: str = "hf"


_LONG = "--task.max_length 24"
RUNS = {
    **{
        f"classification, {how}": Run("classification", "classes", f"{_LONG} --task.truncation {how} {more}")
        for how, more in (
            ("head", ""), ("tail", ""), ("head_tail", "--task.head_share 0.6"), ("key_sentences", ""),
            ("windows", "--task.window_overlap 5 --task.max_windows 3"),
        )
    },
    "classification, names": Run(
        "classification", "classes", f"{_LONG} --data.labels maybe no yes --data.label_names b a c"
    ),
    "classification, own heads": Run(
        "classification", "classes", f"{_LONG} --loss.layers 1 --loss.layer_heads own"
    ),
    "classification, both orders": Run("classification", "class_pairs", f"{_LONG} --task.pair_order both"),
    "regression": Run("regression", "values", f"{_LONG} --task.pair_order both --task.truncation tail"),
    "multi_label": Run("multi_label", "labels", f"{_LONG} --task.truncation windows --task.window_overlap 3"),
    "choice": Run("choice", "choices", f"{_LONG} --task.truncation tail"),
    "qa": Run(
        "qa", "questions",
        "--task.max_length 32 --qa.doc_stride 7 --qa.max_query_length 3 --qa.max_answer_length 4 --qa.n_best 2",
    ),
    "qa, no answer": Run(
        "qa", "unanswered", "--task.max_length 32 --qa.no_answer true --qa.null_threshold -0.2 --qa.doc_stride 9"
    ),
    "tagging, context": Run("tagging", "tagged", f"{_LONG} --tagging.document_context true"),
    "tagging, crf": Run("tagging", "tagged", f"{_LONG} --tagging.crf true --tagging.document_context true"),
    "joint": Run("joint", "joint", f"{_LONG} --data.labels maybe no yes --data.label_names B A C", ""),
    "joint, crf": Run("joint", "joint", f"{_LONG} --tagging.crf true --tagging.document_context true", ""),
    "sentence, classes": Run(
        "sentence", "class_pairs",
        "--task.max_length 16 --task.truncation head_tail --sentence.pooling max --sentence.hidden_size 8",
        "sentence-transformers",
    ),
    "sentence, values": Run(
        "sentence", "values",
        "--task.max_length 16 --task.truncation tail --sentence.loss cosent --sentence.normalize true "
        "--sentence.label_scale 5 --sentence.matryoshka 16 8",
        "sentence-transformers",
    ),
    "sentence, triplets": Run(
        "sentence", "triplets", "--task.max_length 16 --sentence.loss triplet --sentence.pooling cls",
        "sentence-transformers",
    ),
    "sentence, pairs": Run(
        "sentence", "pairs", "--task.max_length 16 --sentence.loss negatives", "sentence-transformers"
    ),
}  # fmt: skip
TRAINING = (
    "--training.num_epochs 1 --training.global_batch_size 16 --training.compilation_cache none --training.seed 3 "
    "--optimizer.learning_rate 3e-3 --input.max_shapes 1"
)

# ------------------------------------------------------------------ records


def records_of(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return drawn records, as lines of JSON; a third of their texts is longer than the limits of the runs."""
    draw = random.Random(f"{name}{seed}")
    tags, labels = ("O", "B-A", "B-B"), ("no", "maybe", "yes")

    def words(least: int = 1, most: int = 14) -> list[str]:
        most = most if draw.random() < 0.7 else 4 * most
        return [f"w{draw.randrange(60)}" for _ in range(draw.randint(least, most))]

    def text(least: int = 1, most: int = 14) -> str:
        ends = ("", "", "", "", ". ")
        return " ".join(f"{word}{draw.choice(ends)}" for word in words(least, most))

    def tagged(number: int) -> dict[str, Any]:
        own = words(1, 9)
        return {"words": own, "tags": [draw.choice(tags) for _ in own], "group": f"document {number // 4}"}

    def asked() -> dict[str, Any]:
        passage = words(6, 20)
        at = draw.randrange(len(passage) - 2)
        start = len(" ".join(passage[:at])) + bool(at)
        answer = {"text": " ".join(passage[at : at + 2]), "answer_start": start}
        return {"text": text(1, 5), "text_pair": " ".join(passage), "answers": [answer]}

    makers: dict[str, Callable[[int], dict[str, Any]]] = {
        "classes": lambda i: {"text": text(), "label": draw.choice(labels)},
        "class_pairs": lambda i: {"text": text(), "text_pair": text(), "label": draw.choice(labels)},
        "values": lambda i: {"text": text(), "text_pair": text(), "label": round(draw.random() * 5, 2)},
        "labels": lambda i: {"text": text(), "labels": draw.sample(labels, draw.randint(1, 3))},
        "choices": lambda i: {"text": text(), "choices": [text() for _ in range(3)], "label": draw.randrange(3)},
        "questions": lambda i: asked(),
        "unanswered": lambda i: {**asked(), **({"answers": []} if i % 2 else {})},
        "tagged": tagged,
        "joint": lambda i: {**tagged(i), "label": draw.choice(labels)},
        "triplets": lambda i: {"text": text(), "text_pair": text(), "negative": text()},
        "pairs": lambda i: {"text": text(), "text_pair": text()},
    }
    return [{"id": f"{seed}-{i}", **makers[name](i)} for i in range(count)]


# ------------------------------------------------------------------ comparison


def differences(expected: Any, found: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Yield (place, size) of each difference; the size of a score is relative to max(1, |score|), that of any other
    difference is infinite."""
    if isinstance(expected, float) and isinstance(found, float):
        yield where, abs(found - expected) / max(1.0, abs(expected))
    elif isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        for key in expected:
            yield from differences(expected[key], found[key], f"{where}.{key}")
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from differences(one, other, f"{where}[{number}]")
    elif expected != found:
        yield f"{where}: {str(expected)[:60]} -> {str(found)[:60]}", float("inf")


def is_tie(expected: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Return True if two predictions choose differently between answers or classes of the same score."""
    score = {"score", "no_answer_score"} & expected.keys()
    same = all(abs(expected[name] - found[name]) <= BAR * max(1.0, abs(expected[name])) for name in score)
    ranked = sorted(expected["probabilities"].values() if isinstance(expected.get("probabilities"), dict) else [])
    return bool(score) and same and ("answer" in expected or (len(ranked) > 1 and ranked[-1] - ranked[-2] <= BAR))


def compared(expected: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Return the largest difference between predictions of a run and those of a saved model, and its place."""
    if len(expected) != len(found):
        return float("inf"), f"{len(found)} predictions of {len(expected)}"
    worst = (0.0, "")
    for number, (line, other) in enumerate(zip(expected, found, strict=True)):
        own = {key: value for key, value in line.items() if key not in OF_SPLIT or key in other}
        for place, size in differences(own, dict(other), f"{number}"):
            if size > worst[0] and not (size == float("inf") and is_tie(own, other)):
                worst = size, place
    return worst


# ------------------------------------------------------------------ runs


def start_model(folder: Path) -> Path:
    """Write a model with drawn weights, from which every run starts; return its folder."""
    from builders import drawn, tiny_model, words

    from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
    from bert_jax.interop.saved_model import write_saved

    pieces = [*words(60), "."]
    spec = ModelSpec(
        model=tiny_model(len(pieces), hidden_size=32, max_position_embeddings=96),
        heads=HeadsConfig(pooler=True), tokenizer=TokenizerConfig(),
    )  # fmt: skip
    write_saved(folder, drawn(spec, 0.2, pieces))
    return folder


def run(name: str, source: Path, folder: Path, records: int = 48) -> Path:
    """Train the run ``name`` in ``folder``; return its workdir."""
    import run_finetune

    one = RUNS[name]
    for number, split in enumerate(("train", "dev")):
        write_json_lines(folder / f"{split}.jsonl", records_of(one.data, records, number))
    workdir = folder / "run"
    places = f"--init_from {source} --workdir {workdir} --data.dir {folder} --data.train train.jsonl"
    words = f"--task.kind {one.kind} {places} --data.dev dev.jsonl {one.options} {TRAINING}"
    sys.argv = ["run_finetune.py", *words.split()]
    if code := run_finetune.main():
        raise SystemExit(f"{name}: exit code {code}")
    return workdir


def results(name: str, workdir: Path, forms: Sequence[str] = FORMS) -> Iterator[tuple[str, float, str]]:
    """Yield (form, largest difference, its place) for each form of the model of a run."""
    import bert_jax
    from bert_jax.commands.main import main as command
    from bert_jax.interop.export import export_model

    folder = workdir.parent
    expected = json_lines(workdir / "predictions_dev.jsonl")
    inputs = json_lines(folder / "dev.jsonl")
    for form in forms:
        model = workdir / "best" if form in ("best", "command") else folder / form
        if form in ("hf", "sentence-transformers") and form != RUNS[name].export:
            continue
        if form == "command":
            words = f"predict --model {workdir} --input {folder}/dev.jsonl --output {folder}/found.jsonl"
            if code := command(words.split()):
                raise SystemExit(f"{name}: exit code {code}")
            yield form, *compared(expected, json_lines(folder / "found.jsonl"))
            continue
        if form != "best":
            export_model(workdir / "best", model, form, verify=True, report=lambda line: None)
        yield form, *compared(expected, bert_jax.load(model).predict(inputs))


def main() -> int:
    """Train the runs and print a table of the largest differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="beginnings of the names of runs")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the workdirs in this new folder")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        source = start_model(root / "start")
        for name in RUNS:
            if not name.startswith(tuple(arguments.only)):
                continue
            folder = root / name.replace(", ", "-").replace(" ", "_")
            folder.mkdir()
            for row in results(name, run(name, source, folder)):
                rows.append((name, *row))
                print(line_of(*rows[-1]), flush=True)
    print(f"{'run':<30} {'model':<22} largest difference (bar {BAR:g})")
    for each in rows:
        print(line_of(*each))
    return 0 if all(size <= BAR for _, _, size, _ in rows) else 3


def line_of(name: str, form: str, size: float, place: str) -> str:
    """Return a line of the table; of a difference above the bar also its place."""
    return f"{name:<30} {form:<22} {size:.1e}{'' if size <= BAR else f'  {place}'}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
