"""``bert-jax augment``: words replaced by those that a masked language model expects in their place."""

import json
from collections import Counter

import pytest
from builders import drawn, tiny_model

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.contrib.compression.augment import Replacement, augment
from bert_jax.inference.loaded import prepare
from bert_jax.interop.saved_model import write_saved
from bert_jax.tokenization.wordpiece import SPECIAL_PIECES

WORDS = ["apple", "pear", "plum", "fig", "eats", "sees", "likes", "the", "a", "red", "हिन्दी"]
PIECES = [*SPECIAL_PIECES, *WORDS, "un", "##known", "##s", "7", ",", "."]
TEXT = "the red Apple, unknown 7 plums."


def weights(heads):
    model = tiny_model(len(PIECES), num_layers=2, num_attention_heads=4, max_position_embeddings=40)
    spec = ModelSpec(model=model, heads=heads, tokenizer=TokenizerConfig())
    return drawn(spec, 0.4, PIECES, seed=3)


@pytest.fixture(scope="module")
def model():
    return prepare(weights(HeadsConfig(mlm=True)), name="small")


def expected(model, masked, word, count):
    """The ``count`` best whole words for the mask, in order, without the word itself."""
    best = model.fill_mask(masked, top=2 * count).masks[0].predictions
    return [piece for piece, _ in best if piece in {*WORDS, "un"} and piece != word][:count]


@pytest.mark.slow
def test_words_are_those_that_the_model_expects_and_nothing_else_changes(model):
    options = Replacement(copies=200, share=0.5, candidates=4)
    found = [one["text"] for one in augment(model, [(TEXT,)], options)]
    assert len(found) == len(set(found)) > 50 and TEXT not in found
    seen = [Counter(one.split()[place].strip(",") for one in found) for place in range(3)]
    masked = ("[MASK] red Apple, unknown 7 plums.", "the [MASK] Apple, unknown 7 plums.",
              "the red [MASK], unknown 7 plums.")  # fmt: skip
    for place, (word, text) in enumerate(zip(("the", "red", "apple"), masked, strict=True)):
        allowed = expected(model, text, word, 4)
        allowed = [other.capitalize() for other in allowed] if place == 2 else allowed
        assert set(seen[place]) - {word, word.capitalize()} == set(allowed)
    few = [one["text"].split()[0] for one in augment(model, [(TEXT,)], Replacement(copies=100, candidates=1))]
    assert set(few) == {"the", *expected(model, masked[0], "the", 1)} or not expected(model, masked[0], "the", 1)
    # "unknown" and "plums" have two pieces, "7" and the signs are no words.
    assert all(one.endswith(", unknown 7 plums.") for one in found)


@pytest.mark.slow
def test_the_share_of_the_words_is_replaced_and_draws_depend_on_the_seed_alone(model):
    texts = [("the apple eats a red fig",)] * 40
    found = [one["text"].split() for one in augment(model, texts, Replacement(copies=10, share=0.3))]
    words = texts[0][0].split()
    replaced = [sum(a != b for a, b in zip(one, words, strict=True)) for one in found]
    unchanged = 0.7**6  # such texts are left out
    assert sum(replaced) / len(replaced) == pytest.approx(6 * 0.3 / (1 - unchanged), abs=0.15)
    again = [one["text"].split() for one in augment(model, texts, Replacement(copies=10, share=0.3))]
    other = [one["text"].split() for one in augment(model, texts, Replacement(copies=10, share=0.3, seed=1))]
    assert found == again != other
    few = [one["text"].split() for one in augment(model, texts, Replacement(copies=2, share=0.3))]
    assert all(one in found for one in few)


@pytest.mark.slow
def test_pairs_other_scripts_and_texts_without_words(model):
    (pair, *_) = augment(model, [("the apple", "a हिन्दी")], Replacement(copies=3, share=1.0))
    first, second = pair["text"], pair["text_pair"]
    assert not {"the", "apple"} & set(first.split()) and not {"a", "हिन्दी"} & set(second.split())
    assert list(augment(model, [("7 , 7",), ("",)], Replacement())) == []
    long = ("apple " * 60 + "fig",)
    assert all(len(one["text"].split()) == 61 for one in augment(model, [long], Replacement(copies=2)))


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    write_saved(tmp_path / "m", weights(HeadsConfig(mlm=True)))
    write_saved(tmp_path / "plain", weights(HeadsConfig(pooler=True)))
    (tmp_path / "in.txt").write_text("the apple\na red fig\n")
    (tmp_path / "pairs.jsonl").write_text('{"text": "the fig", "text_pair": "a pear", "label": "x"}\n')
    (tmp_path / "bad.jsonl").write_text('{"words": ["a"]}\n')
    words = ["augment", "--model", str(tmp_path / "m"), "--output", str(tmp_path / "out.jsonl")]
    assert main([*words, "--input", str(tmp_path / "in.txt"), "--copies", "3", "--share", "1"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert 2 <= len(lines) <= 6 and all(set(line) == {"text"} for line in lines)
    assert main([*words, "--input", str(tmp_path / "pairs.jsonl")]) == 0
    assert set(json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])) == {"text", "text_pair"}
    capsys.readouterr()
    for change, message in (
        (["--share", "0"], "--share: 0.0 is not allowed; allowed: above 0, at most 1"),
        (["--copies", "0"], "--copies: 0 is not allowed; allowed: 1 or more"),
        (["--model", str(tmp_path / "plain")], "no masked-LM head; use a model that has one"),
        (["--seed", "-1"], "--seed: -1 is not allowed; allowed: 0 or more"),
        (["--input", str(tmp_path / "bad.jsonl")], "bad.jsonl: entry 1: no text; write"),
    ):
        assert main([*words, "--input", str(tmp_path / "in.txt"), *change]) == 2
        assert message in capsys.readouterr().err
