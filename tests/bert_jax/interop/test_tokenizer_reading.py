"""Tokenizer files in: who decides the rules, and damaged or hostile folders."""

import json
from pathlib import Path
from typing import Any

import pytest
from golden.tokenizer_cases import byte_pieces

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, TokenizerConfig
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.interop.tokenizers.folder_files import read_tokenizer_files
from bert_jax.interop.tokenizers.folder_writer import write_tokenizer_files
from bert_jax.interop.tokenizers.json_format import wordpiece_json
from bert_jax.io.untrusted_folder import LARGEST, LARGEST_TOKENIZER
from bert_jax.tokenization import SPECIAL_PIECES, build_tokenizer
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
    assert told.lower_case and any("the option lower_case True replaces" in note for note in notes)
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


# Vocabulary with two added tokens inside (18, 19) and two beyond it (20, 21).
MARKED = [*LOWER[:15], "x", "y", ".", "[E1]", "covid"]
# Text -> its ids in AutoTokenizer (transformers 5.24) with these tokens.
IN_TEXT = {
    "a covid b": [5, 19, 6], "acovidb COVID.": [5, 19, 6, 19, 17], "a [E1]b": [5, 18, 6], "[e1] a": [1, 1, 1, 5],
    "x<url> y": [15, 20, 16], "a <w> b<w>c": [5, 21, 6, 1, 1, 1, 7],
}  # fmt: skip


def added(content: str, number: int, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": number, "content": content, **plain, **flags}


def test_added_tokens_are_found_in_a_text_as_autotokenizer_finds_them(tmp_path: Path) -> None:
    tokens = [
        added("[E1]", 18, special=True), added("covid", 19, normalized=True), added("<url>", 20),
        added("<w>", 21, single_word=True),
    ]  # fmt: skip
    made = state(MARKED, 100)
    made["added_tokens"] += tokens
    decoder = {"do_lower_case": True, "added_tokens_decoder": {str(token["id"]): token for token in tokens}}
    beside = {"added_tokens_json": {"<url>": 20, "<w>": 21}}
    settings = {"additional_special_tokens": ["[E1]"]}
    for name, texts, files in (
        ("json", IN_TEXT, {"tokenizer_json": made}),
        ("both", IN_TEXT, {"tokenizer_json": made, "vocab_txt": MARKED}),
        (
            "decoder", IN_TEXT,
            {"vocab_txt": MARKED, "tokenizer_config_json": decoder},
        ),
        ("beside", ["a [E1]b", "x<url> y"], {"vocab_txt": MARKED, "tokenizer_config_json": settings, **beside}),
        ("map", ["a [E1]b"], {"vocab_txt": MARKED, "special_tokens_map_json": settings, **beside}),
    ):  # fmt: skip
        config, content, notes = read(fill(tmp_path / name, **files))
        tokenizer = build_tokenizer(config, content, name)
        assert {text: tokenizer.encode(text) for text in texts} == {text: IN_TEXT[text] for text in texts}, name
        assert tokenizer.encode("[CLS]") == [1, 1, 1]  # the special pieces of BERT are plain text
        assert all("guessed" in note for note in notes)
        # A folder that is written from this one has the same tokens.
        spec = ModelSpec(model=ModelConfig(), heads=HeadsConfig(), tokenizer=config)
        (out := tmp_path / f"{name}-out").mkdir()
        write_tokenizer_files(out, spec, content)
        assert read(out)[1] == content


def test_tokenizer_json_states_the_ids_and_flags_of_tokens_that_other_files_list(tmp_path: Path) -> None:
    special = {"tokenizer_class": "BertTokenizer", "additional_special_tokens": ["<b>", "<a>"]}
    made, n = state(LOWER, 100), len(LOWER)
    pieces, merges = byte_pieces()
    bpe, k = json.loads(byte_bpe_content(pieces, merges)), len(pieces)
    for one, first in ((made, n), (bpe, k)):
        one["added_tokens"] += [added("<a>", first, lstrip=True), added("<b>", first + 1, rstrip=True)]
    for name, one, first in (("wordpiece", made, n), ("bpe", bpe, k)):
        settings = special if name == "wordpiece" else {**special, "tokenizer_class": "RobertaTokenizer"}
        config, content, _ = read(fill(tmp_path / name, tokenizer_json=one, tokenizer_config_json=settings))
        tokenizer = build_tokenizer(config, content, name)
        assert tokenizer.encode("  <a><b>  ") == [first, first + 1]


@pytest.mark.parametrize("listed", [5, True, "w1"])
def test_special_tokens_that_are_no_list(tmp_path: Path, listed: Any) -> None:
    settings = {"additional_special_tokens": listed, "do_lower_case": True}
    folder = fill(tmp_path, vocab_txt=LOWER, tokenizer_config_json=settings)
    assert read(folder)[0] == TokenizerConfig(file="vocab.txt", lower_case=True)


def test_added_tokens_of_a_byte_level_bpe(tmp_path: Path) -> None:
    pieces, merges = byte_pieces()
    made, n = json.loads(byte_bpe_content(pieces, merges)), len(pieces)
    made["added_tokens"] += [added("<url>", n), added("[E1]", n + 1, special=True)]
    lines = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges)
    table = {piece: i for i, piece in enumerate(pieces)}
    files = {"vocab_json": table, "merges_txt": lines.encode(), "added_tokens_json": {"<url>": n}}
    settings = {"tokenizer_class": "RobertaTokenizer", "additional_special_tokens": ["[E1]"]}
    for folder in (
        fill(tmp_path / "json", tokenizer_json=made),
        fill(tmp_path / "files", tokenizer_config_json=settings, **files),
    ):
        config, content, _ = read(folder)
        tokenizer = build_tokenizer(config, content, "bpe")
        assert tokenizer.encode("a<url>[E1]") == [*tokenizer.encode("a"), n, n + 1]
        assert n not in tokenizer.encode("<s> <mask>")


def test_ids_of_added_tokens_that_contradict_the_vocabulary(tmp_path: Path) -> None:
    for number in (len(LOWER) + 3, 6):
        made = state(LOWER)
        made["added_tokens"].append(added("covid", number))
        with pytest.raises(ValueError, match=r"added token 'covid' has the id \d+, but the vocabulary 15"):
            read(fill(tmp_path, tokenizer_json=made))


def test_classes_with_other_rules_are_refused(tmp_path: Path) -> None:
    japanese = {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "mecab"}
    custom = {"auto_map": {"AutoTokenizer": ["tokenization.MyTokenizer", None]}}
    for name, settings, match in (
        ("japanese", japanese, "BertJapaneseTokenizer splits text by other rules"),
        ("roformer", {"tokenizer_class": "RoFormerTokenizerFast"}, "RoFormerTokenizer splits text by other rules"),
        ("custom", custom, "MyTokenizer"),
    ):
        folder = fill(tmp_path / name, vocab_txt=LOWER, tokenizer_config_json=settings)
        with pytest.raises(ValueError, match=match):
            read(folder)
        assert read(folder, ReadOptions(allow_mismatch=True))[0].file == "vocab.txt"
    basic = {**japanese, "word_tokenizer_type": "basic", "subword_tokenizer_type": "wordpiece"}
    read(fill(tmp_path / "basic", vocab_txt=LOWER, tokenizer_config_json=basic))
    pieces = [*SPECIAL_PIECES, "\u2581a", "\u2581b", "c"]
    with pytest.raises(ValueError, match="SentencePiece model, not of WordPiece"):
        read(fill(tmp_path / "kobert", vocab_txt=pieces), ReadOptions(allow_mismatch=True))
    table = {piece: i for i, piece in enumerate(["<s>", "</s>", "<unk>", "<pad>", "<mask>", "a</w>", "b"])}
    files = {
        "vocab_json": table,
        "merges_txt": b"a b\n",
        "tokenizer_config_json": {"tokenizer_class": "HerbertTokenizer"},
    }
    with pytest.raises(ValueError, match="HerbertTokenizer splits text by other rules than RoBERTa"):
        read(fill(tmp_path / "herbert", **files))


def test_side_of_truncation_and_token_types_are_those_of_the_folder(tmp_path: Path) -> None:
    stored = {"direction": "Left", "max_length": 7, "strategy": "LongestFirst", "stride": 0}
    names = {"model_input_names": ["input_ids", "attention_mask"]}
    for name, files in {
        "config": {"tokenizer_config_json": {"truncation_side": "left", **names}, "vocab_txt": LOWER},
        "json": {"tokenizer_json": state(LOWER) | {"truncation": stored}, "tokenizer_config_json": names},
    }.items():
        config, content, _ = read(fill(tmp_path / name, **files))
        tokenizer = build_tokenizer(config, content, name)
        ids = tokenizer.encode("a b c d e f")
        assert tokenizer.build_inputs(ids, max_length=5) == ([2, *ids[-3:], 3], [0] * 5)
        assert tokenizer.build_inputs(ids, ids[:3], max_length=9) == ([2, *ids[-3:], 3, *ids[:3], 3], [0] * 9)
        (out := tmp_path / f"{name}-out").mkdir()
        write_tokenizer_files(out, ModelSpec(model=ModelConfig(), heads=HeadsConfig(), tokenizer=config), content)
        again = read(out)[0]
        assert (again.truncation_side, again.pair_types) == ("left", False)
    with pytest.raises(ValueError, match="truncation_side is 'middle'"):
        read(fill(tmp_path / "odd", vocab_txt=LOWER, tokenizer_config_json={"truncation_side": "middle"}))


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
    most = LARGEST_TOKENIZER if name == "tokenizer.json" else LARGEST
    with (tmp_path / name).open("wb") as file:
        file.truncate(most + 1)
    read_bytes = Path.read_bytes
    opened: list[str] = []
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path.name) or read_bytes(path))
    with pytest.raises(ValueError, match=f"{most + 1} bytes; a tokenizer file may have at most"):
        read_tokenizer_files(tmp_path, DEFAULT)
    assert name not in opened


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "tokenizer.model", "tokenizer_config.json"])
def test_links_out_of_the_folder_are_not_followed(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(GOOD)
    folder = fill(tmp_path / "model", **({} if name == "vocab.txt" else {"vocab_txt": LOWER}))
    (folder / name).symlink_to(outside)
    with pytest.raises(ValueError, match="points outside the folder"):
        read_tokenizer_files(folder, DEFAULT)
