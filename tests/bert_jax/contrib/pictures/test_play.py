"""The game: sentences, masks, and a score that is counted again from the guesses of the model."""

import io
import json
import re
import statistics

import pytest
from builders import drawn, tiny_model

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.contrib.pictures.play import Guesses, Round, Score, _from_a_sentence, _ordinal, _result, _share, play
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
        answer = next(given, EOFError)
        if isinstance(answer, str):
            return answer
        raise answer

    return play(loaded, place, ask=ask, show=lines.append, **options), lines


def rounds_of(lines):
    """The shown sentences and the right words."""
    shown = [re.match(r"\n\d+/\d+  (.*)", line, re.DOTALL) for line in lines]
    right = [re.match(r"answer: (\S+) \(", line) for line in lines]
    return [found[1].replace("\n", " ") for found in shown if found], [found[1] for found in right if found]


def words_among(filled):
    """The guesses that are words, with their probabilities among all pieces."""
    return [(piece, p) for piece, p in filled.masks[0].predictions if piece.isalpha()]


def test_the_score_counts_both_players(english, tmp_path):
    score, lines = game(english, tmp_path, ["pass"] * 10)
    shown, answers = rounds_of(lines)
    assert len(shown) == len(answers) == 10 and score.person == 0 and score.rounds == 10
    assert {one.replace("____", word) for one, word in zip(shown, answers, strict=True)} <= set(ENGLISH)
    assert all(len(word) >= 4 for word in answers)
    right = [
        words_among(english.fill_mask(one.replace("____", "[MASK]"), top=1000))[0][0] == word.lower()
        for one, word in zip(shown, answers, strict=True)
    ]
    assert score.model == sum(right)
    assert sum(line.endswith(": right") for line in lines if line.startswith('model: "')) == sum(right)
    # The same game again, with six right answers; then the input ends.
    score, lines = game(english, tmp_path, [word.upper() for word in answers[:6]])
    assert score == (6, sum(right[:6]), 6)
    assert sum(line.endswith("; you are right") for line in lines) == 6
    assert f"\nscore after 6 of 10: you 6, model {sum(right[:6])}; you win" in lines
    assert rounds_of(lines) == (shown[:7], answers[:7])


@pytest.mark.parametrize("end", [["quit"], [], [KeyboardInterrupt]])
def test_a_sentence_that_is_left_shows_its_answer_and_does_not_count(english, tmp_path, end):
    _, whole = game(english, tmp_path, ["pass"] * 10)
    score, lines = game(english, tmp_path, ["Pass", *end])
    assert score.rounds == 1 and rounds_of(lines) == tuple(of[:2] for of in rounds_of(whole))
    outcomes = [line.rpartition("; ")[2] for line in lines if line.startswith("answer: ")]
    assert outcomes == ["you passed", "you ended the game"]
    assert "\nscore after 1 of 10: you 0, model 0; a draw" in lines
    score, lines = game(english, tmp_path, end)
    assert score == (0, 0, 0) and len(rounds_of(lines)[1]) == 1
    assert lines[-1] == "\nThe game ended before the first answer, so there is no score."


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("", "you wrote nothing; write one word, or pass, or quit"),
        ("the house", '"the house" is 2 words; write one word, or pass, or quit'),
        ("zzzz", '"zzzz" is no word of the model\'s vocabulary; write one word, or pass, or quit'),
        ("h\udcffuse", "has a character that is not a letter; write one word, or pass, or quit"),
    ],
)
def test_input_that_cannot_be_right_costs_nothing(english, tmp_path, given, line):
    _, answers = rounds_of(game(english, tmp_path, ["pass"] * 10)[1])
    score, lines = game(english, tmp_path, [given, given, answers[0]])
    assert score.person == score.rounds == 1 and sum(line in one for one in lines) == 2
    assert "\n" not in line and rounds_of(lines)[1] == answers[:2]


def test_the_words_of_the_game_are_never_masked(tmp_path):
    loaded = prepare(weights_of(["pass", "quit", "late", "."]), name="small")
    (tmp_path / "text.txt").write_text("pass quit late.\n")
    _, lines = game(loaded, tmp_path, [], file=tmp_path / "text.txt")
    assert rounds_of(lines)[1] == ["late"] and lines[1].startswith("The game has 1 sentence from")


def test_the_end_states_what_the_guesses_show(english, tmp_path):
    """Ranks and probabilities are counted again from all guesses of the model."""
    _, lines = game(english, tmp_path, ["pass"] * 10)
    guesses = [
        (words_among(english.fill_mask(one.replace("____", "[MASK]"), top=1000)), word.lower())
        for one, word in zip(*rounds_of(lines), strict=True)
    ]
    ranks = [[piece for piece, _ in of].index(word) + 1 for of, word in guesses]
    end = " ".join(lines[-3:]).replace("\n", " ")
    near = sum(rank <= 5 for rank in ranks)
    assert (
        f"first guess was right in {ranks.count(1)} of 10, and the answer was among its first 5 guesses in {near}"
        in end
    )
    count = len(english_pieces()) - 2  # without "." and ","
    random = f"in a random order of the {count} words, it would be about {count // 2}."
    assert f"among its guesses is {statistics.median(ranks):,g}; {random}" in end
    ranked = [re.search(r"the model ranks it (\S+), with", line) for line in lines]
    assert [found[1] for found in ranked if found] == [_ordinal(rank) for rank in ranks]
    assert f"the model expected {sum(of[0][1] for of, _ in guesses):.1f} right first guesses" in end
    wrong = [(of[0][1], of[0][0], i) for i, (of, word) in enumerate(guesses) if of[0][0] != word]
    p, word, place = max(wrong)
    answer = guesses[place][1]
    assert f'surest wrong guess was "{word}" with {_share(p)} in sentence {place + 1}, where the answer is "' in end
    assert f'"{answer}"' in end.lower()


def test_verdicts_follow_the_median_rank():
    one = Round("a [MASK]", "a ____", "x", "x")
    for rank, shows in ((3, "usually has the answer"), (9, "knows what kind"), (11, "badly"), (1200, "badly")):
        wrong = Guesses([("y", 0.25), ("z", 0.125)], rank, 0.01)
        lines = [*_result(Score(0, 0, 2), [one] * 5, [wrong, wrong], "word", 1000)]
        assert shows in lines[-1] and "only 2 sentences;" in lines[-1], rank
        assert f"among its guesses is {rank:,};" in lines[1]
        assert "expected 0.5 right first guesses" in lines[2] and lines[2].endswith("No first guess was right.")
    right = Guesses([("x", 0.5)], 1, 0.5)
    lines = [*_result(Score(0, 1, 1), [one], [right], "word", 1000)]
    assert 'No first guess was wrong. Its surest right guess was "x" with 50% in sentence 1.' in lines[2]
    assert lines[0].endswith("you 0, model 1; the model wins") and "only 1 sentence;" in lines[-1]


def test_the_opening_names_the_model_and_how_good_it_is(english, tmp_path):
    _, lines = game(english, tmp_path, [])
    opening = lines[0].replace("\n", " ")
    assert opening.startswith(f"You play against {tmp_path.name} (bert, 1 layer of width 16, ")
    assert "no evaluation of masked tokens; the end of the game shows" in opening
    assert "upper and lower case are the same" in lines[2].replace("\n", " ")
    data = {"evaluation": {"mlm_accuracy": 0.2346, "targets": 19834}}
    (tmp_path / "report_data.json").write_text(json.dumps(data))
    _, lines = game(english, tmp_path, [])
    assert "it guessed 23.5% of 19,834 masked tokens of held-out text" in lines[0].replace("\n", " ")


def test_long_sentences_are_wrapped_and_small_probabilities_are_not_zero(english, tmp_path):
    (tmp_path / "long.txt").write_text("".join("the house is old and " * count + "\n" for count in (8, 9, 10)))
    _, lines = game(english, tmp_path, ["house", "old", "pass"], file=tmp_path / "long.txt")
    # A path is not broken.
    shown = [line for line in "\n".join(lines).splitlines() if str(tmp_path) not in line]
    assert lines[3].count("\n") == 3 and max(map(len, shown)) <= 80
    assert [line.rpartition("; ")[2] for line in lines if line.startswith("answer")][1:3] == [
        "you are wrong",
        "you passed",
    ]
    assert [_share(p) for p in (0.0009, 0.001, 0.0994, 0.5)] == ["<0.1%", "0.1%", "9.9%", "50%"]


def test_a_seed_chooses_other_words(english, tmp_path):
    first, second, again = (rounds_of(game(english, tmp_path, ["pass"] * 10, seed=n)[1])[0] for n in (1, 2, 1))
    assert first == again != second


def test_one_character_of_an_idiom_is_masked_for_a_chinese_vocabulary(tmp_path):
    characters = sorted({char for sentence in CHINESE for char in sentence} - {"{", "}"})
    _, lines = game(prepare(weights_of(characters), name="zh"), tmp_path, ["画蛇", "龙", *["pass"] * 10])
    shown, answers = rounds_of(lines)
    whole = {sentence.replace("{", "").replace("}", ""): sentence for sentence in CHINESE}
    assert len(shown) == 10 and "each with a Chinese idiom of four characters" in lines[1].replace("\n", " ")
    assert "画蛇" in lines[4] and "has 2 characters; write one character, or pass, or quit" in lines[4]
    assert lines[5] == '"龙" is no character of the model\'s vocabulary; write one character, or pass, or quit'
    for one, char in zip(shown, answers, strict=True):
        sentence = whole[one.replace("____", char)]
        assert sentence.index("{") <= one.index("____") < sentence.index("}") - 1
        assert re.search(r"\{\w{4}\}", sentence)


def test_held_out_text_of_a_run(english, tmp_path):
    masks = [{"predictions": [["the", 1.0]], "answer": word} for word in ("train", "city")]
    sample = {"text": "the [MASK] to the [MASK] leaves", "masks": masks}
    (tmp_path / "report_data.json").write_text(json.dumps({"filled_masks": [sample]}))
    _, lines = game(english, tmp_path, ["pass"] * 10)
    shown, answers = rounds_of(lines)
    source = f"from the held-out text of {tmp_path}, on which the model was not trained."
    assert source.split() == lines[1].split()[5 : 5 + len(source.split())] and len(answers) == 1
    assert shown[0].replace("____", answers[0]) == "the train to the city leaves"


def test_a_sentence_occurs_once_per_game(english, tmp_path):
    """A second round of a sentence would show the answer of the first one."""
    once = ["the train to the city leaves", "the house is old", "the king had three sons"]
    (tmp_path / "text.txt").write_text("\n".join([*once, once[0], once[2]]) + "\n")
    for seed in range(4):
        score, lines = game(english, tmp_path, ["pass"] * 10, file=tmp_path / "text.txt", seed=seed)
        shown, answers = rounds_of(lines)
        whole = sorted(one.replace("____", word) for one, word in zip(shown, answers, strict=True))
        assert score.rounds == 3 and whole == sorted(once)


def test_only_words_are_guesses_of_the_model(tmp_path):
    """Of equally good guesses, those with the lowest ids come first: here pieces that are no words."""
    loaded = prepare(weights_of([".", ",", "##s", "12", "quit", "late", "moon"]), name="small")
    (tmp_path / "text.txt").write_text("late moon.\n")
    _, lines = game(loaded, tmp_path, ["pass"], file=tmp_path / "text.txt")
    line = next(line for line in lines if line.startswith("model: "))
    assert sorted(re.findall(r'"(.*?)"', line)) == ["late", "moon"]
    assert "a random order of the 2 words, it would be about 1." in lines[-3].replace("\n", " ")
    opening = lines[1].replace("\n", " ")
    assert "Only a word counts as a guess of the model; the probabilities are those among all tokens" in opening
    shown, answers = rounds_of(lines)
    filled = loaded.fill_mask(shown[0].replace("____", "[MASK]"), top=1000)
    own = dict(words_among(filled))
    assert f'"{answers[0]}" {_share(own[answers[0]])}' in line  # not renormalized


def test_ranks_are_ordinal_numbers():
    ranks = {
        1: "1st",
        2: "2nd",
        3: "3rd",
        4: "4th",
        11: "11th",
        12: "12th",
        113: "113th",
        202: "202nd",
        5121: "5,121st",
    }
    assert {rank: _ordinal(rank) for rank in ranks} == ranks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "of the old house. the train to the city leaves in the evening",
            "the train to the city leaves in the evening",
        ),
        ('he said "of course." the train to the city leaves in the evening', None),
        ("of the old house. the train leaves", "of the old house. the train leaves"),
        ("by mr. smith of the city of new york and others", "by mr. smith of the city of new york and others"),
        (
            "for $3.25 of the old house to the city of new york",
            "for $3.25 of the old house to the city of new york",
        ),
        ("The old house. The train to the city leaves in the evening", None),
        ("", ""),
    ],
)
def test_held_out_texts_begin_at_a_sentence(text, expected):
    if expected is None:
        expected = text if text[0].isupper() else "the train to the city leaves in the evening"
    assert _from_a_sentence(text) == expected


def test_command_reads_piped_answers(tmp_path, capsys, monkeypatch):
    write_saved(tmp_path / "saved", weights_of(english_pieces()))
    (tmp_path / "text.txt").write_text("The {moon}\n\nhe was late\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("moon\n"))
    words = ["play", str(tmp_path / "saved"), "--seed", "1", "--text", str(tmp_path / "text.txt")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "The game has 2 sentences from" in out and "\n1/2  " in out and "you: moon\n" in out
    assert re.search(r"\nscore after 1 of 2: you [01], model [01]; ", out)


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
    _, lines = game(english, tmp_path, ["pass"] * 10)
    assert "from a built-in list of general English." in lines[1].replace("\n", " ")
