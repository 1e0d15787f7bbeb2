"""The stages of ``bert-data clean`` after the chunks are scanned and the exact duplicates are found."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bert_jax.io.storage import Location
from data_pipeline.contrib.clean.duplicates import compare, comparison_jobs, find_candidates, sign_chunk
from data_pipeline.contrib.clean.output import write_source
from data_pipeline.contrib.clean.scanning import count_lines, count_ranges
from data_pipeline.contrib.clean.workspace import load_chunks, load_plan


class Stage(NamedTuple):
    """Jobs that need all results of the stage before: ``job(folder, item)`` for each of ``items(folder)``."""

    name: str
    items: Callable[[Location], Sequence[Any]]
    job: Callable[[Location, Any], None]


STAGES = (
    Stage("lines", count_ranges, count_lines),
    Stage("signatures", lambda folder: load_chunks(folder, "scanned").names, sign_chunk),
    Stage("candidates", lambda folder: [0], find_candidates),
    Stage("comparison", comparison_jobs, compare),
    Stage("text", lambda folder: range(len(load_plan(folder).sources)), write_source),
)
