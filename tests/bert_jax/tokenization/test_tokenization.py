"""Tokenizers against a plain restatement of google-research/bert's published rules."""

import io
import os
import random
import re
import sys
import unicodedata
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest

from bert_jax.tokenization import SPECIAL_PIECES, Tokenizer, WordPieceTokenizer, load_tokenizer

CJK_BLOCKS = [
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
]  # fmt: skip


def reference_words(text: str, lower_case: bool) -> list[str]:
    """The published rules, step by step over the whole text."""
    cleaned = []
    for char in text:
        code, category = ord(char), unicodedata.category(char)
        if char in "\t\n\r" or category == "Zs":
            cleaned.append(" ")
        elif code in (0, 0xFFFD) or category in ("Cc", "Cf"):
            continue
        elif any(low <= code <= high for low, high in CJK_BLOCKS):
            cleaned.append(f" {char} ")
        else:
            cleaned.append(char)
    parts = []
    for token in "".join(cleaned).split():
        if lower_case:
            token = "".join(
                c for c in unicodedata.normalize("NFD", token.lower()) if unicodedata.category(c) != "Mn"
            )
        for char in token:
            code = ord(char)
            symbol = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
            if symbol or unicodedata.category(char)[0] == "P":
                parts.append(f" {char} ")
            else:
                parts.append(char)
        parts.append(" ")
    return "".join(parts).split()


def reference_ids(text: str, vocabulary: dict[str, int], lower_case: bool) -> list[int]:
    ids = []
    for word in reference_words(text, lower_case):
        found: list[int] | None = []
        rest, prefix = word, ""
        while rest and found is not None:
            for end in range(len(rest), 0, -1):
                if prefix + rest[:end] in vocabulary:
                    found.append(vocabulary[prefix + rest[:end]])
                    rest, prefix = rest[end:], "##"
                    break
            else:
                found = None
        ids += [vocabulary["[UNK]"]] if found is None or len(word) > 200 else found
    return ids


def check_offsets(tokenizer: Tokenizer, text: str, *, expected: list[int]) -> None:
    """Offsets lie inside the text, never decrease, and their text normalises to the piece."""
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == expected
    assert all(0 <= start < end <= len(text) for start, end in offsets)
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(offsets))
    for piece, (start, end) in zip(tokenizer.pieces(ids), offsets, strict=True):
        plain = piece.removeprefix("##") if len(piece) > 2 else piece
        shown = "".join(reference_words(text[start:end], tokenizer.lower_case)).replace("ς", "σ")
        # A Hangul syllable is several letters once decomposed, and a piece may hold only some of them.
        assert piece == "[UNK]" or plain.replace("ς", "σ") in shown, (text, piece, text[start:end])


def code_points(everything: bool) -> list[int]:
    """Every code point below U+20000. Beyond, where long ranges are alike: those with a decomposition, those up to
    3 away from a change of category, and every 101st; or all of them."""
    if everything:
        return list(range(sys.maxunicode + 1))

    def is_like_neighbors(c: int) -> bool:
        near = range(c - 3, min(c + 4, sys.maxunicode + 1))
        return len({unicodedata.category(chr(x)) for x in near}) == 1 and not unicodedata.decomposition(chr(c))

    far = range(0x20000, sys.maxunicode + 1)
    return [*range(0x20000), *(c for c in far if c % 101 == 0 or not is_like_neighbors(c))]


@pytest.fixture(scope="module")
def wide_pieces() -> list[str]:
    """A vocabulary with a piece for most letters, symbols and marks, so that ids show what became of each."""
    ranges = (range(0x21, 0x3400), range(0xA000, 0xAC00), range(0xF900, 0x12000), range(0x1D000, 0x1F000))
    letters = [chr(c) for c in chain.from_iterable(ranges)]
    letters = [c for c in letters if unicodedata.category(c) not in ("Cc", "Cf", "Zs")]
    letters += ["中", "文", "豈", "\ue000", "\U00020000"]
    letters = [c for c in dict.fromkeys(letters) if c.strip() == c and c]
    return [*SPECIAL_PIECES, *letters, *("##" + c for c in letters)]


EVERY = [pytest.param(lower_case, 1, marks=pytest.mark.slow) for lower_case in (True, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("lower_case", "step"), [(True, 7), *EVERY])
def test_every_code_point_alone_after_and_before_a_letter(
    wide_pieces: list[str], lower_case: bool, step: int
) -> None:
    tokenizer = WordPieceTokenizer(wide_pieces, lower_case=lower_case)
    vocabulary = {piece: i for i, piece in enumerate(wide_pieces)}
    points = code_points(everything=bool(os.environ.get("BERT_JAX_ALL_CODE_POINTS")))[::step]
    texts = [f"{chr(c)} a{chr(c)} {chr(c)}b" for c in points]
    ids, lengths = tokenizer.encode_flat(texts)
    ends = np.cumsum(lengths)
    wrong = [
        hex(point)
        for point, text, end, length in zip(points, texts, ends, lengths, strict=True)
        if ids[end - length : end].tolist() != reference_ids(text, vocabulary, lower_case)
    ]
    assert wrong == []
    assert len(np.unique(ids)) > 20_000 / step  # the vocabulary tells characters apart


@pytest.mark.parametrize("lower_case", [True, False])
def test_random_text_of_odd_characters(wide_pieces: list[str], lower_case: bool) -> None:
    tokenizer = WordPieceTokenizer(wide_pieces, lower_case=lower_case)
    vocabulary = {piece: i for i, piece in enumerate(wide_pieces)}
    reordered = "\U0001d165\u302e"  # NFD puts these two into the other order
    odd = "aB Σσς.İı\u0301\u0327\u0323é한中豈\u200b\u00ad\x0b\x0c\x1c\x85\u2028\u3000\t\n\0\ufffd\ud800\ue000ﬁß’ǅ-"
    randomness = random.Random(1)
    for _ in range(3000):
        text = "".join(randomness.choices(odd + reordered, k=randomness.randrange(1, 12)))
        expected = reference_ids(text, vocabulary, lower_case)
        assert tokenizer.encode(text) == expected, repr(text)
        if not set(reordered) <= set(text):
            check_offsets(tokenizer, text, expected=expected)


@pytest.mark.parametrize("letter", ["a", "é"])
def test_words_over_200_characters_are_unknown(letter: str) -> None:
    tokenizer = WordPieceTokenizer([*SPECIAL_PIECES, "a", "##a", "b", "é", "##é"], lower_case=False)
    assert tokenizer.unk_id not in tokenizer.encode(letter * 200)
    text = letter * 201 + " b"
    assert tokenizer.encode(text) == [tokenizer.unk_id, tokenizer.piece_id("b")]
    assert tokenizer.encode_with_offsets(text)[1] == [(0, 201), (202, 203)]


def test_special_tokens_in_the_text_are_plain_text() -> None:
    tokenizer = WordPieceTokenizer([*SPECIAL_PIECES, "[", "]", "mask", "MASK"], lower_case=True)
    assert tokenizer.pieces(tokenizer.encode("[MASK]")) == ["[", "mask", "]"]
    assert tokenizer.special.nonzero()[0].tolist() == [0, 2, 3, 4]


def test_continuation_decode_and_fingerprint() -> None:
    pieces = [*SPECIAL_PIECES, "un", "##able", "cat"]
    tokenizer = WordPieceTokenizer(pieces, lower_case=True)
    assert tokenizer.continuation.tolist() == [False] * 6 + [True, False]
    assert tokenizer.decode(np.array([2, 5, 6, 4, 7, 3])) == "[CLS] unable [MASK] cat [SEP]"
    assert tokenizer.fingerprint == WordPieceTokenizer(pieces, lower_case=True).fingerprint
    assert tokenizer.fingerprint != WordPieceTokenizer(pieces, lower_case=False).fingerprint
    assert tokenizer.fingerprint != WordPieceTokenizer([*pieces[:-2], "cat", "##able"], lower_case=True).fingerprint
    with pytest.raises(ValueError, match="no piece 'dog'"):
        tokenizer.piece_id("dog")


@pytest.mark.parametrize(
    "text",
    [
        "the state's laws, the states' rights, which don't bind us; they'll do so.",
        "[MASK]'s house and [MASK]'s",
        "it cost $1,250 (or 3.5% of 40,000,000) in 1899, 12 of them.",
        "a well-known fact -- the [MASK]-owners of [MASK], 1900.",
        "is it so? no! (see [MASK].)",
        "[MASK]ing and un[MASK] [MASK].",
    ],
)
def test_decoded_text_reads_as_printed(text: str) -> None:
    words = re.findall(r"\[MASK\]|\w+|[^\w\s]", text)
    pieces = [f"##{word}" if word == "ing" else word for word in words]
    tokenizer = WordPieceTokenizer(list(dict.fromkeys([*SPECIAL_PIECES, *pieces])), lower_case=True)
    # A mask does not tell whether its piece continued a word.
    expected = text.replace("un[MASK]", "un [MASK]")
    assert tokenizer.decode([tokenizer.piece_id(piece) for piece in pieces]) == expected


def test_a_continuation_alone_is_decoded_without_its_sign() -> None:
    tokenizer = WordPieceTokenizer([*SPECIAL_PIECES, "##able", "cat"], lower_case=True)
    assert [tokenizer.decode(ids) for ids in ([5], [5, 6], [])] == ["able", "able cat", ""]


def test_batches_equal_single_texts_when_the_cache_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bert_jax.tokenization.wordpiece._CACHE_ENTRIES", 3)
    tokenizer = WordPieceTokenizer([*SPECIAL_PIECES, *"abcdefg", *("##" + c for c in "abcdefg")], lower_case=True)
    texts = ["ab cd ef ga", "", "ab, cd", "gg ff ee dd cc bb aa"] * 3
    expected = [reference_ids(text, tokenizer._ids, True) for text in texts]
    assert tokenizer.encode_batch(texts) == expected
    ids, lengths = tokenizer.encode_flat(texts)
    assert ids.dtype == np.int32
    assert lengths.tolist() == [len(e) for e in expected]
    assert ids.tolist() == [i for e in expected for i in e]
    assert max(len(tokenizer._chunk_ids), len(tokenizer._word_ids)) <= 3


@pytest.mark.slow
def test_caches_hold_no_long_words() -> None:
    tokenizer = WordPieceTokenizer([*SPECIAL_PIECES, "a", "##a"], lower_case=True)
    tokenizer.encode_batch(["a" * 201, "ä" * 5000, "a" * 33, "a" * 32])
    caches = (tokenizer._chunk_ids, tokenizer._word_ids)
    assert [sorted(map(len, cache)) for cache in caches] == [[32], [32]]
    rows = tokenizer.encode_batch([f"{'a' * 150}{number:03d}" for number in range(1000)])
    assert rows == [[tokenizer.unk_id]] * 1000
    assert [len(cache) for cache in caches] == [1, 1]


def test_vocabulary_lines_end_at_newlines_only(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes("\r\n".join(["\ufeff[PAD]", *SPECIAL_PIECES[1:], "\u2028", "中", " x "]).encode() + b"\r\n")
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == 8
    assert tokenizer.encode("x 中\u2028x") == [7, 6, 7]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\n", "empty"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n", r"lacks \[MASK\]; "),
        (b"a\nb\n", r"lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]; "),
        ("\n".join([*SPECIAL_PIECES, "a", "b", "a"]).encode(), r":8: piece 'a' is already on line 6"),
        ("\n".join(SPECIAL_PIECES).encode() + b"\n\xff\n", r":6: not valid UTF-8"),
    ],
)
def test_bad_vocabulary_is_one_clear_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_or_foreign_vocabulary_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such vocabulary file"):
        load_tokenizer(tmp_path / "vocab.txt")
    (tmp_path / "vocab.bin").write_bytes(b"garbage")
    with pytest.raises(ValueError, match=r"'\.bin' is not allowed.*\.txt \(WordPiece\), \.model"):
        load_tokenizer(tmp_path / "vocab.bin")
    (tmp_path / "vocab.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match="not a byte-level BPE"):
        load_tokenizer(tmp_path / "vocab.json")
    (tmp_path / "bad.model").write_bytes(b"garbage")
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        load_tokenizer(tmp_path / "bad.model")


SENTENCES = [
    "The Quick brown fox jumps over the lazy dog, again and again.",
    "Übung macht den Meister; naïve café Straße.",
    "Съешь же ещё этих мягких французских булок.",
    "人工智能是计算机科学的一个分支。",
    "ﬁne  ligature\tand   blanks [MASK] x",
]


def train_sentencepiece(path: Path, **options: object) -> Path:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 5), model_writer=model, vocab_size=150, hard_vocab_limit=False,
        character_coverage=1.0, minloglevel=2, num_threads=1, **options,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return path


BERT_IDS = {
    "pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3, "pad_piece": "[PAD]", "unk_piece": "[UNK]",
    "bos_piece": "[CLS]", "eos_piece": "[SEP]",
}  # fmt: skip


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    rule = "nmt_nfkc_cf"
    return train_sentencepiece(path, control_symbols=["[MASK]"], normalization_rule_name=rule, **BERT_IDS)


def test_sentencepiece_ids_offsets_and_marks(sentencepiece_model: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_model, lower_case=False)
    assert (tokenizer.kind, tokenizer.lower_case) == ("sentencepiece", True)
    assert [tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id] == list(
        range(5)
    )
    batch = tokenizer.encode_batch(SENTENCES)
    ids, lengths = tokenizer.encode_flat(SENTENCES)
    assert ids.tolist() == [i for row in batch for i in row]
    assert lengths.tolist() == [len(row) for row in batch]
    for text, expected in zip(SENTENCES, batch, strict=True):
        found, offsets = tokenizer.encode_with_offsets(text)
        assert found == expected == tokenizer.encode(text)
        assert not tokenizer.special[found].any()
        assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(offsets))
        for piece, (start, end) in zip(tokenizer.pieces(found), offsets, strict=True):
            shown = unicodedata.normalize("NFKC", text[start:end]).lower()
            plain = piece.removeprefix("▁")
            # A mark alone has the first character of the word that it begins.
            alone = piece == "▁" and end == start + 1 and not text[start].isspace()
            assert piece == "[UNK]" or alone or shown == plain or ("ﬁ" in text[start:end] and plain in shown)
            assert start < end
    words = [piece for piece in tokenizer.pieces(batch[0]) if not tokenizer.continuation[tokenizer.piece_id(piece)]]
    assert all(piece.startswith("▁") for piece in words)
    assert tokenizer.decode([2, *tokenizer.encode("brown fox"), 4, 3]) == "[CLS] brown fox [MASK] [SEP]"
    assert tokenizer.encode("a\ud800") == tokenizer.encode("a\ufffd")


def test_sentencepiece_without_berts_pieces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]"):
        load_tokenizer(train_sentencepiece(tmp_path / "plain.model"))
    path = train_sentencepiece(tmp_path / "text_mask.model", user_defined_symbols=["[MASK]"], **BERT_IDS)
    with pytest.raises(ValueError, match=r"wrong type of \[MASK\]"):
        load_tokenizer(path)


LINES = """\
The mayor's aide -- who'd flown in from São Paulo (at 6:45 a.m.!) -- paid $1,299.50 for "nothing".
It cost them 3½ weeks, 20% of the budget & one e-mail: j.o'neil@example.org / http://example.org/~a_b?c=d#e.
Über die Straßen, größtenteils überfüllt, führt der Weg zur »Ärztekammer«; geöffnet: Mo.–Fr., 8–17 Uhr.
Donaudampfschifffahrtsgesellschaftskapitäne müssen ihn kennen, naïve Besucher eher nicht …
Ёжик сказал: «Ну что ж, пойдём?» — и в 1897 году, чуть погодя, ушёл в лес № 7 за грибами.
Й и й, И\u0306 и и\u0306: одна и та же буква, записанная двумя способами; цена — 1 000 ₽.
1986年，他在北京大学（PKU）学习ＡＩ；后来去了“罗店镇”，住了３个月。
𠀀字是罕见的，龍與龙并用；价格：￥50～￥100……《论语》里说：「学而时习之」。
"""


@pytest.mark.parametrize("lower_case", [True, False])
def test_lines_in_four_languages(lower_case: bool) -> None:
    randomness = random.Random(2)
    words = [word for line in LINES.splitlines() for word in reference_words(line, lower_case)]
    parts = {word[:end] for word in words for end in range(1, len(word) + 1) if randomness.random() < 0.4}
    parts |= {f"##{word[i:j]}" for word in words for i in range(1, len(word)) for j in (i + 1, i + 3)}
    table = {piece: i for i, piece in enumerate([*SPECIAL_PIECES, *sorted(parts)])}
    tokenizer = WordPieceTokenizer(list(table), lower_case=lower_case)
    lines = LINES.splitlines()
    encoded = tokenizer.encode_batch(lines)
    for line, ids in zip(lines, encoded, strict=True):
        assert ids == reference_ids(line, table, lower_case), line
        check_offsets(tokenizer, line, expected=ids)
    flat = list(chain.from_iterable(encoded))
    assert len(flat) / 50 < flat.count(tokenizer.unk_id) < len(flat) / 3  # known and unknown words both occur


@pytest.mark.parametrize("vocabulary", ["bert-base-uncased", "bert-base-cased", "bert-base-chinese"])
def test_real_lines_in_four_languages(real_data: Path, vocabulary: str) -> None:
    lower_case = not vocabulary.endswith("-cased")
    tokenizer = load_tokenizer(real_data / "vocabs" / f"{vocabulary}.txt", lower_case=lower_case)
    assert tokenizer.vocab_size == {"uncased": 30522, "cased": 28996, "chinese": 21128}[vocabulary.split("-")[-1]]
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    table = {piece: i for i, piece in enumerate(pieces)}
    corpora = ["en_books/train_20mb.sent", "de_help/train", "ru_lit/train", "zh_wiki/train.sent"]
    count = int(os.environ.get("BERT_JAX_REAL_LINES", "700"))
    for corpus in corpora:
        text = (real_data / "corpus" / f"{corpus}.txt").read_text(encoding="utf-8")
        lines = [line for line in text.split("\n") if line][:count]
        for line, ids in zip(lines, tokenizer.encode_batch(lines), strict=True):
            assert ids == reference_ids(line, table, lower_case), line
            check_offsets(tokenizer, line, expected=ids)


def test_real_sentencepiece_models_are_refused_with_what_they_lack(real_data: Path) -> None:
    models = sorted((real_data / "vocabs" / "sentencepiece").glob("*.model"))
    assert models
    for path in models:
        with pytest.raises(ValueError, match=r"lacks \[PAD\]"):
            load_tokenizer(path)
