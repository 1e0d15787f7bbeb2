"""The on-disk format: TFRecord shards, the index of a shard folder, and its manifest.

A shard is a TFRecord file of serialized tf.train.Examples with google-research/bert's feature names. The index (one
file per folder, ``records.index``) lists the name, number of records, size, crc32c, feature shapes and value ranges
of each shard, and the length and crc32c of each record, so any record can be read with one seek and any damaged
byte is detected. The manifest (``manifest.json``) records the settings and counts of the build. None of these files
contains times, paths or worker counts; all are written atomically.
"""

import functools
import json
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from bert_jax.io.files import local_copy, whole_file, write_whole
from bert_jax.io.storage import Location, location
from data_pipeline.shards.tfexample import FeatureSummary, merge_summaries, summarize_examples

INDEX_NAME = "records.index"
MANIFEST_NAME = "manifest.json"
HEADER_BYTES = 12  # uint64 length, uint32 masked crc32c of the length
FOOTER_BYTES = 4  # uint32 masked crc32c of the payload
FRAME_BYTES = HEADER_BYTES + FOOTER_BYTES
ID_FEATURES = ("input_ids", "input_word_ids", "masked_lm_ids")

_MAGIC = b"BERTIDX1"
_FIXED_BYTES = 20  # magic, uint32 crc32c of all that follows, uint64 bytes of the JSON header
_MASK_DELTA = 0xA282EAD8
_CHUNK = 1024  # records summarized together
_LARGEST_RECORD = 1 << 30


def _mask_crc(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def mask_crcs(crcs: np.ndarray) -> np.ndarray:
    """Convert crc32c values uint32[N] to the masked form that TFRecord files contain, uint32[N]."""
    crcs = crcs.astype(np.uint32)
    return (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(_MASK_DELTA)


def frame_headers(lengths: np.ndarray) -> np.ndarray:
    """Return the 12 bytes before each payload, uint8[N, 12], for payload lengths [N] in bytes."""
    distinct, inverse = np.unique(lengths, return_inverse=True)
    table = b"".join(map(_frame_header, distinct.tolist()))
    return np.frombuffer(table, np.uint8).reshape(-1, HEADER_BYTES)[inverse]


@functools.lru_cache(4096)
def _frame_header(length: int) -> bytes:
    packed = struct.pack("<Q", length)
    return packed + struct.pack("<I", _mask_crc(google_crc32c.value(packed)))


@dataclass(frozen=True, eq=False)
class ShardEntry:
    """The index entry of one shard; ``lengths`` (bytes) and ``crcs`` of the payloads are uint32[records]."""

    name: str
    bytes: int
    crc32c: int
    lengths: np.ndarray
    crcs: np.ndarray
    features: dict[str, FeatureSummary]

    @property
    def records(self) -> int:
        """Number of records."""
        return len(self.lengths)

    @property
    def facts(self) -> dict[str, Any]:
        """Name, number of records, size in bytes and checksum, for an index or a manifest."""
        return {"name": self.name, "records": self.records, "bytes": self.bytes, "crc32c": self.crc32c}


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The index of a folder: its shards in file-name order."""

    folder: Location
    entries: tuple[ShardEntry, ...]

    @property
    def records(self) -> int:
        """Number of records in all shards."""
        return sum(entry.records for entry in self.entries)

    @property
    def features(self) -> dict[str, FeatureSummary]:
        """Summary of every feature over all records."""
        merged: dict[str, FeatureSummary] | None = None
        for entry in self.entries:
            if entry.records:
                merged = merge_summaries(merged, entry.features)
        return merged or {}

    @property
    def id_range(self) -> tuple[int, int] | None:
        """Smallest and largest token id in the folder; None if no feature contains token ids."""
        features = self.features
        found = [features[name] for name in ID_FEATURES if name in features]
        return (min(f.min_value for f in found), max(f.max_value for f in found)) if found else None


# ------------------------------------------------------------------ writing


class _Scanner:
    """Builder of a ShardEntry from the records of a file, chunk by chunk.

    ``bounds`` lists arrays int64[N, F, 2] with the smallest and largest value of each feature, sorted by name, over
    all records; it is read when the entry is built. If it is given, only the first record is parsed, and each
    feature must have the same length in all records.
    """

    def __init__(self, path: Location, bounds: Sequence[np.ndarray] | None = None) -> None:
        self.path, self.bounds = path, bounds
        self.lengths, self.crcs = array("I"), array("I")  # 4 bytes per value; a list would need 36
        self.bytes = self.crc32c = 0
        self.features: dict[str, FeatureSummary] | None = None

    def add(self, records: Sequence[bytes], crcs: Sequence[int], framed: bytes) -> None:
        """Add the next records, the checksums of their payloads, and their bytes in the file (``framed``)."""
        if not records:
            return
        try:
            if self.bounds is None:
                summary = summarize_examples(records, first=len(self.lengths))
                self.features = merge_summaries(self.features, summary)
            elif self.features is None:
                self.features = summarize_examples(records[:1])
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        self.lengths.extend(map(len, records))
        self.crcs.extend(crcs)
        self.crc32c = google_crc32c.extend(self.crc32c, framed)
        self.bytes += len(framed)

    def entry(self) -> ShardEntry:
        """Return the index entry of all records so far."""
        features = dict(sorted((self.features or {}).items()))
        if self.bounds and features:
            pairs = np.concatenate(self.bounds)
            least, largest = pairs[:, :, 0].min(0).tolist(), pairs[:, :, 1].max(0).tolist()
            for name, low, high in zip(features, least, largest, strict=True):
                features[name] = features[name]._replace(min_value=low, max_value=high)
        return ShardEntry(
            name=self.path.name,
            bytes=self.bytes,
            crc32c=self.crc32c,
            lengths=np.array(self.lengths, np.uint32),
            crcs=np.array(self.crcs, np.uint32),
            features=features,
        )


def write_records(path: Path, records: Iterable[bytes], bounds: Sequence[np.ndarray] | None = None) -> ShardEntry:
    """Write serialized examples as one TFRecord shard, atomically; return its index entry.

    With ``bounds`` (arrays of :func:`data_pipeline.shards.tfexample.value_bounds` for all records, complete after
    the last record), only the first record is parsed.
    """
    scanner = _Scanner(path, bounds)
    stream = iter(records)
    with whole_file(path) as part, part.open("wb") as file:
        while chunk := list(islice(stream, _CHUNK)):
            crcs = [google_crc32c.value(record) for record in chunk]
            headers = frame_headers(np.array(list(map(len, chunk))))
            footers = mask_crcs(np.array(crcs, np.uint32)).astype("<u4")
            rows = zip(headers, chunk, footers, strict=True)
            framed = b"".join(part for h, record, f in rows for part in (h.tobytes(), record, f.tobytes()))
            scanner.add(chunk, crcs, framed)
            file.write(framed)
    return scanner.entry()


# ------------------------------------------------------------------ reading a file from end to end


def _read_frames(path: Location) -> Iterator[tuple[bytes, int, bytes]]:
    """Yield (payload, its crc32c, frame) of each record. Raises ``ValueError`` at the first damaged record."""
    number = 0

    def damaged(what: str) -> ValueError:
        return ValueError(f"{path}: record {number}: {what}; the shard is damaged; build or download it again")

    with path.open("rb", buffering=1 << 20) as file:
        while header := file.read(HEADER_BYTES):
            if header[:2] == b"\x1f\x8b" and number == 0:
                raise ValueError(f"{path}: the shard is compressed; decompress it first (gunzip)")
            length = int.from_bytes(header[:8], "little")
            if len(header) < HEADER_BYTES or header != _frame_header(length) or length > _LARGEST_RECORD:
                raise damaged("its length or the checksum of its length is wrong")
            rest = file.read(length + FOOTER_BYTES)
            if len(rest) < length + FOOTER_BYTES:
                raise damaged("the file ends inside this record")
            payload = rest[:length]
            crc = google_crc32c.value(payload)
            if rest[length:] != _mask_crc(crc).to_bytes(4, "little"):
                raise damaged("its checksum is wrong")
            yield payload, crc, header + rest
            number += 1


def read_records(path: Location) -> Iterator[bytes]:
    """Yield the payloads of a shard in file order. Raises ``ValueError`` at the first damaged record."""
    return (payload for payload, _, _ in _read_frames(path))


def scan_shard(path: Location, bounds: Sequence[np.ndarray] | None = None) -> ShardEntry:
    """Return the index entry of an existing shard. Raises ``ValueError`` at the first damaged record."""
    scanner, frames = _Scanner(path, bounds), _read_frames(path)
    while chunk := list(islice(frames, _CHUNK)):
        payloads, crcs, framed = zip(*chunk, strict=True)
        scanner.add(payloads, crcs, b"".join(framed))
    return scanner.entry()


# ------------------------------------------------------------------ index


def write_index(folder: Location, entries: Iterable[ShardEntry]) -> ShardIndex:
    """Write ``records.index`` for ``entries``, sorted by name; equal shards yield equal bytes."""
    ordered = tuple(sorted(entries, key=lambda entry: entry.name))
    shards = [
        entry.facts | {"features": {name: summary._asdict() for name, summary in sorted(entry.features.items())}}
        for entry in ordered
    ]
    header = json.dumps({"shards": shards}, sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 4)
    body = [struct.pack("<Q", len(header)), header]
    for column in ("lengths", "crcs"):
        body += [getattr(entry, column).astype("<u4").tobytes() for entry in ordered]
    data = b"".join(body)
    write_whole(folder / INDEX_NAME, _MAGIC + struct.pack("<I", google_crc32c.value(data)) + data)
    return ShardIndex(folder, ordered)


def read_index(folder: Location | str) -> ShardIndex:
    """Read the index of ``folder``.

    Raises ``ValueError`` (one line, with the command that writes an index) if the index is missing or damaged, or
    if the folder contains TFRecords that the index does not list.
    """
    folder = location(folder)
    path = folder / INDEX_NAME
    remedy = f"run: bert-data index {folder}"
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder of shards")
    if not path.is_file():
        raise ValueError(f"{folder}: the shards have no index ({INDEX_NAME}); {remedy}")
    local = local_copy(path)
    if not _index_is_whole(local):
        raise ValueError(f"{path}: the index is damaged; check the shards, then {remedy}")
    # Memory-mapped, because eight bytes per record are gigabytes on every host for a corpus of the size of C4.
    data = np.memmap(local, np.uint8, "r")
    (header_bytes,) = struct.unpack_from("<Q", data.data, _FIXED_BYTES - 8)
    shards = json.loads(data[_FIXED_BYTES : _FIXED_BYTES + header_bytes].tobytes())["shards"]
    lengths, crcs = np.asarray(data)[_FIXED_BYTES + header_bytes :].view("<u4").reshape(2, -1)
    borders = np.cumsum([0, *(shard["records"] for shard in shards)]).tolist()
    entries = []
    for shard, (start, end) in zip(shards, pairwise(borders), strict=True):
        features = {name: FeatureSummary(**summary) for name, summary in shard["features"].items()}
        columns = lengths[start:end], crcs[start:end]
        entries.append(ShardEntry(shard["name"], shard["bytes"], shard["crc32c"], *columns, features))
    unlisted = sorted({p.name for p in folder.glob("[!.]*.tfrecord*")} - {e.name for e in entries})
    if unlisted:
        raise ValueError(f"{folder}: {unlisted[0]} is not in the index ({len(unlisted)} such file(s)); {remedy}")
    return ShardIndex(folder, tuple(entries))


def _index_is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        fixed = file.read(_FIXED_BYTES)
        if len(fixed) < _FIXED_BYTES or fixed[:8] != _MAGIC:
            return False
        checksum = google_crc32c.value(fixed[12:])
        while piece := file.read(1 << 24):
            checksum = google_crc32c.extend(checksum, piece)
    return checksum == struct.unpack_from("<I", fixed, 8)[0]


def index_folder(folder: Location | str) -> ShardIndex:
    """Scan every TFRecord in ``folder`` and write the index (the ``bert-data index DIR`` command).

    Shards are the files with ``.tfrecord`` in their names and all other files that begin with the header of a
    TFRecord. Raises ``ValueError`` if a shard is damaged, because an index must not list damaged records.
    """
    folder = location(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    held: Iterable[Location] = folder.iterdir()
    paths = [p for p in sorted(held) if p.is_file() and _looks_like_shard(p)]
    if not paths:
        raise ValueError(f"{folder}: no TFRecord files; name the folder of the shards")
    return write_index(folder, [scan_shard(path) for path in paths])


def _looks_like_shard(path: Location) -> bool:
    if path.name.startswith(".") or path.name in (INDEX_NAME, MANIFEST_NAME):
        return False
    if ".tfrecord" in path.name:
        return True
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    return len(header) == HEADER_BYTES and header == _frame_header(int.from_bytes(header[:8], "little"))


# ------------------------------------------------------------------ manifest


def write_manifest(folder: Location, manifest: Mapping[str, Any]) -> None:
    """Write ``manifest.json`` with sorted keys and a checksum of the other contents under ``crc32c``."""
    contents = {**manifest, "crc32c": google_crc32c.value(json.dumps(manifest, sort_keys=True).encode())}
    write_whole(folder / MANIFEST_NAME, json.dumps(contents, sort_keys=True, indent=1) + "\n")


def read_manifest(folder: Location | str) -> dict[str, Any] | None:
    """Return the manifest of ``folder`` without its checksum, or None if the file does not exist.

    Raises ``ValueError`` if the manifest is damaged.
    """
    path = location(folder) / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_bytes())
        checksum = manifest.pop("crc32c")
        intact = checksum == google_crc32c.value(json.dumps(manifest, sort_keys=True).encode())
    except (ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise ValueError(f"{path}: the manifest is damaged; build the shards again, or download the manifest again")
    return manifest
