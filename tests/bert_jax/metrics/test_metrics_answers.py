"""Answers to questions: the rules of SQuAD 1.1 and 2.0, and of CMRC and DRCD, by hand and by brute force."""

import math

import numpy as np
import pytest

from bert_jax.metrics import value
from bert_jax.metrics.chinese_qa import chinese_answer_scores
from bert_jax.metrics.chinese_qa import exact_and_f1 as chinese_exact_and_f1
from bert_jax.metrics.squad import exact_and_f1, normalize, squad_scores


def values(scores, n):
    return {score.name: value(score, n) for score in scores}


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat,\tand an  owl.", "cat and owl"),
        ("U.S.-based", "usbased"),
        ("theatre a.", "theatre"),
        ("A-the", "athe"),  # punctuation goes first
        ("“The” end", "“ ” end"),  # only ASCII punctuation goes
        ("the", ""),
    ],
)
def test_squad_normalisation(text, normal):
    assert normalize(text) == normal


@pytest.mark.parametrize(
    ("prediction", "references", "exact", "f1"),
    [
        ("the cat", ["A cat!", "dog"], 1, 1),
        ("black cat sat", ["cat", "cat sat down there"], 0, 4 / 7),
        ("cat cat", ["cat cat dog"], 0, 4 / 5),  # a bag: copies count
        ("cat cat dog", ["cat dog dog"], 0, 2 / 3),  # each of them once
        ("", [], 1, 1),
        ("", [""], 1, 1),
        ("cat", [""], 0, 0),
        ("the", [], 1, 1),  # normalises to nothing
        ("", ["cat"], 0, 0),
        ("", ["the", "cat"], 0, 0),  # the reference that is nothing is dropped
        ("", ["the"], 1, 1),  # unless it is the only one
        ("a dog", ["cat"], 0, 0),
    ],
)
def test_squad_exact_and_f1(prediction, references, exact, f1):
    assert exact_and_f1(prediction, references) == (exact, pytest.approx(f1, abs=1e-15))


def test_squad_11_has_two_scores():
    scores = squad_scores(["cat", "dog", "x y"], [["the cat"], ["cat"], ["y"]])
    assert values(scores, 3) == pytest.approx({"exact": 1 / 3, "f1": (1 + 0 + 2 / 3) / 3}, abs=1e-15)


def test_squad_20_with_null_odds():
    predictions = ["cat", "dog", "red fox", "owl"]
    references = [["cat"], [], ["fox"], [""]]
    odds = [-3.0, -1.0, 2.0, 0.5]
    scores = squad_scores(predictions, references, odds)
    # At 0: cat is right, dog is wrong (no answer there), red fox is lost, owl becomes no answer, which is right.
    assert values(scores, 4) == {
        "exact": 0.5,
        "f1": 0.5,
        "exact/has_answer": 0.5,
        "f1/has_answer": 0.5,
        "exact/no_answer": 0.5,
        "f1/no_answer": 0.5,
        "exact/best_threshold": 0.75,
        "f1/best_threshold": 0.75,
        "exact/best_threshold_value": -3,
        "f1/best_threshold_value": -3,
    }
    found = values(squad_scores(predictions, references, odds, threshold=2.0), 4)
    assert (found["exact/has_answer"], found["exact/no_answer"]) == (0.5, 0)  # 2.0 is not above 2.0
    assert found["f1/has_answer"] == pytest.approx((1 + 2 / 3) / 2, abs=1e-15)
    assert values(squad_scores(["cat", "", "", ""], references), 4)["exact"] == 0.75


@pytest.mark.slow
def test_best_threshold_by_brute_force():
    for seed in range(200):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 15))
        references = [["cat sat"] if rng.random() < 0.6 else [] for _ in range(n)]
        predictions = [str(rng.choice(["cat sat", "cat", "dog", ""])) for _ in range(n)]
        odds = rng.integers(-4, 5, n) / 2  # many are equal
        found = values(squad_scores(predictions, references, odds), n)
        for name in ("exact", "f1"):
            tried = {
                limit: values(squad_scores(predictions, references, odds, limit), n)[name]
                for limit in [-10.0, *odds]
            }
            threshold = found[f"{name}/best_threshold_value"]
            at_best = values(squad_scores(predictions, references, odds, threshold), n)[name]
            assert found[f"{name}/best_threshold"] == at_best == pytest.approx(max(tried.values()), abs=1e-12)


def test_subsets_are_nan_on_a_resample_without_them():
    scores = squad_scores(["cat", ""], [["cat"], []])
    by_name = {score.name: score for score in scores}
    assert math.isnan(by_name["f1/no_answer"].of(np.array([0, 0])))
    assert by_name["f1/has_answer"].of(np.array([0, 0])) == 1


def test_squad_refuses_wrong_input():
    with pytest.raises(ValueError, match="predictions 1, references 2"):
        squad_scores(["a"], [["a"], ["b"]])
    with pytest.raises(ValueError, match="no records"):
        squad_scores([], [])
    for odds in ([0.0, 1.0], [math.nan], [math.inf]):
        with pytest.raises(ValueError, match=r"null_odds: .* 1 finite numbers"):
            squad_scores(["a"], [["a"]], odds)


@pytest.mark.parametrize(
    ("prediction", "references", "exact", "f1"),
    [
        ("北京大学", ["北京大学"], 1, 1),
        ("《北京，大学》。", ["北京大学"], 1, 1),
        ("“北京”……（大学）·,.", ["‘北京’〔大学〕"], 1, 1),
        ("北京", ["北京大学"], 0, 2 * 2 / 6),
        ("北大", ["北京大学"], 0, 2 * 1 / 6),  # a substring, not a subsequence
        ("京大学北", ["北京大学"], 0, 2 * 3 / 8),
        ("2008年", ["2008年8月"], 0, 2 * 2 / 6),  # 2008 年 of 2008 年 8 月
        ("200年", ["2008年"], 0, 2 * 1 / 4),  # a number is one token
        ("GPT4模型", ["gpt-4模型"], 1, 1),
        ("new york市", ["New York"], 0, 2 * 2 / 5),
        ("newyork", ["new york"], 0, 0),  # white space parts tokens and stays for equality
        ("ＧＰＴ店", ["ｇｐ店"], 0, 2 * 1 / 4),
        ("café店", ["cafe店"], 0, 2 * 1 / 4),
        (" 北京\n", ["北京"], 1, 1),
        ("天" * 250, ["地" + "天" * 250], 0, 500 / 501),
        ("上海", ["北京", "上海市"], 0, 2 * 2 / 5),
        ("", ["北京"], 0, 0),
        ("，", ["。"], 1, 0),  # nothing on either side: equal, but nothing in common
    ],
)
def test_chinese_exact_and_f1(prediction, references, exact, f1):
    assert chinese_exact_and_f1(prediction, references) == (exact, pytest.approx(f1, abs=1e-15))


def longest_common_substring(a, b):
    return max((n for n in range(len(a) + 1) for i in range(len(a) - n + 1) if a[i : i + n] in b), default=0)


def test_chinese_f1_by_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(500):
        a, b = ("".join(rng.choice(list("天地人"), rng.integers(1, 12))) for _ in range(2))
        expected = 2 * longest_common_substring(a, b) / (len(a) + len(b))
        assert chinese_exact_and_f1(a, [b])[1] == pytest.approx(expected, abs=1e-15)


def test_chinese_scores():
    scores = chinese_answer_scores(["北京", "北"], [["北京。"], ["北京", "上海"]])
    assert values(scores, 2) == pytest.approx({"exact": 0.5, "f1": (1 + 2 / 3) / 2}, abs=1e-15)
    with pytest.raises(ValueError, match="'北': no references"):
        chinese_answer_scores(["北"], [[]])
    with pytest.raises(ValueError, match="predictions 1, references 0"):
        chinese_answer_scores(["北"], [])
    with pytest.raises(ValueError, match="no records"):
        chinese_answer_scores([], [])
