"""Outputs to answers: candidates, windows, no answer; the same answers as ``bert-jax predict``."""

import time

import numpy as np
import pytest
from builders import drawn, tiny_model, words
from qa_cases import LETTERS, TOKENIZER, make_task, record, settings

from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.inference.loaded import prepare
from bert_jax.tasks.spans import Passage, SpanPiece, best_spans, span_inputs


def windows(passage, question="y z", max_length=64, **qa):
    encoded = span_inputs(
        TOKENIZER, TOKENIZER.encode(question), Passage.of(TOKENIZER, passage), settings(max_length, **qa)
    )
    return [one.extra for one in encoded], [len(one.ids) for one in encoded]


def piece(window, length, starts, ends, null=(0.0, 0.0), elsewhere=-5.0):
    """Logits of one window; ``starts`` and ``ends``: value of each passage token by its letter."""
    logits = []
    for values, of_null in zip((starts, ends), null, strict=True):
        row = np.full(length, elsewhere, np.float32)
        row[0] = of_null
        tokens = window.passage.ids[window.begin : window.begin + window.count]
        for at, token in enumerate(TOKENIZER.pieces(tokens)):
            row[window.first + at] = values.get(token, elsewhere)
        logits.append(row)
    return SpanPiece(*logits, window)


def best(passage, starts, ends, **qa):
    (window,), (length,) = windows(passage)
    (span,) = best_spans([[piece(window, length, starts, ends)]], settings(**qa))
    return span


def test_candidates_by_hand():
    passage = "a b, c d e f"
    assert best(passage, {"b": 3.0}, {"c": 2.0})[:4] == ("b, c", 2, 6, 5.0)
    # The largest end stands before the largest start.
    assert best(passage, {"d": 3.0, "a": 1.0}, {"b": 3.0, "e": 1.5})[:4] == ("d e", 7, 10, 4.5)
    assert best(passage, {"d": 3.0, "a": 1.0}, {"b": 3.0, "e": 0.5})[:4] == ("a b", 0, 3, 4.0)
    # Of equal length as allowed, and longer.
    assert best(passage, {"a": 3.0}, {"c": 3.0, "b": 1.0}, max_answer_length=4).text == "a b, c"
    assert best(passage, {"a": 3.0}, {"c": 3.0, "b": 1.0}, max_answer_length=3).text == "a b"
    assert best(passage, {"f": 3.0}, {"f": 3.0}, max_answer_length=1).text == "f"


def test_only_the_n_best_are_combined():
    starts, ends = {"d": 3.0, "a": 2.0}, {"b": 3.0, "e": -1.0}
    assert best("a b c d e", starts, ends, n_best=20).text == "a b"
    # d to e has 2, but e is not among the two best ends; c is neither start nor end.
    assert best("a b c d e", {"d": 3.0}, {"b": 3.0, "a": 2.0, "e": 1.0}, n_best=3).text == "d e"
    assert best("a b c d e", {"d": 3.0, "a": -6.0}, {"b": 3.0, "a": 2.0, "e": 1.0}, n_best=2).score == -2.0
    # No two candidates fit together: the best span of all.
    assert best("a b c d e", {"d": 3.0}, {"b": 3.0, "e": 1.0}, n_best=1)[::3] == ("d e", 4.0)


def test_neither_question_nor_special_tokens_are_answers():
    (window,), (length,) = windows("a b c")
    logits = np.full(length, 9.0, np.float32)
    logits[window.first : window.first + 3] = [0, 1, 0]
    (span,) = best_spans([[SpanPiece(logits, logits, window)]], settings(n_best=1))
    assert span == ("b", 2, 3, 2.0, 18.0)


def test_an_answer_begins_only_where_its_window_shows_most_context():
    passage = "a b c d e f g h i j"
    (first, second), lengths = windows(passage, max_length=11, doc_stride=4)
    # f has most context in the second window, e in the first; see test_windows_by_hand.
    cases = [({"f": 5.0}, {"f": 5.0}, "f", 10.0), ({"e": 5.0}, {"f": 5.0}, "e f", 10.0)]
    for starts, ends, text, score in cases:
        for seen in (first, second):
            pieces = [
                piece(window, length, starts if window is seen else {}, ends if window is seen else {})
                for window, length in zip((first, second), lengths, strict=True)
            ]
            (span,) = best_spans([pieces], settings())
            found = (span.text, span.score) == (text, score)
            assert found == (seen is (second if text == "f" else first))
            assert found or span.score < score


def test_against_every_span_one_after_the_other():
    rng = np.random.default_rng(5)
    questions, qa = [], settings(doc_stride=5, n_best=4, max_answer_length=4)
    for size in rng.integers(1, 60, 150):
        passage = " ".join(rng.choice(list(LETTERS), size))
        rows, sizes = windows(passage, max_length=20, doc_stride=5)
        questions.append(
            [SpanPiece(*rng.normal(0, 3, (2, n)).astype(np.float32), w) for w, n in zip(rows, sizes, strict=True)]
        )
    assert max(map(len, questions)) > 5
    unlike = 0
    for pieces, span in zip(questions, best_spans(questions, qa), strict=True):
        limited, unlimited = every_span(pieces, 4, 4), every_span(pieces, 99, 4)
        expected = max(limited or unlimited)
        unlike += expected != max(unlimited)
        assert (span.score, span.start, span.end) == pytest.approx(expected)
        assert span.text == pieces[0].window.passage.text[span.start : span.end]
        assert span.null_score == pytest.approx(min(float(p.starts[0]) + float(p.ends[0]) for p in pieces))
    assert unlike > 0  # the limit shows


def every_span(pieces, n_best, longest):
    """(score, start, end) of all spans by the rules."""
    found = []
    for p in pieces:
        w = p.window
        starts = {i: float(p.starts[w.first + i]) for i in range(w.count) if w.most_context[i]}
        ends = {i: float(p.ends[w.first + i]) for i in range(w.count)}
        for i in sorted(starts, key=lambda i: -starts[i])[:n_best]:
            for j in sorted(ends, key=lambda j: -ends[j])[:n_best]:
                if i <= j < i + longest:
                    begin, end = w.passage.starts[w.begin + i], w.passage.ends[w.begin + j]
                    found.append((starts[i] + ends[j], begin, end))
    return found


def test_many_windows_of_unequal_length():
    rng = np.random.default_rng(0)
    questions, texts = [], []
    for i in range(700):
        words = rng.choice(list(LETTERS), int(rng.integers(3, 30))).tolist()
        at = int(rng.integers(0, len(words)))
        words[at] = "7"
        (window,), (length,) = windows(" ".join(words))
        questions.append([piece(window, length, {"7": 4.0 + i}, {"7": 4.0})])
        texts.append(("7", 2 * at, 8.0 + i))
    spans = best_spans(questions, settings())
    assert [(span.text, span.start, span.score) for span in spans] == texts


# ------------------------------------------------------------------ no answer


def decode(task, passage, starts, ends, nulls):
    one = record("y z", passage, ("a", 0))
    units = task.featurize([one], training=False)
    outputs = []
    for unit, null in zip(units, nulls, strict=True):
        logits = piece(unit.extra, unit.length, starts, ends, (null, 0.5))
        outputs.append({"start_logits": logits.starts, "end_logits": logits.ends})
    (prediction,) = task.decode([one], units, outputs)
    return prediction


@pytest.mark.parametrize(("threshold", "text"), [(2.0, "c"), (1.5, "c"), (1.4, ""), (-3.0, "")])
def test_no_answer_above_the_threshold(threshold, text):
    # Null: the smaller of 8.5 and 6.5; the answer 2 + 3.
    task = make_task(max_length=11, doc_stride=4, no_answer=True, null_threshold=threshold)
    prediction = decode(task, "a b c d e f g h", {"c": 2.0}, {"c": 3.0}, [8.0, 6.0])
    span = {"start": 4, "end": 5} if text else {"start": 0, "end": 0}
    assert prediction == {
        "answer": text, **span, "score": 5.0, "no_answer_score": 6.5, "best_answer": "c"
    }  # fmt: skip


def test_an_answer_is_always_given_where_there_always_is_one():
    task = make_task(max_length=11, doc_stride=4)
    prediction = decode(task, "a b c d e f g h", {"c": 2.0}, {"c": 3.0}, [8.0, 6.0])
    assert prediction == {"answer": "c", "start": 4, "end": 5, "score": 5.0, "no_answer_score": 6.5}


def test_an_empty_passage_has_no_answer():
    for task in (make_task(), make_task(no_answer=True)):
        one = record("q", "  ", ("a", 0))
        units = task.featurize([one], training=False)
        (prediction,) = task.decode([one], units, [{"start_logits": np.ones(4), "end_logits": np.ones(4)}])
        assert (prediction["answer"], prediction["score"], prediction["no_answer_score"]) == ("", 2.0, 2.0)


def test_chinese_scoring_refuses_no_answer():
    with pytest.raises(ValueError, match=r"^qa\.scoring: 'chinese' is not allowed; allowed: english") as caught:
        make_task(no_answer=True, scoring="chinese")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ speed, agreement


@pytest.mark.slow
def test_ten_thousand_questions_take_seconds():
    rng = np.random.default_rng(0)
    (window,), (length,) = windows(" ".join(rng.choice(list(LETTERS), 300)), max_length=384)
    starts, ends = rng.normal(0, 1, (2, 10_000, length)).astype(np.float32)
    questions = [[SpanPiece(*both, window)] for both in zip(starts, ends, strict=True)]
    begun = time.process_time()
    spans = best_spans(questions, settings())
    assert len(spans) == 10_000 and time.process_time() - begun < 10


@pytest.fixture(scope="module")
def loaded():
    """A small model of drawn weights with a span head."""
    pieces = [*words(40), "##x"]
    spec = ModelSpec(
        model=tiny_model(len(pieces), num_layers=1, max_position_embeddings=200),
        heads=HeadsConfig(span=True),
        tokenizer=TokenizerConfig(),
    )  # fmt: skip
    return prepare(drawn(spec, 0.3, pieces))


@pytest.mark.slow
def test_predictions_of_a_saved_model_are_the_same(loaded):
    rng = np.random.default_rng(3)
    texts = [" ".join(f"w{i}x" for i in rng.integers(0, 40, n)) for n in (5, 97, 120, 600)]
    task = make_task(loaded.tokenizer, max_length=200)
    records = [record("w1 w2 w3?", text, ("w", -1)) for text in texts]
    units = task.featurize(records, training=False)
    assert len(units) == 1 + 2 + 2 + 9
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = {name: np.zeros((len(units), 200), np.int32) for name in names}
    for row, unit in enumerate(units):
        for name, values in zip(inputs, (unit.sequences[0].ids, 1, unit.sequences[0].types), strict=True):
            inputs[name][row, : unit.length] = values
    given = loaded.forward(inputs)
    outputs = [
        {name: given[name][row, : unit.length] for name in ("start_logits", "end_logits")}
        for row, unit in enumerate(units)
    ]
    predictions = task.decode(records, units, outputs)
    others = loaded.predict([(one.text, one.text_pair) for one in records])
    for ours, theirs in zip(predictions, others, strict=True):
        assert (ours["answer"], ours["start"], ours["end"]) == (theirs["answer"], theirs["start"], theirs["end"])
        assert ours["answer"] and ours["score"] == pytest.approx(theirs["score"], abs=1e-4)
        assert ours["no_answer_score"] == pytest.approx(theirs["no_answer_score"], abs=1e-4)
