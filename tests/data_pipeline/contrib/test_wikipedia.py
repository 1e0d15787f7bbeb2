"""bert-data wikipedia: pages of dumps, files of the corpus, workers, kills, damaged and hostile dumps."""

import bz2
import gzip
import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
import zstandard
from text_corpora import tree, write_vocab

from bert_jax.commands.data import main
from data_pipeline.contrib.wikipedia import dump as dump_module
from data_pipeline.contrib.wikipedia import extract as wikipedia
from data_pipeline.contrib.wikipedia.dump import Dump
from data_pipeline.contrib.wikipedia.extract import extract_wikipedia
from data_pipeline.text.corpus import list_sources
from data_pipeline.text.documents import Source, read_documents

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" version="0.10" xml:lang="de">
<siteinfo><namespaces><namespace key="0" case="first-letter" /><namespace key="1" case="first-letter">Diskussion\
</namespace><namespace key="6" case="first-letter">Datei</namespace></namespaces></siteinfo>
"""


def page(title: str, text: str, *, ns: int | None = 0, more: str = "", revision: str = "") -> str:
    number = "" if ns is None else f"<ns>{ns}</ns>"
    old = "<revision><text>old text</text></revision>"
    return (
        f"<page><title>{title}</title>{number}{more}{old}<revision><comment>[[x]]</comment>{revision}"
        f'<text xml:space="preserve">{text}</text></revision></page>\n'
    )


def xml(*pages: str) -> bytes:
    return (HEAD + "".join(pages) + "</mediawiki>\n").encode()


def articles(count: int) -> list[str]:
    """Pages with their number in the text; every third one is longer."""
    return [
        page(
            f"A{i}",
            f"'''Article''' [[x|{i}]] &amp;amp; more. Next.\n\n" + f"Word{i} goes on. " * (1 + 40 * (i % 3)),
        )
        for i in range(count)
    ]


def extract(dumps: Sequence[Path], output: Path, workers: int = 1) -> dict[str, int]:
    return dict(extract_wikipedia(dumps, output, workers=workers, report=lambda line: None))


def fails(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line that ``bert-data wikipedia`` ends with, code 2 checked."""
    capsys.readouterr()
    assert main(["wikipedia", *map(str, argv)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few articles, files of three chunks."""
    monkeypatch.setattr(wikipedia, "_CHUNK_CHARACTERS", 2000)
    monkeypatch.setattr(wikipedia, "_CHUNKS_PER_FILE", 3)


# ------------------------------------------------------------------ what is read and written


def test_only_the_last_revisions_of_articles_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = tmp_path / "dump.xml"
    dump.write_bytes(
        xml(
            page("A", "First.\n\n[[Datei:B.png|mini|caption]]Second &lt;ref&gt;no&lt;/ref&gt;.\n* list"),
            page("B", "no", more='<redirect title="A" />'),
            page("C", "#WEITERLEITUNG [[A]]"),
            page("Diskussion:A", "no", ns=1),
            page("Diskussion:B", "no", ns=None),
            page("D: E", "Third.", ns=None),
            page("F", '{"json": "no"}', revision="<model>json</model>"),
            page("G", "* list only"),
        )
    )
    assert main(["wikipedia", str(dump), "--output", str(tmp_path / "text"), "--workers", "1"]) == 0
    assert (tmp_path / "text/articles-00000.txt").read_text() == "First.\nSecond.\n\nThird.\n"
    report = json.loads((tmp_path / "text/wikipedia.json").read_text())
    assert report["dumps"] == [["dump.xml", dump.stat().st_size]]
    assert report["counts"] == {
        "pages": 8, "redirects": 2, "pages of other namespaces": 2, "pages without wikitext": 1, "articles": 3,
        "articles written": 2, "articles without a paragraph": 1, "paragraphs": 3, "characters": 19,
        "files": 1, "references": 1, "list lines": 2,
    }  # fmt: skip
    (source,) = list_sources([str(tmp_path / "text")])
    assert source.blank_lines == "documents"
    out = capsys.readouterr().out
    assert "redirects: 2\n" in out and f"text in {tmp_path / 'text'}" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump.xml", "text"]


def test_compressed_dumps_and_parts_give_the_same_text(tmp_path: Path) -> None:
    whole = tmp_path / "whole.xml"
    pages = articles(30)
    whole.write_bytes(xml(*pages))
    extract([whole], tmp_path / "plain")
    expected = (tmp_path / "plain/articles-00000.txt").read_bytes()
    middle = len(whole.read_bytes()) // 2
    compressed = {
        "a.bz2": bz2.compress(whole.read_bytes()[:middle]) + bz2.compress(whole.read_bytes()[middle:]),
        "b.xml.gz": gzip.compress(whole.read_bytes()),
        "c.xml.zst": zstandard.compress(whole.read_bytes()),
    }
    for name, content in compressed.items():
        (tmp_path / name).write_bytes(content)
        extract([tmp_path / name], tmp_path / f"text-{name}")
        assert (tmp_path / f"text-{name}/articles-00000.txt").read_bytes() == expected
    for name, part in {"p1.xml": pages[:11], "p2.xml": pages[11:]}.items():
        (tmp_path / name).write_bytes(xml(*part))
    extract([tmp_path / "p1.xml", tmp_path / "p2.xml"], tmp_path / "parts")
    assert (tmp_path / "parts/articles-00000.txt").read_bytes() == expected


def test_shards_are_built_from_the_text(tmp_path: Path) -> None:
    dump = tmp_path / "dump.xml"
    dump.write_bytes(xml(*(page(f"A{i}", f"w{i} w{i}. W{i} w{i}.\n\nw{i} w{i} w{i}.") for i in range(20))))
    extract([dump], tmp_path / "text")
    source = Source(path=tmp_path / "text/articles-00000.txt", name="text", blank_lines="auto")
    documents = list(read_documents(source, line="auto", json_field="text"))
    assert len(documents) == 20
    assert documents[3] == ["w3 w3.", "W3 w3.", "w3 w3 w3."]
    vocab = write_vocab(tmp_path / "vocab.txt")
    words = ["shards", "--corpus", tmp_path / "text", "--vocab", vocab, "--output", tmp_path / "shards"]
    words += ["--seq_length", 32, "--max_predictions", 5, "--dupe_factor", 1, "--num_shards", 1, "--workers", 1]
    assert main([*map(str, words)]) == 0
    assert (tmp_path / "shards/train/manifest.json").is_file()


def test_pages_that_are_too_long_are_counted_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_module, "MOST_CHARACTERS", 100_000)
    dump = tmp_path / "dump.xml"
    dump.write_bytes(xml(page("A", "long\n" * 1_000_000), page("B", "Kept.")))
    tracemalloc.start()
    first, second = Dump(dump).pages()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    assert (first.is_too_long, first.text) == (True, "")
    assert (second.is_too_long, second.text) == (False, "Kept.")
    assert extract([dump], tmp_path / "text")["pages longer than 8,388,608 characters"] == 1


def test_every_revision_starts_anew(tmp_path: Path) -> None:
    first = "<revision><model>json</model><text>{}</text></revision>"
    dump = tmp_path / "dump.xml"
    dump.write_bytes(
        xml(
            f"<page><title>A</title><ns>0</ns>{first}<revision><text>New.</text></revision></page>",
            f"<page><title>B</title><ns>0</ns>{first}<revision><id>2</id></revision></page>",
        )
    )
    assert [(page.model, page.text) for page in Dump(dump).pages()] == [("wikitext", "New."), ("wikitext", "")]


# ------------------------------------------------------------------ workers and kills


@pytest.mark.slow
@pytest.mark.usefixtures("small_parts")
def test_bytes_do_not_depend_on_workers(tmp_path: Path) -> None:
    dump = tmp_path / "dump.xml"
    dump.write_bytes(xml(*articles(40)))
    counts = [extract([dump], tmp_path / f"text{workers}", workers) for workers in (1, 3)]
    files = tree(tmp_path / "text1")
    assert files == tree(tmp_path / "text3") and counts[0] == counts[1]
    assert len(files) > 3  # several text files of several chunks
    documents = b"\n".join(files[name] for name in sorted(files) if name.endswith(".txt")).decode().split("\n\n")
    assert [text.split(" ")[1] for text in documents] == [str(i) for i in range(40)]


@pytest.mark.usefixtures("small_parts")
def test_a_stopped_build_keeps_finished_chunks_and_shows_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = tmp_path / "dump.xml"
    dump.write_bytes(xml(*articles(40)))
    extract([dump], tmp_path / "whole")
    write, calls = wikipedia.write_chunk, []

    def stop_after(count: int) -> None:
        def interrupted(path: Path, *rest: object) -> None:
            if len(calls) >= count:
                raise KeyboardInterrupt
            calls.append(path.name)
            write(path, *rest)

        monkeypatch.setattr(wikipedia, "write_chunk", interrupted)

    for count in (2, 8):  # in the first file, and in a later one
        stop_after(count)
        with pytest.raises(KeyboardInterrupt):
            extract([dump], tmp_path / "text")
        assert not (tmp_path / "text").exists()
    stop_after(10**6)
    extract([dump], tmp_path / "text")
    assert len(calls) == len(set(calls))  # nothing twice
    assert tree(tmp_path / "text") == tree(tmp_path / "whole")


def test_a_partial_folder_of_another_dump_is_not_used(tmp_path: Path) -> None:
    dump, other = tmp_path / "dump.xml", tmp_path / "other.xml"
    dump.write_bytes(xml(*articles(3)))
    other.write_bytes(xml(*articles(5)))
    partial = tmp_path / ".text.partial"
    (partial / "done").mkdir(parents=True)
    (partial / "settings.json").write_text(wikipedia._json({"dumps": [[other.name, other.stat().st_size]]}))
    for name in ("00000.json", "chunk-0000000.json"):
        (partial / "done" / name).write_text("{}")
    (partial / "articles-00000.txt").write_text("stale\n")
    assert extract([dump], tmp_path / "text")["articles written"] == 3
    assert "stale" not in (tmp_path / "text/articles-00000.txt").read_text()


def test_a_finished_folder_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump, other = tmp_path / "dump.xml", tmp_path / "other.xml"
    dump.write_bytes(xml(*articles(3)))
    other.write_bytes(xml(*articles(4)))
    counts = extract([dump], tmp_path / "text")
    before = tree(tmp_path / "text")
    assert extract([dump], tmp_path / "text") == counts
    assert "was not made from these dumps" in fails(capsys, other, "--output", tmp_path / "text")
    assert tree(tmp_path / "text") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    assert "was not made from these dumps" in fails(capsys, dump, "--output", tmp_path / "mine")
    assert tree(tmp_path / "mine") == {"notes.txt": b"mine"}


# ------------------------------------------------------------------ damaged and hostile dumps


@pytest.mark.parametrize("suffix", [".bz2", ".gz", ".zst"])
@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_damaged_compressed_dumps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, damage: str
) -> None:
    compress = {
        ".bz2": bz2.compress,
        ".gz": gzip.compress,
        ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    }
    content = bytearray(compress[suffix](xml(*articles(50))))
    if damage == "truncated":
        del content[-20:]
    else:
        content[len(content) // 2] ^= 0xFF
    dump = tmp_path / f"dump.xml{suffix}"
    dump.write_bytes(content)
    line = fails(capsys, dump, "--output", tmp_path / "text", "--workers", 1)
    assert str(dump) in line and (
        "is damaged after page" in line or (damage == "changed" and "not valid XML" in line)
    )
    assert not (tmp_path / "text").exists()


def bomb(declarations: str, use: str) -> bytes:
    return f"<!DOCTYPE mediawiki [{declarations}]>\n".encode() + xml(page("A", use))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            bomb('<!ENTITY a "aaaaaaaaaa">' + "".join(
                f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True)
            ), "&i;"),
            "declares a document type",
        ),
        (bomb('<!ENTITY a SYSTEM "file:///etc/passwd">', "&a;"), "declares a document type"),
        (xml(*articles(3))[:-40], "dump.xml:11: not valid XML after page 2: no element found"),
        (xml(page("A", "&undeclared;")), "undefined entity"),
        (b"<html><body/></html>", "the first element is <html>; expected <mediawiki>"),
        (b"7z\xbc\xaf", "not valid XML after page 0"),
        (b"", "not valid XML after page 0: no element found"),
        (xml(page("A", "* list")), "no article with a paragraph in 1 dump(s)"),
        (xml(page("A", "text \x01")), "not well-formed"),
    ],
    ids=["bomb", "external", "cut", "entity", "html", "7z", "empty", "no-text", "control"],
)  # fmt: skip
def test_hostile_and_broken_dumps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    dump = tmp_path / "dump.xml"
    dump.write_bytes(content)
    assert message in fails(capsys, dump, "--output", tmp_path / "text", "--workers", 1)
    assert not (tmp_path / "text").exists()


def test_mistakes_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = tmp_path / "dump.xml"
    dump.write_bytes(xml(*articles(3)))
    output = ["--output", tmp_path / "text"]
    assert "no dump; run: bert-data wikipedia" in fails(capsys, *output)
    assert "no --output" in fails(capsys, dump)
    assert "no such file" in fails(capsys, tmp_path / "absent.xml", *output)
    assert "named twice" in fails(capsys, dump, dump, *output)
    assert "--worker: unknown option; allowed: --output, --workers" in fails(capsys, dump, *output, "--worker", 2)
    assert "not a local folder" in fails(capsys, dump, "--output", "gs://bucket/text")
    assert "was not made from these dumps" in fails(capsys, dump, "--output", dump)
