"""Training of vocabularies: WordPiece, and SentencePiece unigram or BPE. Equal texts yield byte-identical files."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import Literal

from bert_jax.io.files import write_whole
from bert_jax.io.storage import Location
from bert_jax.tokenization import SPECIAL_PIECES
from bert_jax.tokenization.wordpiece import MAX_CHARS_PER_WORD, chunks, is_cjk, is_punctuation, split_words

MIN_VOCAB_SIZE = 16
# Limits that bound memory: distinct chunks, distinct words and their characters, characters of the SentencePiece
# training sample. Words of more than MAX_CHARS_PER_WORD characters, which are always unknown, are not counted.
_MAX_CHUNKS = 1 << 20
_MAX_WORDS = 1 << 21
_MAX_WORD_CHARACTERS = 1 << 25
_BATCH = 1 << 15  # characters of texts whose chunks are counted together
_USUAL_CHUNK = 16  # characters; only texts with longer chunks on average reach _MAX_WORD_CHARACTERS first
_MAX_CHARACTERS = 25_000_000
# A character gets a piece only if its share of the text is at least this.
_RAREST_CHARACTER = 1e-7


def train_vocabulary(
    texts: Iterable[str],
    *,
    kind: Literal["wordpiece", "words", "unigram", "bpe"],
    vocab_size: int,
    lower_case: bool,
    output: Location,
    strip_accents: bool | None = None,
    split_cjk: bool = True,
) -> Location:
    """Train a vocabulary of at most ``vocab_size`` pieces, including special ones, and write it to ``output``.

    ``texts`` is iterated once; without ``split_cjk``, white space divides all words, Chinese ones too. The file is
    a ``.txt`` for WordPiece and for words, the most frequent ones in the order of their counts, which WordPiece
    reads: any other word is unknown. It is a SentencePiece ``.model`` for the other kinds. It is written
    atomically. A small corpus yields fewer pieces. Raises ``ValueError`` if all texts are empty, if ``vocab_size``
    is too small, or if ``output`` has the wrong suffix.
    """
    suffix = {"wordpiece": ".txt", "words": ".txt", "unigram": ".model", "bpe": ".model"}.get(kind)
    if suffix is None:
        raise ValueError(f"data.tokenizer: {kind!r} is not allowed; use wordpiece, words, unigram or bpe")
    if output.suffix != suffix:
        raise ValueError(f"{output}: the suffix is not allowed; a {kind} vocabulary is a {suffix} file")
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"model.vocab_size: {vocab_size} is not allowed; use {MIN_VOCAB_SIZE} or more")
    if kind in ("wordpiece", "words"):
        train = _train_wordpiece if kind == "wordpiece" else _most_frequent
        pieces = train(count_words(texts, lower_case, strip_accents, split_cjk), vocab_size)
        content = "".join(piece + "\n" for piece in pieces).encode()
    else:
        content = _train_sentencepiece(texts, kind, vocab_size, lower_case)
    write_whole(output, content)
    return output


def count_words(
    texts: Iterable[str], lower_case: bool, strip_accents: bool | None = None, split_cjk: bool = True
) -> Counter[str]:
    """Count the words of ``texts``, split as the tokenizer splits them; rare words are dropped to limit memory.

    Raises ``ValueError`` if there are words, but all of them are longer than the tokenizer's limit.
    """
    words: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    held, size, excess, has_long = list[str](), 0, 0, False
    for text in texts:
        parts = chunks(text, split_cjk)
        if len(text) > MAX_CHARS_PER_WORD and max(map(len, parts), default=0) > MAX_CHARS_PER_WORD:
            has_long = True
            for part in (part for part in parts if len(part) > MAX_CHARS_PER_WORD):
                seen.update(filter(_is_short, split_words(part, lower_case, strip_accents)))
            parts = list(filter(_is_short, parts))
        held += parts
        size += len(text)
        if size < _BATCH:
            continue
        seen.update(held)
        excess += max(0, size - _USUAL_CHUNK * len(held))
        held, size = [], 0
        if len(seen) > _MAX_CHUNKS or excess > _MAX_WORD_CHARACTERS:
            _add_words(words, seen, lower_case, strip_accents)
            excess = 0
    seen.update(held)
    _add_words(words, seen, lower_case, strip_accents)
    if has_long and not words:
        raise ValueError(
            f"data.corpus: every word has more than {MAX_CHARS_PER_WORD} characters and would be [UNK]; put white "
            "space between words, or set data.tokenizer to unigram or bpe"
        )
    return words


def _is_short(word: str) -> bool:
    return len(word) <= MAX_CHARS_PER_WORD


def _add_words(words: Counter[str], seen: Counter[str], lower_case: bool, strip_accents: bool | None) -> None:
    for chunk, count in seen.items():
        for word in split_words(chunk, lower_case, strip_accents):
            if len(word) <= MAX_CHARS_PER_WORD:
                words[word] += count
    seen.clear()
    rarest = 1
    while len(words) > _MAX_WORDS or sum(map(len, words)) > _MAX_WORD_CHARACTERS:
        for word in [word for word, count in words.items() if count <= rarest]:
            del words[word]
        rarest += 1


def _alphabet(words: Counter[str], budget: int) -> tuple[list[str], list[str], bool]:
    """Return the initial and the ``##`` pieces of the most frequent characters, at most ``budget`` in total, and
    whether the budget left characters out."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for char in word:
            counts[char] += count
    threshold = counts.total() * _RAREST_CHARACTER
    initial: list[str] = []
    continuing: list[str] = []
    is_cut = False
    for char, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        is_word = is_punctuation(char) or is_cjk(char)
        budget -= 1 if is_word else 2
        if count < threshold:
            break
        if budget < 0:
            is_cut = True
            break
        if "\ud800" <= char <= "\udfff":  # a lone surrogate cannot be written
            continue
        initial.append(char)
        if not is_word:
            continuing.append("##" + char)
    return sorted(initial), sorted(continuing), is_cut


def _most_frequent(words: Counter[str], vocab_size: int) -> list[str]:
    """Return the special pieces and the most frequent words; words with equal counts are in code-point order."""
    usable = [
        (-count, word) for word, count in words.items() if not any("\ud800" <= char <= "\udfff" for char in word)
    ]
    if not usable:
        raise ValueError("data.corpus: the corpus contains no text to train a vocabulary on; name other files")
    return [*SPECIAL_PIECES, *(word for _, word in sorted(usable)[: vocab_size - len(SPECIAL_PIECES)])]


def _train_wordpiece(words: Counter[str], vocab_size: int) -> list[str]:
    """Train a WordPiece vocabulary; return its pieces by id: special, initial, ``##``, then merged pieces.

    Characters take at most half of the pieces, and more if the words, such as Chinese characters, need fewer.
    """
    if not words:
        raise ValueError("data.corpus: the corpus contains no text to train a vocabulary on; name other files")
    most = vocab_size - len(SPECIAL_PIECES)
    budget = most // 2
    while True:
        initial, continuing, is_cut = _alphabet(words, budget)
        pieces = _merge(words, initial, continuing, vocab_size)
        if not is_cut or len(pieces) >= vocab_size or budget >= most:
            return pieces
        budget = min(most, budget + vocab_size - len(pieces))


def _merge(words: Counter[str], initial: list[str], continuing: list[str], vocab_size: int) -> list[str]:
    """Return the special pieces, the pieces of the alphabet, and merged pieces up to ``vocab_size``."""
    from tokenizers import Tokenizer, models, trainers

    known = set(initial)
    # A word with a character outside the alphabet is always tokenized as [UNK].
    usable = [(word, count) for word, count in sorted(words.items()) if len(word) > 1 and known.issuperset(word)]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    # The trainer numbers the ## pieces in hash order unless they have ids already, as special tokens do.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[*SPECIAL_PIECES, *initial, *continuing],
        continuing_subword_prefix="##",
    )
    occurrences = chain.from_iterable(repeat(word, count) for word, count in usable)
    tokenizer.train_from_iterator(occurrences, trainer)
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


class TextSample:
    """Every k-th nonblank text of those that :meth:`passing` yields. k is the smallest power of two for which at
    most ``max_characters`` characters remain."""

    def __init__(self, max_characters: int) -> None:
        self.texts: list[str] = []
        # True if all nonblank texts are in ``texts``.
        self.is_whole = True
        self._most = max_characters

    def passing(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield all ``texts``, and keep some of them."""
        number, size, step = 0, 0, 1
        for text in texts:
            if text.strip():
                if number % step == 0:
                    self.texts.append(text)
                    size += len(text)
                    while size > self._most and len(self.texts) > 1:
                        self.texts = self.texts[::2]
                        size, step, self.is_whole = sum(map(len, self.texts)), 2 * step, False
                number += 1
            yield text


def _train_sentencepiece(texts: Iterable[str], kind: str, vocab_size: int, lower_case: bool) -> bytes:
    """Train a SentencePiece model and return it serialized; ids 0 to 4 are [PAD] [UNK] [CLS] [SEP] [MASK]."""
    from io import BytesIO

    from sentencepiece import SentencePieceTrainer

    sample = TextSample(_MAX_CHARACTERS)
    for _ in sample.passing(texts):
        pass
    lines = [line.encode("utf-8", "replace").decode() for line in sample.texts]
    if not lines:
        raise ValueError("data.corpus: the corpus contains no text to train a vocabulary on; name other files")
    model = BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=(line.replace("\n", " ") for line in lines),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=_coverage(lines, vocab_size // 2 - len(SPECIAL_PIECES), lower_case),
            normalization_rule_name="nmt_nfkc_cf" if lower_case else "nmt_nfkc",
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece="[PAD]",
            unk_piece="[UNK]",
            bos_piece="[CLS]",
            eos_piece="[SEP]",
            control_symbols=["[MASK]"],
            max_sentence_length=1 << 24,
            num_threads=2,  # fixed, because the trained model depends on the number of threads
            minloglevel=2,
        )
    except RuntimeError as error:
        # "Internal: FILE(LINE) [CONDITION] TEXT"; some errors have no text.
        condition, _, text = str(error).rpartition("]")
        reason = text.strip() or f"it requires {condition.rpartition('[')[2]}"
        raise ValueError(
            f"SentencePiece cannot train on this corpus: {reason}; use other text, or data.tokenizer wordpiece"
        ) from None
    return model.getvalue()


def _coverage(lines: list[str], characters: int, lower_case: bool) -> float:
    """Return the fraction of the text that its ``characters`` most frequent characters cover, at most 0.99999."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line.casefold() if lower_case else line)
    covered = sum(count for _, count in counts.most_common(max(1, characters)))
    return min(0.99999, covered / counts.total())
