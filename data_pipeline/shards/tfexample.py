"""tf.train.Example in numpy: whole batches to bytes, and bytes back to the places of each feature's values.

The wire format is protocol buffers' (Example {features=1}, Features {map<string, Feature> feature=1}, Feature
{bytes_list=1, float_list=2, int64_list=3}, each list {repeated value=1, packed}). No TensorFlow here: a builder
process would pay seconds and hundreds of megabytes for a few varints.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_KIND_TAGS = {"bytes": 0x0A, "float": 0x12, "int64": 0x1A}
_TAG_KINDS = {tag: kind for kind, tag in _KIND_TAGS.items()}


def varint(value: int) -> bytes:
    """``value`` (0 or more) as a protocol-buffer varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(tag: int, body: bytes) -> bytes:
    return bytes((tag,)) + varint(len(body)) + body


@functools.lru_cache(maxsize=1 << 16)
def _feature_prefix(name: str, kind: str, size: int) -> bytes:
    """All bytes of a feature's map entry that precede ``size`` bytes of packed values."""
    packed = b"\x0a" + varint(size)
    listed = bytes((_KIND_TAGS[kind],)) + varint(len(packed) + size) + packed
    inner = _field(0x0A, name.encode()) + b"\x12" + varint(len(listed) + size) + listed
    return b"\x0a" + varint(len(inner) + size) + inner


def _pack_ints(values: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Varints of ``values`` [N, K] in row order, and the bytes that each row takes, int64[N]."""
    rows, columns = values.shape
    unsigned = values.astype(np.int64).view(np.uint64)
    top = int(unsigned.max(initial=0))
    if top < 128:
        return unsigned.astype(np.uint8).tobytes(), np.full(rows, columns)
    if top < 1 << 32:
        unsigned = unsigned.astype(np.uint32)
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
    """Serialize N examples at once.

    ``features`` maps names to arrays [N, K]: integers and bools become int64 lists, floats float lists. Features
    are written sorted by name, so equal arrays give equal bytes. Returns N records. ``ValueError`` for arrays
    that are not two-dimensional, disagree in N or hold another dtype.
    """
    sizes = {np.shape(a)[0] if np.ndim(a) == 2 else None for a in features.values()}
    if len(sizes) != 1 or None in sizes:
        shapes = {name: np.shape(a) for name, a in features.items()}
        raise ValueError(f"features must be arrays [N, K] with one N, not {shapes}")
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
        records.append(b"\x0a" + varint(len(body)) + body)
    return records


# ------------------------------------------------------------------ bytes back to features


@dataclass(frozen=True)
class FeatureSummary:
    """One feature over many records: kind (int64, float, bytes), fewest and most values, least and largest int."""

    kind: str
    min_length: int
    max_length: int
    min_value: int = 0
    max_value: int = 0

    def merge(self, other: "FeatureSummary") -> "FeatureSummary":
        """Summary of both sets of records; ``ValueError`` when the kinds differ."""
        if self.kind != other.kind:
            raise ValueError(f"a feature is {self.kind} in one record and {other.kind} in another")
        return FeatureSummary(
            kind=self.kind,
            min_length=min(self.min_length, other.min_length),
            max_length=max(self.max_length, other.max_length),
            min_value=min(self.min_value, other.min_value),
            max_value=max(self.max_value, other.max_value),
        )


def merge_summaries(
    left: dict[str, FeatureSummary] | None, right: dict[str, FeatureSummary]
) -> dict[str, FeatureSummary]:
    """Merge the summaries of two sets of records; a feature that one set lacks has ``min_length`` 0."""
    if left is None:
        return right
    absent = {n: FeatureSummary(s.kind, 0, 0) for n, s in (left | right).items()}
    return {n: left.get(n, absent[n]).merge(right.get(n, absent[n])) for n in sorted(absent)}


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("a varint that the record's end cuts off")
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than ten bytes")


def _fields(data: bytes, at: int, end: int) -> list[tuple[int, int, int]]:
    """Fields of a message as (tag, start, end) of their bodies; ``ValueError`` when they leave the message."""
    fields = []
    while at < end:
        tag, start = _read_varint(data, at) if data[at] > 127 else (data[at], at + 1)
        wire = tag & 7
        if wire == 2:
            size, start = _read_varint(data, start) if data[start] > 127 else (data[start], start + 1)
            at = start + size
        elif wire == 0:
            _, at = _read_varint(data, start)
        elif wire in (1, 5):
            at = start + (8 if wire == 1 else 4)
        else:
            raise ValueError(f"wire type {wire}")
        if at > end:
            raise ValueError("a field that ends after its message")
        fields.append((tag, start, at))
    return fields


def parse_example(record: bytes) -> dict[str, tuple[str, list[tuple[int, int, int]]]]:
    """Features of one serialized tf.train.Example: name -> (kind, pieces (tag, start, end) of its list).

    Any legal encoding is understood: packed or not, any order. ``ValueError`` for bytes that are no Example.
    """
    features: dict[str, tuple[str, list[tuple[int, int, int]]]] = {}
    try:
        for tag, start, end in _fields(record, 0, len(record)):
            if tag != 0x0A:
                raise ValueError(f"tag {tag} in an Example")
            for _, entry_start, entry_end in _fields(record, start, end):
                parts = {t: (a, b) for t, a, b in _fields(record, entry_start, entry_end)}
                key, value = parts.get(0x0A, (0, 0)), parts.get(0x12, (0, 0))
                kind, pieces = "int64", []
                for kind_tag, a, b in _fields(record, *value):
                    kind, pieces = _TAG_KINDS[kind_tag], _fields(record, a, b)
                features[record[slice(*key)].decode()] = (kind, pieces)
    except (IndexError, KeyError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"not a tf.train.Example ({error})") from None
    return features


def _read_varints(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Decode varints that follow each other: their values int64[N], and where each ends int64[N]."""
    octets = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(octets < 128) + 1
    starts = np.concatenate([[0], ends[:-1]])
    widths = ends - starts
    if len(octets) and (not len(ends) or ends[-1] != len(octets) or widths.max() > 10):
        raise ValueError("not a tf.train.Example (a value that ends after its list)")
    values = np.zeros(len(ends), np.uint64)
    for group in range(int(widths.max(initial=0))):
        longer = widths > group
        part = octets[starts[longer] + group].astype(np.uint64)
        values[longer] |= (part & np.uint64(127)) << np.uint64(7 * group)
    return values.view(np.int64), ends


def decode_example(record: bytes) -> dict[str, np.ndarray]:
    """One serialized tf.train.Example as arrays (int64, float32 or object); for tools, not for the input path."""
    features: dict[str, np.ndarray] = {}
    for name, (kind, pieces) in parse_example(record).items():
        body = [record[start:end] for _, start, end in pieces]
        if kind == "bytes":
            features[name] = np.array(body, object)
        elif kind == "float":
            features[name] = np.frombuffer(b"".join(body), "<f4")
        else:
            features[name] = _read_varints(b"".join(body))[0]
    return features


def value_bounds(features: Mapping[str, np.ndarray]) -> np.ndarray:
    """Least and largest value of each record's features in name order, int64[N, F, 2]; 0 for floats.

    ``features`` are as :func:`encode_examples` takes them.
    """
    columns = [np.asarray(features[name]) for name in sorted(features)]
    pairs = [np.stack([c.min(1), c.max(1)], 1) if c.dtype.kind != "f" else np.zeros((len(c), 2)) for c in columns]
    return np.stack(pairs, 1).astype(np.int64)


def summarize_examples(records: Sequence[bytes], first: int = 0) -> dict[str, FeatureSummary]:
    """Summary of N serialized examples, feature by feature.

    ``ValueError`` that begins with ``record I:`` (counted from ``first``) for one that is no tf.train.Example.
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
    columns: dict[str, tuple[str, list[int], list[bytes]]] = {}  # kind, number or bytes of values, int64 values
    for record in records:
        for name, (kind, pieces) in parse_example(record).items():
            known, sizes, bodies = columns.setdefault(name, (kind, [], []))
            if kind != known:
                raise ValueError(f"feature {name!r} is {known} in one record and {kind} in another")
            sizes.append(len(pieces) if kind == "bytes" else sum(end - start for _, start, end in pieces))
            if kind == "int64":
                bodies += [record[start:end] for _, start, end in pieces]
    summary = {}
    for name, (kind, sizes, bodies) in sorted(columns.items()):
        lengths, values = np.array(sizes), np.zeros(1, np.int64)
        if kind == "float":
            lengths = lengths // 4
        elif kind == "int64":
            values, ends = _read_varints(b"".join(bodies))
            edges = np.cumsum([0, *sizes])
            if not np.isin(edges[1:], [0, *ends]).all():
                raise ValueError(f"not a tf.train.Example ({name}: a value that ends after its list)")
            lengths = np.diff(np.searchsorted(ends, edges, side="right"))
        fewest = 0 if len(sizes) < len(records) else int(lengths.min())
        least, largest = (int(values.min()), int(values.max())) if values.size else (0, 0)
        summary[name] = FeatureSummary(kind, fewest, int(lengths.max()), least, largest)
    return summary
