"""Packing: every sequence once, few shapes, results in the order of the input, endless input."""

import itertools

import numpy as np
import pytest
from inference_models import make_model, random_texts

from bert_jax.inference.batching import (
    SEQUENCES_PER_ROW,
    Encoded,
    batches,
    features,
    pack,
    row_lengths,
    run_packed,
    stream,
)


@pytest.mark.parametrize("limit", [5, 64, 65, 128, 256, 510, 512, 514, 2048, 9000])
def test_few_row_lengths_and_the_last_is_the_limit(limit):
    lengths = row_lengths(limit)
    assert list(lengths) == sorted(set(lengths)) and lengths[-1] == limit and len(lengths) <= 7


def test_packing_holds_every_sequence_once_and_wastes_little():
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(2, 20, 700), rng.integers(2, 513, 300)]).tolist()
    rows = pack(lengths, row_lengths(512))
    assert sorted(number for row in rows for number, _ in row.items) == list(range(len(lengths)))
    for row in rows:
        ends = [start + lengths[number] for number, start in row.items]
        assert [start for _, start in row.items] == [0, *ends[:-1]]
        assert ends[-1] == row.used <= row.length and len(row.items) <= SEQUENCES_PER_ROW
    assert sum(lengths) > 0.85 * sum(row.length for row in rows)


def test_packing_short_sentences_fills_rows():
    lengths = np.random.default_rng(0).integers(6, 16, 2000).tolist()
    rows = pack(lengths, row_lengths(256))
    assert {row.length for row in rows} == {64}
    assert sum(lengths) > 0.9 * 64 * len(rows)


def test_the_batch_contract():
    sequences = [Encoded([7, 8, 9], [0, 0, 1]), Encoded([5, 6], [0, 1])]
    (row,) = pack([3, 2], (6,))
    batch = features([row], 2, sequences, pad_id=4)
    assert all(values.dtype == np.int32 for values in batch.values())
    assert batch["input_ids"].tolist() == [[7, 8, 9, 5, 6, 4], [4] * 6]
    assert batch["token_type_ids"].tolist() == [[0, 0, 1, 0, 1, 0], [0] * 6]
    assert batch["sequence_ids"].tolist() == [[1, 1, 1, 2, 2, 0], [0] * 6]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0] * 6]
    assert batch["cls_positions"][0, :2].tolist() == [0, 3]


def test_no_more_than_eight_shapes_whatever_comes():
    rng = np.random.default_rng(1)
    shapes = set()
    for count, longest in ((1, 10), (3, 60), (50, 30), (500, 512), (7, 512), (200, 300), (40, 64)):
        lengths = rng.integers(2, longest + 1, count).tolist()
        ladder = row_lengths(512)
        shapes |= {(size, part[0].length) for part, size in batches(pack(lengths, ladder), ladder, 1024)}
    assert len(shapes) <= 8
    assert all(size * length <= 1024 for size, length in shapes)


def test_results_keep_the_order_of_endless_input():
    read = []

    def inputs():
        for number in itertools.count():
            read.append(number)
            yield number

    def encode(part):  # number n has n % 3 sequences, each of 2 + n % 5 tokens
        return [[Encoded([n] * (2 + n % 5), [0] * (2 + n % 5), (n, i)) for i in range(n % 3)] for n in part]

    done = []

    def take(ids, place, one):
        return ids[place.row, place.start], one.extra

    results = stream(
        inputs(), encode, lambda batch: batch["input_ids"], take,
        limit=16, pad_id=0, window=10, batch_tokens=32, progress=done.append,
    )  # fmt: skip
    first = list(itertools.islice(results, 25))
    assert first == [[(n, (n, i)) for i in range(n % 3)] for n in range(25)]
    assert len(read) == 30  # no further than the window that is under way
    assert sum(done) == sum(n % 3 for n in range(30))


def test_work_runs_ahead_by_a_few_batches_only():
    sequences = [Encoded([n + 1] * 8, [0] * 8) for n in range(40)]
    started, collected = [], []
    for done in run_packed(
        lambda batch: started.append(1) or batch["input_ids"], lambda *a: None, sequences, (8,), 0, 8
    ):
        collected += done
        assert len(started) - len(collected) <= 5
    assert sorted(number for number, _ in collected) == list(range(40))


def test_eight_programs_serve_a_model_whatever_its_texts():
    loaded = make_model(positions=512)
    for texts in (random_texts(3, 5), random_texts(40, 500), random_texts(300, 20), random_texts(5, 120)):
        loaded.embed(texts, batch_tokens=1024)
    (program,) = loaded._programs.values()
    assert 3 <= program._cache_size() <= 8
