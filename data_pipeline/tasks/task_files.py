"""Helpers for task files: names, lines, JSON, and parts of messages."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from bert_jax.io.errors import did_you_mean
from bert_jax.io.storage import Location, is_url, location
from data_pipeline.text.documents import COMPRESSIONS, Line, numbered_lines

# NAME[/CONFIG][:VERSION]:SPLIT of a prepared dataset, and FILE.json:PART+PART.
_DATASET = re.compile(r"(?:tfds:)?(?P<place>[^:\[\]]+(?::\d+\.\d+\.\d+)?)(?::(?P<part>.+))?", re.ASCII)
_JSON_PART = re.compile(r"(?P<place>.+\.json(?:\.gz|\.zst)?):(?P<part>[^/:]+)")


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
    return path.with_suffix("") if path.suffix in COMPRESSIONS else path


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
        raise ValueError(f"{path}: the path is a folder; allowed: a file (a folder only with data.format slots)")
    return path


def read_lines(path: Location) -> Iterator[Line]:
    """Yield (number, line) for a UTF-8 file, without line ends; only \\n or \\r\\n ends a line."""
    return ((number, line.removesuffix("\n").removesuffix("\r")) for number, line in numbered_lines(path))


def read_raw_lines(path: Location) -> Iterator[str]:
    """Yield the lines of a UTF-8 file; every line, including the last, ends with \\n."""
    return (line.removesuffix("\n") + "\n" for _, line in numbered_lines(path))


def without_blank_end(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield ``lines`` without trailing blank lines."""
    pending: list[Line] = []
    for number, line in lines:
        pending.append((number, line))
        if line.strip(" "):
            yield from pending
            pending.clear()


def read_json(path: Location) -> Any:
    """Return the content of a JSON file. Raises ``ValueError``, with the line, if it is not valid JSON."""
    text = "".join(read_raw_lines(path))
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
