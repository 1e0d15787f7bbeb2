"""The input path: batches, resume, hosts, evaluation, foreign records, refusals. Small shards, one TensorFlow."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from input_shards import (
    TOKENIZER,
    VOCAB,
    M,
    S,
    assert_equal,
    config,
    example_features,
    make_shards,
    order_of,
    record_numbers,
    stream,
    take,
)

from bert_jax.batch import feature_shapes
from data_pipeline.read.pretrain_input import eval_batches
from data_pipeline.shards import shard_files as shards
from data_pipeline.shards.tfexample import encode_examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """512 records in files of uneven sizes, one of them empty."""
    return make_shards(tmp_path_factory.mktemp("shards"), 100, 0, 7, 250, 155)


# ------------------------------------------------------------------ batches


@pytest.mark.slow
def test_batches_keep_the_contract_and_hold_the_records(folder):
    batches = stream(folder)
    shapes = feature_shapes(16, S, M)
    for step in range(40):
        batch, info = next(batches)
        assert list(batch) == list(shapes)
        assert {n: (a.shape, a.dtype) for n, a in batch.items()} == {
            n: (s, np.dtype(d)) for n, (s, d) in shapes.items()
        }
        source = example_features(record_numbers(batch))
        pairs = {
            "input_ids": "input_ids", "token_type_ids": "segment_ids", "sequence_ids": "input_mask",
            "mlm_positions": "masked_lm_positions", "mlm_labels": "masked_lm_ids",
            "mlm_weights": "masked_lm_weights", "nsp_labels": "next_sentence_labels",
        }  # fmt: skip
        for name, stored in pairs.items():
            np.testing.assert_array_equal(batch[name], source[stored], err_msg=name)
        np.testing.assert_array_equal(batch["position_ids"], np.tile(np.arange(S), (16, 1)))
        assert not batch["cls_positions"].any() and (batch["nsp_weights"] == 1).all()
        assert (info.data_step, info.examples_seen) == (step, 16 * (step + 1))
        assert info.epoch == (step + 1) / 32
        np.testing.assert_array_equal(record_numbers(batch), order_of(512, 8, 16, step + 1)[-1])


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_together_see_what_one_host_sees(folder, hosts):
    whole = take(stream(folder, batch_ramp=(3, 8)), 12)
    share = 16 // hosts
    parts = [
        take(stream(folder, batch_ramp=(3, 8), rows=range(h * share, (h + 1) * share)), 12) for h in range(hosts)
    ]
    joined = [{n: np.concatenate([p[i][n] for p in parts]) for n in whole[i]} for i in range(12)]
    assert_equal(joined, whole)


def test_rows_may_be_any_and_are_checked(folder):
    whole = take(stream(folder), 6)
    rows = [13, 2, 3, 7]
    some = take(stream(folder, rows=rows), 6)
    assert_equal(some, [{name: values[rows] for name, values in batch.items()} for batch in whole])
    with pytest.raises(ValueError, match="rows"):
        stream(folder, rows=[16])
    with pytest.raises(ValueError, match=r"data\.lanes: 8 lanes cannot be divided"):
        stream(folder, rows=[0], batch_ramp=(3, 8))


@pytest.mark.slow
def test_resume_is_exact_at_every_step_and_ignores_what_was_read_ahead(folder):
    data = config(prefetch=5)
    batches = stream(folder, data, batch_ramp=(3, 8))
    expected, states = [], [batches.state()]
    for _ in range(45):
        expected.append(next(batches)[0])
        states.append(json.loads(json.dumps(batches.state())))
    again = stream(folder, data, batch_ramp=(3, 8))
    for step in (0, 1, 2, 3, 4, 16, 31, 32, 33, 40, 7):
        again.restore(states[step])
        assert again.state() == states[step]
        assert_equal(take(again, 3), expected[step : step + 3])


@pytest.mark.slow
def test_state_stays_small_and_far_steps_start_at_once(folder):
    batches = stream(folder)
    batches.restore(batches.state() | {"data_step": 10**9})
    for _ in range(20):
        next(batches)
        batches.skip(123_456)
    state = batches.state()
    assert len(json.dumps(state)) < 1024
    assert state["data_step"] == 10**9 + 20 + 20 * 123_456
    expected = order_of(512, 8, 16, 1)[0]
    batches.restore(state | {"data_step": 0})
    np.testing.assert_array_equal(record_numbers(next(batches)[0]), expected)


def test_skipped_batches_are_left_out_and_recorded(folder):
    plain = take(stream(folder), 20)
    batches = stream(folder)
    got = take(batches, 4)
    batches.skip(3)
    batches.skip(2)
    batch, info = next(batches)
    assert_equal([*got, batch], [*plain[:4], plain[9]])
    assert (info.data_step, info.examples_seen, info.epoch) == (9, 5 * 16, 10 / 32)
    state = batches.state()
    assert state["skipped"] == [[4, 9]]
    again = stream(folder)
    again.restore(state)
    batch, info = next(again)
    assert_equal([batch], [plain[10]])
    assert info.examples_seen == 6 * 16
    with pytest.raises(ValueError, match="batches to skip"):
        batches.skip(0)


def test_batch_ramp_reads_the_same_order_in_smaller_batches(folder):
    ramped = take(stream(folder, batch_ramp=(4, 8)), 6)
    plain = take(stream(folder), 4)
    assert [len(b["input_ids"]) for b in ramped] == [8] * 4 + [16] * 2
    per_lane = lambda batches: [  # noqa: E731
        [n for b in batches for n in record_numbers(b).reshape(8, -1)[lane].tolist()] for lane in range(8)
    ]
    assert per_lane(ramped) == per_lane(plain)


def test_a_position_of_other_data_is_refused_with_the_difference(folder, tmp_path):
    state = stream(folder).state()
    for options, message in (
        ({"seed": 4}, r"training\.seed was 3, now 4"),
        ({"lanes": 4}, "lanes was 8, now 4"),
        ({"batch_size": 32}, r"training\.global_batch_size was 16, now 32"),
        ({"data": config(segment_records=9)}, r"data\.segment_records was 8, now 9"),
    ):
        with pytest.raises(ValueError, match=message):
            stream(folder, **options).restore(state)
    other = make_shards(tmp_path / "other", 512)
    with pytest.raises(ValueError, match="shards was"):
        stream(other).restore(state)
    stream(folder, config(prefetch=7, max_blank_records=5)).restore(state)


def test_few_records_make_few_lanes(tmp_path, caplog):
    few = make_shards(tmp_path, 3, 2)
    batches = stream(few)
    assert "data.lanes: 8 is reduced to 4" in caplog.text
    seen = Counter(record_numbers(next(batches)[0]).tolist())
    assert set(seen) == set(range(5)) and max(seen.values()) <= 4
    with pytest.raises(ValueError, match=r"data\.lanes: 5 is not allowed"):
        stream(few, lanes=5)


# ------------------------------------------------------------------ evaluation


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(40, 0, 9), (48,)])
def test_evaluation_reads_each_record_once_and_fills_with_blanks(tmp_path, counts):
    held_out = make_shards(tmp_path, *counts)
    total = sum(counts)
    batches = list(eval_batches(config(), folder=held_out, batch_size=16, tokenizer=TOKENIZER))
    assert len(batches) == -(-total // 16)
    joined = {n: np.concatenate([b[n] for b in batches]) for n in batches[0]}
    assert record_numbers(joined)[:total].tolist() == list(range(total))
    assert not any(values[total:].any() for values in joined.values())
    assert joined["nsp_weights"].sum() == total
    halves = [
        list(eval_batches(config(), folder=held_out, batch_size=16, rows=rows, tokenizer=None))
        for rows in (range(8), range(8, 16))
    ]
    assert_equal([{n: np.concatenate([a[n], b[n]]) for n in a} for a, b in zip(*halves, strict=True)], batches)
    some = eval_batches(config(), folder=held_out, batch_size=16, max_batches=2, tokenizer=TOKENIZER)
    assert_equal(list(some), batches[:2])


# ------------------------------------------------------------------ readers


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"rows": [2, 3, 8]}, {"batch_ramp": (3, 8)}])
def test_both_readers_return_the_same_batches(folder, options):
    """Over two epochs, whichever of them began: the position of one is that of the other."""
    one, other = (stream(folder, config(reader=reader), **options) for reader in ("tensorflow", "numpy"))
    batches = take(one, 70)
    assert one.state()["data_step"] * 16 > 2 * 512
    assert_equal(take(other, 30), batches[:30])
    again = stream(folder, config(reader="tensorflow"), **options)
    again.restore(other.state())
    assert_equal(take(again, 10), batches[30:40])
    other.restore(again.state())
    assert_equal(take(other, 30), batches[40:])
    again.skip(30)
    assert again.state()["data_step"] == other.state()["data_step"]
    assert_equal(take(again, 2), take(other, 2))


def test_both_readers_return_the_same_held_out_batches(folder):
    one, other = (
        list(eval_batches(config(reader=reader), folder=folder, batch_size=100, tokenizer=TOKENIZER))
        for reader in ("tensorflow", "numpy")
    )
    assert len(one) == 6 and one[0]["input_ids"].dtype == np.int32
    assert_equal(one, other)
    assert {name: values.dtype for name, values in one[0].items()} == {n: v.dtype for n, v in other[0].items()}


# ------------------------------------------------------------------ foreign records


@pytest.mark.slow
@pytest.mark.parametrize("form", ["protobuf", "unpacked", "second names"])
def test_records_of_other_writers_stream_in(folder, tmp_path, form):
    """As google-research/bert's and the Model Garden's builders write them."""
    import tensorflow as tf
    from test_shards import tf_example

    features = example_features(np.arange(512))
    if form == "second names":
        features["input_word_ids"] = features.pop("input_ids")
        features["input_type_ids"] = features.pop("segment_ids")
    with tf.io.TFRecordWriter(str(tmp_path / "tf_examples.tfrecord")) as writer:
        for row in range(512):
            example = {name: values[row].tolist() for name, values in features.items()}
            order = list(example)[:: 1 if row % 3 else -1] if form == "unpacked" else None
            writer.write(tf_example(example, packed=form != "unpacked", order=order))
    with pytest.raises(ValueError, match="bert-data index"):
        stream(tmp_path)
    shards.index_folder(tmp_path)
    expected = take(stream(folder), 33)
    assert_equal(take(stream(tmp_path), 33), expected)
    assert_equal(take(stream(tmp_path, config(reader="numpy")), 33), expected)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_length": 32}, r"input_ids has 16 values per record; the config needs data\.seq_length 32"),
        ({"max_predictions": 4}, r"masked_lm_positions has 3 values .*data\.max_predictions 4"),
    ],
)
def test_shards_unlike_the_config_are_refused(folder, options, message):
    for open_stream in (
        lambda: stream(folder, config(**options)),
        lambda: eval_batches(config(**options), folder=folder, batch_size=4),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            open_stream()
        assert "\n" not in str(raised.value)


def test_unusable_values_are_refused_before_training(tmp_path):
    def with_features(name: str, **changes) -> Path:
        features = example_features(np.arange(32))
        for feature, value in changes.items():
            if value is None:
                del features[feature]
            else:
                features[feature][5, -1] = value
        entry = shards.write_records(tmp_path / name / "a.tfrecord", encode_examples(features))
        shards.write_index(tmp_path / name, [entry])
        return tmp_path / name

    for name, changes, message in (
        (
            "a",
            {"input_ids": VOCAB},
            r"a\.tfrecord: input_ids from 0 to 1000 instead of 0 to 999; .*another vocabulary",
        ),
        ("b", {"masked_lm_ids": -1}, "masked_lm_ids from -1"),
        ("c", {"masked_lm_positions": S}, "masked_lm_positions from 1 to 16 instead of 0 to 15"),
        ("d", {"input_mask": 2}, "input_mask from 0 to 2"),
        ("e", {"next_sentence_labels": None}, "lack the feature next_sentence_labels"),
        ("f", {"masked_lm_ids": None}, "static, but the shards .* contain no masks"),
    ):
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=message):
            stream(with_features(name, **changes))
    no_pairs = stream(tmp_path / "e", config(next_sentence="none"))
    batch = next(no_pairs)[0]
    assert not batch["nsp_labels"].any() and not batch["nsp_weights"].any()
    shards.write_index(tmp_path / "f", [shards.write_records(tmp_path / "f" / "a.tfrecord", [])])
    with pytest.raises(ValueError, match="no records"):
        stream(tmp_path / "f")


def read_ahead(folder, tmp_path, before: str, between: str) -> None:
    """Read batches in a process that runs ``before``, then ``between`` the two streams, and ends while batches are
    being read ahead: quietly."""
    held_out = make_shards(tmp_path, 20_000)
    code = f"""
import sys
from pathlib import Path
{before}
from bert_jax.config.pretrain import DataConfig
from data_pipeline.read.pretrain_input import eval_batches, pretrain_batches
data = DataConfig(seq_length={S}, max_predictions={M}, prefetch=200)
batches = pretrain_batches(data, folder=Path({str(folder)!r}), lanes=8, batch_size=16, seed=0)
assert not sys.modules.get("tensorflow") and "jax" not in sys.modules
next(batches)
{between}
held_out = eval_batches(data, folder=Path({str(held_out)!r}), batch_size=4)
next(held_out)
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_without_tensorflow(folder, tmp_path):
    read_ahead(folder, tmp_path, 'sys.modules["tensorflow"] = None', "batches.close(); next(batches)")


@pytest.mark.slow
def test_tensorflow_comes_late_sees_no_accelerator_and_leaves_quietly(folder, tmp_path):
    between = """
import tensorflow as tf
assert tf.config.get_visible_devices("GPU") == tf.config.get_visible_devices("TPU") == []
"""
    read_ahead(folder, tmp_path, "", between)
