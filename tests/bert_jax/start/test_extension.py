"""What a warm start makes of a source: words added to its vocabulary, rows for them, more positions."""

import numpy as np
import pytest
from warm_start_source import PIECES, byte_bpe, tokenizer, write_words

from bert_jax.start.state import extend_positions
from bert_jax.start.vocabulary import (
    compare,
    extend_rows,
    read_words,
    require_wordpiece,
    with_words,
)
from bert_jax.tokenization import SPECIAL_PIECES, WordPieceTokenizer
from bert_jax.tokenization.byte_bpe import ByteBPETokenizer

# ------------------------------------------------------------------ words


def test_words_are_written_as_the_tokenizer_writes_them_and_known_ones_left_out(tmp_path):
    found, notes = read_words(
        write_words(tmp_path, "Covid", "", "cats", "cat", "covid", "R\u00e9sum\u00e9 "), tokenizer()
    )
    assert found == ["covid", "cats", "resume"]
    assert notes == [
        "2 word(s) were normalized by the tokenizer: Covid -> covid, R\u00e9sum\u00e9 -> resume",
        "1 word(s) are already pieces: cat",
    ]
    cased, notes = read_words(write_words(tmp_path, "Covid", "R\u00e9sum\u00e9"), tokenizer(lower_case=False))
    assert (cased, notes) == (["Covid", "R\u00e9sum\u00e9"], [])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["cats", "covid-19"],
            "words.txt:2: 'covid-19' is not one word: the tokenizer splits it into covid | - | 19",
        ),
        (["new york"], "words.txt:1: 'new york' is not one word: the tokenizer splits it into new | york;"),
        (["##ing"], "words.txt:1: '##ing' is not one word: the tokenizer splits it into # | # | ing;"),
        (["\u4e2d\u6587"], "splits it into \u4e2d | \u6587;"),
        (["\u200b"], "words.txt:1: '\\u200b' is not one word: the tokenizer removes all of it"),
        (["a" * 201], "words.txt:1: the word has 201 characters; the maximum is 200"),
        (["", " "], "words.txt has no words; write one word per line"),
    ],
)
def test_a_line_that_can_never_be_found_is_refused(tmp_path, lines, message):
    with pytest.raises(ValueError) as error:
        read_words(write_words(tmp_path, *lines), tokenizer())
    assert message in str(error.value) and "\n" not in str(error.value)


def test_words_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"--add_words: cannot read .*none.txt: No such file"):
        read_words(tmp_path / "none.txt", tokenizer())
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"--add_words: .*latin.txt: not UTF-8 text"):
        read_words(tmp_path / "latin.txt", tokenizer())


def test_words_at_the_end_keep_every_id_and_are_found():
    old = tokenizer()
    extension = with_words(old, ["covid", "cats", "zzz"], in_slots=False)
    assert list(extension.pieces) == [*PIECES, "covid", "cats", "zzz"]
    size = len(PIECES)
    assert extension.made_of == {size: (7, 8), size + 1: (11, 12), size + 2: (old.unk_id,)}
    assert extension.notes == (
        "3 word(s) added, each initialized with the mean of its pieces",
        "1 of them are initialized from [UNK]: zzz",
    )
    new = WordPieceTokenizer(extension.pieces, lower_case=True)
    assert new.encode("the cats") == [10, size + 1]
    # The longest match from the left: a longer word that begins with an added one is cut behind it.
    assert (old.encode("covidien"), new.encode("covidien")) == ([7, 8, 9], [size, 9])


def test_words_in_slots_take_the_first_ones_and_the_size_stays():
    extension = with_words(tokenizer(), ["covid"], in_slots=True)
    assert list(extension.pieces) == [*SPECIAL_PIECES, "covid", *PIECES[6:]]
    assert extension.made_of == {5: (7, 8)}
    with pytest.raises(ValueError, match=r"3 words to add, but the vocabulary has 2 \[unusedN\] pieces"):
        with_words(tokenizer(), ["covid", "cats", "resume"], in_slots=True)


def test_a_given_vocabulary_may_only_add_words():
    old = tokenizer()
    both = compare(old, [*SPECIAL_PIECES, "covid", *PIECES[6:], "cats", "[unused2]"], "v")
    assert both.made_of == {5: (7, 8), len(PIECES): (11, 12)}
    assert compare(old, PIECES, "v").made_of == {}
    for pieces, message in [
        (PIECES[:-1], "v: 16 pieces, but the vocabulary of the model has 17"),
        ([*PIECES[:-1], "covid"], "v: piece 16 is 'covid', but '\u4e2d' in the model"),
        ([*PIECES, "##xx"], "v: piece 17: '##xx' is not one word: the tokenizer splits it into # | # | xx"),
        ([*PIECES, "Covid"], "v: piece 17 is 'Covid'"),
    ]:
        with pytest.raises(ValueError) as error:
            compare(old, pieces, "v")
        assert message in str(error.value) and "\n" not in str(error.value)


def test_new_rows_are_means_and_all_others_bitwise_what_they_were():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(6, 4)).astype(np.float32)
    params = {
        "embeddings/word_embeddings/embedding": table,
        "mlm_head/output_bias": np.arange(6, dtype=np.float32),
        "pooler/bias": np.ones(4, np.float32),
    }
    grown = extend_rows(params, {2: (4, 5), 6: (0, 1, 3)}, 8)
    rows = grown["embeddings/word_embeddings/embedding"]
    np.testing.assert_array_equal(rows[[0, 1, 3, 4, 5]], table[[0, 1, 3, 4, 5]])
    np.testing.assert_allclose(rows[2], (table[4] + table[5]) / 2, rtol=1e-6)
    np.testing.assert_allclose(rows[6], (table[0] + table[1] + table[3]) / 3, rtol=1e-6)
    np.testing.assert_array_equal(rows[7], 0)
    np.testing.assert_allclose(grown["mlm_head/output_bias"], [0, 1, 4.5, 3, 4, 5, 4 / 3, 0])
    assert rows.dtype == np.float32 and grown["pooler/bias"] is params["pooler/bias"]
    encoder_only = {"embeddings/word_embeddings/embedding": table}
    assert list(extend_rows(encoder_only, {}, 6)) == list(encoder_only)


def test_words_need_wordpiece():
    bpe = ByteBPETokenizer(byte_bpe())
    with pytest.raises(ValueError, match="--add_words: byte-level BPE creates pieces by learned merges"):
        require_wordpiece(bpe, "--add_words")


# ------------------------------------------------------------------ positions


def test_tiled_positions_repeat_behind_the_rows_in_front():
    table = np.arange(10, dtype=np.float32).reshape(5, 2)
    np.testing.assert_array_equal(extend_positions(table, 8, 0, "tile")[:, 0], [0, 2, 4, 6, 8, 0, 2, 4])
    np.testing.assert_array_equal(extend_positions(table, 9, 2, "tile")[:, 0], [0, 2, 4, 6, 8, 4, 6, 8, 4])


def test_interpolated_positions_stretch_between_first_and_last():
    table = np.array([[9.0], [0.0], [1.0], [4.0]], np.float32)
    stretched = extend_positions(table, 6, 1, "interpolate")
    np.testing.assert_allclose(stretched[:, 0], [9, 0, 0.5, 1, 2.5, 4])
    assert stretched.dtype == np.float32
    np.testing.assert_array_equal(extend_positions(table, 4, 1, "interpolate"), table)
    np.testing.assert_array_equal(extend_positions(table[:2], 4, 1, "interpolate")[:, 0], [9, 0, 0, 0])
