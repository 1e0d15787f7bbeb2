"""What task heads and the masked-LM head say of texts, against each text alone."""

import itertools
import pickle

import jax
import numpy as np
import pytest
from inference_models import make_model, plain, random_texts, shared_model

from bert_jax.config import HeadsConfig

BAR = 1e-5


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def close(given, expected):
    np.testing.assert_allclose(list(given.values()), expected, atol=BAR)


@pytest.mark.slow
def test_classes():
    loaded = shared_model(HeadsConfig(pooler=True, sequence_labels=("no", "maybe", "yes")))
    texts = [*random_texts(10, 60), ("w1 w2", "w3"), {"text": "w4"}, {"text": "w1 w2", "text_pair": "w3"}]
    results = loaded.predict(iter(texts))
    for text, result in zip(texts[:11], results, strict=False):
        a, b = (text, None) if isinstance(text, str) else text
        chances = softmax(plain(loaded, a, b).sequence_logits[0, 0])
        close(result["probabilities"], chances)
        assert list(result["probabilities"]) == ["no", "maybe", "yes"]
        assert result["label"] == ["no", "maybe", "yes"][int(chances.argmax())]
        assert result["score"] == max(result["probabilities"].values()) and "truncated" not in result
    assert results[12] == results[10] != results[11]
    (long,) = loaded.predict(["w1 " * 100])
    assert long["truncated"] is True


def test_a_used_model_is_pickled_without_its_programs():
    loaded = shared_model(HeadsConfig(pooler=True, sequence_labels=("no", "maybe", "yes")))
    loaded.predict(["w1"])
    copy = pickle.loads(pickle.dumps(loaded))
    assert loaded._programs and not copy._programs and copy.spec == loaded.spec
    jax.tree.map(np.testing.assert_array_equal, copy.params, loaded.params)
    assert copy.tokenizer.encode("w1xy, w2") == loaded.tokenizer.encode("w1xy, w2")


@pytest.mark.slow
def test_several_labels_of_one_text():
    heads = HeadsConfig(pooler=True, sequence_labels=("a", "b", "c", "d"), problem="multi_label")
    loaded = shared_model(heads)
    (result,) = loaded.predict(["w1 w2 w3"])
    chances = 1 / (1 + np.exp(-plain(loaded, "w1 w2 w3").sequence_logits[0, 0]))
    close(result["probabilities"], chances)
    assert result["labels"] == [label for label, p in zip("abcd", chances, strict=True) if p >= 0.5]
    assert 0 < len(result["labels"]) < 4  # both kinds are seen


@pytest.mark.slow
def test_regression_gives_the_value():
    loaded = shared_model(HeadsConfig(pooler=True, sequence_labels=("score",), problem="regression"))
    (result,) = loaded.predict(["w1 w2 w3"])
    assert list(result) == ["value"]
    assert abs(result["value"] - plain(loaded, "w1 w2 w3").sequence_logits[0, 0, 0]) <= BAR


@pytest.mark.slow
def test_tags_of_words():
    loaded = shared_model(HeadsConfig(token_labels=("O", "B", "I")))
    text = "w1xy, W2  w99? w3"
    (result, other) = loaded.predict([text, ""])
    assert other == {"tokens": []}
    words = ["w1xy", ",", "W2", "w99", "?", "w3"]
    assert [token["text"] for token in result["tokens"]] == words
    for token in result["tokens"]:
        assert text[token["start"] : token["end"]] == token["text"]
    chances = softmax(plain(loaded, text).token_logits[0])
    first_pieces = [1, 4, 5, 6, 7, 8]  # w1 ##x ##y , w2 [UNK] ? w3
    for position, token in zip(first_pieces, result["tokens"], strict=True):
        assert token["label"] == ("O", "B", "I")[int(chances[position].argmax())]
        assert abs(token["score"] - chances[position].max()) <= BAR
    (long,) = loaded.predict(["w1 " * 100])
    assert long["truncated"] and len(long["tokens"]) == 68


def test_tags_of_given_words():
    loaded = shared_model(HeadsConfig(token_labels=("O", "B", "I")))
    words = ["w1xy,", "", "W2", "w3"]  # one word of four pieces, and one without any
    (result,) = loaded.predict([{"words": words}])
    assert [token["text"] for token in result["tokens"]] == words
    chances = softmax(plain(loaded, "w1xy, w99 W2 w3").token_logits[0])
    for position, token in zip([1, 5, 6, 7], result["tokens"], strict=True):
        assert token["label"] == ("O", "B", "I")[int(chances[position].argmax())]
        assert abs(token["score"] - chances[position].max()) <= BAR
    # Longer than the model: in windows, as fine-tuning predicts.
    many = [f"w{i % 9}" for i in range(200)]
    (long, empty) = loaded.predict([{"words": many}, {"words": []}])
    assert [token["text"] for token in long["tokens"]] == many and "truncated" not in long
    assert empty == {"tokens": []}
    with pytest.raises(ValueError, match="words require a tagging model"):
        shared_model(HeadsConfig(pooler=True, sequence_labels=("a", "b"))).predict([{"words": words}])


@pytest.mark.parametrize("given", ["w1 w2 w3 w4", {"words": ["w1", "w2", "w3", "w4"]}])
def test_tags_by_a_crf_are_those_of_the_best_path(given):
    labels = ("O", "B", "I")
    loaded = shared_model(HeadsConfig(token_labels=labels, crf=True))
    rng = np.random.default_rng(0)
    crf = {
        name: rng.normal(size=(3, 3) if name == "transitions" else 3) for name in ("transitions", "start", "end")
    }
    loaded.params["crf"] = {name: values.astype(np.float32) for name, values in crf.items()}
    (result,) = loaded.predict([given])
    emissions = plain(loaded, "w1 w2 w3 w4").token_logits[0][1:5]

    def score(path):
        moves = sum(crf["transitions"][a, b] for a, b in itertools.pairwise(path))
        return crf["start"][path[0]] + moves + crf["end"][path[-1]] + emissions[range(4), path].sum()

    best = max(itertools.product(range(3), repeat=4), key=lambda path: score(list(path)))
    assert [token["label"] for token in result["tokens"]] == [labels[i] for i in best]
    assert best != tuple(emissions.argmax(-1)) and "score" not in result["tokens"][0]


@pytest.mark.slow
def test_answers():
    loaded = shared_model(HeadsConfig(span=True))
    question, passage = "w1 w2?", "w5 w6x, w7 w8"
    (result,) = loaded.predict([{"text": question, "text_pair": passage}])
    output = plain(loaded, question, passage)
    starts, ends = output.start_logits[0], output.end_logits[0]
    spans = [(0, 2), (3, 5), (5, 6), (6, 7), (8, 10), (11, 13)]  # of w5 w6 ##x , w7 w8
    best = max(
        ((starts[5 + i] + ends[5 + j], i, j) for i in range(6) for j in range(i, 6)), key=lambda option: option[0]
    )
    assert abs(result["score"] - best[0]) <= BAR
    assert (result["start"], result["end"]) == (spans[best[1]][0], spans[best[2]][1])
    assert result["answer"] == passage[result["start"] : result["end"]]
    assert abs(result["no_answer_score"] - (starts[0] + ends[0])) <= BAR


def test_an_answer_beyond_the_first_window():
    loaded = shared_model(HeadsConfig(span=True))
    rng = np.random.default_rng(3)
    passage = " ".join(f"w{i}" for i in rng.integers(0, 40, 200))
    (result,) = loaded.predict([("w1 w2", passage)])
    # Whatever the best window says is at least what each of them says alone.
    room, words = 70 - 5, passage.split()
    scores = []
    for start in range(0, 200, room):
        output = plain(loaded, "w1 w2", " ".join(words[start : start + room]))
        count = min(room, 200 - start)
        sums = output.start_logits[0, 4 : 4 + count, None] + output.end_logits[0, None, 4 : 4 + count]
        sums[np.tril_indices(count, -1)] = -np.inf
        sums[np.triu_indices(count, 30)] = -np.inf
        scores.append(sums.max())
    assert abs(result["score"] - max(scores)) <= BAR
    assert passage[result["start"] : result["end"]] == result["answer"] != ""


def test_choices():
    loaded = shared_model(HeadsConfig(pooler=True, choice=True))
    examples = [{"text": "w1 w2", "choices": ["w3", "w4 w5", "w6"]}, {"text": "w7", "choices": ["w8", "w9"]}]
    for example, result in zip(examples, loaded.predict(examples), strict=True):
        logits = [plain(loaded, example["text"], choice).choice_logits[0, 0] for choice in example["choices"]]
        np.testing.assert_allclose(result["probabilities"], softmax(np.array(logits)), atol=BAR)
        assert result["choice"] == int(np.argmax(logits))


@pytest.mark.parametrize(
    ("heads", "text", "message"),
    [
        (HeadsConfig(pooler=True, mlm=True), "w1", "no task head"),
        (HeadsConfig(pooler=True, sequence_labels=("a", "b"), span=True), "w1", "task .* sequence, span"),
        (HeadsConfig(pooler=True, sequence_labels=("a", "b")), 3, "'3' is not a valid input"),
        (HeadsConfig(pooler=True, sequence_labels=("a", "b")), {"text": None}, "is not a valid input"),
        (
            HeadsConfig(pooler=True, sequence_labels=("a", "b")),
            {"text": "w1", "text_pair": 2},
            "is not a valid input",
        ),
        (
            HeadsConfig(pooler=True, sequence_labels=("a", "b")),
            {"text": "w1", "choices": ["w2"]},
            "multiple-choice",
        ),
        (HeadsConfig(token_labels=("a", "b")), ("w1", "w2"), "accepts one text"),
        (HeadsConfig(span=True), "w1", "the passage as text_pair"),
        (HeadsConfig(span=True), ("w1 " * 64, "w2"), None),
        (HeadsConfig(pooler=True, choice=True), "w1", "text and choices"),
    ],
)
def test_what_predict_refuses(heads, text, message):
    loaded = shared_model(heads)
    if message is None:  # a long question is cut and leaves room
        assert loaded.predict([text])
        return
    with pytest.raises(ValueError, match=message) as caught:
        loaded.predict([text])
    assert "\n" not in str(caught.value)


def test_one_of_several_heads_by_name():
    loaded = shared_model(HeadsConfig(pooler=True, sequence_labels=("a", "b"), token_labels=("x", "y")))
    assert "label" in loaded.predict(["w1"], task="sequence")[0]
    assert "tokens" in loaded.predict(["w1"], task="token")[0]
    with pytest.raises(ValueError, match=r"no span head; .* sequence, token"):
        loaded.predict(["w1"], task="span")


def test_fill_mask():
    loaded = shared_model(HeadsConfig(mlm=True))
    texts = ["w1 [MASK] w3", "[MASK][MASK] w2 [MASK]", *[f"{text} [MASK]" for text in random_texts(20, 50)]]
    tokenizer = loaded.tokenizer
    for text, filled in zip(texts, loaded.fill_mask(texts, top=3), strict=True):
        ids = tokenizer.build_inputs(tokenizer.encode_with_masks(text))[0]
        logits = loaded.forward({"input_ids": padded(ids), "attention_mask": padded([1] * len(ids))})["mlm_logits"]
        at = [i for i, token in enumerate(ids) if token == tokenizer.mask_id]
        assert filled.text == text and len(filled.masks) == len(at) == text.count("[MASK]")
        for position, mask in zip(at, filled.masks, strict=True):
            chances = softmax(logits[0, position, : tokenizer.vocab_size])
            order = np.argsort(-chances)[:3]
            assert [piece for piece, _ in mask.predictions] == tokenizer.pieces(order)
            np.testing.assert_allclose([p for _, p in mask.predictions], chances[order], atol=BAR)


def padded(ids):
    return np.array([[*ids, *[0] * (70 - len(ids))]])


@pytest.mark.slow
def test_a_row_of_many_masks():
    loaded = shared_model(HeadsConfig(mlm=True))
    (filled,) = loaded.fill_mask(["[MASK] " * 30], top=1)
    again = loaded.fill_mask(["w1 [MASK]", "[MASK] " * 30], top=1)
    assert len(filled.masks) == len(again[1].masks) == 30 and len(again[0].masks) == 1
    assert [mask.predictions[0][0] for mask in again[1].masks] == [mask.predictions[0][0] for mask in filled.masks]


@pytest.mark.parametrize(
    ("heads", "text", "top", "message"),
    [
        (HeadsConfig(pooler=True), "[MASK]", 5, "no masked-LM head"),
        (HeadsConfig(mlm=True), "w1", 5, "does not contain .MASK."),
        (HeadsConfig(mlm=True), "w1 " * 80 + "[MASK]", 5, "83 tokens"),
        (HeadsConfig(mlm=True), "[MASK]", 0, "top: 0"),
    ],
)
def test_what_fill_mask_refuses(heads, text, top, message):
    with pytest.raises(ValueError, match=message):
        shared_model(heads).fill_mask([text], top=top)


def test_no_vocabulary_no_texts():
    loaded = make_model(HeadsConfig(pooler=True, mlm=True, sequence_labels=("a", "b")))
    loaded.tokenizer = None
    for method in (loaded.embed, loaded.predict, loaded.fill_mask):
        with pytest.raises(ValueError, match="no vocabulary"):
            method(["w1 [MASK]"])
