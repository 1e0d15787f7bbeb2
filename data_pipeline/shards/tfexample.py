"""Encoder and decoder of tf.train.Example in numpy: batches to bytes, and bytes to features and their summaries.

The messages are Example {features=1}, Features {map<string, Feature> feature=1}, Feature {bytes_list=1,
float_list=2, int64_list=3}, each list {repeated value=1, packed}. TensorFlow is not used, because its import costs
every builder process seconds and hundreds of megabytes.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.io.protobuf import read_fields, read_varint, write_varint

_KIND_TAGS = {"bytes": 0x0A, "float": 0x12, "int64": 0x1A}
_TAG_KINDS = {tag: kind for kind, tag in _KIND_TAGS.items()}
# Tags of the values of a list: packed, or one by one.
_VALUE_TAGS = {"bytes": (0x0A,), "float": (0x0A, 0x0D), "int64": (0x0A, 0x08)}

_Values = list[tuple[int, int, int]]  # (tag, start, end) in a record


def _field(tag: int, body: bytes) -> bytes:
    return bytes((tag,)) + write_varint(len(body)) + body


@functools.lru_cache(maxsize=1 << 16)
def _feature_prefix(name: str, kind: str, size: int) -> bytes:
    """Return the bytes of a feature's map entry that precede ``size`` bytes of packed values."""
    packed = b"\x0a" + write_varint(size)
    listed = bytes((_KIND_TAGS[kind],)) + write_varint(len(packed) + size) + packed
    inner = _field(0x0A, name.encode()) + b"\x12" + write_varint(len(listed) + size) + listed
    return b"\x0a" + write_varint(len(inner) + size) + inner


def _pack_ints(values: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Encode ``values`` [N, K] as varints in row order; return the bytes, and the number of bytes of each row,
    int64[N]."""
    rows, columns = values.shape
    unsigned: np.ndarray = values.astype(np.int64).view(np.uint64)
    top = int(unsigned.max(initial=0))
    if top < 128:
        return unsigned.astype(np.uint8).tobytes(), np.full(rows, columns)
    unsigned = unsigned.astype(np.min_scalar_type(top))
    width = -(-top.bit_length() // 7)
    groups = np.empty((rows, columns, width), np.uint8)
    keep = np.empty((rows, columns, width), bool)
    for group in range(width):
        keep[..., group] = (unsigned > 0) if group else True
        more = unsigned >> 7
        groups[..., group] = (unsigned & 127) | ((more > 0) * np.uint8(128))
        unsigned = more
    return groups[keep].tobytes(), keep.sum((1, 2))


def encode_examples(features: Mapping[str, np.ndarray]) -> list[bytes]:
    """Serialize N examples; return N records.

    ``features`` maps names to arrays [N, K]; integers and bools become int64 lists, and floats become float lists.
    Features are sorted by name, so equal arrays yield equal bytes. Raises ``ValueError`` if an array is not
    two-dimensional, if the arrays differ in N, or if a dtype is not supported.
    """
    sizes = {np.shape(a)[0] if np.ndim(a) == 2 else -1 for a in features.values()}
    if len(sizes) != 1 or -1 in sizes:
        shapes = {name: np.shape(a) for name, a in features.items()}
        raise ValueError(f"features must be arrays [N, K] with the same N; got shapes {shapes}")
    columns = []  # per feature: name, kind, bytes of all rows, end of each row in them
    for name in sorted(features):
        values = np.asarray(features[name])
        if values.dtype.kind in "iub":
            packed, lengths = _pack_ints(values)
            kind = "int64"
        elif values.dtype.kind == "f":
            packed, lengths = values.astype("<f4").tobytes(), np.full(len(values), 4 * values.shape[1])
            kind = "float"
        else:
            raise ValueError(f"feature {name!r} has dtype {values.dtype}; allowed: integers, bool, floats")
        columns.append((name, kind, packed, np.cumsum(lengths).tolist()))
    records = []
    starts = [0] * len(columns)
    for row in range(sizes.pop()):
        parts = []
        for i, (name, kind, packed, ends) in enumerate(columns):
            start, end = starts[i], ends[row]
            parts.append(_feature_prefix(name, kind, end - start))
            parts.append(packed[start:end])
            starts[i] = end
        body = b"".join(parts)
        records.append(b"\x0a" + write_varint(len(body)) + body)
    return records


# ------------------------------------------------------------------ reading


class FeatureSummary(NamedTuple):
    """Summary of one feature over many records.

    ``kind`` is int64, float or bytes; a length is the number of values in a record; the value range covers only
    integers.
    """

    kind: str
    min_length: int
    max_length: int
    min_value: int = 0
    max_value: int = 0

    def merge(self, other: "FeatureSummary") -> "FeatureSummary":
        """Return the summary of both sets of records. Raises ``ValueError`` if the kinds differ."""
        if self.kind != other.kind:
            raise ValueError(f"a feature is {self.kind} in one record and {other.kind} in another")
        picks = zip((min, max, min, max), self[1:], other[1:], strict=True)
        return FeatureSummary(self.kind, *(pick(ours, theirs) for pick, ours, theirs in picks))


def merge_summaries(
    left: dict[str, FeatureSummary] | None, right: dict[str, FeatureSummary]
) -> dict[str, FeatureSummary]:
    """Merge the summaries of two sets of records; a feature that is missing in one set gets ``min_length`` 0."""
    if left is None:
        return right
    absent = {n: FeatureSummary(s.kind, 0, 0) for n, s in (left | right).items()}
    return {n: left.get(n, absent[n]).merge(right.get(n, absent[n])) for n in sorted(absent)}


def parse_example(record: bytes) -> dict[str, tuple[str, _Values]]:
    """Locate the features of one serialized tf.train.Example.

    Returns a dict from name to (kind, list of (tag, start, end) of the values). Any valid encoding is accepted:
    packed or not, in any order. Raises ``ValueError`` if ``record`` is not a tf.train.Example.
    """
    features: dict[str, tuple[str, _Values]] = {}
    try:
        for tag, first, last in read_fields(record, 0, len(record)):
            if tag != 0x0A:
                raise ValueError(f"tag {tag} in an Example")
            for _, start, end in read_fields(record, first, last):
                name, kind, values = _parse_feature(record, start, end)
                features[name] = (kind, values)
    except (IndexError, KeyError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"not a tf.train.Example ({error})") from None
    return features


def _parse_feature(record: bytes, start: int, end: int) -> tuple[str, str, _Values]:
    """Parse one entry of the feature map; return (name, kind of the list, (tag, start, end) of the values)."""
    parts = {tag: (a, b) for tag, a, b in read_fields(record, start, end)}
    kind, values = "int64", []
    for tag, a, b in read_fields(record, *parts.get(0x12, (0, 0))):
        kind, values = _TAG_KINDS[tag], read_fields(record, a, b)
        if any(field not in _VALUE_TAGS[kind] for field, _, _ in values):
            raise ValueError(f"a list of kind {kind} has a value with another wire type")
    return record[slice(*parts.get(0x0A, (0, 0)))].decode(), kind, values


def _read_varints(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Decode consecutive varints; return their values, int64[N], and the offset after each varint, int64[N]."""
    octets = np.frombuffer(data, np.uint8)
    if octets.max(initial=0) < 128:
        return octets.astype(np.int64), np.arange(1, len(octets) + 1)
    ends = np.flatnonzero(octets < 128) + 1
    widths = np.diff(ends, prepend=0)
    if len(octets) and (not len(ends) or ends[-1] != len(octets) or widths.max() > 10):
        raise ValueError("not a tf.train.Example (a value extends beyond its list)")
    starts, low_bits = ends - widths, octets & 127
    values = low_bits[starts].astype(np.uint64)
    for group in range(1, int(widths.max(initial=0))):
        longer = np.flatnonzero(widths > group)
        values[longer] |= low_bits[starts[longer] + group].astype(np.uint64) << np.uint64(7 * group)
    return values.view(np.int64), ends


def decode_example(record: bytes) -> dict[str, np.ndarray]:
    """Decode one serialized tf.train.Example to arrays (int64, float32 or object). Training does not use it."""
    features: dict[str, np.ndarray] = {}
    for name, (kind, values) in parse_example(record).items():
        body = [record[start:end] for _, start, end in values]
        if kind == "bytes":
            features[name] = np.array(body, object)
        elif kind == "float":
            features[name] = np.frombuffer(b"".join(body), "<f4")
        else:
            features[name] = _read_varints(b"".join(body))[0]
    return features


def value_bounds(features: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the smallest and largest value of each feature in each record, int64[N, F, 2]; 0 for floats.

    Features are sorted by name. ``features`` is the argument of :func:`encode_examples`.
    """
    columns = [np.asarray(features[name]) for name in sorted(features)]
    pairs = [np.stack([c.min(1), c.max(1)], 1) if c.dtype.kind != "f" else np.zeros((len(c), 2)) for c in columns]
    return np.stack(pairs, 1).astype(np.int64)


def summarize_examples(records: Sequence[bytes], first: int = 0) -> dict[str, FeatureSummary]:
    """Summarize the features of N serialized examples.

    Raises ``ValueError`` if a record is not a tf.train.Example; the message begins with ``record I:``, where I is
    ``first`` plus the index of the record.
    """
    try:
        return _summarize(records)
    except ValueError:
        for row, record in enumerate(records):
            try:
                _summarize([record])
            except ValueError as error:
                raise ValueError(f"record {first + row}: {error}") from None
        raise


def _summarize(records: Sequence[bytes]) -> dict[str, FeatureSummary]:
    summary = {}
    for name, column in sorted(_columns(records, _Layout()).items()):
        lengths, numbers = np.array(column.sizes), np.zeros(0, np.int64)
        if column.kind == "float":
            lengths = column.floats(name)[1]
        elif column.kind == "int64":
            numbers, lengths = column.integers(name)
        fewest = 0 if len(lengths) < len(records) else int(lengths.min())
        least, largest = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
        summary[name] = FeatureSummary(column.kind, fewest, int(lengths.max()), least, largest)
    return summary


class BatchDecoder:
    """Decoder of batches of serialized examples, for one thread. It remembers the layout of the records, so most
    records need no complete parse."""

    def __init__(self, features: Mapping[str, int]) -> None:
        """``features`` maps names to K, the number of values that the feature has in every record."""
        self._features, self._layout = features, _Layout()

    def __call__(self, records: Sequence[bytes]) -> dict[str, np.ndarray]:
        """Return the features of N records: arrays [N, K], int64 or float32, by name.

        Raises ``ValueError`` if a record is not a tf.train.Example, lacks a feature, or has another number of
        values.
        """
        columns, arrays = _columns(records, self._layout), {}
        for name, length in self._features.items():
            column = columns.get(name, _Column("int64", [], []))
            values, lengths = column.floats(name) if column.kind == "float" else column.integers(name)
            if len(lengths) != len(records) or (lengths != length).any():
                raise ValueError(f"feature {name!r} does not have {length} values in every record")
            arrays[name] = values.reshape(len(records), length)
        return arrays


class _Column(NamedTuple):
    """One feature of many records.

    It has, for each record with the feature, the number of bytes of its values (for a list of byte strings, the
    number of strings), and the bytes of all values (none for byte strings).
    """

    kind: str
    sizes: list[int]
    bodies: list[bytes]

    def floats(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of all records, float32[T], and the number of values of each record, int64[N]."""
        sizes = np.array(self.sizes, np.int64)
        if (sizes % 4).any():
            raise ValueError(f"not a tf.train.Example ({name}: a value extends beyond its list)")
        return np.frombuffer(b"".join(self.bodies), "<f4"), sizes // 4

    def integers(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of all records, int64[T], and the number of values of each record, int64[N]."""
        values, ends = _read_varints(b"".join(self.bodies))
        edges = np.cumsum([0, *self.sizes])
        counts = np.searchsorted(ends, edges, side="right")
        if (np.append(0, ends)[counts] != edges).any():
            raise ValueError(f"not a tf.train.Example ({name}: a value extends beyond its list)")
        return values, np.diff(counts)


def _columns(records: Sequence[bytes], layout: "_Layout") -> dict[str, _Column]:
    """Return the features of ``records`` by name. Raises ``ValueError`` if a feature changes its kind."""
    columns: dict[str, _Column] = {}
    for record in records:
        spans = layout.spans(record)
        if spans is not None:
            for (name, kind), (start, end) in zip(layout.features, spans, strict=True):
                column = columns.get(name)
                if column is None or column.kind != kind:
                    column = _column_of(columns, name, kind)
                column.sizes.append(end - start)
                column.bodies.append(record[start:end])
            continue
        features = parse_example(record)
        for name, (kind, values) in features.items():
            column = _column_of(columns, name, kind)
            if kind == "bytes":
                column.sizes.append(len(values))
            else:
                column.sizes.append(sum([end - start for _, start, end in values]))
                column.bodies.extend([record[start:end] for _, start, end in values])
        layout.learn(record, features)
    return columns


def _column_of(columns: dict[str, _Column], name: str, kind: str) -> _Column:
    column = columns.setdefault(name, _Column(kind, [], []))
    if column.kind != kind:
        raise ValueError(f"feature {name!r} is {column.kind} in one record and {kind} in another")
    return column


class _Layout:
    """Bytes that surround the packed values in similar records, such as records of one writer."""

    def __init__(self) -> None:
        self.features: list[tuple[str, str]] = []  # name and kind, in the order of the records
        # For each feature: the first bytes of its entry -> (bytes that precede the values, size of the entry).
        self._entries: list[dict[bytes, tuple[bytes, int]]] = []

    def spans(self, record: bytes) -> list[tuple[int, int]] | None:
        """Return (start, end) of the values of each feature; None if ``record`` differs from the known ones."""
        if not self._entries:
            return None
        at, spans = _body_start(record), []
        for entries in self._entries:
            prefix, size = entries.get(record[at : at + 4], (b"", 0))
            if not prefix or not record.startswith(prefix, at):
                return None
            spans.append((at + len(prefix), at + size))
            at += size
        return spans if at == len(record) else None

    def learn(self, record: bytes, features: Mapping[str, tuple[str, _Values]]) -> None:
        """Remember the layout of a parsed record, if each feature is one list of packed numbers at its end."""
        if any(kind == "bytes" or len(values) != 1 or values[0][0] != 0x0A for kind, values in features.values()):
            return
        found = [(name, kind) for name, (kind, _) in features.items()]
        if found != self.features:
            self.features, self._entries = found, [{} for _ in found]
        at = _body_start(record)
        for entries, (_, ((_, start, end),)) in zip(self._entries, features.values(), strict=True):
            if _entry_end(record, at) != end:
                self.features, self._entries = [], []
                return
            entries[record[at : at + 4]] = (record[at:start], end - at)
            at = end


def _body_start(record: bytes) -> int:
    """Return the offset of the first entry of the feature map; the length of ``record`` if it has another form."""
    if record[:1] != b"\x0a":
        return len(record)
    size, start = read_varint(record, 1)
    return start if start + size == len(record) else len(record)


def _entry_end(record: bytes, at: int) -> int:
    """Return the offset after the entry of the feature map at ``at``; -1 if another field is there."""
    if record[at : at + 1] != b"\x0a":
        return -1
    size, start = read_varint(record, at + 1)
    return start + size
