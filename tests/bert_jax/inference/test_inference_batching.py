"""Packing: every sequence once, few shapes, results in the order of the input, endless input."""

import dataclasses
import itertools

import numpy as np
import pytest
from inference_models import make_model, random_texts, shared_model

from bert_jax.inference.batching import (
    BatchOptions,
    Shape,
    fill_rows,
    only_row,
    pack_batch,
    packed_batches,
    row_lengths,
    run_packed,
)
from bert_jax.tasks.task import Encoded, ModelInput


def inputs_of(lengths):
    return [ModelInput(i, (Encoded([i + 1] * n, [0] * n),)) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("limit", [5, 64, 65, 128, 256, 510, 512, 514, 2048, 9000])
def test_few_row_lengths_and_the_last_is_the_limit(limit):
    lengths = row_lengths(limit)
    assert list(lengths) == sorted(set(lengths)) and lengths[-1] == limit and len(lengths) <= 7


def test_packing_holds_every_sequence_once_and_wastes_little():
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(2, 20, 700), rng.integers(2, 513, 300)]).tolist()
    ladder = row_lengths(512)
    rows = fill_rows(lengths, ladder, 8)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    # A row is as long as its first input needs.
    tokens = [next(rung for rung in ladder if rung >= lengths[row[0]]) for row in rows]
    assert all(sum(lengths[n] for n in row) <= room for row, room in zip(rows, tokens, strict=True))
    assert max(map(len, rows)) == 8 and sum(lengths) > 0.85 * sum(tokens)


def test_packing_short_sentences_fills_rows():
    lengths = np.random.default_rng(0).integers(6, 16, 2000).tolist()
    rows = fill_rows(lengths, row_lengths(256), 8)
    assert sum(lengths) > 0.9 * 64 * len(rows)


def test_the_batch_contract():
    units = [ModelInput(0, (Encoded([7, 8, 9], [0, 0, 1]),)), ModelInput(1, (Encoded([5, 6], [0, 1]),))]
    batch = pack_batch(units, [[0, 1]], Shape(2, 6, 2), pad_id=4).features
    assert all(values.dtype == (np.float32 if name == "weights" else np.int32) for name, values in batch.items())
    assert batch["input_ids"].tolist() == [[7, 8, 9, 5, 6, 4], [4] * 6]
    assert batch["token_type_ids"].tolist() == [[0, 0, 1, 0, 1, 0], [0] * 6]
    assert batch["sequence_ids"].tolist() == [[1, 1, 1, 2, 2, 0], [0] * 6]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0] * 6]
    assert batch["cls_positions"][0].tolist() == [0, 3]


def test_the_last_batch_is_the_least_that_takes_what_is_left():
    units = inputs_of([6] * 11 + [3])
    batches = [*packed_batches(units, (4, 8), 1, lambda length, rows: (2, 4) if length == 8 else (rows,), pad_id=0)]
    assert [batch.features["input_ids"].shape for batch in batches] == [(4, 8), (4, 8), (4, 8), (1, 4)]
    batches = [*packed_batches(units[:6], (4, 8), 1, lambda *_: (2, 4), pad_id=0)]
    assert [batch.features["input_ids"].shape for batch in batches] == [(4, 8), (2, 8)]
    assert [place for batch in batches for place in batch.places] == [
        *((number, number, 0, 0) for number in range(4)), (4, 0, 0, 0), (5, 1, 0, 0)
    ]  # fmt: skip


def test_results_keep_the_order_of_endless_input():
    loaded, read, done = shared_model(positions=16), [], []

    def inputs():
        for number in itertools.count():
            read.append(number)
            yield number

    def featurize(part):  # number n has n % 3 sequences, each of 2 + n % 5 tokens
        return [
            ModelInput(n, (Encoded([n % 40] * (2 + n % 5), [0] * (2 + n % 5)),)) for n in part for _ in range(n % 3)
        ]

    def run(params, batch):
        return {"token": {"ids": batch["input_ids"]}, "unit": {"weights": batch["weights"]}}

    windows = loaded.windows(inputs(), featurize, run, window=10, batches=BatchOptions(32, progress=done.append))
    for first, (part, units, outputs) in zip(range(0, 30, 10), windows, strict=False):
        assert part == list(range(first, first + 10)) and len(read) == first + 10  # no further than needed
        assert [unit.record for unit in units] == [n for n in part for _ in range(n % 3)]
        for unit, output in zip(units, outputs, strict=True):
            assert output["ids"].tolist() == [unit.record % 40] * (2 + unit.record % 5) and output["weights"] == 1
    assert sum(done) == sum(n % 3 for n in range(30))


@pytest.mark.parametrize(
    ("lengths", "limit", "row"),
    [
        ([10], 512, 16),
        ([17], 512, 32),
        ([300], 512, 512),
        ([70], 100, 100),
        ([4], 5, 5),
        ([20] * 3, 512, 64),
        ([20] * 3, 40, None),
        ([6] * 8, 512, 48),
        ([6] * 9, 512, None),
        ([40, 40], 512, None),
        ([], 512, None),
    ],
)
def test_the_only_row_of_a_small_call(lengths, limit, row):
    assert only_row(lengths, limit, 8) == row


def test_a_small_call_runs_one_row_and_later_windows_keep_their_shapes():
    loaded, shapes = make_model(positions=512), []

    def run(params, batch):
        shapes.append(batch["input_ids"].shape)
        return {"token": {"ids": batch["input_ids"]}}

    def ids(lengths, **options):
        shapes.clear()
        windows = loaded.windows(lengths, inputs_of, run, **options)
        return [output["ids"].tolist() for _, _, outputs in windows for output in outputs], [*shapes]

    assert ids([10]) == ([[1] * 10], [(1, 16)])
    assert ids([200]) == ([[1] * 200], [(1, 256)])
    assert ids([9, 12, 9]) == ([[1] * 9, [2] * 12, [3] * 9], [(1, 32)])
    assert ids([10] * 40)[1] == [(16, 64)]
    assert ids([10] * 33, window=32)[1] == [(16, 64), (2, 64)]
    loaded.spec = dataclasses.replace(
        loaded.spec, model=dataclasses.replace(loaded.spec.model, attention_block=16, random_blocks=1)
    )
    assert ids([9, 12]) == ([[1] * 9, [2] * 12], [(2, 64)])  # such a model has one input per row
    assert ids([9]) == ([[1] * 9], [(1, 16)])


@pytest.mark.slow
def test_a_text_has_the_same_vector_alone_and_among_others():
    loaded, texts = shared_model(), random_texts(12, 40)
    together = loaded.embed(texts)
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_allclose(loaded.embed(text), vector, atol=1e-6)


def test_work_runs_ahead_by_a_few_batches_only():
    units, started, collected = inputs_of([8] * 40), [], []

    def program(batch):
        started.append(1)
        assert len(started) - len(collected) <= 5
        return {"token": {"ids": batch["input_ids"]}}

    batches = packed_batches(units, (8,), 1, lambda *_: (1,), pad_id=0)
    outputs = run_packed(program, units, batches, collected.append)
    assert [output["ids"].tolist() for output in outputs] == [[i + 1] * 8 for i in range(40)]
    assert collected == [1] * 40


def test_eight_programs_serve_a_model_whatever_its_texts():
    loaded, shapes = shared_model(positions=512), set()

    def run(params, batch):
        shapes.add(batch["input_ids"].shape)
        return {"token": {"ids": batch["input_ids"]}}

    for count, longest in ((3, 5), (40, 500), (300, 20), (5, 120)):
        lengths = [len(text.split()) + 2 for text in random_texts(count, longest)]
        list(loaded.windows(lengths, inputs_of, run, batches=BatchOptions(1024)))
    assert 3 <= len(shapes) <= 8


@pytest.mark.parametrize("most", [1, 3, 20])
def test_a_batch_has_at_most_so_many_texts(most):
    loaded, counts = shared_model(positions=512), []

    def run(params, batch):
        counts.append(int(batch["weights"].sum()))
        assert batch["weights"].size <= most
        return {"token": {"ids": batch["input_ids"]}}

    lengths = [len(text.split()) + 2 for text in random_texts(50, 40)]
    ((_, _, outputs),) = loaded.windows(lengths, inputs_of, run, batches=BatchOptions(batch_size=most))
    assert sum(counts) == 50 and max(counts) <= most
    assert [len(output["ids"]) for output in outputs] == lengths


def test_the_size_of_a_batch_is_checked():
    for options in ({"batch_tokens": 0}, {"batch_size": -1}, {"batch_size": 1.5}):
        (name,) = options
        with pytest.raises(ValueError, match=f"{name}: .* is not allowed; allowed: 1 or more"):
            BatchOptions(**options)
