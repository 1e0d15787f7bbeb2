"""Check that shards match the config before a record is read: compare build settings and indexed features."""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bert_jax.config.pretrain import DataConfig
from bert_jax.io.storage import Location, StorageError, is_url
from bert_jax.json_values import Json
from bert_jax.tokenization import Tokenizer
from data_pipeline.shards.shard_files import ShardIndex
from data_pipeline.shards.tfexample import FeatureSummary

_log = logging.getLogger(__name__)

# The TensorFlow Model Garden writes these names in version 2 of its features.
_OTHER_NAMES = {"input_ids": "input_word_ids", "segment_ids": "input_type_ids"}
_STAT_THREADS = 16  # an object store has a high latency, but serves many requests at the same time
_MASKED = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
_MASKING = (
    "max_predictions", "mask_unit", "mask_fraction", "mask_token_share", "random_token_share",
)  # fmt: skip
_ALWAYS = (
    "seq_length", "masking", "word_segmenter", "next_sentence", "short_sequence_fraction", "seed", "eval_fraction",
    "line", "json_field",
)  # fmt: skip
_SHARDS_PER_EVAL_SHARD = 16


# ------------------------------------------------------------------ settings


def shard_settings(data: DataConfig, tokenizer: Tokenizer, split: str) -> dict[str, Any]:
    """Return the settings that determine the bytes of the shards of a split, under their names in the config.

    The eval split has one pass and a sixteenth of the number of shards. The options of dynamic masking are not
    included, because dynamic masks are chosen when the records are read.
    """
    names = [*_ALWAYS, *(_MASKING if data.masking == "static" else ())]
    if data.masking == "static" and data.mask_special_tokens:
        names += ["mask_special_tokens"]
    if data.packing != "none":
        names += ["packing", "sequences_per_row"]
    settings = {f"data.{name}": getattr(data, name) for name in names}
    if data.masking == "static" and data.mask_unit == "span":
        settings |= {"data.span_mean": data.span_lengths[0], "data.span_max": int(data.span_lengths[1])}
    if data.is_contiguous:
        settings["data.contiguous"] = True
    is_train = split == "train"
    settings["data.dupe_factor"] = data.dupe_factor if is_train else 1
    settings["data.num_shards"] = data.num_shards if is_train else max(1, data.num_shards // _SHARDS_PER_EVAL_SHARD)
    return settings | {"vocabulary": tokenizer.fingerprint} | label_settings(data) | encoding_settings(data)


def encoding_settings(data: DataConfig) -> dict[str, Json]:
    """Return the encoding of the text if it is set."""
    return {} if data.encoding == "auto" else {"data.encoding": data.encoding}


def label_settings(data: DataConfig) -> dict[str, Json]:
    """Return the settings of the classes of documents; empty without classes."""
    if not data.label_field:
        return {}
    return {"data.label_field": data.label_field, "data.classes": ", ".join(data.classes)}


def differences(recorded: Mapping[str, Json], wanted: Mapping[str, Json], owner: str) -> str:
    """Return the settings that differ as ``name: OWNER X, config Y, ...``, or "" if all are equal.

    OWNER is the value of ``owner``, which names the origin of ``recorded``, such as "shards".
    """
    recorded, wanted = ({"data.encoding": "auto"} | dict(each) for each in (recorded, wanted))

    def short(value: Any, other: Any) -> str:
        if isinstance(value, list) and value:  # [name, size] or [name, hash] of files
            others = set(map(tuple, other)) if isinstance(other, list) else set()
            name, fact = next((pair for pair in value if tuple(pair) not in others), value[0])
            if isinstance(fact, str):
                return f"{name} {fact[:8]}"
            return f"{len(value)} file(s), first {name}, {sum(size for _, size in value):,} bytes"
        text = str(value)
        return text[:12] + "..." if len(text) == 64 else text

    return ", ".join(
        f"{name}: {owner} {short(recorded.get(name, 'none'), value)}, config {short(value, recorded.get(name))}"
        for name, value in sorted(wanted.items())
        if recorded.get(name) != value
    )


def changed_settings(recorded: Mapping[str, Json], wanted: Mapping[str, Json]) -> str:
    """Return the differences between the settings in a shard manifest and in the config.

    Manifests of unpacked shards do not name the options of packing, so these are compared by ``data.packing``
    first. Manifests name ``data.contiguous`` only if it is true.
    """
    recorded, wanted = ({"data.contiguous": False} | dict(each) for each in (recorded, wanted))
    if recorded.get("data.packing", "none") != (packing := wanted.get("data.packing", "none")):
        wanted = {name: value for name, value in wanted.items() if name != "data.sequences_per_row"}
        wanted["data.packing"] = packing
    return differences(recorded, wanted, "shards")


# ------------------------------------------------------------------ features


@dataclass(frozen=True)
class Layout:
    """Features to parse, and the number of valid token ids."""

    # Name in google-research/bert -> (name in the files, kind, values per record).
    features: dict[str, tuple[str, str, int]]
    has_labels: bool  # True with labels of next sentence or sentence order
    vocab_size: int | None  # None: ids are not checked
    sequences_per_row: int = 0  # 0: rows are not packed
    predictions_per_row: int = 0

    @property
    def is_packed(self) -> bool:
        """True if rows hold several sequences."""
        return self.sequences_per_row > 0


def check_layout(index: ShardIndex, data: DataConfig, tokenizer: Tokenizer | None) -> Layout:
    """Return the features to parse.

    Raises ``ValueError`` with the first difference between the shards and the config.
    """
    folder, stored_features = index.folder, index.features
    if not index.records:
        raise ValueError(f"{folder}: the shards contain no records; build them again with more text")
    dynamic, has_labels = data.masking == "dynamic", data.next_sentence != "none"
    packed = _packed_sizes(folder, stored_features, data)
    most, predictions = packed or (1, data.max_predictions)
    mask = "sequence_ids" if packed else "input_mask"
    lengths = dict.fromkeys(("input_ids", mask, "segment_ids"), data.seq_length)
    is_masked = "masked_lm_ids" in stored_features
    if not dynamic:
        lengths |= dict.fromkeys(_MASKED, predictions)
    elif "word_starts" in stored_features:  # else the pieces of the vocabulary tell where words start
        lengths["word_starts"] = data.seq_length
    if has_labels:
        lengths["next_sentence_labels"] = most
    if "sequence_keys" in stored_features:
        lengths["sequence_keys"] = most
    if data.label_field:
        lengths["document_classes"] = most
    if dynamic and is_masked:
        raise ValueError(f"data.masking: dynamic, but the shards in {folder} were masked when built; use static")
    if not dynamic and not is_masked:
        raise ValueError(f"data.masking: static, but the shards in {folder} contain no masks; use dynamic")
    features = {}
    for name, length in lengths.items():
        stored = name if name in stored_features else _OTHER_NAMES.get(name, name)
        if stored not in stored_features:
            raise ValueError(
                f"{folder}: the shards lack the feature {name}; they contain {', '.join(sorted(stored_features))}; "
                "change the config, or build the shards again"
            )
        summary = stored_features[stored]
        if (summary.min_length, summary.max_length) != (length, length):
            option = {data.seq_length: "data.seq_length"}.get(length, "data.max_predictions")
            of_sequences = name in ("next_sentence_labels", "sequence_keys", "document_classes")
            option = f"{most} per row" if of_sequences else f"{option} {length}"
            lengths_found = " to ".join(map(str, sorted({summary.min_length, summary.max_length})))
            raise ValueError(
                f"{folder}: {name} has {lengths_found} values per record; the config needs {option}; change the "
                "config, or build the shards again"
            )
        features[name] = (stored, summary.kind, length)
    _check_ranges(index, features, tokenizer, len(data.classes))
    return Layout(features, has_labels, tokenizer.vocab_size if tokenizer else None, *(packed or ()))


def _packed_sizes(
    folder: Location, stored: Mapping[str, FeatureSummary], data: DataConfig
) -> tuple[int, int] | None:
    """Return C and M of packed rows, the number of sequences and of predictions; None if rows are not packed.

    Raises ``ValueError`` if this contradicts ``data.packing``.
    """
    is_packed = "sequence_ids" in stored
    if is_packed != (data.packing != "none"):
        found, allowed = ("packed", "best_fit") if is_packed else ("not packed", "none")
        raise ValueError(
            f"data.packing: {data.packing}, but the rows of the shards in {folder} are {found}; use {allowed}, or "
            "build shards in another folder"
        )
    if not is_packed:
        return None
    if "sequence_keys" not in stored:
        raise ValueError(
            f"{folder}: the packed rows lack the feature sequence_keys, one value per sequence; build the shards "
            "again with it"
        )
    most = stored["sequence_keys"].max_length
    if data.masking == "dynamic":
        return most, data.most_predictions(most)
    return most, stored["masked_lm_ids"].max_length if "masked_lm_ids" in stored else 0


def _check_ranges(
    index: ShardIndex, features: Mapping[str, tuple[str, str, int]], tokenizer: Tokenizer | None, classes: int
) -> None:
    """Raise ``ValueError`` if a value in the index is outside the range that the model accepts."""
    limits = {"input_mask": 2, "next_sentence_labels": 2, "masked_lm_positions": features["input_ids"][2]}
    limits |= {"segment_ids": 1 << 15, "sequence_keys": 1 << 32, "document_classes": classes + 1}
    if "sequence_keys" in features:
        limits["sequence_ids"] = features["sequence_keys"][2] + 1
    if tokenizer is not None:
        limits |= dict.fromkeys(("input_ids", "masked_lm_ids"), tokenizer.vocab_size)
    for name, limit in limits.items():
        if name not in features:
            continue
        for entry in index.entries:
            summary = entry.features.get(features[name][0])
            if summary is None or (summary.min_value >= 0 and summary.max_value < limit):
                continue
            what = f"{name} from {summary.min_value} to {summary.max_value} instead of 0 to {limit - 1}"
            remedy = (
                "the shards were built with another vocabulary; name it in data.vocab"
                if name in ("input_ids", "masked_lm_ids")
                else "build the shards again"
            )
            raise ValueError(f"{index.folder / entry.name}: {what}; {remedy}")


def warn_of_changed_files(index: ShardIndex) -> None:
    """Log a warning for each shard that is missing or whose size differs from the size in the index."""

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
            _log.warning(
                "%s %s, but the index has %d bytes: damaged records become blank rows", path, now, entry.bytes
            )
