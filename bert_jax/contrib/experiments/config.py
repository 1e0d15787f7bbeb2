"""Options of sweeps. This module does not import jax."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from bert_jax.commands.finetune import FinetuneRunOptions, configure, train
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import Settings
from bert_jax.config.options import Setting
from bert_jax.config.schema import Positive
from bert_jax.process.signals import StopRequest

if TYPE_CHECKING:
    from bert_jax.contrib.experiments.cells import Cell


@dataclass(frozen=True, kw_only=True)
class SweepOptions(FinetuneRunOptions):
    """Options with which a command starts a run for each of several settings and seeds."""

    # Start a run for every combination of the values in the arguments (KEY=VALUE,VALUE,...). Without arguments,
    # the combinations are those of the grid of the BERT paper (batch size 16 or 32; learning rate 5e-5, 4e-5, 3e-5
    # or 2e-5; 2, 3 or 4 epochs). Finished runs are not repeated; several processes can share the work.
    sweep: tuple[str, ...] = ()
    # Number of runs with consecutive seeds, beginning with training.seed. If there are several runs, the mean and
    # the standard deviation of their scores and the best run are reported.
    seeds: Positive[int] = 1

    # Value of an option that has no argument on the command line.
    VALUE_WITHOUT_ARGUMENT = MappingProxyType({"sweep": ["paper"]})

    @property
    def several(self) -> tuple[str, ...]:
        return (*super().several, "--sweep and --seeds") if self.sweep or self.seeds > 1 else super().several

    def shown(self, settings: Settings) -> FinetuneConfig:
        """Return the options that all runs share."""
        return self._plan(settings)[0] if self.sweep or self.seeds > 1 else super().shown(settings)

    def execute(self, settings: Settings, stop: StopRequest) -> int:
        if not (self.sweep or self.seeds > 1):
            return super().execute(settings, stop)
        base, cells = self._plan(settings)

        from bert_jax.contrib.experiments.sweep import run_sweep
        from bert_jax.start.fixed_options import whole_name

        def one(folder: Path, more: Sequence[Setting]) -> None:
            own = dataclasses.replace(self, workdir=str(folder), sweep=(), seeds=1)
            train(own, settings.followed_by(*more), stop, time.perf_counter())

        return run_sweep(
            base,
            cells,
            Path(self.folder("finetune")),
            one,
            init_from=whole_name(self.init_from),
            stop=stop,
            host_timeout=self.host_timeout,
        )

    def _plan(self, settings: Settings) -> "tuple[FinetuneConfig, Sequence[Cell]]":
        from bert_jax.contrib.experiments.cells import plan_cells

        start = configure(self, settings)[1]
        return plan_cells(self.sweep, self.seeds, [*settings.all, *start.settings])
