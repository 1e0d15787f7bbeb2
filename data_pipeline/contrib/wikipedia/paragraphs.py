"""The second pass over wikitext: lines, paragraphs and inline marks.

The paragraphs are those that MediaWiki displays as running text: "we extract only the text passages and ignore
lists, tables, and headers" (Devlin et al. 2018, section 3.1).
"""

import html
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from html.entities import html5

from data_pipeline.contrib.wikipedia.markup import HOLE, JOINT, resolve_markup

_BREAKING = frozenset({"p", "div", "center", "hr", "table", "tr", "td", "th", "tbody", "section"})
# Elements in which indentation makes neither lists nor preformatted text. A line of its own marks start and end.
_MARKS = {"poem": "\x03", "blockquote": "\x04", "/poem": "\x05", "/blockquote": "\x05"}
_TAG = re.compile(r"<(/?[A-Za-z][\w-]*)(?=[\s/>])[^<>]*>")
_SWITCH = re.compile(r"__[A-Z]{3,}__")
_LIST, _HEADING = "*#:;", re.compile(r"=.*=$")
_LINK = re.compile(r"\[(?:(?:https?|ftp|irc|news|mailto|gopher):|//)[^\s\[\]<>\"]*+([^\[\]]*+)\]", re.IGNORECASE)
_QUOTES = re.compile(r"'{2,}")
_VARIANT = re.compile(r"-\{([^{}]*)\}-")
_LEFT = re.compile(r"\[\[+|\]\]+|\{\{+|\}\}+|\{\||\|\}|'''+|</?[A-Za-z][^<>]*>")
_BRACKETS = re.compile(r"([ \t]*)([(（])([^()（）]*)([)）])")
_HOLES = re.compile(rf"(\s*)(?:{HOLE}\s*)+")
_SEPARATOR = re.compile(r"([;,，；、])")
_DANGLING = re.compile(
    r"(?:.*[:：]|.*\b(?:pronounced|pronunciation|from|or|also|in|IPA|born|about|see)|\W*)$", re.IGNORECASE
)
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
# Zero-width spaces and marks, soft hyphens, byte order marks, control characters. Zero-width (non-)joiners stay:
# some scripts need them.
_INVISIBLE = re.compile(
    "[\u0000-\u0008\u000e-\u001b\u007f-\u0084\u0086-\u009f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\ufeff]"
)
_PASSES = 3  # over text in which one removal may lead to another
_LETTER = re.compile(r"[^\W\d_]")


def article_paragraphs(text: str, namespaces: Mapping[str, str], counts: Counter[str]) -> list[str]:
    """Return the paragraphs of the wikitext of an article, each one line of plain text with a letter in it.

    ``namespaces`` maps the names of the dump's namespaces to their keys. What was dropped is added to ``counts``.
    Any text is allowed; broken markup never raises.
    """
    resolved = resolve_markup(text, namespaces, counts)
    paragraphs = []
    for lines in _blocks(_SWITCH.sub(HOLE, _without_tags(resolved)), counts):
        paragraph = _plain(" ".join(lines))
        if _LETTER.search(paragraph):
            paragraphs.append(paragraph)
        elif paragraph:
            counts["paragraphs without a letter"] += 1
    return paragraphs


def _without_tags(text: str) -> str:
    """Remove HTML tags; block elements end paragraphs, a line break becomes a space.

    ``JOINT`` before a space shows that the space did not begin the source line and is therefore not indentation.
    """
    return _TAG.sub(_tag_space, text) if "<" in text else text


def _tag_space(match: re.Match[str]) -> str:
    name = match[1].lower()
    if name in _MARKS:
        return f"\n{_MARKS[name]}\n{JOINT}"
    if name.lstrip("/") in _BREAKING:
        return f"\n\n{JOINT}"
    quotes = (
        match.string[match.start() - 1 : match.start()] in "'>"
        and match.string[match.end() : match.end() + 1] in "'<"
    )
    return f"{JOINT} " if name == "br" else JOINT if quotes else ""


def _blocks(text: str, counts: Counter[str]) -> Iterator[list[str]]:
    """Yield the lines of each paragraph: neighboring lines that are not list lines, headings or preformatted."""
    block: list[str] = []
    mark = ""  # of the poem or quotation around the line
    for line in text.split("\n"):
        stripped = line.strip()
        if stripped and stripped in "\x03\x04\x05":
            mark, dropped = "" if stripped == "\x05" else stripped, ""
        else:
            stripped = stripped.lstrip(": \t") if mark == _MARKS["poem"] else stripped
            dropped = _kind_of_line(stripped, is_indented=line[:1] in (" ", "\t") and not mark)
        if dropped == "text":
            block.append(_without_quotes(stripped) if "''" in stripped else stripped)
            continue
        mark = "" if dropped == "headings" else mark  # the element was not closed
        if dropped:
            counts[dropped] += 1
        if block:
            yield block
            block = []
    if block:
        yield block


def _kind_of_line(stripped: str, *, is_indented: bool) -> str:
    """Return "text", the name under which a dropped line is counted, or "" for a blank line or a rule."""
    text = stripped.lstrip(HOLE) if stripped[:1] == HOLE else stripped
    start = text[:1]
    if not text.strip(JOINT) or text.startswith("----"):
        return ""
    if is_indented:
        return "preformatted lines"
    if start in _LIST:
        return "list lines"
    if start == "=" and _HEADING.match(text.rstrip(f"{HOLE} \t")):
        return "headings"
    return "lines of broken tables" if start == "|" or text.startswith("!!") else "text"


def _without_quotes(line: str) -> str:
    """Remove the marks of bold and italic text from a line, by the rules of MediaWiki's ``doQuotes``.

    If both the bold and the italic marks are odd in number, one bold mark is an apostrophe and an italic mark:
    ``''Time'''s`` is "Time's".
    """
    parts = _QUOTES.split(line)
    lengths = [len(mark) for mark in _QUOTES.findall(line)]
    kept = []
    for i, length in enumerate(lengths):
        mark = 2 if length == 2 else 3 if length in (3, 4) else 5
        kept.append(length - mark)
        lengths[i] = mark
    bold = sum(length in (3, 5) for length in lengths)
    italic = sum(length in (2, 5) for length in lengths)
    if bold % 2 and italic % 2:
        threes = [i for i, length in enumerate(lengths) if length == 3]
        after_one = [i for i in threes if parts[i][-1:] != " " and parts[i][-2:-1] == " "]
        after_word = [i for i in threes if parts[i][-1:] != " "]
        if threes:
            kept[(after_one or after_word or threes)[0]] += 1
    return parts[0] + "".join("'" * count + part for count, part in zip(kept, parts[1:], strict=True))


def _plain(text: str) -> str:
    """Return the plain text of a paragraph: without external links, left-over markup, holes and entities."""
    text = " ".join(text.replace(JOINT, "").split())
    if "[" in text:
        text = _LINK.sub(lambda match: match[1].strip() or HOLE, text)
    if "-{" in text:
        text = _VARIANT.sub(_variant, text)
    if HOLE in text:
        text = _close_holes(text)
    text = _without_leftovers(text)
    if "&" in text:
        text = _ENTITY.sub(_character, text)
    return " ".join(_INVISIBLE.sub("", text).split())


def _without_leftovers(text: str) -> str:
    """Remove brackets and marks that belong to no element."""
    for _ in range(_PASSES):
        if not _LEFT.search(text):
            return text
        text = _LEFT.sub("", text)  # what was apart may stand together now
    return text.translate(dict.fromkeys(map(ord, "[]{}|<>")))


def _character(match: re.Match[str]) -> str:
    """Return the characters of an entity; an unknown name stays as it is."""
    entity = match.group()
    return html.unescape(entity) if entity[1] == "#" else html5.get(entity[1:], entity)


def _variant(match: re.Match[str]) -> str:
    """Return the text of a choice between Chinese scripts, ``-{zh-hans:A; zh-hant:B}-``: the first one."""
    flags, bar, rules = match[1].rpartition("|")
    if bar and set(flags.strip()) & set("HTD"):
        return ""
    first = rules.partition(";")[0]
    return first.rpartition(":")[2].strip() if "zh" in first.partition(":")[0] else rules


def _close_holes(text: str) -> str:
    """Remove the marks of dropped elements, and the brackets, separators and spaces that have lost their text."""
    for _ in range(_PASSES):  # nested brackets from the inner ones out
        text = _BRACKETS.sub(_bracket, text)
    return _HOLES.sub(_hole_space, text).replace("( ", "(")


def _bracket(match: re.Match[str]) -> str:
    """Drop the parts of a bracket that consist of dropped elements; drop the bracket if no part is left."""
    if HOLE not in match[3]:
        return match.group()
    parts = _SEPARATOR.split(match[3])  # text, separator, text, ...
    kept = ""
    for i in range(0, len(parts), 2):
        remaining = parts[i].replace(HOLE, "").strip()
        if HOLE in parts[i] and _DANGLING.match(remaining):
            continue
        separator = parts[i - 1] if kept else ""
        kept += separator + (parts[i] if kept else parts[i].lstrip())
    if not kept.strip(f"{HOLE} \t"):
        return HOLE
    return f"{match[1]}{match[2]}{kept.rstrip()}{match[4]}"


def _hole_space(match: re.Match[str]) -> str:
    following = match.string[match.end() : match.end() + 1]
    has_space = match[1] or match.group()[-1:].isspace()
    if match.start() == 0 or following in ",.;:!?)]，。；：！？）" or not has_space:
        return ""
    return " "
