"""Corpora that TensorFlow Datasets or Hugging Face datasets has prepared: the same shards as from plain text."""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_corpora import tree, write_corpus, write_vocab

from bert_jax.commands.data import main
from data_pipeline.shards.shard_files import read_manifest
from data_pipeline.text import datasets as prepared
from data_pipeline.text.corpus import list_sources
from data_pipeline.text.documents import read_documents

OPTIONS = [
    "--seq_length",
    "32",
    "--max_predictions",
    "5",
    "--dupe_factor",
    "2",
    "--num_shards",
    "2",
    "--workers",
    "1",
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Documents, their sentences a line each."""
    path = write_corpus(tmp_path_factory.mktemp("texts") / "corpus.txt", 30)
    return [block.strip() for block in path.read_text().split("\n\n")]


def build(place: Path, *more: str) -> int:
    vocab = write_vocab(place / "vocab.txt")
    return main(["shards", "--vocab", str(vocab), "--output", str(place / "shards"), *OPTIONS, *more])


# ------------------------------------------------------------------ TensorFlow Datasets


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A prepared dataset of two splits, the first in three files."""
    tfds = prepared.load_tfds()
    folder = tmp_path_factory.mktemp("tfds")
    features = {
        "title": tfds.features.Text(),
        "text": tfds.features.Text(),
        "number": tfds.features.Scalar(np.int64),
    }

    def records(some: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((i, {"title": f"w{i} .", "text": text, "number": i}) for i, text in enumerate(some))

    tfds.dataset_builders.store_as_tfds_dataset(
        name="my_text", config="en", version="1.2.0", data_dir=folder,
        features=tfds.features.FeaturesDict(features),
        split_datasets={"train": records(texts[:25]), "test": records(texts[25:])},
        download_config=tfds.download.DownloadConfig(num_shards=3), disable_shuffling=True,
    )  # fmt: skip
    return folder


def documents(split: str, data_dir: Path, field: str = "text") -> list[str]:
    sources = list_sources(["tfds:my_text/en"], split=split, tfds_data_dir=str(data_dir))
    return ["\n".join(d) for source in sources for d in read_documents(source, line="sentence", json_field=field)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "which"),
    [("train", slice(25)), ("test", slice(25, None)), ("train+test", slice(None)), ("train[5:20]", slice(5, 20))],
)
def test_documents_of_a_split(data_dir: Path, texts: list[str], split: str, which: slice) -> None:
    assert sorted(documents(split, data_dir)) == sorted(texts[which])


def test_another_field(data_dir: Path) -> None:
    assert documents("test", data_dir, "title") == [f"w{i} ." for i in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["processes", "beam"])
def test_shards_of_a_dataset(tmp_path: Path, data_dir: Path, texts: list[str], runner: str) -> None:
    if runner == "beam":
        pytest.importorskip("apache_beam", reason="needs the extra beam")
    options = ["--tfds", "my_text/en", "--tfds_data_dir", str(data_dir), "--runner", runner]
    assert build(tmp_path, *options) == 0
    manifest = read_manifest(tmp_path / "shards" / "train")
    assert manifest is not None
    named = dict(manifest["settings"]["data.corpus"])
    assert list(named) == [f"tfds:my_text/en/1.2.0/my_text-train.tfrecord-0000{i}-of-00003" for i in range(3)]
    assert all(size > 500 for size in named.values())
    # The same instances as from the same text in the same order.
    (tmp_path / "plain").mkdir()
    lines = [json.dumps({"text": text}) for text in documents("train", data_dir)]
    (tmp_path / "plain.jsonl").write_text("\n".join(lines))
    assert build(tmp_path / "plain", "--corpus", str(tmp_path / "plain.jsonl")) == 0
    both = [tree(folder / "shards" / "train") for folder in (tmp_path, tmp_path / "plain")]
    assert all(both[0][name] == both[1][name] for name in both[1] if name != "manifest.json")


def test_a_dataset_in_a_recipe(tmp_path: Path, data_dir: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'data:\n  corpus: ["tfds:my_text/en:1.2.0"]\n  tfds_data_dir: {data_dir}\n')
    assert build(tmp_path, "--config", str(recipe)) == 0
    # Other text than the shards were made of.
    assert build(tmp_path, "--config", str(recipe), "--dataset_split", "test") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--tfds", "my_text/en", "--dataset_split", "dev"],
            "'dev' is not a split of tfds:my_text/en; allowed: train, ",
        ),
        (
            ["--tfds", "my_text/en", "--json_field", "body"],
            "'body' is not a text field of tfds:my_text/en/1.2.0; allowed: te",
        ),
        (["--tfds", "my_text/en", "--json_field", "number"], "'number' is not a text"),
        (
            ["--tfds", "wikipedia/20230601.en"],
            "wikipedia/20230601.en/VERSION, or set data.tfds_data_dir to the folder",
        ),
        (["--tfds", "my_text/en:9.0.0"], "features.json and the data files"),
        (["--tfds", "no/such/thing/at_all"], "no/such/thing/at_all"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, data_dir: Path, options, message, monkeypatch, capfd) -> None:
    monkeypatch.setattr(prepared, "is_reachable", lambda host: False)
    capfd.readouterr()
    assert build(tmp_path, "--tfds_data_dir", str(data_dir), *options) == 2
    err = capfd.readouterr().err
    assert message in err and len(err.splitlines()) == 1, err


def test_the_network_is_asked_for_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(prepared, "_SECONDS_TO_ANSWER", 0.2)
    assert not prepared.is_reachable("localhost", 1)
    end = threading.Event()

    def hang(*_: object) -> None:
        end.wait()
        raise OSError

    monkeypatch.setattr(prepared.socket, "create_connection", hang)
    assert not prepared.is_reachable("a.host")
    end.set()


# ------------------------------------------------------------------ Hugging Face datasets


def test_hugging_face_datasets(tmp_path: Path, texts: list[str]) -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": texts})})
    saved.save_to_disk(tmp_path / "saved", num_shards={"train": 3})
    sources = list_sources([f"hf:{tmp_path / 'saved'}"])
    found = ["\n".join(d) for s in sources for d in read_documents(s, line="sentence", json_field="text")]
    assert len(sources) == 3 and found == texts


def test_hugging_face_datasets_is_not_installed(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert build(tmp_path, "--corpus", f"hf:{tmp_path}") == 2
    assert "pip install datasets" in capsys.readouterr().err
