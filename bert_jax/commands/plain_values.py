"""Plain Python values of the columns and arrays of any library.

The libraries of frames, arrays and datasets are recognized by the attributes of their objects and are never
imported.
"""

import enum
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.json_values import Json

# Types of which a value has more digits as float64 than anybody wrote.
_NARROW: Mapping[str, type[np.floating]] = {
    "float16": np.float16, "halffloat": np.float16, "float32": np.float32, "float": np.float32,
}  # fmt: skip


def column_names(data: Any) -> list[Hashable]:
    """Return the names of the columns of a frame, a table or a dataset, [] for other objects."""
    if isinstance(data, Mapping) or not hasattr(data, "__len__"):
        return []
    names = getattr(data, "column_names", None)
    names = getattr(data, "columns", None) if names is None else names
    return list(names) if isinstance(names, Iterable) else []


def is_column(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) > 0


def column(values: Any, feature: Any = None) -> list[Json]:
    """Return the plain values of a column; a frame is a column of rows."""
    if column_names(values):
        return [[*row] for row in zip(*(column(values[name]) for name in column_names(values)), strict=True)]
    read = reader(_dtype(values) if feature is None else feature)
    return [read(one) for one in _items(values)]


def _dtype(values: Any) -> Any:
    return getattr(values, "dtype", getattr(values, "type", None))  # of numpy, pandas, polars, torch; of Arrow


def _items(values: Any) -> Any:
    """Return the items of a column or an array of any library, or the value of an array without dimensions."""
    for method in ("to_pylist", "to_list", "tolist"):
        if hasattr(values, method):
            return getattr(values, method)()
    return np.asarray(values).tolist() if hasattr(values, "__array__") else values


def reader(feature: Any) -> Callable[[Any], Json]:
    """Return the function that reads a value of a column with the dtype, or the feature of ``datasets``,
    ``feature``: numbers of classes become names, and floats of less than 64 bits those with the same shortest text.
    """
    while hasattr(feature, "feature") or (isinstance(feature, list) and feature):
        feature = feature[0] if isinstance(feature, list) else feature.feature
    if hasattr(feature, "int2str"):
        return lambda value: _class_names(plain(value), feature.names)
    narrow = _NARROW.get(str(getattr(feature, "dtype", feature)).lower().removeprefix("torch."))
    return plain if narrow is None else lambda value: _shortened(plain(value), narrow)


def _class_names(value: Json, names: Sequence[str]) -> Json:
    if isinstance(value, list):
        return [_class_names(one, names) for one in value]
    if isinstance(value, int):
        return None if value < 0 else names[value]
    return value


def _shortened(value: Json, narrow: type[np.floating]) -> Json:
    if isinstance(value, list):
        return [_shortened(one, narrow) for one in value]
    return float(str(narrow(value))) if isinstance(value, float) else value


def plain(value: Any) -> Json:
    """Return ``value`` as JSON has it: a string, a number, True, False, None, a list or a dict."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=str)
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    items = _items(value)
    if items is not value:
        return reader(_dtype(value))(items)
    return [plain(one) for one in value] if isinstance(value, Iterable) else value
