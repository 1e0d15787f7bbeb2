"""The folders of shards that a run reads: ``data.shards``, or the parts of ``data.mixture`` with their weights."""

import logging
import math
from typing import NamedTuple

from bert_jax.config.pretrain import MIXTURE_RESOLUTION, DataConfig
from bert_jax.io.storage import Location, location

_log = logging.getLogger(__name__)


class Part(NamedTuple):
    """A folder of shards. The share of its rows is ``weight`` divided by the sum of the weights of all parts."""

    name: str  # as in data.mixture; empty without a mixture
    weight: int
    folder: Location


def shard_parts(data: DataConfig) -> list[Part]:
    """Return the parts of ``data.mixture`` in their order or, without a mixture, ``data.shards`` as a single part.

    A name with a slash is a path; any other name is a folder in ``data.shards``. Raises ``ValueError`` if
    ``data.shards`` is needed and not set, or if two names are the same folder.
    """
    if not data.mixture:
        return [Part("", 1, location(data.shards))]
    pairs = data.mixture_parts
    total = sum(weight for _, weight in pairs)
    weights = [round(weight / total * MIXTURE_RESOLUTION) for _, weight in pairs]
    divisor = math.gcd(*weights)
    parts: dict[Location, Part] = {}
    for (name, _), weight in zip(pairs, weights, strict=True):
        if "/" not in name and not data.shards:
            raise ValueError(
                f"data.mixture: {name} is a folder in data.shards, which is not set; set data.shards, or write a "
                f"path with a slash, such as ./{name}"
            )
        part = Part(name, weight // divisor, location(name) if "/" in name else location(data.shards) / name)
        same = parts.setdefault(part.folder.resolve(), part)
        if same is not part:
            raise ValueError(f"data.mixture: {same.name} and {name} are the same folder; name it once")
    return list(parts.values())


def train_folder(folder: Location) -> Location:
    """Return the folder of the training shards in ``folder``: train/ or, if it does not exist, ``folder``."""
    return folder / "train" if (folder / "train").is_dir() else folder


def train_parts(data: DataConfig) -> list[Part]:
    """Return the parts with the folders of their training shards."""
    return [part._replace(folder=train_folder(part.folder)) for part in shard_parts(data)]


def held_out_parts(data: DataConfig) -> list[Part]:
    """Return the parts with the folders of their held-out shards, except parts without held-out shards. If
    ``data.eval_shards`` is set, it is the only part. Raises ``ValueError`` if ``data.eval_shards`` is not a folder.
    """
    if data.eval_shards:
        if not location(data.eval_shards).is_dir():
            raise ValueError(
                f"data.eval_shards: {data.eval_shards} is not a folder; set it to a folder of shards, or omit it"
            )
        return [Part("", 1, location(data.eval_shards))]
    parts = [part._replace(folder=part.folder / "eval") for part in shard_parts(data)]
    found = [part for part in parts if part.folder.is_dir()]
    if found and len(found) < len(parts):
        names = ", ".join(part.name for part in parts if part not in found)
        _log.warning("data.mixture: no held-out shards in %s: evaluations omit these parts", names)
    return found
