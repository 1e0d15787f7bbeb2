"""Readers of raw text and the sentence splitter."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest
import zstandard

from bert_jax.config.pretrain import DataConfig
from data_pipeline.text import documents
from data_pipeline.text import lines as lines_module
from data_pipeline.text.corpus import LeftOut, list_corpus, list_sources, listing_of
from data_pipeline.text.documents import Reading, read_documents, undecodable_together


def read(*entries: Path | str, line: str = "auto", json_field: str = "text") -> list[list[str]]:
    sources = list_sources([str(entry) for entry in entries])
    return [doc for source in sources for doc in read_documents(source, line=line, json_field=json_field)]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


SENTENCE_FILE = "One is here.\nTwo is here.\n\n\n  \nThree is here.\n"
DOCUMENTS = [["One is here.", "Two is here."], ["Three is here."]]


def test_a_sentence_a_line_with_blank_lines_between_documents(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", SENTENCE_FILE)) == DOCUMENTS


def test_byte_order_mark_and_carriage_returns_are_dropped(tmp_path: Path) -> None:
    text = "\ufeff" + SENTENCE_FILE.replace("\n", "\r\n")
    assert read(write(tmp_path / "a.txt", text)) == DOCUMENTS


COMPRESS = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress,
}  # fmt: skip


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    half = len(SENTENCE_FILE) // 2
    parts = [SENTENCE_FILE[:half].encode(), SENTENCE_FILE[half:].encode()]
    path.write_bytes(b"".join(map(COMPRESS[suffix], parts)))  # two members or frames, as parallel compressors write
    assert read(path) == DOCUMENTS
    path.rename(upper := tmp_path / f"A.TXT{suffix.upper()}")
    assert read(upper) == DOCUMENTS
    damaged = tmp_path / f"b.txt{suffix}"
    damaged.write_bytes(upper.read_bytes()[:-6])
    with pytest.raises(ValueError, match=rf"b\.txt{suffix}: the compressed file is damaged after line"):
        read(damaged)
    damaged.write_bytes(b"no such format " * 4)
    with pytest.raises(ValueError, match="damaged after line 0"):
        read(damaged)


def test_paragraphs_are_split_and_sentences_are_not(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "One is here. Two is here.\nThree! Four?\n\nFive. Six.\n")
    split = [["One is here.", "Two is here.", "Three!", "Four?"], ["Five.", "Six."]]
    assert read(path) == split  # auto
    assert read(path, line="paragraph") == split
    assert read(path, line="sentence") == [["One is here. Two is here.", "Three! Four?"], ["Five. Six."]]
    lines = [f"Line {number} is one sentence." for number in range(99)]
    mostly = write(tmp_path / "b.txt", "\n".join([*lines, "Two. Here."]))
    assert read(mostly)[0][-1] == "Two. Here."


@pytest.mark.slow
def test_the_decision_rests_on_lines_of_the_whole_file(tmp_path: Path) -> None:
    titles = [f"chapter {number} of the book" for number in range(210)]
    paragraph = "They walk to the river. " + "It is cold today. " * 20 + "We stay."
    contents = write(tmp_path / "a.txt", "\n".join([*titles, *[paragraph] * 60]))
    assert len(read(contents)[0]) == 210 + 60 * 22
    # Few paragraphs that hold most of the text, and a large file whose first lines are sentences.
    few = write(tmp_path / "b.txt", "\n".join([*titles, *[paragraph] * 10]))
    assert len(read(few)[0]) == 210 + 10 * 22
    large = write(
        tmp_path / "c.txt", "\n".join([*[f"Line {number}." for number in range(11_000)], *[paragraph] * 5000])
    )
    reading = Reading("c")
    next(read_documents(list_sources([str(large)])[0], line="auto", json_field="text", reading=reading))
    assert (reading.line, reading.blank_lines) == ("paragraph", "documents")


def test_folders_are_read_recursively_in_sorted_order(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    write(folder / "b.txt", "B one.\nB two.\n\nB three.\n")
    write(folder / "a" / "z.txt", "Z one.\n\nZ two.\n\nZ three.\n")  # paragraphs: one document
    write(folder / "a.jsonl", '{"text": "J one."}\n')
    write(folder / "empty.txt", "")
    write(folder / "notes.md", "not text")
    write(folder / ".hidden" / "x.txt", "hidden")
    sources = list_sources([str(folder)])
    assert [source.name for source in sources] == ["text/a.jsonl", "text/a/z.txt", "text/b.txt"]
    assert read(folder) == [["J one."], ["Z one.", "Z two.", "Z three."], ["B one.", "B two."], ["B three."]]
    # A file named outright: blank lines separate documents.
    assert read(folder / "a" / "z.txt") == [["Z one."], ["Z two."], ["Z three."]]
    # The first document may be long.
    long = [f"Sentence {i}." for i in range(500)]
    write(tmp_path / "long" / "c.txt", "\n".join([*long, "", "C one.", "C two.", ""]))
    assert read(tmp_path / "long") == [long, ["C one.", "C two."]]
    # The order is that of the names, not of the arguments.
    assert read(tmp_path / "text" / "b.txt", tmp_path / "text" / "a.jsonl")[0] == ["J one."]


def test_json_lines(tmp_path: Path) -> None:
    texts = ["One is here. Two is here.\n\nThree.", "", "  \n", "中文。没有空格！", "lone \ud800 half"]
    path = write(tmp_path / "a.jsonl", "\n".join(json.dumps({"text": text}) for text in texts) + "\n\n")
    assert read(path) == [
        ["One is here.", "Two is here.", "Three."],
        ["中文。", "没有空格！"],
        ["lone ? half"],
    ]
    assert read(path, line="sentence")[0] == ["One is here. Two is here.", "Three."]
    other = write(tmp_path / "b.jsonl", '{"body": "Hello."}\n')
    assert read(other, json_field="body") == [["Hello."]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "unfinished', ":2: not valid JSON"),
        ('{"body": "x"}', ":2: no text in field 'text'"),
        ('{"text": 5}', ":2: no text in field 'text'"),
        ("[1, 2]", ":2: not valid JSON: a list among records"),
        pytest.param("[" * 100_000, ":2: not valid JSON", id="deep"),
        pytest.param('{"text": ' + "1" * 5000 + "}", ":2: not valid JSON", id="digits"),
    ],
)
def test_bad_json_lines_name_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_invalid_utf8_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\n" * 300 + b"caf\xe9\n")
    documents = read_documents(list_sources([str(path)])[0], line="sentence", json_field="text")
    with pytest.raises(ValueError, match=r"a\.txt:301: not valid UTF-8"):
        list(documents)


def test_missing_and_empty_corpora(tmp_path: Path) -> None:
    empty_folder = tmp_path / "folder"
    empty_folder.mkdir()
    cases = {
        str(tmp_path / "none.txt"): "no such file or folder",
        str(write(tmp_path / "empty.txt", "")): "the file is empty",
        str(empty_folder): "the folder contains no text",
        "package:no-such-package-here": "not installed; run: pip install no-such-package-here",
        "package:": "not installed",
        "package:pytest": "contains no text files",
    }
    for entry, message in cases.items():
        with pytest.raises(ValueError, match=message):
            list_sources([entry])
    with pytest.raises(ValueError, match=r"data\.corpus: not set"):
        list_sources([])
    assert read(write(tmp_path / "blank.txt", " \n\n\t\n")) == []


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "text" / "a.txt", "A.")
    with pytest.raises(ValueError, match="in the corpus twice"):
        list_sources([str(path.parent), str(path)])


def test_a_very_long_document_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_MAX_SENTENCES", 10)
    path = write(tmp_path / "a.txt", "\n".join(f"Sentence {number}." for number in range(25)))
    assert [len(document) for document in read(path)] == [10, 10, 5]


def test_reading_is_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"One.\n\n" * 10_000 + b"\xff\n")
    documents = read_documents(list_sources([str(path)])[0], line="sentence", json_field="text")
    assert next(documents) == ["One."]  # the damage at the end is not reached yet


def test_text_of_a_package_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "speeches/__init__.py": "raise AssertionError('imported')",
        "speeches/data/1790.txt": "Fellow citizens.\nOne more.\n\nThe end of it.\n",
        "speeches/data/.hidden.txt": "Not this.",
        "speeches/notes.md": "Nor this.",
        "speeches-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: speeches\nVersion: 1.0\n",
        "speeches-1.0.dist-info/licence.txt": "Nor a licence.",
    }
    for name, text in files.items():
        write(tmp_path / name, text)
    record = "".join(f"{name},,\n" for name in [*files, "speeches/data/gone.txt", "../outside.txt"])
    write(tmp_path / "speeches-1.0.dist-info" / "RECORD", record)
    write(tmp_path.parent / "outside.txt", "Nor what lies outside.")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [source.name for source in list_sources(["package:speeches"])] == [
        "package:speeches/speeches/data/1790.txt"
    ]
    assert read("package:speeches") == [["Fellow citizens.", "One more.", "The end of it."]]


BLANK = ["One is here.\nTwo is here.", "Three is here."]


@pytest.mark.parametrize(
    "text",
    [
        "\r\r".join(BLANK).replace("\n", "\r"),
        "\r\r\n\r\r\n".join(BLANK).replace("\n", "\r\r\n").replace("\r\r\r\r\n", "\r\r\n"),
        "\u2029\u2029".join(BLANK).replace("\n", "\u2028"),
        "\n\u200b\n".join(BLANK),
        "\n\xa0\ufeff \n".join(BLANK),
        "\ufeff" + "\n\n\ufeff".join(BLANK),  # files joined by cat
        "\n<|endoftext|>\n".join(BLANK) + "\n<|endoftext|>\n",
        '<doc id="1" title="a">\nOne is here.\n\nTwo is here.\n</doc>\n<doc id="2">\nThree is here.\n</doc>\n',
    ],
)
def test_ends_of_lines_and_documents(tmp_path: Path, text: str) -> None:
    assert read(write(tmp_path / "a.txt", text)) == DOCUMENTS
    records = json.dumps({"text": "One\u2028is."}, ensure_ascii=False) + "\r" + json.dumps({"text": text})
    assert read(write(tmp_path / "a.jsonl", records))[0] == ["One", "is."]  # a JSON line does not end at U+2028


def test_carriage_returns_at_the_border_of_blocks(tmp_path: Path) -> None:
    half = "x" * ((1 << 17) - 1)
    assert read(write(tmp_path / "a.txt", f"{half}\r\n{half}\r\n\r\nC.")) == [[half, half], ["C."]]


RECORDS = [{"text": "One is here.\nTwo is here.", "id": 1}, {"id": 2, "text": "Three is here."}]


@pytest.mark.parametrize("name", ["a.json", "A.JSON", "c4-train.00000.json.gz", "wiki_00", "a.ndjson.xz"])
@pytest.mark.parametrize("form", ["lines", "array", "indented"])
def test_json_under_its_names(tmp_path: Path, name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = {
        "lines": "\n".join(map(json.dumps, RECORDS)),
        "array": json.dumps(RECORDS),
        "indented": "".join(json.dumps(record, indent=1) for record in RECORDS),
    }[form]
    if name == "wiki_00" and form != "lines":
        return
    path = tmp_path / "folder" / name
    path.parent.mkdir()
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(text.encode()))
    assert read(path) == read(path.parent) == DOCUMENTS
    if path.suffix == ".json":
        monkeypatch.setattr("data_pipeline.text.compressed._BLOCK", 7)  # values that end in a later block
        assert read(path) == DOCUMENTS


def test_bad_json_arrays_name_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"a\.json:2: no text in field 'text'"):
        read(write(tmp_path / "a.json", '[{"text": "fine"},\n {"body": "x"}]'))
    with pytest.raises(ValueError, match=r"b\.json:2: not valid JSON"):
        read(write(tmp_path / "b.json", '[{"text": "fine"},\n {"text": "x"'))
    monkeypatch.setattr("data_pipeline.text.documents.LONGEST_RECORD", 200_000)
    for name, text in (("c.jsonl", '{"text": "%s"}'), ("d.json", '[{"text": "%s"}]')):
        with pytest.raises(ValueError, match=rf"{name}:1: .*200,000 characters"):
            read(write(tmp_path / name, text % ("long " * 100_000)))


@pytest.mark.parametrize(
    ("codec", "encoding"),
    [("utf-16", "auto"), ("utf-32", "auto"), ("utf-16-le", "utf-16-le"), ("cp1252", "cp1252")],
)
def test_encodings(tmp_path: Path, codec: str, encoding: str) -> None:
    text = "Ein Satz für alle.\nNoch ein Satz.\n\nDas „Übrige“."
    (tmp_path / "a.txt").write_bytes(text.encode(codec))
    data = DataConfig(corpus=(str(tmp_path / "a.txt"),), encoding=encoding)
    (source,) = listing_of(data).sources
    documents = read_documents(source, line="auto", json_field="text")
    assert list(documents) == [["Ein Satz für alle.", "Noch ein Satz."], ["Das „Übrige“."]]
    with pytest.raises(ValueError, match="encoding"):
        DataConfig(encoding="no-such-code")


def test_all_files_in_another_encoding_are_named_at_once(tmp_path: Path) -> None:
    names = ["a.txt", "b.txt", "c.jsonl"]
    for name in names:
        write(tmp_path / name, "").write_bytes("café\n".encode("latin-1" if name != "b.txt" else "utf-8"))
    (tmp_path / "d.txt").write_bytes(b"fine\n" * 9 + b"caf\xe9")
    sources = list_sources([str(tmp_path)])
    with pytest.raises(ValueError, match=r"data\.encoding") as caught, undecodable_together(sources):
        read(tmp_path)
    found = str(caught.value)
    assert "a.txt:1" in found and "c.jsonl:1" in found and "d.txt:10" in found and "b.txt" not in found


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("book.docx", "plain text"), ("paper.PDF", "plain text"), ("table.csv", "JSON lines"),
        ("t.tsv.gz", "JSON lines"), ("data.parquet", "hf:"), ("all.zip", "unpack"), ("page.html", "text"),
        ("dump.xml.bz2", "bert-data wikipedia"),
    ],
)  # fmt: skip
def test_files_of_another_kind_are_refused_by_name(tmp_path: Path, name: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=rf"{Path(name).stem}.*{remedy}"):
        list_sources([str(write(tmp_path / name, "Some text."))])


PACKED = gzip.compress(b"text", mtime=0)


@pytest.mark.parametrize("content", [b"%PDF-1.7 a", b"PK\x03\x04 a", PACKED, b"\x00\x01\x02" * 9])
def test_binary_content_is_no_text(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "folder" / "a.txt"
    write(path, "").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.txt: the file is "):
        list_sources([str(path)])
    write(tmp_path / "folder" / "b.txt", "Text.")
    listing = list_corpus([str(path.parent)])
    assert [one.name for one in listing.left_out] == ["folder/a.txt"]
    (tmp_path / "c.txt.bz2").write_bytes(bz2.compress(content))
    with pytest.raises(ValueError, match=r"c\.txt\.bz2: the file is "):
        read(tmp_path / "c.txt.bz2")


@pytest.mark.parametrize("order", ["le", "be"])
def test_the_order_of_utf_16_without_a_mark_is_named(tmp_path: Path, order: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(("A text. " * 9).encode(f"utf-16-{order}"))
    with pytest.raises(ValueError, match=rf"requires data.encoding utf-16-{order}\)$"):
        list_sources([str(path)])


def test_a_listing_names_what_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    for name in ("BOOK.TXT", "notes.text", "sub/wiki_07", "x.docx", "y.docx", "image.png", ".hidden.txt"):
        write(folder / name, "Some text.")
    write(folder / "leer.txt", "")
    write(folder / "config.json", '{"hidden_size": 4}')
    write(folder / "good.json", '{"text": "Some text."}')
    write(folder / "settings.json", "{ // a comment\n}")
    listing = list_corpus([str(folder)])
    assert [source.name for source in listing.sources] == [
        "text/BOOK.TXT", "text/good.json", "text/notes.text", "text/sub/wiki_07",
    ]  # fmt: skip
    assert {one.name: one.reason for one in listing.left_out if one.reason} == {
        "text/leer.txt": "is empty", "text/config.json": "has no text in field 'text'",
        "text/settings.json": "is not JSON",
    }  # fmt: skip
    assert LeftOut("text/x.docx") in listing.left_out and len(listing.left_out) == 6
    summary = listing.summary()
    assert summary.startswith("4 files read; skipped: 6 (") and "\n" not in summary
    assert ".docx 2" in summary and ".png 1" in summary and "leer.txt is empty" in summary


def test_outputs_of_this_library_are_not_text(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    write(folder / "text" / "a.txt", "Some text.")
    for name in (
        "old/train/records.index", "old/train/a.txt", "old/store/store.json", "old/store/documents.bin",
        "old/store/b.txt", "run/config.yaml", "run/metrics.jsonl", "run/checkpoints/4/commit_success.txt",
        "export/config.json", "export/model.safetensors", "export/merges.txt", "mine/c.txt",
        "ck/7/commit_success.txt",
    ):  # fmt: skip
        write(folder / name, '{"text": "No."}')
    write(folder / "words.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    data = DataConfig(corpus=(str(folder),), shards=str(folder / "mine"))
    listing = listing_of(data)
    assert [source.name for source in listing.sources] == ["project/text/a.txt"]
    left_out = {one.name.removeprefix("project/") for one in listing.left_out}
    assert left_out == {"old/train", "old/store", "run", "export", "mine", "ck/7", "words.txt"}
    (tmp_path / "more").mkdir()
    damaged = write(tmp_path / "more" / "c4.json.gz", "")
    damaged.write_bytes(gzip.compress(b'{"text": "One."}')[:-9])
    with pytest.raises(ValueError, match="damaged"):
        read(damaged.parent)
    # A folder of shards around the corpus hides nothing.
    around = DataConfig(corpus=(str(folder / "text"),), shards=str(folder))
    assert len(listing_of(around).sources) == 1


def test_a_long_line_leaves_the_borders_of_documents(tmp_path: Path) -> None:
    documents = [[f"First {i}.", f"Second {i}."] for i in range(20)]
    text = "\n\n".join("\n".join(one) for one in documents)
    found = read(
        write(tmp_path / "a.txt", f"{text}\n\n{'ACGT ' * 300_000}\n\nLast one.\nLast two.\n"), line="sentence"
    )
    assert found[:20] == documents
    assert found[-1] == ["Last one.", "Last two."]
    assert len(found) > 22


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["utf-8", "utf-16", "utf-32"])
def test_far_lines_are_not_read_in_another_encoding(tmp_path: Path, codec: str) -> None:
    block = "".join(f"One {i}. Two. Three.\n" if i % 3 else f"Alone {i}.\n" for i in range(40_000))
    path = tmp_path / "a.txt"
    path.write_bytes((block * 2).encode(codec))
    reading = Reading(path.name)
    sources = list_sources([str(path)])
    next(read_documents(sources[0], line="auto", json_field="text", reading=reading))
    assert reading.line == "paragraph"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"text": "A b.",\n "x": 1}\n{"text": "C d."}\n', [["A b."], ["C d."]]),
        ('{"text": "A b."}{"text": "C d."}', [["A b."], ["C d."]]),
        ("[" + " " * 500_000 + '{"text": "A b."}\n]', [["A b."]]),
        ("[" + '{"text": "A b."}, ' * 3 + '{"text": "C d."}', "1: the JSON array has no end"),
        ("\n" * 300_000 + '{"text": "A b."}\n{"text": 5}\n', "300002: no text"),
        ('[{"text": \'single\'}, {"text": "A b."}]', "1: not valid JSON: Expecting value"),
        ('{"text": "A b."}\r{"text": bad}\r', "2: not valid JSON: Expecting value"),
    ],
)
@pytest.mark.parametrize("name", ["a.json", "wiki_00"])
def test_forms_of_json(tmp_path: Path, name: str, text: str, expected: str | list[list[str]]) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode())
    if isinstance(expected, list):
        assert read(path) == expected
    elif name == "a.json":
        with pytest.raises(ValueError, match=rf"a\.json:{expected}"):
            read(path)


def test_long_records_in_files_without_a_suffix(tmp_path: Path) -> None:
    words = " ".join(f"word{i * 7919 % 10007}" for i in range(30_000))
    content = json.dumps({"text": f"{words}."}) + "\n" + json.dumps({"text": "Two."}) + "\n"
    (tmp_path / "wiki_01.xz").write_bytes(lzma.compress(content.encode()))
    (tmp_path / "wiki_02").write_text(content)
    assert [one[-1] for one in read(tmp_path / "wiki_01.xz")] == [f"{words}.", "Two."]
    assert read(tmp_path / "wiki_01.xz") == read(tmp_path / "wiki_02")


def test_links_that_are_not_followed_are_named(tmp_path: Path) -> None:
    write(tmp_path / "texts/a.txt", "One line.\n")
    write(tmp_path / "other/b.txt", "Another.\n")
    (tmp_path / "texts/folder").symlink_to(tmp_path / "other")
    (tmp_path / "texts/broken.txt").symlink_to(tmp_path / "nowhere.txt")
    listing = list_corpus([str(tmp_path / "texts")])
    assert [one.name for one in listing.sources] == ["texts/a.txt"]
    assert [one.name for one in listing.left_out] == ["texts/broken.txt", "texts/folder"]
    assert "texts/folder is a link that is not followed" in listing.summary()


@pytest.mark.parametrize("codec", ["utf-8", "utf-16-le"])
def test_a_byte_order_mark_in_a_named_encoding(tmp_path: Path, codec: str) -> None:
    (tmp_path / "a.jsonl").write_bytes('\ufeff{"text": "One."}\n'.encode(codec))
    (source,) = list_corpus([str(tmp_path / "a.jsonl")], encoding=codec).sources
    assert list(read_documents(source, line="auto", json_field="text")) == [["One."]]


def test_a_line_of_any_length_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "LONGEST_LINE", 1000)
    monkeypatch.setattr("data_pipeline.text.compressed._BLOCK", 700)
    words = [f"word{number}" for number in range(1000)]
    letters = "a\u0301" * 3000
    path = write(tmp_path / "a.txt", f"Short one.\n{' '.join(words)}\n\n{letters}\nShort two.\n")
    reading = Reading("a")
    source = list_sources([str(path)])[0]
    documents = list(read_documents(source, line="sentence", json_field="text", reading=reading))
    assert reading.long_lines == [2, 4]
    texts = [text for document in documents for text in document]
    assert max(map(len, texts)) <= 1000
    assert " ".join(texts[1:-1]).split()[:1000] == words
    pieces = [text for text in texts if text[0] == "a"]
    assert "".join(pieces) == letters and len(pieces) > 5
    assert documents[-1] == ["Short two."]
