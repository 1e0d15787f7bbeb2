"""Small shards of records that tell which they are, for the tests of the input path."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np

from bert_jax.config.pretrain import DataConfig
from data_pipeline.read.order import LaneOrder
from data_pipeline.read.pretrain_input import pretrain_batches
from data_pipeline.shards import shard_files as shards
from data_pipeline.shards.tfexample import encode_examples

S, M, VOCAB = 16, 3, 1000
TOKENIZER = SimpleNamespace(vocab_size=VOCAB)


def config(**options) -> DataConfig:
    return DataConfig(
        **{"seq_length": S, "max_predictions": M, "segment_records": 8, "window_segments": 2} | options
    )


def example_features(numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Features that tell which record they are: ids 1 and 2 of each row are its number in base 900, plus 5."""
    rng = np.random.default_rng(7)
    count = len(numbers)
    lengths = 6 + numbers[:, None] % (S - 6)
    mask = (np.arange(S) < lengths).astype(np.int64)
    ids = (rng.integers(5, VOCAB, (10_000, S))[numbers % 10_000]) * mask
    ids[:, 1], ids[:, 2] = 5 + numbers // 900, 5 + numbers % 900
    weights = np.ones((count, M), np.float32)
    weights[:, 2] = numbers % 2
    return {
        "input_ids": ids,
        "input_mask": mask,
        "segment_ids": mask * (np.arange(S) > 3),
        "masked_lm_positions": np.tile([1, 2, 4], (count, 1)),
        "masked_lm_ids": 5 + (numbers[:, None] * [1, 3, 7]) % 900,
        "masked_lm_weights": weights,
        "next_sentence_labels": numbers[:, None] % 2,
    }


def make_shards(folder: Path, *counts: int, start: int = 0) -> Path:
    """One file for each of ``counts``, whose records have the numbers from ``start`` on."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for i, count in enumerate(counts):
        records = encode_examples(example_features(np.arange(start, start + count))) if count else []
        entries.append(shards.write_records(folder / f"shard-{i:05d}-of-{len(counts):05d}.tfrecord", records))
        start += count
    shards.write_index(folder, entries)
    return folder


def offsets_of(entry: shards.ShardEntry) -> np.ndarray:
    """Offset of each record's frame in its file, and the file's end: int64[records + 1]."""
    return np.cumsum([0, *(entry.lengths.astype(np.int64) + shards.FRAME_BYTES)])


def numbers_of(ids: np.ndarray) -> np.ndarray:
    return (ids[:, 1] - 5) * 900 + ids[:, 2] - 5


def record_numbers(batch: dict[str, np.ndarray]) -> np.ndarray:
    return numbers_of(batch["input_ids"])


def stream(folder: Path, data: DataConfig | None = None, **options):
    options = {"lanes": 8, "batch_size": 16, "seed": 3, "tokenizer": TOKENIZER} | options
    return pretrain_batches(data or config(), folder=folder, **options)


def take(batches, count: int) -> list[dict[str, np.ndarray]]:
    return [next(batches)[0] for _ in range(count)]


def assert_equal(left: list[dict], right: list[dict]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def order_of(records: int, lanes: int, batch: int, steps: int, *, segment=8, window=2, seed=3) -> np.ndarray:
    """Record numbers of the first ``steps`` batches by the order alone, without files."""
    order = LaneOrder(records=records, lanes=lanes, segment_records=segment, window_segments=window, seed=seed)
    out, share = [], batch // lanes
    for row in range(batch):
        for step in range(steps):
            position = step * share + row % share
            epoch, found = order.window(row // share, position)
            out.append(found.records[position - epoch * order.lane_records(row // share) - found.start])
    return np.array(out).reshape(batch, steps).T
