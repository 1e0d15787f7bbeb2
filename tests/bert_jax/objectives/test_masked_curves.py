"""Loss curves against torch (tests/golden/record_masked.py) of masked language models, by masks and sentence pairs,
and of fine-tuning with a language-model loss."""

import dataclasses
import functools
import os
from pathlib import Path

import numpy as np
import pytest
from curves import assert_as_one, assert_curve
from golden.cases import (
    CLS,
    CURVE_BATCHES,
    CURVE_MODEL,
    CURVE_STEPS,
    GPT_CLASSES,
    GPT_WEIGHT,
    MASK,
    MASKED_ARRAYS,
    MASKED_BATCHES,
    MASKED_LENGTH,
    MASKED_SLOTS,
    MASKINGS,
    SEP,
    gpt_batch,
    gpt_weights,
    masked_batch,
    masked_weights,
    unmasked_batch,
)

from bert_jax.config import DataConfig, ExecutionConfig, HeadsConfig, ModelConfig, PretrainConfig
from bert_jax.config.finetune import FinetuneConfig, LossConfig
from bert_jax.config.task import TaskConfig, TaskDataConfig
from bert_jax.finetuning.task_objective import TaskObjective
from bert_jax.hashing import hash_key
from bert_jax.model import BertModel
from bert_jax.objectives.masked_lm import MaskedLm
from bert_jax.tasks.text_classification import ClassificationTask
from data_pipeline.build.masking import mask_batch

RECORDED = Path(__file__).parents[2] / "golden" / "fixtures" / "masked_lm.npz"
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
CAUSAL = {
    "attention": "causal", "pooling": "last", "pooler_layer": ("none",),
    "mlm_layer": "none", "without_bias": ("sequence_head", "mlm_output"),
}  # fmt: skip


@functools.cache
def recorded(name):
    with np.load(RECORDED) as arrays:
        return {key.partition("/")[2]: arrays[key] for key in arrays if key.startswith(f"{name}/")}


def data_of(name):
    return DataConfig(seq_length=MASKED_LENGTH, max_predictions=MASKED_SLOTS, **MASKINGS[name])


def masked_arrays(name):
    """The arrays that masking makes, [batches, ...]."""
    data, found = data_of(name), []
    for step in range(CURVE_STEPS if name == "annealed" else CURVE_BATCHES):
        given = unmasked_batch(data.next_sentence, step)
        ids, is_token = given["input_ids"], given["sequence_ids"] > 0
        maskable = is_token if data.mask_special_tokens else is_token & (ids != CLS) & (ids != SEP)
        keys = hash_key(7, step, np.arange(len(ids)))
        own = dataclasses.replace(data, mask_fraction=data.mask_fraction_at(step))
        options = {"data": own, "mask_id": MASK, "vocab_size": CURVE_MODEL["vocab_size"]}
        found.append(mask_batch(ids, given["words"], maskable, keys, **options))
    return dict(zip(MASKED_ARRAYS, map(np.stack, zip(*found, strict=True)), strict=True))


def masked_lm(name, mesh=None):
    model = ModelConfig(**CURVE_MODEL, **NO_DROPOUT)
    return MaskedLm(PretrainConfig(model=model, data=data_of(name)), mesh)


def fine_tuning(mesh=None):
    labels = tuple(map(str, range(GPT_CLASSES)))
    config = FinetuneConfig(
        task=TaskConfig(max_length=MASKED_LENGTH),
        data=TaskDataConfig(labels=labels),
        loss=LossConfig(lm_weight=GPT_WEIGHT),
        model=ModelConfig(**CURVE_MODEL, **CAUSAL, **NO_DROPOUT),
    )
    heads = HeadsConfig(pooler=True, sequence_labels=labels, mlm=True)
    model = BertModel(config.model, ExecutionConfig(), heads, mesh=mesh)
    return TaskObjective(ClassificationTask(config, None), config, model)


def test_masks_are_those_of_the_recorded_curves():
    """UPDATE_GOLDEN=1 stores new masks; record the curves again after it."""
    found = {f"{name}/{key}": array for name in MASKINGS for key, array in masked_arrays(name).items()}
    if os.environ.get("UPDATE_GOLDEN"):
        np.savez_compressed(MASKED_BATCHES, **{key: array.astype(np.uint8) for key, array in found.items()})
    with np.load(MASKED_BATCHES) as stored:
        assert set(stored) == set(found)
        for key, array in found.items():
            np.testing.assert_array_equal(array, stored[key], err_msg=key)


# The other maskings give the same program other batches, which the test above compares.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in ("nsp", "sop", "span") else pytest.param(name, marks=pytest.mark.slow) for name in MASKINGS],
)
def test_curve_of_masked_tokens_and_pairs(name):
    pairs = {"nsp_loss": 1.0} if MASKINGS[name]["next_sentence"] != "none" else {}
    batch_of = functools.partial(masked_batch, name)
    assert_curve(
        masked_lm(name), masked_weights(name), batch_of, recorded(name),
        total="total", names={"mlm_loss": 1.0} | pairs, falls_to=0.85,
    )  # fmt: skip


def test_curve_of_fine_tuning_with_a_language_model_loss():
    names = {"loss": 1.0, "lm_loss": GPT_WEIGHT}
    assert_curve(fine_tuning(), gpt_weights(), gpt_batch, recorded("gpt"), total="total", names=names, falls_to=0.7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sop", "span"])
def test_devices_and_microbatches_of_masked_tokens_are_as_one(name):
    assert_as_one(functools.partial(masked_lm, name), masked_weights(name), masked_batch(name, 1))


@pytest.mark.slow
def test_devices_and_microbatches_of_fine_tuning_are_as_one():
    assert_as_one(fine_tuning, gpt_weights(), gpt_batch(1))
