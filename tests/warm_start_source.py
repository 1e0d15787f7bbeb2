"""A tiny model's sizes and vocabulary, and what warm starts from it need: random arrays, files of words."""

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.interop.exchange import parameter_shapes
from bert_jax.tokenization import WordPieceTokenizer, byte_bpe_content

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [
    *SPECIALS, "[unused0]", "[unused1]", "co", "##vid", "##ien", "the", "cat", "##s", "a", "re", "##sume", "\u4e2d",
]  # fmt: skip
MODEL = ModelConfig(
    vocab_size=len(PIECES), hidden_size=8, num_layers=2, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=16,
)  # fmt: skip


def tokenizer(**settings):
    return WordPieceTokenizer(PIECES, **({"lower_case": True} | settings))


def byte_bpe():
    letters = [*map(chr, range(97, 123)), "\u0120"]
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *letters, "<mask>"]
    return byte_bpe_content({piece: i for i, piece in enumerate(pieces)}, [])


def arrays(spec, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in parameter_shapes(spec).items()}


def write_words(folder, *lines):
    path = folder / "words.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
