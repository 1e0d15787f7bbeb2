"""Comparing shards that are there with the configuration, and the lines that say what differs."""

from pathlib import Path
from typing import Any

from bert_jax.config.pretrain import DataConfig
from bert_jax.tokenization import Tokenizer
from data_pipeline.shards.shard_files import read_index

_MASKING = (
    "max_predictions", "mask_unit", "mask_fraction", "mask_token_share", "random_token_share",
)  # fmt: skip
_ALWAYS = (
    "seq_length", "masking", "word_segmenter", "next_sentence", "short_sequence_fraction", "seed", "eval_fraction",
    "line", "json_field",
)  # fmt: skip
SHARDS_PER_EVAL_SHARD = 16


def shard_settings(data: DataConfig, tokenizer: Tokenizer, split: str) -> dict[str, Any]:
    """Every setting that the bytes of a split's shards follow from, by its name in the configuration.

    Held-out text gets one pass and a sixteenth of the shards. Dynamic masking happens at read time, so its
    settings are not part of such shards.
    """
    names = [*_ALWAYS, *(_MASKING if data.masking == "static" else ())]
    if data.masking == "static" and data.mask_unit == "span":
        names += ["span_mean", "span_max"]
    settings = {f"data.{name}": getattr(data, name) for name in names}
    is_train = split == "train"
    settings["data.dupe_factor"] = data.dupe_factor if is_train else 1
    settings["data.num_shards"] = data.num_shards if is_train else max(1, data.num_shards // SHARDS_PER_EVAL_SHARD)
    return settings | {"vocabulary": tokenizer.fingerprint}


def difference(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings of ``wanted`` whose value in ``found`` is another: name -> (found, wanted)."""
    return {name: (found.get(name), value) for name, value in sorted(wanted.items()) if found.get(name) != value}


def describe(differences: dict[str, tuple[Any, Any]], owner: str) -> str:
    """One line of ``name: OWNER has X, the config Y``."""

    def short(value: Any) -> str:
        if isinstance(value, list) and value:
            return f"{len(value)} file(s) from {value[0][0]} on, {sum(size for _, size in value):,} bytes"
        text = str(value)
        return text[:12] + "..." if len(text) == 64 else text

    return ", ".join(
        f"{name}: {owner} {short(found)}, config {short(wanted)}" for name, (found, wanted) in differences.items()
    )


def pair_advice(documents: int, distinct: int, split: str) -> str:
    """Why next-sentence pairs cannot be made, and what to do."""
    return (
        f"data.next_sentence: nsp draws its random sentences from other documents, but of {documents} document(s) "
        f"only {distinct} is for {split}; separate documents by blank lines, or give --data.next_sentence sop "
        "or none"
    )


def check_foreign(data: DataConfig, folder: Path, tokenizer: Tokenizer) -> None:
    """``ValueError`` when TFRecords of somebody else's do not fit the configuration or have no index."""
    index = read_index(folder)
    features = index.features
    ids = next((name for name in ("input_ids", "input_word_ids") if name in features), None)
    if ids is None:
        raise ValueError(f"{folder}: the records have no input_ids; found: {', '.join(features) or 'no record'}")
    found, wanted = {}, {}
    found["data.seq_length"], wanted["data.seq_length"] = features[ids].max_length, data.seq_length
    found["data.masking"] = "static" if "masked_lm_ids" in features else "dynamic"
    wanted["data.masking"] = data.masking
    if "masked_lm_ids" in features:
        found["data.max_predictions"] = features["masked_lm_ids"].max_length
        wanted["data.max_predictions"] = data.max_predictions
    differences = difference(found, wanted)
    if differences:
        raise ValueError(f"{folder}: {describe(differences, 'shards')}; change the config, or use other shards")
    low, high = index.id_range or (0, 0)
    if low < 0 or high >= tokenizer.vocab_size:
        raise ValueError(
            f"{folder}: token ids from {low} to {high}, but the vocabulary has {tokenizer.vocab_size} pieces; "
            "give the vocabulary that the shards were made with (data.vocab)"
        )
