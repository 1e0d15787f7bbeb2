"""Pruned models: what they answer, what they compute, and how fast.

    python studies/pruning/prune.py quality --model MINILM --data glue/SST-2 --folder DIR [--train 20000 --scored 10000]
    python studies/pruning/prune.py network --model MINILM --folder DIR
    python studies/pruning/prune.py speed --model MINILM --folder DIR [--cpus 1]

quality: a model is fine-tuned on ``--train`` rows of SST-2. Importance comes from 2,000 of them. 60% and 30% of its
attention heads are REMOVED at once, without training, and ``--scored`` other rows of train.tsv are classified;
60% by importance are compared with ``--choices`` random ones. Then the model without 60% is trained for an epoch.
10 minutes of one core; the short form, less: ``--train 4000 --scored 1000``.

network: heads (half), units (half), layers (0 2 3 5) and vocabulary are pruned; outputs against the whole network
with masks, the saved model read again, and the exports npz and ONNX. One minute.

speed: time of half of the heads and units, which are half of the operations, against the whole network: 128 tokens,
batches of 32 and 1, this library and onnxruntime, batch by batch in turns, so that other work disturbs both alike;
medians. Two minutes.

A line of JSON for each. Exit code 3 if 60% by importance is not above the random ones by two standard errors; if
outputs differ by more than 1e-6 of the largest value, or the saved or exported model does; if the pruned model is
less than 1.6 times (batch 32) or 1.3 times (batch 1) as fast.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import traverse_util
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
from small_runs import REPOSITORY, command, report

from bert_jax.contrib.compression.examples import read_examples
from bert_jax.contrib.compression.importance import gradient_importance, magnitude_importance, random_importance
from bert_jax.contrib.compression.heads_and_units import Parts, cut, kept, masked, whole_masks
from bert_jax.contrib.compression.prune import encoder_flops
from bert_jax.contrib.compression.trim import trim_model
from bert_jax.contrib.experiments.latency_worker import NAMES as INPUTS
from bert_jax.contrib.experiments.latency_worker import with_jax, with_onnx
from bert_jax.hashing import permutation
from bert_jax.inference.loaded import LoadedModel, load, prepare
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.export import export_model
from bert_jax.contrib.surgery.network_changes import with_layers
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

REMOVED, ALSO = 0.6, 0.3
LAYERS = (0, 2, 3, 5)
LARGEST = 1e-6
FASTER = {32: 1.6, 1: 1.3}
LENGTH = 128
NAMES = ("negative", "positive")
FEW = 100  # rows of dev.tsv, which chooses nothing

# ------------------------------------------------------------------ quality


def write_rows(data: Path, folder: Path, train: int, scored: int) -> list[list[str]]:
    """Write train.tsv and examples.jsonl of ``train`` rows, and dev.tsv, which a run has to have; return ``scored``
    other rows [text, label]."""
    head, *lines = (data / "train.tsv").read_text().splitlines()
    order = permutation(len(lines), 0)
    rows = [lines[place].rsplit("\t", 1) for place in order[: train + scored]]
    for name, part in (("train", rows[:train]), ("dev", rows[train : train + FEW])):
        (folder / f"{name}.tsv").write_text("\n".join([head, *("\t".join(row) for row in part)]) + "\n")
    entries = [json.dumps({"text": text, "label": label}) for text, label in rows[:train]]
    (folder / "examples.jsonl").write_text("\n".join(entries) + "\n")
    return rows[train:]


def fine_tuned(model: Path, folder: Path, workdir: Path, rate: float) -> Path:
    """Return the workdir of one epoch of ``model`` on train.tsv; the run is made if it is missing."""
    if not (workdir / "metrics.json").exists():
        options = {
            "config": REPOSITORY / "configs/finetune/sst2.yaml", "init_from": model, "data.dir": folder,
            "data.dev": ("dev.tsv",), "data.test": (), "training.num_epochs": 1, "task.max_length": 64,
            "training.global_batch_size": 32, "optimizer.learning_rate": rate, "training.eval_interval": 1_000_000,
            "training.compilation_cache": "none",
        }  # fmt: skip
        report(f"{workdir.name}: {command('run_finetune.py', options, workdir)} s")
    return workdir


def accuracy(loaded: LoadedModel, rows: Sequence[Sequence[str]], params: Mapping[str, Any] | None = None) -> float:
    """Return the share of ``rows`` that the model, or its network with other canonical parameters, classifies
    correctly. Programs are compiled once."""
    if params is not None:
        tree = {name: jnp.asarray(values) for name, values in params.items()}
        loaded = dataclasses.replace(loaded, params=traverse_util.unflatten_dict(tree, sep="/"))
    found = loaded.predict([text.strip() for text, _ in rows])
    return statistics.mean(one["label"] == NAMES[int(label)] for one, (_, label) in zip(found, rows, strict=True))


def quality(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    folder = options.folder
    rows = write_rows(options.data, folder, options.train, options.scored)
    workdir = fine_tuned(options.model, folder, folder / "whole", options.rate)
    weights, loaded = read_weights(workdir), load(workdir)
    model = weights.spec.model
    gradients, _ = gradient_importance(loaded, read_examples([str(folder / "examples.jsonl")]), 2000, 0)
    magnitudes = magnitude_importance(model, weights.params)

    def score(heads: Sequence[np.ndarray], removed: float) -> float:
        masks = kept(heads, 1 - removed, even=False, option="--heads")
        params = masked(weights.params, Parts(masks, whole_masks(model).units), model.head_size)
        found = accuracy(loaded, rows, params)
        report(f"{removed:.0%} of the heads removed: {found:.4f}")
        return round(found, 5)

    random = [score(random_importance(model, seed).heads, REMOVED) for seed in range(options.choices)]
    error = statistics.stdev(random)
    line = {
        "part": "quality", "train": options.train, "scored": len(rows), "heads": sum(model.heads_by_layer),
        "whole": round(accuracy(loaded, rows), 5), "removed_60": score(gradients.heads, REMOVED),
        "removed_60_magnitude": score(magnitudes.heads, REMOVED), "random_60": random,
        "random_mean": round(statistics.mean(random), 5), "random_deviation": round(error, 5),
        "random_error": round(error / len(random) ** 0.5, 5), "removed_30": score(gradients.heads, ALSO),
    }  # fmt: skip
    small = folder / "removed_60"
    if not small.exists():
        heads = kept(gradients.heads, 1 - REMOVED, even=False, option="--heads")
        write_saved(small, cut(weights, Parts(heads, whole_masks(model).units)))
    again = fine_tuned(small, folder, folder / "removed_60_trained", options.rate)
    line["removed_60_trained"] = round(accuracy(load(again), rows), 5)
    return line, line["removed_60"] > line["random_mean"] + 2 * line["random_error"]


# ------------------------------------------------------------------ network


def halves(weights: ModelBundle) -> Parts:
    """Return masks of half of the heads and units, by the norm of their parameters."""
    found = magnitude_importance(weights.spec.model, weights.params)
    return Parts(*(kept(scores, 0.5, even=False, option="share") for scores in found))


def largest_difference(one: LoadedModel, other: LoadedModel) -> float:
    """Return the largest difference of the outputs, over the largest value (at least 1)."""
    rng = np.random.default_rng(0)
    mask = np.arange(64) < rng.integers(4, 65, (16, 1))
    arrays = {"input_ids": rng.integers(0, one.spec.model.vocab_size, mask.shape), "attention_mask": mask}
    worst = 0.0
    first, second = (each.forward(arrays) for each in (one, other))
    for name, values in first.items():
        a, b = (x[mask] if x.shape[:2] == mask.shape else x for x in (values, second[name]))
        worst = max(worst, float(np.abs(a - b).max()) / max(1.0, float(np.abs(a).max())))
    return worst


def network(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    folder, texts = options.folder, options.folder / "texts.txt"
    texts.write_text(
        "a film that is both slow and long .\nthe plot holds no surprise , but the cast shines .\n" * 8
    )
    if not (folder / "trimmed").exists():
        trim_model(options.model, folder / "trimmed", [str(texts)], ReadOptions(), report=report)
    weights = with_layers(read_weights(folder / "trimmed"), LAYERS)
    masks = halves(weights)
    whole = dataclasses.replace(weights, params=masked(weights.params, masks, weights.spec.model.head_size))
    smaller = cut(weights, masks)
    if not (folder / "pruned").exists():
        write_saved(folder / "pruned", smaller)
    again = read_weights(folder / "pruned").params
    is_equal = all(np.array_equal(again[name], values) for name, values in smaller.params.items())
    difference = largest_difference(prepare(whole), load(folder / "pruned"))
    lines: list[str] = []
    for name in ("npz", "onnx"):
        export_model(folder / "pruned", folder / name, name, force=True, report=lines.append)
    exports = [line for line in lines if "bitwise" in line or "difference from" in line]
    line = {
        "part": "network", "heads": smaller.spec.model.layer_heads, "units": smaller.spec.model.layer_units,
        "layers": len(LAYERS), "pieces": smaller.spec.model.vocab_size, "difference": difference,
        "saved_is_bitwise_equal": is_equal, "exports": exports,
    }  # fmt: skip
    return line, is_equal and difference <= LARGEST  # an export that differs ends with exit code 3 itself


# ------------------------------------------------------------------ speed


def speed(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cpus])  # before JAX starts its threads
    weights = read_weights(options.model)
    smaller = cut(weights, halves(weights))
    run: dict[tuple[str, str], Callable[[Mapping[str, np.ndarray]], Any]] = {}
    for name, bundle in (("whole", weights), ("pruned", smaller)):
        folder = options.folder / f"speed_{name}"
        if not folder.exists():
            write_saved(folder, bundle)
        export_model(folder, folder / "onnx", "onnx", force=True, verify=False, report=lambda line: None)
        run["jax", name] = with_jax(folder, "float32")
        run["onnx", name] = with_onnx(folder / "onnx", options.cpus)
    share = encoder_flops(prepare(smaller), LENGTH) / encoder_flops(prepare(weights), LENGTH)
    line: dict[str, Any] = {"part": "speed", "operations": round(share, 3), "cpus": options.cpus}
    is_good = True
    for form, (batch, bar) in itertools.product(("jax", "onnx"), FASTER.items()):
        ids = np.random.default_rng(0).integers(0, weights.spec.model.vocab_size, (batch, LENGTH))
        arrays = dict(zip(INPUTS, (ids, np.ones_like(ids), np.zeros_like(ids)), strict=True))
        seconds: dict[str, list[float]] = {"whole": [], "pruned": []}
        for turn in range(3 + options.repeats * (1 if batch > 1 else 4)):
            for name, times in seconds.items():
                began = time.perf_counter()
                run[form, name](arrays)
                times += [time.perf_counter() - began] if turn >= 3 else []  # the first compile, and fill caches
        medians = {name: round(1e3 * statistics.median(times), 2) for name, times in seconds.items()}
        ratio = round(medians["whole"] / medians["pruned"], 2)
        line[f"{form}, batch {batch}"] = {"times_as_fast": ratio, "median_ms": medians}
        is_good &= ratio >= bar
    return line, is_good


PARTS = {"quality": quality, "network": network, "speed": speed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", type=Path, required=True, help="an encoder, such as all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path, help="folder of SST-2, for quality")
    parser.add_argument("--folder", type=Path, required=True, help="runs and models; finished ones are kept")
    parser.add_argument("--train", type=int, default=20_000, help="rows of fine-tuning")
    parser.add_argument("--scored", type=int, default=10_000, help="other rows, which are classified")
    parser.add_argument("--choices", type=int, default=10, help="random choices")
    parser.add_argument("--rate", type=float, default=5e-5, help="learning rate")
    parser.add_argument("--repeats", type=int, default=10, help="batches of 32 of each model, for speed")
    parser.add_argument("--cpus", type=int, default=1, help="processors, for speed")
    parser.add_argument("--output", type=Path, help="append the line there")
    options = parser.parse_args()
    if options.part == "quality" and options.data is None:
        parser.error("--data: quality requires the folder of SST-2")
    keep_to_cpu_without_accelerator()
    options.folder.mkdir(parents=True, exist_ok=True)
    line, is_good = PARTS[options.part](options)
    text = json.dumps(line)
    print(text, flush=True)
    if options.output:
        with contextlib.closing(options.output.open("a")) as file:
            file.write(f"{text}\n")
    return 0 if is_good else 3


if __name__ == "__main__":
    sys.exit(main())
