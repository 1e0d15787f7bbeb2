"""Columns of a log line, panels, tiles and sections of the report: of every run, and of one objective."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """Part of a printed line: the value of ``key`` in ``template``, then ``(acc VALUE)`` where ``accuracy`` names a
    key."""

    template: str
    key: str
    style: str = ".3f"
    accuracy: str = ""


@dataclass(frozen=True)
class Panel:
    """One diagram: a metric over steps."""

    title: str
    key: str
    log: bool = False
    percent: bool = False
    # Noisy from step to step: a running mean is drawn over the values.
    noisy: bool = True
    # ``split`` of the evaluations that are drawn beside training.
    split: str = "eval"
    # Key in the report's data of a value drawn as a dashed line, and its name in the legend.
    baseline: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Tile:
    """A number at the top of the report."""

    label: str
    key: str


def _no_sections(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    return []


@dataclass(frozen=True)
class Display:
    """Presentation of one objective; every part may be empty."""

    # Keys of every training line of metrics.jsonl; an unknown value is null.
    keys: tuple[str, ...] = ()
    # The progress bar also shows the first column.
    columns: tuple[Column, ...] = ()
    panels: tuple[Panel, ...] = ()
    # Tiles of final evaluation values and baselines.
    tiles: tuple[Tile, ...] = ()
    # (heading, HTML) of each section after the final evaluation, from the content of report_data.json.
    sections: Callable[[Mapping[str, Any]], Sequence[tuple[str, str]]] = _no_sections


# Columns of every run that show n/a for null, after those of the objective.
RUN_COLUMNS = (
    Column("lr {}", "learning_rate", ".2g"),
    Column("grad {}", "grad_norm", ".3g"),
    Column("{} s/step", "seconds_per_step"),
)
# Panels of every run: before those of the objective, and after them.
FIRST_PANELS = (Panel("loss", "loss"),)
LAST_PANELS = (
    Panel("learning rate", "learning_rate", noisy=False),
    Panel("gradient norm", "grad_norm", log=True),
    Panel("tokens per second", "tokens_per_second"),
    Panel("model FLOP utilization", "mfu", percent=True),
)
# Tiles of every run, from the last training line.
RUN_TILES = (
    Tile("step", "step"),
    Tile("examples seen", "examples_seen"),
    Tile("tokens per second", "tokens_per_second"),
    Tile("model FLOP utilization", "mfu"),
)
