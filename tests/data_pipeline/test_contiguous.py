"""``data.row_order`` contiguous: the instances of a document follow each other in the shards and in batches."""

import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest
from builders import content, words
from input_shards import config as small
from input_shards import make_shards, order_of, stream

from bert_jax.config.pretrain import DataConfig
from data_pipeline.build.ensure import ensure_data
from data_pipeline.read.order import LaneOrder
from data_pipeline.read.pretrain_input import pretrain_batches
from data_pipeline.shards.shard_files import read_index, read_manifest, read_records
from data_pipeline.shards.tfexample import decode_example

LENGTHS = [3, 150, 61, 14, 15, 200, 28, 90, 1, 47, 120, 33] * 2  # words of each document; a row holds 14
LANES = 6


def config(folder: Path, **changes: object) -> DataConfig:
    """Documents of the words w0, w1, ..., each word once, in one file."""
    vocabulary, corpus = folder.parent / "vocab.txt", folder.parent / "corpus.txt"
    if not corpus.exists():
        vocabulary.write_bytes(content(words(sum(LENGTHS))))
        ends = np.cumsum(LENGTHS)
        texts = [" ".join(f"w{n}" for n in range(end - n, end)) for n, end in zip(LENGTHS, ends, strict=True)]
        corpus.write_text("\n\n".join(texts) + "\n")
    values: dict[str, object] = {
        "corpus": (str(corpus),), "vocab": str(vocabulary), "shards": str(folder), "line": "sentence", "workers": 1,
        "seq_length": 16, "max_predictions": 3, "next_sentence": "none", "short_sequence_fraction": 0.0,
        "dupe_factor": 2, "num_shards": 3, "eval_fraction": 0.0, "segment_records": 5, "window_segments": 2,
    }  # fmt: skip
    return DataConfig(**(values | {"row_order": "contiguous"} | changes))  # type: ignore[arg-type]


def build(folder: Path, **changes: object) -> DataConfig:
    data = config(folder, **changes)
    ensure_data(data, vocab_size=sum(LENGTHS) + 5, report=lambda _: None)
    return data


def text(row: dict[str, np.ndarray], names: tuple[str, str, str]) -> list[int]:
    """Numbers of the words of a row before masking."""
    positions, labels, weights = (row[name] for name in names)
    ids = np.array(row["input_ids"])
    ids[positions[weights > 0]] = labels[weights > 0]
    return (ids[ids >= 5] - 5).tolist()


def follows(before: list[int], row: list[int]) -> bool:
    """True if ``row`` is the text after ``before``: the next words, or a document after the end of another."""
    starts, at_end = np.cumsum([0, *LENGTHS]), before[-1] + 1
    return row[0] in starts if at_end in starts else row[0] == at_end


def texts_of(folder: Path) -> list[list[list[int]]]:
    names = "masked_lm_positions", "masked_lm_ids", "masked_lm_weights"
    return [
        [text(decode_example(record), names) for record in read_records(folder / entry.name)]
        for entry in read_index(folder).entries
    ]


def test_the_rows_of_a_document_follow_each_other_in_a_shard(tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipeline.build.shard_jobs.PART_TOKENS", 300)
    build(tmp_path / "shards")
    shards = texts_of(tmp_path / "shards" / "train")
    assert all(follows(*pair) for rows in shards for pair in itertools.pairwise(rows))
    read = [word for rows in shards for row in rows for word in row]
    assert sorted(read) == sorted(2 * list(range(sum(LENGTHS))))
    firsts = [row[0] for row in shards[0] if row[0] in np.cumsum([0, *LENGTHS])]
    assert firsts != sorted(firsts), "documents are shuffled"


def test_row_r_continues_row_r(tmp_path):
    data = build(tmp_path / "shards")
    folder = tmp_path / "shards" / "train"
    records = read_index(folder).records
    batches = pretrain_batches(data, folder=folder, lanes=LANES, batch_size=LANES, seed=3)
    names = "mlm_positions", "mlm_labels", "mlm_weights"
    steps = 2 * records // LANES
    rows = [[text({n: x[r] for n, x in next_.items()}, names) for r in range(LANES)]
            for next_ in (next(batches)[0] for _ in range(steps))]  # fmt: skip
    pairs = [(before[r], row[r]) for before, row in itertools.pairwise(rows) for r in range(LANES)]
    order = LaneOrder(records, LANES, data.segment_records, data.window_segments, 3, True)
    borders = 2 * LANES * order.segments_per_lane
    assert sum(not follows(*pair) for pair in pairs) <= borders < 0.4 * len(pairs)


def test_segments_are_permuted_and_their_records_are_not():
    plain = order_of(240, 4, 4, 60)
    kept = np.array(plain)
    order = LaneOrder(records=240, lanes=4, segment_records=8, window_segments=2, seed=3, is_contiguous=True)
    for lane in range(4):
        for position in range(60):
            _, window = order.window(lane, position)
            kept[position, lane] = window.records[position - window.start]
    assert sorted(kept.ravel()) == sorted(plain.ravel()) and (kept != plain).mean() > 0.8
    steps = np.diff(kept, axis=0)
    assert (steps == 1).sum(0).tolist() == [60 - order.segments_per_lane] * 4
    assert (kept[0] != np.arange(4) * 8).any(), "the first segment is not always the first of the lane"


def test_shards_without_the_option_keep_their_bytes(tmp_path):
    build(tmp_path / "shards", row_order="shuffled")
    files = sorted((tmp_path / "shards" / "train").glob("*.tfrecord"))
    assert hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() == RECORDED
    settings = read_manifest(tmp_path / "shards" / "train")["settings"]
    assert "data.contiguous" not in settings


RECORDED = "41bdee4bce2fabd0be89ddd80036f19eddfc43fdd95c80e7377f3d3c3134abab"


@pytest.mark.parametrize("built", [True, False])
def test_shards_built_otherwise_are_refused(built, tmp_path):
    orders = {False: "shuffled", True: "contiguous"}
    build(tmp_path / "shards", row_order=orders[built])
    message = f"built with other settings: data.contiguous: shards {built}, config {not built}; set them back"
    with pytest.raises(ValueError, match=message):
        build(tmp_path / "shards", row_order=orders[not built])


def test_a_position_of_the_other_order_is_refused(tmp_path):
    folder = make_shards(tmp_path, 100)
    plain, kept = (
        stream(folder, small(row_order=value, next_sentence="none"), lanes=16)
        for value in ("shuffled", "contiguous")
    )
    for one, other, message in ((plain, kept, "was False, now True"), (kept, plain, "was True, now False")):
        with pytest.raises(ValueError, match=rf"data\.contiguous {message}"):
            one_state = one.state()
            other.restore(one_state)
    kept.restore(kept.state())
    assert "data.contiguous" not in plain.state()["order"]


def test_more_rows_than_records_are_refused(tmp_path):
    folder = make_shards(tmp_path, 10)
    message = (
        r"^data\.row_order: contiguous is not allowed with 8 lanes, 10 records and batches of 16 rows, because "
    )
    with pytest.raises(ValueError, match=message):
        stream(folder, small(row_order="contiguous", next_sentence="none"), lanes=16)
    with pytest.raises(ValueError, match="batches of 4, 8 rows"):
        stream(
            folder, small(row_order="contiguous", next_sentence="none"), lanes=4, batch_size=8, batch_ramp=(2, 4)
        )
    assert small(row_order="contiguous", next_sentence="none").lanes_for(48) == 48 and small().lanes_for(48) == 16
