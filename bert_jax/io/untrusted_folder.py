"""Files of an untrusted folder: a name in it may lead anywhere, and a file may hold anything."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from bert_jax.io.errors import one_line

# Published descriptions and vocabularies are below 10 MB; parsed JSON takes up to 40 times its size.
LARGEST = 16 << 20


def inside(folder: Path, name: str) -> Path | None:
    """Return the regular file ``name`` of ``folder``, or None if it is absent.

    Raises ``ValueError`` for an absolute name, one with ``..``, and a link that leads out of the folder (but into
    the ``blobs`` folder of a Hugging Face cache, whose snapshots are made of such links).
    """
    parts = PurePosixPath(name).parts
    if (
        not parts
        or name.startswith(("/", "\\"))
        or ".." in parts
        or "\\" in name
        or ":" in parts[0]
        or "\0" in name
    ):
        raise ValueError(f"{folder}: the name {name[:80]!r} leads out of the folder; it must name a file in it")
    path = folder.joinpath(*parts)
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path}: a link to nothing; put the file itself there")
    if not path.exists():
        return None
    root, target = folder.resolve(), path.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise ValueError(f"{path}: a link out of the folder; put the file itself there")
    if not target.is_file():
        raise ValueError(f"{path}: not a regular file")
    return target


def needed(folder: Path, name: str) -> Path:
    """Like :func:`inside`, but a file that is not there raises ``ValueError``."""
    path = inside(folder, name)
    if path is None:
        raise ValueError(f"{folder / name}: not there")
    return path


def read_small(file: Path, what: str, most: int = LARGEST) -> bytes:
    """The content of ``file``, which is to be ``what``. Raises ``ValueError`` above ``most`` bytes."""
    size = file.stat().st_size
    if size > most:
        raise ValueError(f"{file}: {size} bytes; {what} is at most {most}")
    return file.read_bytes()


def parse_json(content: str | bytes, where: Path | str) -> Any:
    """Any JSON value. Raises ``ValueError`` in one line for what is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({one_line(error, 200)})") from None


def json_object(content: str | bytes, where: Path | str, hint: str = "") -> dict[str, Any]:
    """A JSON object. Raises ``ValueError`` in one line, ended by ``hint``, for anything else."""
    value = parse_json(content, where)
    if not isinstance(value, dict):
        raise ValueError(f"{where}: not a JSON object{hint}")
    return value
