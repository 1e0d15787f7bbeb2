"""Blocks of bytes of compressed files."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, BinaryIO

from bert_jax.io.storage import Location

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_BLOCK = 1 << 17  # bytes of one read
_FRAME_READ = 1 << 9  # bytes that are decompressed at once: at most 16 MB of a zstd frame, whatever it holds
_XZ_MEMORY = 1 << 27  # bytes; xz -9 needs 65 MiB


class DamagedFile(ValueError):
    """Raised if compressed data are truncated or invalid; the message is the reason without the path."""


def read_blocks(path: Location) -> Iterator[bytes]:
    """Yield the contents of a file in blocks of 1 to 131,072 bytes; files with a suffix of ``COMPRESSIONS``, in any
    case, are decompressed.

    Raises :class:`DamagedFile` if the compressed data are truncated or invalid.
    """
    import zstandard

    suffix, xz = path.suffix.lower(), partial(lzma.LZMADecompressor, memlimit=_XZ_MEMORY)
    try:
        with path.open("rb") as raw:
            if suffix in (".xz", ".zst"):
                yield from _frames(raw, xz if suffix == ".xz" else zstandard.ZstdDecompressor().decompressobj)
                return
            with _decompressed(suffix, raw) as file:
                while block := file.read(_BLOCK):
                    yield block
    except (EOFError, zlib.error, zstandard.ZstdError, lzma.LZMAError) as error:
        raise DamagedFile(str(error)) from None
    except OSError as error:
        if error.errno is not None:  # an error of the disk, not of the data
            raise
        raise DamagedFile(str(error)) from None


def _decompressed(suffix: str, raw: BinaryIO) -> AbstractContextManager[BinaryIO]:
    if suffix == ".bz2":
        return bz2.BZ2File(raw)  # type: ignore[return-value]
    return gzip.GzipFile(fileobj=raw) if suffix == ".gz" else nullcontext(raw)  # type: ignore[return-value]


def _frames(file: BinaryIO, start: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the contents of all zstd frames or xz streams; ``start`` returns the decompressor of one.

    Raises ``EOFError`` if the last frame is truncated, an error that the zstandard library does not report.
    """
    frame = start()
    while data := file.read(_FRAME_READ):
        while data:
            if frame.eof:
                data = data.lstrip(b"\0")  # padding between xz streams
                if not data:
                    break
                frame = start()
            content = frame.decompress(data)
            for at in range(0, len(content), _BLOCK):
                yield content[at : at + _BLOCK]
            data = frame.unused_data
    if not frame.eof:
        raise EOFError("the compressed data ends early")
