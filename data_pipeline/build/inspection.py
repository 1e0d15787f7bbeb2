"""Report on a folder of shards: counts, masking, pairs, lengths, and a few examples as text."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_jax.io.files import local_copy
from bert_jax.io.storage import Location
from bert_jax.tokenization import FILE_NAMES, Tokenizer, load_tokenizer
from bert_jax.tokenization.wordpiece import is_cjk
from data_pipeline.build.text_facts import row_line, shown_merge, text_lines
from data_pipeline.shards.shard_files import ShardIndex, read_index, read_manifest, read_records
from data_pipeline.shards.tfexample import decode_example

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_NAMES = {"input_word_ids": "input_ids", "input_type_ids": "segment_ids"}  # names of the TensorFlow Model Garden
_BAR = 30


def count(
    row: dict[str, np.ndarray], vocab_size: int, tokenizer: Tokenizer | None, groups: np.ndarray | None
) -> dict[str, int]:
    """Return a dict of counts for one record, such as its number of predictions.

    The report sums the counts over all records. ``groups`` int[S] contains the index of the word to which each
    token belongs; if it is None, words are not counted.
    """
    ids = row["input_ids"]
    positions, labels = predictions(row)
    everything = np.concatenate([ids, labels])
    counts = {
        "predictions": len(positions),
        "out_of_range": int(((everything < 0) | (everything >= vocab_size)).sum()),
    }
    if "next_sentence_labels" in row:
        counts["random_next"] = int(row["next_sentence_labels"][0])
        counts["pairs"] = int(row.get("segment_ids", np.zeros(1)).any())
    if "document_classes" in row:
        counts["labeled"] = int(row["document_classes"][0] > 0)
    if tokenizer is not None:
        counts["masked"] = int((ids[positions] == tokenizer.mask_id).sum())
        counts["unchanged"] = int((ids[positions] == labels).sum())
    if groups is not None:
        touched = np.unique(groups[positions])
        counts["words"] = len(touched)
        counts["whole_words"] = int(np.isin(touched, np.delete(groups, positions), invert=True).sum())
    return counts


def predictions(row: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions and the labels of the predicted tokens of a record, int64[P] each."""
    if "masked_lm_ids" not in row:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    used = row["masked_lm_weights"] > 0
    return row["masked_lm_positions"][used], row["masked_lm_ids"][used]


def length_of(row: dict[str, np.ndarray]) -> int:
    """Return the number of tokens of a record, excluding padding."""
    return int(row["input_mask"].sum()) if "input_mask" in row else len(row["input_ids"])


def original_ids(row: dict[str, np.ndarray]) -> np.ndarray:
    """Return the token ids of a record before masking, excluding padding."""
    ids = row["input_ids"].copy()
    positions, labels = predictions(row)
    ids[positions] = labels
    return ids[: length_of(row)]


def word_groups(
    row: dict[str, np.ndarray], tokenizer: Tokenizer, cut: Callable[[str], Sequence[str]] | None
) -> np.ndarray:
    """Return the index of the word to which each token of a record belongs, int[S].

    ``cut``, if not None, splits the text of each run of consecutive Chinese pieces into words.
    """
    ids = original_ids(row)
    starts = np.ones(len(row["input_ids"]), bool)
    if "word_starts" in row:
        starts[: len(ids)] = row["word_starts"][: len(ids)] > 0
    else:
        pieces = tokenizer.pieces(ids.tolist())
        starts[: len(ids)] = ~tokenizer.continuation[ids]
        special = tokenizer.special[ids]
        starts[: len(ids)] |= special | np.concatenate([[True], special[:-1]])
        if cut is not None:
            for first, stop in _chinese_runs(pieces):
                borders = np.cumsum([0, *map(len, cut("".join(pieces[first:stop])))])
                starts[first:stop] = np.isin(np.arange(stop - first), borders)
    return np.cumsum(starts)


def _chinese_runs(pieces: Sequence[str]) -> Iterator[tuple[int, int]]:
    first = 0
    for at in range(len(pieces) + 1):
        if at < len(pieces) and len(pieces[at]) == 1 and is_cjk(pieces[at]):
            continue
        if at > first:
            yield first, at
        first = at + 1


def inspect(
    folder: Location, *, examples: int, most_records: int, vocab: Location | None, lower_case: bool
) -> None:
    """Print a report on the shards in ``folder``, or in its subfolders train and eval; use colors on a terminal.

    Raises ``ValueError`` if the index or the vocabulary file is missing, or if a record is damaged.
    """
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    splits = [folder / name for name in ("train", "eval") if (folder / name).is_dir()] or [folder]
    tokenizer = _tokenizer(folder, vocab, lower_case, (read_manifest(splits[0]) or {}).get("tokenizer", ""))
    for split in splits:
        _inspect_split(console, split, tokenizer, examples, most_records)


def _tokenizer(folder: Location, vocab: Location | None, lower_case: bool, fingerprint: str) -> Tokenizer | None:
    """Return the tokenizer of the shards, with the case and accents that the manifest's ``fingerprint`` has."""
    beside = [
        place / name
        for place in (folder, folder.parent)
        for name in dict.fromkeys(FILE_NAMES.values())
        if (place / name).is_file()
    ]
    path = vocab or (beside[0] if beside else None)
    if path is None:
        return None
    rules = [(lower, strip) for lower in (lower_case, not lower_case) for strip in (None, True, False)]
    every = (load_tokenizer(local_copy(path), lower_case=lower, strip_accents=strip) for lower, strip in rules)
    same = (tokenizer for tokenizer in every if tokenizer.fingerprint == fingerprint)
    return next(same, None) or load_tokenizer(local_copy(path), lower_case=lower_case)


def _inspect_split(
    console: "Console", folder: Location, tokenizer: Tokenizer | None, examples: int, most_records: int
) -> None:
    index = read_index(folder)
    manifest = read_manifest(folder)
    if manifest and tokenizer and manifest["vocab_size"] != tokenizer.vocab_size:
        raise ValueError(
            f"{folder}: the shards were built with a vocabulary of {manifest['vocab_size']} pieces, but the "
            f"vocabulary in use has {tokenizer.vocab_size}; name the vocabulary of the shards with --vocab FILE"
        )
    cut = _segmenter(manifest)
    largest = (index.id_range or (0, 0))[1]
    size = tokenizer.vocab_size if tokenizer else manifest["vocab_size"] if manifest else largest + 1
    totals: Counter[str] = Counter()
    lengths: list[int] = []
    shown: list[dict[str, np.ndarray]] = []
    for cells, sequences in _rows(index, most_records):
        totals.update({"rows": 1, "cells": cells})
        for row in sequences:
            ids = row["input_ids"]
            groups = None
            if tokenizer and ids.max(initial=0) < size and ids.min(initial=0) >= 0:
                groups = word_groups(row, tokenizer, cut)
                shown += [row] if len(shown) < examples else []
            totals.update(count(row, size, tokenizer, groups))
            lengths.append(length_of(row))
    for name, value in _facts(index, manifest, totals, lengths, tokenizer, size):
        console.print(f"{name:<22} {value}", markup=False)
    for line in _histogram(lengths):
        console.print(line, markup=False)
    if shown and tokenizer:
        console.print("examples: «token» is masked, «token→other» is a random replacement, «token=» is unchanged")
        for row in shown:
            console.print(render(row, tokenizer))
    elif examples and not tokenizer:
        console.print("the folder contains no vocabulary; use --vocab FILE to see examples and masking shares")
    console.print()


def _segmenter(manifest: dict[str, Any] | None) -> Callable[[str], Sequence[str]] | None:
    if not manifest or manifest["settings"].get("data.word_segmenter") != "jieba":
        return None
    from data_pipeline.build.token_store import load_jieba

    return load_jieba().lcut


def _rows(index: ShardIndex, most_records: int) -> Iterator[tuple[int, list[dict[str, np.ndarray]]]]:
    """Yield decoded records, at most ``most_records``, spread evenly over the shards: the length of the row, and
    its sequences."""
    share = -(-most_records // max(len(index.entries), 1))
    if index.records and not {"input_ids", "input_word_ids"} & set(index.features):
        raise ValueError(
            f"{index.folder}: the records have no input_ids; they contain {', '.join(sorted(index.features))}; "
            "training reads the features of google-research/bert (bert-data shards writes them)"
        )
    for entry in index.entries:
        for record in islice(read_records(index.folder / entry.name), share):
            row = {_NAMES.get(name, name): values for name, values in decode_example(record).items()}
            yield len(row["input_ids"]), list(_sequences(row)) if "sequence_ids" in row else [row]


def _sequences(row: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Yield the sequences of a packed row as records without padding."""
    for slot in range(row["sequence_ids"].max(initial=0)):
        own = row["sequence_ids"] == slot + 1
        sequence = {name: row[name][own] for name in row if name in ("input_ids", "segment_ids", "word_starts")}
        for name in ("next_sentence_labels", "document_classes"):
            if name in row:
                sequence[name] = row[name][slot : slot + 1]
        if "masked_lm_ids" in row:
            used = own[row["masked_lm_positions"]] & (row["masked_lm_weights"] > 0)
            sequence |= {name: row[name][used] for name in ("masked_lm_ids", "masked_lm_weights")}
            sequence["masked_lm_positions"] = row["masked_lm_positions"][used] - np.argmax(own)
        yield sequence


def _facts(
    index: ShardIndex, manifest: dict[str, Any] | None, totals: Counter[str], lengths: Sequence[int],
    tokenizer: Tokenizer | None, vocab_size: int,
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yield the lines of the report as (name, value) pairs."""

    def share(part: str, whole: str) -> str:
        return f"{totals[part] / totals[whole]:.4f}" if totals[whole] else "none"

    yield "folder", str(index.folder)
    size = sum(entry.bytes for entry in index.entries)
    yield "records", f"{index.records:,} in {len(index.entries)} shard(s), {size / 1e6:,.1f} MB"
    if manifest:
        counts = manifest["counts"]
        yield "documents", f"{counts['documents']:,}, duplicates: {counts['duplicate_documents']:,}"
        yield "passes", f"{manifest['settings']['data.dupe_factor']}"
        yield "vocabulary", f"{manifest['vocab_size']:,} pieces, {manifest['tokenizer'][:12]}"
        yield from _text_facts(manifest)
    marks = [entry.lengths.astype(np.uint64) << np.uint64(32) | entry.crcs for entry in index.entries]
    yield (
        "repeated records",
        f"{index.records - len(np.unique(np.concatenate(marks))):,} (equal length and checksum)",
    )
    packed = f", {len(lengths):,} packed instances" if "sequence_ids" in index.features else ""
    yield "records read", f"{totals['rows']:,} (set by --records){packed}"
    yield "ids out of range", f"{totals['out_of_range']:,} (vocabulary {vocab_size:,}; index: {index.id_range})"
    totals["tokens"] = sum(lengths)
    mean = totals["tokens"] / max(len(lengths), 1)
    yield (
        f"tokens per {'instance' if packed else 'record'}",
        f"{mean:.1f}, padding efficiency {share('tokens', 'cells')}",
    )
    yield "random next share", f"{share('random_next', 'pairs')} of {totals['pairs']:,} pairs"
    if "document_classes" in index.features:
        names = f"; classes: {manifest['settings'].get('data.classes', 'not named')}" if manifest else ""
        yield "instances of labeled documents", f"{totals['labeled']:,} of {len(lengths):,}{names}"
    if "masked_lm_ids" not in index.features:
        yield "masking", "none in the shards; tokens are masked at read time (data.masking dynamic)"
        return
    yield "predictions", f"{totals['predictions']:,}, {share('predictions', 'tokens')} of all tokens"
    if tokenizer:
        totals["random"] = totals["predictions"] - totals["masked"] - totals["unchanged"]
        fates = {"masked": "[MASK]", "random": "random", "unchanged": "unchanged"}
        yield "masking shares", ", ".join(f"{name} {share(key, 'predictions')}" for key, name in fates.items())
        whole = share("whole_words", "words")
        yield "words masked whole", f"{whole} of {totals['words']:,} words with a prediction"


def _text_facts(manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield lines on how the build processed its text; none for shards of older versions, whose manifests lack
    these facts."""
    if text := manifest.get("text"):
        for line in text_lines(text):
            name, _, value = line.partition(": ")
            yield name, value
        if text["merged"]:
            shown = ", ".join(map(shown_merge, text["merged_most"]))
            yield "accents stripped", f"{text['merged'] / text['characters']:.2%} of the characters: {shown}"
    if "tokens_in_rows" in (counts := manifest["counts"]):
        passes, tokens = manifest["settings"]["data.dupe_factor"], (text or {}).get("tokens", 0)
        yield "rows", row_line(counts, passes, text or {}, tokens)


def _histogram(lengths: Sequence[int]) -> Iterator[str]:
    if not lengths:
        return
    counts, borders = np.histogram(lengths, bins=8, range=(0, max(lengths)))
    for count, low, high in zip(counts.tolist(), borders[:-1], borders[1:], strict=True):
        bar = "#" * round(_BAR * count / max(counts))
        yield f"length {low:6.0f} to {high:6.0f}  {count:>9,} {bar}"


def render(row: dict[str, np.ndarray], tokenizer: Tokenizer) -> "Text":
    """Return a record as text in which the predictions are marked."""
    from rich.text import Text

    ids = row["input_ids"]
    originals = original_ids(row)
    chosen = set(predictions(row)[0].tolist())
    label = int(row["next_sentence_labels"][0]) if "next_sentence_labels" in row else 0
    of_class = f", class {int(row['document_classes'][0])}" if "document_classes" in row else ""
    text = Text(f"[{label}{of_class}] ", style="bold")
    pieces = tokenizer.pieces(originals.tolist())
    for at, piece in enumerate(pieces):
        starts_segment = at == 0 or tokenizer.special[originals[at - 1]]
        joins = tokenizer.continuation[originals[at]] and tokenizer.kind == "wordpiece" and not starts_segment
        bare = piece.removeprefix("##") if joins else piece
        if at and not joins and not (is_cjk(piece[:1] or " ") and is_cjk(pieces[at - 1][:1] or " ")):
            text.append(" ")
        if at not in chosen:
            text.append(bare, style="dim" if tokenizer.special[originals[at]] else "")
        elif ids[at] == tokenizer.mask_id:
            text.append(f"«{bare}»", style="bold green")
        elif ids[at] == originals[at]:
            text.append(f"«{bare}=»", style="bold cyan")
        else:
            text.append(f"«{bare}→{tokenizer.pieces([int(ids[at])])[0]}»", style="bold yellow")
    return text
