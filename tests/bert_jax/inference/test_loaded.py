"""The methods of a loaded model: results of one text and of several, refused calls, files, its repr."""

import inspect

import numpy as np
import pytest
from inference_models import make_weights, plain, shared_model

import bert_jax
from bert_jax.config import HeadsConfig, SentenceConfig
from bert_jax.inference.loaded import LoadedModel, load, prepare
from bert_jax.interop.readers import read_weights

TEXTS = ["w1 w2 w3", "w4", ("w5", "w6 w7")]
BAR = 1e-5


def test_encode_returns_the_vectors_of_embed():
    loaded = shared_model()
    one, two = loaded.encode("w1 w2"), loaded.encode(["w1 w2", "w3"], batch_size=1)
    assert one.dtype == two.dtype == np.float32 and one.shape == (16,) and two.shape == (2, 16)
    np.testing.assert_allclose(two, loaded.embed(["w1 w2", "w3"]), atol=1e-6)


def test_layers_of_texts_are_without_padding():
    loaded = shared_model()
    states, attentions = loaded.hidden_states(TEXTS, batch_size=2), loaded.attentions(TEXTS)
    last, pooled = loaded.sequence_output(TEXTS), loaded.pooled_output(TEXTS)
    lengths = [5, 3, 6]
    assert [one.shape for one in states] == [(2, n, 16) for n in lengths]
    assert [one.shape for one in attentions] == [(1, 4, n, n) for n in lengths]
    for i, (a, b) in enumerate((("w1 w2 w3", None), ("w4", None), ("w5", "w6 w7"))):
        expected = plain(loaded, a, b)
        np.testing.assert_allclose(last[i], expected.sequence_output[0], atol=BAR)
        np.testing.assert_allclose(states[i][-1], last[i], atol=BAR)
        np.testing.assert_allclose(attentions[i].sum(-1), 1, atol=BAR)
        np.testing.assert_allclose(pooled[i], expected.pooled_output[0, 0], atol=BAR)
    assert loaded.hidden_states("w4").shape == (2, 3, 16) and loaded.pooled_output([]).shape == (0, 16)
    with pytest.raises(ValueError, match="no pooler"):
        shared_model(HeadsConfig(mlm=True)).pooled_output("w1")


def test_tokenize_returns_the_arrays_of_forward():
    loaded = shared_model()
    arrays = loaded.tokenize(TEXTS)
    assert {values.shape for values in arrays.values()} == {(3, 6)}
    assert arrays["attention_mask"].sum(1).tolist() == [5, 3, 6] and arrays["token_type_ids"][2].sum() == 3
    assert loaded.tokenizer.pieces(arrays["input_ids"][1]) == ["[CLS]", "w4", "[SEP]", "[PAD]", "[PAD]", "[PAD]"]
    output = loaded.forward(arrays)["last_hidden_state"]
    np.testing.assert_allclose(output[1, :3], plain(loaded, "w4").sequence_output[0], atol=BAR)


def test_probabilities_in_the_order_of_the_classes():
    loaded = shared_model(HeadsConfig(pooler=True, sequence_labels=("no", "maybe", "yes")))
    table = loaded.predict_proba(["w1 w2", "w3"])
    assert loaded.classes == ("no", "maybe", "yes")
    np.testing.assert_allclose(table.sum(axis=1), 1, atol=1e-6)
    assert [list(one["probabilities"].values()) for one in loaded.predict(["w1 w2", "w3"])] == table.tolist()
    assert loaded.predict_proba("w3").shape == (3,) and loaded.predict_proba([]).shape == (0, 3)
    assert shared_model().classes == ()
    for heads in (
        HeadsConfig(token_labels=("O", "B")),
        HeadsConfig(pooler=True, sequence_labels=("x",), problem="regression"),
    ):
        with pytest.raises(ValueError, match="no head with classes of texts; use predict"):
            shared_model(heads).predict_proba("w1")


@pytest.mark.parametrize("name", ["encode", "tokenize", "predict", "fill_mask", "score", "hidden_states"])
@pytest.mark.parametrize("value", [5, None, b"w1"])
def test_other_inputs_are_refused_in_one_line(name, value):
    method = getattr(shared_model(HeadsConfig(pooler=True, mlm=True, sequence_labels=("a", "b"))), name)
    with pytest.raises(ValueError, match=f"texts: {type(value).__name__} is not allowed; give a string or a list"):
        method(value)


def test_a_data_frame_is_not_taken_for_the_names_of_its_columns():
    class Frame(list):
        columns = ("text", "label")

    with pytest.raises(ValueError, match="Frame is not allowed; give one column, of text, label"):
        shared_model().encode(Frame(["text", "label"]))


def test_one_object_is_one_input():
    loaded = shared_model(HeadsConfig(pooler=True, sequence_labels=("no", "maybe", "yes")))
    pair = {"text": "w1", "text_pair": "w2"}
    assert loaded.predict(pair) == loaded.predict([pair])[0]


@pytest.mark.parametrize("sentence", [None, SentenceConfig()])
def test_a_saved_model_is_the_same(tmp_path, sentence):
    weights = make_weights(sentence=sentence, layers=1, max_length=70)
    loaded = prepare(weights)
    loaded.save(tmp_path / "saved")
    loaded.save_pretrained(tmp_path / "hf")
    for name in ("saved", "hf"):
        found = read_weights(tmp_path / name)
        assert found.spec == weights.spec and found.tokenizer_content is not None
        assert all(np.array_equal(found.params[one], weights.params[one]) for one in weights.params)
    assert (tmp_path / "hf" / "modules.json").exists() == (sentence is not None)
    with pytest.raises(ValueError, match=r"not empty; .* \(force=True\)"):
        loaded.save(tmp_path / "saved")
    for format in (None, "npz"):
        with pytest.raises(ValueError, match="force would delete the source"):
            load(tmp_path / "saved").save(tmp_path / "saved", format, force=True)
    loaded.save(tmp_path / "saved", "npz", force=True, report=lambda line: None)
    assert (tmp_path / "saved" / "weights.npz").exists()


def test_the_repr_of_a_model_is_a_few_lines():
    labels = tuple(f"a class with a long name {i}" for i in range(150))
    loaded = shared_model(HeadsConfig(pooler=True, sequence_labels=labels), sentence=SentenceConfig())
    text = repr(loaded)
    assert len(text) < 500 and text.count("\n") == 2
    for part in ("small", "bert, 1 layer of width 16", "49 pieces (wordpiece)", "at most 70", "... (150)", "mean"):
        assert part in text, text
    assert len(repr(make_weights())) < 3000  # no arrays, no vocabulary


def test_methods_have_no_open_keywords():
    methods = inspect.getmembers(LoadedModel, inspect.isfunction)
    for name, method in methods:
        kinds = {one.kind for one in inspect.signature(method).parameters.values()}
        assert name.startswith("_") or inspect.Parameter.VAR_KEYWORD not in kinds, name


def test_a_missing_name_of_the_package_lists_the_others():
    with pytest.raises(AttributeError, match=r"has no attribute 'train'; it has: .*load"):
        bert_jax.train  # noqa: B018
