"""Detection of loss spikes, and the rollback to a checkpoint before a spike."""

import math
from collections.abc import Mapping
from typing import Any

from bert_jax.batch import BatchIterator
from bert_jax.config import TrainingConfig
from bert_jax.json_values import Json
from bert_jax.process import exits


class RollBack(Exception):
    """Raised if the run must go back to the newest checkpoint before ``first_step``.

    The run then skips all batches up to that of ``last_step``, and as many further ones as
    ``training.spike_rollback`` says.
    """

    def __init__(self, first_step: int, last_step: int, reason: str) -> None:
        super().__init__(reason)
        self.first_step, self.last_step = first_step, last_step


class LossGuard:
    """Detector of loss spikes. Checkpoints store its state, so a resumed run makes the same decisions.

    The mean and the variance of the loss are exponential moving averages over the steps that
    ``training.spike_limit`` states; spikes are excluded.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self.rollbacks = 0  # since the phase began
        self._seen, self._mean, self._variance = 0, 0.0, 0.0

    def add(self, step: int, loss: float, bad_in_a_row: int) -> None:
        """Add ``loss``, the loss of ``step`` in nats. ``bad_in_a_row`` is the number of consecutive steps, up to
        and including ``step``, with a non-finite loss or gradient.

        After a spike or after ``training.max_bad_steps`` such steps in a row, raises :class:`RollBack`, or
        ``exits.Stop`` (exit code 44) if the run has used all of its rollbacks (``training.spike_rollback``).
        """
        config = self._config
        if bad_in_a_row >= config.max_bad_steps:
            self._trouble(
                step - bad_in_a_row + 1,
                step,
                f"loss or gradient was not finite in {bad_in_a_row} steps in a row, up to step {step:,} "
                "(training.max_bad_steps)",
                "these steps did not change the parameters",
            )
        if bad_in_a_row or not config.spike_limit:
            return
        excess = loss - self._mean
        deviation = math.sqrt(self._variance)
        if self._seen >= config.spike_window and excess > config.spike_limit[0] * deviation:
            self._trouble(
                step,
                step,
                f"loss {loss:.3f} at step {step:,} is {excess / max(deviation, 1e-12):.1f} standard deviations "
                f"above its mean {self._mean:.3f} (training.spike_limit)",
                "the newest checkpoint is from before this step",
            )
        self._seen += 1
        # A plain mean until the window is full, so that the first losses do not have more weight than others.
        weight = max(1 / self._seen, 2 / (config.spike_window + 1))
        self._mean += weight * excess
        self._variance = (1 - weight) * (self._variance + weight * excess * excess)

    def _trouble(self, first_step: int, last_step: int, what: str, kept: str) -> None:
        allowed = self._config.most_rollbacks
        if self.rollbacks < allowed:
            raise RollBack(first_step, last_step, what)
        advice = "Lower optimizer.learning_rate or raise optimizer.warmup_steps"
        if not allowed:
            advice += " (or set training.spike_rollback, so that the run goes back and skips batches)"
        times = f", after {self.rollbacks} rollbacks (training.spike_rollback)" if allowed else ""
        line = f"stopped: {what}{times}; {kept}. {advice}, then run the command again"
        raise exits.Stop(exits.NON_FINITE, line, agreed=True)

    def go_back(self, rollback: RollBack, step: int, iterator: BatchIterator) -> str:
        """Skip the batches of ``iterator`` that ``rollback`` excludes, count the rollback and return a warning for
        the log.

        The state at ``step`` must already be restored.
        """
        count = rollback.last_step - step + self._config.skipped_batches
        iterator.skip(count)
        self.rollbacks += 1
        return (
            f"WARNING: {rollback}; back to step {step:,}, skipping {count:,} batches (rollback {self.rollbacks} "
            f"of {self._config.most_rollbacks})"
        )

    def state(self) -> dict[str, Json]:
        """Return the state as JSON values, which preserve floats exactly."""
        return {
            "rollbacks": self.rollbacks, "seen": self._seen, "mean": self._mean, "variance": self._variance,
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state` returned."""
        self.rollbacks, self._seen = state["rollbacks"], state["seen"]
        self._mean, self._variance = state["mean"], state["variance"]
