"""Texts to vectors: as one text alone gives them, with every pooling, prompt and layer."""

import itertools

import numpy as np
import pytest
from inference_models import plain, random_texts, shared_model

from bert_jax.config import HeadsConfig, SentenceConfig, SentenceModule
from bert_jax.inference.embed import embed, embed_tokens, extract_features

NORMALIZE = SentenceModule(kind="normalize")
# Of packed rows from a text alone, as of any two programs.
BAR = 1e-5
DENSE = SentenceModule(kind="dense", features=5, activation="tanh")


def sequence_output(loaded, text):
    return np.asarray(plain(loaded, text).sequence_output[0])


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
@pytest.mark.parametrize("normalize", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_packed_vectors_are_those_of_each_text_alone(pooling, normalize):
    loaded = shared_model()
    texts = random_texts(30, 90)  # some longer than the model's 70 positions
    got = loaded.embed(texts, pooling=pooling, normalize=normalize, batch_tokens=256)
    for text, vector in zip(texts, got, strict=True):
        x = sequence_output(loaded, text)
        expected = {"cls": x[0], "mean": x.mean(0), "max": x.max(0)}[pooling]
        if normalize:
            expected = expected / np.linalg.norm(expected)
        np.testing.assert_allclose(vector, expected, atol=BAR, rtol=0)


def test_the_models_own_modules_come_by_themselves():
    sentence = SentenceConfig(pooling=("cls", "max"), modules=(DENSE, NORMALIZE))
    loaded = shared_model(sentence=sentence)
    texts = random_texts(12, 60)
    expected = np.stack([np.asarray(plain(loaded, text).sentence_embedding[0]) for text in texts])
    np.testing.assert_allclose(loaded.embed(texts), expected, atol=BAR, rtol=0)
    raw = loaded.embed(texts, normalize=False)
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), expected, atol=BAR, rtol=0)
    assert np.abs(np.linalg.norm(raw, axis=1) - 1).min() > 1e-3
    mean = loaded.embed(texts, pooling="mean")
    assert mean.shape == (12, 16) and np.allclose(np.linalg.norm(mean, axis=1), 1, atol=1e-6)


@pytest.mark.slow
def test_the_first_values_of_vectors():
    texts = random_texts(5, 20)
    for sentence in (None, SentenceConfig(pooling=("cls", "max"), modules=(DENSE, NORMALIZE))):
        loaded = shared_model(sentence=sentence)
        whole, first = loaded.embed(texts), loaded.embed(texts, width=3)
        expected = whole[:, :3]
        if sentence is not None:
            expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(first, expected, atol=BAR, rtol=0)
        assert np.array_equal(loaded.embed(texts, width=whole.shape[1]), whole)
        assert loaded.embed([], width=3).shape == (0, 3)
        raw = loaded.embed(texts, normalize=False)
        np.testing.assert_allclose(loaded.embed(texts, width=3, normalize=False), raw[:, :3], atol=BAR, rtol=0)
    with pytest.raises(ValueError, match=r"^width: 0 is not allowed; use 1 to 5, the width of whole vectors$"):
        loaded.embed(texts, width=0)


@pytest.mark.slow
def test_shapes_of_one_text_none_and_many():
    loaded = shared_model()
    assert loaded.embed("w1").shape == (16,)
    assert loaded.embed([]).shape == (0, 16)
    assert loaded.embed(iter(["w1", ""])).shape == (2, 16)
    dense = shared_model(sentence=SentenceConfig(pooling=("cls", "max"), modules=(DENSE, NORMALIZE)))
    for options in ({}, {"pooling": "mean"}):
        assert dense.embed([], **options).shape == (0, dense.embed("w1", **options).size)


def test_what_is_no_text_is_refused_in_one_line():
    loaded = shared_model(HeadsConfig(mlm=True))
    refused = pytest.raises(ValueError, match=r"^input 1: \w+ .*; use texts[^\n]*$")
    for value in (None, 3, b"w1", ("w1", "w2")):
        with refused:
            loaded.embed(["w1", value])
        with refused:
            loaded.fill_mask(["[MASK]", value])
    with refused:
        list(embed_tokens(loaded, ["w1", ("w1", 2)], layers=[-1]))
    assert len(list(embed_tokens(loaded, ["w1", ("w1", "w2")], layers=[-1]))) == 2


@pytest.mark.slow
def test_prompts():
    prompts = (("query", "w1 w2 "), ("passage", ""))
    loaded = shared_model(sentence=SentenceConfig(prompts=prompts, default_prompt="query"))
    asked = loaded.embed("w1 w2 w7")
    bare = shared_model(sentence=SentenceConfig()).embed("w1 w2 w7")
    np.testing.assert_array_equal(loaded.embed("w7"), bare)
    np.testing.assert_array_equal(loaded.embed("w1 w2 w7", prompt_name="passage"), bare)
    np.testing.assert_array_equal(loaded.embed("w2 w7", prompt="w1 "), bare)
    np.testing.assert_array_equal(loaded.embed("w1 w2 w7", prompt=""), bare)
    assert not np.array_equal(asked, bare)


def test_a_prompt_that_is_not_pooled():
    sentence = SentenceConfig(pooling=("cls", "mean"), include_prompt=False)
    loaded = shared_model(sentence=sentence)
    x = sequence_output(loaded, "w1 w2 w7 w8")
    # [CLS] w1 w2 are left out, as sentence-transformers does.
    expected = np.concatenate([x[3], x[3:].mean(0)])
    texts = ["w7 w8", "w5", "w9 w9 w9"]
    np.testing.assert_allclose(loaded.embed(texts, prompt="w1 w2 ")[0], expected, atol=BAR, rtol=0)
    np.testing.assert_allclose(loaded.embed("w1 w2 w7 w8"), np.concatenate([x[0], x.mean(0)]), atol=BAR, rtol=0)


def test_a_prompt_that_leaves_no_room():
    loaded = shared_model(sentence=SentenceConfig(include_prompt=False), max_length=8)
    with pytest.raises(ValueError, match=r"the prompt has 8 tokens, .* at most 8; shorten the prompt$"):
        loaded.embed(["w1"], prompt="w1 " * 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "lasttoken"}, "lasttoken"),
        ({"prompt_name": "query"}, "no prompt 'query'; it has: none"),
        ({"prompt": "a", "prompt_name": "b"}, "give only one of them"),
    ],
)
def test_what_embed_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        shared_model().embed(["w1"], **options)


@pytest.mark.slow
def test_endless_texts():
    texts = (f"w{n % 40}" for n in itertools.count())
    loaded = shared_model()
    first = list(itertools.islice(embed(loaded, texts), 3))
    np.testing.assert_allclose(np.stack(first), loaded.embed(["w0", "w1", "w2"]), atol=BAR)


@pytest.mark.slow
def test_every_token_of_chosen_layers():
    loaded = shared_model(layers=3)
    texts = ["w1 w2x , w3", "", ("w4 w5", "w6"), "w9 " * 90]
    for text, (pieces, hidden) in zip(texts, embed_tokens(loaded, texts, layers=(-1, 0)), strict=True):
        a, b = text if isinstance(text, tuple) else (text, None)
        last = np.asarray(plain(loaded, a, b).sequence_output[0])
        assert hidden.shape == (2, len(last), 16) and len(pieces) == len(last) <= 70
        np.testing.assert_allclose(hidden[0], last, atol=BAR, rtol=0)
        if b is not None:
            states = loaded.forward(ids_of(loaded, a, b), hidden_states=True)["hidden_states"]
            np.testing.assert_allclose(hidden[1], states[1, 0], atol=BAR, rtol=0)
    assert pieces == ["[CLS]", *["w9"] * 68, "[SEP]"]


def ids_of(loaded, a, b):
    tokenizer = loaded.tokenizer
    second = None if b is None else tokenizer.encode(b)
    ids, types = tokenizer.build_inputs(tokenizer.encode(a), second, loaded.spec.max_length)
    return {"input_ids": np.array([ids]), "token_type_ids": np.array([types])}


def test_extract_features_has_the_fields_of_the_reference():
    loaded = shared_model(layers=2)
    rows = list(extract_features(loaded, ["w1 ||| w2", "w3"], layers=(-1, -2)))
    assert [row["linex_index"] for row in rows] == [0, 1]
    assert [token["token"] for token in rows[0]["features"]] == ["[CLS]", "w1", "[SEP]", "w2", "[SEP]"]
    layers = rows[0]["features"][3]["layers"]
    assert [layer["index"] for layer in layers] == [-1, -2]
    expected = np.asarray(plain(loaded, "w1", "w2").sequence_output[0, 3], np.float64)
    np.testing.assert_allclose(layers[0]["values"], expected, atol=BAR)
    assert all(round(value, 6) == value for value in layers[0]["values"])


@pytest.mark.parametrize("layers", [(2,), (-3,), ()])
def test_layers_that_there_are_not(layers):
    with pytest.raises(ValueError, match="use -2 to 1"):
        next(embed_tokens(shared_model(layers=2), ["w1"], layers=layers))
