"""Fine-tuning of each family: rows that examples share against rows of one example."""

import numpy as np
import packed_families
import pytest

from bert_jax.interop.hf.families import FAMILIES

# Every kind of head, and positions and attention of different kinds.
QUICK = {"modernbert": "embeddings", "mpnet": "sequence", "deberta-v2": "tagging", "neobert": "spans"}
CASES = [
    pytest.param(family, head, marks=() if QUICK.get(family) == head else pytest.mark.slow)
    for family in FAMILIES
    if family != "big_bird"
    for head in packed_families.TASKS
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("family", "head"), CASES)
def test_packed_rows_have_the_loss_and_gradients_of_single_rows(family, head):
    found = packed_families.difference(family, head)
    assert found["rows"][0] < found["rows"][1]
    assert max(found["loss"], found["gradients"]) <= packed_families.BAR, found


def test_blocks_of_a_row_refuse_packed_rows():
    model = packed_families.model_of("big_bird")
    with pytest.raises(
        ValueError, match=r"^input\.packing: True is not allowed.*allowed: false with model\.attention_block$"
    ):
        packed_families.make_job(model, "sequence")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequence_ids", "position_ids"])
def test_the_comparison_sees_a_leak(monkeypatch, name):
    """Tokens of a row that see each other, or positions that do not begin again, are no rounding."""
    module = packed_families
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
