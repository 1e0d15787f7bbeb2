"""Sentences longer than a row: every word is in a row, and no grapheme cluster is cut."""

from pathlib import Path

import numpy as np
import pytest
from paragraph_coverage import SCRIPTS, compare

from bert_jax.tokenization import SPECIAL_PIECES
from bert_jax.tokenization.byte_bpe import ByteBPETokenizer, byte_bpe_content
from bert_jax.tokenization.wordpiece import WordPieceTokenizer
from data_pipeline.build.long_sentences import cluster_flags, cut_long_sentences

QUICK = {"hindi", "no_marks"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SCRIPTS]
)
def test_paragraphs_are_as_good_as_sentences(script: str, tmp_path: Path) -> None:
    found = compare(tmp_path, script, documents=10 if script in QUICK else 30, passes=10)
    assert found["good"], found


def cut(lengths: list[int], kinds: list[int], most: int = 16) -> list[int]:
    array = np.array(kinds, np.uint8)
    return cut_long_sentences(np.array(lengths), most, lambda start, stop: array[start:stop]).tolist()


def test_only_long_sentences_are_cut_and_at_words_first() -> None:
    assert cut([16, 3], [0] * 19) == [16, 3]
    words = [2, 1, 1] * 10
    pieces = cut([2, 30, 5], [2, 2, *words, *[0] * 5], most=29)
    assert pieces == [2, *[3] * 10, 5]
    clusters = [2, *([0, 1] * 20)]
    pieces = cut([41], clusters)
    assert sum(pieces) == 41 and max(pieces) <= 2
    starts = np.cumsum([0, *pieces[:-1]])
    assert all(clusters[start] for start in starts)
    assert cut([20], [2] + [0] * 19) == [2] * 10  # one cluster longer than a piece


def test_pieces_that_do_not_begin_a_cluster() -> None:
    pieces = ["a", "##a", "##\u0301", "##\u093e", "\u0915\u094d", "##\u1161", "\u0e33", "##\U0001f3fd", "\u200d"]
    tokenizer = WordPieceTokenizer([*SPECIAL_PIECES, *pieces], lower_case=False)
    assert cluster_flags(tokenizer)[5:].tolist() == [0, 0, 1, 1, 2, 1, 1, 1, 3]


def test_later_bytes_of_a_character_do_not_begin_a_cluster() -> None:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = [
        *special,
        "a",
        "\u0120",
        "\u00c3",
        "\u00a9",
        "\u0142",
        "\u00cc\u0123",
    ]  # bytes C3, A9, A0, CC 81 = U+0301
    tokenizer = ByteBPETokenizer(byte_bpe_content(pieces, []))
    assert cluster_flags(tokenizer)[5:].tolist() == [0, 0, 0, 1, 1, 1]
