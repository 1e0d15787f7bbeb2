"""Fine-tuning by transformers' Trainer, on the inputs that finetune_quality.py wrote.

    python studies/finetuning/finetune_torch.py FEATURES --model FOLDER --seed 0 --out RESULT [--padding group_by_length]

For the peers' environment (benchmarks/requirements.lock): neither JAX nor bert_jax is needed. FEATURES holds

* ``settings.json``: the task's kind, number of labels, hyper-parameters of the run;
* ``train.npz`` and one file for each split to predict: ``lengths`` int[N], and ``input_ids`` and ``token_type_ids``
  of all examples one after the other, int[T]. Of train also ``labels`` (int[N], float[N]; of tagging int[T], -100
  where no word begins), or ``start_positions`` and ``end_positions`` int[N];
* ``order_SEED.npy``: int[epochs, N], the order of the examples.

RESULT gets ``result.json`` (seconds, tokens, losses of the first steps) and ``logits_SPLIT.npz``. Everything else
has the defaults of Trainer and of the model: AdamW without decay of LayerNorm and biases, linear schedule, the
model's dropout.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset, Sampler
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

MODELS = {
    "classification": AutoModelForSequenceClassification,
    "regression": AutoModelForSequenceClassification,
    "tagging": AutoModelForTokenClassification,
    "qa": AutoModelForQuestionAnswering,
}
PROBLEMS = {"classification": "single_label_classification", "regression": "regression"}
UNLABELLED = -100
PREDICT_BATCH = 32
Inputs = dict[str, torch.Tensor]


class Examples(Dataset):
    """The unpadded examples of a split; ``asked``: the numbers of the examples in the order of the requests."""

    def __init__(self, file: Path) -> None:
        with np.load(file) as stored:
            arrays = {name: torch.from_numpy(stored[name]) for name in stored.files}
        self.lengths = arrays.pop("lengths")
        total, lengths = int(self.lengths.sum()), self.lengths.tolist()
        # An array with a value for each token is cut into examples.
        self._columns = {
            name: values.split(lengths) if len(values) == total else values for name, values in arrays.items()
        }
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Inputs:
        self.asked.append(number)
        return {name: values[number] for name, values in self._columns.items()}


class Padder:
    """Collates examples to a batch, padded to its longest one or to ``length``, and counts tokens."""

    def __init__(self, pad_id: int, length: int = 0) -> None:
        self._pad_id, self._length = pad_id, length
        self.tokens = self.places = 0

    def __call__(self, examples: list[Inputs]) -> Inputs:
        lengths = torch.tensor([len(example["input_ids"]) for example in examples])
        length = self._length or int(lengths.max())
        self.tokens += int(lengths.sum())
        self.places += len(examples) * length
        fill = {"input_ids": self._pad_id, "labels": UNLABELLED}
        batch = {"attention_mask": (torch.arange(length) < lengths[:, None]).long()}
        for name, first in examples[0].items():
            if first.ndim:
                rows = torch.full((len(examples), length), fill.get(name, 0))
                for row, example in zip(rows, examples, strict=True):
                    row[: len(example[name])] = example[name]
                batch[name] = rows
            else:
                batch[name] = torch.stack([example[name] for example in examples])
        return batch


class GivenOrder(Sampler):
    """Sampler that yields the numbers of one row of ``order`` per epoch."""

    def __init__(self, order: np.ndarray) -> None:
        self._order, self._epoch = order, -1

    def __len__(self) -> int:
        return self._order.shape[1]

    def __iter__(self) -> Iterator[int]:
        self._epoch += 1
        return iter(self._order[self._epoch].tolist())


class Peer(Trainer):
    """Trainer with the given order (unless it groups by length), which keeps the losses of the first steps."""

    def __init__(self, order: np.ndarray, keep: int, mask_padding: bool, **inputs: Any) -> None:
        super().__init__(**inputs)
        self._order, self._keep, self._mask_padding = order, keep, mask_padding
        self.losses: list[float] = []

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler:
        return super()._get_train_sampler(train_dataset) if self.args.group_by_length else GivenOrder(self._order)

    def training_step(self, *inputs: Any, **named: Any) -> torch.Tensor:
        loss = super().training_step(*inputs, **named)
        if len(self.losses) < self._keep:
            self.losses.append(float(loss))
        return loss

    def compute_loss(self, model: Any, inputs: Inputs, *rest: Any, **named: Any) -> Any:
        if not self._mask_padding:
            return super().compute_loss(model, inputs, *rest, **named)
        targets = [inputs.pop(f"{side}_positions") for side in ("start", "end")]
        found, padding = model(**inputs), inputs["attention_mask"] == 0
        losses = [
            torch.nn.functional.cross_entropy(logits.masked_fill(padding, -torch.inf), target)
            for logits, target in zip((found.start_logits, found.end_logits), targets, strict=True)
        ]
        return sum(losses) / 2


def arguments_of(settings: dict, options: argparse.Namespace) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(options.out / "trainer"), seed=options.seed, max_steps=settings["num_steps"],
        per_device_train_batch_size=settings["batch_size"], group_by_length=options.padding == "group_by_length",
        learning_rate=settings["learning_rate"], lr_scheduler_type="linear", warmup_steps=settings["warmup_steps"],
        weight_decay=settings["weight_decay"], adam_beta1=settings["beta1"], adam_beta2=settings["beta2"],
        adam_epsilon=settings["epsilon"], max_grad_norm=settings["clip_norm"], remove_unused_columns=False,
        save_strategy="no", logging_strategy="no", eval_strategy="no", report_to="none", disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip


@torch.no_grad()
def predict(model: Any, examples: Examples, padder: Padder, kind: str) -> dict[str, np.ndarray]:
    """Return the logits of every example, in order; those of tokens are concatenated without padding."""
    model.eval()
    order = torch.argsort(examples.lengths, descending=True, stable=True).tolist()
    found: dict[int, dict[str, np.ndarray]] = {}
    for begin in range(0, len(order), PREDICT_BATCH):
        numbers = order[begin : begin + PREDICT_BATCH]
        batch = padder([examples[number] for number in numbers])
        output = model(**{name: values.to(model.device) for name, values in batch.items()})
        arrays = {name: values.float().cpu().numpy() for name, values in output.items() if "logits" in name}
        for row, number in enumerate(numbers):
            of_tokens = slice(int(examples.lengths[number])) if kind in ("tagging", "qa") else ...
            found[number] = {name: values[row][of_tokens] for name, values in arrays.items()}
    join = np.concatenate if kind in ("tagging", "qa") else np.stack
    return {name: join([found[i][name] for i in range(len(examples))]) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", type=Path, help="folder of finetune_quality.py")
    parser.add_argument("--model", required=True, help="Hugging Face folder to start from")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--padding", choices=("dynamic", "group_by_length", "fixed"), default="dynamic",
        help="pad to the longest example of the batch; the same with batches of similar lengths; to max_length",
    )  # fmt: skip
    parser.add_argument("--losses", type=int, default=0, help="keep the losses of this many steps")
    parser.add_argument(
        "--mask_padding", action="store_true",
        help="qa: exclude padding from the softmax of the loss, unlike transformers",
    )  # fmt: skip
    options = parser.parse_args()
    settings = json.loads((options.features / "settings.json").read_text())
    kind, fixed = settings["kind"], settings["max_length"] if options.padding == "fixed" else 0
    if options.mask_padding and kind != "qa":
        parser.error("--mask_padding: for qa; other losses see no padding")

    began = time.perf_counter()
    set_seed(options.seed)
    labels = {} if kind == "qa" else {"num_labels": settings["num_labels"]}
    problem = {"problem_type": PROBLEMS[kind]} if kind in PROBLEMS else {}
    model = MODELS[kind].from_pretrained(options.model, **labels, **problem)
    train, padder = Examples(options.features / "train.npz"), Padder(settings["pad_id"], fixed)
    order = np.load(options.features / f"order_{options.seed}.npy")
    trainer = Peer(
        order, options.losses, options.mask_padding,
        model=model, args=arguments_of(settings, options), train_dataset=train, data_collator=padder,
    )  # fmt: skip
    loaded = time.perf_counter()
    trainer.train()
    trained = time.perf_counter()
    if options.padding != "group_by_length":
        seen = order.flatten()[: len(train.asked)].tolist()
        assert train.asked == seen, "Trainer took the examples in another order"

    options.out.mkdir(parents=True, exist_ok=True)
    for split in settings["splits"]:
        examples = Examples(options.features / f"{split}.npz")
        np.savez(options.out / f"logits_{split}.npz", **predict(model, examples, Padder(settings["pad_id"]), kind))
    result = {
        "load_seconds": loaded - began, "train_seconds": trained - loaded,
        "predict_seconds": time.perf_counter() - trained, "steps": trainer.state.global_step,
        "tokens": padder.tokens, "places": padder.places, "losses": trainer.losses, "padding": options.padding,
        "device": str(model.device), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['steps']} steps in {result['train_seconds']:.1f} s, without loading")


if __name__ == "__main__":
    main()
