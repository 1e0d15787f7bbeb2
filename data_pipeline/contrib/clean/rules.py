"""Rules on one document: broken encoding and language. Both use libraries of the extra ``clean``."""

import re
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

LANGUAGE_SAMPLE = 2_000  # characters at the start of a document that determine its language
REPLACEMENT = "\ufffd"
# Control characters and code points that are not characters; tabs and line ends are white space.
_CONTROL = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufdd0-\ufdef\ufeff\ufffe\uffff]")
_SPACE = re.compile("[\x0b\x0c\x1c-\x1f\x85]")  # control characters that separate words


class Line(NamedTuple):
    """A line after the rule of encoding; ``text`` is empty if the line is dropped."""

    text: str
    is_repaired: bool  # mojibake was decoded correctly
    removed: int  # number of control characters removed


def load_ftfy() -> ModuleType:
    """Import ftfy. Raises ``ValueError`` if it is not installed."""
    try:
        import ftfy
        import ftfy.badness
    except ImportError:
        raise ValueError(
            "clean.encoding: ftfy is not installed; run: pip install 'bert_jax[clean]', or use --encoding off"
        ) from None
    return ftfy


def check_line(line: str, ftfy: ModuleType, *, repair: bool) -> Line:
    """Repair the encoding of ``line``, or drop it: without ``repair`` if anything is wrong with it, otherwise if it
    contains the replacement character."""
    text, is_repaired = line, False
    if not text.isascii() and ftfy.badness.is_bad(text):
        text = ftfy.fix_encoding(line)
        is_repaired = text != line
    cleaned = _SPACE.sub(" ", text)
    cleaned, removed = _CONTROL.subn("", cleaned)
    is_broken = REPLACEMENT in cleaned or (not repair and (is_repaired or removed > 0))
    return Line("" if is_broken else cleaned.strip(), is_repaired, removed)


def is_plain(text: str) -> bool:
    """Return True if ``text`` is ASCII without control characters, so that its encoding cannot be broken."""
    return text.isascii() and not _CONTROL.search(text) and not _SPACE.search(text)


@lru_cache(maxsize=1)
def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise ValueError(
            "clean.languages: py3langid is not installed; run: pip install 'bert_jax[clean]'"
        ) from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def check_languages(languages: Sequence[str]) -> None:
    """Raise ``ValueError`` if one of ``languages`` is not known, or if py3langid is not installed."""
    known = sorted(_identifier().labels) if languages else []
    for name in languages:
        if name not in known:
            raise ValueError(f"clean.languages: {name!r} is not allowed; use one of {', '.join(known)}")


def language_of(document: Sequence[str]) -> tuple[str, float]:
    """Return the most probable language of a document, as a code of two or three letters, and its probability."""
    text = ""
    for line in document:
        text += f"{line}\n"
        if len(text) >= LANGUAGE_SAMPLE:
            break
    name, probability = _identifier().classify(text[:LANGUAGE_SAMPLE])
    return str(name), float(probability)
