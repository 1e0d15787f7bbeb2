"""A game in the terminal: a person and a model guess the masked words of the same sentences."""

import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

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
# Guesses of the model that are compared with the answer, and that are shown.
_COMPARED, _SHOWN = 1000, 3
# Letters of the shortest masked word, where there are longer ones.
_SHORTEST = 4
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


class Score(NamedTuple):
    """Right answers of the person and of the model, and the number of sentences that both have answered."""

    person: int
    model: int
    rounds: int


def play(
    loaded: "LoadedModel", place: Path, *, file: Path | None = None, seed: int = 0,
    ask: Callable[[str], str] | None = None, show: Callable[[str], None] = print,
) -> Score:  # fmt: skip
    """Play a game and return its score. An end of the input (Ctrl-D) ends the game.

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
    filled = loaded.fill_mask([one.masked for one in rounds], top=_COMPARED)
    show(f"{len(rounds)} sentences from {source}. Write the missing word; Enter passes, Ctrl-D ends the game.")
    score = Score(0, 0, 0)
    for number, (one, found) in enumerate(zip(rounds, filled, strict=True), 1):
        show(f"\n{_wrapped(f'{number}/{len(rounds)}  {one.shown}')}")
        try:
            guess = (ask or _line)("you: ").strip()
        except EOFError:
            show("")
            break
        is_right = _same(guess, one.answer, tokenizer)
        model_is_right = found.masks[0].predictions[0][0] == one.piece
        outcome = "you are right" if is_right else "you are wrong" if guess else "you passed"
        for line in _answer_lines(one, found, tokenizer, outcome):
            show(line)
        score = Score(score.person + is_right, score.model + model_is_right, score.rounds + 1)
        show(f"score: you {score.person}, model {score.model}")
    ends = {0: "a draw", 1: "you win", -1: "the model wins"}
    ahead = (score.person > score.model) - (score.person < score.model)
    show(f"\n{score.rounds} sentences: you {score.person}, model {score.model}; {ends[ahead]}")
    return score


def _line(prompt: str) -> str:
    line = input(prompt)
    if not sys.stdin.isatty():  # a terminal shows what is typed
        print(line)
    return line


def _same(guess: str, answer: str, tokenizer: Tokenizer) -> bool:
    fold = str.casefold if tokenizer.lower_case else str
    return fold(guess) == fold(answer)


def _answer_lines(one: Round, found: "FilledText", tokenizer: Tokenizer, outcome: str) -> Iterator[str]:
    """Yield the lines that follow an answer."""
    best = found.masks[0].predictions
    named = [f'"{tokenizer.decode([tokenizer.piece_id(piece)]).strip()}" {_share(p)}' for piece, p in best[:_SHOWN]]
    yield f"model: {', '.join(named)}: {'right' if best[0][0] == one.piece else 'wrong'}"
    ranks = {piece: (rank, p) for rank, (piece, p) in enumerate(best, 1)}
    if one.piece in ranks:
        rank, p = ranks[one.piece]
        of_model = f"guess {rank} of the model, {_share(p)}"
    else:
        of_model = f"not among the first {len(best):,} guesses of the model"
    yield f"answer: {one.answer} ({of_model}); {outcome}"


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
        return "sentences with Chinese idioms", list(CHINESE)
    held_out = list(_held_out(tokenizer, place))
    return (f"the held-out text of {place}", held_out) if held_out else ("general English text", list(ENGLISH))


def _held_out(tokenizer: Tokenizer, place: Path) -> Iterator[str]:
    """Yield the held-out texts that the report of a pretraining run shows, with their answers in place of the
    masks."""
    for sample in read_data(place).get("filled_masks") or ():
        parts = tokenizer.mask_pattern.split(sample["text"])
        answers = [mask["answer"] for mask in sample["masks"]]
        if len(parts) == len(answers) + 1:
            whole = parts[0] + "".join(answer + part for answer, part in zip(answers, parts[1:], strict=True))
            yield whole.replace(" ##", "").replace("{", "(").replace("}", ")")


def _rounds(
    tokenizer: Tokenizer, sentences: Sequence[str], longest: int, random: np.random.Generator
) -> list[Round]:
    """Return at most ten rounds in a random order, of different sentences if there are enough of them."""
    order = [sentences[i] for i in random.permutation(len(sentences)).tolist()]
    own = [[*_possible(tokenizer, sentence, longest)] for sentence in order]
    own = [[words[i] for i in random.permutation(len(words)).tolist()] for words in own if words]
    depth = max(map(len, own), default=0)
    return [words[i] for i in range(depth) for words in own if i < len(words)][:ROUNDS]


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
        if ids[0] != tokenizer.unk_id and masked.count(tokenizer.mask_id) == 1 and len(masked) + 2 <= longest:
            found.append(one)
    long = [one for one in found if len(one.answer) >= _SHORTEST or is_cjk(one.answer[0])]
    return long or found
