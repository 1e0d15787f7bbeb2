"""The interface of a job, which ``bert_jax.training.run`` trains, and the services that a run provides to it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from bert_jax.batch import BatchIterator, BatchShapes
from bert_jax.config import RunConfig, to_dict
from bert_jax.json_values import Json
from bert_jax.process import hosts
from bert_jax.process.signals import Interrupted
from bert_jax.process.watchdog import PHASE_FACTOR, Watchdog
from bert_jax.tokenization import Tokenizer
from bert_jax.training.checkpoint.digest import json_digest
from bert_jax.training.launch import Launch
from bert_jax.training.logging.run_log import RunLog
from bert_jax.training.programs import TrainPrograms
from bert_jax.training.state import TrainState


@dataclass(frozen=True)
class Data:
    """Training data of a job on a mesh."""

    # Training batches. None: a complete run that needs no check of its data. Batches of a complete run are only
    # compared with its checkpoint.
    batches: BatchIterator | None
    # Fraction of the rows of a global batch that this process supplies.
    host_share: float
    # Number of batches that are prepared in advance.
    prefetch: int
    # JSON values that identify the data; must be equal on all processes.
    order: Json
    # Features that are copied to the devices; if empty, all features.
    features: Sequence[str] = ()
    # Line of the log about the rows of each process; "" for one process.
    rows: str = ""


@dataclass(frozen=True)
class Context:
    """Services that a run provides to its job for evaluating and for writing results."""

    programs: TrainPrograms
    launch: Launch
    log: RunLog
    watchdog: Watchdog

    @property
    def folder(self) -> Path:
        """Local folder of the logs."""
        return self.log.folder

    def barrier(self, name: str) -> None:
        """Wait for the other processes, at most ``PHASE_FACTOR * launch.host_timeout`` seconds."""
        hosts.barrier(name, PHASE_FACTOR * self.launch.host_timeout)

    def before_batch(self, step: int) -> None:
        """Report progress before an evaluation batch. Raises ``Interrupted`` if the run must stop."""
        self.watchdog.beat(f"evaluating at step {step:,}")
        if self.launch.stop.reached():
            raise Interrupted


class Job(ABC):
    """Definition of one run: its model and objective, data, evaluation and results."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer

    # Maximum number of damaged records.
    max_blank_records = 0
    # Options that still have an effect on a complete run.
    options_used_after_completion = "none"
    # Whether the parameters are also evaluated before the first step.
    evaluates_start = False
    # Value of ``split`` in the lines that an evaluation writes to metrics.jsonl.
    eval_split = "eval"

    @abstractmethod
    def programs(self, mesh: Mesh) -> TrainPrograms:
        """Return the training and evaluation steps on ``mesh``, with their model, optimizer and abstract state."""

    @abstractmethod
    def write_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer file into ``folder``, so that the workdir is self-contained; record other inputs."""

    @abstractmethod
    def data(self, mesh: Mesh, *, complete: bool) -> Data:
        """Return the training data, positioned before the first batch.

        If ``complete`` is True, the run is complete and needs batches only to compare its data with the checkpoint.
        """

    @abstractmethod
    def batch_shapes(self, mesh: Mesh, data_step: int) -> BatchShapes:
        """Return the shapes of batch ``data_step`` (counted from 0) of the phase.

        The training step is compiled for these shapes before the training loop starts.
        """

    @abstractmethod
    def flops_per_sequence(self) -> float:
        """Return the mean number of training FLOPs per sequence, or 0 if it is unknown."""

    @abstractmethod
    def has_eval_data(self) -> bool:
        """Return True if the job has held-out data."""

    @abstractmethod
    def evaluate(self, context: Context, state: TrainState, step: int) -> bool:
        """Evaluate ``state`` and write the log lines. Return True if the run should end after this step."""

    def stopped_early(self) -> bool:
        """Return True if early stopping ended the run before its last step."""
        return False

    @abstractmethod
    def finish(self, context: Context, state: TrainState) -> None:
        """Write the results after the last step. Must be called by every process.

        This method may be called again when a complete run is restarted.
        """

    @abstractmethod
    def is_finished(self, folder: Path) -> bool:
        """Return True if ``folder`` contains everything that :meth:`finish` writes."""

    def state(self) -> dict[str, Json]:
        """Return the state of the job that checkpoints store, as JSON values."""
        return {}

    def eval_is_recorded(self, step: int) -> bool:
        """Return True if :meth:`state` includes the evaluation at ``step``."""
        return True

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state` returned."""
        assert not state, state

    def require_same_config(self, host_timeout: float) -> None:
        """Raise ``ValueError`` unless all processes have the same config."""
        digest = json_digest(to_dict(self.config))
        hosts.require_equal("config", digest, "use the same command and recipe on every host", host_timeout)

    def require_same_data(self, data: Data, host_timeout: float) -> None:
        """Raise ``ValueError`` unless all processes use the same data and tokenizer."""
        digest = json_digest([self.tokenizer.fingerprint, data.order])
        hosts.require_equal("data", digest, "use the same shards and vocabulary on every host", host_timeout)
