"""Tokenizer files in: who decides the rules, and damaged or hostile folders."""

import json
from pathlib import Path
from typing import Any

import pytest
from golden.tokenizer_cases import byte_pieces

from bert_jax.config import TokenizerConfig
from bert_jax.interop.exchange import ReadOptions
from bert_jax.interop.tokenizers.folder_files import read_tokenizer_files
from bert_jax.interop.tokenizers.json_format import wordpiece_json
from bert_jax.io.untrusted_folder import LARGEST
from bert_jax.tokenization import SPECIAL_PIECES, WordPieceTokenizer, build_tokenizer
from bert_jax.tokenization.byte_bpe import byte_bpe_content

LOWER = [*SPECIAL_PIECES, *"abcdefgh", "##b", "##c"]
CASED = [*SPECIAL_PIECES, *"abcdeFGH", "##B", "##C"]
DEFAULT = ReadOptions()


def state(pieces: list[str], limit: int = 200, **normalizer: Any) -> dict[str, Any]:
    """A tokenizer.json as published models have it."""
    rules = {
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
            "lowercase": True, **normalizer,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
    }  # fmt: skip
    made = wordpiece_json(pieces, rules)
    made["model"]["max_input_chars_per_word"] = limit
    return made


def fill(folder: Path, **files: Any) -> Path:
    """Files of a folder: ``vocab_txt=[...]`` pieces, ``x_json=...`` objects, bytes as they are."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / ".".join(name.rsplit("_", 1))
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif path.suffix == ".txt":
            path.write_text("".join(piece + "\n" for piece in content), encoding="utf-8")
        else:
            path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def read(folder: Path, options: ReadOptions = DEFAULT) -> tuple[TokenizerConfig, bytes, tuple[str, ...]]:
    config, content, notes = read_tokenizer_files(folder, options)
    assert config is not None and content is not None
    return config, content, notes


def test_vocabulary_alone_is_guessed_and_said(tmp_path: Path) -> None:
    config, content, notes = read(fill(tmp_path / "a", vocab_txt=LOWER))
    assert config == TokenizerConfig()
    assert content == (tmp_path / "a" / "vocab.txt").read_bytes()
    assert any("lower-cased, guessed from the pieces (0 of 10 with capitals" in note for note in notes)
    config, _, notes = read(fill(tmp_path / "b", vocab_txt=CASED))
    assert not config.lower_case
    assert any("cased, guessed from the pieces (5 of 10 with capitals" in note for note in notes)
    config, _, _ = read(fill(tmp_path / "c", vocab_txt=[*LOWER, "\u00e9"]))
    assert (config.lower_case, config.strip_accents) == (True, False)


def test_who_decides_the_case(tmp_path: Path) -> None:
    """The user, then for BERT's class tokenizer_config.json, for others tokenizer.json."""
    settings = {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False}
    folder = fill(tmp_path / "a", vocab_txt=LOWER, tokenizer_config_json=settings)
    assert read(folder)[0] == TokenizerConfig(lower_case=False, strip_accents=True, split_cjk=False)
    told, _, notes = read(folder, ReadOptions(lower_case=True))
    assert told.lower_case and any("lower_case True of the options" in note for note in notes)
    both = fill(
        tmp_path / "b",
        tokenizer_json=state(LOWER),
        tokenizer_config_json={**settings, "tokenizer_class": "BertTokenizer"},
    )
    config, _, notes = read(both)
    assert not config.lower_case
    assert any("do_lower_case False, tokenizer.json lowercase True: False is used" in note for note in notes)
    fill(both, tokenizer_config_json={**settings, "tokenizer_class": "PreTrainedTokenizerFast"})
    config, _, notes = read(both)
    assert config == TokenizerConfig()
    assert any("False, tokenizer.json lowercase True: True is used" in note for note in notes)
    alone = fill(tmp_path / "c", tokenizer_json=state(LOWER, lowercase=False, strip_accents=False))
    assert read(alone)[0] == TokenizerConfig(lower_case=False, strip_accents=False)


def test_vocabulary_of_tokenizer_json_in_id_order(tmp_path: Path) -> None:
    made = state(LOWER, limit=100)
    table = made["model"]["vocab"]
    made["model"]["vocab"] = dict(sorted(table.items(), reverse=True))
    config, content, notes = read(fill(tmp_path, tokenizer_json=made))
    assert content == "".join(piece + "\n" for piece in LOWER).encode()
    assert build_tokenizer(config, content, "x").pieces(range(5)) == list(SPECIAL_PIECES)
    assert any("words of more than 100 and at most 200 characters" in note for note in notes)
    assert not any("101" in note for note in read(fill(tmp_path, tokenizer_json=state(LOWER)))[2])


@pytest.mark.parametrize(
    ("length", "expected"), [(512, 512), (1e30, 0), (None, 0), ("many", 0), (384.0, 384), (True, 0)]
)
def test_longest_input(tmp_path: Path, length: Any, expected: int) -> None:
    folder = fill(tmp_path, vocab_txt=LOWER, tokenizer_config_json={"model_max_length": length})
    assert read(folder)[0].max_length == expected


def test_added_tokens(tmp_path: Path) -> None:
    token = {"content": "covid", "id": len(LOWER), "special": False}
    made = state(LOWER)
    made["added_tokens"].append(token)
    for name, files in {
        "json": {"tokenizer_json": made},
        "beside": {"vocab_txt": LOWER, "added_tokens_json": {"covid": len(LOWER)}},
        "config": {"vocab_txt": LOWER, "tokenizer_config_json": {"added_tokens_decoder": {str(len(LOWER)): token}}},
    }.items():
        folder = fill(tmp_path / name, **files)
        with pytest.raises(ValueError, match="1 added tokens \\('covid'\\)"):
            read(folder)
        config, content, notes = read(folder, ReadOptions(allow_mismatch=True))
        tokenizer = build_tokenizer(config, content, name)
        assert isinstance(tokenizer, WordPieceTokenizer)
        assert tokenizer.pieces([len(LOWER)]) == ["covid"]
        assert any("'covid'" in note for note in notes)
    token["id"] = len(LOWER) + 3
    with pytest.raises(ValueError, match=r"ids of added tokens .*covid"):
        read(fill(tmp_path / "json", tokenizer_json=made))
    made["added_tokens"][-1] = {"content": "b", "id": 6, "special": False}
    assert any(
        "Hugging Face's tokenizers: 'b'" in note for note in read(fill(tmp_path / "in", tokenizer_json=made))[2]
    )


def test_two_vocabularies_that_differ(tmp_path: Path) -> None:
    folder = fill(tmp_path, vocab_txt=LOWER, tokenizer_json=state(CASED))
    with pytest.raises(ValueError, match="different vocabularies"):
        read(folder)
    _, content, notes = read(folder, ReadOptions(allow_mismatch=True))
    assert content == (folder / "vocab.txt").read_bytes()
    assert any("vocab.txt" in note and "tokenizer.json" in note for note in notes)


def test_roberta_from_either_kind_of_files(tmp_path: Path) -> None:
    pieces, merges = byte_pieces()
    expected = byte_bpe_content(pieces, merges)
    table = {piece: i for i, piece in enumerate(pieces)}
    lines = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges)
    config, content, _ = read(fill(tmp_path / "old", vocab_json=table, merges_txt=lines.encode()))
    assert (config, content) == (TokenizerConfig(file="tokenizer.json", lower_case=False), expected)
    made = json.loads(expected)
    made["truncation"] = {"direction": "Right", "max_length": 7, "strategy": "LongestFirst", "stride": 0}
    made["model"]["merges"] = [" ".join(pair) for pair in merges]  # as written by older versions
    assert read(fill(tmp_path / "new", tokenizer_json=made))[1] == expected
    with pytest.raises(ValueError, match=r"merges\.txt: the file is missing"):
        read(fill(tmp_path / "half", vocab_json=table))
    made["pre_tokenizer"] = {"type": "Metaspace"}
    with pytest.raises(ValueError, match="not byte-level like that of RoBERTa"):
        read(fill(tmp_path / "new", tokenizer_json=made))


GOOD = "".join(piece + "\n" for piece in LOWER).encode()
WITHOUT_MODEL = {"normalizer": None}
HOLES = state(LOWER)
HOLES["model"]["vocab"]["a"] = 999
NEGATIVE = state(LOWER)
NEGATIVE["model"]["vocab"]["a"] = -1
OTHER_RULES = state(LOWER) | {"normalizer": {"type": "NFKC"}}
ODD_CASE = {"do_lower_case": "yes"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config_json": {"do_lower_case": True}}, "vocabulary is missing"),
        ({"special_tokens_map_json": {}}, "vocabulary is missing"),
        ({"vocab_txt": b""}, r"vocab\.txt: the file is empty"),
        ({"tokenizer_json": b""}, r"tokenizer\.json: the file is empty"),
        ({"tokenizer_model": b""}, r"tokenizer\.model: the file is empty"),
        ({"vocab_txt": GOOD, "tokenizer_config_json": b""}, r"tokenizer_config\.json: the file is empty"),
        ({"vocab_txt": GOOD + b"\xff\n"}, r"vocab\.txt:16: not valid UTF-8"),
        ({"tokenizer_json": b'{"a": "\xff"}'}, r"tokenizer\.json: not JSON"),
        ({"vocab_json": {"a": 0}, "merges_txt": b"\xff"}, r"merges\.txt: not valid UTF-8"),
        ({"tokenizer_json": b"{"}, r"tokenizer\.json: not JSON"),
        ({"tokenizer_json": b"[" * 200_000}, r"tokenizer\.json: not JSON"),
        ({"tokenizer_json": b"[]"}, r"tokenizer\.json: not a JSON object"),
        ({"tokenizer_json": b'{"model": {"type": "WordPiece", "vocab": {}}}'}, "the vocabulary is empty"),
        ({"tokenizer_json": WITHOUT_MODEL}, "the vocabulary is empty"),
        ({"tokenizer_json": HOLES}, "ids of the vocabulary must be 0 to 14"),
        ({"tokenizer_json": NEGATIVE}, "ids of the vocabulary must be 0 to 14"),
        ({"tokenizer_json": {**state(LOWER), "added_tokens": 3}}, "added_tokens is not a list"),
        ({"tokenizer_json": {"model": {"type": "WordLevel"}}}, "a WordLevel tokenizer is not supported"),
        ({"tokenizer_json": {"model": {"type": "Unigram"}}}, "not a valid tokenizer"),
        ({"tokenizer_json": OTHER_RULES}, "other rules than BERT's"),
        ({"tokenizer_model": b"garbage"}, "not a SentencePiece model"),
        ({"vocab_txt": GOOD, "tokenizer_config_json": ODD_CASE}, "lower_case 'yes' is not allowed"),
        ({"vocab_txt": b"a\nb\n"}, r"lacks \[PAD\]"),
    ],
)  # fmt: skip
def test_what_is_of_no_use_is_one_line(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    folder = fill(tmp_path, **files)
    with pytest.raises(ValueError, match=message) as caught:
        read_tokenizer_files(folder, DEFAULT)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "vocab.txt", "tokenizer.model", "tokenizer_config.json", "vocab.json", "added_tokens.json"],
)
def test_a_giant_file_is_refused_before_it_is_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "added_tokens.json":
        fill(tmp_path, vocab_txt=LOWER)
    with (tmp_path / name).open("wb") as file:
        file.truncate(LARGEST + 1)
    read_bytes = Path.read_bytes
    opened: list[str] = []
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path.name) or read_bytes(path))
    with pytest.raises(ValueError, match=f"{LARGEST + 1} bytes; a tokenizer file may have at most"):
        read_tokenizer_files(tmp_path, DEFAULT)
    assert name not in opened


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "tokenizer.model", "tokenizer_config.json"])
def test_links_out_of_the_folder_are_not_followed(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(GOOD)
    folder = fill(tmp_path / "model", **({} if name == "vocab.txt" else {"vocab_txt": LOWER}))
    (folder / name).symlink_to(outside)
    with pytest.raises(ValueError, match="leads out of the folder"):
        read_tokenizer_files(folder, DEFAULT)
