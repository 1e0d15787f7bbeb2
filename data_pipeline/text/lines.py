"""Read lines of text files: decompress, decode, split at line ends, and bound the memory of long lines."""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from bert_jax.io.storage import Location
from data_pipeline.text.compressed import DamagedFile, read_blocks
from data_pipeline.text.graphemes import continues_cluster, joins_next

# A longer line of text is cut into pieces at white space, each followed by a line CUT; characters.
LONGEST_LINE = 1 << 20
CUT = "\ufdd0"  # not a character: no text contains it

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_MAGIC = {
    b"%PDF-": "a PDF; write its text to a .txt file, for example with pdftotext",
    b"PK\x03\x04": "a zip archive (.zip, .docx, .epub); unpack it, or save its text as .txt",
    b"{\\rtf": "RTF; save it as plain text (.txt)",
    b"PAR1": "Parquet; save it with save_to_disk of Hugging Face datasets, and use hf:FOLDER",
    b"\x1f\x8b": "compressed by gzip; add .gz to its name",
    b"\xfd7zXZ\0": "compressed by xz; add .xz to its name",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; add .zst to its name",
}
LINE_END = re.compile("\r*\n|\r")
TEXT_LINE_END = re.compile("\r*\n|[\r\u2028\u2029]")  # JSON strings may contain the last two
# Characters that are neither visible nor white space: soft hyphen, zero-width and direction marks, byte order mark.
_INVISIBLE = "\xad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff"
_BLANK = re.compile(rf"[\s{_INVISIBLE}]+")
_STARTS_INVISIBLE = re.compile(f"[{_INVISIBLE}]")

Line = tuple[int, str]  # (number in the file, from 1, and text without the newline)


class Undecodable(ValueError):
    """Raised if a file is not in its encoding; the message begins with the file and the line."""


def stripped(line: str) -> str:
    """Return ``line`` without white space at its ends and without the byte order mark of a file joined to another;
    "" if all of its characters are invisible."""
    line = line.strip()
    if line.isascii() or not _STARTS_INVISIBLE.match(line):
        return line
    return "" if _BLANK.fullmatch(line) else line.lstrip("\ufeff").lstrip()


def text_lines(text: str) -> list[str]:
    """Split the text of one document at the line ends of all systems, U+2028 and U+2029."""
    if "\r" in text or "\u2028" in text or "\u2029" in text:
        text = TEXT_LINE_END.sub("\n", text)
    return text.split("\n")


def binary_kind(head: bytes, encoding: str) -> str:
    """Return the kind of a file that begins with ``head`` and advice for the user, or "" if the file may be
    text."""
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    wide = encoding != "auto" or any(head.startswith(mark) for mark, _ in _BYTE_ORDER_MARKS)
    if wide or head.count(0) * 100 <= len(head):
        return ""
    order = "be" if head[::2].count(0) > head[1::2].count(0) else "le"  # the first byte of a Latin letter is 0
    return (
        f"not text: it contains NUL bytes (UTF-16 without a byte order mark requires data.encoding utf-16-{order})"
    )


def text_blocks(path: Location, encoding: str = "auto") -> Iterator[str]:
    """Yield the text of a file, decompressed and decoded, in blocks; a byte order mark is removed.

    ``encoding`` is the name of a codec, or auto: UTF-16 and UTF-32 with a byte order mark, all others UTF-8. Raises
    ``ValueError`` if the file is damaged or binary, and :class:`Undecodable`.
    """
    decoder, number, name, is_first = None, 1, "", True
    try:
        for block in chain(read_blocks(path), [b""]):
            if decoder is None:
                if kind := binary_kind(block[:4096], encoding):
                    raise ValueError(f"{path}: the file is {kind}")
                found = (codec for mark, codec in _BYTE_ORDER_MARKS if block.startswith(mark))
                name = next(found, "utf-8") if encoding == "auto" else encoding
                decoder = codecs.getincrementaldecoder(name)()
            try:
                text = decoder.decode(block, not block)
            except UnicodeDecodeError as error:
                good = error.object[: error.start].decode(error.encoding, "ignore")
                yield good
                number += good.count("\n")
                raise Undecodable(f"{path}:{number}: not valid {name.upper()}; convert the file to UTF-8") from None
            number += text.count("\n")
            if is_first and text:
                text, is_first = text.removeprefix("\ufeff"), False
            yield text
    except DamagedFile as error:
        raise ValueError(
            f"{path}: the compressed file is damaged after line {number - 1}: {error}; restore it"
        ) from None


def split_lines(blocks: Iterable[str], on_long: Callable[[int], None]) -> Iterator[Line]:
    """Yield (number from 1, line) of the text in ``blocks``.

    A line that is longer than ``LONGEST_LINE`` is cut where a block ends, and ``on_long`` is first called with its
    number.
    """
    number, tail, size, is_cut = 1, [""], 0, False
    for block in newlines(blocks, TEXT_LINE_END):
        first, *lines = block.split("\n")
        tail.append(first)
        size += len(first)
        while size > LONGEST_LINE:
            if not is_cut:
                on_long(number)
            text, is_cut = "".join(tail), True
            border = _border(text, LONGEST_LINE)
            yield number, text[:border]
            yield number, CUT
            tail, size = [text[border:]], size - border
        if not lines:
            continue
        yield number, "".join(tail)
        if is_cut:
            yield number, CUT
        tail, is_cut = [lines.pop()], False
        yield from enumerate(lines, number + 1)
        number, size = number + 1 + len(lines), len(tail[0])
    if size:
        yield number, "".join(tail)


def newlines(blocks: Iterable[str], ends: re.Pattern[str]) -> Iterator[str]:
    """Yield ``blocks`` with every match of ``ends`` replaced by a newline."""
    held = ""
    for block in chain(blocks, [None]):
        text = held + (block or "")
        # Carriage returns at the end of a block may be followed by a newline.
        kept = len(text) if block is None else max(len(text.rstrip("\r")), len(text) - 2)
        text, held = text[:kept], text[kept:]
        if "\r" in text:
            text = text.replace("\r\n", "\n")
        if "\r" in text or "\u2028" in text or "\u2029" in text:
            text = ends.sub("\n", text)
        yield text


def _border(text: str, most: int) -> int:
    """Return where to cut a text: after the last space in the second half of its first ``most`` characters, else
    between grapheme clusters."""
    for space in " \t\u3000":
        if (border := text.rfind(space, most // 2, most) + 1) > 0:
            return border
    border = most
    while border > most // 2 and (continues_cluster(text[border]) or joins_next(text[border - 1])):
        border -= 1
    return border
