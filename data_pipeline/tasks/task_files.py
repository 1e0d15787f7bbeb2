"""Task files on disk: names, lines, JSON."""

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from bert_jax.io.storage import Location, is_url, location
from data_pipeline.text.documents import COMPRESSIONS, Line, numbered_lines

# NAME[/CONFIG][:VERSION]:SPLIT of a prepared dataset, and FILE.json:PART+PART; both for a split of a larger thing.
_DATASET = re.compile(r"(?:tfds:)?(?P<place>[^:\[\]]+(?::\d+\.\d+\.\d+)?)(?::(?P<part>.+))?", re.ASCII)
_JSON_PART = re.compile(r"(?P<place>.+\.json(?:\.gz|\.zst)?):(?P<part>[^/:]+)")


def is_dataset(name: str, file_format: str) -> bool:
    """Return True if a name in a config is a prepared dataset rather than a file."""
    return name.startswith("tfds:") or file_format == "tfds"


def split_address(name: str, *, dataset: bool) -> tuple[str, str]:
    """(place, part) of ``FILE.json:PART`` or of a dataset's ``NAME:SPLIT``; the part is "" where none is named."""
    match = (_DATASET if dataset else _JSON_PART).fullmatch(name)
    return (match["place"], match["part"] or "") if match else (name, "")


def locate(folder: str, name: str) -> str:
    """``name`` as it is found from here, when a config has it relative to ``folder``."""
    return name if is_url(name) or Path(name).is_absolute() or not folder else str(location(folder) / name)


def plain_name(name: str) -> PurePosixPath:
    """A file's name without the suffix of a compression."""
    path = PurePosixPath(name)
    return path.with_suffix("") if path.suffix in COMPRESSIONS else path


def find(name: str) -> Location:
    """The file or folder of that name; ``ValueError`` when there is none."""
    path = location(name)
    if path.exists():
        return path
    there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    where = "" if there else f"; there is no folder {path.parent} either"
    raise ValueError(f"{path}: no such file or folder{where or did_you_mean(path.name, there)}")


def find_file(name: str) -> Location:
    """Like :func:`find`, for formats of one file."""
    path = find(name)
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; allowed: a file, and folders with data.format slots")
    return path


def read_lines(path: Location) -> Iterator[Line]:
    """Numbered lines of a UTF-8 file without their ends (\\n or \\r\\n, and nothing else ends one)."""
    return ((number, line.removesuffix("\n").removesuffix("\r")) for number, line in numbered_lines(path))


def read_raw_lines(path: Location) -> Iterator[str]:
    """Lines of a UTF-8 file, each with its own end."""
    return (line.removesuffix("\n") + "\n" for _, line in numbered_lines(path))


def without_blank_end(lines: Iterable[Line]) -> Iterator[Line]:
    """``lines`` without the blank ones at the end of the file."""
    pending: list[Line] = []
    for number, line in lines:
        pending.append((number, line))
        if line.strip(" "):
            yield from pending
            pending.clear()


def read_json(path: Location) -> Any:
    """The value that a JSON file holds."""
    text = "".join(read_raw_lines(path))
    if not text.strip():
        raise ValueError(f"{path}: the file is empty; allowed: JSON")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from None


def characters(text: str) -> str:
    """``text`` with "?" for each lone surrogate, which JSON can spell but which is no character."""
    return text.encode("utf-8", "replace").decode()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not there: ``; did you mean 'x'?``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def listed(names: Iterable[str]) -> str:
    """Names with commas between them, cut short where there are many or long ones."""
    names = list(names)
    shown = [name if len(name) <= 40 else f"{name[:37]}..." for name in names[:20]]
    return ", ".join(shown) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
