"""Vectors of texts by the encoder in 8 bits: the same texts, options and formats as in float32, near values."""

import json
import sys

import numpy as np
import pytest
from inference_models import PIECES, make_model, random_texts, shared_model

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, SentenceConfig, SentenceModule, TokenizerConfig
from bert_jax.inference import onnx_network
from bert_jax.inference.loaded import load, prepare
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.interop.programs.onnx_graph import write_program
from bert_jax.interop.saved_model import write_saved

DENSE = SentenceModule(kind="dense", features=5, activation="tanh")
SENTENCE = SentenceConfig(pooling=("cls", "mean"), modules=(DENSE, SentenceModule(kind="normalize")))
TEXTS = random_texts(30, 90)  # some longer than the model's 70 positions
OPTIONS = (
    {"width": 3},
    *(
        pytest.param(options, marks=pytest.mark.slow)
        for options in ({}, {"pooling": "max"}, {"normalize": False}, {"prompt": "w1 ", "batch_tokens": 256})
    ),
)


@pytest.fixture(scope="module")
def float_program():
    """A model whose program for onnxruntime has float32 products."""
    loaded = make_model(sentence=SENTENCE, layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            onnx_network, "write_program", lambda folder, weights, _: write_program(folder, weights, "float32")
        )
        loaded.encoder_in_8_bits()
    return loaded


@pytest.mark.parametrize("options", OPTIONS)
def test_texts_pooling_and_order_are_those_of_float32(options, float_program):
    got, expected = (float_program.embed(TEXTS, dtype=dtype, **options) for dtype in ("int8", None))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


def test_a_prompt_is_left_out_of_the_pooling(float_program):
    loaded = make_model(sentence=SentenceConfig(include_prompt=False), layers=1)
    loaded._programs.update(float_program._programs)  # the encoder has the same parameters
    got, expected = (loaded.embed(TEXTS[:5], prompt="w1 ", dtype=dtype) for dtype in ("int8", None))
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


def test_vectors_are_near_and_do_not_depend_on_the_batch():
    loaded = shared_model(sentence=SENTENCE)
    got, expected = loaded.embed(TEXTS, dtype="int8"), loaded.embed(TEXTS)
    assert 1e-5 < np.abs(got - expected).max() < 0.1
    assert (got * expected).sum(axis=1).min() > 0.995
    alone = np.stack([loaded.embed(text, dtype="int8") for text in TEXTS[:4]])
    np.testing.assert_allclose(alone, got[:4], atol=1e-6, rtol=0)
    assert loaded.embed([], dtype="int8").shape == (0, 5)


def test_the_command_writes_the_same_vectors(tmp_path, capsys):
    write_saved(tmp_path / "model", shared_model(sentence=SENTENCE).bundle())
    words = ["embed", "--model", str(tmp_path / "model"), "--dtype", "int8", "w1 w2", "w3"]
    assert main(words) == 0
    rows = [json.loads(line)["embedding"] for line in capsys.readouterr().out.splitlines()]
    expected = shared_model(sentence=SENTENCE).embed(["w1 w2", "w3"], dtype="int8")
    np.testing.assert_allclose(rows, expected, atol=1e-6, rtol=0)
    assert main([*words, "--per_token"]) == 2
    assert "--dtype int8: not allowed with --per_token; use float32 or bfloat16" in capsys.readouterr().err


def test_what_is_refused(tmp_path, monkeypatch):
    loaded = make_model(layers=1)
    with pytest.raises(ValueError, match=r"^dtype: 'float16' is not allowed; use int8, or omit it "):
        loaded.embed("w1", dtype="float16")
    with pytest.raises(
        ValueError, match=r"^dtype: 'int8' is not allowed; use float32 or bfloat16; int8 is a dtype of "
    ):
        load(tmp_path, dtype="int8")
    spec = ModelSpec(
        model=ModelConfig.of(vocab_size=len(PIECES) + 3, encoder="none", num_layers=0, hidden_size=8),
        heads=HeadsConfig(), tokenizer=TokenizerConfig(),
    )  # fmt: skip
    params = {name: np.ones(shape, np.float32) for name, shape in parameter_shapes(spec).items()}
    content = loaded.tokenizer_content
    with pytest.raises(
        ValueError, match=r"^vectors: dtype int8: model.encoder: none is not supported by onnx .*; use "
    ):
        prepare(ModelBundle(spec=spec, params=params, tokenizer_content=content), name="vectors").embed(
            "w1", dtype="int8"
        )
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        ValueError, match=r"^dtype int8 needs onnx and onnxruntime: pip install 'bert_jax\[onnx\]'$"
    ):
        loaded.embed("w1", dtype="int8")
