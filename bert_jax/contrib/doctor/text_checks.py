"""Checks of lines of the corpus: characters that were decoded with another encoding, markup, JSON that is read as
text, pieces of another tokenizer, missing punctuation, wrapped lines, repeated passages, a line that is found
everywhere, and lines that are copies of other lines."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from bert_jax.contrib.doctor.findings import Finding, finding
from bert_jax.tokenization.wordpiece import CJK

# Characters of the corpus that are read.
READ = 1 << 20
# Encodings with which UTF-8 is often read by mistake.
MISTAKEN = ("latin-1", "cp1252", "cp1251")
# Share of the lines with characters beyond ASCII that were decoded with another encoding or contain replacement
# characters, and fewest such lines.
DAMAGED, LEAST_LINES = (0.02, 0.2), 5
# Share of the characters in tags, entities and brackets of wiki text.
MARKUP = 0.02
# Share of the lines that are JSON objects, for LOOK and FAIL.
JSON_LINES = (0.05, 0.5)
# Share of the lines that are equal to the most frequent one, and fewest such lines.
SAME_LINE, LEAST_SAME = 0.05, 20
# Share of the longer lines that are copies of other lines, and fewest words, or Chinese characters and kana, of
# such a line.
COPIES, LEAST_WORDS, LEAST_SIGNS = 0.05, 4, 8
# Share of the words that are pieces of a tokenizer, for LOOK and FAIL.
PIECES = (0.01, 0.1)
# Smallest share of punctuation in the characters, and fewest characters from which it is known.
PUNCTUATION, LEAST_CHARACTERS = 0.002, 2000
# Share of the passages of two lines that occurred before, for LOOK and FAIL, and fewest characters of a passage.
PASSAGES, LEAST_PASSAGE = (0.15, 0.35), 40
# Share of the lines that continue in the next line, for LOOK and FAIL; if the lines are wrapped, most of them have
# this part of the greatest length.
WRAPPED, FULL = (0.1, 0.3), 0.8
# Characters of a line that are shown.
SHOWN = 40
_MARKUP = re.compile(
    r"</?[A-Za-z][^<>]{0,500}>|<!--|-->|&(?:[A-Za-z]{2,8}|#[0-9]{2,6}|#x[0-9A-Fa-f]{2,6});|\[\[|\]\]|\{\{|\}\}"
)
_SIGN = re.compile(f"[{CJK}\u3040-\u30ff]")
_REPLACEMENT = "\ufffd"
# A word that continues another one in WordPiece or in BPE, and a word that begins one in SentencePiece or byte BPE.
_PIECE = re.compile(r"(?<!\S)(?:##\w\S*|\S*\w@@|[\u2581\u0120]\S*)(?!\S)")


def is_misread(line: str) -> bool:
    """Return True if ``line`` is UTF-8 that was decoded with one of ``MISTAKEN``: its bytes in this encoding are
    valid UTF-8 of fewer characters. Text in the right encoding almost never has such bytes."""
    for encoding in MISTAKEN:
        try:
            again = line.encode(encoding).decode("utf-8")
        except UnicodeError:
            continue
        if len(again) < len(line):
            return True
    return False


def tokenized_text(lines: Sequence[str]) -> Finding:
    """Return the share of the words that are pieces, with the marks of a tokenizer."""
    words = sum(len(line.split()) for line in lines)
    share = sum(len(_PIECE.findall(line)) for line in lines) / max(words, 1)
    look, fail = PIECES
    return finding(
        "tokenized text", f"{share:.1%} of the words of the text are pieces of a tokenizer, such as ##ing or ing@@",
        f"at most {look:.0%}", "the text was tokenized before; use the text from which the pieces were made",
        fail=share > fail, look=share > look, number=share,
    )  # fmt: skip


def punctuation(lines: Sequence[str]) -> list[Finding]:
    """Return the share of the characters that are punctuation; [] for a short text."""
    counts = Counter[str]()
    for line in lines:
        counts.update(line)
    marks = sum(count for char, count in counts.items() if unicodedata.category(char)[0] == "P")
    share = marks / max(counts.total(), 1)
    return [finding(
        "punctuation", f"{share:.2%} of the characters of the text are punctuation", f"{PUNCTUATION:.1%} or more",
        "the text was stripped, as for counting words (often without stop words); use the original text, because "
        "the network is later applied to such text",
        look=share < PUNCTUATION, number=share,
    )] if counts.total() >= LEAST_CHARACTERS else []  # fmt: skip


def wrapped_lines(lines: Sequence[str]) -> Finding:
    """Return the share of the lines that end inside a sentence: the last character is a letter or a comma, and the
    next line begins with a lower-case letter. LOOK and FAIL only if most of these lines are nearly as long as the
    longest of them, as wrapped lines are."""
    continued = ((one[-1].isalpha() or one[-1] == ",") and after[0].islower() for one, after in pairwise(lines))
    lengths = [len(line) for line, is_continued in zip(lines, continued, strict=False) if is_continued]
    share = len(lengths) / len(lines)
    is_full = bool(lengths) and bool(np.quantile(lengths, 0.25) >= FULL * np.quantile(lengths, 0.95))
    look, fail = WRAPPED
    return finding(
        "wrapped lines", f"{share:.0%} of the lines end inside a sentence", f"at most {look:.0%}",
        "the text has line breaks at a fixed width, and each line is read as a sentence or a paragraph; join the "
        "lines of each paragraph",
        fail=is_full and share > fail, look=is_full and share > look, number=share,
    )  # fmt: skip


def passages(lines: Sequence[str]) -> Finding:
    """Return the share of the passages of two lines that are also in the text before them."""
    seen = [pair for pair in pairwise(lines) if sum(map(len, pair)) >= LEAST_PASSAGE]
    share = 1 - len(set(seen)) / len(seen) if seen else 0.0
    look, fail = PASSAGES
    return finding(
        "passages", f"{share:.1%} of the passages of two lines are repetitions", f"at most {look:.0%}",
        "documents are repeated or overlap, as those that are cut with a sliding window; use each passage once",
        fail=share > fail, look=share > look, number=share,
    )  # fmt: skip


def _is_longer(line: str) -> bool:
    return len(line.split()) >= LEAST_WORDS or len(_SIGN.findall(line)) >= LEAST_SIGNS


def _shown(line: str) -> str:
    return repr(line if len(line) <= SHOWN else line[:SHOWN] + "...")


def copied_lines(counts: Counter[str]) -> Finding:
    """Return the share of the longer lines that are copies of other lines. Short lines, such as names of speakers,
    are repeated in any text. ``counts``: occurrences of each line."""
    longer = Counter({line: count for line, count in counts.items() if _is_longer(line)})
    copies = Counter({line: count for line, count in longer.items() if count > 1})
    share = copies.total() / max(longer.total(), 1)
    is_often = copies.total() >= LEAST_SAME and share > COPIES
    value = f"{share:.1%} of the lines of {LEAST_WORDS} words or {LEAST_SIGNS} CJK characters or more are copies"
    if is_often:
        value += f", such as {', '.join(_shown(line) for line, _ in copies.most_common(3))}"
    return finding(
        "copied lines", value, f"at most {COPIES:.0%}",
        "menus, notices or whole documents are repeated in the text; keep each of these lines once, and build "
        "vocabulary and shards again",
        look=is_often, number=share,
    )  # fmt: skip


def check_text(lines: Sequence[str], encoding: str) -> list[Finding]:
    """Return the results of the checks of ``lines`` of the corpus; [] without lines. ``encoding``:
    ``data.encoding``."""
    if not lines:
        return []
    beyond = [line for line in lines if not line.isascii()]
    misread = sum(map(is_misread, beyond))
    replaced = sum(_REPLACEMENT in line for line in beyond)
    share = (misread + replaced) / max(len(beyond), 1)
    (look, fail), is_damaged = DAMAGED, misread + replaced >= LEAST_LINES
    advice = "the text was damaged before it was saved; take it from its source again, or repair it (ftfy)"
    if encoding != "auto":
        advice = f"data.encoding {encoding} is not that of the text; set auto, build vocabulary and shards again"
    markup = sum(len(found) for line in lines for found in _MARKUP.findall(line)) / max(sum(map(len, lines)), 1)
    objects = sum(line.lstrip().startswith('{"') for line in lines) / len(lines)
    counts = Counter(lines)
    often, count = counts.most_common(1)[0]
    return [
        finding(
            "text encoding", f"{misread:,} of {len(beyond):,} lines with characters beyond ASCII are UTF-8 that "
            f"was decoded as another encoding, {replaced:,} contain U+FFFD", f"at most {look:.0%}", advice,
            fail=is_damaged and share > fail, look=is_damaged and share > look, number=share,
        ),
        finding(
            "markup", f"{markup:.1%} of the characters of the text are tags, entities or wiki brackets",
            f"at most {MARKUP:.0%}",
            "the network learns the markup instead of the language; extract the text from HTML or wiki pages",
            look=markup > MARKUP, number=markup,
        ),
        finding(
            "text format", f"{objects:.1%} of the lines of the text begin with {{\"",
            f"at most {JSON_LINES[0]:.0%}",
            "JSON is read as text, with its keys; name the file .jsonl, so that only data.json_field is read",
            fail=objects > JSON_LINES[1], look=objects > JSON_LINES[0], number=objects,
        ),
        finding(
            "repeated line", f"{count / len(lines):.1%} of the lines are {_shown(often)}",
            f"at most {SAME_LINE:.0%}",
            "a header or notice is repeated in the text; remove it",
            look=count >= LEAST_SAME and count > SAME_LINE * len(lines), number=count / len(lines),
        ),
        tokenized_text(lines),
        wrapped_lines(lines),
        passages(lines),
        copied_lines(counts),
        *punctuation(lines),
    ]  # fmt: skip
