"""``bert-data clean``: every rule, the report, the files of text, and mistakes."""

import gzip
import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bert_jax.commands.data import main
from data_pipeline.contrib.clean.drop_counts import Tally, merge
from data_pipeline.text.corpus import list_sources
from data_pipeline.text.documents import read_documents

WORDS = [f"word{number}" for number in range(200)]
OFF = {
    "encoding": "off", "least_words": 0, "exact_duplicates": "false", "boilerplate": 0, "near_duplicates": 0,
}  # fmt: skip


def text(seed: int, words: int = 40) -> str:
    """A line of random words."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def write(folder: Path, *documents: str, name: str = "a.txt") -> Path:
    """A corpus of one file; a document is a string with line ends."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    return folder


def clean(corpus: Path, **options: object) -> tuple[list[str], dict[str, Any]]:
    """Clean ``corpus`` with only the rules in ``options``; return the remaining documents and the report."""
    output = corpus.parent / f"out{len(list(corpus.parent.iterdir()))}"
    flags = [word for name, value in (OFF | options).items() for word in (f"--{name}", *str(value).split())]
    # Files, not their folder: in a folder, a file of which every document has one line is one document.
    files = map(str, sorted(corpus.iterdir()))
    assert main(["clean", "--corpus", *files, "--output", str(output), "--workers", "1", *flags]) == 0
    return remaining(output), json.loads((output / "cleaned.json").read_text(encoding="utf-8"))


def remaining(output: Path) -> list[str]:
    """The documents of a folder of cleaned text, as ``bert-data shards`` reads them."""
    if not any(output.rglob("*.txt")):
        return []
    sources = list_sources([str(output)])
    return [
        "\n".join(document)
        for source in sources
        for document in read_documents(source, line="sentence", json_field="text")
    ]


# ------------------------------------------------------------------ rules


def test_exact_duplicates_keep_the_first_in_the_order_of_the_corpus(tmp_path: Path) -> None:
    corpus = write(tmp_path / "text", text(3), text(1), text(3), name="b.txt")
    write(corpus, text(1), text(2), text(1).upper(), name="a.txt")
    found, report = clean(corpus, exact_duplicates="true")
    assert found == [text(1), text(2), text(1).upper(), text(3)]
    own = report["rules"]["exact_duplicate"]
    assert (own["documents"], own["characters"]) == (2, len(text(1)) + len(text(3)))
    first, second = own["examples"]
    assert (first["source"], first["document"]) == ("b.txt", 2)
    assert first["equal_to"] == {"source": "a.txt", "document": 1} and first["text"].startswith(text(1)[:150])
    assert second["equal_to"] == {"source": "b.txt", "document": 1}


@cache
def grams(document: str) -> frozenset[tuple[str, ...]]:
    """Set of the 5-grams of a document."""
    words = document.lower().split()
    return frozenset(tuple(words[i : i + 5]) for i in range(max(len(words) - 4, 1)))


def similarity(first: str, second: str) -> float:
    """Jaccard similarity of the sets of 5-grams, by definition."""
    a, b = grams(first), grams(second)
    return len(a & b) / len(a | b)


def families(count: int) -> list[str]:
    """Random documents, each with changed copies of all similarities, in random order."""
    draw, documents = random.Random(7), []
    for number in range(count):
        words = text(number, draw.randint(40, 120)).split()
        documents.append(" ".join(words))
        for _ in range(5):
            copy = list(words)
            for _ in range(draw.randint(1, 6)):
                copy[draw.randrange(len(copy))] = "new" + str(draw.randrange(9))
            documents.append(" ".join(copy[draw.randint(0, 6) :]))
        documents.append(documents[-1].upper())
    draw.shuffle(documents)
    return documents


@pytest.mark.parametrize("threshold", [0.5, 0.7, 1.0])
def test_near_duplicates_are_those_of_brute_force(tmp_path: Path, threshold: float) -> None:
    """With one row per band, every pair with a common 5-gram is almost certainly compared."""
    documents = families(15)
    expected: list[str] = []
    for document in documents:
        if all(similarity(document, kept) < threshold for kept in expected):
            expected.append(document)
    found, report = clean(write(tmp_path / "text", *documents), near_duplicates=threshold, bands=128, rows=1)
    assert found == expected and 10 < len(expected) < len(documents) - 10
    own = report["rules"]["near_duplicate"]
    assert own["documents"] == len(documents) - len(expected)
    assert len(own["examples"]) == min(20, own["documents"])
    for one in own["examples"]:
        assert one["similarity"] == round(similarity(documents[one["document"] - 1],
                                                     documents[one["similar_to"]["document"] - 1]), 3)  # fmt: skip
        assert documents[one["similar_to"]["document"] - 1] in expected


def test_recall_with_the_default_bands(tmp_path: Path) -> None:
    documents = families(25)
    found, report = clean(write(tmp_path / "text", *documents), near_duplicates=0.7)
    pairs = [{a, b} for at, a in enumerate(documents) for b in documents[at + 1 :] if similarity(a, b) >= 0.7]
    missed = sum(pair <= {*found} for pair in pairs)
    assert len(pairs) > 100 and missed <= 0.05 * len(pairs)
    assert all(max(similarity(one, kept) for kept in found) >= 0.7 for one in documents)
    assert report["candidates"]["probability_by_similarity"]["0.7"] == 0.9899


def test_chinese_near_duplicates(tmp_path: Path) -> None:
    first = "我们在北京大学学习计算机科学和人工智能技术。"
    documents = [first, first.replace("北京", "南京"), first.replace("技术", "技术课")]
    found, _ = clean(write(tmp_path / "text", *documents), near_duplicates=0.7, bands=128, rows=1)
    assert found == documents[:2]


def test_repeated_lines_remain_in_the_first_document(tmp_path: Path) -> None:
    notice = "We use cookies on this site"
    documents = [f"{notice}\n{text(number)}\nHome" for number in range(4)]
    documents += [f"{text(9)}\n{notice.upper()}!\n{notice}", f"Short one\n{notice}", text(8)]
    found, report = clean(write(tmp_path / "text", *documents), boilerplate=4, least_words=5)
    # One word is less than boilerplate_words, and a document that gets too short is dropped.
    assert found == [documents[0], *(f"{text(number)}\nHome" for number in (1, 2, 3)), text(9), text(8)]
    own = report["rules"]["boilerplate"]
    assert (own["lines"], own["documents"]) == (6, 1)
    assert own["examples"][0] == {
        "source": "a.txt", "document": 2, "line": 1, "documents": 6, "text": notice,
    }  # fmt: skip
    assert [one["line"] for one in own["examples"] if one["document"] == 5] == [2, 3]
    assert next(one for one in own["examples"] if one["document"] == 6) == {
        "source": "a.txt", "document": 6, "words_left": 2, "text": "Short one",
    }  # fmt: skip
    found, _ = clean(write(tmp_path / "text", *documents), boilerplate=7)
    assert found == documents
    found, _ = clean(write(tmp_path / "text", *documents), boilerplate=4, boilerplate_words=1)
    assert found[1] == text(1)


def test_copies_of_a_document_are_not_repeated_lines(tmp_path: Path) -> None:
    documents = [f"{text(number)}\n{text(number + 50)}" for number in (1, 1, 1, 1, 2)]
    found, report = clean(write(tmp_path / "text", *documents), boilerplate=2, exact_duplicates="true")
    assert found == [documents[0], documents[4]] and report["rules"]["boilerplate"]["lines"] == 0
    documents.append(f"{text(1)}\n{text(3)}")  # with the first document, two that contain the line
    found, _ = clean(write(tmp_path / "text", *documents), boilerplate=3, exact_duplicates="true")
    assert found == [documents[0], *documents[4:]]
    found, _ = clean(write(tmp_path / "text", *documents), boilerplate=2, exact_duplicates="true")
    assert found == [documents[0], documents[4], text(3)]


def test_length(tmp_path: Path) -> None:
    documents = ["one two three four", "one two three four five", text(1, 9), text(1, 10), "在北京大学", "..."]
    found, report = clean(write(tmp_path / "text", *documents), least_words=5, most_words=9)
    assert found == [documents[1], documents[2], documents[4]]
    assert [one["words"] for one in report["rules"]["length"]["examples"]] == [4, 10, 0]


def test_short_documents_without_the_rule_of_length(tmp_path: Path) -> None:
    """Documents of fewer than five words are similar only if all their words are equal."""
    documents = ["one two", "One, two!", "one two three", "...", "?", text(1)]
    found, _ = clean(write(tmp_path / "text", *documents), near_duplicates=0.7)
    assert found == [documents[0], *documents[2:]]


def test_encoding(tmp_path: Path) -> None:
    pytest.importorskip("ftfy", reason="needs the extra clean")
    long = "A line that is long enough to keep the document in spite of all the others that are around it"
    mojibake = "The café is “nice”".encode().decode("cp1252", "ignore")
    documents = [
        f"{long}\n{mojibake}\nA \x07bell\x0band a tab\tend\nThe r\ufffdst",
        f"{long}\n{long[:60]}\ufffd",
        "Schöne Grüße",
    ]
    corpus = write(tmp_path / "text", *documents)
    found, report = clean(corpus, encoding="repair")
    assert found[0].startswith(f"{long}\nThe café is “nice") and found[0].endswith("\nA bell and a tab\tend")
    assert found[1:] == [documents[2]]
    own = report["rules"]["encoding"]
    assert (own["documents"], own["lines"], own["lines_repaired"], own["control_characters_removed"]) == (
        1,
        1,
        1,
        1,
    )
    assert [one.get("line") for one in own["examples"]] == [2, 3, 4, None]
    assert own["examples"][1]["repaired"] == "A bell and a tab end" and own["examples"][3]["broken_share"] == 0.396
    found, _ = clean(corpus, encoding="repair", broken_share=0.5)
    assert found[1] == long
    found, report = clean(write(tmp_path / "broken", "\ufffd", long), encoding="repair", broken_share=1)
    assert found == [long] and report["rules"]["encoding"]["documents"] == 1
    found, _ = clean(corpus, encoding="drop", broken_share=1)
    assert found == [long, long, documents[2]]
    found, _ = clean(corpus)
    assert found == documents


@pytest.mark.slow
def test_languages(tmp_path: Path) -> None:
    pytest.importorskip("py3langid", reason="needs the extra clean")
    documents = [
        "This is a sentence in the English language, and it says nothing of interest.",
        "Dies ist ein Satz in der deutschen Sprache, und er sagt nichts von Belang.",
        "这是一个中文句子，没有什么有趣的内容。",
    ]
    found, report = clean(write(tmp_path / "text", *documents), languages="de zh")
    assert found == documents[1:]
    (one,) = report["rules"]["language"]["examples"]
    assert one["language"] == "en" and one["probability"] > 0.5


# ------------------------------------------------------------------ files and report


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Documents of one line stay documents, also if a folder inside the output is read."""
    corpus = write(tmp_path / "text", text(1), text(2))
    (corpus / "b.jsonl").write_text(
        "".join(json.dumps({"text": f"{text(i)}\n\n {text(i + 9)} "}) + "\n" for i in (3, 4))
    )
    (corpus / "a.txt.gz").write_bytes(gzip.compress(text(5).encode()))
    found, report = clean(corpus)
    expected = [text(5), text(1), text(2), *(f"{text(i)}\n{text(i + 9)}" for i in (3, 4))]
    assert sorted(found) == sorted(expected)
    files = {source["name"]: source["file"] for source in report["sources"]}
    assert files == {
        "a.txt": "a.txt",
        "a.txt.gz": "a-2.txt",
        "b.jsonl": "b.jsonl.txt",
    }
    output = tmp_path / "folder"
    words = ["--corpus", str(corpus), "--output", str(output), "--encoding", "off", "--workers", "1"]
    assert main(["clean", *words]) == 0
    assert sorted(remaining(output)) == sorted(remaining(output / "text")) and len(remaining(output)) == 4
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".clean")]


def test_examples_do_not_depend_on_the_jobs() -> None:
    """The examples of several tallies are those of one, in the order of the corpus."""
    places = [(source, number) for source in range(3) for number in range(40)]
    whole, parts = Tally(), [Tally() for _ in range(4)]
    for at, place in enumerate(places):
        for tally in (whole, parts[at % 4]):
            tally.add("length", documents=1)
            tally.offer("length", place, 0, lambda place=place: {"text": str(place)})
    counts, examples = merge(tally.as_json() for tally in parts)
    assert (counts, examples) == merge([whole.as_json()]) and counts == {"length": {"documents": 120}}
    assert len(examples["length"]) == 20 == len(json.loads(whole.as_json())["examples"]["length"])
    chosen = [one["place"][:2] for one in examples["length"]]
    assert chosen == sorted(chosen) and {source for source, _ in chosen} == {0, 1, 2}


def test_counts_add_up(tmp_path: Path) -> None:
    documents = [*families(8), "too short", text(99), text(99)]
    _, report = clean(
        write(tmp_path / "text", *documents), exact_duplicates="true", near_duplicates=0.7, least_words=5
    )
    dropped = sum(own["documents"] for own in report["rules"].values())
    gone = sum(own["characters"] for own in report["rules"].values())
    assert report["documents_in"] == len(documents) == report["documents_out"] + dropped
    assert report["characters_in"] == sum(map(len, documents)) == report["characters_out"] + gone
    (source,) = report["sources"]
    assert (source["documents_in"], source["documents_out"]) == (len(documents), report["documents_out"])


def test_the_report_to_read(tmp_path: Path) -> None:
    clean(write(tmp_path / "text", *families(8), "short | one"), least_words=5, near_duplicates=0.7)
    (page,) = tmp_path.glob("out*/cleaned.md")
    content = page.read_text()
    assert "| length: too few or too many words | 1 | 0 | 11 |" in content
    assert "language: other languages (off)" in content and "25 bands of 5 rows" in content
    assert "0.5: 0.5478" in content and "a.txt document 57: words 2: 'short | one'" in content
    assert len(re.findall(r"^\* .*similar_to", content, re.MULTILINE)) == 20


def test_no_documents(tmp_path: Path) -> None:
    corpus = tmp_path / "text"
    corpus.mkdir()
    (corpus / "a.txt").write_text(" \n\n")
    found, report = clean(corpus, least_words=5, boilerplate=2, near_duplicates=0.7)
    assert found == [] and report["documents_in"] == report["documents_out"] == 0


def test_nothing_remains(tmp_path: Path) -> None:
    found, report = clean(write(tmp_path / "text", "a b", "c"), least_words=5)
    assert found == [] and report["sources"][0]["file"] == "" and report["documents_out"] == 0


def test_the_same_command_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write(tmp_path / "text", text(1), text(1)) / "a.txt"
    words = ["clean", "--corpus", str(corpus), "--output", str(tmp_path / "out"), "--encoding", "off"]
    words += ["--workers", "1"]
    assert main(words) == 0 and "exact_duplicate: 1 documents" in capsys.readouterr().out
    before = (tmp_path / "out" / "a.txt").stat().st_mtime_ns
    work = tmp_path / "out" / ".clean-0123456789abcdef"  # of a run that was killed after its report
    work.mkdir()
    (work / "plan").write_text("")
    assert main(words) == 0 and "already cleaned" in capsys.readouterr().out
    assert not work.exists() and (tmp_path / "out" / "a.txt").stat().st_mtime_ns == before
    assert main([*words, "--near_duplicates", "0.9"]) == 2
    assert "cleaned with other settings (clean.near_duplicates, clean.bands, clean.rows)" in capsys.readouterr().err


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--output is not set"),
        (["--output", "full"], "full: the folder is not empty (notes); name a new folder"),
        (["--output", "text/sub"], "is in the corpus text; name a folder outside of it"),
        (["--output", "out", "--languages", "en", "xx"], "clean.languages: 'xx' is not allowed; use one of ace"),
        (["--output", "out", "--bands", "20"], "clean.rows: 0 is not allowed; allowed: a number above 0 exactly"),
        (["--output", "out", "--near_duplicates", "1.5"], "clean.near_duplicates: 1.5 is not allowed; allowed:"),
        (["--output", "out", "--boilerplate", "1"], "allowed: 0 (off), or 2 or more documents"),
        (["--output", "out", "--most_words", "3"], "allowed: 0 (off), or at least clean.least_words (5)"),
        (["--output", "out", "--encoding", "fix"], "clean.encoding: 'fix' is not allowed; allowed: repair, drop"),
        (["--output", "out", "--clean.near_duplicate", "0.5"], "did you mean 'clean.near_duplicates'"),
        (["--output", "out", "--", "--x"], "require --runner beam"),
        (["--output", "out", "--corpus", "missing"], "missing: no such file or folder"),
    ],
)  # fmt: skip
def test_wrong_command_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str],
    message: str,
) -> None:  # fmt: skip
    if "--languages" in options:
        pytest.importorskip("py3langid", reason="needs the extra clean")
    monkeypatch.chdir(tmp_path)
    write(Path("text"), text(1))
    write(Path("full"), "1", name="notes")
    base = ["clean", "--corpus", "text", *([] if "--encoding" in options else ["--encoding", "off"])]
    assert main([*base, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1, error
    assert not Path("out/cleaned.json").exists()


def test_text_that_is_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write(tmp_path / "text", text(1))
    (corpus / "b.txt").write_bytes(b"fine\n\nna\xefve\n")
    assert main(["clean", "--corpus", str(corpus), "--output", str(tmp_path / "out"), "--encoding", "off"]) == 2
    assert "b.txt:3: not valid UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "option"), [("ftfy", ["--encoding", "repair"]), ("py3langid.langid", ["--languages", "en"])]
)
def test_missing_libraries(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: str,
    option: list[str],
) -> None:
    from data_pipeline.contrib.clean import rules

    rules._identifier.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, module, None)
    corpus = write(tmp_path / "text", text(1))
    words = ["clean", "--corpus", str(corpus), "--output", str(tmp_path / "out"), "--encoding", "off", *option]
    assert main(words) == 2
    assert "pip install 'bert_jax[clean]'" in capsys.readouterr().err
