"""Lines of a corpus with damaged characters or markup, and lines without."""

import json
import textwrap

import pytest

from bert_jax.commands.pretrain import corpus_lines
from bert_jax.config import DataConfig
from bert_jax.contrib.doctor.text_checks import check_text, is_misread

LINES = [
    "\u201cNa\u00efve?\u201d she said.",
    "Gr\u00fc\u00dfe aus K\u00f6ln",
    "\u0412\u043e\u0439\u043d\u0430 \u0438 \u043c\u0438\u0440",
    "\u4e2d\u6587\u7ef4\u57fa\u767e\u79d1",
    "5 < 6 & 7 > 4",
    "R&D; \u00c2 \u00a9",
]
SENTENCES = [f"The {i}th sentence{' of the text' * (i % 9)} says little, but it ends." for i in range(100)]


def statuses(lines, encoding="auto"):
    return {one.check: one.status for one in check_text(lines, encoding)}


def test_text_without_faults_has_no_remark():
    checks = (
        "text encoding",
        "markup",
        "text format",
        "repeated line",
        "tokenized text",
        "wrapped lines",
        "passages",
        "copied lines",
    )
    assert statuses(LINES * 10) == dict.fromkeys(checks, "OK")  # too short for passages and punctuation
    assert statuses(SENTENCES) == dict.fromkeys((*checks, "punctuation"), "OK")
    assert check_text([], "auto") == []


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "cp1251"])
def test_utf_8_that_was_read_as_another_encoding(encoding):
    lines = [line.encode().decode(encoding, "ignore") for line in LINES[1:3] * 10]
    assert all(map(is_misread, lines))
    found = check_text(lines, encoding)[0]
    assert found.status == "FAIL"
    assert f"data.encoding {encoding}" in found.advice
    assert "ftfy" in check_text(lines, "auto")[0].advice


def test_replacement_characters():
    assert statuses([*LINES * 10, *["caf\ufffd"] * 5])["text encoding"] == "LOOK"
    assert statuses([*LINES * 10, *["caf\ufffd"] * 4])["text encoding"] == "OK"


@pytest.mark.parametrize("line", ['<p class="a">Text</p>', "a&nbsp;b &quot;c&quot;", "[[Berlin]] is a {{city}}"])
def test_markup(line):
    assert statuses([line, *["a line of fifty letters, more or less, of plain text"] * 5])["markup"] == "LOOK"


@pytest.mark.parametrize("suffix, status", [("txt", "FAIL"), ("jsonl", "OK")])
def test_json_in_a_text_file(tmp_path, suffix, status):
    file = tmp_path / f"corpus.{suffix}"
    file.write_text("".join(json.dumps({"text": f"{line} {i}"}) + "\n" for i, line in enumerate(LINES)))
    lines = corpus_lines(DataConfig(corpus=(str(file),)), 1000)
    assert len(lines) == len(LINES)
    assert statuses(lines)["text format"] == status
    assert statuses([*[f"{i}" for i in range(90)], *lines])["text format"] == ("LOOK" if status == "FAIL" else "OK")


@pytest.mark.parametrize("count, other, status", [(30, 270, "LOOK"), (30, 700, "OK"), (5, 10, "OK")])
def test_a_line_that_is_found_everywhere(count, other, status):
    lines = [*["This page uses cookies."] * count, *(f"line {i}" for i in range(other))]
    assert statuses(lines)["repeated line"] == status


@pytest.mark.parametrize(
    "menu, status",
    [
        ([f"Read part {i} of this site." for i in range(10)], "LOOK"),
        ([f"\u8bf7\u5728\u4e0b\u9762\u7684\u8bc4\u8bba\u533a{i}\u3002" for i in range(10)], "LOOK"),
        # Short lines, such as headings and names of speakers.
        ([f"Chapter the {i}th" for i in range(10)], "OK"),
        ([f"\u4e2d\u6587\u7ef4\u57fa\u767e{i}" for i in range(10)], "OK"),
    ],
)
def test_lines_that_are_copies(menu, status):
    """A menu of ten lines, each between other lines and less than 5% of the text."""
    lines = [line for i, text in enumerate(SENTENCES) for line in (text, menu[i // 2 % 10])[: 1 + i % 2]]
    found = {one.check: one for one in check_text(lines, "auto")}
    assert (found["copied lines"].status, found["repeated line"].status) == (status, "OK")
    assert status == "OK" or (found["copied lines"].number == 1 / 3 and menu[0] in found["copied lines"].value)
    # Fewer than 20 copies.
    assert statuses([*SENTENCES[:20], *menu[:1] * 5])["copied lines"] == "OK"


@pytest.mark.parametrize("line", ["a man ##if ##est ##o", "a man@@ if@@ est@@ o", "\u2581a \u2581man if est"])
def test_text_that_was_tokenized(line):
    assert statuses([line] * 10)["tokenized text"] == "FAIL"
    assert statuses([line, *SENTENCES])["tokenized text"] == "OK"
    assert statuses(["## Heading", "#hashtag", "a@@b", "me@there"])["tokenized text"] == "OK"


def test_text_without_punctuation():
    words = [line.replace(",", "").replace(".", "") for line in SENTENCES]
    assert statuses(words)["punctuation"] == "LOOK"
    assert statuses([*words, *SENTENCES])["punctuation"] == "OK"
    assert statuses(["\u6211\u6765\u4e86\u3002"] * 1000)["punctuation"] == "OK"


def test_documents_that_overlap():
    cut = [SENTENCES[start : start + 20] for start in range(0, 90, 10)]
    assert statuses([line for document in cut for line in document])["passages"] == "FAIL"
    assert statuses([*SENTENCES, *SENTENCES[:30]])["passages"] == "LOOK"
    # Each line is repeated, beside other lines each time.
    assert statuses([*SENTENCES, *SENTENCES[::2], *SENTENCES[1::2]])["passages"] == "OK"


def test_wrapped_lines():
    wrapped = textwrap.wrap(" ".join(SENTENCES), 70)
    assert statuses(wrapped)["wrapped lines"] == "FAIL"
    assert statuses([*SENTENCES * 4, *wrapped])["wrapped lines"] == "LOOK"
    # Lines that continue but have lengths of their own, as in verse.
    assert statuses(["of " * (3 + i % 9) + "the" for i in range(100)])["wrapped lines"] == "OK"


def test_the_lines_of_a_corpus(tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text("".join(f"file {number} line {i}.\n\n" for i in range(100)))
    lines = corpus_lines(DataConfig(corpus=(str(tmp_path), "hf:owner/name", str(tmp_path / "gone"))), 1000)
    assert lines[0] == "file 0 line 0."
    assert len({line.split()[1] for line in lines}) == 10
    assert 1000 <= sum(map(len, lines)) < 1400
    assert corpus_lines(DataConfig(corpus=("gone.txt",)), 1000) == []
