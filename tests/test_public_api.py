"""The public API: its names, its signatures and the examples of docs/api.md."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from inference_models import make_weights

import bert_jax
from bert_jax.config import FinetuneConfig, HeadsConfig, PretrainConfig
from bert_jax.config.options import all_options
from bert_jax.inference.loaded import LoadedModel, prepare
from bert_jax.io import elsewhere
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"


def signature(function):
    """The parameters with their defaults, without types."""
    found = inspect.signature(function)
    names = [one.replace(annotation=one.empty) for one in found.parameters.values() if one.name != "self"]
    return str(inspect.Signature(names)).replace("<built-in function print>", "print")


def expected_headings():
    for name in bert_jax.__all__:
        one = getattr(bert_jax, name)
        takes = signature(one) if inspect.isfunction(one) or name.startswith("Text") else ""
        yield f"bert_jax.{name}{takes}"
        if one is LoadedModel:
            yield from (
                f"{method}{signature(value)}" for method, value in vars(one).items()
                if inspect.isfunction(value) and not method.startswith("_")
            )  # fmt: skip


def test_the_page_lists_every_name_with_its_signature():
    headings = re.findall(r"^### `(.*)`$", PAGE.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(expected_headings())


@pytest.mark.slow  # a program for each method
def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    labels = ("contradiction", "neutral", "entailment")
    weights = make_weights(HeadsConfig(pooler=True, mlm=True, sequence_labels=labels), layers=1)
    monkeypatch.chdir(tmp_path)
    prepare(weights).save("runs/mine")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    trained = [block for block in blocks if "bert_jax.pretrain" in block or "bert_jax.finetune" in block]
    assert len(trained) < len(blocks) - 8
    names = {"bert_jax": bert_jax}
    for block in blocks:
        if block not in trained:
            exec(block, names)
    assert names["cosines"].shape == (2, 2) and (tmp_path / "arrays" / "weights.npz").is_file()


def test_the_version_is_that_of_the_command():
    command = [sys.executable, "-m", "bert_jax.commands.main", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"bert-jax {bert_jax.__version__}\n"


def test_a_wrong_call_names_the_parameters():
    model = LoadedModel.__new__(LoadedModel)
    with pytest.raises(TypeError, match=r"encode: got .*; instead of normalize_embeddings, use normalize; its par"):
        model.encode(["w1"], normalize_embeddings=True)
    with pytest.raises(TypeError, match=r"encode: got .* 'poolin'; did you mean 'pooling'\?; its parameters: text"):
        model.encode(["w1"], poolin="mean")
    with pytest.raises(TypeError, match="finetune: too many positional arguments; its parameters: model, task, tr"):
        bert_jax.finetune("model", ["w1"], ["a"])
    with pytest.raises(TypeError, match="load: missing a required argument: 'path'; its parameters: path, dtype"):
        bert_jax.load()
    with pytest.raises(TypeError, match=r"TextClassifier: got .*; instead of epochs, use num_epochs; its paramete"):
        bert_jax.TextClassifier("model", epochs=3)


def test_every_parameter_of_another_library_has_a_remedy():
    functions = [bert_jax.pretrain, bert_jax.finetune, bert_jax.load, bert_jax.TextClassifier, LoadedModel.encode]
    functions += [LoadedModel.fill_mask, LoadedModel.save]
    known = {name for one in functions for name in inspect.signature(one).parameters}
    for name in elsewhere.OF_FUNCTIONS:
        assert "; instead of" in elsewhere.parameter_hint(name, known), name
    options = {*all_options(PretrainConfig), *all_options(FinetuneConfig)}
    remedies = repr([*elsewhere.OF_FUNCTIONS.values(), *elsewhere.OF_PACKAGE.values()])
    used = re.findall(r'options={"([a-z_.]+)"', remedies)
    assert len(used) > 5 and {*used} <= options


def test_a_name_of_another_library_says_what_to_use():
    with pytest.raises(ImportError, match=r"bert_jax has no SentenceTransformer; use bert_jax\.load\(path\)\.en"):
        from bert_jax import SentenceTransformer  # noqa: F401
    with pytest.raises(ImportError, match=r"use bert_jax\.load\(path\) and its methods"):
        _ = bert_jax.AutoModelForMaskedLM
    with pytest.raises(AttributeError, match="it has: FinetuneRun, LoadedModel"):
        _ = bert_jax.something


def test_a_missing_attribute_names_what_to_use():
    model = LoadedModel.__new__(LoadedModel)
    for name, what in {"fit": r"use bert_jax\.finetune", "max_seq_length": "use spec", "embd": "'embed'"}.items():
        with pytest.raises(AttributeError, match=what):
            getattr(model, name)
    with pytest.raises(TypeError, match="a LoadedModel is not a function; use embed, predict"):
        model("w1")
    with pytest.raises(TypeError, match=r"is not a function; use encode\(text\)"):
        WordPieceTokenizer.__new__(WordPieceTokenizer)(["w1"], padding=True)
    assert not hasattr(model, "_repr_png_")
