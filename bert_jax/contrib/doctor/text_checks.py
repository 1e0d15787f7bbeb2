"""Checks of lines of the corpus: characters that were decoded with another encoding, markup, JSON that is read as
text, and a line that is found everywhere."""

import re
from collections import Counter
from collections.abc import Sequence

from bert_jax.contrib.doctor.findings import Finding, finding

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
# Characters of a line that are shown.
SHOWN = 40
_MARKUP = re.compile(
    r"</?[A-Za-z][^<>]{0,500}>|<!--|-->|&(?:[A-Za-z]{2,8}|#[0-9]{2,6}|#x[0-9A-Fa-f]{2,6});|\[\[|\]\]|\{\{|\}\}"
)
_REPLACEMENT = "\ufffd"


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
    often, count = Counter(lines).most_common(1)[0]
    shown = often if len(often) <= SHOWN else often[:SHOWN] + "..."
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
            "repeated line", f"{count / len(lines):.1%} of the lines are {shown!r}", f"at most {SAME_LINE:.0%}",
            "a header or notice is repeated in the text; remove it",
            look=count >= LEAST_SAME and count > SAME_LINE * len(lines), number=count / len(lines),
        ),
    ]  # fmt: skip
