"""Whether the shards of a folder are what the config asks for, told from their index before anything is read."""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bert_jax.config.pretrain import DataConfig
from bert_jax.io.storage import Location, StorageError, is_url
from bert_jax.tokenization import Tokenizer
from data_pipeline.shards.shard_files import ShardIndex

_log = logging.getLogger(__name__)

# The Model Garden writes these names when asked for its second version of the features.
_OTHER_NAMES = {"input_ids": "input_word_ids", "segment_ids": "input_type_ids"}
_STAT_THREADS = 16  # an object store answers slowly, but many at once
_MASKED = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")


@dataclass(frozen=True)
class Layout:
    """Features to parse: name in google-research/bert -> (name in the files, kind, values per record)."""

    features: dict[str, tuple[str, str, int]]
    dynamic: bool
    has_labels: bool
    vocab_size: int | None


def check_layout(index: ShardIndex, data: DataConfig, tokenizer: Tokenizer | None) -> Layout:
    """Check the shards against the config; ``ValueError`` names the first difference."""
    folder, found = index.folder, index.features
    if not index.records:
        raise ValueError(f"{folder}: the shards hold no records; build them again with more text")
    dynamic = data.masking == "dynamic"
    lengths = dict.fromkeys(("input_ids", "input_mask", "segment_ids"), data.seq_length)
    lengths |= {"word_starts": data.seq_length} if dynamic else dict.fromkeys(_MASKED, data.max_predictions)
    has_labels = data.next_sentence != "none"
    if has_labels:
        lengths["next_sentence_labels"] = 1
    if dynamic and "word_starts" not in found:
        raise ValueError(f"data.masking: dynamic, but the shards in {folder} were masked when built; give static")
    if not dynamic and "masked_lm_ids" not in found:
        raise ValueError(f"data.masking: static, but the shards in {folder} hold no masks; give dynamic")
    features = {}
    for name, length in lengths.items():
        stored = name if name in found else _OTHER_NAMES.get(name, name)
        if stored not in found:
            raise ValueError(f"{folder}: the shards lack the feature {name}; they hold {', '.join(sorted(found))}")
        summary = found[stored]
        if (summary.min_length, summary.max_length) != (length, length):
            option = {data.seq_length: "data.seq_length"}.get(length, "data.max_predictions")
            option = "one label" if name == "next_sentence_labels" else f"{option} {length}"
            given = " to ".join(map(str, sorted({summary.min_length, summary.max_length})))
            raise ValueError(f"{folder}: {name} has {given} values a record, the config wants {option}")
        features[name] = (stored, summary.kind, length)
    _check_ranges(index, features, tokenizer)
    return Layout(features, dynamic, has_labels, tokenizer.vocab_size if tokenizer else None)


def _check_ranges(
    index: ShardIndex, features: Mapping[str, tuple[str, str, int]], tokenizer: Tokenizer | None
) -> None:
    """``ValueError`` when the index shows values that a model must not be fed."""
    limits = {"input_mask": 2, "next_sentence_labels": 2, "masked_lm_positions": features["input_ids"][2]}
    limits["segment_ids"] = 1 << 15
    if tokenizer is not None:
        limits |= dict.fromkeys(("input_ids", "masked_lm_ids"), tokenizer.vocab_size)
    for name, limit in limits.items():
        if name not in features:
            continue
        for entry in index.entries:
            summary = entry.features.get(features[name][0])
            if summary is None or (summary.min_value >= 0 and summary.max_value < limit):
                continue
            what = f"{name} from {summary.min_value} to {summary.max_value}, allowed: 0 to {limit - 1}"
            remedy = "these shards were made with another vocabulary" if "ids" in name else "make the shards again"
            raise ValueError(f"{index.folder / entry.name}: {what}; {remedy}")


def warn_of_changed_files(index: ShardIndex) -> None:
    """One warning for each file that is missing or has another size than the index says."""

    def size_of(path: Location) -> int | None:
        try:
            return path.stat().st_size
        except StorageError:
            raise
        except OSError:
            return None

    paths = [index.folder / entry.name for entry in index.entries]
    if is_url(index.folder):
        with ThreadPoolExecutor(_STAT_THREADS) as pool:
            sizes = list(pool.map(size_of, paths))
    else:
        sizes = list(map(size_of, paths))
    for entry, path, size in zip(index.entries, paths, sizes, strict=True):
        if size != entry.bytes:
            now = "is missing" if size is None else f"has {size} bytes"
            _log.warning("%s %s, the index says %d bytes: what differs becomes blank rows", path, now, entry.bytes)
