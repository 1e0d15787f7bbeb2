"""Pages of a MediaWiki XML dump, one at a time.

The format follows https://www.mediawiki.org/xml/export-0.11.xsd and its older versions: ``mediawiki`` holds
``siteinfo`` (the names of the namespaces) and ``page`` elements with ``title``, ``ns``, perhaps ``redirect``, and
revisions from old to new; only the last one is read.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn
from xml.parsers import expat

from bert_jax.io.storage import Location
from data_pipeline.text.compressed import DamagedFile, read_blocks

MOST_CHARACTERS = 1 << 23  # of a page; MediaWiki allows 2 MB, and the memory of a process shall be bounded
_REDIRECT = re.compile(r"\s*#\w+\s*:?\s*\[\[")
_ARTICLES = "0"


@dataclass(frozen=True)
class Page:
    """One page of a dump."""

    title: str
    namespace: str  # "0" for an article
    is_redirect: bool
    model: str  # content model; "wikitext" for text
    text: str  # wikitext of the last revision
    is_too_long: bool  # the text has more than MOST_CHARACTERS characters and was not kept


class Dump:
    """Reader of one dump file: :meth:`pages`, and ``namespaces``, which is complete when the first page is yielded.

    ``namespaces`` maps the names of the namespaces, in lower case, to their keys ("6" for files).
    """

    def __init__(self, path: Location) -> None:
        self.path = path
        self.namespaces = {"file": "6", "image": "6", "category": "14"}  # valid in every language
        self._pages: list[Page] = []
        self._count = 0
        self._open: list[str] = []  # names of the open elements
        self._value: list[str] | None = None  # text of the element that is being read
        self._size = 0
        self._start_page()

    def pages(self) -> Iterator[Page]:
        """Yield the pages in the order of the file, which is read in blocks.

        Raises ``ValueError`` (one line) if the file is damaged, is not a MediaWiki dump, or declares a document
        type, the only place where entities can be declared.
        """
        parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.buffer_size = 1 << 16
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.StartDoctypeDeclHandler = self._refuse_doctype
        try:
            for block in read_blocks(self.path):
                parser.Parse(block, False)
                yield from self._finished()
            parser.Parse(b"", True)
        except DamagedFile as error:
            raise ValueError(
                f"{self.path}: the compressed file is damaged after page {self._count:,}: {error}; restore it"
            ) from None
        except expat.ExpatError as error:
            raise ValueError(
                f"{self.path}:{error.lineno}: not valid XML after page {self._count:,}: "
                f"{expat.ErrorString(error.code)}; name a MediaWiki XML dump (.xml, or compressed: .bz2, .gz, .zst)"
            ) from None
        yield from self._finished()

    def _finished(self) -> Iterator[Page]:
        pages, self._pages = self._pages, []
        yield from pages

    def _refuse_doctype(self, *_: object) -> NoReturn:
        raise ValueError(
            f"{self.path}: the file declares a document type, which may define entities that fill the memory; "
            "no MediaWiki dump has one; download the dump again"
        )

    def _start_page(self) -> None:
        self._title = self._model = self._text = ""
        self._namespace: str | None = None
        self._is_redirect = self._is_too_long = False

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if not self._open and name != "mediawiki":
            raise ValueError(
                f"{self.path}: the first element is <{name[:40]}>; expected <mediawiki>; name a MediaWiki XML dump"
            )
        self._open.append(name)
        parent = self._open[-2] if len(self._open) > 1 else ""
        if name == "page":
            self._start_page()
        elif name == "revision":
            self._model, self._text, self._is_too_long = "", "", False
        elif name == "redirect" and parent == "page":
            self._is_redirect = True
        elif name == "namespace":
            self._key = attributes.get("key", "")
            self._read()
        elif (name in ("title", "ns") and parent == "page") or (name in ("text", "model") and parent == "revision"):
            self._read()

    def _read(self) -> None:
        self._value, self._size = [], 0

    def _characters(self, text: str) -> None:
        if self._value is not None:
            self._size += len(text)
            if self._size <= MOST_CHARACTERS:
                self._value.append(text)

    def _end(self, name: str) -> None:
        self._open.pop()
        if name == "page":
            self._count += 1
            self._pages.append(self._page())
        if self._value is None:
            return
        value, self._value = "".join(self._value), None
        if name == "namespace":
            self.namespaces[value.strip().lower()] = self._key
        elif name == "title":
            self._title = value.strip()
        elif name == "ns":
            self._namespace = value.strip()
        elif name == "model":
            self._model = value.strip()
        elif name == "text":
            self._is_too_long = self._size > MOST_CHARACTERS
            self._text = "" if self._is_too_long else value

    def _page(self) -> Page:
        namespace = self._namespace
        if namespace is None:  # a dump before version 0.6 of the format, which has no redirect elements either
            prefix, colon, _ = self._title.partition(":")
            namespace = self.namespaces.get(prefix.strip().lower(), _ARTICLES) if colon else _ARTICLES
        is_redirect = self._is_redirect or _REDIRECT.match(self._text) is not None
        model = self._model or "wikitext"
        return Page(self._title, namespace, is_redirect, model, self._text, self._is_too_long)
