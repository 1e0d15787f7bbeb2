"""Question answering from labels to losses and scores, and from perfect outputs back to the answers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from qa_cases import CHINESE, LETTERS, TOKENIZER, make_task, perfect, record

from bert_jax.config import HeadsConfig
from bert_jax.inference.batching import Shape, fill_rows, pack_batch
from bert_jax.metrics import value
from bert_jax.model.bert import BertOutput


def scored(task, rows):
    """Values of ``task.scores``; ``rows``: (predicted text, null odds, answers or None)."""
    records = [
        record("q", "", *[(text, 0) for text in golds or ()], labelled=golds is not None) for *_, golds in rows
    ]
    predictions = []
    for text, odds, _ in rows:
        shown = "" if task.config.qa.no_answer and odds > task.config.qa.null_threshold else text
        predictions.append(
            {"answer": shown, "no_answer_score": odds, "best_answer": text, "score": 0.0, "start": 0, "end": 0}
        )
    numbers = task.scored(records)
    scores = task.scores([records[i] for i in numbers], [predictions[i] for i in numbers])
    return {score.name: round(value(score, len(numbers)), 4) for score in scores}


def test_scores_by_hand():
    rows = [
        ("The Cat", 0, ["cat", "dog"]),  # 1, 1
        ("black cat", 0, ["a cat!", "bird"]),  # 0, 2/3
        ("fish", 0, ["cat"]),  # 0, 0
        ("anything", 0, None),  # not labelled, not scored
    ]
    scores = scored(make_task(), rows)
    assert scores == {"f1": 0.5556, "exact": 0.3333}
    assert next(iter(scores)) == "f1"  # it chooses the best checkpoint


def test_scores_with_no_answer_by_hand():
    rows = [
        ("cat", -3.0, ["cat"]),  # right
        ("dog", 1.0, ["dog"]),  # right span, but no answer is predicted
        ("red cat", -1.0, ["cat"]),  # F1 2/3
        ("bird", -2.0, []),  # should be none
        ("bird", 4.0, []),  # is none
        ("bird", 3.0, []),
    ]
    scores = scored(make_task(no_answer=True), rows)
    assert next(iter(scores)) == "f1"
    assert scores["exact"] == 0.5 and scores["f1"] == 0.6111
    assert scores["exact/has_answer"] == 0.3333 and scores["f1/has_answer"] == 0.5556
    assert scores["f1/no_answer"] == 0.6667
    # Answers up to odds of 1: then only the fourth is wrong in F1.
    assert scores["f1/best_threshold"] == 0.7778 and scores["f1/best_threshold_value"] == 1.0
    assert scores["exact/best_threshold"] == 0.6667
    # With that threshold no other one is better.
    scores = scored(make_task(no_answer=True, null_threshold=1.0), rows)
    assert scores["f1"] == scores["f1/best_threshold"] == 0.7778


def test_scores_in_chinese_by_hand():
    rows = [
        ("天地玄黄。", 0, ["天地玄黄", "日"]),  # 1, 1
        ("宇宙洪荒日", 0, ["宇宙洪荒"]),  # 0, 2 * 4 / 9
    ]
    assert scored(make_task(scoring="chinese"), rows) == {"f1": 0.9444, "exact": 0.5}


# ------------------------------------------------------------------ loss


def test_loss_of_packed_windows():
    task = make_task(max_length=11, doc_stride=4, no_answer=True)
    assert task.heads == HeadsConfig(span=True, pooler=False)
    long = record("y z", "a b c d e f g h", ("e f", 8))
    records = [long, record("y", "a b"), record("y", "c d", labelled=False)]
    units = task.featurize(records, training=False)
    assert len(units) == 4 and [unit.weight for unit in units] == [1, 1, 1, 0]
    rows = fill_rows([unit.length for unit in units], (40,), 8)
    batch, places = vars(pack_batch(units, rows, Shape(1, 40, 8), targets=task.targets, pad_id=0)).values()
    logits = np.random.default_rng(0).normal(0, 2, (2, 1, 40)).astype(np.float32)
    expected = 0.0
    for number, row, _, first in places:
        unit = units[number]
        for name, values in zip(task.targets, logits, strict=True):
            target = unit.targets.get(name, 0)
            own = values[row, first : first + unit.length].astype(np.float64)
            expected += unit.weight * (np.log(np.exp(own).sum()) - own[target]) / 2
    assert len(rows) == 1 and len(rows[0]) == 4
    output = BertOutput(
        sequence_output=None, start_logits=jnp.asarray(logits[0]), end_logits=jnp.asarray(logits[1])
    )
    sums = task.loss(output, batch, axis=None)
    np.testing.assert_allclose(sums["loss"], (expected, 3.0), rtol=1e-5)
    assert {name: float(total) for name, total in task.denominators(batch).items()} == {"loss": 3.0}
    empty = {**batch, "weights": np.zeros((1, 8), np.float32)}
    assert float(task.denominators(empty)["loss"]) == 1.0
    given = task.outputs(output, batch)
    assert [level for level, _ in given.values()] == ["token", "token"]
    assert given["start_logits"][1] is output.start_logits and given["end_logits"][1] is output.end_logits


# ------------------------------------------------------------------ there and back


def made_up(seed, count, chinese):
    """Records with answers anywhere: inside words, over punctuation, at both ends of passages of any length."""
    rng = np.random.default_rng(seed)
    records = []
    for number in range(count):
        parts = []
        for _ in range(int(rng.integers(1, 120))):
            if chinese:
                parts.append(str(rng.choice([*CHINESE, "abc", " ", "，", "。"])))
            else:
                word = "".join(rng.choice(list(LETTERS), int(rng.integers(1, 4))))
                parts.append(word + str(rng.choice(["", "", "", ",", ".", "(1)", "'"])) + " ")
        passage = "".join(parts)
        _, offsets = TOKENIZER.encode_with_offsets(passage)
        first = int(rng.integers(0, max(1, len(offsets))))
        last = min(first + int(rng.integers(0, 30)), len(offsets) - 1)
        if not offsets:
            continue
        start, end = offsets[first][0], offsets[last][1]
        # Punctuation alone is nothing to the scores.
        if not any(map(str.isalnum, passage[start:end])):
            continue
        records.append(record("who?", passage, (passage[start:end], start), source=f"file: id {number}"))
    return records


@pytest.mark.slow
@pytest.mark.parametrize("chinese", [False, True])
def test_perfect_outputs_give_perfect_scores(chinese):
    task = make_task(
        max_length=100, doc_stride=32, scoring="chinese" if chinese else "english", no_answer=not chinese
    )
    records = made_up(1, 300, chinese)
    if not chinese:
        records[::3] = [dataclasses.replace(one, answers=()) for one in records[::3]]
    units = task.featurize(records, training=True)
    assert len(units) > len(records) * 1.2
    predictions = task.decode(records, units, perfect(units))
    for one, prediction in zip(records, predictions, strict=True):
        given = [(answer.text, answer.start) for answer in one.answers] or [("", 0)]
        assert [(prediction["answer"], prediction["start"])] == given
        assert one.text_pair[prediction["start"] : prediction["end"]] == prediction["answer"]
    values = {score.name: value(score, len(records)) for score in task.scores(records, predictions)}
    assert values["f1"] == values["exact"] == 1.0
    worse = [{**prediction, "answer": "zzz", "best_answer": "zzz"} for prediction in predictions]
    assert value(task.scores(records, worse)[0], len(records)) < 0.4
