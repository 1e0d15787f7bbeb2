"""Blocks of bytes of compressed files."""

import bz2
import gzip
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import BinaryIO

from bert_jax.io.storage import Location

_BLOCK = 1 << 17  # bytes of one read


class DamagedFile(ValueError):
    """Raised if compressed data are truncated or invalid; the message is the reason without the path."""


def read_blocks(path: Location) -> Iterator[bytes]:
    """Yield the contents of a file in blocks of at least one byte; .gz, .bz2 and .zst files are decompressed.

    Raises :class:`DamagedFile` if the compressed data are truncated or invalid.
    """
    import zstandard

    try:
        if path.suffix == ".zst":
            yield from _zstd_blocks(path)
            return
        with path.open("rb") as raw, _decompressed(path.suffix, raw) as file:
            while block := file.read(_BLOCK):
                yield block
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DamagedFile(str(error)) from None
    except OSError as error:
        if error.errno is not None:  # an error of the disk, not of the data
            raise
        raise DamagedFile(str(error)) from None


def _decompressed(suffix: str, raw: BinaryIO) -> AbstractContextManager[BinaryIO]:
    if suffix == ".bz2":
        return bz2.BZ2File(raw)  # type: ignore[return-value]
    return gzip.GzipFile(fileobj=raw) if suffix == ".gz" else nullcontext(raw)  # type: ignore[return-value]


def _zstd_blocks(path: Location) -> Iterator[bytes]:
    """Yield the contents of all zstd frames.

    Raises ``EOFError`` if the last frame is truncated, an error that the zstandard library does not report.
    """
    import zstandard

    frame = zstandard.ZstdDecompressor().decompressobj()
    with path.open("rb") as file:
        while data := file.read(_BLOCK):
            while data:
                if frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                if block := frame.decompress(data):
                    yield block
                data = frame.unused_data
    if not frame.eof:
        raise EOFError("the compressed data ends early")
