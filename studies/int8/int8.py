"""int8 ONNX programs: quality on STS-B and SST-2, size, and speed against float32 in onnxruntime.

    python studies/int8/int8.py --model MINILM --glue DIR [--stsb FLOAT ROUNDED]... [--sst2 FLOAT ROUNDED]...
        [--threads 1] [--output JSONL]

MINILM is a model of sentence vectors, DIR has the folders STS-B and SST-2 of GLUE. Ranges are calibrated on the
first 1,000 texts of train.tsv, and scores are those of dev.tsv, with a scale for each token and with calibrated ranges; of MINILM
without training on STS-B, also with onnxruntime's own quantizers on the float32 file (dynamic with QUInt8 weights;
static, per channel, min-max, of the same texts), which have no bar. ``--stsb`` and ``--sst2`` name two fine-tuned
models, the first trained in float32, the second with execution.quantization int8; each may be given several times,
once for a seed:

    python run_finetune.py --config configs/finetune/sst2.yaml --init_from MINILM --data.dir DIR/SST-2
        --training.num_epochs 1 --optimizer.learning_rate 5e-5 [--execution.quantization int8] --workdir WORKDIR
    (STS-B: configs/finetune/sbert_sts.yaml, rate 2e-5)

Speed: the median of the times of a batch, float32 and int8 in turns, random ids, ``--threads`` threads.

A JSON line for each figure. Exit code 3 if the best route of MINILM loses more than 0.001 or the calibrated one
more than 0.003; if the calibrated programs of fine-tuned models lose more than 0.003 (SST-2: 0.005), or those of
models trained with rounding are more than 0.002 (SST-2: 0.005) below the models trained in float32, each the mean
of the pairs; if the file is larger than 0.27 of the float32 one; or if, on a processor with VNNI, a batch of 8
texts of 32 tokens is not 1.5 times as fast.
"""

import argparse
import csv
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from bert_jax.contrib.compression.onnx.calibration import TEXTS, calibrated
from bert_jax.contrib.compression.onnx.quality import program_scores
from bert_jax.inference.onnx_network import padded
from bert_jax.inference.loaded import prepare
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.export_table import fit
from bert_jax.interop.programs.onnx_graph import write_onnx
from bert_jax.interop.readers import read_weights
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

BEST, STATIC, TRAINED, ACCURACY, SIZE, SPEED = 0.001, 0.003, 0.002, 0.005, 0.27, 1.5
SHAPES = ((1, 16), (1, 32), (8, 32), (8, 128))
JUDGED = (8, 32)


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))


def records(file: Path, target: Path) -> str:
    """Write the rows of a file of STS-B or SST-2 as JSON lines."""
    names = {"sentence": "text", "sentence1": "text", "sentence2": "text_pair", "label": "label", "score": "label"}
    lines = ({names[key]: value for key, value in row.items() if key in names} for row in rows_of(file))
    target.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return str(target)


def texts(file: Path, target: Path) -> str:
    column = "sentence" if "SST-2" in file.parts else "sentence1"
    target.write_text("".join(f"{row[column]}\n" for row in rows_of(file)[:TEXTS]), encoding="utf-8")
    return str(target)


def exported(folder: Path, weights: ModelBundle, dtype: str) -> Path:
    folder.mkdir()
    write_onnx(folder, weights, dtype=dtype)
    return folder


def peers(
    folder: Path, float_program: Path, weights: ModelBundle, sentences: list[str]
) -> Iterator[tuple[str, Path]]:
    """Yield (name, folder) of the results of onnxruntime's own quantizers."""
    from onnxruntime import quantization

    dynamic, static = folder / "ort_dynamic", folder / "ort_static"
    for target in (dynamic, static):
        target.mkdir()
    source = float_program / "model.onnx"
    quantization.quantize_dynamic(source, dynamic / "model.onnx", weight_type=quantization.QuantType.QUInt8)
    yield "onnxruntime, dynamic QUInt8", dynamic
    engine = prepare(weights)
    sequences = engine.model_inputs(sentences)
    batches = iter([padded(sequences[i : i + 16], engine.need_tokenizer().pad_id) for i in range(0, 1000, 16)])

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> Any:
            return next(batches, None)

    quantization.quantize_static(
        source, static / "model.onnx", Reader(), per_channel=True, op_types_to_quantize=["MatMul", "Gather"],
        activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )  # fmt: skip
    yield "onnxruntime, static", static


def quality(task: str, weights: ModelBundle, dev: str, calibration: str, folder: Path) -> list[dict[str, Any]]:
    """Return lines of the scores with a scale for each token and with calibrated ranges."""
    lines = []
    for ranges in ("tokens", "calibrated"):
        chosen = calibrated(weights, [calibration], print) if ranges == "calibrated" else weights
        scores = program_scores(exported(folder / f"{task}_{ranges}", chosen, "int8"), weights, dev)
        line = {"row": task, "ranges": ranges, "metric": scores.name, "float32": round(scores.model, 4)}
        lines.append(line | {"int8": round(scores.program, 4), "loss": round(scores.loss, 4)})
        print(json.dumps(lines[-1]), flush=True)
    return lines


def speed(float_program: Path, program: Path, vocab_size: int, threads: int) -> list[dict[str, Any]]:
    """Return a line for each shape: medians, the ratio, and whether the processor has VNNI."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    sessions = [
        onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
        for folder in (float_program, program)
    ]
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    has_vnni = bool({"avx512_vnni", "avx_vnni"} & set(flags))
    lines = []
    for shape in SHAPES:
        ids = np.random.default_rng(0).integers(0, vocab_size, shape)
        batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(max(10, 4000 // ids.size)):
            for session, seconds in zip(sessions, times, strict=True):
                began = time.perf_counter()
                session.run(None, batch)
                seconds.append(time.perf_counter() - began)
        before, after = (1e3 * statistics.median(seconds[2:]) for seconds in times)
        line = {"row": "speed", "batch": shape[0], "length": shape[1], "threads": threads, "vnni": has_vnni}
        lines.append(
            line | {"float32_ms": round(before, 2), "int8_ms": round(after, 2), "times": round(before / after, 2)}
        )
        print(json.dumps(lines[-1]), flush=True)
    return lines


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return all lines, and what is below its bar."""
    sts = options.glue / "STS-B"
    weights, _ = fit(read_weights(options.model, ReadOptions()), "onnx")
    float_program = exported(folder / "float32", weights, "float32")
    dev, calibration = records(sts / "dev.tsv", folder / "sts.jsonl"), texts(sts / "train.tsv", folder / "sts.txt")
    lines = quality("STS-B", weights, dev, calibration, folder)
    tokens, static = (line["loss"] for line in lines)
    program = folder / "STS-B_calibrated"
    ratio = (program / "model.onnx").stat().st_size / (float_program / "model.onnx").stat().st_size
    lines.append({"row": "size", "ratio": round(ratio, 4)})
    lines += speed(float_program, program, weights.spec.model.vocab_size, options.threads)
    missed = ["best route"] if min(tokens, static) > BEST else []
    missed += ["calibrated"] if static > STATIC else []
    missed += ["size"] if ratio > SIZE else []
    missed += [
        f"speed {line['times']}"
        for line in lines
        if line["row"] == "speed" and (line["batch"], line["length"]) == JUDGED
        if line["vnni"] and line["times"] < SPEED
    ]
    for name, peer in peers(folder, float_program, weights, Path(calibration).read_text().splitlines()):
        scores = program_scores(peer, weights, dev)
        line = {"row": "STS-B", "ranges": name, "int8": round(scores.program, 4), "loss": round(scores.loss, 4)}
        lines.append(line)
        print(json.dumps(line), flush=True)
    for task, pairs in (("STS-B", options.stsb), ("SST-2", options.sst2)):
        if pairs:
            measured = tuned(task, pairs, options.glue / task, folder)
            lines += measured
            missed += below(task, measured)
    return lines, missed


def tuned(task: str, pairs: list[list[Path]], data: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the lines of pairs of fine-tuned models; ``loss_to_first`` is measured from the first of the pair in
    float32."""
    lines = []
    for number, pair in enumerate(pairs):
        reference = math.nan
        for trained, model in zip(("float32", "rounded"), pair, strict=True):
            one, _ = fit(read_weights(model, ReadOptions()), "onnx")
            own = folder / f"{task}_{number}_{trained}"
            own.mkdir()
            dev = records(data / "dev.tsv", own / "dev.jsonl")
            measured = quality(task, one, dev, texts(data / "train.tsv", own / "train.txt"), own)
            reference = measured[0]["float32"] if trained == "float32" else reference
            for line in measured:
                loss = round(reference - line["int8"], 4)
                lines.append(line | {"model": model.name, "trained": trained, "loss_to_first": loss})
    return lines


def below(task: str, lines: list[dict[str, Any]]) -> list[str]:
    """Return which means over the pairs of fine-tuned models are below their bar."""
    bar, trained_bar = (STATIC, TRAINED) if task == "STS-B" else (ACCURACY, ACCURACY)
    missed = []
    for trained, key, most in (("float32", "loss", bar), ("rounded", "loss", bar),
                               ("rounded", "loss_to_first", trained_bar)):  # fmt: skip
        mean = statistics.mean(
            line[key] for line in lines if line["ranges"] == "calibrated" and line["trained"] == trained
        )
        missed += [f"{task}, trained {trained}, {key} {mean:.4f}"] if mean > most else []
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model of sentence vectors")
    parser.add_argument("--glue", type=Path, required=True, help="folder with STS-B and SST-2")
    pair: dict[str, Any] = {"type": Path, "nargs": 2, "action": "append", "metavar": ("FLOAT", "ROUNDED")}
    parser.add_argument("--stsb", **pair, help="two models fine-tuned on STS-B; may be repeated")
    parser.add_argument("--sst2", **pair, help="two models fine-tuned on SST-2; may be repeated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="file of JSON lines to add to")
    options = parser.parse_args()
    keep_to_cpu_without_accelerator()
    with tempfile.TemporaryDirectory() as folder:
        lines, missed = measure(options, Path(folder))
    if options.output:
        with options.output.open("a") as output:
            output.writelines(json.dumps(line) + "\n" for line in lines)
    for name in missed:
        print(f"below its bar: {name}")
    return 3 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
