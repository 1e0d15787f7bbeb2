"""What is left of long texts, on a text of 1,000 tokens."""

import dataclasses
import itertools

import numpy as np
import pytest

from bert_jax.config.task import TaskConfig
from bert_jax.tasks.truncation import centrality, cut_pair, cut_text, windows
from bert_jax.tokenization import SPECIAL_PIECES, WordPieceTokenizer

TOKENIZER = WordPieceTokenizer([*SPECIAL_PIECES, ".", *(f"w{i}" for i in range(1000))], lower_case=False)
IDS = list(range(6, 1006))
TEXT = " ".join(f"w{i}" for i in range(1000))


def cut(how, budget=100, text=TEXT, ids=IDS, **options):
    return cut_text(text, ids, budget, TaskConfig(truncation=how, **options), TOKENIZER)


def test_short_texts_stay_whole():
    for how in ("longest_first", "head", "tail", "head_tail", "key_sentences", "windows"):
        assert cut(how, 1000) == [IDS]


def test_head_tail_and_both():
    assert cut("head") == cut("longest_first") == [IDS[:100]]
    assert cut("tail") == [IDS[900:]]
    assert cut("head_tail") == [IDS[:25] + IDS[925:]]
    assert cut("head_tail", head_share=0.4) == [IDS[:40] + IDS[940:]]


@pytest.mark.parametrize("overlap", [0, 20, 50])
def test_windows_cover_everything(overlap):
    found = cut("windows", window_overlap=overlap)
    assert all(len(window) == 100 for window in found)
    assert sorted({piece for window in found for piece in window}) == IDS
    # The last one is moved back to be full.
    for before, after in itertools.pairwise(found[:-1]):
        assert len(set(before) & set(after)) == overlap
    assert len(cut("windows", window_overlap=overlap, max_windows=3)) == 3
    assert windows(101, 100, overlap) == [(0, 100), (1, 101)]


def test_key_sentences_are_the_central_ones_in_order():
    # Three sentences speak of the same, others of something each; the second best does not fit any more.
    topic = "w1 w2 w3 w4"
    sentences = [f"w{n} w{n + 1} w{n + 2} ." for n in range(100, 190, 10)]
    sentences[2], sentences[5], sentences[8] = f"{topic} w5 .", f"{topic} w6 .", f"{topic} w7 ."
    text = " ".join(sentences)
    ids = TOKENIZER.encode(text)
    (found,) = cut("key_sentences", 12, text, ids)
    assert found == TOKENIZER.encode(f"{sentences[2]} {sentences[5]}")
    (found,) = cut("key_sentences", 18, text, ids)
    assert found == TOKENIZER.encode(" ".join(sentences[i] for i in (2, 5, 8)))


def test_of_a_text_without_sentences_the_head_is_left():
    assert cut("key_sentences") == [IDS[:100]]


def test_centrality_is_the_cosine_with_the_sum_of_tf_idf():
    sentences = [[1, 2, 2], [2, 3], [4]]
    idf = {piece: np.log(3 / df) + 1 for piece, df in {1: 1, 2: 2, 3: 1, 4: 1}.items()}
    vectors = np.zeros((3, 5))
    for row, sentence in enumerate(sentences):
        for piece in sentence:
            vectors[row, piece] += idf[piece]
    total = vectors.sum(0)
    expected = vectors @ total / np.linalg.norm(vectors, axis=1) / np.linalg.norm(total)
    assert np.allclose(centrality(sentences), expected, atol=1e-12)


def test_pairs_share_the_room_and_each_side_is_cut_alike():
    config = TaskConfig(truncation="tail")
    a, b = cut_pair((TEXT, "w0 w1"), (IDS, IDS[:2]), 50, config, TOKENIZER)
    assert (a, b) == (IDS[-48:], IDS[:2])
    a, b = cut_pair((TEXT, TEXT), (IDS, IDS), 50, dataclasses.replace(config, truncation="head"), TOKENIZER)
    assert (a, b) == (IDS[:25], IDS[:25])
