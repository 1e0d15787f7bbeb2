"""What is read by way of TensorFlow: prepared datasets, and files in an object store (here ``memory://``)."""

import uuid

import numpy as np
import pytest
from task_files import read

from bert_jax.config.task import TaskDataConfig
from bert_jax.io.storage import ObjectPath
from bert_jax.records import Answer, Record
from data_pipeline.tasks import read_splits
from data_pipeline.text import datasets as prepared


def pair(i: int, label: int) -> dict:
    return {
        "idx": i,
        "sentence1": f"erste {i} \u00e4\u2028",
        "sentence2": f"second {i}",
        "score": 3.8,
        "label": label,
        "words": ["New York", str(i)],
        "tags": ["B-x", "O"],
    }


def store(folder, name, config, features, splits):
    tfds = prepared.load_tfds()
    tfds.dataset_builders.store_as_tfds_dataset(
        name=name, config=config, version="1.2.0", data_dir=folder, features=tfds.features.FeaturesDict(features),
        split_datasets={name: enumerate(examples) for name, examples in splits.items()},
        download_config=tfds.download.DownloadConfig(num_shards=3), disable_shuffling=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Two prepared datasets: pairs with a class and a score in three files, and questions."""
    folder, f = tmp_path_factory.mktemp("tfds"), prepared.load_tfds().features
    features = {"idx": f.Scalar(np.int64), "score": f.Scalar(np.float32)}
    features |= {"sentence1": f.Text(), "sentence2": f.Text(), "words": f.Sequence(f.Text())}
    features["label"] = f.ClassLabel(names=["entailment", "not_entailment"])
    features["tags"] = f.Sequence(f.ClassLabel(names=["O", "B-x"]))
    splits = {"train": [pair(i, i % 2) for i in range(40)], "test": [pair(i, -1) for i in range(5)]}
    store(folder, "my_glue", "rte", features, splits)
    features = {name: f.Text() for name in ("id", "title", "context", "question")}
    features["answers"] = f.Sequence({"text": f.Text(), "answer_start": f.Scalar(np.int32)})
    answers = [{"text": "He", "answer_start": 0}, {"text": "it", "answer_start": 7}]
    asked = {"title": "Deeds", "context": "He did it.", "question": "who?"}
    examples = [asked | {"id": name, "answers": answers if name == "a" else []} for name in "abc"]
    store(folder, "my_squad", None, features, {"validation": examples})
    return str(folder)


@pytest.mark.slow
def test_pairs_with_classes(data_dir):
    columns = ("text=sentence1", "text_pair=sentence2", "label=label", "id=idx")
    data = TaskDataConfig(
        train=("tfds:my_glue/rte:train[:30]",),
        dev=("tfds:my_glue/rte:1.2.0:train[30:]",),
        test=("tfds:my_glue/rte:test",),
        columns=columns,
        tfds_data_dir=data_dir,
        dir="elsewhere",
    )
    splits = read_splits(data, "classification")
    assert [r.id for r in splits["train"]] == [str(i) for i in range(30)]
    assert [r.id for r in splits["dev"]] == [str(i) for i in range(30, 40)]
    assert splits["train"][1] == Record(
        id="1",
        source="tfds:my_glue/rte:train[:30]: record 1",
        text="erste 1 \u00e4\u2028",
        text_pair="second 1",
        label="not_entailment",
    )
    assert splits["test"][0].label is None


def test_scores_and_tags(data_dir):
    name, options = "my_glue/rte:train[:2]", {"format": "tfds", "tfds_data_dir": data_dir}
    records = read(name, "text=sentence1", "label=score", kind="regression", **options)
    assert [(r.id, r.label) for r in records] == [("0", "3.8"), ("1", "3.8")]
    tagged = read(name, kind="tagging", **options)[1]
    assert (tagged.words, tagged.tags) == (("New York", "1"), ("B-x", "O"))


def test_questions(data_dir):
    columns = ("id=id", "text=question", "text_pair=context", "answers=answers", "group=title")
    first, second, _ = read("tfds:my_squad:validation", *columns, kind="qa", tfds_data_dir=data_dir)
    assert (first.text, first.text_pair, first.group) == ("who?", "He did it.", "Deeds")
    assert first.answers == (Answer(text="He", start=0), Answer(text="it", start=7)) and second.answers == ()


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        (
            "tfds:my_glue/rte",
            ("text=sentence1",),
            "tfds:my_glue/rte: the split is missing; write my_glue/rte:SPLIT; splits: train, test",
        ),
        ("tfds:my_glue/rte:dev", ("text=sentence1",), "tfds:my_glue/rte: cannot read the split 'dev': "),
        (
            "tfds:my_glue/rte:train",
            ("text=sentence",),
            "tfds:my_glue/rte: no column 'sentence' (text=sentence in data.columns); existing columns: idx, ",
        ),
        ("tfds:my_glue/cola:train", ("text=sentence1",), "tfds:my_glue/cola: not prepared in "),
    ],
)
def test_mistakes_and_no_download(data_dir, name, columns, message, monkeypatch):
    monkeypatch.setattr(prepared, "is_reachable", lambda host: pytest.fail("asks the network"))
    with pytest.raises(ValueError) as caught:
        read(name, *columns, tfds_data_dir=data_dir)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_files_in_an_object_store():
    bucket = f"memory://{uuid.uuid4().hex}"
    contents = {"seq.in": "a b\n", "seq.out": "O O\n", "label": "i\n", "x.csv": 'text,label\n"A\nB",1\n'}
    for name, content in contents.items():
        ObjectPath(f"{bucket}/{name}").write_text(content)
    records = read_splits(TaskDataConfig(dir=bucket, train=("x.csv",)), "classification")["train"]
    assert records == [Record(id="0", source=f"{bucket}/x.csv:2", text="A\nB", label="1")]
    slots = read_splits(TaskDataConfig(test=(bucket,)), "joint")["test"]
    assert [(r.words, r.tags, r.label) for r in slots] == [(("a", "b"), ("O", "O"), "i")]
    with pytest.raises(ValueError, match=r"x\.cvs: no such file or folder; did you mean 'x\.csv'\?"):
        read_splits(TaskDataConfig(dir=bucket, train=("x.cvs",)), "classification")
