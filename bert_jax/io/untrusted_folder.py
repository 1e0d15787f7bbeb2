"""Readers for the files of an untrusted folder. They check names, links, sizes and JSON."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from bert_jax.io.errors import one_line

# Maximum bytes of a file. Published text files of models are below 10 MB; parsed JSON needs up to 40 times its
# size.
LARGEST = 16 << 20


def inside(folder: Path, name: str) -> Path | None:
    """Return the path of the regular file ``name`` in ``folder``, or None if it does not exist.

    Raises ``ValueError`` for an absolute name, a name with ``..``, and a link that leads out of the folder. Links
    into the ``blobs`` folder of a Hugging Face cache are allowed, because the snapshots in a cache consist of such
    links.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or ":" in parts[0] or {"\\", "\0"} & set(name):
        raise ValueError(f"{folder}: the name {name[:80]!r} leads out of the folder; name a file inside the folder")
    path = folder.joinpath(*parts)
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path}: the link points to a missing file; replace the link with the file")
    if not path.exists():
        return None
    root, target = folder.resolve(), path.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise ValueError(f"{path}: the link leads out of the folder; replace the link with the file")
    if not target.is_file():
        raise ValueError(f"{path}: not a regular file")
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


def parse_json(content: str | bytes, where: Path | str) -> Any:
    """Parse a JSON value of any type. Raises ``ValueError`` for invalid JSON; the message begins with ``where``."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({one_line(error, 200)})") from None


def json_object(content: str | bytes, where: Path | str, hint: str = "") -> dict[str, Any]:
    """Parse a JSON object. Raises ``ValueError`` for other content; the one-line message begins with ``where`` and
    ends with ``hint``."""
    value = parse_json(content, where)
    if not isinstance(value, dict):
        raise ValueError(f"{where}: not a JSON object{hint}")
    return value
