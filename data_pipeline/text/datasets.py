"""Corpora of other libraries: TensorFlow Datasets (``tfds:``) and Hugging Face datasets (``hf:``).

Each file of a split is a source, so that many workers can read one dataset. A dataset on disk is used unchanged; a
missing dataset is downloaded if the server answers within 5 seconds.
"""

import logging
import os
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from bert_jax.io.errors import first_line
from bert_jax.io.storage import location
from data_pipeline.host_tensorflow import load_tensorflow
from data_pipeline.text.documents import Source

_SECONDS_TO_ANSWER = 5.0


def is_reachable(host: str, port: int = 443) -> bool:
    """Return True if ``host`` accepts a connection within 5 seconds, or if a proxy is set.

    With a proxy, no connection is attempted, because ``host`` cannot be tested through the proxy.
    """
    if any(name in os.environ for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    answered = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((host, port), _SECONDS_TO_ANSWER).close()
        except OSError:
            return
        answered.set()

    # The lookup of the host name has no timeout, so it runs in a thread.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_SECONDS_TO_ANSWER)
    return answered.is_set()


# ------------------------------------------------------------------ TensorFlow Datasets


@dataclass(frozen=True)
class TfdsShard:
    """Reader of one file of a prepared TensorFlow dataset; skips ``skip`` records and reads the next ``take``."""

    builder_dir: str
    split: str
    shard: int
    skip: int
    take: int

    def __call__(self, field: str) -> Iterator[str]:
        """Yield the text of ``field`` of every record. Raises ``ValueError`` if ``field`` is not a text field."""
        tfds = load_tfds()
        builder = tfds.builder_from_directory(self.builder_dir)
        features = builder.info.features
        texts = [name for name in sorted(features) if isinstance(features[name], tfds.features.Text)]
        if field not in texts:
            raise ValueError(
                f"data.json_field: {field!r} is not a text field of tfds:{builder.info.full_name}; allowed: "
                f"{', '.join(texts) or 'none; the dataset has no text field'}"
            )
        dataset = builder.as_dataset(
            split=f"{self.split}[{self.shard}shard]",
            shuffle_files=False,
            decoders=tfds.decode.PartialDecoding({field: True}),
        )
        for record in islice(tfds.as_numpy(dataset), self.skip, self.skip + self.take):
            yield record[field].decode("utf-8", "replace")


def load_tfds() -> ModuleType:
    """Import TensorFlow Datasets with its messages disabled. Raises ``ValueError`` if it is not installed."""
    load_tensorflow()
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ValueError(
            f"tfds: corpora require TensorFlow Datasets ({first_line(error)}); run: pip install 'bert_jax[data]'"
        ) from None
    tfds.disable_progress_bar()
    logging.getLogger("absl").setLevel(logging.ERROR)  # hides warnings about deprecated functions in the library
    return tfds


def tfds_folder(data_dir: str) -> str:
    """Return ``data_dir``, or the default folder of TensorFlow Datasets if ``data_dir`` is empty."""
    return data_dir or os.environ.get("TFDS_DATA_DIR") or str(Path.home() / "tensorflow_datasets")


def tfds_sources(entry: str, *, data_dir: str, split: str) -> list[Source]:
    """List the sources of ``tfds:NAME[/CONFIG][:VERSION]``, one per file.

    The dataset is read from ``data_dir`` (empty: the default folder of TensorFlow Datasets); a missing dataset is
    downloaded and prepared there. Raises ``ValueError`` (one line) if the split does not exist or the dataset
    cannot be prepared; without a network, the message names the files to copy and their folder.
    """
    builder = _tfds_builder(entry, data_dir)
    known = builder.info.splits
    try:
        instructions = known[split].file_instructions
    except Exception:  # TFDS raises exceptions of several types, such as ValueError and KeyError
        raise ValueError(
            f"data.dataset_split: {split!r} is not a split of {entry}; allowed: {', '.join(known)}, and sums and "
            "slices of these, such as train+test or train[:10%]"
        ) from None
    places = {str(path): (one.name, i) for one in known.values() for i, path in enumerate(one.filepaths)}
    sources = []
    for instruction in instructions:
        path = location(str(instruction.filename))
        skip, take = instruction.skip, instruction.take
        take = instruction.examples_in_shard - skip if take < 0 else take
        part = "" if take == instruction.examples_in_shard else f"[{skip}:{skip + take}]"
        records = TfdsShard(str(builder.data_path), *places[str(instruction.filename)], skip, take)
        name = f"tfds:{builder.info.full_name}/{path.name}{part}"
        sources.append(Source(path=path, name=name, records=records))
    return sources


def _tfds_builder(entry: str, data_dir: str) -> Any:
    tfds = load_tfds()
    name = entry.removeprefix("tfds:")
    folder = tfds_folder(data_dir)
    try:
        return tfds.core.read_only_builder.builder_from_files(name, data_dir=folder)
    except tfds.core.registered.DatasetNotFoundError:
        pass
    except Exception as error:
        raise ValueError(f"{entry}: the dataset in {folder} cannot be read: {first_line(error)}") from None
    if not is_reachable("storage.googleapis.com"):
        bare, _, version = name.partition(":")
        raise ValueError(
            f"{entry}: not prepared in {folder}, and the network is not reachable; copy dataset_info.json, "
            f"features.json and the data files (*.tfrecord-*) of a prepared dataset to {folder}/{bare}/"
            f"{version or 'VERSION'}, or set data.tfds_data_dir to the folder that contains prepared datasets"
        )
    try:
        builder = tfds.builder(name, data_dir=folder)
        builder.download_and_prepare()
    except Exception as error:
        raise ValueError(f"{entry}: TensorFlow Datasets cannot prepare the dataset: {first_line(error)}") from None
    return builder


# ------------------------------------------------------------------ Hugging Face datasets


@dataclass(frozen=True)
class ArrowFile:
    """Reader of one Arrow file of a Hugging Face dataset."""

    path: str

    def __call__(self, field: str) -> Iterator[str]:
        """Yield the text of ``field`` of every record. Raises ``ValueError`` if ``field`` is missing."""
        dataset = _load_datasets().Dataset.from_file(self.path)
        if field not in dataset.column_names:
            raise ValueError(
                f"data.json_field: {self.path} has no field {field!r}; allowed: {', '.join(dataset.column_names)}"
            )
        for number, record in enumerate(dataset.select_columns([field])):
            if not isinstance(record[field], str):
                raise ValueError(
                    f"data.json_field: {self.path}: record {number} has no text in {field!r}; name a text field"
                )
            yield record[field]


def _load_datasets() -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise ValueError("hf: corpora require Hugging Face datasets; run: pip install datasets") from None
    datasets.disable_progress_bars()
    return datasets


def hf_sources(entry: str, *, split: str) -> list[Source]:
    """List the sources of ``hf:OWNER/NAME[/CONFIG]``, or of ``hf:FOLDER``, a folder that ``save_to_disk`` wrote.

    Each Arrow file is one source. Raises ``ValueError`` (one line) if the library is not installed, or if the
    dataset is not on disk and cannot be downloaded.
    """
    name = entry.removeprefix("hf:")
    if not re.fullmatch(r"[\w.-]+", split):
        raise ValueError(
            f"data.dataset_split: {split!r} is not allowed for {entry}; allowed: one split, such as train"
        )
    if Path(name).is_dir():
        read = _saved
    else:
        if not is_reachable("huggingface.co"):
            os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: otherwise requests are retried for minutes
        read = _fetched
    datasets = _load_datasets()
    try:
        dataset = read(datasets, name, split)
    except Exception as error:
        advice = "; the network is not reachable: copy a folder that save_to_disk wrote, and use hf:FOLDER"
        advice = advice if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise ValueError(f"{entry}: split {split!r} cannot be read: {first_line(error)}{advice}") from None
    if dataset._indices is not None:
        raise ValueError(
            f"{entry}: the dataset is a selection of the records of its files, which is not supported; save it "
            "with save_to_disk, and use hf:FOLDER"
        )
    paths = [Path(file["filename"]) for file in dataset.cache_files]
    return [Source(path=path, name=f"{entry}/{split}/{path.name}", records=ArrowFile(str(path))) for path in paths]


def _saved(datasets: ModuleType, name: str, split: str) -> Any:
    loaded = datasets.load_from_disk(name)
    splits = loaded if isinstance(loaded, dict) else {str(loaded.split or split): loaded}
    if split not in splits:
        raise ValueError(f"no such split; allowed: {', '.join(splits)} (data.dataset_split)")
    return splits[split]


def _fetched(datasets: ModuleType, name: str, split: str) -> Any:
    owner, *rest = name.split("/")
    return datasets.load_dataset("/".join([owner, *rest[:1]]), *rest[1:], split=split)
