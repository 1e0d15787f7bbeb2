"""Tokenizer files out, against transformers' AutoTokenizer as recorded and against the tokenizers library."""

import json
import os
import random
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from golden.tokenizer_cases import FIXTURE, LENGTHS, PAIRS, TEXTS, byte_pieces, cases

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, TokenizerConfig
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.interop.tokenizers import tokenizer_state
from bert_jax.interop.tokenizers.folder_files import read_tokenizer_files
from bert_jax.interop.tokenizers.folder_writer import write_tokenizer_files
from bert_jax.interop.tokenizers.json_format import bert_rules, exact_rules, wordpiece_json
from bert_jax.interop.tokenizers.tokenizer_state import newer_letters
from bert_jax.process import exits
from bert_jax.tokenization import (
    SPECIAL_PIECES,
    Tokenizer,
    WordPieceTokenizer,
    build_tokenizer,
    load_tokenizer,
)
from bert_jax.tokenization.byte_bpe import ByteBPETokenizer, byte_bpe_content
from bert_jax.tokenization.tokenizer import longest_first
from data_pipeline.text.vocabulary_training import train_vocabulary

CASES = cases()


def as_input(tokenizer: Tokenizer, a: str, b: str | None, length: int | None) -> list[Any]:
    """A model input in the form of the recorded ones: ids, types, number of tokens, offsets (flat)."""
    ids_a, places_a = tokenizer.encode_with_offsets(a)
    ids_b, places_b = tokenizer.encode_with_offsets(b or "")
    ids, types = tokenizer.build_inputs(ids_a, None if b is None else ids_b, length)
    middle = 2 if tokenizer.kind == "byte_bpe" else 1
    kept_a, kept_b = len(ids_a), len(ids_b)
    if length is not None:
        kept_a, kept_b = (length - 2, 0) if b is None else longest_first(kept_a, kept_b, length - 2 - middle)
    places = [(0, 0), *places_a[:kept_a], (0, 0)]
    if b is not None:
        places += [(0, 0)] * (middle - 1) + [*places_b[:kept_b], (0, 0)]
    kind = None if tokenizer.kind == "byte_bpe" else "".join(map(str, types))
    return [ids, kind, len(ids), [place for pair in places for place in pair]]


def write_case(name: str, folder: Path, *, exact: bool = True) -> tuple[Tokenizer, list[str]]:
    spec, content = CASES[name]
    folder.mkdir(exist_ok=True)
    notes = write_tokenizer_files(folder, spec, content, exact=exact)
    assert spec.tokenizer is not None
    return build_tokenizer(spec.tokenizer, content, name), notes


@pytest.mark.parametrize("name", CASES)
def test_inputs_are_those_of_transformers(name: str) -> None:
    spec, content = CASES[name]
    tokenizer = build_tokenizer(spec.tokenizer, content, name)
    recorded = json.loads(FIXTURE.read_text())[name]
    assert list(recorded) == list(map(str, LENGTHS))
    for length in LENGTHS:
        inputs = [*((text, None) for text in TEXTS), *zip(TEXTS, PAIRS, strict=True)]
        for (a, b), expected in zip(inputs, recorded[str(length)], strict=True):
            assert as_input(tokenizer, a, b, length) == expected, (length, a, b)


@pytest.mark.parametrize("name", CASES)
def test_files_written_are_read_back_and_cut_as_before(name: str, tmp_path: Path) -> None:
    tokenizer, notes = write_case(name, tmp_path / "out")
    config, content, read_notes = read_tokenizer_files(tmp_path / "out", ReadOptions())
    spec, original = CASES[name]
    assert content == original
    assert config == TokenizerConfig(**{**vars(spec.tokenizer), "max_length": spec.max_length})
    assert read_notes == ()
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    other.encode_special_tokens = True
    for text in (*TEXTS, "[MASK] <mask>"):
        row = other.encode(text, add_special_tokens=False)
        assert (row.ids, row.offsets) == tokenizer.encode_with_offsets(text)
    assert any("plain text here" in note for note in notes)
    assert all("\n" not in note for note in notes)


@pytest.mark.parametrize("name", ["cased", "uncased"])
def test_wordpiece_is_written_with_rules_that_every_reader_knows(name: str, tmp_path: Path) -> None:
    tokenizer, notes = write_case(name, tmp_path, exact=False)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    assert state["normalizer"]["type"] == "BertNormalizer"
    assert state["normalizer"]["lowercase"] is tokenizer.lower_case
    assert state["pre_tokenizer"] == {"type": "BertPreTokenizer"}
    config, content, read_notes = read_tokenizer_files(tmp_path, ReadOptions())
    again = build_tokenizer(config or TokenizerConfig(), content or b"", name)
    assert again.fingerprint == tokenizer.fingerprint and read_notes == ()
    (note,) = [note for note in notes if "differently from google-research/bert" in note]
    count = int(re.findall(r"and (\d+) others", note)[0])
    assert 0 < count < 1000
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("The Caf\u00e9, na\u00efve!", "\u4e2d\u6587 \u0419\u043e\u0433", "\uff21 x" + "a" * 150):
        assert other.encode(text, add_special_tokens=False).ids == tokenizer.encode(text)


@pytest.mark.slow
def test_the_characters_that_the_common_rules_treat_otherwise_are_all_of_them() -> None:
    settings = {"lower_case": True, "strip_accents": None, "split_cjk": True}
    found = {*tokenizer_state.otherwise_treated(**settings)}
    assert "\u03a3" in found  # a final sigma
    letters = [
        chr(c) for c in range(33, 0x3100) if unicodedata.category(chr(c)) not in ("Cn", "Co", "Cc", "Cf", "Zs")
    ]
    pieces = [*SPECIAL_PIECES, *letters, *("##" + letter for letter in letters)]
    own = WordPieceTokenizer(pieces, **settings)
    other = tokenizers.Tokenizer.from_str(json.dumps(wordpiece_json(pieces, bert_rules(**settings))))
    for char in letters:
        text = f"a{char} b{char}c {char}"
        if char not in found:
            assert other.encode(text, add_special_tokens=False).ids == own.encode(text), hex(ord(char))


def test_what_is_written_beside_the_vocabulary(tmp_path: Path) -> None:
    write_case("cased", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt",
    ]  # fmt: skip
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings == {
        "model_max_length": 512, "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]",
        "sep_token": "[SEP]", "mask_token": "[MASK]", "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False, "strip_accents": None,
        "tokenize_chinese_chars": True, "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }  # fmt: skip
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    assert list(vocabulary.values()) == list(range(len(vocabulary)))
    assert list(vocabulary)[-1] == "\u2028"
    assert state["padding"] is None and state["truncation"] is None


def test_accents_apart_are_the_stated_exception(tmp_path: Path) -> None:
    tokenizer, notes = write_case("uncased", tmp_path)
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    row = other.encode("e\u0301 x", add_special_tokens=False)
    assert (row.ids, [(0, 2), (3, 4)]) == tokenizer.encode_with_offsets("e\u0301 x")
    assert row.offsets == [(0, 1), (3, 4)]
    assert any("a separate accent" in note for note in notes)
    assert not any("accent" in note for note in write_case("cased", tmp_path / "cased")[1])


def test_a_model_without_tokenizer_writes_nothing(tmp_path: Path) -> None:
    spec = ModelSpec(model=ModelConfig(), heads=HeadsConfig())
    (note,) = write_tokenizer_files(tmp_path, spec, None)
    assert "no tokenizer" in note
    assert not list(tmp_path.iterdir())
    assert read_tokenizer_files(tmp_path, ReadOptions())[:2] == (None, None)


def test_a_file_that_cuts_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_rules(**settings: Any) -> Mapping[str, Any]:
        return exact_rules(**{**settings, "lower_case": False})

    monkeypatch.setattr(tokenizer_state, "exact_rules", other_rules)
    with pytest.raises(exits.Stop, match="sample texts differently") as caught:
        write_case("uncased", tmp_path)
    assert caught.value.code == exits.VERIFICATION_FAILED
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lower_case", "strip_accents", "split_cjk"),
    [
        (True, None, True),
        (False, True, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, None, True), (True, False, False))),
    ],
)
def test_rules_hold_for_characters_of_all_kinds(
    lower_case: bool, strip_accents: bool | None, split_cjk: bool
) -> None:
    """Characters below U+3100, and every 97th of the others; all with the variable."""
    everything = bool(os.environ.get("BERT_JAX_ALL_CODE_POINTS"))
    points = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    if not everything:
        points = [c for c in points if c < 0x3100 or (c % 97 == 0 and c < 0x30000) or c % 1013 == 0]
    letters = [chr(c) for c in points if c < 0x20000 and unicodedata.category(chr(c)) not in ("Cc", "Cf", "Zs")]
    letters = [letter for letter in letters if letter.strip()]
    pieces = [*SPECIAL_PIECES, *letters, *("##" + letter for letter in letters)]
    settings = {"lower_case": lower_case, "strip_accents": strip_accents, "split_cjk": split_cjk}
    own = WordPieceTokenizer(pieces, **settings)
    other = tokenizers.Tokenizer.from_str(json.dumps(wordpiece_json(pieces, exact_rules(**settings))))
    newer = set(newer_letters(TokenizerConfig(**settings)))
    characters = [chr(c) for c in points if chr(c) not in newer]
    texts = [f"{char} a{char} {char}b" for char in characters]
    rows = other.encode_batch_fast(texts, add_special_tokens=False)
    wrong = [
        hex(ord(c)) for c, ids, row in zip(characters, own.encode_batch(texts), rows, strict=True) if ids != row.ids
    ]
    assert wrong == []
    assert len(newer) < 100


def test_settings_of_wordpiece() -> None:
    pieces = [*SPECIAL_PIECES, "cafe", "caf\u00e9", "CAF\u00c9", "CAFE", "\u4e2d", "\u6587", "##\u6587"]

    def cut(text: str, **settings: Any) -> list[str]:
        tokenizer = WordPieceTokenizer(pieces, **settings)
        ids, places = tokenizer.encode_with_offsets(text)
        assert ids == tokenizer.encode(text)
        assert "".join(text[a:b] for a, b in places) == text.replace(" ", "")
        return tokenizer.pieces(ids)

    text = "CAF\u00c9 \u4e2d\u6587"
    assert cut(text, lower_case=True) == ["cafe", "\u4e2d", "\u6587"]
    assert cut(text, lower_case=True, strip_accents=False) == ["caf\u00e9", "\u4e2d", "\u6587"]
    assert cut(text, lower_case=False, split_cjk=False) == ["CAF\u00c9", "\u4e2d", "##\u6587"]
    assert cut(text, lower_case=False, strip_accents=True) == ["CAFE", "\u4e2d", "\u6587"]
    prints = {
        WordPieceTokenizer(pieces, lower_case=lower, strip_accents=strip, split_cjk=split).fingerprint
        for lower in (True, False)
        for strip in (None, True, False)
        for split in (True, False)
    }
    assert len(prints) == 8  # None is as lower_case
    # Token stores and runs hold this value: it must stay.
    expected = "bb8d624b4277a1df441c4df7c044f7a6"
    assert WordPieceTokenizer([*SPECIAL_PIECES, "a"], lower_case=True).fingerprint.startswith(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uncased", "roberta"])
def test_inputs_are_cut_as_the_library_cuts_them(name: str, tmp_path: Path) -> None:
    tokenizer, _ = write_case(name, tmp_path / "out")
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    randomness = random.Random(3)
    for _ in range(400):
        words, others = randomness.randrange(30), randomness.randrange(30)
        a, b = " ".join("x" * words), " ".join("y" * (words if randomness.random() < 0.3 else others))
        length = randomness.randrange(4, 40)
        other.enable_truncation(length)
        row = other.encode(a, b)
        expected = (row.ids, [0] * len(row) if name == "roberta" else row.type_ids)
        assert tokenizer.build_inputs(tokenizer.encode(a), tokenizer.encode(b), length) == expected
        row = other.encode(a)
        assert tokenizer.build_inputs(tokenizer.encode(a), None, length) == (row.ids, row.type_ids)


def test_a_length_below_the_special_tokens_is_refused() -> None:
    tokenizer = WordPieceTokenizer([*SPECIAL_PIECES, "a"], lower_case=True)
    assert tokenizer.build_inputs([5, 5], None, 2) == ([2, 3], [0, 0])
    with pytest.raises(ValueError, match="length 2 is not allowed; allowed: 3"):
        tokenizer.build_inputs([5], [5], 2)


def test_masks_written_in_a_text() -> None:
    own = WordPieceTokenizer([*SPECIAL_PIECES, "a", "b", "[", "]", "mask"], lower_case=True)
    assert own.pieces(own.encode_with_masks("a [MASK]b[MASK]")) == ["a", "[MASK]", "b", "[MASK]"]
    assert own.pieces(own.encode("[MASK]")) == ["[", "mask", "]"]
    roberta = ByteBPETokenizer(byte_bpe_content(*byte_pieces()))
    assert roberta.pieces(roberta.encode_with_masks("The  <mask> the")) == ["The", "<mask>", "\u0120", "the"]
    assert roberta.mask_id not in roberta.encode("The <mask>")


def test_byte_level_bpe() -> None:
    pieces, merges = byte_pieces()
    content = byte_bpe_content(pieces, merges)
    own = ByteBPETokenizer(content)
    assert [own.pad_id, own.unk_id, own.cls_id, own.sep_id] == [1, 3, 0, 2]
    text = "The quack na\u00efve \U0001f600 \ud800"
    ids, places = own.encode_with_offsets(text)
    assert ids == own.encode(text) == own.encode_flat([text, text])[0].tolist()[: len(ids)]
    assert own.decode(ids) == text.replace("\ud800", "\ufffd")
    found = {piece: text[a:b] for piece, (a, b) in zip(own.pieces(ids), places, strict=True)}
    assert (found["The"], found["\u0120q"], found["\u00c3\u00af"]) == ("The", "q", "\u00ef")
    assert (
        own.continuation[own.piece_id("u")] and not own.continuation[[own.piece_id("\u0120q"), own.mask_id]].any()
    )
    assert own.fingerprint != ByteBPETokenizer(byte_bpe_content(pieces, merges, add_prefix_space=True)).fingerprint
    with pytest.raises(ValueError, match="lacks <mask>"):
        byte_bpe_content(pieces[:-1], merges)
    with pytest.raises(ValueError, match="not a byte-level BPE"):
        ByteBPETokenizer(b'{"model": {"type": "Unigram"}}')
    with pytest.raises(ValueError, match="not a valid tokenizer"):
        ByteBPETokenizer(content.replace(b'["th","e"]', b'["th","??"]'))


LINES = [
    "The Quick brown fox jumps over the lazy dog, again and again.",
    "\u00dcbung macht den Meister; na\u00efve caf\u00e9 Stra\u00dfe in M\u00fcnchen.",
    "\u0421\u044a\u0435\u0448\u044c \u0436\u0435 \u0435\u0449\u0451 \u0431\u0443\u043b\u043e\u043a.",
    "\u4eba\u5de5\u667a\u80fd\u662f\u8ba1\u7b97\u673a\u79d1\u5b66\u7684\u4e00\u4e2a\u5206\u652f\u3002",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("lower_case", [True, False])
def test_sentencepiece_models(kind: Any, lower_case: bool, tmp_path: Path) -> None:
    model = tmp_path / "trained.model"
    train_vocabulary(LINES * 4, kind=kind, vocab_size=160, lower_case=lower_case, output=model)
    own = load_tokenizer(model)
    config = TokenizerConfig(file="tokenizer.model", lower_case=own.lower_case)
    size = ModelConfig(vocab_size=own.vocab_size)
    folder = tmp_path / "out"
    folder.mkdir()
    write_tokenizer_files(folder, ModelSpec(model=size, heads=HeadsConfig(), tokenizer=config), model.read_bytes())
    assert (folder / "tokenizer.model").read_bytes() == model.read_bytes()
    assert "do_lower_case" not in json.loads((folder / "tokenizer_config.json").read_text())
    other = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (
        *LINES,
        "",
        "  two  blanks ",
        "Fox\u3000dog \ufb01x \u2028 a\u00a0b",
        "\U0001f600\U0001f600 dog",
        "[UNK",
    ):
        row = other.encode(text, add_special_tokens=False)
        assert (row.ids, row.offsets) == own.encode_with_offsets(text), text
    pair = other.encode("fox dog", "dog")
    assert own.build_inputs(own.encode("fox dog"), own.encode("dog")) == (pair.ids, pair.type_ids)
    read, content, notes = read_tokenizer_files(folder, ReadOptions())
    assert (read, content, notes) == (
        TokenizerConfig(file="tokenizer.model", lower_case=own.lower_case, max_length=512), model.read_bytes(), ()
    )  # fmt: skip
