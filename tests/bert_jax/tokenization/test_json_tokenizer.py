"""Tokenizers that run a tokenizer.json as it is: special pieces, frames, offsets, added tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from golden.tokenizer_cases import TEXTS, byte_pieces
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.interop.tokenizers.folder_files import read_tokenizer_files
from bert_jax.interop.tokenizers.folder_writer import write_tokenizer_files
from bert_jax.tokenization import build_tokenizer
from bert_jax.tokenization.json_tokenizer import JsonTokenizer

BERT = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")


def byte_bpe() -> Any:
    """Byte-level BPE like that of ModernBERT: BERT's special pieces after the vocabulary, runs of spaces added."""
    pieces, merges = byte_pieces()
    made = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken("    ", normalized=False)])
    made.add_special_tokens([AddedToken(piece, lstrip=piece == "[MASK]") for piece in BERT])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(piece, made.token_to_id(piece)) for piece in ("[CLS]", "[SEP]")],
    )
    return made


def unigram() -> Any:
    """SentencePiece like that of XLM-R: RoBERTa's special pieces, two separators, token type 0."""
    words = ["\u2581the", "\u2581", "quick", "fox", *"abcdefghijklmnopqrstuvwxyz,.!"]
    vocab = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((word, -3.0) for word in words)]
    made = tokenizers.Tokenizer(models.Unigram([*vocab, ("<mask>", 0.0)], unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True)])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return made


@pytest.mark.parametrize("make", [byte_bpe, unigram])
def test_inputs_are_those_of_the_library(tmp_path: Path, make: Any) -> None:
    library = make()
    (tmp_path / "tokenizer.json").write_text(library.to_str(), encoding="utf-8")
    config, content, _ = read_tokenizer_files(tmp_path, ReadOptions())
    assert config is not None and content == (tmp_path / "tokenizer.json").read_bytes()
    ours = build_tokenizer(config, content, "x")
    assert isinstance(ours, JsonTokenizer)
    for length in (None, 6, 9):
        if length:
            library.enable_truncation(length)
        for a, b in zip(TEXTS, TEXTS[::-1], strict=True):
            one, two = library.encode(a), library.encode(a, b)
            assert ours.build_inputs(ours.encode(a), None, length) == (one.ids, one.type_ids)
            assert ours.build_inputs(ours.encode(a), ours.encode(b), length) == (two.ids, two.type_ids)
    model = ModelConfig(vocab_size=400, hidden_size=32, num_layers=1, num_attention_heads=2, intermediate_size=64)
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer_files(out, ModelSpec(model=model, heads=HeadsConfig(), tokenizer=config), content)
    assert (out / "tokenizer.json").read_bytes() == content
    names = json.loads((out / "tokenizer_config.json").read_text())["model_input_names"]
    assert ("token_type_ids" in names) == (make is byte_bpe)


def test_masks_words_and_offsets() -> None:
    ours = JsonTokenizer(byte_bpe().to_str().encode())
    text = "the quick    fox"
    ids, offsets = ours.encode_with_offsets(text)
    assert ids == ours.encode(text)
    spaces = ours.piece_id("    ")
    assert text[slice(*offsets[ids.index(spaces)])] == "    "
    assert all(not text[start].isspace() for i, (start, _) in zip(ids, offsets, strict=True) if i != spaces)
    assert ours.encode_with_masks("the [MASK]")[-2:] == [ours.encode("the")[-1], ours.mask_id]
    assert ours.mask_id not in ours.encode("the [MASK]")
    assert not ours.continuation[ours.piece_id("\u0120q")] and ours.continuation[ours.piece_id("the")]


def test_files_without_a_frame_or_special_pieces_are_refused() -> None:
    made = byte_bpe()
    made.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    with pytest.raises(ValueError, match=r"x: the post-processor must make \[CLS\] A \[SEP\]"):
        JsonTokenizer(made.to_str().encode(), name="x")
    with pytest.raises(ValueError, match="x: the vocabulary lacks"):
        JsonTokenizer(tokenizers.Tokenizer(models.Unigram([("a", 0.0)])).to_str().encode(), name="x")
