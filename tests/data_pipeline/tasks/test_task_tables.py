"""Records from TSV, CSV and JSON lines: ends of lines and fields, columns, labels, and every way to be wrong."""

import json
from pathlib import Path

import pytest
from task_files import read, write

from bert_jax.config.task import TaskDataConfig
from bert_jax.records import Answer, Record

PAIR = ("text=a", "text_pair=b", "label=label")


def refusal(path: Path | str, *columns: str, **options) -> str:
    with pytest.raises(ValueError) as caught:
        read(path, *columns, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ------------------------------------------------------------------ TSV


def test_tsv_columns_by_name(tmp_path):
    path = write(tmp_path / "x.tsv", "label\tb\ta\n1\tsecond\tfirst\n0\tother\tmore\n")
    assert read(path, *PAIR) == [
        Record(id="0", source=f"{path}:2", text="first", text_pair="second", label="1"),
        Record(id="1", source=f"{path}:3", text="more", text_pair="other", label="0"),
    ]


def test_tsv_columns_by_number_and_without_columns(tmp_path):
    path = write(tmp_path / "x.tsv", "text\tlabel\nA\t1\n")
    assert [r.text for r in read(path, "text=1", "label=2")] == ["text", "A"]
    assert [r.text for r in read(path, "text=1", "label=2", header="true")] == ["A"]
    assert [(r.text, r.label) for r in read(path)] == [("A", "1")]
    assert [(r.text, r.label) for r in read(path, "text=text", "label=2")] == [("A", "1")]


def test_a_column_that_has_a_number_for_a_name_goes_before_the_number(tmp_path):
    path = write(tmp_path / "x.tsv", "2\t1\nA\tB\n")
    assert read(path, "text=1", "label=2", header="true")[0].text == "B"


def test_quotes_in_tsv_are_text(tmp_path):
    path = write(tmp_path / "x.tsv", 'a\tb\tlabel\n"Hello\t""x""\t1\n\'he\tsaid"\t0\n')
    assert [(r.text, r.text_pair) for r in read(path, *PAIR)] == [('"Hello', '""x""'), ("'he", 'said"')]


def test_only_a_newline_ends_a_line(tmp_path):
    others = "\u2028 \u2029 \x85 \x0b \x0c \x1c \x1d \x1e \r ."
    path = write(tmp_path / "x.tsv", f"text\tlabel\nbefore {others} after\t1\nnext\t0\n")
    assert [(r.text, r.source) for r in read(path)] == [
        (f"before {others} after", f"{path}:2"),
        ("next", f"{path}:3"),
    ]


def test_byte_order_mark_and_mixed_line_ends(tmp_path):
    path = write(tmp_path / "x.tsv", b"\xef\xbb\xbftext\tlabel\r\nA\t1\nB\t0\r\n\n\r\n")
    assert [(r.text, r.label) for r in read(path)] == [("A", "1"), ("B", "0")]
    path = write(tmp_path / "y.tsv", b"\xef\xbb\xbfA\t1\n")
    assert read(path, "text=1", "label=2")[0].text == "A"


def test_white_space_around_labels_is_not_theirs_and_texts_are_kept(tmp_path):
    """A label of white space alone is none."""
    path = write(tmp_path / "x.tsv", "id\ttext\tlabel\n 7 \t two  words \tnot good \u3000\n8\t\t\n")
    records = read(path)
    assert [(r.id, r.text, r.label) for r in records] == [("7", " two  words ", "not good"), ("8", "", None)]


def test_a_file_of_one_column_keeps_its_empty_lines_but_not_the_last(tmp_path):
    path = write(tmp_path / "x.txt", "one\n\nthree\n\n\n")
    assert [(r.text, r.source) for r in read(path, "text=1", kind="sentence")] == [
        ("one", f"{path}:1"),
        ("", f"{path}:2"),
        ("three", f"{path}:3"),
    ]


def test_labels_negatives_words_and_groups(tmp_path):
    path = write(tmp_path / "x.tsv", "text\tlabels\tgroup\n A\tx, y ,\td 1\nB\t\td2\n")
    records = read(path, kind="multi_label")
    assert [(r.labels, r.group) for r in records] == [(("x", "y"), "d 1"), ((), "d2")]
    assert read(path, "text=text", "labels=labels", kind="multi_label", label_separator=";")[0].labels == (
        "x, y ,",
    )
    path = write(tmp_path / "y.tsv", "q\tp\tn1\tn2\nA\tB\tC\tD\nE\tF\t\tG\n")
    records = read(path, "text=q", "text_pair=p", "negative=n2", "negative=n1", kind="sentence")
    assert [r.negatives for r in records] == [("D", "C"), ("G",)]
    path = write(tmp_path / "z.tsv", "words\ttags\nNew\u00a0York is  big\tB-LOC O O\n")
    record = read(path, kind="tagging")[0]
    assert record.words == ("New\u00a0York", "is", "big") and record.tags == ("B-LOC", "O", "O")
    write(path, "words\ttags\na b\tO\n")
    assert refusal(path, kind="tagging") == f"{path}:2: 1 tags for 2 words; every word needs one tag"


def test_columns_of_one_split(tmp_path):
    columns = ("text=2", "label=1", "test:text=sentence", "test:id=index")
    path = write(tmp_path / "x.tsv", "1\tA\n")
    assert read(path, *columns)[0] == Record(id="0", source=f"{path}:1", text="A", label="1")
    with pytest.raises(ValueError):
        read(path, *columns, split="test")
    path = write(tmp_path / "y.tsv", "index\tsentence\n5\tB\n")
    assert read(path, *columns, split="test") == [Record(id="5", source=f"{path}:2", text="B")]


def test_a_role_that_is_not_set_has_the_column_of_its_name(tmp_path):
    path = write(tmp_path / "x.tsv", "label\treview\tid\n1\tA\tk\n")
    assert read(path, "text=review") == [Record(id="0", source=f"{path}:2", text="A", label="1")]  # id: not needed
    path = write(tmp_path / "y.tsv", "text\tlabel\tstars\nA\t1\t5\n")
    assert read(path, "label=stars") == [Record(id="0", source=f"{path}:2", text="A", label="5")]
    assert "no text=COLUMN for train files" in refusal(path, "label=text")  # the column has another role
    # Labels of a test file are read only if they are named.
    path = write(tmp_path / "test.tsv", "text\tlabel\nA\t?\n")
    assert read(path, "test:text=text", split="test")[0].label is None
    path = write(tmp_path / "z.jsonl", '{"words": ["a"], "pos": ["N"]}\n')
    assert read(path, "tags=pos", kind="tagging")[0].words == ("a",)


def test_a_test_file_may_lack_its_labels_and_a_dev_file_may_not(tmp_path):
    path = write(tmp_path / "x.tsv", "a\tb\nA\tB\n")
    assert read(path, *PAIR, split="test")[0].label is None
    for split in ("train", "dev"):
        assert f"{path}:1: no column 'label'" in refusal(path, *PAIR, split=split)
    path = write(tmp_path / "y.tsv", "text\nA\n")
    assert read(path, split="test")[0].label is None
    assert "no column 'label', which classification needs" in refusal(path)


@pytest.mark.parametrize(
    ("content", "columns", "options", "message"),
    [
        (
            "sentence1\tlabel\nA\t1\n",
            ("text=sentense1",),
            {},
            "{path}:1: no column 'sentense1' (text=sentense1 in data.columns); existing columns: sentence1, label; "
            "did you mean 'sentence1'?",
        ),
        (
            "sentence\tlabel\nA\t1\n",
            (),
            {},
            "{path}:1: no column 'text', which classification needs; existing columns: sentence, label; name it in "
            "data.columns: text=COLUMN",
        ),
        ("a\tb\n", ("label=a",), {}, "data.columns: no text=COLUMN for train files, which classification needs"),
        ("a\tb\n", ("text=a", "text=b"), {}, "data.columns: text is set 2 times; set it only once"),
        (
            "a\ta\nA\tB\n",
            ("text=a",),
            {},
            "{path}:1: 2 columns are named 'a' (text); use numbers for all",
        ),
        ("text\ttext\nA\tB\n", (), {"kind": "sentence"}, "{path}:1: 2 columns are named 'text'"),
        (
            "A\t1\n",
            ("text=x",),
            {"header": "false"},
            "{path}: data.columns: text=x is not allowed with data.header false",
        ),
        ("A\t1\n", ("text=0",), {}, "data.columns: column 0 is not allowed; use numbers from 1"),
        (
            "A\t1\nB\nC\t2\nD\n",
            ("text=1", "label=2"),
            {},
            "{path}:2: 1 field(s), and 1 more such lines; a line needs 2 or more (data.columns); fix or",
        ),
        ("a\tb\tlabel\nA\tB\t1\nA\t1\n", PAIR, {}, "{path}:3: 2 field(s); a line needs 3, as the header"),
        ("a\tb\tlabel\nA\tA\tB\t1\n", PAIR, {}, "{path}:2: 4 field(s); a line needs 3, as the header"),
        ("a\tb\tlabel\n\nA\tB\t1\n", PAIR, {}, "{path}:2: 1 field(s); a line needs 3"),
        (
            "id\ttext\tlabel\n1\tA\t1\n2\tB\t1\n1\tC\t0\n",
            (),
            {},
            "{path}:4: id '1' is also the id of {path}:2; ids must be unique",
        ),
        ("", PAIR, {}, "{path}: the file is empty; it needs"),
        ("\n\r\n", PAIR, {}, "{path}: the file is empty; it needs"),
        ("text\tlabel\n", (), {}, "{path}: no records in the format tsv; check data.format"),
        (b"text\tlabel\nA\t1\n\xd6\xd0\xce\xc4\t0\n", (), {}, "{path}:3: not valid UTF-8"),
    ],
)
def test_mistakes_in_tsv(tmp_path, content, columns, options, message):
    path = write(tmp_path / "x.tsv", content)
    assert refusal(path, *columns, **options).startswith(message.format(path=path))


def test_trailing_empty_fields_beyond_the_header_are_nothing(tmp_path):
    path = write(tmp_path / "x.tsv", "text\tlabel\nA\t1\t\t\n")
    assert read(path)[0].label == "1"


def test_files_that_are_not_there(tmp_path):
    path = write(tmp_path / "train.tsv", "text\tlabel\nA\t1\n")
    missing = tmp_path / "trian.tsv"
    assert refusal(missing) == f"{missing}: no such file or folder; did you mean 'train.tsv'?"
    assert "does not exist either" in refusal(tmp_path / "no" / "x.tsv")
    assert refusal(tmp_path / "trial", kind="joint").startswith(f"{tmp_path / 'trial'}: no such file or folder")
    assert "is a folder" in refusal(tmp_path, format="tsv")
    assert refusal(path.rename(tmp_path / "train.xyz")).startswith(
        f"{tmp_path / 'train.xyz'}: cannot infer the format from the suffix; allowed: .tsv, .csv, "
    )


@pytest.mark.parametrize("column", ["text", "text=", "txt=a", "=a", "valid:text=a"])
def test_columns_that_are_none(column):
    with pytest.raises(ValueError, match=r"data\.columns: .* is not allowed; allowed: ROLE=COLUMN"):
        TaskDataConfig(columns=(column,))


def test_blanks_around_the_names_of_columns_are_not_theirs(tmp_path):
    assert read(write(tmp_path / "x.tsv", "text \t label\nA\t1\n"))[0].label == "1"


def test_compressed_files(tmp_path):
    import gzip

    path = write(tmp_path / "x.tsv.gz", gzip.compress(b"text\tlabel\r\nA\t1\r\n"))
    assert read(path)[0] == Record(id="0", source=f"{path}:2", text="A", label="1")


# ------------------------------------------------------------------ CSV


def test_csv_as_in_rfc_4180(tmp_path):
    content = '\ufefftext,label\r\n"a, ""b""\r\nc\n d",1\r\nplain "quoted" word,0\n"",2\r\n\r\n'
    path = write(tmp_path / "x.csv", content)
    records = read(path)
    assert [r.text for r in records] == ['a, "b"\r\nc\n d', 'plain "quoted" word', ""]
    assert [r.source for r in records] == [f"{path}:2", f"{path}:5", f"{path}:6"]
    assert [r.label for r in records] == ["1", "0", "2"]


def test_csv_without_header_and_with_line_separators(tmp_path):
    path = write(tmp_path / "x.csv", "a\u2028b,c,1\n")
    assert read(path, "text=1", "text_pair=2", "label=3")[0].text == "a\u2028b"


def test_a_csv_of_one_column_keeps_its_empty_lines_but_not_the_last(tmp_path):
    path = write(tmp_path / "x.csv", 'text\none\n\n"th,ree"\n\n \n')
    records = read(path, "text=text", kind="sentence")
    assert [(r.text, r.source) for r in records] == [
        ("one", f"{path}:2"),
        ("", f"{path}:3"),
        ("th,ree", f"{path}:4"),
    ]


def test_long_fields(tmp_path):
    path = write(tmp_path / "x.csv", f"text,label\n{'long ' * 60_000},1\n")
    assert len(read(path)[0].text) == 300_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('text,label\nA,1\n"B,0\nC,1\n', "{path}:3: not valid CSV: unexpected end of data"),
        ('text,label\n"A"b,1\n', "{path}:2: not valid CSV: "),
        ("text,label\nA\rB,1\n", "{path}:2: not valid CSV: new-line character seen in unquoted field"),
        ("text,label\nA\n", "{path}:2: 1 field(s); a line needs 2"),
        ("text,label\nA,b,1\n", "{path}:2: 3 field(s); a line needs 2"),
        ("", "{path}: the file is empty; it needs"),
    ],
)
def test_mistakes_in_csv(tmp_path, content, message):
    path = write(tmp_path / "x.csv", content)
    assert refusal(path).startswith(message.format(path=path))


SWAG = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
SWAG_COLUMNS = (
    "id=video-id",
    "text=sent1",
    "choice_prefix=sent2",
    "choice=ending0",
    "choice=ending1",
    "choice=ending2",
    "choice=ending3",
    "label=label",
)


def test_swag(tmp_path):
    rows = '0,v1,1,"A man sits. He",A man sits.,He,gold,"runs, fast.",eats.,sings.,sleeps.,2\n'
    path = write(tmp_path / "train.csv", SWAG + rows + "1,v2,2,Why?,Why?,,gold,a,b,c,,0\n")
    assert read(path, *SWAG_COLUMNS, kind="choice") == [
        Record(
            id="v1",
            source=f"{path}:2",
            text="A man sits.",
            label="2",
            choices=("He runs, fast.", "He eats.", "He sings.", "He sleeps."),
        ),
        Record(id="v2", source=f"{path}:3", text="Why?", label="0", choices=("a", "b", "c", "")),
    ]


# ------------------------------------------------------------------ JSON lines


def lines(*entries) -> str:
    return "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in entries)


def test_jsonl_keys_and_values(tmp_path):
    content = lines('{"text": "A", "label": 3.80}', "", '{"label": true, "text": "B\\u2028", "text_pair": null}')
    path = write(tmp_path / "x.jsonl", b"\xef\xbb\xbf" + content.encode())
    assert read(path) == [
        Record(id="0", source=f"{path}:1", text="A", label="3.80"),
        Record(id="1", source=f"{path}:3", text="B\u2028", label="true"),
    ]


def test_jsonl_lists(tmp_path):
    entries = [
        {"id": 7, "text": "q", "choices": ["a", "b"], "label": 1},
        {"text": "q", "words": ["New York", "x"], "tags": ["B", "O"], "label": "i", "labels": ["x", " y "]},
        {"text": "a", "text_pair": "p", "negatives": ["n", "m"]},
    ]
    paths = [write(tmp_path / f"{i}.jsonl", lines(entry)) for i, entry in enumerate(entries)]
    choice = read(paths[0], kind="choice")[0]
    assert (choice.id, choice.choices, choice.label) == ("7", ("a", "b"), "1")
    joint = read(paths[1], kind="joint")[0]
    assert (joint.words, joint.tags, joint.labels) == (("New York", "x"), ("B", "O"), ("x", "y"))
    assert read(paths[2], kind="sentence")[0].negatives == ("n", "m")
    path = write(tmp_path / "null.jsonl", lines({"text": "a", "negatives": None, "id": None, "label": None}))
    assert read(path, kind="sentence") == [Record(id="0", source=f"{path}:1", text="a")]


def test_jsonl_answers(tmp_path):
    first = {"q": "who?", "c": "He did", "a": [{"text": "He", "answer_start": 0}]}
    second = {"q": "who?", "c": "He did", "a": {"text": ["did", "d"], "answer_start": [3, -1]}}
    path = write(tmp_path / "x.jsonl", lines(first, second, {"q": "why?", "c": "He did", "a": []}))
    records = read(path, "text=q", "text_pair=c", "answers=a", kind="qa")
    he, did, d = Answer(text="He", start=0), Answer(text="did", start=3), Answer(text="d", start=-1)
    assert [r.answers for r in records] == [(he,), (did, d), ()]


def test_jsonl_of_half_a_character(tmp_path):
    path = write(tmp_path / "x.jsonl", r'{"text": "a\ud83d!\ud83d\ude00", "label": "x"}')
    assert read(path)[0].text == "a?!\N{GRINNING FACE}"


@pytest.mark.parametrize(
    ("content", "columns", "message"),
    [
        ('{"text": "A", "label": 1}\n{"text": "B", \n', (), "{path}:2: not valid JSON: "),
        pytest.param('{"text": ' + "[" * 100_000 + "\n", (), "{path}:1: not valid JSON: ", id="deep"),
        ('["A"]\n', (), "{path}: record 0: not a JSON object; expected: lines such as "),
        (
            '{"txt": "A", "label": 1}\n',
            (),
            "{path}:1: no column 'text', which classification needs; existing columns: txt,",
        ),
        (
            '{"text": "A", "label": 1}\n{"text": "A"}\n',
            (),
            "{path}:2: no column 'label', which classification needs",
        ),
        ('{"a": "A", "b": 1}\n', ("text=a", "label=c"), "{path}:1: no column 'c' (label=c in data.columns)"),
        ('{"a": "A", "b": 1}\n', ("text=a", "label=2"), "{path}:1: no column '2' (label=2 in data.columns)"),
        ('{"text": ["A"], "label": 1}\n', (), "{path}:1: text has the type list; allowed: a string or a number"),
        ('{"text": null, "label": 1}\n', (), "{path}:1: text is missing (null or NaN); every record needs a value"),
        (
            '{"text": "A", "label": 1, "labels": {}}\n',
            (),
            "{path}:1: labels has the type dict; allowed: a list or a string",
        ),
        (
            '{"id": 1, "text": "A", "label": 1}\n{"id": "1", "text": "B", "label": 1}\n',
            (),
            "{path}:2: id '1' is also",
        ),
        ('{"text": "A", "label": 1, "answers": {"text": ["x"]}}\n', (), "{path}:1: invalid answers"),
        (
            '{"text": "A", "label": 1, "answers": [{"text": "x", "answer_start": "b"}]}\n',
            (),
            "{path}:1: answer_start is 'b'; allowed: a whole number",
        ),
        ("\n", (), "{path}: no records"),
    ],
)
def test_mistakes_in_jsonl(tmp_path, content, columns, message):
    path = write(tmp_path / "x.jsonl", content)
    assert refusal(path, *columns).startswith(message.format(path=path))
