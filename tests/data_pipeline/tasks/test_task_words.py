"""Records of tagged words: CoNLL columns, folders of slots, SNIPS lines."""

import pytest
from task_files import read, write

from bert_jax.records import Record


def refusal(*arguments, **options) -> str:
    with pytest.raises(ValueError) as caught:
        read(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ------------------------------------------------------------------ CoNLL


def test_conll_2003(tmp_path):
    content = (
        "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\n\n\nPeter NNP B-NP B-PER\n"
        "-DOCSTART- -X- -X- O\n\nUK NNP B-NP B-LOC\n\n"
    )
    path = write(tmp_path / "eng.txt", content)
    assert read(path, kind="tagging") == [
        Record(id="0", source=f"{path}:3", words=("EU", "rejects"), tags=("B-ORG", "O"), group=f"{path}:1"),
        Record(id="1", source=f"{path}:8", words=("Peter",), tags=("B-PER",), group=f"{path}:1"),
        Record(id="2", source=f"{path}:11", words=("UK",), tags=("B-LOC",), group=f"{path}:2"),
    ]
    assert read(path, "words=1", "tags=2", kind="tagging")[0].tags == ("NNP", "VBZ")


def test_without_documents_each_sentence_is_its_own(tmp_path):
    path = write(tmp_path / "x.conll", "\n\na O\n \t \r\nb O\r\n\r\nc O")
    records = read(path, kind="tagging")
    assert [r.words for r in records] == [("a",), ("b",), ("c",)]
    assert [r.source for r in records] == [f"{path}:3", f"{path}:5", f"{path}:7"]
    assert len({r.group for r in records}) == 3


def test_words_may_hold_anything_but_their_separator(tmp_path):
    odd = ["#", "#tag", '"', "a\u00a0b", "\u2028", "x\u200by", "\ufe0f", "\u3000"]
    path = write(tmp_path / "x.txt", "".join(f"{word} O\n" for word in odd))
    assert read(path, kind="tagging")[0].words == tuple(odd)
    path = write(tmp_path / "y.txt", "New York\tB-LOC\n\tO\nis\t O \t\n")
    record = read(path, kind="tagging")[0]
    assert record.words == ("New York", "", "is") and record.tags == ("B-LOC", "O", "O")


def test_conllu(tmp_path):
    content = (
        "# newdoc id = 1\n# text = vámonos\n1-2\tvámonos\t_\t_\n1\tvamos\tir\tVERB\n2\tnos\tnos\tPRON\n"
        "2.1\tx\tx\tX\n\n# newdoc\n1\t#\t#\tSYM\n\n"
    )
    path = write(tmp_path / "x.conllu", content)
    first, second = read(path, "words=2", "tags=4", kind="tagging")
    assert (first.words, first.tags, first.source) == (("vamos", "nos"), ("VERB", "PRON"), f"{path}:4")
    assert (second.words, second.tags) == (("#",), ("SYM",)) and first.group != second.group
    assert refusal(write(tmp_path / "y.conllu", "a\tDET\n"), kind="tagging").startswith(
        f"{tmp_path / 'y.conllu'}:1: id 'a' is not allowed; allowed in .conllu: integers, ranges (1-2)"
    )
    # These columns are those of the format.
    assert list(read(path, kind="tagging")) == [first, second]


def test_words_without_tags_are_for_predictions_only(tmp_path):
    path = write(tmp_path / "x.conll", "a\nb\n\nc\n")
    assert [(r.words, r.tags) for r in read(path, kind="tagging", split="test")] == [
        (("a", "b"), None),
        (("c",), None),
    ]
    message = f"{path}:1: 1 column(s); the word and its tag require 2 or more; "
    assert refusal(path, kind="tagging").startswith(message)
    write(path, "a O\nb\n")
    assert refusal(path, kind="tagging").startswith(f"{path}:2: 1 column(s)")
    assert refusal(path, kind="tagging", split="test") == f"{path}:1: 1 tags for 2 words; every word needs one tag"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("words=1", "tags=4"), "{path}:1: 2 column(s); the word and its tag require 4 or more"),
        (("words=word", "tags=tag"), "data.columns: words=word is not allowed; allowed for conll: words=N, tags=N"),
        (("text=1",), "data.columns: text=1 is not allowed; allowed for conll"),
    ],
)
def test_wrong_columns(tmp_path, columns, message):
    path = write(tmp_path / "x.conll", "a O\n")
    assert refusal(path, *columns, kind="tagging").startswith(message.format(path=path))


def test_an_empty_file(tmp_path):
    path = write(tmp_path / "x.conll", "\n\n")
    assert refusal(path, kind="tagging") == f"{path}: no records in the format conll; check data.format"


def test_byte_order_marks_are_no_part_of_the_first_word(tmp_path):
    mark = b"\xef\xbb\xbf"
    conll = write(tmp_path / "x.conll", mark + b"a O\r\nb O\n\r\nc O\n")
    assert [r.words for r in read(conll, kind="tagging")] == [("a", "b"), ("c",)]
    snips = write(tmp_path / "x.txt", mark + b"a:O <=> X\r\nb:O <=> Y\n")
    assert [(r.words, r.label) for r in read(snips, kind="joint")] == [(("a",), "X"), (("b",), "Y")]
    for name, content in (("seq.in", b"a\r\nb\n"), ("seq.out", b"O\nO\r\n"), ("label", b"X\nY\n")):
        folder = write(tmp_path / "train" / name, mark + content).parent
    assert [(r.words, r.tags, r.label) for r in read(folder, kind="joint")] == [
        (("a",), ("O",), "X"), (("b",), ("O",), "Y"),
    ]  # fmt: skip


# ------------------------------------------------------------------ slots


def slots(folder, texts, tags, labels):
    for name, content in (("seq.in", texts), ("seq.out", tags), ("label", labels)):
        if content is not None:
            write(folder / name, content)
    return folder


def test_slots(tmp_path):
    folder = slots(
        tmp_path / "train", "play x\u00a0y \nadd  step\r\n", "O B-artist \nO O\n", "PlayMusic \natis#b\n\n"
    )
    assert read(folder, kind="joint") == [
        Record(
            id="0",
            source=f"{folder / 'seq.in'}:1",
            text="play x\u00a0y",
            words=("play", "x\u00a0y"),
            tags=("O", "B-artist"),
            label="PlayMusic",
        ),
        Record(
            id="1",
            source=f"{folder / 'seq.in'}:2",
            text="add  step",
            words=("add", "step"),
            tags=("O", "O"),
            label="atis#b",
        ),
    ]


def test_an_empty_intent_is_none(tmp_path):
    folder = slots(tmp_path / "train", "play\nstop\n", "O\nO\n", " \nhalt\n")
    assert [record.label for record in read(folder, kind="joint")] == [None, "halt"]


def test_slots_of_a_test_split_need_neither_tags_nor_intents(tmp_path):
    folder = slots(tmp_path / "test", "a b\n", None, None)
    assert [(r.tags, r.label) for r in read(folder, kind="joint", split="test")] == [(None, None)]
    assert refusal(folder, kind="joint").startswith(f"{folder / 'seq.out'}: no such file")
    slots(folder, "a b\n", "O O\n", None)
    assert refusal(folder, kind="joint").startswith(f"{folder / 'label'}: no such file")
    assert read(folder, kind="tagging")[0].tags == ("O", "O")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (
            ("a b\nc\n", "O O\n", "i\nj\n"),
            "{0}/seq.out: 1 lines, but seq.in has 2; the numbers of lines must be equal",
        ),
        (("a b\nc\n", "O O\nO\n", "i\nj\nk\n"), "{0}/label: 3 lines, but seq.in has 2"),
        (
            ("a b\nc d\n", "O O\nO\n", "i\nj\n"),
            "{0}/seq.out:2: 1 tags for the 2 words of seq.in; every word needs one",
        ),
        (("", "", ""), "{0}: no records in the format slots; check data.format"),
        ((None, "O\n", "i\n"), "{0}/seq.in: no such file"),
    ],
)
def test_mistakes_in_slots(tmp_path, contents, message):
    folder = slots(tmp_path / "train", *contents)
    assert refusal(folder, kind="joint").startswith(message.format(folder))


def test_a_file_is_no_folder_of_slots(tmp_path):
    path = write(tmp_path / "seq.in", "a\n")
    assert refusal(path, kind="joint", format="slots") == (
        f"{path}: the path is a file; give a folder with seq.in, seq.out and label"
    )


# ------------------------------------------------------------------ SNIPS


def test_snips(tmp_path):
    content = "at:O 9:30:B-time :):O <=> BookRestaurant \r\nplay:O x:B-a y:I-a <=> PlayMusic\n\n"
    path = write(tmp_path / "train.txt", content)
    assert read(path, kind="joint") == [
        Record(
            id="0",
            source=f"{path}:1",
            text="at 9:30 :)",
            words=("at", "9:30", ":)"),
            tags=("O", "B-time", "O"),
            label="BookRestaurant",
        ),
        Record(
            id="1",
            source=f"{path}:2",
            text="play x y",
            words=("play", "x", "y"),
            tags=("O", "B-a", "I-a"),
            label="PlayMusic",
        ),
    ]


@pytest.mark.parametrize("line", ["a:O b:O", "a:O b <=> X", "<=> X", "a:O <=> "])
def test_mistakes_in_snips(tmp_path, line):
    path = write(tmp_path / "train.txt", f"a:O <=> X\n{line}\n")
    assert refusal(path, kind="joint").startswith(
        f"{path}:2: {line!r} does not have the form word:tag word:tag <=>"
    )
