"""Fine-tuning on SST-2 by transformers' Trainer as a process, the peer of whole_processes.py: tokenize, group by
length, train an epoch, evaluate, save.

    python studies/cpu/trainer_sst2.py MODEL TRAIN.tsv DEV.tsv OUTPUT [--bf16]
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)


def examples(path: Path, tokenizer: AutoTokenizer) -> list[dict[str, object]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    encoded = tokenizer([row["sentence"] for row in rows], truncation=True, max_length=128)
    return [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": int(row["label"])}
        for row, ids in zip(rows, encoded["input_ids"], strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "train", "dev", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("medium")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model, num_labels=2)
    settings = TrainingArguments(
        output_dir=str(arguments.output), per_device_train_batch_size=32, per_device_eval_batch_size=32,
        learning_rate=1e-4, num_train_epochs=1, bf16=arguments.bf16, use_cpu=True, report_to=[],
        train_sampling_strategy="group_by_length", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=settings, train_dataset=examples(arguments.train, tokenizer),
        eval_dataset=examples(arguments.dev, tokenizer), processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda found: {"accuracy": float(np.mean(found[0].argmax(-1) == found[1]))},
    )  # fmt: skip
    trained = trainer.train()
    scores = trainer.evaluate()
    trainer.save_model()
    print(json.dumps({"train_seconds": trained.metrics["train_runtime"], "accuracy": scores["eval_accuracy"]}))


if __name__ == "__main__":
    main()
