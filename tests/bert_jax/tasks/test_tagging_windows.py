"""Words as pieces, and the windows in which each is scored."""

import numpy as np
import pytest
from tagging_cases import TOKENIZER, pieces, random_sentences, record

from bert_jax.tasks.task import Encoded
from bert_jax.tasks.word_windows import encode_words, owners, window_spans, word_windows
from bert_jax.tokenization.byte_bpe import ROBERTA_PIECES, ByteBPETokenizer, byte_bpe_content

CLS, SEP, UNK = TOKENIZER.cls_id, TOKENIZER.sep_id, TOKENIZER.unk_id


def windows_of(records, max_length, context=False):
    return list(word_windows(records, TOKENIZER, max_length, context=context))


def words_in(encoded):
    """The words of an input, from its ids: 5 + n is the first piece of word n, CONTINUED a later one."""
    assert encoded.ids[0] == CLS and encoded.ids[-1] == SEP and SEP not in encoded.ids[:-1]
    words = []
    for i in encoded.ids[1:-1]:
        if i < TOKENIZER.vocab_size - 1:
            words.append(str(i - 5))
        else:
            words[-1] += "x"  # a window that begins within a word has none here
    return words


def test_the_first_piece_of_each_word_is_scored():
    ((window,),) = windows_of([record("7xx 8 \u200b 9x")], 16)
    assert list(window.encoded.ids) == [CLS, *pieces(["7xx", "8"]), UNK, *pieces(["9x"]), SEP]
    assert list(window.encoded.types) == [0] * 9
    assert window.words.tolist() == [0, 1, 2, 3]
    assert window.tokens.tolist() == [1, 4, 5, 6]


def test_a_word_that_fits_into_no_window_is_cut():
    several = windows_of([record("1 2" + "x" * 30 + " 3")], 8)[0]
    assert [words_in(w.encoded) for w in several] == [["1"], ["2xxxxx"], ["3"]]
    assert [w.words.tolist() for w in several] == [[0], [1], [2]]


def test_a_record_without_words_has_one_window_that_scores_none():
    several = windows_of([record(""), record("1")], 8)
    assert several[0][0].encoded == Encoded([CLS, SEP], [0, 0])
    assert [len(s) for s in several] == [1, 1] and not len(several[0][0].words)


def test_windows_of_fourteen_words_by_hand():
    starts = np.arange(15)
    spans = window_spans(starts, (0, 14), 6)
    # Half of the room further each; the last one is filled up to the left.
    assert spans == [(0, 6), (3, 9), (6, 12), (8, 14)]
    # Least of the pieces before and after, span by span: 0 1 2 2 1 0; the earlier of equals.
    assert owners(starts, spans, (0, 14)).tolist() == [0] * 5 + [1] * 3 + [2] * 2 + [3] * 4


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("10 11", "7 8 9 10 11 12 13 14"),  # evenly
        ("0 1", "0 1 2 3 4 5 6 7"),  # nothing before: all of it after
        ("1 2", "0 1 2 3 4 5 6 7"),  # one word before
        ("19", "12 13 14 15 16 17 18 19"),  # nothing after: all of it before
        ("10 11 12 13 14 15 16", "10 11 12 13 14 15 16 17"),  # the odd one stands after
    ],
)
def test_context_of_a_document_by_hand(sentence, expected):
    own = sentence.split()
    first, last = int(own[0]), int(own[-1])
    before, after = (" ".join(map(str, numbers)) for numbers in (range(first), range(last + 1, 20)))
    records = [record(words, group="D") for words in (before, sentence, after)]
    window = windows_of(records, 10, context=True)[1][0]
    assert words_in(window.encoded) == expected.split()
    assert window.words.tolist() == list(range(len(own)))
    assert [window.encoded.ids[token] - 5 for token in window.tokens] == list(map(int, own))


def test_context_stays_in_the_document():
    records = [
        record("1 2", group="A"), record("3", group="B"), record("4 5", group="A"), record("6", group="A"),
        record("7"), record("8"),
    ]  # fmt: skip
    seen = [words_in(window.encoded) for (window,) in windows_of(records, 64, context=True)]
    assert seen == [["1", "2"], ["3"], ["4", "5", "6"], ["4", "5", "6"], ["7"], ["8"]]
    alone = [words_in(window.encoded) for (window,) in windows_of(records, 64)]
    assert alone == [list(record.words) for record in records]


def documents(records):
    """The words of the document of every record."""
    found = []
    for i, record_ in enumerate(records):
        first = last = i
        while record_.group and first and records[first - 1].group == record_.group:
            first -= 1
        while record_.group and last + 1 < len(records) and records[last + 1].group == record_.group:
            last += 1
        found.append([word for member in records[first : last + 1] for word in member.words])
    return found


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_invariants_on_random_texts(seed, context):
    rng = np.random.default_rng(seed)
    max_length = int(rng.integers(8, 40))
    room = max_length - 2
    records = random_sentences(seed, 24, [5, 35][seed % 2], [1, 4, room][seed % 3])
    texts = documents(records) if context else [list(record.words) for record in records]
    several = windows_of(records, max_length, context)
    assert len(several) == len(records)
    assert max(map(len, several)) > 1 or seed % 2 == 0  # both cases are there
    for record_, text, windows in zip(records, texts, several, strict=True):
        shown = [words_in(window.encoded) for window in windows]
        for window, words in zip(windows, shown, strict=True):
            assert len(window.encoded.ids) <= max_length
            begin = text.index(words[0])
            assert text[begin : begin + len(words)] == words  # whole words of the document, in order
            end = begin + len(words)
            spare = max_length - len(window.encoded.ids)
            assert not begin or len(pieces([text[begin - 1]])) > spare  # no further word fits
            assert end == len(text) or len(pieces([text[end]])) > spare
            scored = [record_.words[i] for i in window.words]
            assert [window.encoded.ids[token] for token in window.tokens] == [pieces([w])[0] for w in scored]
            assert scored  # else it would be computed for nothing
        assert sorted(np.concatenate([window.words for window in windows])) == list(range(len(record_.words)))
        for number, window in enumerate(windows):
            for word in (record_.words[i] for i in window.words):
                contexts = [context_of(word, words) for words in shown]
                assert contexts[number] == max(contexts) >= 0


def context_of(word, words):
    """Lesser of the numbers of pieces before and after a word, -1 where it is not among ``words``."""
    if word not in words:
        return -1
    at = words.index(word)
    return min(len(pieces(words[:at])), len(pieces(words[at + 1 :])))


def test_a_blank_stands_before_the_words_of_byte_level_vocabularies():
    listed = [*ROBERTA_PIECES, "a", "b", "\u0120", "\u0120a"]
    tokenizer = ByteBPETokenizer(byte_bpe_content(listed, [("\u0120", "a")]))
    assert encode_words(["a", "ba"], tokenizer, 8) == {"a": [8], "ba": [7, 6, 5]}
