"""A game in the terminal: a person and a model guess the masked words of the same sentences."""

import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bert_jax.contrib.analysis.word_neighbors import vocabulary_words
from bert_jax.contrib.analysis.word_vectors import word_spans
from bert_jax.contrib.pictures.sentences import CHINESE, ENGLISH
from bert_jax.io.text_lines import numbered_lines, opened
from bert_jax.tokenization import Tokenizer
from bert_jax.tokenization.wordpiece import is_cjk
from bert_jax.training.logging.run_files import read_data

if TYPE_CHECKING:
    from bert_jax.inference.fill import FilledText
    from bert_jax.inference.loaded import LoadedModel

ROUNDS = 10
# Words that a person writes to skip a sentence and to end the game; they are never masked.
PASS, QUIT = "pass", "quit"
# Guesses of the model that count as near, and that are shown.
_NEAR, _SHOWN = 5, 3
# Median rank of the answers, as a share of all words, up to which the model knows what kind of word fits.
_NARROWED = 0.01
# Letters of the shortest masked word, where there are longer ones.
_SHORTEST = 4
# Words of the shortest held-out text from which the words before its first whole sentence are removed.
_SHORTEST_TEXT = 8
# Share of single characters in the pieces of a Chinese vocabulary.
_CHINESE_SHARE = 0.2
# Characters of a line.
_WIDTH = 80


class Round(NamedTuple):
    """A sentence with the mask of the model, the sentence that the person sees, the missing word and its piece."""

    masked: str
    shown: str
    answer: str
    piece: str


class Guesses(NamedTuple):
    """The best guesses of the model for a sentence as words with their probabilities, the rank, from 1, of the
    answer among the words of the vocabulary that can be an answer, and its probability. Probabilities are those
    among all pieces of the vocabulary."""

    words: list[tuple[str, float]]
    rank: int
    probability: float

    @property
    def are_right(self) -> bool:
        return self.rank == 1


class Score(NamedTuple):
    """Right answers of the person and of the model, and the number of sentences that both have answered."""

    person: int
    model: int
    rounds: int


def play(
    loaded: "LoadedModel", place: Path, *, file: Path | None = None, seed: int = 0,
    ask: Callable[[str], str] | None = None, show: Callable[[str], None] = print,
) -> Score:  # fmt: skip
    """Play a game and return its score. ``QUIT``, the end of the input (Ctrl-D) and Ctrl-C end the game.

    Args:
        place: path of the model; a pretraining run with held-out text gives the sentences if ``file`` is None.
        file: text file with a sentence per line.
        seed: seed of the choice of sentences and words.
        ask: function that shows a prompt and returns a line (None: of standard input). It raises ``EOFError`` at
            the end of the input.
        show: function that gets each line of the game.

    Raises ``ValueError`` for a model without a masked-LM head, and if no sentence has a word to mask.
    """
    if not loaded.spec.heads.mlm:
        raise ValueError(f"{loaded.name}: no masked-LM head, which guesses words; use a model that has one")
    tokenizer = loaded.need_tokenizer()
    tokenizer.require_mask(loaded.name)
    source, sentences = _sentences(tokenizer, place, file)
    rounds = _rounds(tokenizer, sentences, loaded.spec.max_length, np.random.default_rng(seed))
    if not rounds:
        raise ValueError(f"{source}: no sentence has a word that is one piece of the vocabulary; set --text FILE")
    noun = "character" if all(is_cjk(one.answer[0]) for one in rounds) else "word"
    words = _words(loaded, noun)
    # One sentence at a time, because all pieces of the vocabulary are ranked.
    filled = loaded.fill_mask([one.masked for one in rounds], top=tokenizer.vocab_size, batch_size=1)
    guesses = [_guesses(one, found, words) for one, found in zip(rounds, filled, strict=True)]
    for line in _opening(loaded, place, source, len(rounds), noun):
        show(_wrapped(line))
    person, played = 0, 0
    for number, (one, of_model) in enumerate(zip(rounds, guesses, strict=True), 1):
        show(f"\n{_wrapped(f'{number}/{len(rounds)}  {one.shown}')}")
        guess = _person_guess(tokenizer, noun, ask or _line, show)
        is_right = guess is not None and _same(guess, one.answer, tokenizer)
        outcomes = {None: "you ended the game", "": "you passed"}
        outcome = "you are right" if is_right else outcomes.get(guess, "you are wrong")
        for line in _answer_lines(one, of_model, outcome):
            show(_wrapped(line))
        if guess is None:
            break
        person, played = person + is_right, number
        right = sum(of.are_right for of in guesses[:played])
        if played < len(rounds):
            show(f"score after {played} of {len(rounds)}: you {person}, model {right}")
    score = Score(person, sum(of.are_right for of in guesses[:played]), played)
    for line in _result(score, rounds, guesses[:played], noun, len(words)):
        show(line if line.startswith("\n") else _wrapped(line))
    return score


# ------------------------------------------------------------------ the person


def _person_guess(
    tokenizer: Tokenizer, noun: str, ask: Callable[[str], str], show: Callable[[str], None]
) -> str | None:
    """Ask until the person writes a guess that can be right, and return it; "" if the person passes, None at the
    end of the game."""
    while True:
        try:
            given = ask("you: ").strip()
        except (EOFError, KeyboardInterrupt):
            show("")
            return None
        if given.lower() in (PASS, QUIT):
            return "" if given.lower() == PASS else None
        problem = _problem(given, tokenizer, noun)
        if problem is None:
            return given
        show(f"{problem}; write one {noun}, or {PASS}, or {QUIT}")


def _problem(given: str, tokenizer: Tokenizer, noun: str) -> str | None:
    """Return why ``given`` cannot be an answer; None if it can."""
    if not given:
        return "you wrote nothing"
    words, shown = given.split(), f'"{textwrap.shorten(given, 40, placeholder=" ...")}"'
    if len(words) > 1:
        return f"{shown} is {len(words)} words"
    if noun == "character" and len(given) > 1:
        return f"{shown} has {len(given)} characters"
    if not given.isalpha():
        return f"{shown} has a character that is not a letter"
    ids = tokenizer.encode((" " if tokenizer.space_before_word else "") + given)
    if len(ids) != 1 or ids[0] == tokenizer.unk_id:
        return f"{shown} is no {noun} of the model's vocabulary"
    return None


def _line(prompt: str) -> str:
    line = input(prompt)
    if not sys.stdin.isatty():  # a terminal shows what is typed
        print(line)
    return line


def _same(guess: str, answer: str, tokenizer: Tokenizer) -> bool:
    fold = str.casefold if tokenizer.lower_case else str
    return fold(guess) == fold(answer)


# ------------------------------------------------------------------ the model


def _words(loaded: "LoadedModel", noun: str) -> dict[str, str]:
    """Return the pieces of the vocabulary that can be an answer, with their words."""
    tokenizer = loaded.need_tokenizer()
    words, ids = vocabulary_words(loaded)
    return {
        piece: word
        for piece, word in zip(tokenizer.pieces(ids.tolist()), words, strict=True)
        if word.isalpha() and word.lower() not in (PASS, QUIT)
        and (noun == "word" or (len(word) == 1 and is_cjk(word)))
    }  # fmt: skip


def _guesses(one: Round, found: "FilledText", pieces: Mapping[str, str]) -> Guesses:
    best = [(piece, p) for piece, p in found.masks[0].predictions if piece in pieces]
    words = [(pieces[piece], p) for piece, p in best[:_SHOWN]]
    ranked = ((rank, p) for rank, (piece, p) in enumerate(best, 1) if piece == one.piece)
    rank, probability = next(ranked, (len(best) + 1, 0.0))  # a piece for which the network has no row
    return Guesses(words, rank, probability)


def _opening(loaded: "LoadedModel", place: Path, source: str, rounds: int, noun: str) -> Iterator[str]:
    """Yield the paragraphs before the first sentence: the model, the game, and what a person can write."""
    tokenizer = loaded.need_tokenizer()
    sizes = repr(loaded).partition("): ")[2].splitlines()[0]
    evaluation = read_data(place).get("evaluation") or {}
    if "mlm_accuracy" in evaluation and "targets" in evaluation:
        share, count = evaluation["mlm_accuracy"], evaluation["targets"]
        quality = (
            f"In the last evaluation of its run, it guessed {share:.1%} of {count:,} masked tokens of held-out "
            "text, short words and punctuation included."
        )
    else:
        quality = (
            "Its folder contains no evaluation of masked tokens; the end of the game shows how good it was here."
        )
    yield f"You play against {place.absolute().name} ({sizes}). {quality}"
    yield (
        f"The game has {_sentences_of(rounds)} from {source}. In each, ____ stands for one {noun}. Write this "
        f"{noun}; then the model's guesses are shown with their probabilities. You get a point if you are right, "
        f"and the model gets one if its first guess is right. Only a {noun} counts as a guess of the model; the "
        "probabilities are those among all tokens of its vocabulary, punctuation and word pieces included."
    )
    same = "are the same" if tokenizer.lower_case else "differ"
    case = "" if noun == "character" else f"; upper and lower case {same}"
    yield (
        f"A guess is one {noun} of the model's vocabulary{case}. Other input is refused and costs nothing. Write "
        f"{PASS} to skip a sentence. Write {QUIT}, or press Ctrl-D, to end the game."
    )


def _answer_lines(one: Round, guesses: Guesses, outcome: str) -> Iterator[str]:
    """Yield the lines that follow an answer."""
    named = [f'"{word}" {_share(p)}' for word, p in guesses.words[:_SHOWN]]
    yield f"model: {', '.join(named)}: {'right' if guesses.are_right else 'wrong'}"
    of_model = f"the model ranks it {_ordinal(guesses.rank)}, with {_share(guesses.probability)}"
    yield f"answer: {one.answer} ({of_model}); {outcome}"


def _result(
    score: Score, rounds: Sequence[Round], guesses: Sequence[Guesses], noun: str, words: int
) -> Iterator[str]:
    """Yield the lines at the end: the score, and what the sentences that were played show about the model, which
    has ``words`` words to guess from."""
    if not score.rounds:
        yield "\nThe game ended before the first answer, so there is no score."
        return
    ends = {0: "a draw", 1: "you win", -1: "the model wins"}
    ahead = (score.person > score.model) - (score.person < score.model)
    yield f"\nscore after {score.rounds} of {len(rounds)}: you {score.person}, model {score.model}; {ends[ahead]}"
    near, median = sum(of.rank <= _NEAR for of in guesses), statistics.median(of.rank for of in guesses)
    yield (
        f"The model's first guess was right in {score.model} of {score.rounds}, and the answer was among its first "
        f"{_NEAR} guesses in {near}. The median rank of the answers among its guesses is {median:,g}; in a random "
        f"order of the {words:,} {noun}s, it would be about {words // 2:,}."
    )
    expected = sum(of.words[0][1] for of in guesses)
    yield (
        f"By its own probabilities, the model expected {expected:.1f} right first guesses. "
        f"{_surest(rounds, guesses, is_right=False)} {_surest(rounds, guesses, is_right=True)}"
    )
    if median <= _NEAR:
        shows = "the model usually has the answer among its best guesses"
    elif median <= _NARROWED * words:
        shows = "the model knows what kind of word is missing, but usually not which one"
    else:
        shows = "the model guesses these words badly from their context"
    yield f"Here, {shows}. This is a test of only {_sentences_of(score.rounds)}; --seed N masks other {noun}s."


def _sentences_of(count: int) -> str:
    return f"{count} sentence{'s' * (count != 1)}"


def _surest(rounds: Sequence[Round], guesses: Sequence[Guesses], *, is_right: bool) -> str:
    """Return a sentence about the right or the wrong first guess with the highest probability."""
    own = [i for i, of in enumerate(guesses) if of.are_right == is_right]
    kind = "right" if is_right else "wrong"
    if not own:
        return f"No first guess was {kind}."
    place = max(own, key=lambda i: guesses[i].words[0][1])
    word, p = guesses[place].words[0]
    answer = "" if is_right else f', where the answer is "{rounds[place].answer}"'
    return f'Its surest {kind} guess was "{word}" with {_share(p)} in sentence {place + 1}{answer}.'


def _ordinal(rank: int) -> str:
    """Return a rank as 1st, 2nd, 3rd, 4th."""
    ending = "th" if rank % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(rank % 10, "th")
    return f"{rank:,}{ending}"


def _share(p: float) -> str:
    """Return a probability in percent."""
    return f"{p:.0%}" if p >= 0.0995 else f"{p:.1%}" if p >= 0.001 else "<0.1%"


def _wrapped(text: str) -> str:
    """Return ``text`` in lines that break at spaces."""
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


# ------------------------------------------------------------------ sentences


def _sentences(tokenizer: Tokenizer, place: Path, file: Path | None) -> tuple[str, list[str]]:
    """Return a description of the sentences, and the sentences; braces mark the words that may be masked."""
    if file is not None:
        if not file.is_file():
            raise ValueError(f"--text: {file}: no such file; name a text file with a sentence per line")
        with opened(file) as stream:
            lines = [line.strip() for _, line in numbered_lines(stream, file)]
        return str(file), [line.replace("{", "(").replace("}", ")") for line in lines if line]
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    if sum(len(piece) == 1 and is_cjk(piece) for piece in pieces) >= _CHINESE_SHARE * len(pieces):
        return "a built-in list, each with a Chinese idiom of four characters", list(CHINESE)
    held_out = list(_held_out(tokenizer, place))
    if not held_out:
        return "a built-in list of general English", list(ENGLISH)
    return f"the held-out text of {place}, on which the model was not trained", held_out


def _held_out(tokenizer: Tokenizer, place: Path) -> Iterator[str]:
    """Yield the held-out texts that the report of a pretraining run shows, with their answers in place of the
    masks, from their first whole sentence on."""
    for sample in read_data(place).get("filled_masks") or ():
        parts = tokenizer.mask_pattern.split(sample["text"])
        answers = [mask["answer"] for mask in sample["masks"]]
        if len(parts) == len(answers) + 1:
            whole = parts[0] + "".join(answer + part for answer, part in zip(answers, parts[1:], strict=True))
            yield _from_a_sentence(whole.replace(" ##", "").replace("{", "(").replace("}", ")"))


def _from_a_sentence(text: str) -> str:
    """Return ``text`` without the words before its first whole sentence, because held-out texts are cut from longer
    ones. A text with a capital at its start, without the end of a sentence, or with few words after it is returned
    whole. A word of one to three letters with a period can be an abbreviation and does not end a sentence."""
    end = re.search(r"\w{4}[.!?][\"')\u2019\u201d]*\s+", text)
    if end is None or text[0].isupper() or len(text[end.end() :].split()) < _SHORTEST_TEXT:
        return text
    return text[end.end() :]


def _rounds(
    tokenizer: Tokenizer, sentences: Sequence[str], longest: int, random: np.random.Generator
) -> list[Round]:
    """Return at most ten rounds in a random order. Each is from a different sentence, because a second round of a
    sentence would show the answer of the first one."""
    unique = list(dict.fromkeys(sentences))
    order = [unique[i] for i in random.permutation(len(unique)).tolist()]
    possible = [words for sentence in order if (words := _possible(tokenizer, sentence, longest))]
    return [words[random.permutation(len(words))[0]] for words in possible][:ROUNDS]


def _possible(tokenizer: Tokenizer, sentence: str, longest: int) -> list[Round]:
    """Return a round for each word of ``sentence`` that can be masked: within the braces, or else the words of four
    letters or more or, without such words, all words. A word must be a single known piece."""
    marked = re.search(r"\{(.*?)\}", sentence)
    text = sentence.replace("{", "").replace("}", "")
    inside = (0, len(text)) if marked is None else (marked.start(), marked.end() - 2)
    mask = tokenizer.pieces([tokenizer.mask_id])[0]
    before = " " if tokenizer.space_before_word else ""
    found = []
    for begin, end in word_spans(text):
        word = text[begin:end]
        ids = tokenizer.encode(before + word)
        if not (inside[0] <= begin and end <= inside[1] and word.isalpha() and len(ids) == 1):
            continue
        sides, (piece,) = (text[:begin], text[end:]), tokenizer.pieces(ids)
        one = Round(mask.join(sides), "____".join(sides), word, piece)
        masked = tokenizer.encode_with_masks(one.masked)
        is_known = ids[0] != tokenizer.unk_id and word.lower() not in (PASS, QUIT)
        if is_known and masked.count(tokenizer.mask_id) == 1 and len(masked) + 2 <= longest:
            found.append(one)
    long = [one for one in found if len(one.answer) >= _SHORTEST or is_cjk(one.answer[0])]
    return long or found
