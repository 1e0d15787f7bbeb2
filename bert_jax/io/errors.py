"""Conversion of library errors to one line of text, and hints for misspelled names."""

import difflib
from collections.abc import Iterable
from pathlib import Path

_TRAIN = {"pretrain": ("pretrain", "train"), "finetune": ("finetune", "fine-tune")}


def first_line(error: BaseException, limit: int = 200) -> str:
    """Return the first line of the text of an error, without a final period, truncated to ``limit`` characters.

    Returns the name of the error type if the text is empty.
    """
    lines = str(getattr(error, "message", None) or error).strip().splitlines()
    return lines[0][:limit].rstrip(".") if lines else type(error).__name__


def one_line(error: BaseException, limit: int | None = None) -> str:
    """Return the text of an error on one line, with normalized white space, truncated to ``limit`` characters.

    Returns the name of the error type if the text is empty.
    """
    return " ".join(str(error).split())[:limit] or type(error).__name__


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the known name closest to ``name``, or "" if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown_command(name: str, commands: Iterable[str]) -> str:
    """Return the hint for ``name``, which is not one of ``commands``: a program that trains, or a similar name."""
    for program, names in _TRAIN.items():
        if name in names:
            return f"; to {program}, run: bert-jax {program} --config RECIPE"
    return did_you_mean(name, commands)


def near_path(path: Path) -> str:
    """Return :func:`did_you_mean` for the existing path closest to the missing ``path``: the same name in ``runs``,
    or a path whose first missing part is misspelled."""
    if (inside := Path("runs") / path).exists():
        return f"; did you mean {str(inside)!r}?"
    missing = next(part for part in (*reversed(path.parents), path) if not part.exists())
    names = (entry.name for entry in missing.parent.iterdir()) if missing.parent.is_dir() else ()
    close = difflib.get_close_matches(missing.name, list(names), n=1)
    if not close:
        return ""
    whole = missing.parent / close[0] / path.relative_to(missing)
    return f"; did you mean {str(whole if whole.exists() else missing.parent / close[0])!r}?"
