"""Questions and passages as model inputs: windows, most context, answers as tokens."""

import dataclasses

import numpy as np
import pytest
from qa_cases import CHINESE, LETTERS, TOKENIZER, make_task, record, settings

from bert_jax.metrics import value
from bert_jax.records import Answer
from bert_jax.tasks.question_answering import find_answer
from bert_jax.tasks.spans import Passage, span_inputs
from bert_jax.tokenization.byte_bpe import ROBERTA_PIECES, ByteBPETokenizer, byte_bpe_content


def ids(text):
    return TOKENIZER.encode(text)


def test_windows_by_hand():
    task = make_task(max_length=11, doc_stride=4)
    passage = "a b c d e f g h i j"
    units = task.featurize([record("y z", passage, ("e f", 8))], training=True)
    cls, sep = TOKENIZER.cls_id, TOKENIZER.sep_id
    assert [unit.sequences[0].ids for unit in units] == [
        [cls, *ids("y z"), sep, *ids("a b c d e f"), sep],
        [cls, *ids("y z"), sep, *ids("e f g h i j"), sep],
    ]
    assert [unit.sequences[0].types for unit in units] == [[0] * 4 + [1] * 7] * 2
    assert [unit.targets for unit in units] == [{"start": 8, "end": 9}, {"start": 4, "end": 5}]
    # Tokens on both sides: a to f 0 1 2 2 1 0, then e to j 0 1 2 2 1 0.
    assert units[0].extra.most_context.tolist() == [True] * 5 + [False]
    assert units[1].extra.most_context.tolist() == [False] + [True] * 5
    assert [(unit.record, unit.weight, len(unit.sequences)) for unit in units] == [(0, 1.0, 1)] * 2


def test_a_window_without_all_of_the_answer_points_to_the_first_token():
    task = make_task(max_length=11, doc_stride=3)
    units = task.featurize([record("y z", "a b c d e f g h i j", ("f g", 10))], training=True)
    assert [(unit.targets["start"], unit.targets["end"]) for unit in units] == [(0, 0), (6, 7), (0, 0)]
    assert [unit.weight for unit in units] == [1, 1, 1]


@pytest.mark.parametrize("tokens", [0, 1, 5, 6, 7, 23, 330])
# In the last one the last window is so much shorter that a token more of context does not count.
@pytest.mark.parametrize(
    ("max_length", "stride"), [(11, 1), (11, 4), (11, 6), (11, 128), (40, 7), (8, 2), (305, 200)]
)
def test_every_token_has_most_context_in_one_window(tokens, max_length, stride):
    passage = Passage.of(TOKENIZER, " ".join(LETTERS[i % 26] for i in range(tokens)))
    encoded = span_inputs(TOKENIZER, ids("y z"), passage, settings(max_length, doc_stride=stride))
    windows = [one.extra for one in encoded]
    assert all(len(one.ids) <= max_length for one in encoded)
    scored = np.zeros(tokens, int)
    for one, window in zip(encoded, windows, strict=True):
        assert one.ids[window.first : window.first + window.count] == passage.ids[window.begin :][: window.count]
        scored[window.begin : window.begin + window.count] += window.most_context
    assert (scored == 1).all()
    # By the definition, one token after the other.
    for token in range(tokens):
        context = [
            (min(token - w.begin, w.begin + w.count - 1 - token) + 0.01 * w.count, -number)
            for number, w in enumerate(windows)
            if w.begin <= token < w.begin + w.count
        ]
        best = windows[-max(context)[1]]
        assert best.most_context[token - best.begin]
    starts = [window.begin for window in windows]
    assert set(np.diff(starts).tolist()) <= {min(stride, max_length - 5)}
    assert windows[-1].begin + windows[-1].count == tokens
    assert all(window.begin + window.count < tokens for window in windows[:-1])


def test_a_passage_of_a_hundred_thousand_words():
    words = [LETTERS[i % 26] + LETTERS[i % 23] for i in range(100_000)]
    words[77_777] = "answer"
    passage = " ".join(words)
    task = make_task(max_length=384)
    start = passage.index("answer")
    units = task.featurize([record("y z?", passage, ("answer", start))], training=False)
    scored = sum(int(unit.extra.most_context.sum()) for unit in units)
    assert scored == 2 * 99_999 + 6 and 1500 < len(units) < 1600
    holding = [unit for unit in units if unit.targets["start"]]
    assert 2 <= len(holding) <= 3
    for unit in holding:
        assert TOKENIZER.decode(unit.sequences[0].ids[unit.targets["start"] :][:6]) == "answer"


@pytest.mark.parametrize(
    ("max_length", "most", "kept"),
    # At most half of what the special tokens leave, and qa.max_query_length.
    [(64, 64, 30), (64, 10, 10), (8, 64, 2), (300, 64, 64)],
)
def test_a_question_too_long(max_length, most, kept):
    task = make_task(max_length=max_length, max_query_length=most)
    units = task.featurize([record("q " * 200, "a b " * 200, ("a", 0))], training=True)
    for unit in units:
        assert unit.extra.first == kept + 2
        assert unit.sequences[0].ids[: kept + 2] == [TOKENIZER.cls_id, *ids("q " * kept), TOKENIZER.sep_id]
    assert units[0].length == max_length


def test_no_room():
    with pytest.raises(ValueError, match=r"max_length: 3 "):
        span_inputs(TOKENIZER, [], Passage.of(TOKENIZER, "a"), settings(3))


def test_one_token_type():
    (unit,) = make_task(type_vocab_size=1).featurize([record("a", "b", ("b", 0))], training=True)
    assert unit.sequences[0].types == [0] * 5


def test_the_inputs_of_roberta():
    tokenizer = ByteBPETokenizer(byte_bpe_content([*ROBERTA_PIECES, "a", "b", "c", "\u0120"], []))
    (unit,) = make_task(tokenizer).featurize([record("aa", "b c", ("c", 2))], training=True)
    assert unit.sequences[0].ids == [2, 5, 5, 3, 3, 6, 8, 7, 3]
    assert unit.targets["start"] == unit.targets["end"] == 7 and unit.extra.first == 5


# ------------------------------------------------------------------ answers as tokens


def labelled_text(passage, text, start):
    """The text of the span that a one-window example is labelled with."""
    (unit,) = make_task().featurize([record("q", passage, (text, start))], training=True)
    window, targets = unit.extra, unit.targets
    first, last = targets["start"] - window.first, targets["end"] - window.first
    assert 0 <= first <= last < window.count
    return passage[window.passage.starts[first] : window.passage.ends[last]]


@pytest.mark.parametrize(
    ("passage", "text", "start", "labelled"),
    [
        ("He was born (1895-1943).", "1895", 13, "1895"),  # no white space around it
        ("the japanese art", "japan", 4, "japan"),  # ends inside a word, between pieces
        ("the Café, once", "Café", 4, "Café"),
        ("the cafe\u0301 once", "cafe\u0301", 4, "cafe\u0301"),  # an accent belongs to its letter
        (f"{CHINESE}。", CHINESE[3:6], 3, CHINESE[3:6]),
        (f"{CHINESE[:4]}abc{CHINESE[4:]}", CHINESE[3] + "ab", 3, CHINESE[3] + "ab"),
        ("one  two\nthree", " two\nthree", 4, "two\nthree"),  # white space is no token
    ],
)  # fmt: skip
def test_the_labelled_span_has_the_answers_text(passage, text, start, labelled):
    assert labelled_text(passage, text, start) == labelled


def test_an_answer_inside_a_piece_is_the_whole_piece():
    long = "x" * 201  # longer than a word may be: one unknown piece
    assert labelled_text(f"a {long} b", "xxx", 7) == long


@pytest.mark.parametrize(
    ("text", "start", "found"),
    [
        ("cd", 3, (3, 5)),  # where it says
        ("cd", 4, None),  # not there, and any of three may be meant
        ("cd", 9, None),
        ("cd ef", 4, (3, 8)),  # the only one
        ("gh\tcd", 9, (9, 14)),
        ("cd", -1, (3, 5)),  # the first one
        ("d", -1, (4, 5)),
        ("cd", 999, None),
        ("d cd", -1, (13, 17)),
        ("ab  cd", 1, (0, 5)),  # white space of another kind
        ("ef\tgh", -1, (6, 11)),
        ("c.", -1, None),  # plain text, no pattern
        ("zz", 3, None),
        ("", 0, None),
        (" ", 2, None),
    ],
)
def test_where_an_answer_is_found(text, start, found):
    assert find_answer("ab cd ef\ngh cd cd", Answer(text=text, start=start)) == found


def test_occurrences_may_overlap():
    assert find_answer("aaaa", Answer(text="aaa", start=1)) == (1, 4)
    assert find_answer("aaaa", Answer(text="aaa", start=2)) is None


def test_the_first_answer_that_is_there():
    passage = "a b c d"
    (unit,) = make_task().featurize([record("q", passage, ("x y", -1), ("c", 4), ("a", 0))], training=True)
    assert unit.targets == {"start": unit.extra.first + 2, "end": unit.extra.first + 2}


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (record("q", "a \u200b b", ("\u200b", 2)), r"the answer '\\u200b' has no pieces in the vocabulary"),
        (record("q", "a \u200d", ("\u200d", -1)), r"the answer '\\u200d' has no pieces in the vocabulary"),
        (record("q", "a b", labelled=False), "the question has no answers, which training requires"),
    ],
)
def test_what_training_refuses_and_evaluation_bears(one, message):
    task = make_task()
    with pytest.raises(ValueError, match=message) as caught:
        task.featurize([record("q", "a", ("a", 0)), one], training=True)
    assert str(caught.value).startswith("file: id 7: ") and "\n" not in str(caught.value)
    (unit,) = task.featurize([one], training=False)
    assert unit.targets == {} and unit.weight == 0 and unit.extra.count > 0


@pytest.mark.parametrize(("encoding", "size"), [("utf-16-le", 2), ("utf-8", 1)])
@pytest.mark.parametrize(
    ("passage", "text"), [("\U0001f600" * 7 + " bob bob bob", "bob"), ("é\U0001f600é a b a b", "a b")]
)
def test_offsets_in_other_units_are_counted_and_left_out(passage, text, encoding, size):
    """Where the answer stands once, it is found all the same."""
    start = len(passage[: passage.index(text)].encode(encoding)) // size
    lost = dataclasses.replace(record("q", passage, (text, start)), id="lost")
    once = record("q", passage[: passage.index(text) + len(text)], (text, start))
    good = record("q", "a b", ("a", 0))
    task = make_task()
    assert [unit.record for unit in task.featurize([good, lost, once], training=True)] == [0, 2]
    (line,) = task.notes(task.config, {"train": [good, lost, once]})
    assert line.startswith("WARNING: 1 of 3 training questions are excluded") and "(ids lost)" in line
    assert task.notes(task.config, {"train": [good, once]}) == []
    with pytest.raises(ValueError, match=r"^1 of 1 training questions are excluded"):
        task.featurize([lost], training=True)
    # Scored by its text, as in the official script.
    (unit,) = task.featurize([lost], training=False)
    assert unit.weight == 0
    scores = task.scores([lost], [{"answer": text}])
    assert {score.name: value(score, 1) for score in scores} == {"f1": 1, "exact": 1}


def test_questions_without_an_answer():
    one = record("q", "a b c d e f g h i j")
    for training in (True, False):
        units = make_task(max_length=11, no_answer=True).featurize([one], training=training)
        assert [unit.targets for unit in units] == [{"start": 0, "end": 0}] * len(units) and len(units) > 1
        assert all(unit.weight == 1 for unit in units)
        with pytest.raises(ValueError, match=r"^file: id 7: the question has no answer; set qa.no_answer=true"):
            make_task().featurize([one], training=training)


def test_a_question_without_a_passage():
    with pytest.raises(ValueError, match=r"^file: id 7: the question has no passage"):
        make_task().featurize([record("q", None, ("a", 0))], training=False)


def test_units_stand_in_the_order_of_the_records():
    records = [record("q", "a b " * n, ("b", 2)) for n in (1, 40, 3, 50)]
    units = make_task(max_length=20, doc_stride=8).featurize(records, training=True)
    numbers = [unit.record for unit in units]
    assert numbers == sorted(numbers) and set(numbers) == {0, 1, 2, 3}
    # A passage that several questions have is encoded once.
    both = make_task().featurize([record("q", "a b", ("a", 0)), record("r", "a b", ("b", 2))], training=True)
    assert both[0].extra.passage is both[1].extra.passage
