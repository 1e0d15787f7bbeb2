"""Instances against a restatement of google-research/bert's loop, and against what chance allows."""

from typing import Any

import numpy as np
import pytest

from bert_jax.config.pretrain import DataConfig
from bert_jax.hashing import hash_key
from data_pipeline.build.instances import (
    Instances,
    InstanceSettings,
    Segment,
    instance_keys,
    make_features,
    plan_document,
    shard_and_place,
    truncate,
)
from data_pipeline.build.masking import draw_bits, uniform

CLS, SEP, PAD, MASK = 2, 3, 0, 4


def settings(next_sentence: str = "nsp", **changes: Any) -> InstanceSettings:
    values: dict[str, Any] = {"seq_length": 64, "next_sentence": next_sentence, "seed": 5, "max_predictions": 10}
    data = DataConfig(**(values | changes))
    return InstanceSettings(data=data, cls_id=CLS, sep_id=SEP, pad_id=PAD, mask_id=MASK, vocab_size=1000)


def plan(lengths: list[int], config: InstanceSettings, document: int = 3, pass_number: int = 0) -> Instances:
    """Instances of a document at token 1000 of the pool; random B sentences lie from token 100,000 on."""

    def random_next(u: float, v: float, needed: int) -> Segment:
        assert 0 <= u < 1 and 0 <= v < 1
        return Segment(100_000 + int(1000 * v), max(needed, 1) + 2)

    rows = plan_document(
        np.array(lengths), document=document, pass_number=pass_number, first_token=1000, settings=config,
        random_next=random_next,
    )  # fmt: skip
    return Instances.from_rows(rows)


def target_length(config: InstanceSettings, document: int, pass_number: int = 0) -> int:
    short, length = uniform(draw_bits(hash_key(config.data.seed, document, pass_number), 0, 2))[0].tolist()
    return 2 + int(length * (config.budget - 1)) if short < config.data.short_sequence_fraction else config.budget


def reference_pairs(lengths: list[int], target: int, draws: list[list[float]]) -> list[tuple[int, int, int, int]]:
    """(first sentence, end of A, end of B or -1, tokens wanted of a random B): the reference's loop, restated."""
    pairs = []
    chunk: list[int] = []
    total = i = 0
    while i < len(lengths):
        chunk.append(i)
        total += lengths[i]
        if i == len(lengths) - 1 or total >= target:
            draw = draws[len(pairs)]
            a_end = 1
            if len(chunk) >= 2:
                a_end = 1 + int(draw[0] * (len(chunk) - 1))
            a_tokens = sum(lengths[s] for s in chunk[:a_end])
            if len(chunk) == 1 or draw[1] < 0.5:
                pairs.append((chunk[0], chunk[a_end - 1] + 1, -1, target - a_tokens))
                i -= len(chunk) - a_end
            else:
                pairs.append((chunk[0], chunk[a_end - 1] + 1, chunk[-1] + 1, 0))
            chunk, total = [], 0
        i += 1
    return pairs


def test_pairs_as_the_reference() -> None:
    rng = np.random.default_rng(0)
    config = settings()
    kinds = {"next": 0, "random": 0, "alone": 0}
    for document in range(300):
        lengths = rng.integers(1, 60 if document % 2 else 15, rng.integers(1, 40)).tolist()
        ends = np.concatenate([[0], np.cumsum(lengths)])
        draws = (
            uniform(draw_bits(hash_key(config.data.seed, document, 0), 1, 4 * len(lengths))).reshape(-1, 4).tolist()
        )
        expected = reference_pairs(lengths, target_length(config, document), draws)
        found = plan(lengths, config, document)
        assert len(found.document) == len(expected)
        np.testing.assert_array_equal(found.number, np.arange(len(expected)))
        for row, (first, middle, stop, wanted) in zip(zip(*found, strict=True), expected, strict=True):
            _, _, a_start, a_length, b_start, b_length, label = row
            assert (a_start, a_length) == (1000 + ends[first], ends[middle] - ends[first])
            if stop < 0:
                assert label == 1 and b_start >= 100_000 and b_length == max(wanted, 1) + 2
                kinds["alone" if middle == len(lengths) else "random"] += 1
            else:
                assert (b_start, b_length, label) == (1000 + ends[middle], ends[stop] - ends[middle], 0)
                kinds["next"] += 1
    assert min(kinds.values()) > 100


def test_half_of_the_pairs_are_random_unless_a_has_no_follower() -> None:
    config = settings(short_sequence_fraction=0.0)
    labels = []
    for document in range(400):
        found = plan([10] * 200, config, document)
        alone = found.a_start == 1000 + 199 * 10  # only the last sentence is left
        assert found.label[alone].all()
        labels.append(found.label[~alone])
    flat = np.concatenate(labels)
    assert len(flat) > 10_000
    assert abs(flat.mean() - 0.5) < 3 * np.sqrt(0.25 / len(flat))


@pytest.mark.slow
def test_a_tenth_of_the_documents_is_short() -> None:
    config = settings("none")
    lengths = [plan([5] * 400, config, document, k).a_length[0] for document in range(2000) for k in range(5)]
    short = np.array(lengths) < config.budget
    # A drawn length may be the full one: 1 of budget - 1 values.
    share = 0.1 * (1 - 1 / (config.budget - 1))
    assert abs(short.mean() - share) < 3 * np.sqrt(share * (1 - share) / len(short))
    assert min(lengths) >= 2 and max(lengths) == config.budget
    assert len(set(np.array(lengths)[short])) > 50


def test_none_covers_every_token_once() -> None:
    found = plan([7] * 100, settings("none", short_sequence_fraction=0.0))
    assert (found.a_length[:-1] == 62).all()
    covered = np.concatenate([np.arange(s, s + n) for s, n in zip(found.a_start, found.a_length, strict=True)])
    np.testing.assert_array_equal(covered, np.arange(1000, 1700))
    assert not found.b_length.any() and not found.label.any()


def test_sop_swaps_half_and_covers_every_token_once() -> None:
    config = settings("sop")
    swapped = []
    for document in range(200):
        found = plan([9] * 100, config, document)
        first = np.where(found.label == 1, found.b_start, found.a_start)
        second = np.where(found.label == 1, found.a_start, found.b_start)
        first_length = np.where(found.label == 1, found.b_length, found.a_length)
        second_length = np.where(found.label == 1, found.a_length, found.b_length)
        np.testing.assert_array_equal(first + first_length, second)
        assert (first_length > 0).all() and (second_length > 0).all()
        np.testing.assert_array_equal(first[1:], (second + second_length)[:-1])
        swapped.append(found.label)
    flat = np.concatenate(swapped)
    assert abs(flat.mean() - 0.5) < 3 * np.sqrt(0.25 / len(flat))


def test_sop_cuts_a_single_sentence_and_drops_a_single_token() -> None:
    found = plan([2], settings("sop"))
    assert (found.a_length[0], found.b_length[0]) == (1, 1)
    assert len(plan([1], settings("sop")).document) == 0


def test_truncation_as_the_reference() -> None:
    rng = np.random.default_rng(1)
    count = 4000
    a, b = rng.integers(1, 200, (2, count))
    zeros = np.zeros(count, np.int64)
    found = truncate(Instances(zeros, zeros, zeros, a, zeros, b, zeros), hash_key(9, np.arange(count)), 61)
    for i in range(count):
        left_a, left_b = int(a[i]), int(b[i])
        while left_a + left_b > 61:
            if left_a > left_b:
                left_a -= 1
            else:
                left_b -= 1
        assert (found.a_length[i], found.b_length[i]) == (left_a, left_b)
    for start, length, before in ((found.a_start, found.a_length, a), (found.b_start, found.b_length, b)):
        dropped = before - length
        assert ((start >= 0) & (start <= dropped)).all()
        # A fair coin per dropped token: the sum over all is binomial.
        assert abs(start.sum() - dropped.sum() / 2) < 3 * np.sqrt(dropped.sum() / 4)
        wide = dropped >= 100
        assert wide.any()
        assert abs((start[wide] - dropped[wide] / 2).std() / np.sqrt(dropped[wide] / 4).mean() - 1) < 0.1


@pytest.mark.parametrize("next_sentence", ["nsp", "sop", "none"])
def test_layout(next_sentence: str) -> None:
    config = settings(next_sentence)
    rng = np.random.default_rng(2)
    pool = rng.integers(5, 1000, 5000)
    starts = rng.random(5000) < 0.5
    a, b = rng.integers(1, 80, (2, 50))
    b = b * (next_sentence != "none")
    instances = Instances(
        np.arange(50), np.zeros(50, int), np.arange(50) * 7, a, np.arange(50) * 9 + 2000, b, b % 2
    )
    keys = instance_keys(config, instances, 0)
    cut = truncate(instances, keys, config.budget)
    features = make_features(instances, keys, pool, starts, config)
    unmasked = make_features(instances, keys, pool, starts, settings(next_sentence, masking="dynamic"))
    assert set(unmasked) == {
        "input_ids", "input_mask", "segment_ids", "next_sentence_labels", "sequence_keys", "word_starts"
    }  # fmt: skip
    for i in range(50):
        tokens_a = pool[cut.a_start[i] : cut.a_start[i] + cut.a_length[i]].tolist()
        tokens_b = pool[cut.b_start[i] : cut.b_start[i] + cut.b_length[i]].tolist()
        tail_b = [*tokens_b, SEP] if next_sentence != "none" else []
        row = [CLS, *tokens_a, SEP, *tail_b]
        padding = [0] * (64 - len(row))
        assert len(row) <= 64
        assert unmasked["input_ids"][i].tolist() == row + padding
        assert features["input_mask"][i].tolist() == [1] * len(row) + padding
        assert features["segment_ids"][i].tolist() == [0] * (len(tokens_a) + 2) + [1] * len(tail_b) + padding
        word = [True, *starts[cut.a_start[i] : cut.a_start[i] + cut.a_length[i]], True]
        word[1] = True  # a segment begins with a word, whatever truncation cut off
        if tail_b:
            word += [True, *starts[cut.b_start[i] + 1 : cut.b_start[i] + cut.b_length[i]], True]
        assert unmasked["word_starts"][i].tolist() == word + padding
        restored = features["input_ids"][i].copy()
        used = features["masked_lm_weights"][i] > 0
        assert used.sum() == min(10, max(1, round(len(row) * 0.15)), len(row) - 2 - bool(tail_b))
        restored[features["masked_lm_positions"][i][used]] = features["masked_lm_ids"][i][used]
        assert restored.tolist() == row + padding
        assert features["next_sentence_labels"][i].tolist() == [b[i] % 2]


def test_instances_do_not_depend_on_their_neighbours() -> None:
    config = settings()
    whole = plan([9] * 50, config)
    keys = instance_keys(config, whole, 0)
    pool = np.arange(200_000) % 900 + 5
    starts = np.ones(200_000, bool)
    together = make_features(whole, keys, pool, starts, config)
    alone = make_features(whole.slice(3, 4), keys[3:4], pool, starts, config)
    for name, values in alone.items():
        np.testing.assert_array_equal(values, together[name][3:4])
    assert len(np.unique(keys)) == len(keys)
    assert (instance_keys(config, whole, 1) != keys).all()


def test_shards_are_filled_evenly() -> None:
    shard, place = shard_and_place(hash_key(1, np.arange(80_000)), 16)
    counts = np.bincount(shard, minlength=16)
    assert len(counts) == 16 and np.abs(counts - 5000).max() < 4 * np.sqrt(5000)
    assert len(np.unique(place)) == len(place)
