"""Options of a sweep: fine-tuning runs with a grid of settings, and with several seeds for each setting."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import Setting, build_config, flat_values, parse_settings
from bert_jax.config.options import options_of
from bert_jax.config.schema import Positive, RunOptions

SEED = "training.seed"
# Devlin et al. 2018, appendix A.3, with the learning rates of section 4.1.
PAPER = {
    "training.global_batch_size": ("16", "32"),
    "optimizer.learning_rate": ("5e-05", "4e-05", "3e-05", "2e-05"),
    "training.num_epochs": ("2.0", "3.0", "4.0"),
}


# Values of the options of pruning without pruning.
UNPRUNED: dict[str, Any] = {
    "prune_heads": 1.0, "prune_units": 1.0, "prune_rounds": 3, "prune_importance": "gradient"
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FinetuneRunOptions(RunOptions):
    """Options of fine-tuning that are not part of the config of a run."""

    FIXED: ClassVar[tuple[str, ...]] = (
        "continue_from", "teacher_outputs", "add_words", "vocab_slots", "extend_positions"
    )  # fmt: skip

    # Train every combination of the values in the arguments KEY=VALUE,VALUE,...; without arguments, the grid of the
    # BERT paper (batch size 16, 32; learning rate 5e-5, 4e-5, 3e-5, 2e-5; 2, 3, 4 epochs). Finished runs are not
    # repeated; several processes can share the work.
    sweep: tuple[str, ...] = ()
    # Number of consecutive seeds, from training.seed; with several, report mean, standard deviation and best run.
    seeds: Positive[int] = 1
    # Share of the attention heads to keep: train, remove the least important ones, and train again, in rounds (see
    # bert-jax prune). Each training is one of the recipe.
    prune_heads: float = 1.0
    # Share of the feed-forward units to keep, likewise.
    prune_units: float = 1.0
    # Number of removals; most is removed in the first ones.
    prune_rounds: Positive[int] = 3
    # Importance of heads and units: gradient (of the loss on training records), magnitude, movement (how much the
    # norm of their parameters grew in the round) or random.
    prune_importance: Literal["gradient", "magnitude", "movement", "random"] = "gradient"

    # Value of an option that has no argument on the command line.
    VALUE_WITHOUT_ARGUMENT = MappingProxyType({"sweep": ["paper"]})

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = [name for name in ("prune_rounds", "prune_importance") if getattr(self, name) != UNPRUNED[name]]
        if changed and not self.is_pruned:
            raise ValueError(f"--{changed[0]}: requires --prune_heads or --prune_units, the share to keep")

    @property
    def is_sweep(self) -> bool:
        """True if the command starts more than one run."""
        return bool(self.sweep) or self.seeds > 1

    @property
    def is_pruned(self) -> bool:
        """True if heads or units are removed in rounds."""
        return self.prune_heads != 1 or self.prune_units != 1


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    # (key, value) of the swept options.
    settings: tuple[tuple[str, str], ...]
    seed: int

    @property
    def name(self) -> str:
        """Name of the folder of the run, which does not depend on the other runs of the sweep."""
        parts = [*self.settings, (SEED, str(self.seed))]
        return ",".join(f"{key.rpartition('.')[2]}={value.replace('/', '_')}" for key, value in parts)

    @property
    def arguments(self) -> list[str]:
        """Settings and seed as command-line arguments."""
        return [word for key, value in (*self.settings, (SEED, str(self.seed))) for word in (f"--{key}", value)]


def plan_cells(options: FinetuneRunOptions, settings: Sequence[Setting]) -> tuple[FinetuneConfig, list[Cell]]:
    """Return the config that all runs share, and the runs in order: every combination of the swept values with
    every seed. The seed changes fastest, then the last option. ``settings`` are those of the command line and of
    the initial model.

    Raises ``ValueError`` for a grid or a value that is not allowed, before any run starts.
    """
    grid = _grid(options.sweep)
    base = build_config(FinetuneConfig, settings)
    if not base.data.dev and not base.data.dev_fraction:
        raise ValueError(
            "data.dev: empty, but a sweep compares its runs on the dev split; set data.dev or data.dev_fraction"
        )
    combinations = [tuple(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    seeds = range(base.training.seed, base.training.seed + options.seeds)
    cells = [Cell(combination, seed) for combination in combinations for seed in seeds]
    for combination in combinations:
        build_config(FinetuneConfig, [*settings, *(Setting("--sweep", key, value) for key, value in combination)])
    return base, cells


def _grid(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the swept values by option. Raises ``ValueError`` for an argument that is not KEY=VALUE,VALUE."""
    if tuple(words) == ("paper",):
        return dict(PAPER)
    grid: dict[str, tuple[str, ...]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        values = tuple(value.strip() for value in text.split(","))
        if not equals or not all(values):
            raise ValueError(
                f"--sweep: {word!r} is not allowed; allowed: KEY=VALUE,VALUE, or no argument (the BERT grid)"
            )
        if key == SEED:
            raise ValueError(f"--sweep: {word!r} is not allowed; use --{SEED} FIRST --seeds N for several seeds")
        if key in options_of(FinetuneConfig, fixed=True):
            raise ValueError(f"--sweep: {key}: an option of pretraining only; omit it")
        parsed = [parse_settings(FinetuneConfig, [Setting("--sweep", key, value)])[key][0] for value in values]
        if any(isinstance(value, tuple) for value in parsed):
            raise ValueError(f"--sweep: {word!r} is not allowed; options whose value is a list cannot be swept")
        if key in grid or len(set(parsed)) < len(parsed):
            raise ValueError(f"--sweep: {word!r} is not allowed; use every option once and every value once")
        grid[key] = tuple(str(value) for value in parsed)
    return grid


def shared_settings(base: FinetuneConfig, cells: Sequence[Cell]) -> dict[str, object]:
    """Return the values that the runs of a sweep share, by option."""
    swept = {key for cell in cells for key, _ in cell.settings} | {SEED}
    return {key: value for key, value in flat_values(base).items() if key not in swept}
