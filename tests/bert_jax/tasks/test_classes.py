"""The classes of a task: shown, in the order of ids, and what is suspicious about them; labels that are hidden."""

import dataclasses

import pytest

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.finetuning.finetune import _stored_order
from bert_jax.records import Record
from bert_jax.tasks.classes import blank_lines, class_lines, class_order
from bert_jax.tasks.registry import TASKS


def made(*labels, source="train.csv", first=2, **fields):
    """Records with these labels (``labels`` if they are tuples), from line ``first`` of a file."""
    return [
        Record(
            id=str(i), source=f"/data/{source}:{i + first}", text=f"w{i}",
            **({"labels": one} if isinstance(one, tuple) else {"label": one}), **fields,
        )
        for i, one in enumerate(labels)
    ]  # fmt: skip


def resolved(train, kind="classification", tests=None, dev=(), **data):
    """(config, splits, lines) as they are before training."""
    plain, others = FinetuneConfig(), {"test": tests} if tests is not None else {}
    config = dataclasses.replace(
        plain,
        task=dataclasses.replace(plain.task, kind=kind),
        data=dataclasses.replace(plain.data, **data),
    )
    splits = {"train": train, **({"dev": dev} if dev else {}), **others}
    config, splits, lines = TASKS[kind].prepare(config, splits, list(others))
    config = TASKS[kind].from_data(config, splits)
    return config, splits, [*lines, *TASKS[kind].notes(config, splits)]


@pytest.mark.parametrize(
    ("names", "order"),
    [
        ({"10", "9", "0", "2"}, ("0", "2", "9", "10")),
        ({"-1", "10", "1", "-12"}, ("-12", "-1", "1", "10")),
        ({"10.0", "2.0", "1.0"}, ("1.0", "2.0", "10.0")),
        ({"01", "1", "2"}, ("01", "1", "2")),
        ({"10", "9", "b"}, ("10", "9", "b")),
        ({"1.5", "10", "9"}, ("1.5", "10", "9")),
        ({"٣", "١٠"}, ("١٠", "٣")),
    ],
)
def test_whole_numbers_are_in_their_order(names, order):
    assert class_order(names) == order


def test_classes_are_shown_with_their_numbers():
    config, _, lines = resolved(made("bad", "good", "good", "bad", "good", "good"))
    assert config.data.labels == ("bad", "good") and lines == ["2 classes: bad 2, good 4"]
    assert resolved(made(*"aabb"), labels=("b", "c", "a"))[2] == ["3 classes: b 2, c 0, a 2"]
    many = resolved(made(*[str(i // 9) for i in range(270)]))
    assert many[2] == ["30 classes: 0 9, 1 9, 2 9, 3 9, ..., 28 9, 29 9"]
    assert many[0].data.labels[9:12] == ("9", "10", "11")
    lists = resolved(made(("x", "y"), ("y",), (), ("z", "y")), "multi_label")
    assert lists[2] == ["3 labels: x 1, y 3, z 1"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("good", "good\u200b"),
        ("n\xe9", "ne\u0301"),
        ("\uff21", "A"),
        ("a b", "a\xa0b"),
        ("x", "\ufeffx"),
        ("k\xad", "k"),
    ],
)
@pytest.mark.parametrize("kind", ["classification", "multi_label", "tagging"])
def test_names_that_look_the_same(one, other, kind):
    labels = [one, other, one, other, "else", "else"]
    if kind == "tagging":
        train = [dataclasses.replace(record, words=("w",), tags=(record.label,)) for record in made(*labels)]
    else:
        train = made(*([(label,) for label in labels] if kind == "multi_label" else labels))
    (line,) = [line for line in resolved(train, kind)[2] if line.startswith("WARNING")]
    assert ascii(one) in line and ascii(other) in line and "else" not in line
    assert all(character.isprintable() for character in line)


def test_other_names_are_no_warning():
    for names in (
        ("Good", "good"),
        ("1", "1.0"),
        ("March", "march"),
        ("a", "\u00e4"),
        ("B-LOC", "I-LOC"),
        ("-1", "1"),
    ):
        assert resolved(made(*names, *names))[2] == [
            f"2 classes: {', '.join(f'{one} 2' for one in class_order(names))}"
        ]


def test_classes_of_one_record_are_named_with_their_place():
    lines = resolved(made("a", "b", "b", "a", "rare", "a"))[2]
    assert lines[1:] == ["WARNING: classes of one training record: rare (train.csv:6)"]


@pytest.mark.parametrize("count", [3, 60])
def test_swapped_columns(count):
    train = made(*[f"a whole text {i}" for i in range(count)])
    assert f"WARNING: {count} classes in {count} training records" in resolved(train)[2][1]
    # As many in all when a part of them is dev.
    lines = resolved(train[1:], dev=train[:1], dev_fraction=0.1)[2]
    assert f"WARNING: {count} classes in {count} training records" in lines[1]
    assert len(resolved(made(*"ab", *[f"{i % 20}" for i in range(count * 20)]))[2]) < 4
    few = resolved(made(*[f"c{i % (count * 2 // 3)}" for i in range(count)]))[2]  # few records of many classes
    assert not any("data.columns" in line for line in few)


@pytest.mark.parametrize("labels", [("label", "0", "1"), ("Kategorie", "1", "2"), ("sentiment", "good", "bad")])
@pytest.mark.parametrize("part", ["train", "dev"])
def test_a_header_that_is_read_as_a_record(labels, part):
    train = made(labels[0], *labels[1:] * 9, first=1)
    split = {"dev": train[:1], "dev_fraction": 0.1} if part == "dev" else {}
    lines = resolved(train[1:] if split else train, **split)[2]
    assert any(line.startswith("WARNING: /data/train.csv:1: ") and "data.header" in line for line in lines)
    fine = [dataclasses.replace(one, source=one.source.replace("train.csv:1", "train.csv:2")) for one in train]
    assert not any("data.header" in line for line in resolved(fine)[2])
    again = made("label", *("label", "0", "1") * 9, first=1)  # not the only one
    assert not any("data.header" in line for line in resolved(again)[2])


def test_the_other_column_of_labels_is_named():
    both = made(*"abab", labels=("x",))
    config, _, lines = resolved(both)
    assert config.data.labels == ("a", "b") and "column labels is not read" in lines[-1]
    config, _, lines = resolved(both + made(("y",)), "multi_label")
    assert config.data.labels == ("x", "y") and "column label is not read" in lines[-1]


def test_a_word_for_a_missing_value_and_a_label_twice():
    assert class_lines(("NA", "nan", "x"), {})[1].startswith("WARNING: 'nan' is one of the classes")
    lines = resolved(made(("a", "b"), ("b", "b"), ("a",)), "multi_label")[2]
    assert lines[1] == "WARNING: 1 training records name a label twice, such as /data/train.csv:3"


@pytest.mark.parametrize("text", ["", " \t", "\u200b", "\ufeff\u2060 ", "\u3000"])
def test_blank_texts_are_counted(text):
    train = made(*"abab")
    assert blank_lines(train) == []
    blank = [*train, *(dataclasses.replace(one, text=text) for one in train[1:3])]
    assert blank_lines(blank) == ["WARNING: 2 of 6 training texts are blank, such as /data/train.csv:3"]
    pairs = [dataclasses.replace(train[0], text_pair=one) for one in ("a", text, None)]
    assert len(blank_lines(pairs[:2])) == len(blank_lines([pairs[0], pairs[2]])) == 1 and not blank_lines(pairs[:1])
    assert blank_lines([dataclasses.replace(train[0], text=text, words=("a",))]) == []


# ------------------------------------------------------------------ lists of 0 and 1


@pytest.mark.parametrize(
    "values", [("0", "1"), ("0.0", "1.0"), ("false", "true")],
)  # fmt: skip
def test_lists_of_0_and_1_are_columns_of_labels(values):
    rows = [(0, 1, 0), (1, 1, 0), (0, 0, 0)]
    train, tests = ([tuple(values[one] for one in row) for row in part] for part in (rows, rows[:2]))
    config, splits, lines = resolved(made(*train), "multi_label", tests=made(*tests))
    assert config.data.labels == ("0", "1", "2")
    assert [one.labels for one in splits["train"]] == [("1",), ("0", "1"), ()]
    assert [one.labels for one in splits["test"]] == [("1",), ("0", "1")]
    assert "value for each of 3 labels" in lines[0]
    named = resolved(made(*train), "multi_label", labels=("wet", "dry", "hot"))
    assert [one.labels for one in named[1]["train"]] == [("dry",), ("wet", "dry"), ()]
    for wrong in (("0", "1"), ("0", "2", "1")):
        with pytest.raises(ValueError, match=r"^/data/test\.csv:3: labels .* values 0 and 1"):
            resolved(made(*train), "multi_label", tests=made(train[0], wrong, source="test.csv"))


@pytest.mark.parametrize(
    "lists",
    [
        [("0", "1"), ("1", "0")],  # no value twice in a list
        [("0", "1", "0"), ("1",)],  # several lengths
        [("0", "2", "0"), ("1", "0", "0")],  # other values
        [("a", "a", "b"), ("b", "a", "c")],
    ],
)
def test_other_lists_are_names_of_labels(lists):
    config, splits, _ = resolved(made(*lists), "multi_label")
    assert [one.labels for one in splits["train"]] == lists
    assert config.data.labels == class_order({one for each in lists for one in each})


# ------------------------------------------------------------------ hidden and empty labels


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize(
    ("train", "tests", "is_hidden"),
    [
        (("0", "1"), ("-1", "-1"), True),
        (("1.5", "4"), ("-1.0", "-1"), True),
        (("0", "1"), ("-1", "1"), False),
        (("-1", "1"), ("-1", "-1"), False),
        (("-0.5", "2"), ("-1.0", "-1.0"), False),
    ],
)
def test_minus_one_in_every_test_record_hides_the_label(kind, train, tests, is_hidden):
    _, splits, lines = resolved(made(*train, *train), kind, tests=made(*tests))
    assert [one.label for one in splits["test"]] == ([None, None] if is_hidden else list(tests))
    assert any("test: label is -1 in every record" in line for line in lines) == is_hidden


def test_minus_one_hides_the_labels_of_names_lists_and_tags():
    splits = resolved(made(*"abab"), tests=made("-1", "-1"))[1]
    assert [one.label for one in splits["test"]] == [None, None]
    hidden = [("-1", "-1", "-1")] * 2
    splits = resolved(made(("0", "1", "0"), ("1", "1", "0")), "multi_label", tests=made(*hidden))[1]
    assert [one.labels for one in splits["test"]] == [None, None]
    train, tests = (
        [Record(id="0", source="f:1", words=("a", "b"), tags=tags)] for tags in (("0", "3"), ("-1", "-1"))
    )
    assert resolved(train, "tagging", tests=tests)[1]["test"][0].tags is None


@pytest.mark.parametrize(
    ("train", "tests", "expected"),
    [
        ([("a",), ("b",)], [(), ()], [None, None]),
        ([("a",), ("b",)], [(), ("a",)], [None, ("a",)]),
        ([("a",), ()], [(), ("a",)], [(), ("a",)]),  # no label is an answer
        ([("a",), ()], [(), ()], [None, None]),
    ],
)
def test_empty_labels_of_test_records(train, tests, expected):
    splits = resolved(made(*train), "multi_label", tests=made(*tests))[1]
    assert [one.labels for one in splits["test"]] == expected
    assert [one.labels for one in splits["train"]] == train


# ------------------------------------------------------------------ a run that began with another order


@pytest.mark.parametrize(
    ("labels", "given"), [(("0", "1", "10", "2"), ()), (("10", "2", "0", "1"), ("0", "1", "10", "2"))]
)
def test_a_resumed_run_keeps_the_order_of_its_classes(tmp_path, labels, given):
    config, _, _ = resolved(made(*labels, *labels))
    asked = dataclasses.replace(config, data=dataclasses.replace(config.data, labels=given))
    assert config.data.labels == ("0", "1", "2", "10")
    assert _stored_order(asked, config, tmp_path) is None
    (tmp_path / "config.yaml").write_text(f"task: {{kind: classification}}\ndata: {{labels: {list(labels)}}}\n")
    found = _stored_order(asked, config, tmp_path)
    assert (found is None) if given else found.data.labels == labels
    (tmp_path / "config.yaml").write_text("task: {kind: classification}\ndata: {labels: ['0', '1', '3', '2']}\n")
    assert _stored_order(asked, config, tmp_path) is None
