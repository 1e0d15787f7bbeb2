"""The interface through which a run gets its first state; ``bert_jax.start`` implements it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from bert_jax.training.logging.meter import IntervalMeter
from bert_jax.training.spikes import LossGuard, RollBack
from bert_jax.training.state import TrainState

if TYPE_CHECKING:
    from bert_jax.training.job import Job
    from bert_jax.training.launch import Launch
    from bert_jax.training.programs import TrainPrograms


@dataclass
class FirstState:
    """The state from which a run trains.

    ``fit`` sets ``state`` to None, because the first training step donates the buffers of the state.
    """

    state: TrainState | None
    step: int
    # Step at which the phase began.
    phase_start: int
    meter: IntervalMeter
    guard: LossGuard
    # JSON part of the run's own checkpoint, and a line for each option that changed since that checkpoint.
    meta: dict[str, Any] | None = None
    changed: tuple[str, ...] = ()


class RunStart(Protocol):
    """The start of a run: ``bert_jax.start.start.Start``."""

    @property
    def messages(self) -> tuple[str, ...]:
        """Lines for the log."""

    @property
    def record(self) -> str:
        """Text of WORKDIR/warm_start.yaml; empty: the file is not written."""

    def first_state(
        self, job: "Job", programs: "TrainPrograms", launch: "Launch", rollback: RollBack | None,
        report: Callable[[str], None],
    ) -> FirstState:  # fmt: skip
        """Return the state from which the run trains: restored, or initialized. ``rollback``, if set, ended the
        previous attempt. ``report`` receives lines for the log."""
