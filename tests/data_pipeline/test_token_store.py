"""The token store against direct tokenization, and the held-out split."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from text_corpora import write_corpus, write_vocab

from bert_jax.config.pretrain import DataConfig
from bert_jax.tokenization import SPECIAL_PIECES, load_tokenizer
from data_pipeline.build import token_store
from data_pipeline.build.token_store import META_NAME, TokenStore, build_store, content_hash, held_out
from data_pipeline.build.workers import Workers
from data_pipeline.text.corpus import list_corpus
from data_pipeline.text.documents import read_documents


def build(folder: Path, corpus: list[Path], vocab: Path, **options: str) -> TokenStore:
    folder.mkdir(exist_ok=True)
    data = DataConfig(corpus=tuple(map(str, corpus)), **options)  # type: ignore[arg-type]
    with Workers(1) as workers:
        return build_store(
            folder, data, vocab, load_tokenizer(vocab), list_corpus(data.corpus), workers, lambda _: None
        )


def test_store_holds_what_the_tokenizer_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "CHUNK_CHARACTERS", 2000)  # many chunks
    vocab = write_vocab(tmp_path / "vocab.txt")
    corpus = [write_corpus(tmp_path / "a.txt", 30), tmp_path / "b.txt"]
    # A document and a sentence without any token are left out.
    corpus[1].write_text("\ufffd\n\nw1a .\n\ufffd\nw1b .\n")
    store = build(tmp_path / "store", corpus, vocab)
    tokenizer = load_tokenizer(vocab)
    sources = list_corpus([str(path) for path in corpus]).sources
    texts = [d for s in sources for d in read_documents(s, line="auto", json_field="text")]
    expected = [[tokenizer.encode(sentence) for sentence in document] for document in texts]
    expected = [[s for s in document if s] for document in expected]
    kept = [(text, document) for text, document in zip(texts, expected, strict=True) if document]
    assert len(kept) == len(texts) - 1 == store.meta["documents"] == len(store.documents) - 1
    for number, (text, document) in enumerate(kept):
        (first, token), (last, end) = store.documents[number : number + 2].tolist()
        borders = store.sentence_ends(first, last)
        assert (borders[0], borders[-1]) == (token, end)
        assert [store.ids(*span).tolist() for span in pairwise(borders)] == document
        assert store.contents[number] == content_hash(text)
    assert store.meta["tokens"] == sum(len(s) for _, document in kept for s in document)
    assert store.ids(0, 1).dtype == np.uint16
    assert not list((tmp_path / "store").glob(".chunks-*"))


def test_chunk_size_does_not_change_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = write_vocab(tmp_path / "vocab.txt")
    corpus = write_corpus(tmp_path / "a.txt", 30)
    build(tmp_path / "one", [corpus], vocab)
    monkeypatch.setattr(token_store, "CHUNK_CHARACTERS", 700)
    build(tmp_path / "many", [corpus], vocab)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "many" / path.name).read_bytes(), path.name


def test_finished_chunks_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "CHUNK_CHARACTERS", 1000)
    vocab = write_vocab(tmp_path / "vocab.txt")
    corpus = write_corpus(tmp_path / "a.txt", 30)
    build(tmp_path / "whole", [corpus], vocab)
    real = token_store.tokenize_chunk
    made: list[str] = []

    def failing(path: Path, *rest: object) -> int:
        if len(made) == 3:
            raise OSError("the power is gone")
        made.append(path.name)
        return real(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(token_store, "tokenize_chunk", failing)
    with pytest.raises(OSError, match="power"):
        build(tmp_path / "killed", [corpus], vocab)
    assert not (tmp_path / "killed" / META_NAME).exists()

    def counting(path: Path, *rest: object) -> int:
        assert path.name not in made
        return real(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(token_store, "tokenize_chunk", counting)
    build(tmp_path / "killed", [corpus], vocab)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "killed" / path.name).read_bytes(), path.name


def test_large_vocabularies_take_32_bits(tmp_path: Path) -> None:
    vocab = write_vocab(tmp_path / "vocab.txt", words=70_000)
    (tmp_path / "a.txt").write_text("w69999 w3\n\nw2\n")
    store = build(tmp_path / "store", [tmp_path / "a.txt"], vocab)
    assert store.ids(0, 1).dtype == np.uint32
    tokenizer = load_tokenizer(vocab)
    assert store.ids(0, 3).tolist() == [tokenizer.piece_id(w) for w in ("w69999", "w3", "w2")]


def test_chinese_words(tmp_path: Path) -> None:
    pytest.importorskip("jieba")
    sentence = "南京市长江大桥很长 tested 了"
    characters = sorted(set(sentence) - set(" tested"))
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_PIECES, *characters, "test", "##ed"]) + "\n")
    (tmp_path / "a.txt").write_text(f"{sentence}\n")
    store = build(tmp_path / "store", [tmp_path / "a.txt"], tmp_path / "vocab.txt", word_segmenter="jieba")
    pieces = load_tokenizer(tmp_path / "vocab.txt").pieces(store.ids(0, 13).tolist())
    words: list[str] = []
    for piece, starts in zip(pieces, store.word_starts(0, store.meta["tokens"]).tolist(), strict=True):
        if starts:
            words.append(piece)
        else:
            words[-1] += piece
    assert words == ["南京市", "长江大桥", "很长", "test##ed", "了"]


@pytest.mark.parametrize("name", ["word_starts", "ids", "sentences", "documents", "contents"])
def test_a_store_that_is_not_whole_is_refused(tmp_path: Path, name: str) -> None:
    """store.json says which files there are: without its word starts a store would pass for one without words."""
    pytest.importorskip("jieba")
    write_vocab(tmp_path / "vocab.txt")
    corpus = write_corpus(tmp_path / "a.txt", 5)
    store = build(tmp_path / "store", [corpus], tmp_path / "vocab.txt", word_segmenter="jieba")
    assert store.has_word_starts
    path = tmp_path / "store" / f"{name}.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"damaged: {name}\.bin has [\d,]+ bytes instead of .*delete this folder"):
        TokenStore(tmp_path / "store")
    path.unlink()
    with pytest.raises(ValueError, match=rf"damaged: {name}\.bin is missing"):
        TokenStore(tmp_path / "store")


def test_a_store_without_words_ignores_a_stray_file(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.txt", 5)
    store = build(tmp_path / "store", [corpus], write_vocab(tmp_path / "vocab.txt"))
    (tmp_path / "store" / "word_starts.bin").write_bytes(bytes(store.meta["tokens"]))
    assert not TokenStore(tmp_path / "store").has_word_starts
    (tmp_path / "store" / META_NAME).write_text("{")
    with pytest.raises(ValueError, match=r"store\.json is not readable"):
        TokenStore(tmp_path / "store")


def test_a_corpus_without_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\u200b\n")
    with pytest.raises(ValueError, match="yields no token"):
        build(tmp_path / "store", [tmp_path / "a.txt"], write_vocab(tmp_path / "vocab.txt"))


def test_held_out_share_and_seed() -> None:
    contents = np.random.default_rng(0).integers(0, 2**63, 20_000).astype(np.uint64)
    held = held_out(contents, seed=1, fraction=0.02)
    assert abs(held.mean() - 0.02) < 3 * np.sqrt(0.02 * 0.98 / 20_000)
    other = held_out(contents, seed=2, fraction=0.02)
    assert (held & other).mean() < 0.002
    # A document's side does not depend on the others.
    np.testing.assert_array_equal(held_out(contents[5000:], seed=1, fraction=0.02), held[5000:])


def test_duplicates_stay_together() -> None:
    contents = np.random.default_rng(0).integers(0, 50, 1000).astype(np.uint64)
    held = held_out(contents, seed=1, fraction=0.3)
    assert 0 < held.sum() < 1000
    assert not set(contents[held].tolist()) & set(contents[~held].tolist())


@pytest.mark.parametrize("fraction", [1e-9, 0.02, 0.5, 0.999])
@pytest.mark.parametrize(("documents", "fewest"), [(1, 0), (2, 1), (3, 1), (4, 2), (50, 2)])
def test_neither_side_is_empty(documents: int, fewest: int, fraction: float) -> None:
    for seed in range(5):
        held = held_out(np.arange(documents, dtype=np.uint64), seed=seed, fraction=fraction)
        assert held.sum() >= fewest
        assert (~held).sum() >= max(fewest, 1)
    assert not held_out(np.arange(documents, dtype=np.uint64), seed=0, fraction=0.0).any()
