"""The checkpoint folder of a run: finding complete checkpoints, and moving damaged ones to another folder.

This module does not import jax.
"""

from pathlib import Path

from bert_jax.io.storage import Location, ObjectPath

# Orbax writes this file last in a store that cannot rename folders.
COMMIT_FILE = "commit_success.txt"
# Folders of a workdir for damaged checkpoints, and for checkpoints that a rollback discards.
DAMAGED, ROLLED_BACK = QUARANTINE_FOLDERS = ("damaged_checkpoints", "rolled_back_checkpoints")


def checkpoint_folder(workdir: Location) -> Location:
    """Return the checkpoint folder of a run."""
    return workdir.absolute() / "checkpoints"


def saved_steps(workdir: Location) -> list[int]:
    """Return the steps of the committed checkpoints of a run in increasing order."""
    folder = checkpoint_folder(workdir)
    if not folder.is_dir():
        return []
    steps = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit() and path.is_dir())
    if isinstance(workdir, ObjectPath):
        # A store cannot rename folders: one object marks a complete checkpoint, another a quarantined checkpoint.
        aside = {mark.name for where in QUARANTINE_FOLDERS for mark in _marks(workdir / where)}
        steps = [s for s in steps if str(s) not in aside and (folder / str(s) / COMMIT_FILE).is_file()]
    return steps


def _marks(folder: ObjectPath) -> list[ObjectPath]:
    return [path for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []


def move_aside(workdir: Location, step: int, where: str) -> Location:
    """Move the checkpoint of ``step`` to the folder ``where`` of the workdir, and return its new place."""
    if isinstance(workdir, ObjectPath):
        # Mark first: after a kill during the move, the remaining files must not count as a complete checkpoint.
        (workdir / where / str(step)).touch()
        return _finish_move(workdir, step, where)
    folder = workdir.absolute() / where
    folder.mkdir(exist_ok=True)
    source, target = checkpoint_folder(workdir) / str(step), _unused(folder, str(step))
    assert isinstance(source, Path)
    return source.rename(target)


def finish_moves(workdir: ObjectPath) -> None:
    """Finish moving the checkpoints that an interrupted run had begun to move."""
    for where in QUARANTINE_FOLDERS:
        for mark in _marks(workdir / where):
            _finish_move(workdir, int(mark.name), where)


def _finish_move(workdir: ObjectPath, step: int, where: str) -> ObjectPath:
    source, target = checkpoint_folder(workdir) / str(step), _unused(workdir / where, f"step_{step}")
    assert isinstance(source, ObjectPath) and isinstance(target, ObjectPath)
    for path in source.rglob("*"):
        path.replace(target / path.relative_to(source))
    (workdir / where / str(step)).unlink()
    return target


def _unused(folder: Location, name: str) -> Location:
    """Return ``folder / name`` or, if this path exists, an unused path that is formed by appending a number."""
    count, target = 1, folder / name
    while target.exists():
        count += 1
        target = folder / f"{name}.{count}"
    return target
