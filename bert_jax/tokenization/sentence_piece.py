"""SentencePiece models (``.model``): unigram or BPE, with BERT's special pieces."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from bert_jax.tokenization.tokenizer import SPECIAL_PIECES, Offsets, Tokenizer, without_surrogates


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer of a serialized SentencePiece model.

    In the model, [UNK] is the unknown piece, and the other special pieces are control pieces.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, *, name: str = "SentencePiece model") -> None:
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError:
            raise ValueError(f"{name}: not a SentencePiece model") from None
        size = self._processor.get_piece_size()
        pieces = [self._processor.id_to_piece(i) for i in range(size)]
        if missing := [piece for piece in SPECIAL_PIECES if piece not in pieces]:
            remedy = "use bert-data vocab to train a model that has them"
            raise ValueError(f"{name}: the model lacks {', '.join(missing)}; {remedy}")
        super().__init__(pieces)
        wrong = [pieces[i] for i in np.flatnonzero(self.special).tolist() if not self._processor.is_control(i)]
        wrong += [] if self._processor.is_unknown(self.unk_id) else ["[UNK]"]
        if wrong:
            rule = "[UNK] must be the unknown piece, and the other special pieces must be control pieces"
            raise ValueError(f"{name}: wrong type of {', '.join(wrong)}; {rule}")
        normalizer = sentencepiece.SentencePieceNormalizer(model_proto=model)
        self.lower_case = "a" in normalizer.normalize("A")
        self.special |= np.array([self._processor.is_control(i) for i in range(size)])
        self.continuation[:] = [not piece.startswith("\u2581") for piece in pieces]
        self.continuation[self.special] = False
        self.continuation[self.unk_id] = False
        self.fingerprint = hashlib.sha256(b"sentencepiece\n" + model).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        safe = list(map(without_surrogates, texts))
        encoded: list[list[int]] = self._processor.encode(safe, return_type=int, num_threads=1)
        return encoded

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        safe = [without_surrogates(text)]
        (mapping,) = self._processor.encode(safe, return_type="offset_mapping", num_threads=1)
        offsets: Offsets = []
        for start, end in mapping["offsets"]:
            # The range of a piece with a leading U+2581 includes the white space before the word.
            while start < len(text) and text[start].isspace():
                start += 1
            # If one character (a ligature) has several pieces, the library assigns the character to the last piece
            # only.
            if start >= end:
                end = min(start + 1, len(text))
            offsets.append((start, end))
        return list(mapping["ids"]), offsets

    def decode(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        run: list[int] = []
        for i in ids:
            if not self.special[i]:
                run.append(int(i))
                continue
            parts += [self._processor.decode(run), self._pieces[i]]
            run = []
        return " ".join(part for part in [*parts, self._processor.decode(run)] if part)
