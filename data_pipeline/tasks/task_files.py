"""Helpers for task files: names, lines, JSON, and parts of messages."""

import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from bert_jax.io.errors import did_you_mean
from bert_jax.io.storage import Location, is_url, location
from data_pipeline.text.compressed import COMPRESSIONS, read_blocks
from data_pipeline.text.lines import Line, Undecodable, text_blocks

# NUL, many bytes above 127 in a row, a character of UTF-8, or marks of Shift-JIS that Western text hardly has;
# symbols in a word, such as Polish letters of cp1250.
_NOT_WESTERN_BYTES = re.compile(
    rb"\0|[\x80-\xff]{4}|[\xc2-\xdf][\x80-\xbf]|\xe2[\x80-\x84][\x80-\xbf]|[\x82\x83\x88\x89\x98]"
)
_NOT_WESTERN = re.compile(
    "[A-Za-z][\xa1-\xa9\xab-\xb3\xb6\xb8\xb9\xbb-\xbf]+[A-Za-z]|[a-z\xdf-\xff][\xa3\xa5\xaf\xbf]|"
    "[\xa5\xb3\xb9][a-z\xdf-\xff]|[\xb3\xb9\xbf]{2}"
)
_log = logging.getLogger(__name__)

# NAME[/CONFIG][:VERSION]:SPLIT of a prepared dataset, and FILE.json:PART+PART.
_DATASET = re.compile(r"(?:tfds:)?(?P<place>[^:\[\]]+(?::\d+\.\d+\.\d+)?)(?::(?P<part>.+))?", re.ASCII)
_JSON_PART = re.compile(r"(?P<place>.+\.json(?:\.gz|\.bz2|\.xz|\.zst)?):(?P<part>[^/:]+)")


def is_dataset(name: str, file_format: str) -> bool:
    """Return True if ``name`` is the name of a prepared dataset, not of a file."""
    return name.startswith("tfds:") or file_format == "tfds"


def split_address(name: str, *, dataset: bool) -> tuple[str, str]:
    """Split ``FILE.json:PART`` or ``NAME:SPLIT`` into (file or dataset, part); a missing part is ""."""
    match = (_DATASET if dataset else _JSON_PART).fullmatch(name)
    return (match["place"], match["part"] or "") if match else (name, "")


def locate(folder: str, name: str) -> str:
    """Return the path of ``name``, which is relative to ``folder`` unless it is absolute or a URL."""
    return name if is_url(name) or Path(name).is_absolute() or not folder else str(location(folder) / name)


def plain_name(name: str) -> PurePosixPath:
    """Return a file name without its compression suffix."""
    path = PurePosixPath(name)
    return path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path


def find(name: str) -> Location:
    """Return the path of an existing file or folder. Raises ``ValueError`` if it is missing."""
    path = location(name)
    if path.exists():
        return path
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    where = "" if names else f"; the folder {path.parent} does not exist either"
    raise ValueError(f"{path}: no such file or folder{where or did_you_mean(path.name, names)}")


def find_file(name: str) -> Location:
    """Return the path of an existing file. Raises ``ValueError`` if it is missing or a folder."""
    path = find(name)
    if path.is_dir():
        raise ValueError(f"{path}: the path is a folder; give a file, or set data.format slots to read a folder")
    return path


def read_text(path: Location, encoding: str) -> str:
    """Return the text of a file; ``encoding`` is ``data.encoding``. Raises ``ValueError`` for text in another
    encoding, with the line, and for a damaged or binary file."""
    try:
        return "".join(text_blocks(path, encoding))
    except Undecodable as error:
        data, where = b"".join(read_blocks(path)), str(error).partition("; ")[0]
        if encoding != "auto" or not _is_western(data):
            advice = "set data.encoding, such as cp1252 or gb18030, or convert the file to UTF-8"
            raise ValueError(f"{where}; {advice}") from None
    _log.warning("WARNING: %s; read as cp1252; data.encoding names another encoding", where)
    return data.decode("cp1252")


def _is_western(data: bytes) -> bool:
    """Return True if the bytes above 127 look like Western text in cp1252: rarely consecutive, letters next to
    letters, and no UTF-8 sequences."""
    try:
        return not _NOT_WESTERN_BYTES.search(data) and not _NOT_WESTERN.search(data.decode("cp1252"))
    except UnicodeDecodeError:
        return False


def read_raw_lines(path: Location, encoding: str) -> list[str]:
    """Return the lines of a file, split at \\n or, in a file without \\n, at \\r. Every returned line, also the
    last, ends with \\n."""
    text = read_text(path, encoding)
    if "\n" not in text:
        text = text.replace("\r", "\n")
    lines = text.split("\n")
    return [f"{line}\n" for line in (lines if lines[-1] else lines[:-1])]


def read_lines(path: Location, encoding: str) -> Iterator[Line]:
    """Yield (number, line) for :func:`read_raw_lines`, without line ends; ``\\r\\n`` is a line end too."""
    return enumerate((line[:-1].removesuffix("\r") for line in read_raw_lines(path, encoding)), 1)


def without_blank_end(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield ``lines`` without trailing blank lines."""
    pending: list[Line] = []
    for number, line in lines:
        pending.append((number, line))
        if line.strip(" "):
            yield from pending
            pending.clear()


def read_json(path: Location, encoding: str) -> Any:
    """Return the content of a JSON file. Raises ``ValueError``, with the line, if it is not valid JSON."""
    text = read_text(path, encoding)
    if not text.strip():
        raise ValueError(f"{path}: the file is empty; it must contain JSON")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # more digits than int() reads, or too many levels
        raise ValueError(f"{path}: not valid JSON: {error}") from None


def characters(text: str) -> str:
    """Replace each lone surrogate, which JSON allows but UTF-8 does not, with "?"."""
    return text.encode("utf-8", "replace").decode()


def listed(names: Iterable[str]) -> str:
    """Join names with commas; only 20 names are shown, each truncated to 40 characters."""
    names = list(names)
    shown = [name if len(name) <= 40 else f"{name[:37]}..." for name in names[:20]]
    return ", ".join(shown) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
