"""tf.train.Example in numpy: whole batches to bytes, and bytes back to where each feature's values lie.

The wire format is protocol buffers' (Example {features=1}, Features {map<string, Feature> feature=1}, Feature
{bytes_list=1, float_list=2, int64_list=3}, each list {repeated value=1, packed}). No TensorFlow here: a builder
process would pay seconds and hundreds of megabytes for a few varints.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_KIND_TAGS = {"bytes": 0x0A, "float": 0x12, "int64": 0x1A}
_TAG_KINDS = {tag: kind for kind, tag in _KIND_TAGS.items()}
# Different orders of features that one chunk may hold before its records are walked one by one.
_MOST_TEMPLATES = 4


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
    """Serialise N examples at once.

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
    """Summaries over both sets of records; a feature that one set lacks has ``min_length`` 0."""
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
        tag, at = _read_varint(data, at)
        wire = tag & 7
        if wire == 0:
            start, (_, at) = at, _read_varint(data, at)
        elif wire in (1, 5):
            start, at = at, at + (8 if wire == 1 else 4)
        elif wire == 2:
            size, start = _read_varint(data, at)
            at = start + size
        else:
            raise ValueError(f"wire type {wire}")
        if at > end:
            raise ValueError("a field that ends after its message")
        fields.append((tag, start, at))
    return fields


def parse_example(record: bytes) -> dict[str, tuple[str, list[tuple[int, int, int]]]]:
    """Features of one serialised tf.train.Example: name -> (kind, pieces (tag, start, end) of its list).

    Any legal encoding is understood: packed or not, any order. ``ValueError`` for bytes that are no Example.
    """
    found: dict[str, tuple[str, list[tuple[int, int, int]]]] = {}
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
                found[record[slice(*key)].decode()] = (kind, pieces)
    except (IndexError, KeyError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"not a tf.train.Example ({error})") from None
    return found


def feature_values(record: bytes, kind: str, pieces: Sequence[tuple[int, int, int]]) -> list:
    """Values of a feature found by ``parse_example``: ints, floats or bytes."""
    values: list = []
    for tag, start, end in pieces:
        if kind == "bytes":
            values.append(record[start:end])
        elif kind == "float":
            values.extend(np.frombuffer(record[start:end], "<f4").tolist())
        elif tag & 7 == 0:
            values.append(_signed(_read_varint(record, start)[0]))
        else:
            at = start
            while at < end:
                value, at = _read_varint(record, at)
                values.append(_signed(value))
            if at != end:
                raise ValueError("a value that ends after its list")
    return values


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def decode_example(record: bytes) -> dict[str, np.ndarray]:
    """One serialised tf.train.Example as arrays (int64, float32 or object); for tools, not for the input path."""
    dtypes = {"int64": np.int64, "float": np.float32, "bytes": object}
    return {
        name: np.array(feature_values(record, kind, pieces), dtypes[kind])
        for name, (kind, pieces) in parse_example(record).items()
    }


def _summarise_one(record: bytes) -> dict[str, FeatureSummary]:
    summary = {}
    for name, (kind, pieces) in parse_example(record).items():
        try:
            values = feature_values(record, kind, pieces)
        except ValueError as error:
            raise ValueError(f"not a tf.train.Example ({name}: {error})") from None
        least, largest = (min(values), max(values)) if kind == "int64" and values else (0, 0)
        summary[name] = FeatureSummary(kind, len(values), len(values), least, largest)
    return summary


class _Spans:
    """The records of a chunk walked in step: one cursor per record over the joined bytes."""

    def __init__(self, records: Sequence[bytes]) -> None:
        self.bytes = np.frombuffer(b"".join(records) + bytes(16), np.uint8)
        ends = np.cumsum([len(r) for r in records])
        self.starts, self.ends = ends - [len(r) for r in records], ends
        is_last = self.bytes < 128  # last byte of a varint
        self.varint_ends = np.flatnonzero(is_last)
        self.varints_before = np.concatenate([[0], np.cumsum(is_last)])

    def varint(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of up to three bytes at ``at``; longer ones come out wrong and fail the checks that follow."""
        first = self.bytes[at].astype(np.int64)
        if first.max(initial=0) < 128:
            return first, at + 1
        second, third = (self.bytes[np.minimum(at + i, len(self.bytes) - 1)].astype(np.int64) for i in (1, 2))
        long, longer = first > 127, (first > 127) & (second > 127)
        value = (first & 127) | np.where(long, (second & 127) << 7, 0) | np.where(longer, third << 14, 0)
        return value, at + 1 + long + longer

    def follow(self, rows: np.ndarray, template: dict) -> tuple[np.ndarray, dict[str, tuple]]:
        """Which of ``rows`` have the template's features in its order, packed; and the spans of their values."""
        limit = len(self.bytes) - 1
        good = np.ones(len(rows), bool)
        at, end = self.starts[rows], self.ends[rows]

        def expect(literal: bytes) -> None:
            nonlocal at
            for byte in literal:
                good[self.bytes[np.minimum(at, limit)] != byte] = False
                at = at + 1

        def length() -> np.ndarray:
            nonlocal at
            value, at = self.varint(np.minimum(at, limit))
            return at + value

        expect(b"\x0a")
        good[length() != end] = False
        spans = {}
        for name, (kind, _) in template.items():
            expect(b"\x0a")
            entry_end = length()
            expect(_field(0x0A, name.encode()) + b"\x12")
            good[length() != entry_end] = False
            expect(bytes((_KIND_TAGS[kind],)))
            good[length() != entry_end] = False
            expect(b"\x0a")
            good[length() != entry_end] = False
            whole = (
                (entry_end - at) % 4 == 0 if kind == "float" else self.bytes[np.minimum(entry_end, limit) - 1] < 128
            )
            good[~whole] = False
            spans[name] = (kind, at, entry_end)
            at = entry_end
        good[at != end] = False
        return good, spans

    def summarise(self, kind: str, start: np.ndarray, end: np.ndarray) -> FeatureSummary:
        """Counts and value range of one packed feature over the records whose values lie in [start, end)."""
        if kind == "float":
            lengths = (end - start) // 4
            return FeatureSummary(kind, int(lengths.min()), int(lengths.max()))
        first, last = self.varints_before[start], self.varints_before[end]
        lengths = last - first
        total = int(lengths.sum())
        if total == 0:
            return FeatureSummary(kind, 0, 0)
        which = np.repeat(first - (np.cumsum(lengths) - lengths), lengths) + np.arange(total)
        value_end = self.varint_ends[which]
        value_start = np.empty(total, np.int64)
        value_start[1:] = value_end[:-1] + 1
        value_start[(np.cumsum(lengths) - lengths)[lengths > 0]] = start[lengths > 0]
        width = value_end - value_start + 1
        values = np.zeros(total, np.uint64)
        for group in range(min(int(width.max()), 10)):
            more = width > group
            byte = self.bytes[value_start[more] + group].astype(np.uint64)
            values[more] |= (byte & np.uint64(127)) << np.uint64(7 * group)
        signed = values.view(np.int64)
        return FeatureSummary(kind, int(lengths.min()), int(lengths.max()), int(signed.min()), int(signed.max()))


def summarise_examples(records: Sequence[bytes], first: int = 0) -> dict[str, FeatureSummary]:
    """What N serialised examples hold, feature by feature.

    ``ValueError`` that begins with ``record I:`` (counted from ``first``) for one that is no tf.train.Example.
    """
    spans = _Spans(records)
    open_rows = np.arange(len(records))
    summary: dict[str, FeatureSummary] | None = None
    for _ in range(_MOST_TEMPLATES):
        if not len(open_rows):
            break
        template = _numbered(parse_example, records, int(open_rows[0]), first)
        if not all(kind != "bytes" and len(p) == 1 and p[0][0] == 0x0A for kind, p in template.values()):
            break
        good, found = spans.follow(open_rows, template)
        if not good[0]:
            break
        summary = merge_summaries(
            summary, {n: spans.summarise(kind, a[good], b[good]) for n, (kind, a, b) in sorted(found.items())}
        )
        open_rows = open_rows[~good]
    for row in open_rows.tolist():
        summary = merge_summaries(summary, _numbered(_summarise_one, records, row, first))
    return summary or {}


def _numbered(parse: Callable[[bytes], dict], records: Sequence[bytes], row: int, first: int) -> dict:
    try:
        return parse(records[row])
    except ValueError as error:
        raise ValueError(f"record {first + row}: {error}") from None
