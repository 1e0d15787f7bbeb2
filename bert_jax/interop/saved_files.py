"""File names by which saved models and workdirs are recognized without reading them."""

from pathlib import Path

SPEC_FILE = "model.json"
# Folder in the workdir of a fine-tuning run: a saved model with the best parameters.
BEST = "best"


def is_native(path: Path) -> bool:
    """Return True if ``path`` is a saved model or the workdir of a run."""
    is_run = (path / "config.yaml").is_file() and not (path / "config.json").is_file()
    return is_run or (whole(path) / SPEC_FILE).is_file()


def whole(path: Path) -> Path:
    """Return ``path``, or the folder of the previous best parameters if ``saved_model.replace_saved`` was killed
    before it gave the new folder its final name."""
    was_killed = path.name == BEST and not path.exists() and (older(path) / SPEC_FILE).is_file()
    return older(path) if was_killed else path


def older(folder: Path) -> Path:
    """Return the name of the previous best parameters, ``folder``, while they are replaced."""
    return folder.with_name(f"{folder.name}.old")
