"""Folders with only the older tokenizer files of a family: inputs recorded from transformers, written folders."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from golden.family_tokenizer_cases import FIXTURE, LENGTHS, PAIRS, TEXTS, cases, make_folder, sentencepiece_model
from golden.tokenizer_cases import byte_pieces

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec
from bert_jax.inference.engine import Engine
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.interop.tokenizers.folder_files import read_tokenizer_files
from bert_jax.interop.tokenizers.folder_writer import write_tokenizer_files
from bert_jax.tokenization import Tokenizer, build_tokenizer

SIZES = {"hidden_size": 32, "num_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
RECORDED = json.loads(FIXTURE.read_text())


def read(folder: Path) -> tuple[Tokenizer, Any, bytes]:
    config, content, _ = read_tokenizer_files(folder, ReadOptions())
    assert config is not None and content is not None
    return build_tokenizer(config, content, "x"), config, content


@pytest.mark.parametrize("name", cases())
def test_inputs_are_those_of_transformers_and_survive_writing(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path / name, name)
    tokenizer, config, content = read(tmp_path / name)
    wanted = iter(RECORDED[name])
    for length in LENGTHS:
        for a, b in zip(TEXTS, PAIRS, strict=True):
            for other in (None, tokenizer.encode(b)):
                ids, types = next(wanted)
                found = tokenizer.build_inputs(tokenizer.encode(a), other, length)
                assert found[0] == ids, (a, other, length)
                # transformers does not give these types to MPNet and GPT, which have no token types.
                assert found[1] == (types if tokenizer.second_type else [0] * len(ids)), (a, other, length)
    out = tmp_path / "out"
    out.mkdir()
    for types in (0, 2):
        model = ModelConfig(vocab_size=tokenizer.vocab_size, type_vocab_size=types, **SIZES)
        write_tokenizer_files(out, ModelSpec(model=model, heads=HeadsConfig(), tokenizer=config), content)
        settings = json.loads((out / "tokenizer_config.json").read_text())
        with_types = types == 2 and tokenizer.second_type == 1
        assert ("token_type_ids" in settings["model_input_names"]) == with_types
    again, _, same = read(out)
    assert same == content and again.fingerprint == tokenizer.fingerprint
    if name == "gpt2":
        assert settings["eos_token"] == "<|endoftext|>" and "mask_token" not in settings


@pytest.mark.parametrize("name", ["albert", "big_bird", "camembert", "xlm_roberta", "deberta", "mpnet"])
def test_names_of_special_pieces_in_a_text_are_plain_text(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path / name, name)
    tokenizer, _, _ = read(tmp_path / name)
    text = " ".join(["the", *tokenizer.special_pieces, "quick"])
    assert not tokenizer.special[tokenizer.encode(text)].any()
    assert tokenizer.encode_with_masks(f"the {tokenizer.special_pieces[4]}")[-1] == tokenizer.mask_id
    ids = tokenizer.build_inputs(tokenizer.encode("the quick"))[0]
    assert tokenizer.decode(ids).split() == [
        tokenizer.special_pieces[2],
        "the",
        "quick",
        tokenizer.special_pieces[3],
    ]


@pytest.mark.parametrize("name", ["albert", "deberta", "mpnet", "xlm_roberta", "gpt2"])
@pytest.mark.parametrize("types", [0, 1, 2])
def test_no_token_type_exceeds_those_of_the_model(tmp_path: Path, name: str, types: int) -> None:
    make_folder(tmp_path / name, name)
    tokenizer, _, _ = read(tmp_path / name)
    spec = SimpleNamespace(model=SimpleNamespace(type_vocab_size=types), max_length=40)
    loaded: Any = SimpleNamespace(need_tokenizer=lambda: tokenizer, spec=spec)
    pair = Engine.build(loaded, tokenizer.encode("the"), tokenizer.encode("quick"))
    two = name in ("albert", "deberta") and types == 2
    assert len(pair.types) == len(pair.ids) and pair.types[-1] == int(two) and max(pair.types) == int(two)


@pytest.mark.parametrize("name", ["gpt2", "openai_gpt"])
def test_a_tokenizer_without_a_mask_is_refused_where_one_is_needed(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path / name, name)
    tokenizer, _, _ = read(tmp_path / name)
    with pytest.raises(ValueError, match="here: the tokenizer has no mask piece"):
        tokenizer.require_mask("here")
    assert tokenizer.decode(tokenizer.encode("the quick")) == "the quick"


def test_a_model_of_an_unknown_family_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "a", "xlm_roberta")
    (tmp_path / "a" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"set model_type in config\.json to one of camembert, xlm-roberta"):
        read(tmp_path / "a")
    (tmp_path / "a" / "tokenizer_config.json").write_text('{"tokenizer_class": "CamembertTokenizerFast"}')
    assert read(tmp_path / "a")[0].pieces([0]) == ["<s>NOTUSED"]
    (tmp_path / "a" / "sentencepiece.bpe.model").write_bytes(b"garbage")
    with pytest.raises(ValueError, match=r"sentencepiece\.bpe\.model: not a SentencePiece model"):
        read(tmp_path / "a")


def test_an_added_token_must_follow_the_vocabulary(tmp_path: Path) -> None:
    make_folder(tmp_path / "a", "deberta_lower")
    (tmp_path / "a" / "added_tokens.json").write_text('{"[MASK]": 7}')
    with pytest.raises(ValueError, match=r"added token '\[MASK\]' has the id 7, but the vocabulary"):
        read(tmp_path / "a")


def test_tokenizer_json_wins_over_another_tokenizer_model(tmp_path: Path) -> None:
    """As in folders whose tokenizer.model has other special pieces; a model of this library's own wins."""
    make_folder(tmp_path / "a", "xlm_roberta")
    _, _, content = read(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "tokenizer.json").write_bytes(content)
    (tmp_path / "b" / "tokenizer.model").write_bytes(sentencepiece_model([("<unk>", 2), ("<s>", 3), ("</s>", 3)]))
    assert read(tmp_path / "b")[2] == content
    own = sentencepiece_model([("[PAD]", 3), ("[UNK]", 2), ("[CLS]", 3), ("[SEP]", 3), ("[MASK]", 3)])
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "tokenizer.model").write_bytes(own)
    tokenizer, config, _ = read(tmp_path / "c")
    model = ModelConfig(vocab_size=tokenizer.vocab_size, **SIZES)
    write_tokenizer_files(tmp_path / "c", ModelSpec(model=model, heads=HeadsConfig(), tokenizer=config), own)
    assert (tmp_path / "c" / "tokenizer.json").is_file() and read(tmp_path / "c")[0].kind == "sentencepiece"


def test_byte_bpe_of_roberta_is_not_taken_for_gpt2(tmp_path: Path) -> None:
    pieces, merges = byte_pieces()
    (tmp_path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (tmp_path / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    assert read(tmp_path)[0].kind == "byte_bpe"
