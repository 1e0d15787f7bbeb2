"""Records from Python objects: every type gives those of a JSON-lines file with the same content."""

import collections
import dataclasses
import enum
import json
import logging
import types
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from bert_jax.commands.task_data import records, split_off
from bert_jax.config.task import TaskDataConfig
from bert_jax.records import Answer, Record
from data_pipeline.tasks import read_file

# For each kind the columns of three records, by role, in the order of a tuple.
COLUMNS = {
    "classification": {"text": ["a film", "b\u2028", "ü"], "label": ["good", "bad", "good"]},
    "regression": {"text": ["a", "b", "c"], "text_pair": ["d", "e", ""], "label": [3.8, 0.25, 1e-05]},
    "multi_label": {"text": ["a", "b", "c"], "labels": [["wet", "cold"], [], ["dry"]]},
    "qa": {
        "text": ["who?", "what?", "why?"],
        "text_pair": ["He did it.", "He did it.", "No reason."],
        "answers": [[{"text": "He", "answer_start": 0}], [{"text": "it", "answer_start": -1}], []],
    },
    "tagging": {"words": [["in", "New York"], ["a"], ["b", "c"]], "tags": [["O", "LOC"], ["O"], ["O", "LOC"]]},
    "joint": {"words": [["in", "x"], ["a"], ["b"]], "tags": [["O", "X"], ["O"], ["O"]], "label": [2, 10, 2]},
    "choice": {"text": ["q", "r", "s"], "choices": [["a", "b"], ["c", "d"], ["e", "f"]], "label": [0, 1, 1]},
    "sentence": {"text": ["a", "b", "c"], "text_pair": ["d", "e", "f"], "negatives": [["x"], ["y", "z"], ["w"]]},
    "translation": {"text": ["ein Hund", "ü", "c"], "label": ["a dog", "u e", "12"]},
}


def rows_of(columns):
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def of_file(folder, columns, kind, split="train", **options):
    path = folder / "x.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows_of(columns)))
    found = read_file(path, TaskDataConfig(**options), kind, split=split)
    return [replace(one, source=f"{split}[{i}]") for i, one in enumerate(found)]


def objects(values):
    array = np.empty(len(values), object)
    array[:] = values
    return array


def polars_frame(columns):
    return pytest.importorskip("polars", reason="polars is not installed").DataFrame(columns, strict=False)


def dataset(columns):
    return pytest.importorskip("datasets", reason="datasets is not installed").Dataset.from_dict(columns)


def streamed(columns):
    return dataset(columns).to_iterable_dataset()


FORMS = {
    "tuple of columns": lambda columns: tuple(columns.values()),
    "tuples": lambda columns: [tuple(row.values()) for row in rows_of(columns)],
    "generator": lambda columns: (tuple(row.values()) for row in rows_of(columns)),
    "zip": lambda columns: zip(*columns.values(), strict=True),
    "dicts": rows_of,
    "generator of dicts": lambda columns: iter(rows_of(columns)),
    "dict of columns": dict,
    "dict of arrays": lambda columns: {name: objects(values) for name, values in columns.items()},
    "tuple of arrays": lambda columns: tuple(map(objects, columns.values())),
    "named tuples": lambda columns: list(pd.DataFrame(columns).itertuples(index=False)),
    "series": lambda columns: tuple(pd.DataFrame(columns)[name] for name in columns),
    "pandas": lambda columns: pd.DataFrame(columns, index=[7, 7, 3]),
    "arrow": pa.table,
    "polars": polars_frame,
    "datasets": dataset,
    "streamed datasets": streamed,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", COLUMNS)
def test_every_type_gives_the_records_of_a_file(tmp_path, kind, form):
    columns = COLUMNS[kind]
    found = records(FORMS[form](columns), kind)
    assert [replace(one, source=one.source.replace(".iloc", "")) for one in found] == of_file(
        tmp_path, columns, kind
    )


@pytest.mark.parametrize("kind", COLUMNS)
def test_files_and_records_are_data_too(tmp_path, kind):
    expected = [replace(one, source="") for one in of_file(tmp_path, COLUMNS[kind], kind)]
    path = tmp_path / "x.jsonl"
    for data in (str(path), path, [path]):
        assert [replace(one, source="") for one in records(data, kind)] == expected
    assert records(expected, kind) == expected
    options = TaskDataConfig(dir=str(tmp_path))
    assert [one.source for one in records("x.jsonl", kind, options=options)] == [f"{path}:{i}" for i in (1, 2, 3)]


def labels_of(values, kind="classification", **options):
    return [one.label for one in records((["t"] * len(values), values), kind, **options)]


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([1, 0], ["1", "0"]),
        (np.array([1, 0], np.int8), ["1", "0"]),
        (np.array([3.8, 1.0], np.float32), ["3.8", "1.0"]),
        ([3.8, 1.0], ["3.8", "1.0"]),
        ([True, False], ["true", "false"]),
        (np.array([True, False]), ["true", "false"]),
        (np.array(["good", "bad"]), ["good", "bad"]),
        (np.array(["good", "bad"], "S"), ["good", "bad"]),
        (list(np.array(["good", "bad"])), ["good", "bad"]),
        (np.array([[1], [0]]), ["1", "0"]),
        (pd.Series(["good", "bad"], dtype="category"), ["good", "bad"]),
        (pd.Series([3.8, 1.0], dtype="float32"), ["3.8", "1.0"]),
        (pd.Series([1, 0], dtype="Int64", index=[5, 5]), ["1", "0"]),
        (pd.DataFrame({"y": [1, 0]}), ["1", "0"]),
        (pa.array([3.8, 1.0], pa.float32()), ["3.8", "1.0"]),
        ([Mood.GOOD, Mood.BAD], ["good", "bad"]),
    ],
)
def test_labels_of_every_type(values, labels):
    assert labels_of(values) == labels


def test_arrays_of_jax():
    import jax.numpy as jnp

    assert labels_of(jnp.array([1, 0])) == labels_of(list(jnp.array([1, 0]))) == ["1", "0"]
    assert labels_of(jnp.array([3.8, 1.0])) == labels_of(list(jnp.array([3.8, 1.0]))) == ["3.8", "1.0"]


@pytest.mark.parametrize(
    "values",
    [[None, "x"], [float("nan"), "x"], pd.Series([None, "x"]), pd.array([None, "x"]), [pd.NA, "x"], ["NaN", "x"]],
)
def test_missing_labels_of_a_test_set(values):
    assert labels_of(values, split="test") == [None, "x"]


def test_missing_numbers():
    assert labels_of(np.array([np.nan, 2]), "regression") == [None, "2.0"]
    assert labels_of(pd.array([None, 2]), "regression") == [None, "2"]
    assert labels_of(["nan", "2"], "regression") == [None, "2"]


def test_a_test_set_without_labels():
    texts = [Record(id=str(i), source=f"test[{i}]", text=text) for i, text in enumerate("ab")]
    for data in (["a", "b"], np.array(["a", "b"]), {"text": ["a", "b"]}, (["a", "b"],), pd.Series(["a", "b"])):
        assert records(data, "classification", split="test") == texts
    pairs = [replace(one, text_pair="c") for one in texts]
    for data in ([(("a", "c"),), (("b", "c"),)], ((("a", "b"), ("c", "c")),)):
        assert records(data, "classification", split="test") == pairs


def test_pairs_of_texts():
    expected = records([("a", "b", "x"), ("c", "d", "y")], "classification")
    assert [(one.text, one.text_pair, one.label) for one in expected] == [("a", "b", "x"), ("c", "d", "y")]
    firsts, seconds, labels = ["a", "c"], ["b", "d"], ["x", "y"]
    for data in (
        (firsts, seconds, labels),
        ((firsts, seconds), labels),
        ([("a", "b"), ("c", "d")], labels),
        (np.array([["a", "b"], ["c", "d"]]), np.array(labels)),
        (pd.DataFrame({0: firsts, 1: seconds}), pd.Series(labels)),
        [(("a", "b"), "x"), (["c", "d"], "y")],
        np.array([["a", "b", "x"], ["c", "d", "y"]]),
    ):
        assert records(data, "classification") == expected


def test_sentences():
    def read(data):
        return [(one.text, one.text_pair, one.negatives, one.label) for one in records(data, "sentence")]

    assert read(["a", "b"]) == [("a", None, (), None), ("b", None, (), None)]
    assert read([("a", "b")]) == read((["a"], ["b"])) == [("a", "b", (), None)]
    assert read([("a", "b", 0.5)]) == read([(("a", "b"), 0.5)]) == [("a", "b", (), "0.5")]
    assert read([("a", "b", "n", "m")]) == read([("a", "b", ["n", "m"])]) == [("a", "b", ("n", "m"), None)]
    assert read((["a"], [1])) == [("a", None, (), "1")]
    assert read((["a", "c"], ["b", "d"], [0.5, None])) == [("a", "b", (), "0.5"), ("c", "d", (), None)]


@dataclasses.dataclass
class OfTransformers:
    guid: str
    text_a: str
    text_b: str | None = None
    label: str | None = None


class OfSentenceTransformers:
    def __init__(self, texts, label=0):
        self.texts, self.label = texts, label


def test_examples_of_other_libraries():
    one = records([OfTransformers("7", "a", "b", "x")], "classification")[0]
    assert (one.text, one.text_pair, one.label) == ("a", "b", "x")
    pair, triplet = OfSentenceTransformers(["a", "b"], 0.8), OfSentenceTransformers(["a", "b", "n"])
    found = records([pair, triplet], "sentence")
    assert [(one.label, one.negatives) for one in found] == [("0.8", ()), (None, ("n",))]


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("classification", {"sentence": "a", "label": 1, "idx": 0}, {"text": "a", "label": "1"}),
        ("classification", {"text": "a", "labels": 1}, {"text": "a", "label": "1"}),
        ("classification", {"premise": "a", "hypothesis": "b", "label": 1}, {"text_pair": "b"}),
        ("regression", {"sentence1": "a", "sentence2": "b", "score": 4.5}, {"text_pair": "b", "label": "4.5"}),
        ("sentence", {"anchor": "a", "positive": "b", "negative": "c"}, {"text_pair": "b", "negatives": ("c",)}),
        ("sentence", {"sentence1": "a", "sentence2": "b", "score": 0.5}, {"label": "0.5"}),
        (
            "tagging",
            {"id": "7", "tokens": ["a"], "pos_tags": [1], "ner_tags": [2]},
            {"words": ("a",), "tags": ("2",)},
        ),
        ("joint", {"tokens": ["a"], "slots": ["O"], "intent": "x"}, {"tags": ("O",), "label": "x"}),
        ("multi_label", {"text": "a", "label": ["x"]}, {"labels": ("x",)}),
        ("classification", {"texts": "a", "labels": "x"}, {"text": "a", "label": "x"}),
        ("classification", {"question": "a", "sentence": "b", "label": 1}, {"text": "a", "text_pair": "b"}),
        ("sentence", {"query": "a", "answer": "b"}, {"text": "a", "text_pair": "b", "negatives": ()}),
        (
            "sentence",
            {"query": "a", "positive": "b", "negative_1": "c", "negative_2": "d"},
            {"negatives": ("c", "d")},
        ),
        ("sentence", {"query": "a", "positive": "b", "negative": "c", "negative_1": None}, {"negatives": ("c",)}),
        ("choice", {"question": "a", "options": ["b", "c"], "label": 0}, {"text": "a", "choices": ("b", "c")}),
        (
            "choice",
            {"premise": "a", "choice1": "b", "choice2": "c", "label": 0},
            {"text": "a", "choices": ("b", "c")},
        ),
        (
            "choice",
            {"sent1": "He sits.", "sent2": "He", "ending0": "falls.", "ending1": "rests.", "label": 1},
            {"text": "He sits.", "choices": ("He falls.", "He rests."), "label": "1"},
        ),
        ("qa", {"text": "who?", "context": "He", "answer": "He"}, {"answers": (Answer(text="He", start=-1),)}),
        (
            "qa",
            {"question": "who?", "context": "He", "answers": {"text": ["He"], "answer_start": [0]}},
            {"text": "who?", "text_pair": "He", "answers": (Answer(text="He", start=0),)},
        ),
    ],
)
def test_usual_names_of_columns(caplog, kind, row, expected):
    with caplog.at_level(logging.WARNING):
        for data in ([row], {name: [value] for name, value in row.items()}):
            one = records(data, kind)[0]
            assert {name: getattr(one, name) for name in expected} == expected
    assert "is read as" in caplog.text or "text" in row


def test_the_column_of_a_role_goes_before_usual_names():
    one = records([{"text": "a", "sentence": "b", "label": "x", "labels": "y"}], "classification")[0]
    assert (one.text, one.label) == ("a", "x")
    options = TaskDataConfig(columns=("text=sentence", "label=labels"))
    one = records([{"text": "a", "sentence": "b", "label": "x", "labels": "y"}], "classification", options=options)[
        0
    ]
    assert (one.text, one.label) == ("b", "y")


class ClassLabel:
    names = ("neg", "pos")

    def int2str(self, value):
        return self.names[value]


class Sequence:
    feature = ClassLabel()


class Stream(list):
    """The part of a streamed dataset that is read."""

    features = {"label": ClassLabel(), "tags": Sequence()}  # noqa: RUF012


def test_numbers_of_classes_have_the_names_of_a_dataset():
    """-1 stands for a label that is not published."""
    rows = Stream([{"text": "a", "label": 1}, {"text": "b", "label": -1}])
    assert [one.label for one in records(rows, "classification", split="test")] == ["pos", None]
    assert records(Stream([{"words": ["a", "b"], "tags": [1, 0]}]), "tagging")[0].tags == ("pos", "neg")


def test_features_of_datasets():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    names = datasets.ClassLabel(names=["neg", "pos"])
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": names, "score": datasets.Value("float32")}
    )
    data = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, -1], "score": [3.8, 1]}, features=features)
    assert [one.label for one in records(data, "classification", split="test")] == ["pos", None]
    assert [one.label for one in records(data.to_iterable_dataset(), "classification", split="test")] == [
        "pos",
        None,
    ]
    options = TaskDataConfig(columns=("text=text", "label=score"))
    assert [one.label for one in records(data, "regression", options=options)] == ["3.8", "1.0"]
    tags = datasets.Features(
        {"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": datasets.Sequence(names)}
    )
    data = datasets.Dataset.from_dict({"tokens": [["a", "b"]], "ner_tags": [[1, 0]]}, features=tags)
    assert records(data, "tagging")[0].tags == ("pos", "neg")
    with pytest.raises(
        ValueError, match=r"train: 'train' is a data set; give one of them, such as data\['train'\]"
    ):
        records(datasets.DatasetDict(train=data), "tagging")


def test_lists_of_labels():
    def read(values):
        return [one.labels for one in records((["t"] * len(values), values), "multi_label")]

    assert read(np.array([[0, 2], [3, 0]])) == [("0", "2"), ("3", "0")]
    for marks in (np.array([[0, 1, 1], [1, 0, 0]]), np.array([[0, 1, 1]], bool), [[1.0, 0.0], [0.0, 0.0]]):
        with pytest.raises(ValueError, match="train: the labels are an array of 0 and 1; give lists of labels"):
            read(marks)
    assert read([{"wet", "cold"}, ()]) == [("cold", "wet"), ()]
    assert read(["wet, cold", ""]) == [("wet", "cold"), ()]
    assert read([np.array([], "U4")]) == [()]


def test_a_column_for_each_label():
    frame = pd.DataFrame({"text": ["a", "b"], "wet": [1, 0], "cold": [1, 0]})
    found = records((frame["text"], frame[["wet", "cold"]]), "multi_label")
    assert [one.labels for one in found] == [("wet", "cold"), ()]
    assert records([{"text": "a", "labels": {"wet": 0, "cold": 1}}], "multi_label")[0].labels == ("cold",)


def test_words_with_tags():
    expected = records([(["a", "b"], ["O", "X"]), (["c"], ["O"])], "tagging")
    assert [(one.words, one.tags) for one in expected] == [(("a", "b"), ("O", "X")), (("c",), ("O",))]
    for data in (
        [[("a", "O"), ("b", "X")], [("c", "O")]],
        iter([[["a", "b"], ["O", "X"]], [["c"], ["O"]]]),
        (["a b", "c"], ["O X", "O"]),
        ((["a", "b"], ["c"]), (["O", "X"], ["O"])),
    ):
        assert records(data, "tagging") == expected


def test_answers():
    passage = "It was in Rome."
    at = [Answer(text="Rome", start=10)]
    for answers, expected in (
        ("Rome", [Answer(text="Rome", start=-1)]),
        (("Rome", 10), at),
        ([("Rome", 10)], at),
        (["Rome"], [Answer(text="Rome", start=-1)]),
        ({"text": ["Rome"], "answer_start": np.array([10])}, at),
        ([{"text": "Rome", "answer_start": 10}], at),
        ("", []),
        ([], []),
        (None, None),
    ):
        one = records([("Where?", passage, answers)], "qa")[0]
        assert one.answers == (None if expected is None else tuple(expected))
    questions = {"qas": [{"id": "7", "question": "Where?", "answers": [{"text": "Rome", "answer_start": 10}]}]}
    squad = {"version": "1.1", "data": [{"title": "T", "paragraphs": [{"context": passage} | questions]}]}
    one = records(squad, "qa")[0]
    assert (one.source, one.group, one.answers) == ("train: id 7", "T", tuple(at))


Named = collections.namedtuple("Named", "text label")


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (
            [["a", "b"], ["x", "y"]],
            "classification",
            "train: a list of 2 lists may contain columns or records; give col",
        ),
        (
            [[["a"], ["b"]], [["O"], ["O"]]],
            "tagging",
            "train: a list of 2 lists may contain columns or records; give",
        ),
        ([[]], "tagging", "train[0]: no words, which tagging needs; give (lists_of_words"),
        ([()], "classification", "train[0]: no text, which classification needs; give (texts"),
        (
            [{"input_ids": [1], "labels": 1}],
            "classification",
            "existing columns: input_ids, labels; token ids are not read; give (texts",
        ),
        (
            types.SimpleNamespace(batch_size=2, dataset=[]),
            "classification",
            "SimpleNamespace yields batches; pass its attribute .dataset",
        ),
        (
            pd.DataFrame({"Satz": ["a"], "Kategorie": ["x"]}),
            "classification",
            "train.iloc[0]: no column 'text', which classification needs; existing columns: Satz, Kategorie; "
            "give (texts, labels), or (texts, other_texts, labels), or options={'data.columns': ['text=COLUMN',",
        ),
        (["a"], "classification", "train[0]: no label, which classification needs; give (texts, labels)"),
        (["a.csv"], "classification", "a file is given by its name, several as pathlib.Path"),
        (
            (["a", "b"], ["x"]),
            "classification",
            "train: the columns differ in length: column 0 2, column 1 1; every",
        ),
        (
            {"text": ["a", "b"], "label": [1]},
            "classification",
            "train: the columns differ in length: text 2, label 1;",
        ),
        (
            [["a", "b", "c", "d"]],
            "classification",
            "train[0]: 4 values, but classification has at most 3; columns",
        ),
        (("a", "x"), "classification", "train: a tuple contains columns, (texts, labels)"),
        ({"text": "a", "label": ["x"]}, "classification", "train: 'text' is one value; give a column of values"),
        ({"train": {"text": []}}, "classification", "train: 'train' is a data set; give one of them"),
        (7, "classification", "train: int is not allowed; give (texts, labels)"),
        (None, "classification", "train: NoneType is not allowed; give (texts, labels)"),
        ([], "classification", "train: no records; give (texts, labels)"),
        (([], []), "classification", "train: no records; give (texts, labels)"),
        (
            [("a", "x"), (None, "y")],
            "classification",
            "train[1]: text is missing (null or NaN); every record needs",
        ),
        (
            [("a", ["x", "y"])],
            "classification",
            "train[0]: label is a list of 2; several labels need task.kind multi",
        ),
        ([("a", object())], "classification", "train[0]: label has the type object; allowed: a string or a number"),
        ([Named("a", {})], "classification", "train[0]: label has the type dict; allowed: a string or a number"),
        ([(["a", "b"], ["O"])], "tagging", "train[0]: 1 tags for 2 words; every word needs one tag"),
        ([("q", "p", 7)], "qa", "train[0]: invalid answers; allowed: "),
        (
            [{"id": 1, "text": "a", "label": 1}] * 2,
            "classification",
            "train[1]: id '1' is also the id of train[0];",
        ),
        (
            [{"txt": "a", "label": 1}],
            "classification",
            "train[0]: no column 'text', which classification needs; exist",
        ),
        (
            pd.DataFrame({"text": ["a", None], "label": [1, 2]}, index=[8, 9]),
            "classification",
            "train.iloc[1]: text is",
        ),
        (
            pd.DataFrame([["a", "b", 1]], columns=["text", "text", "label"]),
            "classification",
            "2 columns are named 'text'",
        ),
        (pd.DataFrame({"text": ["a"]}), "classification", "train.iloc[0]: no column 'label', which classification"),
        ("no/such/file.csv", "classification", "no/such/file.csv: no such file or folder"),
    ],
)
def test_one_line_for_bad_data(data, kind, message):
    with pytest.raises(ValueError) as caught:
        records(data, kind)
    assert message in str(caught.value) and "\n" not in str(caught.value)


class MapStyle:
    """A data set of torch has a length and items, but no iterator."""

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return {"text": f"t{i}", "label": np.int64(i % 2)}


def test_a_data_set_of_items():
    assert [(one.text, one.label) for one in records(MapStyle(), "classification")] == [
        ("t0", "0"),
        ("t1", "1"),
        ("t2", "0"),
    ]


# ------------------------------------------------------------------ split_off


def made(labels, texts=None, **fields):
    texts = texts or [f"text {i}" for i in range(len(labels))]
    pairs = enumerate(zip(texts, labels, strict=True))
    return [Record(id=str(i), source=f"train[{i}]", text=text, label=label, **fields) for i, (text, label) in pairs]


def test_dev_has_the_share_of_every_class():
    found = made("abbbbbbbbb" * 10 + "c")
    train, dev = split_off(found, 0.2, 0, "classification")
    assert collections.Counter(one.label for one in dev) == {"b": 18, "a": 2}
    assert sorted(train + dev, key=lambda one: int(one.id)) == found
    assert [*map(len, split_off(found, 0.2, 0, "classification"))] == [81, 20]
    assert all(part == sorted(part, key=lambda one: int(one.id)) for part in (train, dev))
    assert split_off(found, 0.2, 0, "classification") == (train, dev) != split_off(found, 0.2, 1, "classification")


def test_many_small_classes_keep_the_share_and_remain_in_train():
    found = made([str(i % 150) for i in range(750)])
    train, dev = split_off(found, 0.1, 0, "classification")
    assert len(dev) == 75 and max(collections.Counter(one.label for one in dev).values()) == 1
    train, dev = split_off(made("aabcd"), 0.5, 0, "classification")
    assert {one.label for one in train} == set("abcd") and [one.label for one in dev] == ["a"]


def test_equal_texts_and_groups_stay_together():
    found = made("ab" * 50, [f"text {i % 20}" for i in range(100)])
    train, dev = split_off(found, 0.1, 0, "classification")
    assert len(dev) == 10 and not {one.text for one in dev} & {one.text for one in train}
    words = [Record(id=str(i), source="", words=(f"w{i}",), group=f"{i // 10}") for i in range(100)]
    train, dev = split_off(words, 0.1, 0, "tagging")
    assert len(dev) == 10 and len({one.group for one in dev}) == 1
    train, dev = split_off(words[:10], 0.2, 0, "tagging")  # one document
    assert len(dev) == 2


def test_values_are_split_at_random():
    train, dev = split_off(made([str(i) for i in range(10)]), 0.3, 0, "regression")
    assert (len(train), len(dev)) == (7, 3)
    assert [*map(len, split_off(made("12"), 0.01, 0, "regression"))] == [1, 1]


@pytest.mark.parametrize("fraction", [0, 1, 0.0, 1.0, -0.1, 1.5, float("nan")])
def test_fractions_outside_of_0_and_1(fraction):
    with pytest.raises(ValueError, match=rf"dev={fraction} is not allowed; allowed: a share above 0 and below 1"):
        split_off(made("ab"), fraction, 0, "classification")


@pytest.mark.parametrize("labels", ["", "a", "abc"])
def test_too_few_records(labels):
    with pytest.raises(ValueError, match=rf"dev=0.1: {len(labels)} training records are too few"):
        split_off(made(labels), 0.1, 0, "classification")


def test_a_share_for_dev_is_named():
    with pytest.raises(
        ValueError, match=r"dev: int is not allowed; give .*, a frame, a share such as 0.1, or a file"
    ):
        records(1, "classification", split="dev")
