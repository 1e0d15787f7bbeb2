"""BERT's WordPiece in a tokenizer.json, and agreement with the rules of the tokenizers library."""

import json
import unicodedata
from itertools import product
from pathlib import Path

import pytest
from tokenizers import BertWordPieceTokenizer

from bert_jax.tokenization import SPECIAL_PIECES, WordPieceTokenizer, load_tokenizer

# Marks before, after and without a letter, capitals that lower-case to two characters, digits with marks, jamo, a
# ligature, spaces, format characters, CJK of several blocks, emoji, half width. Known to differ: a capital sigma at
# the end of a word, and private characters, which the library drops.
ODD = [
    "Ä ä A\u0308 \u0308a", "İstanbul ISTANBUL ıi", "Ǆ ǅ ǆ ß ẞ ŉ", "οδος Οδο", "क्षि की कि क", "か\u3099が ガガ",
    "한국 \u1112\u1161\u11ab", "ậ ạ\u0302 Ậ", "น้ำ นำ", "ﬁ ﬂ", "a\u00adb\u200bc\u200dd\ufeffe",
    "x\u2028y\u2029z\u00a0w", "中国か中", "\U00020000x", "👩\u200d👩\u200d👧 é👍🏽", "ｱｲ ＡＢ",
    "e\u0301\u0302\u0303", "١٢٣ ۱۲", "q\u0323\u0307", "don't—stop… «x»", "a\x00b\x7fc\ufffdd",
    "naïve façade Ångström", "\u0301", "Å Å",
]  # fmt: skip


def written(folder: Path, **rules: object) -> BertWordPieceTokenizer:
    letters = sorted({char for text in ODD for form in (text, text.lower()) for char in form if not char.isspace()})
    letters = sorted({*letters, *unicodedata.normalize("NFD", "".join(letters))})
    pieces = dict.fromkeys([*SPECIAL_PIECES, *letters, *(f"##{char}" for char in letters)])
    tokenizer = BertWordPieceTokenizer({piece: i for i, piece in enumerate(pieces)}, **rules)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize(("lower", "strip", "split"), [*product([True, False], [True, False, None], [True, False])])
def test_rules_of_the_file_apply(tmp_path: Path, lower: bool, strip: bool | None, split: bool) -> None:
    theirs = written(tmp_path, lowercase=lower, strip_accents=strip, handle_chinese_chars=split)
    ours = load_tokenizer(tmp_path / "tokenizer.json", lower_case=not lower)
    assert isinstance(ours, WordPieceTokenizer)
    (tmp_path / "vocab.txt").write_bytes(ours.vocab_txt)
    assert ours.rules["split_cjk"] == split
    assert ours.strip_accents == (lower if strip is None else strip) and ours.lower_case == lower
    if split:
        same = load_tokenizer(tmp_path / "vocab.txt", lower_case=lower, strip_accents=strip)
        assert same.fingerprint == ours.fingerprint
    for text in ODD:
        ids = ours.encode(text)
        assert ids == ours.encode_with_offsets(text)[0] == ours.encode_batch(["x", text])[1]
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text


def state_of(folder: Path) -> dict:
    written(folder)
    return json.loads((folder / "tokenizer.json").read_text())


def saved(folder: Path, state: dict) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return folder / "tokenizer.json"


def test_older_files_and_added_special_tokens(tmp_path: Path) -> None:
    state = state_of(tmp_path)
    size = len(state["model"]["vocab"])
    del state["model"]["type"]
    state["added_tokens"].append({"id": size, "content": "[EXTRA]", "special": True})
    tokenizer = load_tokenizer(saved(tmp_path, state))
    assert tokenizer.vocab_size == size + 1 and tokenizer.piece_id("[EXTRA]") == size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["normalizer"].update(type="Lowercase"), "rules are not BertNormalizer"),
        (lambda state: state.update(pre_tokenizer=None), "rules are not BertNormalizer"),
        (lambda state: state["normalizer"].update(clean_text=False), "clean_text is false"),
        (lambda state: state["model"].update(continuing_subword_prefix="@@"), "do not begin with ##"),
        (
            lambda state: state["model"]["vocab"].update({"qq\nzz": len(state["model"]["vocab"])}),
            "a line break",
        ),
        (lambda state: state.update(added_tokens=5), "added_tokens is damaged"),
        (lambda state: state["added_tokens"].append({"id": "q", "content": "<s>"}), "added_tokens is damaged"),
        (lambda state: state["added_tokens"].append({"id": 99, "content": ["x"]}), "added_tokens is damaged"),
    ],
)
def test_rules_that_bert_does_not_have(tmp_path: Path, change: object, message: str) -> None:
    state = state_of(tmp_path)
    change(state)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message) as raised:
        load_tokenizer(saved(tmp_path, state))
    assert str(tmp_path / "tokenizer.json") in str(raised.value) and "\n" not in str(raised.value)


def test_added_tokens_are_found_in_a_text(tmp_path: Path) -> None:
    state = state_of(tmp_path)
    size, flags = len(state["model"]["vocab"]), ("single_word", "lstrip", "rstrip", "normalized")
    for number, (content, special) in enumerate((("new york", False), ("[E1]", True))):
        token = {"id": size + number, "content": content, "special": special, **dict.fromkeys(flags, False)}
        state["added_tokens"].append(token)
    tokenizer = load_tokenizer(saved(tmp_path, state))
    assert tokenizer.encode("a new york[E1]b") == [*tokenizer.encode("a"), size, size + 1, *tokenizer.encode("b")]
