"""Classes of labeled documents: from JSON lines through the token store and the shards into batches."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_corpora import write_corpus, write_vocab

from bert_jax.commands.data import main
from bert_jax.config.pretrain import DataConfig
from bert_jax.tokenization import load_tokenizer
from data_pipeline.build.ensure import ensure_data
from data_pipeline.build.token_store import TokenStore
from data_pipeline.read.pretrain_input import eval_batches
from data_pipeline.shards import shard_files as shards

CLASSES = ("law", "medicine", "7")
CHANGES: dict[str, Any] = {
    "seq_length": 32, "max_predictions": 5, "dupe_factor": 2, "num_shards": 2, "eval_fraction": 0.3, "workers": 1,
    "short_sequence_fraction": 0.5, "label_field": "topic", "classes": CLASSES,
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text without classes, and labeled documents whose first half is words of their class alone: document i
    has class i % 4 (0: none), and the words w100 to w109 for class 0, w110 to w119 for class 1, and so on."""
    folder = tmp_path_factory.mktemp("classes")
    write_vocab(folder / "vocab.txt")
    write_corpus(folder / "corpus.txt", documents=5, sentences=4)
    rng = np.random.default_rng(3)
    lines = []
    for i in range(60):
        label = i % 4
        words = [f"w{100 + 10 * label + n}" for n in rng.integers(0, 10, 60)]
        text = "\n".join(" ".join(words[k : k + 6]) for k in range(0, 60, 6))
        topic = {
            1: {"topic": "law"},
            2: {"topic": "medicine"},
            3: {"topic": 7},
            0: {} if i % 8 else {"topic": None},
        }
        lines.append(json.dumps({"text": text, **topic[label]}))
    (folder / "labeled.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def build(place: Path, name: str, **changes: Any) -> DataConfig:
    corpus = (str(place / "corpus.txt"), str(place / "labeled.jsonl"))
    given = CHANGES | {"corpus": corpus, "vocab": str(place / "vocab.txt"), "shards": str(place / name)} | changes
    data = DataConfig(**given)
    ensure_data(data, vocab_size=1000, report=lambda _: None)
    return data


def all_rows(data: DataConfig, split: str) -> dict[str, np.ndarray]:
    folder = Path(data.shards) / split
    tokenizer = load_tokenizer(Path(data.vocab))
    size = shards.read_index(folder).records
    (batch,) = eval_batches(data, folder=folder, batch_size=size, tokenizer=tokenizer)
    return batch


def class_of_segment_a(batch: dict[str, np.ndarray], row: int, slot: int, first: int) -> int:
    """The class that the words of segment A tell, -1 for a document of the text without classes."""
    own = (batch["sequence_ids"][row] == slot + 1) & (batch["token_type_ids"][row] == 0)
    ids = batch["input_ids"][row].copy()
    masked = batch["mlm_weights"][row] > 0
    ids[batch["mlm_positions"][row][masked]] = batch["mlm_labels"][row][masked]
    words = ids[own] - first
    found = set(((words[words >= 100]) // 10 - 10).tolist())
    return found.pop() if len(found) == 1 else -1


@pytest.mark.parametrize(
    "changes",
    [{}, {"packing": "best_fit"}, {"packing": "best_fit", "masking": "dynamic"}, {"next_sentence": "none"}],
    ids=["single", "packed", "dynamic", "no pairs"],
)
@pytest.mark.parametrize("reader", ["numpy", "tensorflow"])
def test_each_sequence_has_the_class_of_its_document(place: Path, changes: dict[str, Any], reader: str) -> None:
    data = build(place, f"shards-{'-'.join(map(str, changes.values()))}", **changes)
    batch = all_rows(dataclasses.replace(data, reader=reader), "train")
    tokenizer = load_tokenizer(Path(data.vocab))
    first = tokenizer.encode("w0")[0]
    seen = np.zeros(4, int)
    for row, slot in np.argwhere(
        batch["sequence_ids"].max(1)[:, None] > np.arange(batch["cls_positions"].shape[1])
    ):
        told, stored = class_of_segment_a(batch, row, slot, first), int(batch["document_classes"][row, slot])
        if told in range(4):
            assert stored == told
            seen[told] += 1
        else:
            assert stored == 0
    assert (seen > 10).all()
    if changes.get("packing"):
        assert batch["document_classes"].shape[1] > 1 and batch["nsp_labels"].max() == 1
        assert (batch["document_classes"][batch["sequence_keys"] == 0] == 0).all()


def test_the_store_and_the_report_hold_the_classes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = build(place, "reported")
    store = TokenStore(Path(data.shards) / "store")
    assert store.classes.tolist() == [0] * 5 + [i % 4 for i in range(60)]
    assert main(["inspect", data.shards, "--examples", "2"]) == 0
    output = capsys.readouterr().out
    assert "classes: law, medicine, 7" in output and ", class " in output


def test_unlabeled_settings_read_the_same_shards(place: Path) -> None:
    """Other objectives train on shards with classes."""
    labeled = build(place, "both")
    plain = dataclasses.replace(labeled, label_field="", classes=())
    ensure_data(plain, vocab_size=1000, report=lambda _: None)
    with_classes, without = all_rows(labeled, "eval"), all_rows(plain, "eval")
    assert with_classes["document_classes"].any() and not without["document_classes"].any()
    for name in set(without) - {"document_classes"}:
        assert np.array_equal(with_classes[name], without[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": ("law", "medicine")}, r"labeled.jsonl:4: 7 in field 'topic' is not one of the classes law, m"),
        ({"label_field": "subject"}, r"data.label_field: no JSON line of the corpus has the field 'subject'"),
    ],
)
def test_wrong_labels_are_refused(place: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(place, f"refused-{next(iter(changes))}", **changes)


def test_shards_without_classes_are_refused(place: Path) -> None:
    data = build(place, "without", label_field="", classes=())
    with pytest.raises(ValueError, match=r"data.label_field: .* none, config topic"):
        ensure_data(
            dataclasses.replace(data, label_field="topic", classes=CLASSES), vocab_size=1000, report=lambda _: None
        )
