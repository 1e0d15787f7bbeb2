"""Classification as a third pretraining objective, against pretraining without it and fine-tuning afterwards.

    python studies/document_classes/document_classes.py --data DIR --work FOLDER [--output LINES] [--seeds 0 1 2]
        [--class_weight W] [--short]

``DIR`` holds corpus/zh_wiki, zh_wiki_articles and zh_help (text) and zh_reviews (train.tsv and dev.tsv with the
columns label and text). The text and the labeled reviews of train.tsv, each one document, are built into one
folder of shards with masks and sentence pairs; 4% of the documents are held out. For each seed, one run trains
``masked_lm`` and is fine-tuned on all reviews of train.tsv; another trains ``masked_lm_classes`` on the same
batches from the same start. Compared are the masked-token loss on the held-out documents, and the accuracy on the
reviews of dev.tsv: that of the fine-tuned classifier, and that of the class head of the second run as
``bert-jax predict`` reads it. The interval of the accuracies' difference is that of a bootstrap over the reviews,
seeds averaged.

Finished runs in FOLDER are not repeated, and a cut run resumes. ``--short`` trains a tenth of the steps, without a
bar. Exit code 3 if the mean masked-token loss is worse by more than 0.02 nats, or the mean accuracy lower than that
of fine-tuning by more than 1 point.
"""

import argparse
import csv
import json
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
LOSS_BAR, ACCURACY_BAR = 0.02, 0.01
SMALL = shlex.split(
    "--model.vocab_size 8192 --model.hidden_size 192 --model.num_layers 3 --model.num_attention_heads 3 "
    "--model.intermediate_size 768 --model.max_position_embeddings 128 --data.seq_length 128 "
    "--data.max_predictions 20 --data.packing best_fit --data.dupe_factor 5 --data.num_shards 8 "
    "--data.eval_fraction 0.04 --data.masking static --training.global_batch_size 64 --training.log_interval 50 "
    "--optimizer.learning_rate 1e-3 --optimizer.warmup_steps 150 --data.label_field label "
    "--data.classes negative positive"
)
NAMES = {"0": "negative", "1": "positive"}


def run(arguments: list[str]) -> float:
    """Run a command of this checkout; return its seconds."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)
    return time.perf_counter() - start


def read_reviews(path: Path) -> list[dict[str, str]]:
    """Return the records of a table with the columns label (0 or 1) and text."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [{"text": row["text"], "label": NAMES[row["label"]]} for row in rows]


def write_lines(path: Path, records: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def folder_of(work: Path, seed: int, weight: float) -> Path:
    """Return the workdir of the pretraining run whose class loss has ``weight`` (0: without classes)."""
    name = "masked_lm" if not weight else "masked_lm_classes"
    return work / f"{name}{f'-weight{weight:g}' if weight not in (0, 1) else ''}-{seed}"


def pretrain(weight: float, seed: int, steps: int, data: Path, work: Path) -> dict[str, float]:
    """Train a run unless it is complete; return the values of its last evaluation on held-out documents."""
    workdir = folder_of(work, seed, weight)
    objective = ["masked_lm_classes", "--objective.class_weight", str(weight)] if weight else ["masked_lm"]
    corpus = [str(data / "corpus" / name) for name in ("zh_wiki", "zh_wiki_articles", "zh_help")]
    run(
        ["run_pretrain.py", *SMALL, "--data.corpus", *corpus, str(work / "train.jsonl"), "--data.shards",
         str(work / "shards"), "--objective.name", *objective, "--training.seed", str(seed),
         "--workdir", str(workdir), "--training.num_steps", str(steps), "--training.eval_interval", str(steps),
         "--training.checkpoint_interval", str(steps // 4)]
    )  # fmt: skip
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line.get("split") == "eval"][-1]


def tuned_answers(seed: int, data: Path, work: Path, rate: str) -> list[str]:
    """Fine-tune the run without classes on the labeled reviews; return its classes of the reviews of dev.tsv."""
    workdir = work / f"tuned-{seed}"
    run(
        ["run_finetune.py", "--config", "configs/finetune/zh_reviews.yaml", "--init_from",
         str(folder_of(work, seed, 0)), "--data.dir", str(data / "zh_reviews"), "--workdir", str(workdir),
         "--training.seed", str(seed), "--optimizer.learning_rate", rate]
    )  # fmt: skip
    lines = (workdir / "predictions_dev.jsonl").read_text(encoding="utf-8").splitlines()
    return [NAMES[json.loads(line)["label"]] for line in lines]


def head_answers(weight: float, seed: int, work: Path) -> list[str]:
    """Return the classes that the class head of the run with classes gives to the reviews of dev.tsv."""
    output = work / f"head-{weight:g}-{seed}.jsonl"
    run(
        ["-m", "bert_jax.commands.main", "predict", "--model", str(folder_of(work, seed, weight)), "--input",
         str(work / "dev.jsonl"), "--output", str(output)]
    )  # fmt: skip
    lines = output.read_text(encoding="utf-8").splitlines()
    return [str(json.loads(line)["label"]) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--work", required=True, type=Path, help="folder for shards and runs")
    parser.add_argument("--output", type=Path, help="file to which the figures are appended as JSON lines")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--class_weight", type=float, default=1.0, help="weight of the class loss")
    parser.add_argument("--rate", default="3e-4", help="peak learning rate of fine-tuning")
    parser.add_argument("--short", action="store_true", help="a tenth of the steps")
    arguments = parser.parse_args()
    data, work = arguments.data.resolve(), arguments.work.resolve()
    steps = arguments.steps // 10 if arguments.short else arguments.steps
    weight = arguments.class_weight
    work.mkdir(parents=True, exist_ok=True)
    dev = read_reviews(data / "zh_reviews" / "dev.tsv")
    write_lines(work / "train.jsonl", read_reviews(data / "zh_reviews" / "train.tsv"))
    write_lines(work / "dev.jsonl", [{"text": record["text"]} for record in dev])
    labels = np.array([record["label"] for record in dev])
    losses, differences = [], []  # with classes minus without: nats; and [reviews] of each seed
    for seed in arguments.seeds:
        without, beside = (pretrain(w, seed, steps, data, work)["mlm_loss"] for w in (0.0, weight))
        tuned = np.array(tuned_answers(seed, data, work, arguments.rate)) == labels
        head = np.array(head_answers(weight, seed, work)) == labels
        line = {
            "seed": seed, "steps": steps, "class_weight": weight,
            "mlm_loss": {"masked_lm": round(without, 4), "masked_lm_classes": round(beside, 4)},
            "accuracy": {"fine-tuned": round(float(tuned.mean()), 4), "class head": round(float(head.mean()), 4)},
        }  # fmt: skip
        losses.append(beside - without)
        differences.append(head.astype(float) - tuned)
        print(json.dumps(line))
        if arguments.output:
            with arguments.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    of_reviews = np.mean(differences, axis=0)
    loss, difference = statistics.mean(losses), float(of_reviews.mean())
    draws = np.random.default_rng(0).integers(0, len(of_reviews), (2000, len(of_reviews)))
    low, high = np.quantile(of_reviews[draws].mean(axis=1), (0.025, 0.975))
    print(f"masked-token loss, with classes minus without: {loss:+.4f} nats")
    print(f"accuracy, class head minus fine-tuning: {difference:+.4f} (95% interval {low:+.4f} to {high:+.4f})")
    if not arguments.short and (loss > LOSS_BAR or difference < -ACCURACY_BAR):
        raise SystemExit(3)


if __name__ == "__main__":
    main()
