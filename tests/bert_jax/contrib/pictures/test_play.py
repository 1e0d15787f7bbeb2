"""The game: sentences, masks, and a score that is counted again from the guesses of the model."""

import io
import json
import re

import pytest
from builders import drawn, tiny_model

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.contrib.pictures.play import _share, play
from bert_jax.contrib.pictures.sentences import CHINESE, ENGLISH
from bert_jax.inference.loaded import prepare
from bert_jax.interop.saved_model import write_saved
from bert_jax.tokenization import SPECIAL_PIECES


def weights_of(pieces, mlm=True):
    spec = ModelSpec(
        model=tiny_model(len(pieces) + 5, num_layers=1), heads=HeadsConfig(mlm=mlm, pooler=not mlm),
        tokenizer=TokenizerConfig(),
    )  # fmt: skip
    return drawn(spec, 0.2, [*SPECIAL_PIECES, *pieces])


def english_pieces():
    return sorted({word for sentence in ENGLISH for word in re.findall(r"[a-z]+|[.,]", sentence.lower())})


@pytest.fixture(scope="module")
def english():
    return prepare(weights_of(english_pieces()), name="small")


def game(loaded, place, answers, **options):
    """The score of a game with ``answers``, and its lines."""
    given, lines = iter(answers), []

    def ask(prompt):
        for answer in given:
            return answer
        raise EOFError

    return play(loaded, place, ask=ask, show=lines.append, **options), lines


def rounds_of(lines):
    """The shown sentences and the right words."""
    shown = [re.match(r"\n\d+/\d+  (.*)", line, re.DOTALL) for line in lines]
    right = [re.match(r"answer: (\S+) \(", line) for line in lines]
    return [found[1].replace("\n", " ") for found in shown if found], [found[1] for found in right if found]


def test_the_score_counts_both_players(english, tmp_path):
    score, lines = game(english, tmp_path, [""] * 10)
    shown, answers = rounds_of(lines)
    assert len(shown) == len(answers) == 10 and score.person == 0 and score.rounds == 10
    assert {one.replace("____", word) for one, word in zip(shown, answers, strict=True)} <= set(ENGLISH)
    assert all(len(word) >= 4 for word in answers)
    right = [
        english.fill_mask(one.replace("____", "[MASK]"), top=1).masks[0].predictions[0][0] == word.lower()
        for one, word in zip(shown, answers, strict=True)
    ]
    assert score.model == sum(right)
    # The same game again, with six right answers; then the input ends.
    score, lines = game(english, tmp_path, [word.upper() for word in answers[:6]])
    assert score == (6, sum(right[:6]), 6)
    assert sum(line.endswith("; you are right") for line in lines) == 6
    assert sum(line.endswith(": right") for line in lines if line.startswith('model: "')) == sum(right[:6])
    assert lines[-1] == f"\n6 sentences: you 6, model {sum(right[:6])}; you win"
    assert rounds_of(lines)[0] == shown[:7]


def test_long_sentences_are_wrapped_and_small_probabilities_are_not_zero(english, tmp_path):
    (tmp_path / "long.txt").write_text(" ".join(["the house is old and"] * 8) + "\n")
    _, lines = game(english, tmp_path, ["house", "x", ""], file=tmp_path / "long.txt")
    assert lines[1].count("\n") == 3 and max(map(len, lines[1].splitlines())) <= 80
    assert [line.rpartition("; ")[2] for line in lines if line.startswith("answer")][1:] == [
        "you are wrong",
        "you passed",
    ]
    assert [_share(p) for p in (0.0009, 0.001, 0.0994, 0.5)] == ["<0.1%", "0.1%", "9.9%", "50%"]


def test_a_seed_chooses_other_words(english, tmp_path):
    first, second, again = (rounds_of(game(english, tmp_path, [""] * 10, seed=n)[1])[0] for n in (1, 2, 1))
    assert first == again != second


def test_one_character_of_an_idiom_is_masked_for_a_chinese_vocabulary(tmp_path):
    characters = sorted({char for sentence in CHINESE for char in sentence} - {"{", "}"})
    _, lines = game(prepare(weights_of(characters), name="zh"), tmp_path, ["龙"] * 10)
    shown, answers = rounds_of(lines)
    whole = {sentence.replace("{", "").replace("}", ""): sentence for sentence in CHINESE}
    assert len(shown) == 10 and "Chinese idioms" in lines[0]
    for one, char in zip(shown, answers, strict=True):
        sentence = whole[one.replace("____", char)]
        assert sentence.index("{") <= one.index("____") < sentence.index("}") - 1
        assert re.search(r"\{\w{4}\}", sentence)


def test_held_out_text_of_a_run(english, tmp_path):
    masks = [{"predictions": [["the", 1.0]], "answer": word} for word in ("train", "city")]
    sample = {"text": "the [MASK] to the [MASK] leaves", "masks": masks}
    (tmp_path / "report_data.json").write_text(json.dumps({"filled_masks": [sample]}))
    _, lines = game(english, tmp_path, [""] * 10)
    shown, answers = rounds_of(lines)
    assert f"from the held-out text of {tmp_path}" in lines[0] and sorted(answers) == ["city", "leaves", "train"]
    assert {one.replace("____", word) for one, word in zip(shown, answers, strict=True)} == {
        "the train to the city leaves"
    }


def test_command_reads_piped_answers(tmp_path, capsys, monkeypatch):
    write_saved(tmp_path / "saved", weights_of(english_pieces()))
    (tmp_path / "text.txt").write_text("The {moon}\n\nhe was late\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("moon\n"))
    words = ["play", str(tmp_path / "saved"), "--seed", "1", "--text", str(tmp_path / "text.txt")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 sentences from ") and "\n1/2  " in out and "you: moon\n" in out
    assert re.search(r"\n1 sentences?: you [01], model [01]; ", out)


def test_what_is_refused(tmp_path, capsys):
    write_saved(tmp_path / "plain", weights_of(english_pieces(), mlm=False))
    assert main(["play", str(tmp_path / "plain")]) == 2
    assert "no masked-LM head, which guesses words" in capsys.readouterr().err
    write_saved(tmp_path / "saved", weights_of(english_pieces()))
    assert main(["play", str(tmp_path / "saved"), "--text", "missing.txt"]) == 2
    assert "--text: missing.txt: no such file" in capsys.readouterr().err
    (tmp_path / "text.txt").write_text("zzz 12\n")
    assert main(["play", str(tmp_path / "saved"), "--text", str(tmp_path / "text.txt")]) == 2
    assert "no sentence has a word that is one piece of the vocabulary" in capsys.readouterr().err
    (tmp_path / "text.txt").write_bytes(b"The sch\xf6n\n")
    assert main(["play", str(tmp_path / "saved"), "--text", str(tmp_path / "text.txt")]) == 2
    assert "text.txt:1: not valid UTF-8; convert the file to UTF-8" in capsys.readouterr().err


def test_a_damaged_report_gives_no_sentences(english, tmp_path):
    (tmp_path / "report_data.json").write_text('{"filled_masks": [')
    _, lines = game(english, tmp_path, [""] * 10)
    assert "from general English text" in lines[0]
