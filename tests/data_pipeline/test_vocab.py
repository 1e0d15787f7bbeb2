"""Vocabulary training: deterministic bytes, bounded memory, clear refusals."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import data_pipeline.text.vocabulary_training as vocab
from bert_jax.tokenization import SPECIAL_PIECES, load_tokenizer
from data_pipeline.text.vocabulary_training import count_words, train_vocabulary

KINDS = ["wordpiece", "unigram", "bpe"]
SYLLABLES = ["ka", "to", "mi", "ré", "ßu", "Ло", "да", "st", "ing", "un"]


def make_texts(count: int = 400) -> list[str]:
    """Lines of made-up words in several scripts, with punctuation."""
    randomness = random.Random(3)
    words = ["".join(randomness.choices(SYLLABLES, k=randomness.randrange(1, 5))) for _ in range(200)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    lines = [" ".join(randomness.choices(words, weights, k=12)) + "." for _ in range(count)]
    return [line + (" 中文字" if number % 7 == 0 else "") for number, line in enumerate(lines)]


def output_for(folder: Path, kind: str) -> Path:
    return folder / ("vocab.txt" if kind == "wordpiece" else "tokenizer.model")


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_another_process_writes_the_same_bytes(tmp_path: Path, kind: str) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(make_texts()), encoding="utf-8")
    program = (
        "import sys; from pathlib import Path\n"
        "from data_pipeline.text.vocabulary_training import train_vocabulary\n"
        "texts = Path(sys.argv[1]).read_text(encoding='utf-8').split('\\n')\n"
        "train_vocabulary(iter(texts), kind=sys.argv[2], vocab_size=200, lower_case=True, output=Path(sys.argv[3]))"
    )
    one, other = (output_for(tmp_path / name, kind) for name in ("here", "there"))
    train_vocabulary(iter(make_texts()), kind=kind, vocab_size=200, lower_case=True, output=one)
    words = [sys.executable, "-c", program, str(corpus), kind, str(other)]
    subprocess.run(words, check=True, cwd=Path(__file__).resolve().parents[2])
    assert one.read_bytes() == other.read_bytes()
    assert list(one.parent.iterdir()) == [one] and list(other.parent.iterdir()) == [other]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lower_case", [True, False])
def test_vocabulary_loads_and_knows_the_corpus(tmp_path: Path, kind: str, lower_case: bool) -> None:
    texts = make_texts()
    path = train_vocabulary(
        iter(texts), kind=kind, vocab_size=200, lower_case=lower_case, output=output_for(tmp_path, kind)
    )
    tokenizer = load_tokenizer(path, lower_case=lower_case)
    assert tokenizer.lower_case == lower_case
    assert 100 < tokenizer.vocab_size <= 200
    assert tokenizer.pieces(range(5)) == list(SPECIAL_PIECES)
    ids = tokenizer.encode_batch(texts)
    assert not any(tokenizer.unk_id in row for row in ids)
    characters = sum(len(text.replace(" ", "")) for text in texts)
    assert sum(map(len, ids)) < 0.7 * characters  # pieces are longer than characters


def test_wordpiece_layout_and_order(tmp_path: Path) -> None:
    texts = ["hug hug hug pug pug pun hugs 中中 , ,"]
    path = train_vocabulary(texts, kind="wordpiece", vocab_size=40, lower_case=True, output=tmp_path / "vocab.txt")
    pieces = path.read_text(encoding="utf-8").split("\n")[:-1]
    alphabet = [",", "g", "h", "n", "p", "s", "u", "中"]
    # Characters that always stand alone have no continuation form.
    assert pieces[:20] == [*SPECIAL_PIECES, *alphabet, *("##" + c for c in alphabet[1:-1]), pieces[19]]
    assert pieces[19:21] == ["##ug", "hug"]
    assert "hugs" not in pieces  # pairs seen once are not merged
    assert load_tokenizer(path).vocab_size < 40


def pieces_of(texts: list[str], size: int, folder: Path) -> list[str]:
    """The pieces of a vocabulary after the special ones."""
    path = train_vocabulary(texts, kind="wordpiece", vocab_size=size, lower_case=True, output=folder / "vocab.txt")
    return path.read_text(encoding="utf-8").split("\n")[5:-1]


def test_the_alphabet_takes_what_merged_pieces_do_not_need(tmp_path: Path) -> None:
    """Half of the pieces if words can fill the other half; all of them for Chinese, where a character is a word."""
    han = [chr(0x4E00 + i) for i in range(500)]
    assert pieces_of(["".join(han[: 500 - 5 * i]) for i in range(90)], 105, tmp_path) == han[:100]
    letters = [chr(0x561 + i) for i in range(38)]
    alone = [" ".join(letters[: 38 - i // 2]) for i in range(60)]
    assert pieces_of(alone, 45, tmp_path) == [*letters[:20], *("##" + letter for letter in letters[:20])]
    many = [" ".join(a + b for a in letters[: 38 - i] for b in letters[: 38 - i]) for i in range(30)]
    pieces = pieces_of(many, 45, tmp_path)
    assert pieces[:20] == [*letters[:10], *("##" + letter for letter in letters[:10])]
    assert len(pieces) == 40 and all(len(piece.strip("#")) > 1 for piece in pieces[20:])
    mixed = ["".join(han[: 60 - i]) + " word works " for i in range(50)]
    pieces = pieces_of(mixed, 70, tmp_path)
    assert len(pieces) == 65 and {"word", "works"} <= set(pieces)


def test_rare_characters_and_words_that_hold_them_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab, "_RAREST_CHARACTER", 0.01)
    texts = ["abab abab"] * 100 + ["aþb aþb aþb"]
    path = train_vocabulary(texts, kind="wordpiece", vocab_size=60, lower_case=True, output=tmp_path / "vocab.txt")
    assert path.read_text(encoding="utf-8").split("\n")[5:-1] == ["a", "b", "##a", "##b", "ab", "##ab", "abab"]


def test_counting_is_the_same_when_memory_is_folded_and_drops_the_rarest(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = make_texts(100)
    whole = count_words(texts, lower_case=True)
    assert whole["."] == 100
    monkeypatch.setattr(vocab, "_MAX_CHUNKS", 10)
    assert count_words(texts, lower_case=True) == whole
    monkeypatch.setattr(vocab, "_MAX_WORDS", 20)
    few = count_words(texts, lower_case=True)
    assert len(few) <= 20
    assert set(few) >= {word for word, _ in Counter(whole).most_common(3)}


def test_sampling_keeps_every_kth_line_within_the_bound() -> None:
    lines = [f"{number:010d}" for number in range(1000)]

    def kept(texts: list[str], most: int) -> tuple[list[str], bool]:
        sample = vocab.TextSample(most)
        assert list(sample.passing(texts)) == texts
        return sample.texts, sample.is_whole

    assert kept(lines, 10_000) == (lines, True)
    assert kept(["", *lines], 3000) == (lines[::4], False)
    assert kept(["x" * 50], 10) == (["x" * 50], True)


@pytest.mark.parametrize("kind", KINDS)
def test_user_errors_are_one_clear_line(tmp_path: Path, kind: str) -> None:
    good = output_for(tmp_path, kind)
    cases = [
        ({"texts": iter(["", "  "])}, "the corpus contains no text"),
        ({"vocab_size": 15}, "model.vocab_size: 15 is not allowed; use 16 or more"),
        ({"output": tmp_path / "vocab.bin"}, "vocabulary is a"),
        ({"kind": "syllables"}, "data.tokenizer: 'syllables' is not allowed"),
    ]
    for change, message in cases:
        given = {"texts": ["a b"], "kind": kind, "vocab_size": 50, "lower_case": True, "output": good} | change
        with pytest.raises(ValueError, match=message) as caught:
            train_vocabulary(given.pop("texts"), **given)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_text_that_sentencepiece_cannot_use_is_named(tmp_path: Path) -> None:
    message = r"^SentencePiece cannot train on this corpus: it requires \(all_chars_count\) > \(0\); use "
    with pytest.raises(ValueError, match=message):
        train_vocabulary(["\u200b"], output=tmp_path / "m.model", kind="bpe", vocab_size=100, lower_case=True)


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "vocab.txt"
    output.write_text("old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        train_vocabulary(make_texts(5), kind="wordpiece", vocab_size=50, lower_case=True, output=output)
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


def test_words_are_the_most_frequent_ones(tmp_path):
    texts = ["the Bank, the river", "the bank of the river", "of all"]
    file = train_vocabulary(texts, kind="words", vocab_size=16, lower_case=True, output=tmp_path / "vocab.txt")
    expected = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "bank", "of", "river", ",", "all"]
    assert file.read_text().split("\n") == [*expected, ""]
    with pytest.raises(ValueError, match="contains no text"):
        train_vocabulary(["  "], kind="words", vocab_size=16, lower_case=True, output=file)


@pytest.mark.parametrize("kind", ["wordpiece", "words"])
def test_words_that_are_always_unknown_are_not_counted(tmp_path: Path, kind: str) -> None:
    texts = ["short words and words", "q" * 201, "é" * 300, f"words,{'z' * 250},words"] * 3
    path = train_vocabulary(texts, kind=kind, vocab_size=60, lower_case=True, output=tmp_path / "vocab.txt")
    pieces = path.read_text().split()
    assert "q" not in pieces and "z" not in pieces and "," in pieces
    assert count_words(texts, True)["words"] == 12
    with pytest.raises(ValueError, match="more than 200 characters"):
        train_vocabulary(["acgt" * 75] * 9, kind=kind, vocab_size=60, lower_case=True, output=path)


def test_counts_are_bounded_in_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab, "_MAX_WORD_CHARACTERS", 20_000)
    texts = [f"word {'x' * 150}{number:04d}" for number in range(1000)]
    words = count_words(texts, True)
    assert words["word"] == 1000
    assert sum(map(len, words)) <= 20_000
