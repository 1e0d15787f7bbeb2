"""Statistics of the text of a build: how it was read, unknown tokens, merged characters, and tokens in rows.

The numbers are in ``store.json`` (``text``) and in the manifest of each split (``text``, ``counts``). Stores and
shards of before lack them.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import ne
from typing import Any

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.tokenization import Tokenizer, WordPieceTokenizer
from bert_jax.tokenization.wordpiece import without_accents
from data_pipeline.text.documents import Reading

# Bounds of the warnings: shares of unknown tokens (of all tokens; more for a vocabulary of whole words), of tokens
# in rows, of random pairs, of characters that lose an accent, and of pieces that no text can contain.
MOST_UNKNOWN, MOST_UNKNOWN_WORDS, LEAST_IN_ROWS, MOST_RANDOM = 0.01, 0.2, 0.8, 0.9
MOST_MERGED, MOST_UNUSED_PIECES = 0.002, 0.01
USELESS = 0.9  # share of unknown tokens with which a build is refused
_SHOWN = 6


# ------------------------------------------------------------------ counting


def chunk_facts(texts: Sequence[str], ids: np.ndarray, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Return arrays for the chunk of ``texts``: the numbers of characters and of unknown tokens, int64[2], and the
    code points that lose their accents, uint32[N], with their counts, int64[N]."""
    sizes = np.array([sum(map(len, texts)), np.count_nonzero(ids == tokenizer.unk_id)], np.int64)
    points, counts = np.zeros(0, np.uint32), np.zeros(0, np.int64)
    if isinstance(tokenizer, WordPieceTokenizer) and tokenizer.strip_accents:
        text = "".join(text for text in texts if not text.isascii())
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        every = np.bincount(codes[codes > 127])
        changed = [point for point in np.flatnonzero(every).tolist() if without_accents(chr(point)) != chr(point)]
        points, counts = np.array(changed, np.uint32), every[changed]
    return {"sizes": sizes, "merged": points, "merged_counts": counts.astype(np.int64)}


def text_facts(
    files: str, readings: Iterable[Reading], chunks: Iterable[Mapping[str, np.ndarray]]
) -> dict[str, Any]:
    """Return the facts of a token store. ``files`` states which files were read and skipped."""
    sizes, merged = np.zeros(2, np.int64), Counter[int]()
    for chunk in chunks:
        if "sizes" in chunk:
            sizes += chunk["sizes"]
            merged.update(dict(zip(chunk["merged"].tolist(), chunk["merged_counts"].tolist(), strict=True)))
    readings = list(readings)
    most = sorted(merged, key=lambda point: (-merged[point], point))[:_SHOWN]
    return {
        "files": files,
        "lines": {kind: sum(one.line == kind for one in readings) for kind in ("sentence", "paragraph")},
        "long_lines": [place for one in readings for place in one.cut_lines][:_SHOWN],
        "characters": int(sizes[0]),
        "unknown": int(sizes[1]),
        "merged": merged.total(),
        "merged_most": [chr(point) for point in most],
    }


# ------------------------------------------------------------------ reporting


def text_lines(text: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was read, and how."""
    kinds = [(kind, count) for kind, count in text["lines"].items() if count]
    how = f"each line is a {kinds[0][0]}" if len(kinds) == 1 else ""
    if len(kinds) > 1:
        how = "a line is " + " and ".join(f"a {kind} in {count:,}" for kind, count in kinds) + " of them"
    yield f"text: {text['files']}" + (f"; {how}" if how else "")
    if text["long_lines"]:
        yield cut_lines_note(text["long_lines"])


def cut_lines_note(places: Sequence[str]) -> str:
    """Return the line that names the first of the lines that were cut."""
    return f"lines that are too long, cut into several documents: {', '.join(places[:_SHOWN])}"


def row_line(counts: Mapping[str, int], passes: int, text: Mapping[str, Any], total: int) -> str:
    """Return what became of the tokens of a split; ``total`` is the number of tokens of the store."""
    parts = [f"{counts['tokens_in_rows'] / max(counts['tokens'] * passes, 1):.1%} of the tokens in rows"]
    parts += [f"{text['unknown'] / max(total, 1):.2%} [UNK]"] if text else []
    parts += (
        [f"{counts['second_label'] / counts['pairs']:.1%} of the pairs random or swapped"]
        if counts["pairs"]
        else []
    )
    parts += (
        [f"{counts['predictions'] / counts['instances']:.1f} predictions each"] if counts["predictions"] else []
    )
    return ", ".join(parts)


def warnings_of(
    data: DataConfig, tokenizer: Tokenizer, counts: Mapping[str, int], passes: int, text: Mapping[str, Any],
    total: int,
) -> Iterator[str]:  # fmt: skip
    """Yield a line for each share that is beyond its bound, with the option to change."""
    unknown = text.get("unknown", 0) / max(total, 1)
    of_words = isinstance(tokenizer, WordPieceTokenizer) and not tokenizer.continuation.any()
    unused, keep = 0.0, ""
    if isinstance(tokenizer, WordPieceTokenizer) and data.vocab:
        unused = _unused(tokenizer, lower_case=tokenizer.lower_case, strip_accents=tokenizer.strip_accents)
    if unused > MOST_UNUSED_PIECES and data.vocab.endswith(".txt"):
        has_case = tokenizer.lower_case and _unused(tokenizer, lower_case=True) > unused / 2
        keep = "--data.lower_case false" if has_case else "--data.strip_accents false"
    if unknown > (MOST_UNKNOWN_WORDS if of_words else MOST_UNKNOWN):
        remedy = f"use {keep}" if keep else "use a vocabulary of this text, or a larger one"
        is_cased = isinstance(tokenizer, WordPieceTokenizer) and not tokenizer.lower_case
        if is_cased and _unused(tokenizer, lower_case=True) < MOST_UNUSED_PIECES:
            remedy = "the vocabulary has no capital letters: --data.lower_case true"
        yield f"WARNING: {unknown:.1%} of the tokens are [UNK]; {remedy}"
    if keep:
        yield f"WARNING: {unused:.1%} of the pieces have capital letters or accents that the text loses; use {keep}"
    elif (share := text.get("merged", 0) / max(text.get("characters", 0), 1)) > MOST_MERGED and not data.vocab:
        shown = ", ".join(map(shown_merge, text["merged_most"]))
        option = "--data.strip_accents false" if data.strip_accents == "auto" else "data.strip_accents"
        yield f"WARNING: {share:.1%} of the characters lose accents ({shown}); {option} keeps them"
    in_rows = counts["tokens_in_rows"] / max(counts["tokens"] * passes, 1)
    if in_rows < LEAST_IN_ROWS:
        yield f"WARNING: {1 - in_rows:.1%} of the tokens are in no row of their document; {_pairs_remedy(data)}"
    if data.next_sentence == "nsp" and counts["pairs"] and counts["second_label"] > MOST_RANDOM * counts["pairs"]:
        share = counts["second_label"] / counts["pairs"]
        yield f"WARNING: {share:.1%} of the pairs are random: documents have one sentence; {_pairs_remedy(data)}"


def _pairs_remedy(data: DataConfig) -> str:
    line = "" if data.line == "paragraph" else "--data.line paragraph, or "
    return f"use {line}--data.next_sentence none"


def shown_merge(char: str) -> str:
    """Return a character and the same character without accents."""
    mark = "\u25cc" if unicodedata.category(char) == "Mn" else ""
    if "\uac00" <= char <= "\ud7a3":
        return f"{char} in {len(without_accents(char))} parts"
    return f"{mark}{char} to {without_accents(char)}" if without_accents(char) else f"{mark}{char}"


def _pieces(tokenizer: Tokenizer) -> list[str]:
    return [piece.removeprefix("##") for piece in tokenizer.pieces(range(tokenizer.vocab_size)) if piece[:1] != "["]


def _unused(tokenizer: Tokenizer, *, lower_case: bool, strip_accents: bool = False) -> float:
    """Return the share of the pieces that have capital letters or accents."""
    pieces = _pieces(tokenizer)
    changed = list(map(str.lower, pieces)) if lower_case else pieces
    changed = [one if one.isascii() else without_accents(one) for one in changed] if strip_accents else changed
    return sum(map(ne, pieces, changed)) / max(len(pieces), 1)
