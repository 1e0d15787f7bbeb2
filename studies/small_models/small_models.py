"""From a large model to a small one on SST-2: size, latency and accuracy after each step of docs/small-models.md.

    python studies/small_models/small_models.py --model MINILM --data DIR --folder DIR [--cpus 1] [--output JSONL]

``tuned`` is --model (all-MiniLM-L6-v2, 6 layers) tuned on 6,000 labels of SST-2; ``three`` the network of its
layers 1, 3 and 5, taught by it on the same texts; ``halved`` has half of the heads and units of ``three`` and is
taught again; ``trimmed`` has the vocabulary of those texts and of 20,000 others. Each is exported for onnxruntime
in float32, and in int8 with ranges of the first 1,000 training texts. Accuracy is that on dev and 10,000 other
training texts (95% interval of a share of so many texts: at most ±0.009), of one run; the time is the median of one
text of 32 tokens in onnxruntime, in rounds of all programs. --data holds glue/SST-2. The table ends with the
commands of each model, which are those that were run.

About 10 minutes. The command may be stopped and started again: finished steps in DIR are kept. Exit code 3 unless
the int8 program of ``trimmed`` is 8 times smaller than that of ``tuned`` in float32, and 5 times as quick.
"""

import argparse
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "early_exit"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
from early_exit import TASK
from small_runs import REPOSITORY, cells, report
from small_tasks import texts

from bert_jax.contrib.compression.onnx.quality import program_scores
from bert_jax.contrib.experiments.latency_worker import NAMES, with_onnx
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.interop.export_table import fit
from bert_jax.interop.readers import read_weights
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

MODELS, DTYPES = ("tuned", "three", "halved", "trimmed"), ("float32", "int8")
LENGTH = 32
ROUNDS, WARM, REPEATS = 4, 20, 100  # runs of a program one after the other, so that its weights are in the caches
SMALLER, FASTER = 8, 5
# The rates are the best of 3e-5, 1e-4 and 3e-4 on rates.tsv with another seed, for heads that read [CLS], as here.
_TUNE = (
    "run_finetune.py --config configs/finetune/sst2.yaml --data.dir TEXTS --data.train train.tsv"
    " --data.dev rates.tsv --data.test --training.num_epochs 3 --training.eval_interval 1000000"
)
STEPS = {
    "tuned": f"{_TUNE} --init_from MODEL --optimizer.learning_rate 1e-4 --workdir DIR/tuned",
    "three": f"{_TUNE} --init_from MODEL --init_layers 1 3 5 --teacher DIR/tuned --optimizer.learning_rate 3e-4"
    " --workdir DIR/three",
    "pruned": "bert-jax prune --from DIR/three --to DIR/pruned --heads 0.5 --units 0.5"
    " --examples TEXTS/train.jsonl",
    "halved": f"{_TUNE} --init_from DIR/pruned --teacher DIR/tuned --optimizer.learning_rate 3e-4"
    " --workdir DIR/halved",
    "trimmed": "bert-jax trim --from DIR/halved --to DIR/trimmed --corpus TEXTS/train.jsonl TEXTS/unlabelled.jsonl",
}
EXPORTS = {
    "float32": "bert-jax export --from DIR/{0} --to DIR/{0}-float32 --format onnx",
    "int8": "bert-jax export --from DIR/{0} --to DIR/{0}-int8 --format onnx --dtype int8"
    " --calibration TEXTS/train.jsonl",
}


def commands() -> dict[str, str]:
    """Return the command of each step by the name of the folder that it makes."""
    exports = {f"{name}-{dtype}": EXPORTS[dtype].format(name) for name in MODELS for dtype in DTYPES}
    return STEPS | exports


def write_texts(data: Path, folder: Path) -> Path:
    """Return the folder of the texts: those of the task, and what the other commands read."""
    files = texts(TASK, data, folder / "texts", 0)
    for part in ("train", "unlabelled", "results"):
        rows = [line.rsplit("\t", 1) for line in (files / f"{part}.tsv").read_text().splitlines()[1:]]
        lines = (json.dumps({"text": text, "label": label}) for text, label in rows)
        (files / f"{part}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return files


def run(name: str, line: str, places: dict[str, Path], folder: Path) -> None:
    """Run the command ``line`` unless it is done; a fine-tuning that was interrupted continues."""
    done = folder / "done" / name
    if done.exists():
        return
    program, *words = (
        re.sub("MODEL|TEXTS|DIR", lambda found: str(places[found[0]]), word) for word in shlex.split(line)
    )
    is_run = program == "run_finetune.py"
    if not is_run:
        shutil.rmtree(folder / name, ignore_errors=True)
    start = [str(REPOSITORY / program)] if is_run else ["-m", "bert_jax.commands.main"]
    report(f"run {name}")
    done.parent.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    with log.open("w") as file:
        code = subprocess.run(
            [sys.executable, *start, *words], stdout=file, stderr=subprocess.STDOUT, cwd=REPOSITORY
        ).returncode
    if code:
        raise RuntimeError(f"exit code {code}: {line}\n{log.read_text()[-2000:]}")
    done.touch()


def times(folders: dict[str, Path], vocab_size: int, cpus: int) -> dict[str, float]:
    """Return the median milliseconds of one text in each exported folder, in rounds of all programs."""
    programs = {name: with_onnx(folder, cpus) for name, folder in folders.items()}
    ids = np.random.default_rng(0).integers(0, vocab_size, (1, LENGTH))
    arrays = dict(zip(NAMES, (ids, np.ones_like(ids), np.zeros_like(ids)), strict=True))
    found: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS):
        for name, call in programs.items():
            for turn in range(WARM + REPEATS):
                began = time.perf_counter()
                call(arrays)
                found[name] += [1e3 * (time.perf_counter() - began)] if turn >= WARM else []
    return {name: round(statistics.median(each), 2) for name, each in found.items()}


def measure(folder: Path, files: Path, cpus: int) -> list[dict[str, Any]]:
    """Return a line for each program."""
    lines, vocabularies = [], []
    for name in MODELS:
        weights, _ = fit(read_weights(folder / name, ReadOptions()), "onnx")
        model = weights.spec.model
        scores = program_scores(folder / f"{name}-int8", weights, str(files / "results.jsonl"))
        vocabularies.append(model.vocab_size)
        for dtype, score in zip(DTYPES, (scores.model, scores.program), strict=True):
            program = f"{name}-{dtype}"
            lines.append(
                {
                    "program": program, "layers": model.num_layers, "vocabulary": model.vocab_size,
                    "parameters": sum(int(np.size(values)) for values in weights.params.values()),
                    "bytes": (folder / program / "model.onnx").stat().st_size, "accuracy": round(score, 5),
                    "texts": scores.count,
                }
            )  # fmt: skip
            report(json.dumps(lines[-1]))
    medians = times({line["program"]: folder / line["program"] for line in lines}, min(vocabularies), cpus)
    return [line | {"ms": medians[line["program"]], "cpus": cpus} for line in lines]


def table(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [cells(["program", "parameters, millions", "MB", "ms", "accuracy"]), cells(["---"] * 5)]
    for line in lines:
        size, parameters = f"{line['bytes'] / 1e6:.1f}", f"{line['parameters'] / 1e6:.1f}"
        row = [line["program"].replace("-", ", "), parameters, size, f"{line['ms']:.2f}"]
        rows.append(cells([*row, f"{line['accuracy']:.3f}"]))
    return rows


def is_good(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last program is as much smaller and quicker than the first as it has to be."""
    whole, smallest = lines[0], lines[-1]
    return SMALLER * smallest["bytes"] <= whole["bytes"] and FASTER * smallest["ms"] <= whole["ms"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the model that is tuned")
    parser.add_argument("--data", type=Path, required=True, help="folder of the task files")
    parser.add_argument("--folder", type=Path, required=True, help="texts, models and programs")
    parser.add_argument("--cpus", type=int, default=1, help="processors, for the time of a text")
    parser.add_argument("--output", type=Path, help="write the lines there")
    options = parser.parse_args()
    keep_to_cpu_without_accelerator()
    folder = options.folder.resolve()
    files = write_texts(options.data, folder)
    places = {"MODEL": options.model.resolve(), "TEXTS": files, "DIR": folder}
    for name, line in commands().items():
        run(name, line, places, folder)
    lines = measure(folder, files, options.cpus)
    print(*table(lines), sep="\n")
    print(*("", *commands().values()), sep="\n")
    if options.output:
        options.output.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return 0 if is_good(lines) else 3


if __name__ == "__main__":
    sys.exit(main())
