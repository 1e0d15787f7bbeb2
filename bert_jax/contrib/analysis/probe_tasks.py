"""Examples of the probing tasks: parts of speech and relations of a treebank, senses of words, sentence lengths.

Shapes: N examples, K words per example, R stored vectors, H width.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

import numpy as np

from bert_jax.io.conll import ParsedSentence, read_treebank

ProbeTask = Literal["pos", "deprel", "sense", "length"]
Item = TypeVar("Item")
TASKS: tuple[ProbeTask, ...] = get_args(ProbeTask)
_LENGTH_BINS = 6


@dataclass(frozen=True)
class Examples:
    """N examples of a probe, made by :func:`tagged_words`, :func:`chosen_words` or :func:`read_examples`."""

    # Words of each sentence.
    sentences: Sequence[Sequence[str]]
    # Of each sentence, the indices of the words whose vectors are stored: R in all.
    stored: Sequence[Sequence[int]]
    # int64[N, K]: the stored vectors that are concatenated.
    places: np.ndarray
    # int64[N]: index of the sentence.
    sentence: np.ndarray
    labels: Sequence[str]
    # Word types, which the control task labels at random. None: no control task.
    types: Sequence[str] | None = None
    # Name of the classifier of each example, such as the word whose senses it distinguishes. None: one classifier.
    groups: Sequence[str] | None = None
    # True: one vector is stored for each sentence, the mean over its words.
    averaged: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def features(self, vectors: np.ndarray) -> np.ndarray:
        """Return the features float32[N, K * H] of the examples from the stored vectors [R, H] of a layer."""
        return vectors[self.places].reshape(len(self), -1)


def tagged_words(sentences: Sequence[Sequence[str]], labels: Sequence[Sequence[str | None]]) -> Examples:
    """Return the examples of a task that labels words, such as their parts of speech, with a control task. Words
    with the label None are skipped. Raises ``ValueError`` if a sentence has not as many labels as words."""
    for number, (words, own) in enumerate(zip(sentences, labels, strict=True)):
        if len(words) != len(own):
            raise ValueError(f"sentence {number}: {len(own)} labels for {len(words)} words; give one per word")
    return _of_words(
        sentences,
        [((i,), label, n) for n, own in enumerate(labels) for i, label in enumerate(own) if label is not None],
        control=True,
    )


def chosen_words(
    sentences: Sequence[Sequence[str]], words: Sequence[int], labels: Sequence[str], groups: Sequence[str]
) -> Examples:
    """Return the examples of a task that labels one word of each sentence, such as its sense: the word with the
    index ``words[n]`` of sentence n. ``groups`` names the classifier of each example, which is the word itself for
    senses. Raises ``ValueError`` for an index outside of its sentence."""
    rows = list(zip(sentences, words, labels, groups, strict=True))
    for number, (sentence, word, *_) in enumerate(rows):
        if not 0 <= word < len(sentence):
            raise ValueError(f"sentence {number}: no word {word}; allowed: 0 to {len(sentence) - 1}")
    examples = [((word,), label, number) for number, (_, word, label, _) in enumerate(rows)]
    return _of_words(sentences, examples, control=False, groups=groups)


def _of_words(
    sentences: Sequence[Sequence[str]],
    examples: Sequence[tuple[tuple[int, ...], str, int]],
    *,
    control: bool,
    groups: Sequence[str] | None = None,
) -> Examples:
    """``examples``: words, label and sentence of each. The first word determines the type of an example."""
    needed: list[set[int]] = [set() for _ in sentences]
    for words, _, number in examples:
        needed[number].update(words)
    stored = [sorted(own) for own in needed]
    pairs = [(number, word) for number, own in enumerate(stored) for word in own]
    row = {pair: i for i, pair in enumerate(pairs)}
    return Examples(
        sentences,
        stored,
        np.array([[row[number, word] for word in words] for words, _, number in examples], np.int64),
        np.array([number for *_, number in examples], np.int64),
        [label for _, label, _ in examples],
        [sentences[number][words[0]].casefold() for words, _, number in examples] if control else None,
        groups,
    )


def spread(items: Sequence[Item], limit: int) -> list[Item]:
    """Return ``limit`` of ``items`` at equal distances; all of them if there are fewer or ``limit`` is 0."""
    if not limit or limit >= len(items):
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def universal(relation: str) -> str:
    """Return a relation of Universal Dependencies without its subtype: nsubj for nsubj:pass."""
    return relation.partition(":")[0]


def read_examples(task: ProbeTask, train: Path, test: Path, limit: int) -> tuple[Examples, Examples]:
    """Read the training and the test examples of a task.

    Args:
        task: pos: part of speech (UPOS) of a word. deprel: universal relation of a word to its head, from the
            vectors of both; roots are skipped. length: number of words of a sentence, in six bins that hold
            about the same number of training sentences each, as in SentEval (Conneau et al. 2018), from the mean of
            the vectors of its words. sense: sense of a word in a sentence.
        train, test: CoNLL-U files (.gz: compressed). For sense, folders in the layout of CoarseWSD-20 (Loureiro et
            al. 2021), of a word or of several: ``train.data.txt`` or ``test.data.txt`` with a position from 0, a
            tab and the words per line, and ``.gold.txt`` with a sense per line.
        limit: number of sentences (sense: of each word) at equal distances; 0: all.

    Raises ``ValueError``, which names file and line, for missing files and invalid content.
    """
    if task == "sense":
        return _senses(train, "train", limit), _senses(test, "test", limit)
    parsed = [spread(list(read_treebank(path)), limit) for path in (train, test)]
    if task == "length":
        return _lengths(*parsed)
    read = _parts_of_speech if task == "pos" else _relations
    return read(parsed[0]), read(parsed[1])


def _parts_of_speech(parsed: Sequence[ParsedSentence]) -> Examples:
    return tagged_words([own.words for own in parsed], [own.upos for own in parsed])


def _relations(parsed: Sequence[ParsedSentence]) -> Examples:
    examples = [
        ((i, head), universal(own.relations[i]), number)
        for number, own in enumerate(parsed)
        for i, head in enumerate(own.heads)
        if head >= 0
    ]
    return _of_words([own.words for own in parsed], examples, control=True)


def _lengths(train: Sequence[ParsedSentence], test: Sequence[ParsedSentence]) -> tuple[Examples, Examples]:
    lengths = np.array([len(own.words) for own in train])
    edges = np.unique(np.quantile(lengths, np.arange(1, _LENGTH_BINS) / _LENGTH_BINS, method="lower"))
    lows, highs = [1, *(edges + 1)], [*edges, ""]
    names = [f"{low}-{high}" for low, high in zip(lows, highs, strict=True)]

    def of(parsed: Sequence[ParsedSentence]) -> Examples:
        sentences, count = [own.words for own in parsed], np.arange(len(parsed))
        labels = [names[i] for i in np.searchsorted(edges, [len(words) for words in sentences])]
        stored = [range(len(words)) for words in sentences]
        return Examples(sentences, stored, count[:, None], count, labels, averaged=True)

    return of(train), of(test)


def _senses(folder: Path, part: str, limit: int) -> Examples:
    sentences: list[list[str]] = []
    words: list[int] = []
    labels: list[str] = []
    groups: list[str] = []
    for place in _folders_of_words(folder, f"{part}.data.txt"):
        data, gold = place / f"{part}.data.txt", place / f"{part}.gold.txt"
        lines, senses = _lines(data), _lines(gold)
        if len(lines) != len(senses):
            raise ValueError(
                f"{gold}: {len(senses)} senses, but {data.name} has {len(lines)} sentences; write one sense per "
                "sentence"
            )
        for number, line in spread(list(enumerate(lines)), limit):
            position, _, text = line.partition("\t")
            # The positions of CoarseWSD-20 count words between any number of blanks.
            tokens = text.split()
            if not position.strip().isdecimal() or int(position[:19]) >= len(tokens):
                raise ValueError(
                    f"{data}:{number + 1}: {line[:60]!r} is not allowed; use the position of a word, from 0, "
                    "a tab and the words"
                )
            sentences.append(tokens)
            words.append(int(position))
            labels.append(senses[number].strip())
            groups.append(place.resolve().name)
    return chosen_words(sentences, words, labels, groups)


def _folders_of_words(folder: Path, name: str) -> Iterable[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; sense reads a folder in the layout of CoarseWSD-20")
    found = [folder] if (folder / name).is_file() else sorted(path.parent for path in folder.glob(f"*/{name}"))
    if not found:
        raise ValueError(
            f"{folder}: no {name} in this folder or in its subfolders; give a folder in the layout of CoarseWSD-20"
        )
    return found


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; the senses of a file NAME.data.txt are in NAME.gold.txt")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not valid UTF-8; convert the file to UTF-8") from None
    return lines[:-1] if lines[-1] == "" else lines
