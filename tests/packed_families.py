"""Fine-tuning of every family with packed rows against rows of one example each.

A tiny model of odd sizes is drawn for each family. For each kind of head (a sequence head, tags, spans, vectors of
texts with negatives), the loss and the gradients of one batch of the same examples are computed in two ways: with
up to four examples in a row, and with one. Dropout is off.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from drawn_families import drawn_models
from flax import linen as nn

from bert_jax.config import ModelConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.finetuning.finetune import FinetuneJob
from bert_jax.finetuning.task_objective import TaskObjective
from bert_jax.inference.batching import Shape, fill_rows, pack_batch
from bert_jax.model import to_canonical
from bert_jax.model.canonical import from_canonical
from bert_jax.records import Answer, Record
from bert_jax.start.start import Start
from bert_jax.training.state import abstract_params
from bert_jax.training.step import loss_and_gradients

BAR = 1e-6
ROW, UNITS = 64, 4
WORDS = 50
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(WORDS))]
LABELS, TAGS = ("no", "perhaps", "yes"), ("O", "B-A", "B-B")
# Head -> kind of task and its options.
TASKS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "sequence": ("classification", {"data": {"labels": LABELS}}),
    "tagging": ("tagging", {"data": {"tags": TAGS}}),
    "spans": ("qa", {"qa": {"no_answer": True}}),
    "embeddings": ("sentence", {"sentence": {"loss": "negatives"}}),
}
# Without dropout: packed rows and rows of one example draw different bits.
NO_DROPOUT = {
    f"{place}_dropout": 0.0 for place in ("hidden", "attention", "embedding", "attention_output", "feed_forward")
}


def model_of(family: str) -> ModelConfig:
    """Return the model of ``family`` that ``drawn_families`` draws, for rows of ``ROW`` tokens."""
    _, bundle = next(drawn_models(family))
    model: ModelConfig = bundle.spec.model
    positions = ROW + 2 + model.position_offset
    return dataclasses.replace(model, vocab_size=len(PIECES), max_position_embeddings=positions, **NO_DROPOUT)


def records_of(head: str) -> list[Record]:
    """Return twelve records of unequal lengths for the task of ``head``."""
    rng = np.random.default_rng(5)
    found = []
    for i in range(12):
        words = [f"w{n}" for n in rng.integers(0, WORDS, rng.integers(1, 14))]
        other = [f"w{n}" for n in rng.integers(0, WORDS, rng.integers(3, 14))]
        fields: dict[str, Any] = {"text": " ".join(words), "text_pair": " ".join(other)}
        if head == "sequence":
            fields |= {"label": LABELS[i % 3], "text_pair": fields["text_pair"] if i % 2 else None}
        elif head == "tagging":
            fields = {"words": tuple(words), "tags": tuple(TAGS[n] for n in rng.integers(0, 3, len(words)))}
        elif head == "spans":
            start = len(other[0]) + 1
            answer = Answer(text=" ".join(other[1:3]), start=start)
            fields["answers"] = (answer,) if i % 3 else ()
        found.append(Record(id=str(i), source=f"file:{i}", **fields))
    return found


def make_job(model: ModelConfig, head: str) -> FinetuneJob:
    """Return the fine-tuning of ``model`` for the task of ``head``, as ``run_finetune.py`` makes it."""
    kind, options = TASKS[head]
    plain = FinetuneConfig()
    given = {"task": {"kind": kind, "max_length": ROW // 2}, **options}
    sections = {name: dataclasses.replace(getattr(plain, name), **values) for name, values in given.items()}
    config = dataclasses.replace(plain, **sections, model=model)
    start = Start(tokenizer_content=("\n".join(PIECES) + "\n").encode())
    return FinetuneJob(config, {"train": records_of(head)}, (), start)


def batch_of(job: FinetuneJob, head: str, units: int) -> dict[str, np.ndarray]:
    """Return a batch with up to ``units`` examples in a row."""
    inputs = job.task.featurize(records_of(head), training=True)
    rows = fill_rows([unit.length for unit in inputs], (ROW,), units)
    assert rows is not None
    shape, task = Shape(len(rows), ROW, units), job.task
    given = {"sequences": task.sequences_per_unit, "targets": task.targets, "pad_id": task.tokenizer.pad_id}
    return pack_batch(inputs, rows, shape, **given).features


def drawn(job: FinetuneJob) -> Any:
    """Return random parameters in the layout of training: normal, around 1 for the scale of a normalization."""
    like = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), nn.unbox(abstract_params(job.model)))
    rng, weights = np.random.default_rng(0), {}
    for name, leaf in to_canonical(like, len(PIECES)).items():
        values = 0.2 * rng.standard_normal(leaf.shape, np.float32)
        weights[name] = np.float32(1 if name.endswith("scale") else 0) + values
    return from_canonical(weights, like, len(PIECES))


def step(job: FinetuneJob, batch: dict[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss of ``batch`` and its canonical gradients, without dropout."""
    objective = TaskObjective(job.task, job.config, job.model)
    run = jax.jit(lambda params, b: loss_and_gradients(objective, params, b, None, 1)[:2])
    loss, gradients = jax.device_get(run(drawn(job), batch))
    return float(loss), {name: np.float64(value) for name, value in to_canonical(gradients, len(PIECES)).items()}


def difference(family: str, head: str) -> dict[str, Any]:
    """Return the rows of both batches, and the differences: of the loss, divided by max(1, loss), and of the
    gradient of a parameter (the largest norm), divided by max(1, norm of all gradients)."""
    job = make_job(model_of(family), head)
    packed, apart = batch_of(job, head, UNITS), batch_of(job, head, 1)
    assert len(packed["input_ids"]) < len(apart["input_ids"])
    (loss, gradients), (expected, own) = step(job, packed), step(job, apart)
    whole = max(1.0, float(np.sqrt(sum(np.sum(value**2) for value in own.values()))))
    off = max(float(np.linalg.norm(gradients[name] - value)) for name, value in own.items()) / whole
    return {
        "rows": [len(packed["input_ids"]), len(apart["input_ids"])],
        "loss": float(f"{abs(loss - expected) / max(1.0, abs(expected)):.3g}"), "gradients": float(f"{off:.3g}"),
    }  # fmt: skip
