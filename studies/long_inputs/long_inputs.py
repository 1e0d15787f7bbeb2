"""A converted long model: its outputs on short texts against the source, and long reviews against other ways.

    python studies/long_inputs/long_inputs.py --data DIR --source MODEL --work FOLDER --output JSONL \
        [--layers 1] [--rate 3e-4] [--epochs 3] [--peer_python PYTHON] [--short]

First, a BERT and a RoBERTa of six layers with drawn weights become Longformers of 4,096 positions (``--to_long``)
with windows of 512 and 1,024 tokens; their outputs on texts of at most half a window + 1 tokens are compared with
those of the source. Then the first layers of MODEL, a BERT of 512 positions, are fine-tuned on the 1,800 reviews of
DIR/long_movie_reviews (sentiment; most have more than 512 words) in five folds, each text scored once, in three
ways with the same seeds, epochs and rate, which are given and not searched: ``long``, converted to 1,024 tokens
with windows of 256 tokens on each side; ``windows``, all windows of 512 tokens, logits averaged; ``head_tail``, 512
tokens of the head and the tail. With ``--peer_python``, TF-IDF with logistic regression on the same folds stands
beside them (``text_baselines.py``). The last parameters are scored. Intervals are those of a paired bootstrap over
the texts.

Each fold of each way is one JSON line of the output; finished ones are not repeated, and a killed one is continued
by the same command. ``--short`` compares the outputs and trains one fold of the long model for one epoch, which is
not written. Exit code 3 if an output differs by more than 1e-5 x max(1, largest).
"""

import argparse
import csv
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "finetuning"))
from text_baselines import regression

from bert_jax.contrib.surgery.run_options import ChangeOptions
from bert_jax.config import ExecutionConfig, HeadsConfig, ModelConfig, ModelSpec, TokenizerConfig
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.start.initial_model import changed_weights
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.io.files import write_whole
from bert_jax.model import BertModel, from_canonical
from bert_jax.records import Record
from bert_jax.training.state import initial_params

ROOT = Path(__file__).resolve().parents[2]
BAR, BATCH = 1e-5, "8"
PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(995)))
WAYS = {
    "long": "--to_long 1024 --model.attention_windows 256 --task.max_length 1024 --task.truncation head_tail",
    "windows": "--task.max_length 512 --task.truncation windows",
    "head_tail": "--task.max_length 512 --task.truncation head_tail",
}


def drawn(family: str) -> ModelBundle:
    """Return a six-layer model with drawn weights and 512 positions."""
    offset = 2 if family == "roberta" else 0
    model = ModelConfig(
        vocab_size=len(PIECES), hidden_size=192, num_layers=6, num_attention_heads=6, intermediate_size=768,
        max_position_embeddings=512 + offset, position_offset=offset, type_vocab_size=1 if offset else 2,
        family="roberta" if offset else "bert",
    )  # fmt: skip
    spec = ModelSpec(model=model, heads=HeadsConfig(mlm=True), family=model.family, tokenizer=TokenizerConfig())
    rng = np.random.default_rng(0)
    params = {
        name: np.float32(name.endswith("scale")) + 0.06 * rng.standard_normal(shape, np.float32)
        for name, shape in parameter_shapes(spec).items()
    }
    content = ("\n".join(PIECES) + "\n").encode()
    return ModelBundle(spec=spec, params=params, tokenizer_content=content)


def logits(bundle: ModelBundle, lengths: list[int], row: int) -> np.ndarray:
    """Return the masked-LM logits of drawn texts of ``lengths`` tokens in rows of ``row``, float32[sum, V]."""
    model = BertModel(bundle.spec.model, ExecutionConfig(vocab_multiple=1), bundle.spec.heads)
    params = from_canonical(bundle.params, initial_params(model, 0), bundle.spec.model.vocab_size)
    real = np.arange(row) < np.array(lengths)[:, None]
    ids = np.zeros((len(lengths), row), np.int32)
    ids[:, : max(lengths)] = np.random.default_rng(1).integers(5, 1000, (len(lengths), max(lengths)))
    features = {"input_ids": ids * real, "token_type_ids": 0 * ids, "sequence_ids": real.astype(np.int32)}
    features["position_ids"] = np.broadcast_to(np.arange(row), ids.shape)
    found = jax.jit(lambda p: model.apply({"params": p}, features).mlm_logits)(params)
    return np.asarray(found)[real]


def compare_outputs() -> dict[str, Any]:
    """Return the largest difference of the logits of converted models, divided by max(1, largest logit)."""
    worst = {}
    for family in ("bert", "roberta"):
        source = drawn(family)
        with tempfile.TemporaryDirectory() as folder:
            write_saved(Path(folder) / "source", source)
            for window, most in ((256, 257), (512, 512)):
                options = ChangeOptions(init_from=str(Path(folder) / "source"), to_long=4096)
                long = changed_weights(options, {"model.attention_windows": ((window,), "")})
                lengths = [most, most // 2, 7]
                expected = logits(source, lengths, 512)
                found = logits(dataclasses.replace(long, tokenizer_content=None), lengths, 2048)
                difference = np.abs(found - expected).max() / max(1, np.abs(expected).max())
                worst[f"{family}, window {2 * window}"] = float(f"{difference:.3g}")
    return {"row": "outputs", "difference": worst, "ok": max(worst.values()) <= BAR}


def run(*arguments: str) -> float:
    """Run a command of this checkout; return its seconds."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)
    return time.perf_counter() - start


def write_fold(records: list[dict[str, str]], fold: int, folds: int, folder: Path) -> list[int]:
    """Write train.tsv and dev.tsv of a fold; return the indices of its dev texts. Classes have equal shares."""
    by_class = sorted(range(len(records)), key=lambda i: (records[i]["label"], i))
    order = np.random.default_rng(0).permutation(len(records) // 2)
    half = len(by_class) // 2
    place = {by_class[side * half + int(k)]: int(i) % folds for side in (0, 1) for i, k in enumerate(order)}
    chosen = [i for i in range(len(records)) if place.get(i) == fold]
    folder.mkdir(parents=True, exist_ok=True)
    for name, indices in (("dev", chosen), ("train", [i for i in range(len(records)) if place.get(i) != fold])):
        lines = ["label\ttext"] + [f"{records[i]['label']}\t{records[i]['text']}" for i in indices]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return chosen


def cut(source: Path, layers: int, folder: Path) -> Path:
    """Save the encoder of ``source`` with its first ``layers`` layers in ``folder``, unless it is there."""
    if not folder.exists():
        weights = read_weights(source)
        model = dataclasses.replace(weights.spec.model, num_layers=layers)
        spec = dataclasses.replace(weights.spec, model=model, heads=HeadsConfig(), sentence=None)
        params = {name: weights.params[name] for name in parameter_shapes(spec)}
        write_saved(folder, dataclasses.replace(weights, spec=spec, params=params))
    return folder


def fine_tune(way: str, fold: int, source: Path, folder: Path, settings: dict[str, str]) -> dict[str, Any]:
    """Fine-tune and return the line of the output: accuracy, seconds, and for each dev text whether it is right."""
    workdir = folder / "-".join((way, *settings.values()))
    seconds = run(
        "run_finetune.py", "--config", "configs/finetune/long_reviews.yaml", "--init_from", str(source),
        "--data.train", str(folder / "train.tsv"), "--data.dev", str(folder / "dev.tsv"),
        "--data.dev_fraction", "0", "--workdir", str(workdir), "--optimizer.learning_rate", settings["rate"],
        "--training.num_epochs", settings["epochs"], "--training.global_batch_size", BATCH,
        "--training.seed", str(fold), "--training.restore_best", "false", *WAYS[way].split(),
    )  # fmt: skip
    answers = [json.loads(line)["label"] for line in (workdir / "predictions_dev.jsonl").open(encoding="utf-8")]
    right = [answer == r.label for answer, r in zip(answers, read_fold(folder)["dev"], strict=True)]
    return judged(way, fold, right, seconds) | settings


def judged(way: str, fold: int, right: list[bool], seconds: float) -> dict[str, Any]:
    """Return the line of the output for a fold; ``right`` tells for each dev text whether its class was found."""
    bits = "".join("01"[found] for found in right)
    accuracy = round(sum(right) / len(right), 4)
    line = {"row": "reviews", "way": way, "fold": fold, "accuracy": accuracy}
    return line | {"seconds": round(seconds), "right": bits}


def read_fold(folder: Path) -> dict[str, list[Record]]:
    """Return the records of train.tsv and dev.tsv, which ``write_fold`` wrote."""
    return {
        name: [
            Record(id=str(i), source=name, label=line.split("\t")[0], text=line.rstrip("\n").split("\t")[1])
            for i, line in enumerate((folder / f"{name}.tsv").read_text(encoding="utf-8").split("\n")[1:-1])
        ]
        for name in ("train", "dev")
    }


def tf_idf(python: str, fold: int, folder: Path) -> dict[str, Any]:
    """Fit TF-IDF with logistic regression and return the line of the output."""
    start = time.perf_counter()
    found = regression(python, "long_reviews", read_fold(folder))["dev"]
    right = [max(one["probabilities"], key=one["probabilities"].get) == one["gold"] for one in found]
    return judged("tf_idf", fold, right, time.perf_counter() - start)


def report(lines: list[dict[str, Any]], folds: int) -> None:
    """Print the accuracy over all texts of each way, and the paired differences with 95% intervals."""
    by_way = {
        way: np.concatenate([np.array(list(line["right"]), int) for line in sorted(lines, key=lambda x: x["fold"])
                             if line["way"] == way])
        for way in (*WAYS, "tf_idf") if sum(line["way"] == way for line in lines) == folds
    }  # fmt: skip
    draws = None
    for way, right in by_way.items():
        if draws is None:
            draws = np.random.default_rng(0).integers(0, len(right), (2000, len(right)))
        seconds = sum(line["seconds"] for line in lines if line["way"] == way)
        text = f"{way}: accuracy {right.mean():.4f} on {len(right)} texts, {seconds} s"
        if way != "long" and "long" in by_way:
            difference = by_way["long"] - right
            low, high = np.quantile(difference[draws].mean(1), (0.025, 0.975))
            text += f"; long minus {way}: {difference.mean():+.4f} ({low:+.4f} to {high:+.4f})"
        print(text)


def main() -> int:
    """Measure, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--source", required=True, type=Path, help="the model to fine-tune, in any format")
    parser.add_argument("--work", required=True, type=Path, help="folder for the cut model and the runs")
    parser.add_argument("--output", required=True, type=Path, help="file of JSON lines, which is continued")
    parser.add_argument("--layers", type=int, default=1, help="number of layers of the source that are kept")
    parser.add_argument("--rate", default="3e-4", help="peak of the learning rate of every way")
    parser.add_argument("--epochs", default="3")
    parser.add_argument("--peer_python", help="Python with scikit-learn, for TF-IDF")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="outputs, and an epoch of one fold of the long model")
    arguments = parser.parse_args()
    work, folds = arguments.work.resolve(), arguments.folds
    csv.field_size_limit(1 << 24)
    compared = compare_outputs()
    print(json.dumps(compared), flush=True)
    source = cut(arguments.source, arguments.layers, work / f"source-{arguments.layers}")
    with (arguments.data / "long_movie_reviews" / "train.tsv").open(encoding="utf-8", newline="") as file:
        records = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    for fold in range(folds):
        write_fold(records, fold, folds, work / f"fold-{fold}")
    settings = {"rate": arguments.rate, "epochs": "1" if arguments.short else arguments.epochs}
    if arguments.short:
        print(json.dumps(fine_tune("long", 0, source, work / "fold-0", settings)))
        return 0 if compared["ok"] else 3
    lines = []
    if arguments.output.exists():
        lines = [json.loads(line) for line in arguments.output.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["row"] == "reviews"]
    done = {(line["way"], line["fold"]) for line in lines}
    ways = (*WAYS, "tf_idf") if arguments.peer_python else tuple(WAYS)
    for way, fold in [(way, fold) for fold in range(folds) for way in ways if (way, fold) not in done]:
        folder = work / f"fold-{fold}"
        if way == "tf_idf":
            lines.append(tf_idf(arguments.peer_python, fold, folder))
        else:
            lines.append(fine_tune(way, fold, source, folder, settings))
        text = "".join(json.dumps(line) + "\n" for line in (compared, *lines))
        write_whole(arguments.output, text)
    report(lines, folds)
    return 0 if compared["ok"] else 3


if __name__ == "__main__":
    sys.exit(main())
