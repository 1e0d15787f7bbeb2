"""What the predictions of a split show in the report."""

from types import SimpleNamespace

import numpy as np
import pytest

from bert_jax.finetuning.findings import findings_of
from bert_jax.metrics.score import mean_score
from bert_jax.metrics.squad import squad_scores
from bert_jax.records import Answer, Record


def task(**settings):
    names = settings.pop("names", ())

    def scores(records, predictions):
        pairs = zip(records, predictions, strict=True)
        right = [one["answer"] in [a.text for a in record.answers] for record, one in pairs]
        return [mean_score("f1", np.array(right, float))]

    return SimpleNamespace(
        scored=lambda records: [i for i, one in enumerate(records) if one.id != "hidden"],
        settings=SimpleNamespace(**settings), names=names, scores=scores,
    )  # fmt: skip


def squad_task():
    def scores(records, predictions):
        return squad_scores(
            [one["answer"] for one in predictions], [[a.text for a in one.answers] for one in records]
        )[::-1]

    return SimpleNamespace(scored=lambda records: [*range(len(records))], settings=SimpleNamespace(), scores=scores)


def records(**columns):
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [Record(**{"id": str(i), "source": "", **row}) for i, row in enumerate(rows)]


def test_classes_are_ordered_by_confidence_and_have_their_names():
    own = records(text=["a", "b", "c", "d" * 500], label=["0", "1", "1", "0"])
    labels, sure = ["1", "1", "0", "1"], [0.6, 0.9, 0.8, 0.7]
    predictions = [{"label": label, "score": score} for label, score in zip(labels, sure, strict=True)]
    found = findings_of(task(labels=("0", "1"), names=("bad", "good")), own, predictions)
    assert (found["scored"], found["wrong"]) == (4, 3)
    assert [one["text"][:1] for one in found["mistakes"]] == ["c", "d", "a"]
    assert found["mistakes"][0] == {"text": "c", "gold": "good", "predicted": "bad", "score": 0.8}
    assert found["mistakes"][1]["text"] == "d" * 400 + " …"


def test_probabilities_are_compared_with_the_accuracy():
    own = records(text=["a", "b", "c", "d"], label=["0", "0", "0", "1"])
    predictions = [{"label": "0", "score": score} for score in (0.5, 0.5, 0.9, 0.9)]
    found = findings_of(task(labels=("0", "1"), names=("0", "1")), own, predictions)["confidence"]
    # Two of two are right with 50%, and one of two with 90%.
    assert found == {"mean": pytest.approx(0.7), "accuracy": 0.75, "error": pytest.approx((0.5 + 0.4) / 2)}
    without = [{"label": "0"}] * 4
    assert "confidence" not in findings_of(task(labels=("0", "1"), names=("0", "1")), own, without)


def test_mistakes_in_entities_have_kinds():
    cases = {  # correct tags: predicted tags
        "B-X I-X O": "B-X I-X O", "B-X O O": "B-Y O O", "B-X I-X B-Y": "B-X O O", "O B-X I-X": "O O B-Y",
        "O O O": "B-Y O O",
    }  # fmt: skip
    own = records(words=[("a", "b", "c")] * 5, tags=[tuple(tags.split()) for tags in cases])
    predictions = [{"tokens": [{"label": tag} for tag in tags.split()]} for tags in cases.values()]
    found = findings_of(task(), own, predictions)
    one_each = ("right", "wrong boundary", "wrong type", "wrong boundary and type", "missed", "spurious")
    assert found["kinds"] == {"unit": "entities", "counts": dict.fromkeys(one_each, 1)}
    # X: once right, once with another boundary, twice as Y. Y: missed; once where there is none.
    assert found["types"] == {"labels": ["X", "Y", "none"], "counts": [[2, 2, 0], [0, 0, 1], [0, 1, 0]]}


def test_wrong_answers_have_kinds_by_their_place():
    passage = "zero one two three four"
    spans = {
        "one two": "right",
        "zero one two": "too long",
        "two": "too short",
        "two three": "partly the correct words",
        "four": "in another place",
        "": "no answer predicted",
    }
    own = records(
        text=["q"] * 7, text_pair=[passage] * 7, answers=[*[(Answer(text="one two", start=5),)] * 6, ()]
    )  # fmt: skip
    predictions = [
        {"answer": one, "start": passage.index(one), "end": passage.index(one) + len(one), "score": float(rank)}
        for rank, one in enumerate([*spans, "four"])
    ]
    found = findings_of(task(), own, predictions)
    assert found["kinds"]["counts"] == {**dict.fromkeys(spans.values(), 1), "answer where there is none": 1}
    assert found["slices"][2]["groups"] == [("lower half", 4, 0.25), ("upper half", 3, 0.0)]


def test_hidden_records_do_not_count():
    own = records(id=["hidden", "x"], text=["a", "b"], label=[None, "1"])
    found = findings_of(task(labels=("1",), names=("1",)), own, [{"label": "1", "score": 1.0}] * 2)
    assert (found["scored"], found["wrong"], found["mistakes"]) == (1, 0, [])


def test_label_sets_and_values():
    own = records(text=["a", "b"], labels=[("x", "y"), ("x",)])
    found = findings_of(task(), own, [{"labels": ["z"]}, {"labels": ["x"]}])
    assert found["mistakes"] == [{"text": "a", "gold": "x, y", "predicted": "z"}] and found["wrong"] == 1
    own = records(text=["a", "b", "c"], label=["1", "2", "3"])
    found = findings_of(task(), own, [{"value": 1.5}, {"value": 5.0}, {"value": 3.0}])
    assert [one["text"] for one in found["mistakes"]] == ["b", "a"] and "wrong" not in found
    assert found["points"]["values"] == [(1.0, 1.5), (2.0, 5.0), (3.0, 3.0)]
    assert found["counts"]["groups"] == ["1.2", "1.6", "2", "2.4", "2.8"]
    assert found["counts"]["series"] == {"correct": [1, 0, 1, 0, 1], "predicted": [0, 1, 0, 0, 2]}


def test_tags_show_the_words():
    own = records(words=[("Ann", "left"), ("a",)], tags=[("B-PER", "O"), ("O",)])
    tagged = [[{"label": "O"}, {"label": "O"}], [{"label": "O"}]]
    found = findings_of(task(), own, [{"tokens": tokens} for tokens in tagged])
    assert found["mistakes"] == [{"words": [("Ann", "B-PER", "O"), ("left", "O", "O")]}]
    support = {"unit": "entities", "counts": {"PER": 1}, "answer": "tag O for all", "accuracy": 2 / 3}
    assert found["support"] == support
    own = records(words=[("Ann", "left")], tags=[("NOUN", "VERB")])
    assert findings_of(task(), own, [{"tokens": tagged[0]}])["support"]["counts"] == {"NOUN": 1, "VERB": 1}


def test_answers_are_scored_by_length_of_answer_and_context():
    lengths = [(1, 150), (1, 900), (3, 150), (12, 40)]  # words of the answer and of the context
    own = records(
        text=["q"] * 4, text_pair=[" ".join(["w"] * context) for _, context in lengths],
        answers=[(Answer(text=" ".join(["a"] * answer), start=-1),) for answer, _ in lengths],
    )  # fmt: skip
    predictions = [{"answer": text, "score": 1.0} for text in ("a", "b", "a a a", "b")]
    of_answers, of_contexts, _ = findings_of(task(), own, predictions)["slices"]
    assert (of_answers["metric"], of_contexts["title"]) == ("f1", "length of the context in words")
    assert of_answers["groups"] == [("1", 2, 0.5), ("3", 1, 1.0), ("10+", 1, 0.0)]
    assert of_contexts["groups"] == [("up to 100", 1, 0.0), ("101-200", 2, 1.0), ("801+", 1, 0.0)]


def test_answers_are_scored_by_question_word():
    asked = {
        "When did it end?": "when", "In what year?": "what", "How many are there?": "how many or much",
        "Name it.": "other", "Tell how, not what.": "how", "为什么": "why", "什么时候": "when", "Whatever": "other",
    }  # fmt: skip
    own = records(
        text=[*asked], text_pair=["x y"] * len(asked), answers=[(Answer(text="x y", start=0),)] * len(asked)
    )
    found = findings_of(squad_task(), own, [{"answer": "x y", "score": 1.0}] + [{"answer": "y", "score": 1.0}] * 7)
    first = found["slices"][0]
    assert (first["title"], first["metric"]) == ("question word", "f1")
    groups = {name: count for name, count, _ in first["groups"]}
    assert groups == {name: [*asked.values()].count(name) for name in groups} and sum(groups.values()) == len(asked)
    assert first["groups"][0] == ("when", 2, pytest.approx((1 + 2 / 3) / 2)) and first["others"]["exact"][0] == 0.5
    assert all(one["others"].keys() == {"exact"} for one in found["slices"])


@pytest.mark.parametrize(("scoring", "unit", "group"), [("squad", "words", "2"), ("chinese", "characters", "4-5")])
def test_answers_have_lengths_and_the_passage_around_the_answer(scoring, unit, group):
    passage = "x" * 900 + "ab cd" + "y" * 900
    own = records(
        text=["q", "r"], text_pair=[passage, "none"],
        answers=[(Answer(text="ab cd", start=900),), (Answer(text="none", start=0),)],
    )  # fmt: skip
    predictions = [{"answer": "x", "score": 1.0, "start": 0, "end": 1}, {"answer": "none", "score": 1.0}]
    found = findings_of(task(answer_scoring=scoring), own, predictions)
    (mistake,) = found["mistakes"]
    assert "ab cd" in mistake["text_pair"] and len(mistake["text_pair"]) < 450
    assert (mistake["gold"], mistake["predicted"], found["wrong"]) == ("ab cd", "x", 1)
    marked = [(mistake["text_pair"][first:end], name) for first, end, name in mistake["marks"]]
    assert marked == [("x", "predicted"), ("ab cd", "gold")]
    counts = found["counts"]
    assert unit in counts["title"] and counts["series"]["correct"][counts["groups"].index(group)] >= 1


def test_excerpts_are_cut_between_words():
    words = [f"word{number:03}" for number in range(200)]
    passage, gold, wrong = " ".join(words), "word050 word051", "word051 word052"
    own = records(text=["q"], text_pair=[passage], answers=[(Answer(text=gold, start=passage.index(gold)),)])
    first = passage.index(wrong)
    found = findings_of(task(), own, [{"answer": wrong, "start": first, "end": first + len(wrong)}])
    (mistake,) = found["mistakes"]
    text = mistake["text_pair"]
    assert text.startswith("… word") and text.endswith(" …") and text[2:-2] in passage and len(text) < 300
    assert [text[first:end] for first, end, _ in mistake["marks"]] == [gold, wrong]


def test_pairs_triplets_and_ranks():
    own = records(text=["a", "b", "c"], text_pair=["A", "B", "C"], label=["5", "1", "3"])
    found = findings_of(task(), own, [{"cosine": 0.1}, {"cosine": 0.2}, {"cosine": 0.15}])
    assert found["mistakes"][0]["text_pair"] in ("A", "B") and len(found["points"]["values"]) == 3
    own = records(text=["a", "b"], text_pair=["A", "B"], negatives=[("n",), ("m",)])
    cosines = [{"cosine": 0.9, "cosine_negative": 0.1}, {"cosine": 0.2, "cosine_negative": 0.8}]
    found = findings_of(task(), own, cosines)
    assert found["wrong"] == 1 and found["mistakes"][0]["predicted"] == "m (cosine 0.800)"
    own = records(text=["a", "b", "c"], text_pair=["A", "B", "C"])
    found = findings_of(task(), own, [{"cosine": 0.9, "rank": rank} for rank in (1, 3, 12)])
    assert found["counts"]["series"]["records"] == [1, 1, 0, 1, 0] and found["wrong"] == 2


def test_predictions_of_a_task_of_the_user_show_nothing():
    own = records(text=["a"], label=["1"])
    assert findings_of(task(), own, [{"color": "red"}]) == {}
    assert findings_of(task(), own, [{"choice": 5}]) == {}
