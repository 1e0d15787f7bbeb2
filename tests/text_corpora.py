"""Small made-up corpora for the tests of building."""

import functools
from pathlib import Path

import numpy as np

from bert_jax.tokenization import SPECIAL_PIECES


def write_vocab(path: Path, words: int = 400) -> Path:
    """A WordPiece vocabulary: specials, words w0, w1, ... that mark their document, pieces ##a to ##j."""
    pieces = [*SPECIAL_PIECES, ".", *(f"w{i}" for i in range(words)), *(f"##{c}" for c in "abcdefghij")]
    path.write_text("\n".join(pieces) + "\n")
    return path


def write_corpus(path: Path, documents: int = 40, sentences: int = 12, seed: int = 0) -> Path:
    """Documents of which every word names its document: document d holds only w<d> with endings of a to j."""
    path.write_text(_corpus(documents, sentences, seed))
    return path


@functools.cache
def _corpus(documents: int, sentences: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    blocks = []
    for document in range(documents):
        lines = []
        for _ in range(int(rng.integers(1, 2 * sentences))):
            endings = [
                "".join(rng.choice(list("abcdefghij"), rng.integers(0, 4))) for _ in range(rng.integers(2, 14))
            ]
            lines.append(" ".join(f"w{document}{ending}" for ending in endings) + " .")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def tree(folder: Path) -> dict[str, bytes]:
    """Every file under ``folder`` but locks and times of the text, by relative path."""
    left_out = (".lock", ".content-hashes.json")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in left_out)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
