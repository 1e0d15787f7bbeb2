"""Fine-tuning of each family: rows that examples share against rows of one example, as measured by
benchmarks/packed_families.py."""

import importlib.util
from functools import cache

import numpy as np
import pytest
from command import REPOSITORY

from bert_jax.interop.hf.families import FAMILIES

# Every kind of head, and positions and attention of different kinds.
QUICK = {"modernbert": "embeddings", "mpnet": "sequence", "deberta-v2": "tagging", "neobert": "spans"}
HEADS = ("sequence", "tagging", "spans", "embeddings")
CASES = [
    pytest.param(family, head, marks=() if QUICK.get(family) == head else pytest.mark.slow)
    for family in FAMILIES
    if family != "big_bird"
    for head in HEADS
]


@cache
def benchmark():
    place = REPOSITORY / "benchmarks" / "packed_families.py"
    spec = importlib.util.spec_from_file_location("packed_families", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_kind_of_head_is_measured():
    assert tuple(benchmark().TASKS) == HEADS


@pytest.mark.parametrize(("family", "head"), CASES)
def test_packed_rows_have_the_loss_and_gradients_of_single_rows(family, head):
    found = benchmark().difference(family, head)
    assert found["rows"][0] < found["rows"][1]
    assert max(found["loss"], found["gradients"]) <= benchmark().BAR, found


def test_blocks_of_a_row_refuse_packed_rows():
    found = benchmark().measure("big_bird")
    assert found["ok"] and found["refused"].endswith("allowed: false with model.attention_block")


@pytest.mark.parametrize("name", ["sequence_ids", "position_ids"])
def test_the_comparison_sees_a_leak(monkeypatch, name):
    """Tokens of a row that see each other, or positions that do not begin again, are no rounding."""
    module = benchmark()
    plain = module.batch_of

    def changed(job, head, units):
        batch = plain(job, head, units)
        if units > 1 and name == "sequence_ids":
            batch[name] = np.minimum(batch[name], 1)
        elif units > 1:
            batch[name] = np.broadcast_to(np.arange(module.ROW, dtype=np.int32), batch[name].shape)
        return batch

    monkeypatch.setattr(module, "batch_of", changed)
    assert module.difference("bert", "tagging")["loss"] > 100 * module.BAR
