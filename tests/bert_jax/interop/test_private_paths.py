"""Files that others get tell no folder of the machine that made them."""

import dataclasses
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from builders import content, drawn, tiny_model, words

import bert_jax
from bert_jax.config import (
    FinetuneConfig,
    HeadsConfig,
    ModelConfig,
    ModelSpec,
    PretrainConfig,
    SentenceConfig,
    TokenizerConfig,
    load_config,
    to_dict,
)
from bert_jax.contrib.ancestors.encoders.characters import CHARACTER_IDS, stored_ids
from bert_jax.interop.export import all_formats, export_model
from bert_jax.interop.import_model import import_model
from bert_jax.interop.model_bundle import ReadOptions, without_folders
from bert_jax.interop.saved_model import write_saved

MODEL = tiny_model(40)
SPEC = ModelSpec(model=MODEL, heads=HeadsConfig(pooler=True), tokenizer=TokenizerConfig())
VECTORS = {
    "encoder": "none", "num_layers": 0, "hidden_size": 4, "position_embeddings": "none", "type_vocab_size": 0,
    "embedding_norm": "no", "final_norm": "no", "pooling": "mean",
}  # fmt: skip
ELMO = {
    "encoder": "bidirectional_lstm", "num_layers": 1, "hidden_size": 8, "embedding_size": 4, "lstm_cells": 4,
    "character_filters": (1, 4), "character_size": 4, "max_characters": 8, "highway_layers": 1,
    "position_embeddings": "none", "type_vocab_size": 0, "embedding_norm": "no", "final_norm": "no",
    "mlm_layer": "none",
}  # fmt: skip
OF_FORMAT = {
    "word2vec": (ModelConfig.of(vocab_size=40, **VECTORS), None),
    "allennlp": (ModelConfig.of(vocab_size=40, **ELMO), None),
    "sentence-transformers": (MODEL, SentenceConfig()),
}


def pretraining(folder: Path) -> dict:
    given = f"--data.corpus {folder}/my_texts/diary.txt hf:{folder}/saved --data.shards {folder}/shards"
    given += f" --data.vocab {folder}/words/vocab.txt --training.compilation_cache {folder}/cache"
    return {"recipe": to_dict(load_config(PretrainConfig, given.split())), "step": 3, "metrics": {"loss/x": 1.0}}


def finetuning(folder: Path) -> dict:
    given = f"--task.kind classification --data.train {folder}/my_labels/train.tsv --data.dev {folder}/dev.tsv"
    recipe = to_dict(load_config(FinetuneConfig, given.split()))
    return {"recipe": recipe, "init_from": f"{folder}/runs/first/best", "step": 3}


def saved(folder: Path, format: str, origin: dict) -> Path:
    model, sentence = OF_FORMAT.get(format, (MODEL, None))
    spec = ModelSpec(
        model=model, heads=HeadsConfig(pooler=model is MODEL), sentence=sentence, tokenizer=TokenizerConfig()
    )
    weights = drawn(spec, 0.1, words(35))
    if model.spells_words:
        weights.params[CHARACTER_IDS] = stored_ids(words(35), 40, model.max_characters).astype(np.float32)
    origin = {"format": "run", "name": "run", **origin}
    weights = dataclasses.replace(weights, tokenizer_content=content(words(35)), origin=origin)
    # As earlier versions saved models.
    with mock.patch("bert_jax.interop.saved_model.without_folders", lambda origin: origin):
        write_saved(folder / "source", weights)
    return folder / "source"


def told(folder: Path, *paths: Path) -> list[str]:
    """The files of ``folder`` that contain one of ``paths``."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    return [file.name for file in files if any(str(path).encode() in file.read_bytes() for path in paths)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("format", all_formats())
def test_exports(format, tmp_path):
    for package in {"tf1": "tensorflow", "onnx": "onnx", "allennlp": "h5py"}.get(format, "json").split():
        pytest.importorskip(package)
    source = saved(tmp_path, format, pretraining(tmp_path))
    assert told(source, tmp_path)
    target = tmp_path / "target"
    export_model(source, target, format, verify=False, report=lambda line: None)
    assert told(target, tmp_path, Path(bert_jax.__file__).parents[1], Path.home()) == []
    card = (target / "README.md").read_text()
    assert "diary.txt" in card and "my_texts" not in card


def test_a_card_of_fine_tuning_and_an_imported_model(tmp_path):
    source = saved(tmp_path, "npz", finetuning(tmp_path))
    write_saved(tmp_path / "again", dataclasses.replace(drawn(SPEC, 0.1, words(35)), origin=finetuning(tmp_path)))
    assert told(tmp_path / "again", tmp_path) == []
    export_model(source, tmp_path / "target", "npz", verify=False, report=lambda line: None)
    card = (tmp_path / "target" / "README.md").read_text()
    assert "fine-tuned on train.tsv from best;" in card and "my_labels" not in card
    import_model(source, tmp_path / "imported", ReadOptions(), verify=False, report=lambda line: None)
    assert told(tmp_path / "imported", tmp_path) == []


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/me/My Texts/a b.txt", "a b.txt"),
        ("~/runs/x/", "x"),
        (r"C:\Users\me\x.txt", "x.txt"),
        ("gs://bucket/secret/x", "x"),
        ("texts/x.txt", "x.txt"),
        ("/home/me/f.json:train", "f.json:train"),
        ("hf:/home/me/saved", "hf:saved"),
        ("hf:owner/name/config", "hf:owner/name/config"),
        ("tfds:glue/sst2", "tfds:glue/sst2"),
        ("classes are a / b or c", "classes are a / b or c"),
        ("gelu", "gelu"),
        ("secret clinic/Mr Smith/train.tsv", "train.tsv"),
        ("tfds:/home/me/x y", "tfds:x y"),
    ],
)
def test_paths_are_shortened_to_their_last_part(value, shown):
    assert without_folders({"labels": [value, "N/A"]}) == {"labels": [value, "N/A"]}
    assert without_folders({"a": [value], "b/c": 1.5}) == {"a": [shown], "b/c": 1.5}
    assert json.dumps(without_folders({"a": (value, None, True)})) == json.dumps({"a": [shown, None, True]})
