"""The runs of a sweep: a grid of settings, and several seeds for each setting."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import Setting, build_config, flat_values, parse_settings
from bert_jax.config.options import extended, options_of
from bert_jax.json_values import Json

SEED = "training.seed"
# Devlin et al. 2018, appendix A.3, with the learning rates of section 4.1.
PAPER = {
    "training.global_batch_size": ("16", "32"),
    "optimizer.learning_rate": ("5e-05", "4e-05", "3e-05", "2e-05"),
    "training.num_epochs": ("2.0", "3.0", "4.0"),
}


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    # (key, value) of the swept options.
    values: tuple[tuple[str, str], ...]
    seed: int

    @property
    def name(self) -> str:
        """Name of the folder of the run, which does not depend on the other runs of the sweep."""
        parts = [*self.values, (SEED, str(self.seed))]
        return ",".join(f"{key.rpartition('.')[2]}={value.replace('/', '_')}" for key, value in parts)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The swept options and the seed."""
        return tuple(Setting("--sweep", key, value) for key, value in (*self.values, (SEED, str(self.seed))))


def plan_cells(sweep: Sequence[str], seeds: int, settings: Sequence[Setting]) -> tuple[FinetuneConfig, list[Cell]]:
    """Return the config that all runs share, and the runs in order: every combination of the values of ``sweep``
    with each of ``seeds`` seeds. The seed changes fastest, then the last option. ``settings`` are those of the
    command line and of the initial model.

    Raises ``ValueError`` for a grid or a value that is not allowed, before any run starts.
    """
    config_type, grid = extended(FinetuneConfig), _grid(sweep)
    base = build_config(config_type, settings)
    if not base.data.dev and not base.data.dev_fraction:
        raise ValueError(
            "data.dev: empty, but a sweep compares its runs on the dev split; set data.dev or data.dev_fraction"
        )
    combinations = [tuple(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    numbers = range(base.training.seed, base.training.seed + seeds)
    cells = [Cell(combination, seed) for combination in combinations for seed in numbers]
    for combination in combinations:
        build_config(config_type, [*settings, *(Setting("--sweep", key, value) for key, value in combination)])
    return base, cells


def _grid(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the swept values by option. Raises ``ValueError`` for an argument that is not KEY=VALUE,VALUE."""
    if tuple(words) == ("paper",):
        return dict(PAPER)
    config_type: type = extended(FinetuneConfig)
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
        if key in options_of(config_type, fixed=True):
            raise ValueError(f"--sweep: {key}: an option of pretraining only; omit it")
        read = [parse_settings(config_type, [Setting("--sweep", key, value)]) for value in values]
        if not all(read):
            raise ValueError(f"--sweep: {key}: no longer an option; omit it")
        key, parsed = next(iter(read[0])), [value for one in read for value, _ in one.values()]
        if any(isinstance(value, tuple) for value in parsed):
            raise ValueError(f"--sweep: {word!r} is not allowed; options whose value is a list cannot be swept")
        if key in grid or len(set(parsed)) < len(parsed):
            raise ValueError(f"--sweep: {word!r} is not allowed; use every option once and every value once")
        grid[key] = tuple(str(value) for value in parsed)
    return grid


def shared_settings(base: FinetuneConfig, cells: Sequence[Cell]) -> dict[str, Json]:
    """Return the values that the runs of a sweep share, by option."""
    swept = {key for cell in cells for key, _ in cell.values} | {SEED}
    return {key: value for key, value in flat_values(base).items() if key not in swept}
