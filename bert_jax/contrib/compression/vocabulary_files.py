"""Find the pieces that each kind of vocabulary file needs in addition to the pieces of texts, and remove the
others."""

import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from bert_jax.io.protobuf import read_fields, read_varint, write_varint
from bert_jax.tokenization import Tokenizer

_SPACE = "\u2581"
_CONTINUES = "##"
_SLOT = re.compile(r"\[unused\d+\]")
# Fields of SentencePiece's ModelProto, SentencePiece and TrainerSpec (sentencepiece_model.proto), with wire types.
_PIECES, _TRAINER = 1 << 3 | 2, 2 << 3 | 2
_SCORE, _TYPE = 2 << 3 | 5, 3 << 3
_MODEL_TYPE, _VOCAB_SIZE, _IDS = 3 << 3, 4 << 3, tuple(number << 3 for number in (40, 41, 42, 43))
_NORMAL, _UNUSED = 1, 5
_UNIGRAM, _BPE = 1, 2

# The rank of the merge of two neighboring symbols, the lowest first; None: they do not merge.
Rank = Callable[[str, str], float | None]


class VocabularyFile(ABC):
    """A kind of vocabulary: the pieces that it needs in addition to the text's, and its file."""

    def __init__(self, tokenizer: Tokenizer, content: bytes) -> None:
        self.tokenizer, self.content = tokenizer, content
        self.pieces = tokenizer.pieces(range(tokenizer.vocab_size))
        self.ids = {piece: number for number, piece in enumerate(self.pieces)}

    def always(self) -> np.ndarray:
        """Return bool[V], the pieces that are kept for any text."""
        keep = self.tokenizer.special.copy()
        keep[self.tokenizer.unk_id] = True
        parts = [self.characters(piece) for piece in self.pieces]
        single = {own[0] for own in parts if len(own) == 1}
        keep |= np.array([len(own) < 2 or not single.issuperset(own) for own in parts])
        return keep

    def characters(self, piece: str) -> list[str]:
        """Return the characters of a piece, each in the form of a single-character piece."""
        return list(piece)

    def string(self, piece: str) -> str:
        """Return a piece as a part of a word, in which the beginning of the word is visible."""
        return piece

    def formed(self, texts: Sequence[str]) -> Iterable[int]:
        """Return the ids of the intermediate pieces while ``texts`` are encoded; empty if only final pieces are
        needed."""
        return ()

    def formed_alone(self, number: int) -> Iterable[int]:
        """Return the ids of the intermediate pieces from which the piece ``number`` is merged."""
        return ()

    @abstractmethod
    def cut(self, kept: np.ndarray) -> bytes:
        """Return the content of the file with only the pieces ``kept`` (ascending ids)."""


def vocabulary_file(tokenizer: Tokenizer, content: bytes, name: str) -> VocabularyFile:
    """Return the :class:`VocabularyFile` of ``tokenizer``, whose file has the bytes ``content``. Raises
    ``ValueError`` if pieces cannot be removed from this file; the message begins with ``name``."""
    if tokenizer.kind == "wordpiece":
        return _WordPiece(tokenizer, content)
    if tokenizer.kind == "sentencepiece":
        return _SentencePiece(tokenizer, content, name)
    return _Json(tokenizer, content, name)


def _continued(piece: str, prefix: str) -> list[str]:
    """Return the characters of a WordPiece piece; every character except the first one of a word has the prefix."""
    rest = piece.removeprefix(prefix)
    return [(prefix if i or rest != piece else "") + char for i, char in enumerate(rest)]


def _part_of_word(piece: str, prefix: str) -> str:
    """Return a piece of WordPiece without its prefix, or with a space before it if it begins a word."""
    return piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}"


class _WordPiece(VocabularyFile):
    """A ``vocab.txt``. The pieces [unusedN] are removed: no text has them."""

    def always(self) -> np.ndarray:
        is_slot = np.array([_SLOT.fullmatch(piece) is not None for piece in self.pieces])
        return super().always() & ~is_slot

    def characters(self, piece: str) -> list[str]:
        return _continued(piece, _CONTINUES)

    def string(self, piece: str) -> str:
        return _part_of_word(piece, _CONTINUES)

    def cut(self, kept: np.ndarray) -> bytes:
        lines = self.content.decode("utf-8-sig").split("\n")
        return "".join(f"{lines[i]}\n" for i in kept.tolist()).encode()


class _SentencePiece(VocabularyFile):
    """A model of SentencePiece. The lowest and the highest score are kept: they are the scores of unknown and of
    user-defined pieces."""

    def __init__(self, tokenizer: Tokenizer, content: bytes, name: str) -> None:
        import sentencepiece

        super().__init__(tokenizer, content)
        self._normalizer: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
        fields = read_fields(content, 0, len(content))
        own = [self._piece(start, end) for tag, start, end in fields if tag == _PIECES]
        self.types, scores = np.array([kind for kind, _ in own]), np.array([score for _, score in own])
        self.model_type = _UNIGRAM
        for tag, start, end in fields:
            if tag == _TRAINER:
                inner = {tag: begin for tag, begin, _ in read_fields(content, start, end)}
                self.model_type = read_varint(content, inner[_MODEL_TYPE])[0] if _MODEL_TYPE in inner else _UNIGRAM
        if self.model_type not in (_UNIGRAM, _BPE) or (self.types == _UNUSED).any():
            raise ValueError(
                f"{name}: only unigram and BPE models of SentencePiece without unused pieces can be trimmed"
            )
        is_normal = self.types == _NORMAL
        self.extremes = [int(choose(np.where(is_normal, scores, scores[is_normal].mean())))
                         for choose in (np.argmin, np.argmax)]  # fmt: skip
        self.scores = scores
        is_inner = any(_SPACE in piece.lstrip(_SPACE) for piece in itertools.compress(self.pieces, is_normal))
        self._word = re.compile("(?s).+" if is_inner else f"{_SPACE}*[^{_SPACE}]+|{_SPACE}+")
        self._merges = _Merges(self._rank)

    def _piece(self, start: int, end: int) -> tuple[int, float]:
        """Return the type and the score of a piece of the file."""
        kind, score = _NORMAL, 0.0
        for tag, begin, stop in read_fields(self.content, start, end):
            if tag == _TYPE:
                kind, _ = read_varint(self.content, begin)
            elif tag == _SCORE:
                score = float(np.frombuffer(self.content[begin:stop], "<f4")[0])
        return kind, score

    def _rank(self, left: str, right: str) -> float | None:
        number = self.ids.get(left + right)
        return None if number is None else -self.scores[number]

    def always(self) -> np.ndarray:
        keep = super().always() | (self.types != _NORMAL)
        keep[self.extremes] = True
        return keep

    def formed(self, texts: Sequence[str]) -> Iterable[int]:
        if self.model_type == _UNIGRAM:
            return ()
        normalized = (self._normalizer.normalize(text) for text in texts)
        words = itertools.chain.from_iterable(map(self._word.findall, normalized))
        return (self.ids[piece] for word in words for piece in self._merges.of(tuple(word)))

    def formed_alone(self, number: int) -> Iterable[int]:
        if self.model_type == _UNIGRAM or self.types[number] != _NORMAL:
            return ()
        return (self.ids[piece] for piece in self._merges.of(tuple(self.pieces[number])))

    def cut(self, kept: np.ndarray) -> bytes:
        keep, number, out = set(kept.tolist()), 0, bytearray()
        new = {old: i for i, old in enumerate(kept.tolist())}
        for tag, start, end in read_fields(self.content, 0, len(self.content)):
            value = self.content[start:end]
            if tag == _PIECES:
                number += 1
                if number - 1 not in keep:
                    continue
            elif tag == _TRAINER:
                value = self._trainer(start, end, new)
            out += write_varint(tag) + (write_varint(len(value)) if tag & 7 == 2 else b"") + value
        return bytes(out)

    def _trainer(self, start: int, end: int, new: Mapping[int, int]) -> bytes:
        """Return the settings of the training with the new size and the new ids of the special pieces."""
        out = bytearray()
        for tag, begin, stop in read_fields(self.content, start, end):
            value = self.content[begin:stop]
            if tag == _VOCAB_SIZE:
                value = write_varint(len(new))
            elif tag in _IDS and (old := read_varint(self.content, begin)[0]) in new:
                value = write_varint(new[old])
            out += write_varint(tag) + (write_varint(len(value)) if tag & 7 == 2 else b"") + value
        return bytes(out)


class _Json(VocabularyFile):
    """A ``tokenizer.json`` with WordPiece, unigram or BPE."""

    def __init__(self, tokenizer: Tokenizer, content: bytes, name: str) -> None:
        super().__init__(tokenizer, content)
        self.state = json.loads(content)
        self.model = self.state["model"]
        self._added = {token["id"] for token in self.state.get("added_tokens") or ()}
        self._library: Any = tokenizers.Tokenizer.from_str(content.decode())
        if self.model["type"] == "BPE":
            self._pairs = {
                tuple(pair.split(" ") if isinstance(pair, str) else pair): rank
                for rank, pair in enumerate(self.model["merges"])
            }
            if self.model.get("continuing_subword_prefix") or self.model.get("ignore_merges"):
                raise ValueError(
                    f"{name}: BPE with continuing_subword_prefix or ignore_merges cannot be trimmed; use a model "
                    "with other BPE, WordPiece or unigram"
                )
            self._merges = _Merges(lambda left, right: self._pairs.get((left, right)))

    def characters(self, piece: str) -> list[str]:
        if self.model["type"] == "WordPiece":
            return _continued(piece, self.model.get("continuing_subword_prefix", _CONTINUES))
        suffix = self.model.get("end_of_word_suffix") or ""
        if suffix and piece.endswith(suffix) and piece != suffix:
            characters = list(piece.removesuffix(suffix))
            return [*characters[:-1], characters[-1] + suffix]
        return list(piece)

    def string(self, piece: str) -> str:
        if self.model["type"] == "WordPiece":
            return _part_of_word(piece, self.model.get("continuing_subword_prefix", _CONTINUES))
        return piece

    def formed_alone(self, number: int) -> Iterable[int]:
        if self.model["type"] != "BPE" or number in self._added:
            return ()
        return (self.ids[piece] for piece in self._merges.of(tuple(self.characters(self.pieces[number]))))

    def always(self) -> np.ndarray:
        keep = super().always()
        keep[list(self._added)] = True
        if self.model["type"] == "Unigram":
            scores = [score for _, score in self.model["vocab"]]
            keep[[int(np.argmin(scores)), int(np.argmax(scores))]] = True
        keep |= np.array([re.fullmatch("<0x[0-9A-F]{2}>", piece) is not None for piece in self.pieces])
        return keep

    def formed(self, texts: Sequence[str]) -> Iterable[int]:
        if self.model["type"] != "BPE":
            return
        suffix = self.model.get("end_of_word_suffix") or ""
        for text in texts:
            normalizer = self._library.normalizer
            normalized = text if normalizer is None else normalizer.normalize_str(text)
            splitter = self._library.pre_tokenizer
            parts = [(normalized, None)] if splitter is None else splitter.pre_tokenize_str(normalized)
            for word, _ in parts:
                symbols = (*word[:-1], word[-1] + suffix) if word else ()
                yield from (self.ids[piece] for piece in self._merges.of(symbols))

    def cut(self, kept: np.ndarray) -> bytes:
        new = {old: i for i, old in enumerate(kept.tolist())}
        model = dict(self.model)
        if model["type"] == "Unigram":
            model["vocab"] = [entry for old, entry in enumerate(model["vocab"]) if old in new]
            if isinstance(model.get("unk_id"), int):
                model["unk_id"] = new[model["unk_id"]]
        else:
            model["vocab"] = {piece: new[old] for piece, old in model["vocab"].items() if old in new}
        if model["type"] == "BPE":
            own = model["vocab"]
            model["merges"] = [
                merge for merge, (left, right) in zip(model["merges"], self._pairs, strict=True)
                if left in own and right in own and left + right in own
            ]  # fmt: skip
        added = [{**token, "id": new[token["id"]]} for token in self.state.get("added_tokens") or ()]
        state = {**self.state, "model": model, "added_tokens": added}
        state["post_processor"] = _renumbered(state.get("post_processor"), new)
        if isinstance(state.get("padding"), dict):
            state["padding"] = {**state["padding"], "pad_id": new[state["padding"]["pad_id"]]}
        return json.dumps(state, ensure_ascii=False, indent=2).encode()


def _renumbered(step: Any, new: Mapping[int, int]) -> Any:
    """Return a post-processor with new ids."""
    if not isinstance(step, dict):
        return step
    step = dict(step)
    if "processors" in step:
        step["processors"] = [_renumbered(part, new) for part in step["processors"]]
    for name in {"sep", "cls"} & step.keys():
        piece, number = step[name]
        step[name] = [piece, new[number]]
    if isinstance(step.get("special_tokens"), dict):
        step["special_tokens"] = {
            piece: {**entry, "ids": [new[number] for number in entry["ids"]]}
            for piece, entry in step["special_tokens"].items()
        }
    return step


class _Merges:
    """The pieces that arise while words are merged, the pair of the lowest rank first, then the leftmost (Sennrich
    et al. 2016). Each word is merged once."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._done: set[tuple[str, ...]] = set()

    def of(self, symbols: tuple[str, ...]) -> list[str]:
        """Return the pieces that arise in a word of these symbols; none if it was merged before."""
        if symbols in self._done:
            return []
        self._done.add(symbols)
        word, formed = list(symbols), list[str]()
        while True:
            ranks = [
                (rank, place) for place, pair in enumerate(itertools.pairwise(word))
                if (rank := self._rank(*pair)) is not None
            ]  # fmt: skip
            if not ranks:
                return formed
            _, place = min(ranks)
            word[place : place + 2] = [word[place] + word[place + 1]]
            formed.append(word[place])
