"""The type of JSON values."""

from collections.abc import Mapping, Sequence

# A JSON value: a parsed object is a ``dict``, a parsed array a ``list``.
Json = Mapping[str, "Json"] | Sequence["Json"] | str | int | float | bool | None
