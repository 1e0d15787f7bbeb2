"""Shards that a run reads and never builds: TFRecords that another program wrote, and the parts of a mixture."""

from bert_jax.config.pretrain import DataConfig
from bert_jax.io.storage import Location
from bert_jax.tokenization import Tokenizer
from data_pipeline.build.shard_split import split_folder
from data_pipeline.build.vocabulary import existing_vocabulary
from data_pipeline.shards.compatibility import changed_settings, check_layout, shard_settings
from data_pipeline.shards.mixture_parts import held_out_parts, shard_parts, train_folder
from data_pipeline.shards.shard_files import INDEX_NAME, MANIFEST_NAME, read_index, read_manifest

# Settings of a build in which the parts of a mixture may differ from the config and from each other.
_FREE = (
    "data.dupe_factor", "data.num_shards", "data.short_sequence_fraction", "data.seed", "data.eval_fraction",
    "data.line", "data.json_field",
)  # fmt: skip


def is_external(shards: Location) -> bool:
    """Return True if ``shards`` contains TFRecords that ``bert-data shards`` did not write."""
    folder = train_folder(shards)
    if (folder / MANIFEST_NAME).is_file() or not folder.is_dir() or any(shards.glob(".build-*")):
        return False
    return (folder / INDEX_NAME).is_file() or any(folder.glob("[!.]*.tfrecord*"))


def check_external(data: DataConfig, shards: Location, vocab_size: int) -> Location:
    """Check that TFRecords of another program match the config; return the path of the vocabulary."""
    vocab, tokenizer = existing_vocabulary(data, vocab_size)
    if tokenizer is None:
        raise ValueError(f"data.vocab: not set; set it to the vocabulary of the shards in {shards}")
    evaluation = split_folder(data, "eval")
    for folder in (train_folder(shards), evaluation):
        if folder != evaluation or folder.is_dir():
            check_layout(read_index(folder), data, tokenizer)
    return vocab


def check_mixture(data: DataConfig, vocab_size: int) -> Location:
    """Check that every part of ``data.mixture`` matches the config; return the path of the vocabulary.

    Raises ``ValueError`` if a part is missing or was built with other settings, if the vocabulary is missing, or if
    ``data.corpus`` is set, because nothing is built.
    """
    if data.corpus:
        raise ValueError(
            f"data.corpus: {' '.join(data.corpus)} is not allowed with data.mixture, because a run does not build "
            "the parts of a mixture; build each part with bert-data shards, and set data.corpus to []"
        )
    parts = shard_parts(data)
    if not data.vocab and not data.shards:
        raise ValueError("data.vocab: not set; set it to the vocabulary with which the parts were built")
    vocab, tokenizer = existing_vocabulary(data, vocab_size)
    if tokenizer is None:
        raise ValueError(f"data.vocab: not set, and {vocab} does not exist; set it to the vocabulary of the parts")
    for part in parts:
        if not is_external(part.folder) and not (train_folder(part.folder) / MANIFEST_NAME).is_file():
            raise ValueError(
                f"data.mixture: {part.name}: {part.folder} contains no shards; build them with bert-data shards "
                f"--data.shards {part.folder} --data.vocab {vocab}, the corpus and the recipe of the run"
            )
        _check_part(f"data.mixture: {part.name}", train_folder(part.folder), data, tokenizer, "train")
    for part in held_out_parts(data):
        name = f"data.mixture: {part.name}" if part.name else "data.eval_shards"
        _check_part(name, part.folder, data, tokenizer, "eval")
    return vocab


def _check_part(name: str, folder: Location, data: DataConfig, tokenizer: Tokenizer, split: str) -> None:
    """Raise ``ValueError``, which begins with ``name``, if the shards in ``folder`` do not match the config."""
    manifest = read_manifest(folder)
    if manifest is not None:
        wanted = shard_settings(data, tokenizer, split)
        wanted = {key: value for key, value in wanted.items() if key not in _FREE}
        if changed := changed_settings(manifest["settings"], wanted):
            raise ValueError(
                f"{name}: {folder}: built with other settings: {changed}; change the config, build "
                "this part again, or omit it"
            )
    try:
        check_layout(read_index(folder), data, tokenizer)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
