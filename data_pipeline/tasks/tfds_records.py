"""Reader of datasets that TensorFlow Datasets has prepared; it downloads nothing."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from bert_jax.config.task import TaskDataConfig
from bert_jax.io.errors import first_line
from bert_jax.records import Record
from data_pipeline.tasks.columns import Columns, make_record
from data_pipeline.tasks.task_files import listed, split_address
from data_pipeline.text.datasets import load_tfds, tfds_folder


def read_tfds(name: str, columns: Columns, data: TaskDataConfig) -> Iterator[Record]:
    """Yield the records of ``NAME[/CONFIG][:VERSION]:SPLIT`` in file order; every feature is a column.

    The value of a class feature is the name of the class, or None for class -1. Raises ``ValueError`` if the
    dataset is not prepared or the split does not exist.
    """
    dataset, split = split_address(name, dataset=True)
    tfds = load_tfds()
    builder = _builder(tfds, dataset, data.tfds_data_dir)
    splits = listed(builder.info.splits)
    if not split:
        raise ValueError(f"tfds:{dataset}: the split is missing; write {dataset}:SPLIT; splits: {splits}")
    features = builder.info.features
    names = sorted(features)
    places = columns.find(names, f"tfds:{dataset}")
    try:
        records = builder.as_dataset(
            split=split,
            shuffle_files=False,
            read_config=tfds.ReadConfig(interleave_cycle_length=1),
            decoders=tfds.decode.PartialDecoding({names[column]: True for _, column in places}),
        )
    except Exception as error:  # TFDS raises exceptions of several types for a missing split
        raise ValueError(
            f"tfds:{dataset}: cannot read the split {split!r}: {first_line(error)}; splits: {splits}"
        ) from None
    for number, example in enumerate(tfds.as_numpy(records)):
        fields = [(role, _plain(example[names[i]], features[names[i]])) for role, i in places]
        source = f"tfds:{dataset}:{split}: record {number}"
        yield make_record(fields, source=source, number=number, separator=data.label_separator)


def _builder(tfds: ModuleType, dataset: str, data_dir: str) -> Any:
    folder = tfds_folder(data_dir)
    try:
        return tfds.core.read_only_builder.builder_from_files(dataset, data_dir=folder)
    except Exception as error:
        raise ValueError(
            f"tfds:{dataset}: not prepared in {folder} ({first_line(error)}); prepare it, or set "
            "data.tfds_data_dir to its folder"
        ) from None


def _plain(value: Any, feature: Any) -> Any:
    """Convert the value of a feature to a string, to None for class -1, or to a list or dict of these."""
    if isinstance(value, dict):
        return {name: _plain(one, feature[name]) for name, one in value.items()}
    if getattr(value, "ndim", 0):
        return [_plain(one, feature) for one in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if hasattr(feature, "int2str"):
        return None if value < 0 else feature.int2str(int(value))
    # str() of a numpy float32 is the shortest text (3.8); converted to a Python float, it is 3.7999999523162842.
    return str(value).lower()
