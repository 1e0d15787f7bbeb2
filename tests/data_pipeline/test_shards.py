"""The shard format against TensorFlow's own writer, reader and proto classes; index and manifest damage."""

import json
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from input_shards import offsets_of

from bert_jax.io.protobuf import write_varint
from data_pipeline.shards import shard_files as shards
from data_pipeline.shards import tfexample


def bert_features(count: int, seq_length: int = 32, predictions: int = 5, seed: int = 0) -> dict[str, np.ndarray]:
    """Features of ``count`` examples with ids of one, two and three varint bytes."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(seq_length) < rng.integers(8, seq_length + 1, (count, 1))).astype(np.int32)
    return {
        "input_ids": rng.integers(5, 30522, (count, seq_length), dtype=np.int32) * mask,
        "input_mask": mask,
        "segment_ids": mask * (np.arange(seq_length) > 6),
        "masked_lm_positions": np.sort(rng.integers(1, 8, (count, predictions), dtype=np.int32)),
        "masked_lm_ids": rng.integers(5, 30522, (count, predictions), dtype=np.int32),
        "masked_lm_weights": np.ones((count, predictions), np.float32),
        "next_sentence_labels": rng.integers(0, 2, (count, 1)),
    }


def tf_example(features: dict[str, list], *, packed: bool = True, order: list[str] | None = None) -> bytes:
    """An Example as protobuf writes it, or with unpacked lists and features in a given order."""
    from tensorflow.core.example import example_pb2

    if packed and order is None:
        example = example_pb2.Example()
        for name, values in features.items():
            kind = "float_list" if isinstance(values[0], float) else "int64_list"
            getattr(example.features.feature[name], kind).value.extend(values)
        return example.SerializeToString()
    entries = b""
    for name in order or list(features):
        body = b""
        for value in features[name]:
            is_float = isinstance(value, float)
            body += b"\x0d" + np.float32(value).tobytes() if is_float else b"\x08" + write_varint(value)
        tag = b"\x12" if isinstance(features[name][0], float) else b"\x1a"
        listed = tag + write_varint(len(body)) + body
        entry = b"\x0a" + write_varint(len(name)) + name.encode()
        entry += b"\x12" + write_varint(len(listed)) + listed
        entries += b"\x0a" + write_varint(len(entry)) + entry
    return b"\x0a" + write_varint(len(entries)) + entries


def id_range(entry: shards.ShardEntry) -> tuple[int, int] | None:
    return shards.ShardIndex(Path(), (entry,)).id_range


def rows(features: dict[str, np.ndarray], row: int) -> dict[str, list]:
    return {name: values[row].tolist() for name, values in features.items()}


def test_examples_parse_as_tensorflow_parses_them():
    from tensorflow.core.example import example_pb2

    features = bert_features(50)
    features["wide"] = np.array([[-1, -(2**63), 2**63 - 1, 2**31, 0, 127, 128, 16383, 16384]] * 50)
    features["empty"] = np.zeros((50, 0), np.int64)
    features["flags"] = np.arange(150).reshape(50, 3) % 2 == 0
    for row, record in enumerate(tfexample.encode_examples(features)):
        example = example_pb2.Example.FromString(record)
        assert set(example.features.feature) == set(features)
        decoded = tfexample.decode_example(record)
        for name, values in features.items():
            kind = "float_list" if values.dtype.kind == "f" else "int64_list"
            assert list(getattr(example.features.feature[name], kind).value) == values[row].tolist(), name
            np.testing.assert_array_equal(decoded[name], values[row])


def test_equal_arrays_give_equal_bytes_in_any_batching_and_key_order():
    features = bert_features(20)
    whole = tfexample.encode_examples(features)
    shuffled = {name: features[name].astype(features[name].dtype, order="F") for name in reversed(features)}
    parts = [tfexample.encode_examples({n: v[i : i + 7] for n, v in shuffled.items()}) for i in (0, 7, 14)]
    assert whole == [*parts[0], *parts[1], *parts[2]]


@pytest.mark.parametrize(
    "features",
    [
        {"a": np.zeros((2, 3)), "b": np.zeros((3, 3))},
        {"a": np.zeros(3)},
        {"a": np.array([["text"]])},
        {},
    ],
)
def test_unusable_arrays_are_refused(features):
    with pytest.raises(ValueError, match="feature"):
        tfexample.encode_examples(features)


def test_tensorflow_reads_our_shard_and_we_read_tensorflows(tmp_path: Path):
    import tensorflow as tf

    features = bert_features(2500)
    records = tfexample.encode_examples(features)
    ours = tmp_path / "shard-00000-of-00001.tfrecord"
    entry = shards.write_records(ours, iter(records))
    assert [r.numpy() for r in tf.data.TFRecordDataset([str(ours)])] == records
    theirs = tmp_path / "theirs.tfrecord"
    with tf.io.TFRecordWriter(str(theirs)) as writer:
        for record in records:
            writer.write(record)
    assert theirs.read_bytes() == ours.read_bytes()
    assert list(shards.read_records(theirs)) == records
    scanned = shards.scan_shard(theirs)
    for found in (entry, scanned):
        assert (found.records, found.bytes) == (2500, ours.stat().st_size)
        assert found.crc32c == google_crc32c.value(ours.read_bytes())
        assert found.lengths.tolist() == [len(r) for r in records]
        assert found.crcs.tolist() == [google_crc32c.value(r) for r in records]
        ids = np.concatenate([features["input_ids"].ravel(), features["masked_lm_ids"].ravel()])
        assert id_range(found) == (ids.min(), ids.max())
        assert {n: (s.kind, s.min_length, s.max_length) for n, s in found.features.items()} == {
            n: ("float" if v.dtype.kind == "f" else "int64", v.shape[1], v.shape[1]) for n, v in features.items()
        }
    assert not list(tmp_path.glob(".*")), "temporary files left behind"


def test_scan_understands_foreign_encodings(tmp_path: Path):
    """Unpacked lists, other feature orders, several orders in one file, extra features: same summary."""
    features = bert_features(40)
    names = list(features)
    records = []
    for row in range(40):
        match row % 4:
            case 0:
                records.append(tf_example(rows(features, row), packed=False))
            case 1:
                records.append(tf_example(rows(features, row), packed=False, order=names[::-1]))
            case 2:
                records.append(tf_example(rows(features, row)))
            case 3:
                rotated = {n: features[n][row : row + 1] for n in names}
                records += tfexample.encode_examples(rotated)
    plain = shards.write_records(tmp_path / "a.tfrecord", tfexample.encode_examples(features))
    mixed = shards.write_records(tmp_path / "b.tfrecord", records)
    assert mixed.features == plain.features
    assert id_range(mixed) == id_range(plain) == (0, id_range(plain)[1])
    batch = tfexample.BatchDecoder({name: values.shape[1] for name, values in features.items()})(records)
    for name, values in features.items():
        np.testing.assert_array_equal(batch[name], values)


def test_records_of_a_known_layout_are_not_parsed_again():
    layout, records = tfexample._Layout(), tfexample.encode_examples(bert_features(4))
    for record in records:
        layout.learn(record, tfexample.parse_example(record))
    for record in records:
        values = [value for _, value in tfexample.parse_example(record).values()]
        assert [[(10, start, end)] for start, end in layout.spans(record)] == values


def test_features_of_equal_shape_in_another_order_are_told_apart(tmp_path: Path):
    small, large = np.arange(30).reshape(10, 3), 60 + np.arange(30).reshape(10, 3)
    records = []
    for row in range(10):
        one = {"ab": small[row : row + 1], "cd": large[row : row + 1]}
        swapped = tfexample.encode_examples({"ab": one["cd"], "cd": one["ab"]})[0]
        other_order = swapped.replace(b"ab", b"--").replace(b"cd", b"ab").replace(b"--", b"cd")
        records.append(other_order if row % 2 else tfexample.encode_examples(one)[0])
    found = shards.write_records(tmp_path / "a.tfrecord", records).features
    assert (found["ab"].min_value, found["ab"].max_value) == (0, 29)
    assert (found["cd"].min_value, found["cd"].max_value) == (60, 89)


def test_value_ranges_find_single_odd_records(tmp_path: Path):
    features = bert_features(3000)
    features["input_ids"][1777, 3] = 99_999
    features["masked_lm_ids"] = features["masked_lm_ids"].astype(np.int64)
    features["masked_lm_ids"][2999, 4] = -7
    entry = shards.write_records(tmp_path / "a.tfrecord", tfexample.encode_examples(features))
    assert id_range(entry) == (-7, 99_999)
    shorter = tfexample.encode_examples({n: v[:1, : v.shape[1] // 2 + 1] for n, v in features.items()})
    entry = shards.write_records(tmp_path / "b.tfrecord", tfexample.encode_examples(features)[:1200] + shorter)
    assert (entry.features["input_ids"].min_length, entry.features["input_ids"].max_length) == (17, 32)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path):
    path = tmp_path / "a.tfrecord"
    shards.write_records(path, tfexample.encode_examples(bert_features(3)))
    before = path.read_bytes()

    def records():
        yield from tfexample.encode_examples(bert_features(2000))
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        shards.write_records(path, records())
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.tfrecord"]


def make_folder(folder: Path, counts=(5, 0, 7)) -> shards.ShardIndex:
    folder.mkdir(exist_ok=True)
    entries = [
        shards.write_records(
            folder / f"shard-{i:05d}-of-{len(counts):05d}.tfrecord",
            tfexample.encode_examples(bert_features(n, seed=i)) if n else [],
        )
        for i, n in enumerate(counts)
    ]
    return shards.write_index(folder, reversed(entries))


def test_index_roundtrip_equals_a_scan_of_the_files(tmp_path: Path):
    made = make_folder(tmp_path)
    first_bytes = (tmp_path / shards.INDEX_NAME).read_bytes()
    for index in (made, shards.read_index(tmp_path), shards.index_folder(tmp_path)):
        assert index.records == 12
        assert [e.records for e in index.entries] == [5, 0, 7]
        assert [id_range(e) is None for e in index.entries] == [False, True, False]
        assert index.id_range == made.id_range
        for ours, original in zip(index.entries, made.entries, strict=True):
            assert (ours.name, ours.bytes, ours.crc32c) == (original.name, original.bytes, original.crc32c)
            assert ours.features == original.features
            np.testing.assert_array_equal(ours.lengths, original.lengths)
            np.testing.assert_array_equal(ours.crcs, original.crcs)
            assert offsets_of(ours)[-1] == ours.bytes
    assert (tmp_path / shards.INDEX_NAME).read_bytes() == first_bytes


def test_every_flipped_bit_and_every_truncation_of_the_index_is_found(tmp_path: Path):
    make_folder(tmp_path)
    path = tmp_path / shards.INDEX_NAME
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in [*range(24), *rng.integers(0, len(whole), 60).tolist(), len(whole) - 1]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"damaged.*bert-data index"):
            shards.read_index(tmp_path)
        path.write_bytes(whole[:at])
        with pytest.raises(ValueError, match=r"damaged.*bert-data index"):
            shards.read_index(tmp_path)
    path.write_bytes(whole)
    assert shards.read_index(tmp_path).records == 12


def test_index_refusals_name_the_remedy(tmp_path: Path):
    make_folder(tmp_path / "a")
    (tmp_path / "a" / "new.tfrecord").write_bytes(b"")
    with pytest.raises(ValueError, match=r"new\.tfrecord is not in the index.*bert-data index"):
        shards.read_index(tmp_path / "a")
    (tmp_path / "a" / shards.INDEX_NAME).unlink()
    with pytest.raises(ValueError, match=r"have no index.*bert-data index"):
        shards.read_index(tmp_path / "a")
    with pytest.raises(ValueError, match="no such folder"):
        shards.read_index(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no TFRecord files"):
        shards.index_folder(tmp_path / "empty")


def test_index_takes_any_file_name_but_only_tfrecords(tmp_path: Path):
    """MLPerf's shards are called part-00000-of-00500."""
    shards.write_records(tmp_path / "part-00000-of-00500", tfexample.encode_examples(bert_features(4)))
    (tmp_path / "README.txt").write_text("not a shard, but longer than twelve bytes")
    (tmp_path / ".part-00001-of-00500.tmp").write_bytes(b"left by a killed writer")
    assert [e.name for e in shards.index_folder(tmp_path).entries] == ["part-00000-of-00500"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:40] + b"\xff" + data[41:], "record 0: its checksum"),
        (lambda data: b"\x01" + data[1:], "record 0: its length"),
        (lambda data: data[:-3], "record 9: the file ends"),
        (lambda data: data + b"abc", "record 10: its length"),
        (lambda data: b"\x1f\x8b" + data, "compressed"),
    ],
)
def test_index_folder_refuses_damaged_shards(tmp_path: Path, damage, message):
    path = tmp_path / "a.tfrecord"
    shards.write_records(path, tfexample.encode_examples(bert_features(10)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        shards.index_folder(tmp_path)
    assert not (tmp_path / shards.INDEX_NAME).exists()


def one_list(content: bytes) -> bytes:
    """An Example with the feature "a", a list with ``content``."""
    entry = b"\x0a\x01a\x12" + write_varint(len(content)) + content
    return b"\x0a" + write_varint(len(entry) + 2) + b"\x0a" + write_varint(len(entry)) + entry


WRONG_LISTS = (
    one_list(b"\x1a\x03\x0a\x01\x80"),  # a varint that goes on after the list ends
    one_list(b"\x12\x07\x0a\x05\x00\x00\x80?!"),  # a float and a byte
    one_list(b"\x1a\x05\x0d\x00\x00\x80?"),  # a float in a list of integers
    one_list(b"\x12\x02\x08\x05"),  # an integer in a list of floats
)


@pytest.mark.parametrize(
    "record", [b"\x0a\x05hello", b"no proto at all", b"\x0a\x7f", b"\x12\x00", b"\xff" * 20, *WRONG_LISTS]
)
def test_payloads_that_are_no_examples_are_refused(tmp_path: Path, record):
    records = tfexample.encode_examples(bert_features(6))
    for position in (0, 4):
        with pytest.raises(ValueError, match=rf"a\.tfrecord.*record {position}: not a tf\.train\.Example"):
            shards.write_records(tmp_path / "a.tfrecord", [*records[:position], record, *records[position:]])


def test_manifest_roundtrip_and_damage(tmp_path: Path):
    assert shards.read_manifest(tmp_path) is None
    manifest = {"tokenizer": "abc", "counts": {"train": 5}, "share": 0.15, "名": [1, None]}
    shards.write_manifest(tmp_path, manifest)
    assert shards.read_manifest(tmp_path) == manifest
    path = tmp_path / shards.MANIFEST_NAME
    whole = path.read_bytes()
    shards.write_manifest(tmp_path, dict(reversed(manifest.items())))
    assert path.read_bytes() == whole
    edited = json.loads(whole) | {"share": 0.2}
    for damaged in (json.dumps(edited).encode(), whole[:-5], b"", b"[]", b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="manifest is damaged"):
            shards.read_manifest(tmp_path)
