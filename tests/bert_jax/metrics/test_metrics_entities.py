"""Entities, tags, intent with slots: by hand, and equal to seqeval's on many random sequences."""

import warnings

import numpy as np
import pytest

from bert_jax.metrics import value
from bert_jax.metrics.entities import entities, joint_scores, tag_accuracy, tagging_scores

SEQEVAL = "seqeval, the oracle, is not installed"


def values(scores, n):
    """By name; nothing may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {score.name: value(score, n) for score in scores}
    assert len(found) == len(scores) and all(type(one) is float for one in found.values())
    return found


@pytest.mark.parametrize(
    ("tags", "default", "strict"),
    [
        ("O O", [], []),
        ("B-A I-A O B-A", [("A", 0, 2), ("A", 3, 4)], [("A", 0, 2), ("A", 3, 4)]),
        ("B-A B-A I-A", [("A", 0, 1), ("A", 1, 3)], [("A", 0, 1), ("A", 1, 3)]),
        ("O I-A I-A", [("A", 1, 3)], []),
        ("B-A I-B I-B", [("A", 0, 1), ("B", 1, 3)], [("A", 0, 1)]),
        ("B-A I-B I-A", [("A", 0, 1), ("B", 1, 2), ("A", 2, 3)], [("A", 0, 1)]),
        ("B-A O I-A", [("A", 0, 1), ("A", 2, 3)], [("A", 0, 1)]),
        ("I-A B-A I-A", [("A", 0, 1), ("A", 1, 3)], [("A", 1, 3)]),  # IOB1
        ("B I O", [("_", 0, 2)], [("_", 0, 2)]),
        ("B-a-b I-a-b", [("a-b", 0, 2)], [("a-b", 0, 2)]),
        ("B-A I-A E-A S-A E-A", [("A", 0, 3), ("A", 3, 4), ("A", 4, 5)], None),
        ("B-A E-A I-A", [("A", 0, 2), ("A", 2, 3)], None),
        ("S-A I-A E-B", [("A", 0, 1), ("A", 1, 2), ("B", 2, 3)], None),
    ],
)
def test_entities_by_hand(tags, default, strict):
    assert entities(tags.split()) == default
    if strict is None:
        with pytest.raises(ValueError, match="IOB2"):
            entities(tags.split(), strict=True)
    else:
        assert entities(tags.split(), strict=True) == strict


def test_scores_by_hand():
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC"], ["O"]]
    predicted = [["B-PER", "I-PER", "O", "O"], ["I-LOC", "I-LOC"], ["O"]]
    found = values(tagging_scores(gold, predicted), 3)
    assert (found["precision"], found["recall"], found["f1"]) == (1 / 2, 1 / 3, 2 / 5)
    assert (found["f1/PER"], found["precision/LOC"], found["f1/LOC"]) == (1, 0, 0)
    assert found["accuracy"] == 4 / 7
    assert values(tagging_scores(gold, predicted, strict=True), 3)["precision"] == 1
    # A sentence of its own: an entity does not go on in the next one.
    assert values(tagging_scores([["B-A"], ["I-A"]], [["B-A"], ["B-A"]]), 2)["f1"] == 1


def test_no_entities_and_no_tags_are_zero():
    assert values(tagging_scores([["O", "O"]], [["O", "O"]]), 1) == {
        "precision": 0,
        "recall": 0,
        "f1": 0,
        "accuracy": 1,
    }
    assert values(tagging_scores([[]], [[]]), 1)["accuracy"] == 0


def test_joint_by_hand():
    intents = ["play", "book", "play", "rate"], ["play", "book", "book", "rate"]
    gold = [["B-A", "I-A"], ["O"], ["B-A"], ["B-B"]]
    predicted = [["B-A", "I-A"], ["O"], ["B-A"], ["B-A"]]
    found = values(joint_scores(*intents, gold, predicted), 4)
    assert found == pytest.approx({"intent_accuracy": 0.75, "sentence_accuracy": 0.5}, abs=1e-15)
    numbered = values(joint_scores(np.array([0, 1, 0, 2]), np.array([0, 1, 1, 2]), gold, predicted), 4)
    assert numbered == found
    # Every tag counts, not only the entities that they make.
    assert values(joint_scores([0], [0], [["B-A"]], [["I-A"]]), 1) == {
        "intent_accuracy": 1,
        "sentence_accuracy": 0,
    }


def test_tag_accuracy_takes_any_tag():
    assert value(tag_accuracy([["NOUN", "VERB"], ["X"]], [["NOUN", "X"], ["X"]]), 2) == 2 / 3


def test_wrong_input_is_refused():
    for function in (tagging_scores, tag_accuracy):
        with pytest.raises(ValueError, match="gold 1, predicted 2"):
            function([["O"]], [["O"], ["O"]])
        with pytest.raises(ValueError, match="sentence 1 has 2 tags in gold, 1 in predicted"):
            function([["O"], ["O", "O"]], [["O"], ["O"]])
        with pytest.raises(ValueError, match="no records"):
            function([], [])
    for tag in ("U-PER", "PER", "O-PER", "BPER", ""):
        with pytest.raises(ValueError, match="is not allowed; allowed: O, and B, I, E or S"):
            tagging_scores([["O"]], [[tag]])
    with pytest.raises(ValueError, match="predicted_intents 1"):
        joint_scores(["a", "b"], ["a"], [["O"], ["O"]], [["O"], ["O"]])
    with pytest.raises(ValueError, match="sentence 0 has 1 tags in gold, 2 in predicted"):
        joint_scores(["a"], ["a"], [["O"]], [["O", "O"]])


@pytest.mark.parametrize(("prefixes", "strict"), [("BI", False), ("I", False), ("BIES", False), ("BI", True)])
def test_equal_to_seqeval(prefixes, strict):
    metrics = pytest.importorskip("seqeval.metrics", reason=SEQEVAL)
    scheme = pytest.importorskip("seqeval.scheme", reason=SEQEVAL)
    mode = {"mode": "strict", "scheme": scheme.IOB2} if strict else {}
    for seed in range(250):
        rng = np.random.default_rng(seed)
        kinds = [f"-{kind}" for kind in ("A", "B-C", "D")[: rng.integers(1, 4)]] + [""] * rng.integers(2)
        tags = ["O"] * int(rng.integers(1, 5)) + [prefix + kind for prefix in prefixes for kind in kinds]
        lengths = rng.integers(0, 12, rng.integers(1, 6))
        gold = [rng.choice(tags, length).tolist() for length in lengths]
        predicted = [
            [tag if rng.random() < 0.6 else str(rng.choice(tags)) for tag in sentence] for sentence in gold
        ]
        found = values(tagging_scores(gold, predicted, strict=strict), len(gold))
        expected = seqeval_scores(metrics, gold, predicted, mode)
        if lengths.sum():
            expected["accuracy"] = metrics.accuracy_score(gold, predicted)
        else:
            found.pop("accuracy")
        assert found == pytest.approx(expected, abs=1e-12), seed


def seqeval_scores(metrics, gold, predicted, mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of no entities
        report = metrics.classification_report(gold, predicted, output_dict=True, zero_division=0, **mode)
        assert report["micro avg"]["f1-score"] == metrics.f1_score(gold, predicted, zero_division=0, **mode)
    rows = {kind: row for kind, row in report.items() if not kind.endswith(" avg")}
    expected = {}
    for suffix, row in [("", report["micro avg"]), *((f"/{kind}", row) for kind, row in rows.items())]:
        for name, theirs in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score")):
            expected[name + suffix] = row[theirs]
    return expected
