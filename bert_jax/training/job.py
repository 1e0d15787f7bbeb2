"""The contract of a job: what ``bert_jax.training.run`` trains, and the services that it gives to it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from bert_jax.batch import BatchIterator
from bert_jax.config import RunConfig, to_dict
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
    """A job's training data on a mesh."""

    # None: the run is complete. Those of a complete run are only compared with what it learned from.
    batches: BatchIterator | None
    # Part of a batch's rows that this process feeds.
    host_share: float
    # Batches that are prepared ahead.
    prefetch: int
    # JSON that must be the same on every process.
    order: Any
    # Features that are sent to the devices; empty: all.
    features: Sequence[str] = ()


@dataclass(frozen=True)
class Context:
    """Services of a run for a job that evaluates or ends."""

    programs: TrainPrograms
    launch: Launch
    log: RunLog
    watchdog: Watchdog

    @property
    def folder(self) -> Path:
        """Folder of the logs, on this machine."""
        return self.log.folder

    def barrier(self, name: str) -> None:
        """Wait for the other processes as long as a phase may take."""
        hosts.barrier(name, PHASE_FACTOR * self.launch.host_timeout)

    def before_batch(self, step: int) -> None:
        """Call it before each batch of an evaluation; raises ``Interrupted`` if the run should end."""
        self.watchdog.beat(f"evaluating at step {step:,}")
        if self.launch.stop.reached():
            raise Interrupted


class Job(ABC):
    """Model and objective, data, evaluation and results of one run."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer

    # Damaged records that are allowed.
    max_blank_records = 0
    # Options that still have an effect on a complete run.
    options_used_after_completion = "none"
    # ``split`` of the lines in metrics.jsonl that an evaluation writes.
    eval_split = "eval"

    @abstractmethod
    def programs(self, mesh: Mesh) -> TrainPrograms:
        """Model, optimizer, state and step on ``mesh``."""

    @abstractmethod
    def write_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer file into ``folder``, so that a workdir needs no other folders."""

    @abstractmethod
    def data(self, mesh: Mesh, *, complete: bool) -> Data:
        """Return training batches from the first one; a ``complete`` run needs none."""

    @abstractmethod
    def batch_shapes(self, mesh: Mesh, data_step: int) -> Mapping[str, Any]:
        """Return shapes of the batch of ``data_step``, whose step is compiled before the loop."""

    @abstractmethod
    def flops_per_sequence(self) -> float:
        """Return training FLOPs of a sequence, on average; 0: unknown."""

    @abstractmethod
    def has_eval_data(self) -> bool:
        """Return True if the job has held-out data."""

    @abstractmethod
    def evaluate(self, context: Context, state: TrainState, step: int) -> bool:
        """Evaluate and write the lines; return True if the run should end with this step."""

    def stopped_early(self) -> bool:
        """Return True if the run ended before its last step."""
        return False

    @abstractmethod
    def finish(self, context: Context, state: TrainState) -> None:
        """Write the results after the last step. Every process calls it; may be called again on a complete run."""

    @abstractmethod
    def is_finished(self, folder: Path) -> bool:
        """Return True if ``folder`` holds everything that :meth:`finish` writes."""

    def state(self) -> dict[str, Any]:
        """Return the job's part of a checkpoint; JSON."""
        return {}

    def eval_is_recorded(self, step: int) -> bool:
        """Return True if :meth:`state` holds the consequences of the evaluation at ``step``."""
        return True

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        assert not state, state

    def require_same_config(self, host_timeout: float) -> None:
        """Raise ``ValueError`` unless all processes have the same config."""
        digest = json_digest(to_dict(self.config))
        hosts.require_equal("config", digest, "give every host the same command and recipe", host_timeout)

    def require_same_data(self, data: Data, host_timeout: float) -> None:
        """Raise ``ValueError`` unless all processes have the same data and tokenizer."""
        digest = json_digest([self.tokenizer.fingerprint, data.order])
        hosts.require_equal("data", digest, "let every host read the same shards and vocabulary", host_timeout)
