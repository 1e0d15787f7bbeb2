"""A tiny model's sizes and vocabulary, and what warm starts from it need: random arrays, files of words."""

from builders import drawn, tiny_model

from bert_jax.tokenization import SPECIAL_PIECES, WordPieceTokenizer
from bert_jax.tokenization.byte_bpe import byte_bpe_content

PIECES = [
    *SPECIAL_PIECES, "[unused0]", "[unused1]", "co", "##vid", "##ien", "the", "cat", "##s", "a", "re", "##sume",
    "\u4e2d",
]  # fmt: skip
MODEL = tiny_model(len(PIECES), hidden_size=8, intermediate_size=16, max_position_embeddings=16)


def tokenizer(**settings):
    return WordPieceTokenizer(PIECES, **({"lower_case": True} | settings))


def byte_bpe():
    letters = [*map(chr, range(97, 123)), "\u0120"]
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *letters, "<mask>"]
    return byte_bpe_content({piece: i for i, piece in enumerate(pieces)}, [])


def arrays(spec, seed=0):
    return drawn(spec, 1, seed=seed).params


def write_words(folder, *lines):
    path = folder / "words.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
