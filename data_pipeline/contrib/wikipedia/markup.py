"""The first pass over wikitext: templates, links, tables, references and other nested elements.

One scan with a stack of open elements, so that the time is proportional to the length of the text, whatever its
markup. The rules follow MediaWiki's preprocessor (https://www.mediawiki.org/wiki/Preprocessor_ABNF) for
balanced markup. An element that is never closed ends at the next blank line or heading instead of hiding the rest
of the page.
"""

import re
from collections import Counter
from collections.abc import Mapping

from data_pipeline.contrib.wikipedia.templates import expand

# Mark of an element that was dropped, a character that XML cannot contain. The second pass closes the hole.
HOLE = "\x02"
JOINT = "\x06"  # keeps apart the quote marks before and after a removed bracket or tag
_MOST_OPEN = 100  # nested elements; further ones are not opened

# Elements of which the contents are not prose. The first ones are read as they are up to their end tag.
_RAW = frozenset(
    """
    ref math chem ce gallery timeline source syntaxhighlight score imagemap hiero graph mapframe maplink inputbox
    categorytree templatedata templatestyles pre includeonly indicator charinsert style script h1 h2 h3 h4 h5 h6
    rt rp li dt dd
    """.split()  # noqa: SIM905
)
_NESTED = frozenset({"table", "ul", "ol", "dl", "references"})
_COUNTED = {"ref": "references", "math": "formulas", "chem": "formulas", "ce": "formulas", "table": "tables"}
_COUNTED |= dict.fromkeys(("ul", "ol", "dl", "li", "dt", "dd"), "list lines")

_CONTROLS = re.compile("[\x00-\x08]")  # XML cannot contain them
_TAG = rf"<(?P<tag>{'|'.join(sorted(_RAW | _NESTED))}|nowiki)(?=[\s/>])(?P<attributes>[^<>]*)>"
_OUTSIDE = rf"<!--|{_TAG}|\{{\{{+|\}}\}}+|\[\[(?!\[)|\]\]|^[ \t:]*\{{\|(?!\}}\}})|^[ \t]*\|\}}(?!\}})"
_TOKEN = re.compile(_OUTSIDE, re.MULTILINE | re.IGNORECASE)
_TOKEN_INSIDE = re.compile(rf"{_OUTSIDE}|\|", re.MULTILINE | re.IGNORECASE)
_REF_END = re.compile(r"</ref\s*>|<ref(?=[\s/>])|\n==", re.IGNORECASE)
_BLANK_LINE = re.compile(r"\n[ \t]*\n|\n==|\n'''")
_HEADING = re.compile(r"\n(?===)")
_LITERAL = {ord(char): f"&#{ord(char)};" for char in "[]{}|'<>=_-! \n"}  # entities stay entities in nowiki
_PROTOCOL = re.compile(r"(?:https?:|ftp:)?//", re.IGNORECASE)
# Prefix of a link to the same article in another language, for example [[de:Anarchismus]]; such a link is not
# displayed. Other prefixes of this form belong to sister projects.
_LANGUAGE = re.compile(r"(?:[a-z]{2,3}|simple)(?:-[a-z-]{2,})?$")
_PROJECTS = frozenset({"doi", "rfc", "hdl", "voy", "wmf", "oeis"})
_MEDIA = re.compile(r"\.(?:jpe?g|png|svg|gif|tiff?|webp|ogg|ogv|oga|webm|pdf|djvu)$", re.IGNORECASE)
_LINE_END = re.compile(r"[ \t]*(?=\n)")
_BRACKETS = re.compile(r"\s*\([^()]*\)$")


class _Element:
    """An open template ("{"), link ("[") or table ("t"); ``""`` is the page."""

    __slots__ = ("arguments", "braces", "kind", "parts")

    def __init__(self, kind: str, braces: int = 0) -> None:
        self.kind = kind
        self.braces = braces  # opening braces that are not matched yet
        self.arguments: list[str] = []  # finished arguments
        self.parts: list[str] = []  # of the argument that is being read

    def end_argument(self) -> None:
        self.arguments.append("".join(self.parts))
        self.parts = []

    def source(self) -> str:
        return "|".join([*self.arguments, "".join(self.parts)])


def resolve_markup(text: str, namespaces: Mapping[str, str], counts: Counter[str]) -> str:
    """Return wikitext without templates, links, tables, references and comments.

    Links are replaced by their labels, templates that carry prose by their text, everything else by ``HOLE``. The
    contents of nowiki become character references. Inline HTML, external links, bold and italic marks, headings and
    list lines remain. ``namespaces`` comes from the dump. What was dropped is added to ``counts``. Never raises.
    """
    return _Scanner(_CONTROLS.sub("", text), namespaces, counts).run()


class _Scanner:
    def __init__(self, text: str, namespaces: Mapping[str, str], counts: Counter[str]) -> None:
        self.text = text
        self.at = 0
        self.namespaces = namespaces
        self.counts = counts
        self.stack = [_Element("")]
        self.open = Counter[str]()
        self.unclosed: set[str] = set()  # tags without an end tag in the rest of the page

    def run(self) -> str:
        text = self.text
        while True:
            top = self.stack[-1]
            token = (_TOKEN_INSIDE if top.kind in ("{", "[") else _TOKEN).search(text, self.at)
            if token is None:
                break
            chunk = text[self.at : token.start()]
            self.at = token.end()
            found = token.group()
            if found == "|":
                top.parts.append(chunk)
                top.end_argument()
            elif found == "<!--":
                self._comment(chunk)
            else:
                top.parts.append(chunk)
                self._token(found, token)
        self.stack[-1].parts.append(text[self.at :])
        return self._unwind()

    def _token(self, found: str, token: re.Match[str]) -> None:
        if found == "[[":
            self._push("[")
        elif found == "]]":
            self._close_link()
        elif found.startswith("{{"):
            self._push("{", len(found))
        elif found.startswith("}}"):
            self._close_braces(len(found))
        elif found.startswith("<"):
            self._tag(token)
        elif found.endswith("{|"):
            self._push("t")
        else:
            self._close_table()

    def _emit(self, text: str) -> None:
        self.stack[-1].parts.append(text)

    def _push(self, kind: str, braces: int = 0) -> None:
        if len(self.stack) <= _MOST_OPEN:
            self.stack.append(_Element(kind, braces))
            self.open[kind] += 1

    def _pop(self) -> _Element:
        element = self.stack.pop()
        self.open[element.kind] -= 1
        return element

    # -------------------------------------------------------------- raw text

    def _comment(self, chunk: str) -> None:
        """Skip a comment; if it is all of its line, skip the line, as MediaWiki does."""
        end = self.text.find("-->", self.at)
        self.at = len(self.text) if end < 0 else end + 3
        self.counts["comments"] += 1
        line = _LINE_END.match(self.text, self.at)
        before = chunk.rstrip(" \t")
        if line and before.endswith("\n"):
            chunk, self.at = before[:-1], line.end()
        self._emit(chunk)

    def _tag(self, token: re.Match[str]) -> None:
        """Skip an element that is not prose, or keep the contents of nowiki."""
        name = token["tag"].lower()
        if token["attributes"].endswith("/"):
            if name == "ref":
                self.counts["references"] += 1
            self._emit("" if name == "nowiki" else HOLE)
            return
        end, after = self._element_end(name)
        if end < 0:
            self._unclosed_tag(name, token["attributes"])
            return
        if name == "nowiki":
            self._emit(JOINT + self.text[self.at : end].translate(_LITERAL))
        else:
            self.counts[_COUNTED.get(name, "other elements")] += 1
            self._emit(f"\n\n{HOLE}" if name in _NESTED else HOLE)
        self.at = after

    def _element_end(self, name: str) -> tuple[int, int]:
        """Return the place of the end tag and the place after it; (-1, -1) if the element is not closed."""
        if name in self.unclosed:
            return -1, -1
        if name == "ref":
            # A reference contains neither references nor headings: it was not closed if one begins.
            end = _REF_END.search(self.text, self.at)
            return (-1, -1) if end is None or end.group()[:2] != "</" else end.span()
        depth = 1
        for tag in re.compile(rf"<(/?){name}(?=[\s/>])[^<>]*>", re.IGNORECASE).finditer(self.text, self.at):
            if tag[1]:
                depth -= 1
            elif name in _NESTED and not tag.group().endswith("/>"):
                depth += 1
            if not depth:
                return tag.span()
        self.unclosed.add(name)
        return -1, -1

    def _unclosed_tag(self, name: str, attributes: str) -> None:
        """Skip only the tag or, if its contents are not prose, everything up to the end of the line."""
        following = self.text[self.at : self.at + 1]
        is_repeated = name == "ref" and "name" in attributes and (not following or following in " \n.,;:)<")
        if name != "nowiki" and name not in _NESTED and not is_repeated:
            newline = self.text.find("\n", self.at)
            self.at = len(self.text) if newline < 0 else newline
        self._emit(HOLE)

    # -------------------------------------------------------------- templates

    def _close_braces(self, count: int) -> None:
        while count >= 2 and self.open["{"]:
            if not self._unwind_links():
                return
            element = self.stack[-1]
            element.end_argument()
            is_parameter = count >= 3 and element.braces >= 3
            if is_parameter:
                value = element.arguments[1] if len(element.arguments) > 1 else HOLE
            else:
                value = self._template(element.arguments)
            used = 3 if is_parameter else 2
            count -= used
            element.braces -= used
            element.arguments, element.parts = [], []
            if element.braces < 2:
                self._pop()
            parent = self.stack[-1]
            if value == "|" and parent.kind == "[":  # {{!}} in a link
                parent.end_argument()
            else:
                # An equals sign of the text must not name an argument of the template around it.
                parent.parts.append(value.replace("=", "&#61;") if parent.kind == "{" else value)

    def _unwind_links(self) -> bool:
        """Turn the links that were opened in the last template and not closed into text. Returns False, and does
        nothing, if a table was opened in the template."""
        depth = len(self.stack) - 1
        while self.stack[depth].kind == "[":
            depth -= 1
        if self.stack[depth].kind != "{":
            return False
        while len(self.stack) - 1 > depth:
            source = self._pop().source()
            self._emit(source)
        return True

    def _template(self, arguments: list[str]) -> str:
        text = expand([argument.replace(HOLE, "") if i == 0 else argument for i, argument in enumerate(arguments)])
        self.counts["templates without prose" if text is None else "templates replaced by their text"] += 1
        if text is None:
            return HOLE
        return text + JOINT if text.endswith("\n") else text

    # -------------------------------------------------------------- tables

    def _close_table(self) -> None:
        if not self.open["t"]:
            return
        while self._pop().kind != "t":  # elements that were not closed in the table
            pass
        self.counts["tables"] += 1
        self._emit(f"\n\n{HOLE}")

    # -------------------------------------------------------------- links

    def _close_link(self) -> None:
        if self.stack[-1].kind != "[":
            return
        part = "".join(self.stack[-1].parts)
        if self.text.startswith("]", self.at) and part.count("[") > part.count("]"):
            self._emit("]")  # [[a|[b]]] : the first bracket belongs to the label
            self.at += 1
        element = self._pop()
        element.end_argument()
        label = self._link_text(element.arguments)
        self._emit(f"{JOINT}{label}{JOINT}" if "''" in label else label)

    def _link_text(self, arguments: list[str]) -> str:
        target = arguments[0].replace(HOLE, "").strip()
        label = "|".join(arguments[1:])
        if _PROTOCOL.match(target):
            return f"[{'|'.join(arguments)}]"
        if "\n" in target:  # not a link: [[ was not closed on its line
            return "|".join(arguments)
        prefix, colon, _ = target.partition(":")
        if colon and prefix:
            kind = self.namespaces.get(prefix.strip().lower(), "")
            kind = "6" if not kind and _MEDIA.search(target) else kind  # an older name of the namespace
            if kind in ("6", "14"):
                self.counts["files" if kind == "6" else "categories"] += 1
                return HOLE
            prefix = prefix.strip()
            if not kind and prefix not in _PROJECTS and _LANGUAGE.match(prefix):
                self.counts["links to other languages"] += 1
                return HOLE
        if label.strip():
            return label
        target = target.lstrip(":").lstrip()
        if len(arguments) > 1:  # [[Mercury (planet)|]] : the name without prefix and brackets
            return _BRACKETS.sub("", target.rpartition(":")[2])
        return target.removeprefix("#")

    # -------------------------------------------------------------- elements that were never closed

    def _unwind(self) -> str:
        """Return the text of the page, with the open elements ended at the next blank line or heading."""
        pieces = []
        end: re.Pattern[str] | None = None
        for element in self.stack:
            if element.kind:
                self.counts["elements that were not closed"] += 1
            is_file = element.kind == "[" and self._is_file(element)
            if element.kind == "t":
                end = _HEADING
            elif (element.kind == "{" or is_file) and end is None:
                end = _BLANK_LINE
            text = element.source() if element.kind else "".join(element.parts)
            if end is not None:
                found = end.search(text)
                if found is None:
                    text = HOLE
                else:
                    text, end = f"{HOLE}\n\n{text[found.start() :].lstrip()}", None
            pieces.append(text)
        return "".join(pieces)

    def _is_file(self, element: _Element) -> bool:
        prefix = (element.arguments or ["".join(element.parts)])[0].partition(":")[0]
        return self.namespaces.get(prefix.strip().lower()) == "6"
