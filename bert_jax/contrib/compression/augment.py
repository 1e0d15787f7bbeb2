"""Data augmentation for distillation: copies of texts in which a masked language model has replaced words.

A teacher labels the copies (TinyBERT, Jiao et al. 2020, appendix A, algorithm 1).
"""

import itertools
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.inference.batching import BatchOptions
from bert_jax.inference.engine import Engine
from bert_jax.inference.fill import FilledText, fill_mask

FIELDS = ("text", "text_pair")
# Inputs whose words are predicted together, and tokens of a text that its own special tokens may need.
_WINDOW, _SPARE = 256, 8


@dataclass(frozen=True)
class Replacement:
    """Settings of the augmentation. Raises ``ValueError`` for values that are not allowed.

    Args:
        copies: new texts per text.
        share: share of the words that each new text replaces.
        candidates: number of most probable pieces from which a word is sampled.
        seed: seed of the samples.
    """

    copies: int = 20
    share: float = 0.4
    candidates: int = 15
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("copies", "candidates"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}: {getattr(self, name)} is not allowed; allowed: 1 or more")
        if not 0 < self.share <= 1:
            raise ValueError(f"--share: {self.share} is not allowed; allowed: above 0, at most 1")
        if self.seed < 0:
            raise ValueError(f"--seed: {self.seed} is not allowed; allowed: 0 or more")


@dataclass(frozen=True)
class _Word:
    """A word of a text that is one piece: its characters, and the words that may replace it."""

    start: int
    end: int
    others: tuple[str, ...]


def augment(
    loaded: Engine,
    inputs: Iterable[Sequence[str]],
    options: Replacement = Replacement(),
    batches: BatchOptions = BatchOptions(),
) -> Iterator[dict[str, str]]:
    """Yield new texts of each input, a text or a pair of texts, as {"text"} or {"text", "text_pair"}.

    Words that are one piece of the vocabulary are replaced, each by one of the most probable words at its place
    when it is masked in the original text; other words stay. A text that equals the original, or an earlier text of
    it, is omitted. Raises ``ValueError`` for a model without a masked-LM head.
    """
    reading = enumerate(inputs)
    while part := list(itertools.islice(reading, _WINDOW)):
        texts = [text for _, several in part for text in several]
        words = iter(_replaceable(loaded, texts, options.candidates, batches=batches))
        for number, several in part:
            own = [next(words) for _ in several]
            seen = {tuple(several)}
            for copy in range(options.copies):
                rng = np.random.default_rng([options.seed, number, copy])
                new = tuple(_replaced(text, w, options.share, rng) for text, w in zip(several, own, strict=True))
                if new not in seen:
                    seen.add(new)
                    yield dict(zip(FIELDS, new, strict=False))


def _replaced(text: str, words: Sequence[_Word], share: float, rng: np.random.Generator) -> str:
    parts, done = [], 0
    for word in words:
        # Both numbers are drawn for every word, so that a draw does not depend on those before it.
        is_drawn, place = rng.random() < share, int(rng.integers(0, len(word.others)))
        if is_drawn:
            parts += [text[done : word.start], word.others[place]]
            done = word.end
    return "".join([*parts, text[done:]])


def _replaceable(
    loaded: Engine, texts: Sequence[str], candidates: int, batches: BatchOptions = BatchOptions()
) -> list[list[_Word]]:
    """Return the words of each text that have others in their place."""
    tokenizer = loaded.need_tokenizer()
    tokenizer.require_mask(loaded.name)
    mask = tokenizer.pieces([tokenizer.mask_id])[0]
    half = max(1, (loaded.spec.max_length - _SPARE) // 2)
    places: list[tuple[int, int, int]] = []
    masked: list[str] = []
    for i, text in enumerate(texts):
        _, words = tokenizer.encode_with_words(text)
        ids, offsets = tokenizer.encode_with_offsets(text)
        sizes = Counter(words)
        for t, ((start, end), word) in enumerate(zip(offsets, words, strict=True)):
            start += len(text[start:end]) - len(text[start:end].lstrip())
            if sizes[word] == 1 and _is_word(text[start:end]):
                first = offsets[max(0, t - half)][0]
                last = offsets[min(len(ids) - 1, t + half)][1]
                places.append((i, start, end))
                masked.append(f"{text[first:start]}{mask}{text[end:last]}")
    found: list[list[_Word]] = [[] for _ in texts]
    # Pieces inside words and signs are omitted, so more are read.
    filled = fill_mask(loaded, masked, top=2 * candidates, batches=batches)
    for (i, start, end), one in zip(places, filled, strict=True):
        others = _others(loaded, one, texts[i][start:end])[:candidates]
        if others:
            found[i].append(_Word(start, end, others))
    return found


def _is_word(text: str) -> bool:
    """Return True if ``text`` has letters and their marks only."""
    return bool(text) and all(unicodedata.category(sign)[0] in "LM" for sign in text)


def _others(loaded: Engine, filled: FilledText, word: str) -> tuple[str, ...]:
    """Return the predicted words, the most probable first, without ``word`` itself; capitalized as it is."""
    tokenizer, others = loaded.need_tokenizer(), dict[str, Any]()
    for piece, _ in filled.masks[0].predictions:
        number = tokenizer.piece_id(piece)
        if tokenizer.continuation[number] or tokenizer.special[number]:
            continue
        text = tokenizer.decode([number]).strip()
        if _is_word(text) and text.lower() != word.lower():
            others[text[:1].upper() + text[1:] if word[:1].isupper() else text] = None
    return tuple(others)
