"""Tables as other programs write them: delimiters, encodings, ends of lines, quotes, lists and missing values."""

import csv
import io
import json

import pytest
from task_files import read, write

from bert_jax.config.task import TaskDataConfig
from data_pipeline.tasks import read_splits

ROWS = [("a fine, long film; see it|twice", "good"), ('he said "no"', "bad"), ("plain", "good")]
WESTERN = [("Das Café ist schön – “gut” für 5€", "gut"), ("un été à Paris, ça va", "oui"), ("¿Qué tal? Niño", "sí")]


def table(rows, delimiter=",", header=("text", "label"), end="\r\n"):
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter, lineterminator=end).writerows([header, *rows])
    return file.getvalue()


def pairs(records):
    return [(record.text, record.label) for record in records]


def refusal(path, *columns, **options):
    with pytest.raises(ValueError) as caught:
        read(path, *columns, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------ delimiters


@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_under_which_the_columns_exist(tmp_path, name, delimiter):
    rows = ROWS if (name, delimiter) != ("x.tsv", "\t") else [ROWS[0], ROWS[2]]
    assert pairs(read(write(tmp_path / name, table(rows, delimiter)))) == rows
    other = write(tmp_path / name, table(rows, delimiter, ("Satz", "Kategorie")))
    assert pairs(read(other, "text=Satz", "label=Kategorie")) == rows
    assert len(read(other, "text=1", "label=2")) == len(rows) + 1


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_commas_of_texts_without_a_header_are_not_the_delimiter(tmp_path, delimiter):
    rows = [("ok, ok", "good"), ("bad", "bad"), ("so, so", "bad")]
    path = write(tmp_path / "x.csv", table(rows[1:], delimiter, rows[0]))
    assert pairs(read(path, "text=1", "label=2")) == rows


def test_the_delimiter_that_is_named(tmp_path):
    path = write(tmp_path / "x.csv", table(ROWS, ":"))
    assert pairs(read(path, delimiter=":")) == ROWS
    assert pairs(read(write(tmp_path / "y.csv", table(ROWS, "\t")), delimiter="tab")) == ROWS
    for first in ("sep=;\r\n", '"sep=;"\n'):
        records = read(write(tmp_path / "z.csv", first + table(ROWS, ";")))
        assert pairs(records) == ROWS and records[0].source.endswith(":3")
    for wrong in ("", "::", '"', "\n"):
        with pytest.raises(ValueError, match=r"data\.delimiter: .* is not allowed"):
            TaskDataConfig(delimiter=wrong)


def test_columns_that_no_delimiter_gives(tmp_path):
    path = write(tmp_path / "x.csv", table(ROWS, ";", ("Satz", "Kategorie")))
    message = refusal(path)
    assert "existing columns: Satz, Kategorie" in message and "data.delimiter (';' here)" in message
    assert "did you mean 'Kategorie'?" in refusal(path, "text=Satz", "label=Katgorie")
    assert "data.delimiter" in refusal(write(tmp_path / "y.csv", table(ROWS, ":")))
    one = write(tmp_path / "y.csv", table(ROWS[2:], ":"))
    assert "existing columns: text:label" in refusal(one) and "data.delimiter" in refusal(one)


# ------------------------------------------------------------------ encodings and ends of lines


@pytest.mark.parametrize(("name", "delimiter"), [("x.csv", ","), ("x.csv", "\t"), ("x.txt", "\t")])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "cp1252"])
def test_encodings(tmp_path, name, delimiter, encoding, caplog):
    path = write(tmp_path / name, table(WESTERN, delimiter).encode(encoding))
    assert pairs(read(path)) == WESTERN
    assert ("read as cp1252" in caplog.text) == (encoding == "cp1252")
    caplog.clear()
    assert pairs(read(path, encoding=encoding)) == WESTERN and "read as" not in caplog.text


@pytest.mark.parametrize(
    ("rows", "encoding"),
    [
        ([("这个电影很好看", "好")], "gb18030"),
        ([("хорошо", "да")], "cp1251"),
        ([("wąż łódź", "tak")], "cp1250"),
        ([("καλημέρα", "ναι")], "cp1253"),
    ],
)
def test_other_encodings_are_refused_until_they_are_named(tmp_path, rows, encoding):
    path = write(tmp_path / "x.csv", table(rows).encode(encoding))
    assert "x.csv:2: not valid UTF-8; set data.encoding" in refusal(path)
    assert pairs(read(path, encoding=encoding)) == rows


def test_what_no_encoding_gives(tmp_path):
    mixed = "text,label\nschön,a\n".encode() + "müde,b\n".encode("cp1252")
    assert ":3: not valid UTF-8" in refusal(write(tmp_path / "x.csv", mixed))
    assert "utf-16-le" in refusal(write(tmp_path / "y.csv", table(ROWS).encode("utf-16-le")))
    assert ":2: not valid ASCII" in refusal(write(tmp_path / "z.csv", table(WESTERN)), encoding="ascii")
    with pytest.raises(ValueError, match=r"data\.encoding: 'latin-99' is not allowed"):
        TaskDataConfig(encoding="latin-99")


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl"])
def test_carriage_returns_end_the_lines_of_a_file_without_others(tmp_path, name):
    lines = (
        ["text,label", "a,x", "b,y"]
        if name == "x.csv"
        else ['{"text": "a", "label": "x"}', '{"text": "b", "label": "y"}']
    )
    assert pairs(read(write(tmp_path / name, "\r".join(lines) + "\r"))) == [("a", "x"), ("b", "y")]


def test_carriage_returns_among_other_ends_are_named(tmp_path):
    assert "carriage return" in refusal(write(tmp_path / "x.csv", 'text,label\ra,x\r"b\nc",y\r'))


# ------------------------------------------------------------------ quotes


def test_escaped_quotes(tmp_path, caplog):
    content = 'text,label\n"he said \\"no, never\\" twice",bad\n"C:\\\\new \\"x\\"",good\nplain,good\n'
    expected = [('he said "no, never" twice', "bad"), ('C:\\new "x"', "good"), ("plain", "good")]
    assert pairs(read(write(tmp_path / "x.csv", content))) == expected
    assert "escaped" in caplog.text
    caplog.clear()
    assert pairs(read(write(tmp_path / "y.csv", 'text,label\n"C:\\new",x\n'))) == [("C:\\new", "x")]
    assert not caplog.text
    assert "double each quote inside" in refusal(write(tmp_path / "z.csv", 'text,label\n"he said "no" ok",x\n'))
    assert "is not closed" in refusal(write(tmp_path / "z.csv", 'text,label\n"he said,x\n'))


@pytest.mark.parametrize("text", ['he said "no" twice', "two\nlines", "a tab\there", '"quoted"'])
def test_quotes_of_csv_in_tsv(tmp_path, text, caplog):
    rows = [(text, "a"), ("plain", "b"), ("more", "a")]
    assert pairs(read(write(tmp_path / "x.tsv", table(rows, "\t")))) == rows
    assert "quotes" in caplog.text


@pytest.mark.parametrize("text", ['"quoted"', 'he said "no"', '"a" and ""b""', '""'])
def test_other_quotes_in_tsv_are_text(tmp_path, text, caplog):
    assert pairs(read(write(tmp_path / "x.tsv", f"text\tlabel\n{text}\ta\nplain\tb\n"))) == [
        (text, "a"),
        ("plain", "b"),
    ]
    assert not caplog.text


# ------------------------------------------------------------------ lists


@pytest.mark.parametrize(
    ("cell", "labels"),
    [
        ("['wet', 'windy']", ("wet", "windy")),
        ("['wet' 'very windy']", ("wet", "very windy")),
        ('["it\'s", "a \\"b\\""]', ("it's", 'a "b"')),
        ("['été']", ("été",)),
        ("('wet', 'windy')", ("wet", "windy")),
        ("{'wet'}", ("wet",)),
        ("(1)", ("(1)",)),
        ("{}", ()),
        ("[0, 0, 1]", ("0", "0", "1")),
        ("[1 0 -1.5]", ("1", "0", "-1.5")),
        ("[]", ()),
        ("wet, windy", ("wet", "windy")),
        ("[wet], windy", ("[wet]", "windy")),
        ("[sic]", ("[sic]",)),
    ],
)
def test_lists_of_labels_in_a_cell(tmp_path, cell, labels):
    path = write(tmp_path / "x.csv", table([("a", cell)], header=("text", "labels")))
    assert read(path, kind="multi_label")[0].labels == labels


def test_lists_of_words_and_tags_in_a_cell(tmp_path):
    rows = [("['EU', 'New York', \"it's\"]", "['B-ORG', 'B-LOC', 'O']"), ("[ 12 ]", "O O O"), ("['a']", "[5]")]
    records = read(write(tmp_path / "x.csv", table(rows, header=("words", "tags"))), kind="tagging")
    assert [(one.words, one.tags) for one in records] == [
        (("EU", "New York", "it's"), ("B-ORG", "B-LOC", "O")), (("[", "12", "]"), ("O", "O", "O")), (("a",), ("5",))
    ]  # fmt: skip


def test_lists_that_cannot_be_read(tmp_path):
    path = write(tmp_path / "x.csv", table([("a", "['x', nan]")], header=("text", "labels")))
    assert "x.csv:2: labels is ['x', nan]" in refusal(path, kind="multi_label")
    path = write(tmp_path / "x.csv", table([("a", "['x']"), ("b", "['x', 'y']")]))
    assert "x.csv:3: label is a list of 2; several labels need task.kind multi_label" in refusal(path)
    path = write(tmp_path / "x.csv", table([("a", "['x']"), ("b", "[1]")]))
    assert [record.label for record in read(path)] == ["x", "[1]"]


# ------------------------------------------------------------------ missing values


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl"])
def test_nan_is_a_missing_value(tmp_path, name):
    def file(text, label):
        is_csv = name == "x.csv"
        line = f"text,label\n{text},{label}\n" if is_csv else f'{{"text":{text},"label":{label}}}\n'
        return write(tmp_path / name, line)

    assert read(file("1", "NaN"), split="test")[0].label is None
    assert "text is missing (null or NaN)" in refusal(file("NaN", "1"))


def test_words_for_missing_values_may_be_labels(tmp_path):
    names = ["NA", "None", "null", "nan", "N/A"]
    path = write(tmp_path / "x.csv", table([(f"t{i}", name) for i, name in enumerate(names)]))
    assert [record.label for record in read(path)] == names
    values = write(tmp_path / "y.csv", table([("a", "1.0"), ("b", "nan"), ("c", "")]))
    assert [record.label for record in read(values, kind="regression")] == ["1.0", None, None]


# ------------------------------------------------------------------ data.dir


def test_a_missing_file_without_data_dir_names_the_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options, named in (({}, True), ({"dir": str(tmp_path)}, False)):
        with pytest.raises(ValueError, match=r"train\.tsv: no such file") as caught:
            read_splits(TaskDataConfig(train=("train.tsv",), **options), "classification")
        assert ("data.dir" in str(caught.value)) == named


@pytest.mark.parametrize(
    ("content", "columns", "expected"),
    [
        ("a, b\tx\nc d\ty\textra\n", ("text=1", "label=2"), [("a, b", "x"), ("c d", "y")]),
        (
            "1\tgood | really\n0\tbad | yes\textra\n",
            ("label=1", "text=2"),
            [("good | really", "1"), ("bad | yes", "0")],
        ),
    ],
)
def test_uneven_rows_of_a_tsv_are_cut_at_tabs(tmp_path, content, columns, expected):
    records = read(write(tmp_path / "a.tsv", content), *columns)
    assert [(one.text, one.label) for one in records] == expected


@pytest.mark.parametrize("text", ["it’s good – really\n", "テスト\n"])
def test_text_with_one_bad_byte_is_not_read_as_western(tmp_path, text):
    codec = "utf-8" if "good" in text else "shift-jis"
    path = write(tmp_path / "a.csv", b"text,label\n" + text.strip().encode(codec) + b",a\ncaf\xe9,b\n")
    with pytest.raises(ValueError, match=r"a\.csv:\d: not valid UTF-8; set data\.encoding"):
        read(path)


@pytest.mark.parametrize("cell", ["['C:\\Users']", "['a', None]", "[nan, 1]"])
def test_lists_of_labels_that_are_not_lists(tmp_path, cell):
    with pytest.raises(ValueError, match=r"a\.csv:2: labels is .*; allowed in a list: strings and numbers"):
        read(write(tmp_path / "a.csv", f'text,labels\nhello,"{cell}"\n'), kind="multi_label")


@pytest.mark.parametrize("words", ['( " yes " )', "[ ' a ' ]", '{ "a" "b" }'])
def test_words_in_brackets_are_words(tmp_path, words):
    (record,) = read(
        write(tmp_path / "a.tsv", f"words\ttags\n{words}\t{' '.join('O' * len(words.split()))}\n"), kind="tagging"
    )
    assert record.words == tuple(words.split())


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_columns_that_are_not_read_are_named(tmp_path, caplog, name):
    rows = [{"text": "a", "label": "x", "sentence2": "b"}, {"text": "c", "label": "y", "weight": 2}]
    content = "".join(f"{json.dumps(row)}\n" for row in rows)
    content = "text,label,sentence2,weight\na,x,b,1\n" if name == "a.csv" else content
    read(write(tmp_path / name, content))
    assert [one.getMessage().rpartition("/")[2] for one in caplog.records] == [
        f"{name}: columns that are not read: sentence2, weight"
    ]


def test_a_key_that_is_repeated(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a", "label": "x", "label": "y"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:1: not valid JSON: the key 'label' is repeated"):
        read(path)


@pytest.mark.parametrize("value", ["true", 1, "false"])
def test_other_values_of_is_impossible(tmp_path, value):
    question = {"id": "7", "question": "q", "answers": [], "is_impossible": value}
    content = {"data": [{"paragraphs": [{"context": "c", "qas": [question]}]}]}
    path = write(tmp_path / "a.json", json.dumps(content))
    with pytest.raises(ValueError, match=r"id 7: is_impossible is .*; allowed: true, false"):
        read(path, kind="qa")


@pytest.mark.parametrize("kind", ["classification", "qa"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_records(tmp_path, name, kind, indent):
    rows = [{"text": f"q{i}", "text_pair": "c", "label": "x", "answers": []} for i in range(3)]
    records = read(write(tmp_path / name, json.dumps(rows, indent=indent)), kind=kind)
    assert [(one.text, one.text_pair) for one in records] == [(f"q{i}", "c") for i in range(3)]
    assert records[1].source.endswith(f"{name}: record 1")
    with pytest.raises(ValueError, match=rf"{name}:\d+: not valid JSON"):
        read(write(tmp_path / name, json.dumps(rows, indent=indent)[:-1]), kind=kind)
    with pytest.raises(ValueError, match=r"record 1: not a JSON object; expected: lines such as"):
        read(write(tmp_path / name, json.dumps([rows[0], 5], indent=indent)), kind=kind)
