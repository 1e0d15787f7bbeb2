"""Files of a folder that somebody else made: named by its own files, so a name may lead anywhere."""

from pathlib import Path, PurePosixPath


def inside(folder: Path, name: str) -> Path | None:
    """The regular file ``name`` of ``folder``, or None when there is none.

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
