"""Options of a command that makes several fine-tuning runs: a grid of settings, and several seeds of each."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import RunOptions, Setting, build_config, parse_settings
from bert_jax.config.options import field_types

SEED = "training.seed"
# Devlin et al. 2018, appendix A.3, with the learning rates of section 4.1.
PAPER = {
    "training.global_batch_size": ("16", "32"),
    "optimizer.learning_rate": ("5e-05", "4e-05", "3e-05", "2e-05"),
    "training.num_epochs": ("2.0", "3.0", "4.0"),
}


@dataclass(frozen=True, kw_only=True)
class FinetuneRunOptions(RunOptions):
    """Options of fine-tuning that are not part of a run's config."""

    # Run every combination of KEY=VALUE,VALUE,... ...; without any, the grid of the BERT paper (batch 16, 32; rate
    # 5e-5, 4e-5, 3e-5, 2e-5; 2, 3, 4 epochs). What is finished is not run again; several processes share the work.
    sweep: tuple[str, ...] = ()
    # Run so many seeds, counted from training.seed, and report mean, standard deviation and best.
    seeds: int = 1

    # Value of an option that stands without one.
    VALUE_WITHOUT_ARGUMENT = MappingProxyType({"sweep": ["paper"]})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds < 1:
            raise ValueError(f"seeds: {self.seeds} is not allowed; allowed: 1 or more")

    @property
    def is_sweep(self) -> bool:
        """Return True if the sweep has more than one run."""
        return bool(self.sweep) or self.seeds > 1


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    # (key, value) of what is swept, and the seed.
    settings: tuple[tuple[str, str], ...]
    seed: int

    @property
    def name(self) -> str:
        """Folder of the run, the same whatever else is swept."""
        parts = [*self.settings, (SEED, str(self.seed))]
        return ",".join(f"{key.rpartition('.')[2]}={value.replace('/', '_')}" for key, value in parts)

    @property
    def arguments(self) -> list[str]:
        """As on the command line."""
        return [word for key, value in (*self.settings, (SEED, str(self.seed))) for word in (f"--{key}", value)]


def plan_cells(options: FinetuneRunOptions, settings: Sequence[Setting]) -> tuple[FinetuneConfig, list[Cell]]:
    """Return the config that all runs share and the runs in order: every combination of the swept values, the last
    one changing fastest, each with every seed. ``settings`` are those of the command and its model.

    Raises ``ValueError`` for a grid or a value that is not allowed, before anything runs.
    """
    grid = _grid(options.sweep)
    base = build_config(FinetuneConfig, settings)
    if not base.data.dev and not base.data.dev_fraction:
        raise ValueError(
            "data.dev: not given: runs are compared on it; name a file there or cut one with data.dev_fraction"
        )
    combinations = [tuple(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    seeds = range(base.training.seed, base.training.seed + options.seeds)
    cells = [Cell(combination, seed) for combination in combinations for seed in seeds]
    for combination in combinations:
        build_config(FinetuneConfig, [*settings, *(Setting("--sweep", key, value) for key, value in combination)])
    return base, cells


def _grid(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Values by option. Raises ``ValueError``."""
    if tuple(words) == ("paper",):
        return dict(PAPER)
    grid: dict[str, tuple[str, ...]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        values = tuple(value.strip() for value in text.split(","))
        if not equals or not all(values):
            raise ValueError(
                f"--sweep: {word!r} is not allowed; allowed: KEY=VALUE,VALUE, or nothing (the paper's grid)"
            )
        if key == SEED:
            raise ValueError(f"--sweep: {word!r} is not allowed; seeds are counted: --{SEED} FIRST --seeds N")
        parsed = [parse_settings(FinetuneConfig, [Setting("--sweep", key, value)])[key][0] for value in values]
        if any(isinstance(value, tuple) for value in parsed):
            raise ValueError(f"--sweep: {word!r} is not allowed; options that take a list are not swept")
        if key in grid or len(set(parsed)) < len(parsed):
            raise ValueError(f"--sweep: {word!r} is not allowed; give every option once, and every value once")
        grid[key] = tuple(str(value) for value in parsed)
    return grid


def shared_settings(base: FinetuneConfig, cells: Sequence[Cell]) -> dict[str, object]:
    """Return every option that the runs of a sweep do not change, by its name."""
    swept = {key for cell in cells for key, _ in cell.settings} | {SEED}
    values: dict[str, object] = {}
    for name in field_types(FinetuneConfig):
        if name not in swept:
            found: object = base
            for part in name.split("."):
                found = getattr(found, part)
            values[name] = list(found) if isinstance(found, tuple) else found
    return values
