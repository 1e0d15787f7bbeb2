"""Records of SQuAD's JSON and of CLINC150's."""

import json

import pytest
from task_files import read, write

from bert_jax.records import Answer, Record


def refusal(*arguments, **options) -> str:
    with pytest.raises(ValueError) as caught:
        read(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def question(number, **fields):
    return {"id": number, "question": f"q{number}?", "answers": [{"text": "He", "answer_start": 0}]} | fields


def squad(*articles):
    """Articles of one paragraph each, from (title, questions)."""
    data = [
        {}
        | ({"title": title} if title is not None else {})
        | {"paragraphs": [{"context": "He did it.", "qas": qas}]}
        for title, qas in articles
    ]
    return json.dumps({"version": "v2.0", "data": data})


def test_squad(tmp_path):
    impossible = question(3, answers=[], is_impossible=True, plausible_answers=[{"text": "it", "answer_start": 7}])
    elsewhere = question(
        "b", answers=[{"text": "it", "answer_start": -1}, {"id": "1", "text": "did", "answer_start": 3}]
    )
    content = squad(("Deeds", [question("a"), elsewhere]), ("", [impossible]), (None, [question("d")]))
    path = write(tmp_path / "train.json", b"\xef\xbb\xbf" + content.encode())
    first, second, third, fourth = read(path, kind="qa")
    assert first == Record(
        id="a",
        source=f"{path}: id a",
        text="qa?",
        text_pair="He did it.",
        group="Deeds",
        answers=(Answer(text="He", start=0),),
    )
    assert second.answers == (Answer(text="it", start=-1), Answer(text="did", start=3))
    assert (third.id, third.answers) == ("3", ())
    assert [r.group for r in (second, third, fourth)] == ["Deeds", f"{path}:1", f"{path}:2"]


def test_passages_and_offsets_are_kept_as_they_are(tmp_path):
    passage = " a\r\n\u2028b \N{GRINNING FACE} c"
    content = {"data": [{"paragraphs": [{"context": passage, "qas": [question(1)]}]}]}
    path = write(tmp_path / "x.json", json.dumps(content))
    assert read(path, kind="qa")[0].text_pair == passage


def test_questions_without_answers_are_unlabelled(tmp_path):
    asked = {"id": "1", "question": "who?"}
    path = write(tmp_path / "test.json", squad(("t", [asked, asked | {"id": "2", "is_impossible": True}])))
    assert [record.answers for record in read(path, kind="qa", split="test")] == [None, ()]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (squad(("t", [question(1), question("1")])), "{path}: id 1: id '1' is also the id of {path}: id 1;"),
        (squad(("t", [{"question": "who?"}])), "{path}: article 0, paragraph 0: a question has no id"),
        (squad(("t", [{"id": "7"}])), "{path}: id 7: no string 'question'"),
        (squad(("t", [question("7", answers=[{"answer_start": 1}])])), "{path}: id 7: an answer has no text"),
        (
            squad(("t", [question("7", answers=[{"text": "He", "answer_start": 1.5}])])),
            "{path}: id 7: answer_start is",
        ),
        (squad(("t", [question("7", answers="He")])), "{path}: id 7: invalid answers"),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', "{path}: article 0, paragraph 0: no string 'context'"),
        ('{"data": [{"title": "t"}]}', "{path}: article 0: no list 'paragraphs'; with data.format squad"),
        ('[{"context_text": "x"}]', "{path}: record 0: no column 'text', which qa needs"),
        ('{"data": []}', "{path}: no records"),
        ('{"data": [\n{"title": "t",}\n]}', "{path}:2: not valid JSON: "),
        pytest.param('{"data": ' + "[" * 100_000, "{path}: not valid JSON: ", id="deep"),
        pytest.param('{"data": ' + "1" * 5000 + "}", "{path}: not valid JSON: ", id="digits"),
        ("", "{path}: the file is empty; it must contain JSON"),
        (b'{"data":\n "\xd6\xd0\xce\xc4"}', "{path}:2: not valid UTF-8"),
    ],
)
def test_mistakes_in_squad(tmp_path, content, message):
    path = write(tmp_path / "x.json", content)
    assert refusal(path, kind="qa").startswith(message.format(path=path))


CLINC = {"train": [["how far", "distance "], ["what", "translate"]], "oos_train": [["who won", "oos"]], "val": []}


def test_clinc_parts(tmp_path):
    path = write(tmp_path / "data_full.json", json.dumps(CLINC))
    assert read(f"{path}:train+oos_train") == [
        Record(id="0", source=f"{path}: train 0", text="how far", label="distance"),
        Record(id="1", source=f"{path}: train 1", text="what", label="translate"),
        Record(id="2", source=f"{path}: oos_train 0", text="who won", label="oos"),
    ]
    assert [r.label for r in read(f"{path}:oos_train", format="clinc")] == ["oos"]


@pytest.mark.parametrize(
    ("content", "part", "message"),
    [
        (CLINC, "", "{path}: the part is missing; write x.json:PART; existing parts: train, oos_train, val"),
        (CLINC, ":trian", "{path}: no list 'trian'; existing parts: train, oos_train, val; did you mean 'train'?"),
        (CLINC, ":val", "{path}:val: no records"),
        (
            {"train": [["a", "b"], ["c"]]},
            ":train",
            "{path}: train 1: not a pair of strings; expected: [text, intent]",
        ),
        ([], ":train", "{path}: not a JSON object with a list for each part"),
    ],
)
def test_mistakes_in_clinc(tmp_path, content, part, message):
    path = write(tmp_path / "x.json", json.dumps(content))
    assert refusal(f"{path}{part}").startswith(message.format(path=path))
