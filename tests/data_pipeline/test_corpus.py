"""Readers of raw text and the sentence splitter."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from data_pipeline.text import documents
from data_pipeline.text.corpus import list_sources
from data_pipeline.text.documents import read_documents
from data_pipeline.text.sentences import split_sentences


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


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    half = len(SENTENCE_FILE) // 2
    parts = [SENTENCE_FILE[:half].encode(), SENTENCE_FILE[half:].encode()]
    compress = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    path.write_bytes(b"".join(map(compress, parts)))  # two members or frames, as parallel compressors write
    assert read(path) == DOCUMENTS
    damaged = tmp_path / f"b.txt{suffix}"
    damaged.write_bytes(path.read_bytes()[:-6])
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


def test_the_decision_rests_on_the_first_lines_only(tmp_path: Path) -> None:
    lines = ["A. B. C."] * 300
    sentences = [f"Line {number}." for number in range(200)]
    assert len(read(write(tmp_path / "a.txt", "\n".join(sentences + lines)))[0]) == 500
    assert len(read(write(tmp_path / "b.txt", "\n".join(["Ab. Cd."] * 300)))[0]) == 600


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
        ("[1, 2]", ":2: no text in field 'text'"),
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


@pytest.mark.parametrize(
    "sentences",
    [
        ["Hello there.", "How are you?", "Fine!"],
        ["Dr. Smith met Mr. J. R. Jones at 5 p.m. on Monday.", "They talked."],
        ["It cost 3.50 dollars, i.e. too much.", "He left ... and came back.", "So did I.", "Really."],
        ['"Stop!" he cried.', '"Why?"', "“No idea.”", "(It was late.)", "Then rain."],
        ["Das ist z.B. ein Satz.", "Übrigens: noch einer."],
        ["Он пришёл в 5 ч. утра, т.е. рано.", "«Кто там?»", "Никто не ответил…", "Тихо."],
        ["see e.g. fig. 3 and no. 7 below."],
        ["今天天气很好。", "你好吗？", "他说：“好！”", "「走吧。」", "完"],
        ["no end of sentence"],
    ],
)
def test_sentence_splitting(sentences: list[str]) -> None:
    is_chinese = sentences[0][0] == "今"
    assert split_sentences(("" if is_chinese else " ").join(sentences)) == sentences


def test_sentence_splitting_loses_nothing_but_blanks() -> None:
    assert split_sentences("  ") == []
    assert split_sentences(" A b.  C d! ") == ["A b.", "C d!"]
    assert split_sentences("Wait...What? Yes.") == ["Wait...What?", "Yes."]
