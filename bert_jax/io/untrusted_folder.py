"""Readers for the files of an untrusted folder. They check names, links, sizes and JSON."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from bert_jax.io.errors import one_line
from bert_jax.io.storage import Location

# Maximum bytes of a text file; parsed JSON needs up to 40 times its size.
LARGEST = 16 << 20
# A tokenizer.json of 250,000 pieces, as transformers 5 saves it, has 17 MB (XLM-R, multilingual E5), and one with
# merges 34 MB (mmBERT).
LARGEST_TOKENIZER = 64 << 20
# First bytes of the file that git leaves in place of a large file without Git LFS.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def inside(folder: Path, name: str) -> Path | None:
    """Return the path of the regular file ``name`` in ``folder``, or None if it does not exist.

    Raises ``ValueError`` for an absolute name, a name with ``..``, a link that points outside the folder, and the
    pointer of Git LFS in place of a file. In a snapshot of a Hugging Face cache and in its subfolders, links into
    the ``blobs`` folder of the cached repository are allowed, because a snapshot consists of such links.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or ":" in parts[0] or {"\\", "\0"} & set(name):
        problem = f"the name {name[:80]!r} points outside the folder"
        raise ValueError(f"{folder}: {problem}; name a file inside the folder")
    path = folder.joinpath(*parts)
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path}: the link points to a missing file; replace the link with the file")
    if not path.exists():
        return None
    root, target = folder.resolve(), path.resolve()
    caches = [place.parent.parent / "blobs" for place in (root, *root.parents) if place.parent.name == "snapshots"]
    if not any(target.is_relative_to(place) for place in (root, *caches)):
        raise ValueError(f"{path}: the link points outside the folder; replace the link with the file")
    if not target.is_file():
        raise ValueError(f"{path}: not a regular file")
    with target.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            remedy = "run git lfs pull in its folder, or download the file itself"
            raise ValueError(f"{path}: a pointer of Git LFS, not the file; {remedy}")
    return target


def needed(folder: Path, name: str) -> Path:
    """Return the path of the file ``name`` in ``folder``, like :func:`inside`, but raise ``ValueError`` if the file
    does not exist."""
    path = inside(folder, name)
    if path is None:
        raise ValueError(f"{folder / name}: the file is missing")
    return path


def read_small(file: Path, what: str, most: int = LARGEST) -> bytes:
    """Return the content of ``file``. Raises ``ValueError`` if the file is larger than ``most`` bytes; ``what``
    describes the file in the message."""
    size = file.stat().st_size
    if size > most:
        raise ValueError(f"{file}: {size} bytes; {what} may have at most {most} bytes")
    return file.read_bytes()


def parse_json(content: str | bytes, where: Location | str) -> Any:
    """Parse a JSON value of any type. Raises ``ValueError`` for invalid JSON; the message begins with ``where``."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({one_line(error, 200)})") from None


def json_object(content: str | bytes, where: Location | str, hint: str = "") -> dict[str, Any]:
    """Parse a JSON object. Raises ``ValueError`` for other content; the one-line message begins with ``where`` and
    ends with ``hint``."""
    value = parse_json(content, where)
    if not isinstance(value, dict):
        raise ValueError(f"{where}: not a JSON object{hint}")
    return value
