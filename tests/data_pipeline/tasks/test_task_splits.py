"""The splits of a run: their names, a dev split cut from train, and limits."""

import itertools

import pytest
from task_files import write

from bert_jax.config.task import TaskDataConfig
from bert_jax.records import Record
from data_pipeline.tasks import read_splits, split_names
from data_pipeline.tasks.record_splits import cut_dev, draw
from data_pipeline.tasks.task_files import locate


def folder_of(path, **files):
    """Files of ids, each a line "id text label"."""
    for name, ids in files.items():
        lines = "".join(f"{i}\ttext {i}\t{i % 2}\n" for i in ids)
        write(path / f"{name}.tsv", f"id\ttext\tlabel\n{lines}")
    return str(path)


def ids(splits):
    return {name: [int(record.id) for record in records] for name, records in splits.items()}


def read(kind="classification", **options):
    return ids(read_splits(TaskDataConfig(**options), kind))


def test_names_of_splits(tmp_path):
    place = folder_of(tmp_path, train=[1, 2], more=[3], dev=[4], easy=[5], hard=[6], test=[7])
    both = read(dir=place, train=("train.tsv", "more.tsv"), dev=("easy.tsv", "hard.tsv"), test=("test.tsv",))
    assert both == {"train": [1, 2, 3], "easy": [5], "hard": [6], "test": [7]}
    assert list(both) == ["train", "easy", "hard", "test"]
    assert read(dir=place, dev=("hard.tsv",)) == {"train": [], "dev": [6]}
    assert read(test=(f"{place}/easy.tsv", f"{place}/hard.tsv")) == {"train": [], "easy": [5], "hard": [6]}


def test_names_are_relative_to_the_folder():
    assert locate("data/glue", "RTE/train.tsv") == "data/glue/RTE/train.tsv"
    assert locate("", "train.tsv") == "train.tsv"
    assert locate("gs://bucket/glue", "train.tsv") == "gs://bucket/glue/train.tsv"
    assert locate("gs://bucket/glue", "/data/train.tsv") == "/data/train.tsv"
    assert locate("data/glue", "gs://bucket/train.tsv") == "gs://bucket/train.tsv"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"dev": ("a.tsv",), "test": ("b.tsv",)}, (("dev",), ("test",))),
        ({"dev": ("en/x.tsv.gz", "de/x.tsv.gz")}, (("en_x", "de_x"), ())),
        (
            {"dev": ("en/dev.tsv", "de/dev.tsv"), "test": ("en/test.tsv", "de/test.tsv")},
            (("en_dev", "de_dev"), ("en_test", "de_test")),
        ),
        ({"dev": ("d.json:val", "d.json:val+oos_val")}, (("val", "val+oos_val"), ())),
        ({"dev": ("a.json:val", "b.json:val")}, (("a_val", "b_val"), ())),
        (
            {"test": ("tfds:glue/mnli:test_matched", "tfds:glue/mnli:train[:10%]")},
            ((), ("test_matched", "train_10_")),
        ),
        ({"test": ("glue/rte:1.0.0:test", "glue/mrpc:test"), "format": "tfds"}, ((), ("rte_test", "mrpc_test"))),
        ({"dev_fraction": 0.1, "test": ("dev.tsv", "x.tsv")}, None),
        ({"dev": ("a/dev.tsv", "b/a/dev.tsv")}, None),
    ],
)
def test_names_of_splits_by_themselves(options, names):
    data = TaskDataConfig(**options)
    if names is None:
        with pytest.raises(ValueError, match=r"data\.dev, data\.test: 2 splits have the name "):
            split_names(data)
    else:
        assert split_names(data) == names


def test_a_dev_split_cut_from_train(tmp_path):
    place = folder_of(tmp_path, train=range(100))
    options = {"dir": place, "train": ("train.tsv",), "dev_fraction": 0.1}
    splits = read(**options)
    assert len(splits["dev"]) == 10 and sorted(splits["dev"] + splits["train"]) == list(range(100))
    assert all(part == sorted(part) for part in splits.values())
    assert read(**options) == splits
    other = read(**options, split_seed=1)
    assert len(other["dev"]) == 10 and other["dev"] != splits["dev"]
    # The same on every machine and with every version: models are compared on it.
    assert splits["dev"] == [12, 14, 17, 30, 34, 35, 46, 75, 91, 97]


def test_sentences_that_no_longer_follow_each_other_are_of_different_documents():
    records = [Record(id=str(i), source="", words=("a",), group="x") for i in range(8)]
    train, dev = cut_dev(records, fraction=0.5, group_by="none", seed=0)
    assert [int(record.id) for record in dev] != [0, 1, 2, 3] and len(dev) == 4
    for kept in (draw(records, 5, seed=0), train, dev):
        assert len({record.group for record in kept}) > 1
        for before, now in itertools.pairwise(kept):
            assert (before.group == now.group) == (int(now.id) == int(before.id) + 1)
    # Those of texts stay what they are.
    texts = [Record(id=str(i), source="", text="a", group="x") for i in range(8)]
    assert {record.group for record in draw(texts, 5, seed=0)} == {"x"}


def test_limits(tmp_path):
    place = folder_of(tmp_path, train=range(100), dev=range(20), test=range(5))
    options = {"dir": place, "train": ("train.tsv",)}
    few, more = (read(**options, train_limit=count)["train"] for count in (10, 30))
    assert len(few) == 10 and set(few) < set(more) and few == sorted(few) != list(range(10))
    assert read(**options, train_limit=10, split_seed=1)["train"] != few
    assert len(read(**options, train_limit=1000)["train"]) == 100
    limited = read(**options, dev=("dev.tsv",), test=("test.tsv",), dev_limit=3)
    assert limited["dev"] == [0, 1, 2] and len(limited["test"]) == 5
    cut = read(**options, dev_fraction=0.5)
    both = read(**options, dev_fraction=0.5, dev_limit=3, train_limit=7)
    assert both["dev"] == cut["dev"][:3] and len(both["train"]) == 7 and set(both["train"]) < set(cut["train"])


def pairs(*texts):
    return [Record(id=str(i), source="", text=a, text_pair=b) for i, (a, b) in enumerate(texts)]


def texts_of(records):
    return {text for r in records for text in (r.text, r.text_pair, *r.negatives) if text}


def test_no_text_is_on_both_sides():
    # a chain through text and text_pair: 0-1-2, 3-4 through a negative, and single ones with nothing in common.
    records = pairs(("a", "b"), ("b", "c"), ("d", "c"), ("e", "f"), ("g", ""), ("h", ""), ("i", None), ("j", None))
    records[4] = Record(id="4", source="", text="g", text_pair="", negatives=("e",))
    parts = set()
    for seed in range(60):
        train, dev = cut_dev(records, fraction=0.4, group_by="sentence", seed=seed)
        assert len(dev) == 3 and len(train) == 5
        assert not texts_of(train) & texts_of(dev)
        parts.add(tuple(r.id for r in dev))
    assert ("0", "1", "2") in parts and len(parts) == 5
    assert any("3" in part for part in parts)
    assert all(("3" in part) == ("4" in part) for part in parts)


def test_questions_with_the_same_choices_belong_together():
    records = [Record(id=str(i), source="", choices=(f"a{i % 2}", f"b{i}")) for i in range(4)]
    train, dev = cut_dev(records, fraction=0.5, group_by="sentence", seed=0)
    assert {r.id for r in dev} in ({"0", "2"}, {"1", "3"}) and len(train) == 2


@pytest.mark.parametrize("group_by", ["article", "document"])
def test_groups_are_not_torn(group_by):
    records = [Record(id=str(i), source="", group=f"g{i % 10}" if i < 80 else "") for i in range(100)]
    train, dev = cut_dev(records, fraction=0.3, group_by=group_by, seed=3)
    assert len(dev) == 30 and len(train) == 70
    assert not {r.group for r in train} & {r.group for r in dev} - {""}
    assert {r.group for r in dev} - {""} and "" in {r.group for r in dev}


def test_a_split_is_the_same_wherever_the_files_lie(tmp_path):
    content = "".join(f"-DOCSTART- O\n\na{i} O\n\nb{i} O\n\n" for i in range(30))
    parts = []
    for folder in (tmp_path, tmp_path / "else" / "where"):
        write(folder / "train.conll", content)
        parts.append(
            read("tagging", dir=str(folder), train=("train.conll",), dev_fraction=0.2, group_by="document")
        )
    assert parts[0] == parts[1] and len(parts[0]["dev"]) == 12
    assert all(number + 1 in parts[0]["dev"] for number in parts[0]["dev"][::2])


def test_groups_larger_than_the_share():
    records = [Record(id=str(i), source="", group="large" if i < 60 else "small") for i in range(100)]
    assert {len(cut_dev(records, fraction=0.1, group_by="article", seed=s)[1]) for s in range(9)} == {40}
    two = [Record(id=str(i), source="") for i in range(2)]
    assert [len(part) for part in cut_dev(two, fraction=0.9, group_by="none", seed=0)] == [1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"data\.train: not set"),
        (
            {"dev_fraction": 0.1, "test": ("train.tsv",)},
            r"data\.dev_fraction: the dev split needs",
        ),
        (
            {"dev_fraction": 0.1, "train": ("train.tsv",), "group_by": "article"},
            r"data\.group_by: 'article' needs records with a group; set data.columns group=COLUMN",
        ),
        (
            {"dev_fraction": 0.1, "train": ("one.tsv",)},
            r"data\.dev_fraction: all 1 training records are one group \(data\.group_by none\); set data\.dev",
        ),
        ({"train": ("trian.tsv",)}, r"trian\.tsv: no such file or folder; did you mean 'train\.tsv'\?"),
    ],
)
def test_mistakes(tmp_path, options, message):
    place = folder_of(tmp_path, train=range(10), one=[1])
    with pytest.raises(ValueError, match=message):
        read(dir=place, **options)
