"""Words, 5-grams and MinHash signatures of ``bert-data clean`` against plain Python."""

import re
from collections.abc import Sequence

import numpy as np
import pytest

from data_pipeline.contrib.clean import word_hashes as module
from data_pipeline.contrib.clean.options import CleanConfig, chance
from data_pipeline.contrib.clean.word_hashes import band_hashes, jaccard, line_keys, min_hashes, ngrams, word_hashes

TEXTS = [
    "The cat (my_cat) can't sleep -- 3.5 hours, ÉTÉ 2024!", "", "...", "THE CAT", "naïve Straße İstanbul",
    "हिन्दी भाषा", "한국어 텍스트", "x" * 300,
]  # fmt: skip


def python_words(text: str) -> list[str]:
    """Words of scripts with spaces, by a regular expression; marks belong to words."""
    return re.findall(r"(?:[^\W_]|[\u0300-\u036f\u0900-\u0903\u093a-\u094f])+", text.lower())


def distinct(texts: Sequence[str]) -> list[set[int]]:
    """Set of the hashes of the 5-grams of each text."""
    words, counts = word_hashes(texts)
    values, sizes = ngrams(words, counts, np.arange(len(texts), dtype=np.uint64))
    return [set(part.tolist()) for part in np.split(values, np.cumsum(sizes)[:-1])]


def check_words(texts: Sequence[str], expected: Sequence[Sequence[str]]) -> None:
    """Equal words have equal hashes, others have others, and they come in order."""
    hashes, counts = word_hashes(texts)
    assert counts.tolist() == [len(words) for words in expected]
    pairs = {*zip((word for words in expected for word in words), hashes.tolist(), strict=True)}
    assert len(pairs) == len({word for word, _ in pairs}) == len({value for _, value in pairs})


def test_words_of_scripts_with_spaces() -> None:
    check_words(TEXTS, [python_words(text) for text in TEXTS])


def test_scripts_without_spaces_have_a_word_per_character() -> None:
    texts = ["我们在BERT学习。", "カタカナ and ひらがな", "ภาษาไทย", "我们"]
    expected = [
        ["我", "们", "在", "bert", "学", "习"],
        [*"カタカナ", "and", *"ひらがな"],
        [*"ภาษาไทย"],
        ["我", "们"],
    ]
    check_words(texts, expected)


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = TEXTS[:-1] * 5
    whole = word_hashes(texts)
    monkeypatch.setattr(module, "_BLOCK", 64)
    module._powers.cache_clear()
    parts = word_hashes(texts)
    # A text above the size of a block is cut, but the number of its characters stays.
    _, counts = word_hashes(["ab " * 100, "c"])
    module._powers.cache_clear()
    assert np.array_equal(whole[0], parts[0]) and np.array_equal(whole[1], parts[1])
    assert counts.tolist()[0] in range(100, 110) and counts.tolist()[1] == 1


def test_line_keys_ignore_case_and_punctuation() -> None:
    lines = ["Home | About us", "home: ABOUT, us!", "Home about", "About us home", "***", ""]
    keys = line_keys(*word_hashes(lines)).tolist()
    assert keys[0] == keys[1] and keys[4] == keys[5] == 0
    assert len(set(keys)) == 4


def test_line_keys_in_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"line number {number % 7} of a page" for number in range(60)]
    words = word_hashes(lines)
    whole = line_keys(*words)
    monkeypatch.setattr(module, "_BLOCK", 16)
    assert np.array_equal(line_keys(*words), whole) and len(set(whole.tolist())) == 7
    assert np.all(line_keys(*word_hashes(["a b c " * 20, "d e"])) != 0)


def test_similarity_of_5grams_is_that_of_sets_of_words() -> None:
    rng = np.random.default_rng(0)
    lengths = [0, 1, 4, 4, 5, 6, 6, 9, *rng.integers(10, 40, 30)]
    texts = [" ".join(rng.choice(list("abcd"), length)) for length in lengths]
    texts[3] = texts[2].upper() + "!"
    expected = []
    for text in texts:
        words = python_words(text)
        expected.append({tuple(words[i : i + 5]) for i in range(max(len(words) - 4, 1))})
    found = distinct(texts)
    for i, mine in enumerate(found):
        for j, other in enumerate(found):
            assert len(mine & other) == len(expected[i] & expected[j]) or 0 in (lengths[i], lengths[j]), (i, j)
            value = len(mine & other) / len(mine | other)
            assert jaccard(np.array(sorted(mine)), np.array(sorted(other))) == value


def test_documents_of_few_words() -> None:
    one, same, four, prefix, none, other = distinct(["word", "Word.", "a b c d", "a b c", "...", "???"])
    assert one == same and all(len(found) == 1 for found in (one, four, prefix, none, other))
    assert len(one | four | prefix | none | other) == 5


def test_signatures_estimate_the_similarity() -> None:
    """The share of equal MinHash values has mean s and standard deviation sqrt(s (1 - s) / hashes)."""
    rng = np.random.default_rng(3)
    hashes = 4096
    for similarity in (0.2, 0.5, 0.9):
        values = rng.integers(0, 1 << 63, 2000, dtype=np.uint64) * np.uint64(2)
        common = int(similarity * 1000)
        first = np.concatenate([values[:common], values[common : (1000 + common) // 2]])
        second = np.concatenate([values[:common], values[1000 : 1000 + (1000 - common) // 2]])
        exact = jaccard(np.sort(first), np.sort(second))
        signature = min_hashes(np.concatenate([first, second]), np.array([len(first), len(second)]), hashes)
        share = (signature[:, 0] == signature[:, 1]).mean()
        assert abs(share - exact) < 4 * (exact * (1 - exact) / hashes) ** 0.5


def test_bands_are_equal_if_all_rows_are() -> None:
    signatures = np.arange(12, dtype=np.uint64).reshape(6, 2)
    signatures[:, 1] = signatures[:, 0]
    signatures[5, 1] += 1
    bands = band_hashes(signatures, 2, 3)
    assert bands[0, 0] == bands[0, 1] and bands[1, 0] != bands[1, 1]
    equal = band_hashes(np.zeros((6, 1), np.uint64), 2, 3)
    assert equal[0, 0] != equal[1, 0]


@pytest.mark.parametrize(
    ("threshold", "banding"), [(0.7, (25, 5)), (0.5, (42, 3)), (0.9, (11, 11)), (1.0, (1, 128))]
)
def test_bands_and_rows_of_a_threshold(threshold: float, banding: tuple[int, int]) -> None:
    assert CleanConfig(near_duplicates=threshold).banding == banding
    assert chance(threshold, *banding) >= 0.98
    assert threshold == 1 or chance(threshold, 128 // (banding[1] + 1), banding[1] + 1) < 0.98
    assert CleanConfig(near_duplicates=threshold, bands=7, rows=2).banding == (7, 2)
