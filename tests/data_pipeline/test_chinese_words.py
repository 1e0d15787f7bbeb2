"""Vocabularies of Chinese words: segmented by jieba when they are trained, longest words when texts are read."""

from pathlib import Path

import numpy as np
import pytest

from bert_jax.commands.data import main
from bert_jax.config.pretrain import DataConfig
from bert_jax.contrib.ancestors.formats.word2vec import read_word2vec
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.tokenization import SPECIAL_PIECES, WordPieceTokenizer, build_tokenizer, load_tokenizer
from data_pipeline.build.ensure import ensure_data
from data_pipeline.build.token_store import TokenStore

TEXT = "我们在北京学习人工智能。\n他喜欢吃苹果和香蕉。\n\n中国的首都是北京, iPhone 也在北京。\n苹果公司在美国。\n\n"
PIECES = [*SPECIAL_PIECES, "中国", "中国人", "我", "人", "爱", "hello", "##民", "一二三四"]


def test_runs_are_divided_into_the_longest_words() -> None:
    tokenizer = WordPieceTokenizer(PIECES, lower_case=True, cjk_words=True)
    for text, pieces in (
        ("我爱中国人民", ["我", "爱", "中国人", "[UNK]"]),
        ("中国,hello中国我", ["中国", "[UNK]", "hello", "中国", "我"]),
        ("一二三 一二三四我", ["[UNK]"] * 3 + ["一二三四", "我"]),
        ("中\u3000国", ["[UNK]", "[UNK]"]),
    ):
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert (
            tokenizer.pieces(ids) == pieces
            and ids == tokenizer.encode(text) == tokenizer.encode_flat([text])[0].tolist()
        )
        words = [text[start:end] for start, end in offsets]
        assert [word for word, piece in zip(words, pieces, strict=True) if piece != "[UNK]"] == [
            piece for piece in pieces if piece != "[UNK]"
        ]
    assert tokenizer.rules["cjk_words"] is True


def test_nothing_changes_unless_it_is_asked_for_and_there_are_words() -> None:
    plain = WordPieceTokenizer(PIECES, lower_case=True)
    assert plain.pieces(plain.encode("中国人")) == ["[UNK]", "[UNK]", "人"] and "cjk_words" not in plain.rules
    assert plain.fingerprint != WordPieceTokenizer(PIECES, lower_case=True, cjk_words=True).fingerprint
    characters = [piece for piece in PIECES if len(piece) != 2 and piece not in ("中国人", "一二三四")]
    both = [WordPieceTokenizer(characters, lower_case=True, cjk_words=asked) for asked in (True, False)]
    assert both[0].fingerprint == both[1].fingerprint and "cjk_words" not in both[0].rules


@pytest.mark.parametrize("words", [["中国", "美国", "吃"], ["hello", "人工智能", "人工"]])
def test_a_file_of_chinese_vectors(tmp_path: Path, words: list[str]) -> None:
    rows = np.random.default_rng(0).normal(size=(len(words), 3)).astype(np.float32)
    lines = [f"{word} {' '.join(map(str, row))}" for word, row in zip(words, rows, strict=True)]
    (tmp_path / "vectors.txt").write_text("\n".join([f"{len(words)} 3", *lines]) + "\n")
    bundle = read_word2vec(tmp_path / "vectors.txt", ReadOptions())
    assert bundle.spec.tokenizer is not None and bundle.tokenizer_content is not None
    assert not any("not found" in note for note in bundle.notes)
    tokenizer = build_tokenizer(bundle.spec.tokenizer, bundle.tokenizer_content, "x")
    table = bundle.params["embeddings/word_embeddings/embedding"]
    for word, row in zip(words, rows, strict=True):
        (number,) = tokenizer.encode(word)
        np.testing.assert_array_equal(table[number], row)


@pytest.mark.slow
def test_jieba_makes_words_of_a_vocabulary_and_shards_find_them(tmp_path: Path) -> None:
    pytest.importorskip("jieba")
    documents = TEXT.split("\n\n")[:2] * 6
    (tmp_path / "text.txt").write_text(
        "".join(f"{text}\n第{number}章\n\n" for number, text in enumerate(documents))
    )
    options = ["--word_segmenter", "jieba", "--kind", "words", "--corpus", str(tmp_path / "text.txt")]
    assert main(["vocab", *options, "--vocab_size", "60", "--output", str(tmp_path / "v.txt")]) == 0
    pieces = (tmp_path / "v.txt").read_text().split()
    assert {"北京", "苹果", "中国", "iphone"} <= set(pieces)
    values = {"corpus": (str(tmp_path / "text.txt"),), "shards": str(tmp_path / "shards"), "tokenizer": "words"}
    values |= {"word_segmenter": "jieba", "seq_length": 16, "num_shards": 1, "workers": 1, "next_sentence": "none"}
    data = DataConfig(**values)  # type: ignore[arg-type]
    path = ensure_data(data, vocab_size=60, report=lambda _: None)
    tokenizer = load_tokenizer(path, **data.rules)
    assert path.read_text().split() == pieces
    store = TokenStore(tmp_path / "shards" / "store")
    found = tokenizer.pieces(store.ids(0, store.meta["tokens"]).tolist())
    assert {"北京", "苹果", "中国"} <= set(found) and store.meta["text"]["unknown"] < 20
    with pytest.raises(ValueError, match=r"data\.word_segmenter: vocabulary jieba, config none"):
        ensure_data(DataConfig(**values | {"word_segmenter": "none"}), vocab_size=60, report=lambda _: None)
