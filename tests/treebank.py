"""CoNLL-U files and folders of senses over the vocabulary of ``inference_models``."""

import numpy as np


def sentence_text(words, upos, heads, relations):
    """A sentence of CoNLL-U; ``heads`` from 0, -1 for the root."""
    rows = zip(words, upos, heads, relations, strict=True)
    return "".join(
        f"{i}\t{word}\t_\t{tag}\t_\t_\t{head + 1}\t{relation}\t_\t_\n"
        for i, (word, tag, head, relation) in enumerate(rows, 1)
    )


def tag_of(word):
    """The part of speech of w0, w1, ...: it follows from the number."""
    return ("NOUN", "VERB", "ADJ")[int(word[1:].rstrip("x")) % 3]


def drawn_sentences(count, seed):
    """Sentences of 2 to 9 words, each with a part of speech that follows from the word; the head of a word is the
    word to its left or right, the relation is that direction ("left" with a subtype)."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        words = [f"w{i}" + "x" * int(i % 5 == 0) for i in rng.integers(0, 40, rng.integers(2, 10))]
        heads = [-1] + [
            int(i - 1 if i == len(words) - 1 else rng.choice([i - 1, i + 1])) for i in range(1, len(words))
        ]
        relations = ["root"] + ["left:x" if head < i else "right" for i, head in enumerate(heads) if i]
        yield words, [tag_of(word) for word in words], heads, relations


def write_treebank(path, count, seed):
    path.write_text("\n".join(sentence_text(*one) for one in drawn_sentences(count, seed)) + "\n")
    return path


def write_senses(folder, count=40, seed=0):
    """Two words, whose sense is that of the word to their right; train and test of ``count`` sentences each."""
    rng = np.random.default_rng(seed)
    for word in ("w1", "w2"):
        (folder / word).mkdir(parents=True)
        for part in ("train", "test"):
            senses = rng.integers(0, 2, count)
            lines = [
                f"1\tw{rng.integers(10, 20)}  {word} w{30 + sense} w{rng.integers(10, 20)}" for sense in senses
            ]
            (folder / word / f"{part}.data.txt").write_text("\n".join(lines))
            (folder / word / f"{part}.gold.txt").write_text("\n".join(map(str, senses)))
    return folder
