"""What ``bert_jax.training.run`` asks of what it trains, and what it gives to it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from bert_jax.batch import BatchIterator
from bert_jax.config import RunConfig
from bert_jax.io.storage import Location
from bert_jax.process.signals import Interrupted, StopRequest
from bert_jax.process.watchdog import Watchdog
from bert_jax.tokenization import Tokenizer
from bert_jax.training.logging.metrics_file import MetricsWriter
from bert_jax.training.logging.progress import Progress
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
    # What has to be the same on every process; JSON.
    order: Any


@dataclass(frozen=True)
class Context:
    """What a job is given while it evaluates and ends."""

    programs: TrainPrograms
    workdir: Location
    folder: Path  # of the logs, on this machine
    writer: MetricsWriter
    progress: Progress
    watchdog: Watchdog
    stop: StopRequest
    host_timeout: float

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, and for the reader."""
        self.writer.write(step, dict(values))
        self.progress.update(step, dict(values))

    def before_batch(self, step: int) -> None:
        """Call it before each batch of an evaluation; raises ``Interrupted`` when the run is to end."""
        self.watchdog.beat(f"evaluating at step {step:,}")
        if self.stop.reached():
            raise Interrupted


class Job(ABC):
    """What is trained: model and objective, data, evaluation, and what comes out at the end."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer

    # Rows without content that are allowed: damaged records.
    max_blank_records = 0
    # Of options that changed since the checkpoint.
    what_a_complete_run_heeds = "nothing of what changed"
    # ``split`` of the lines in metrics.jsonl that an evaluation writes.
    eval_split = "eval"

    @abstractmethod
    def programs(self, mesh: Mesh) -> TrainPrograms:
        """Model, optimizer, state and step on ``mesh``."""

    @abstractmethod
    def write_tokenizer(self, folder: Path) -> None:
        """Put the tokenizer's file beside the checkpoints, so the workdir is whole."""

    @abstractmethod
    def data(self, mesh: Mesh, *, complete: bool) -> Data:
        """Training batches, from the start; none for a ``complete`` run."""

    @abstractmethod
    def batch_shapes(self, mesh: Mesh, data_step: int) -> Mapping[str, Any]:
        """Shapes of the batch of ``data_step``, whose step is compiled before the loop."""

    @abstractmethod
    def flops_per_sequence(self) -> float:
        """Training FLOPs of a sequence, on average; 0 where that is not known."""

    @abstractmethod
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""

    @abstractmethod
    def evaluate(self, context: Context, state: TrainState, step: int) -> bool:
        """Evaluate and write the lines; True when the run should end with this step."""

    @abstractmethod
    def is_over(self, step: int) -> bool:
        """Whether the run ended at ``step``, which is not its last one."""

    @abstractmethod
    def finish(self, context: Context, state: TrainState) -> None:
        """What comes after the last step. Every process calls it; may be called again on a complete run."""

    @abstractmethod
    def is_finished(self, folder: Path) -> bool:
        """Whether what :meth:`finish` makes is there."""

    def state(self) -> dict[str, Any]:
        """What the checkpoint keeps for the job; JSON."""
        return {}

    def knows_evaluation(self, step: int) -> bool:
        """Whether what follows from the evaluation at ``step`` is in :meth:`state`."""
        return True

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        assert not state, state
