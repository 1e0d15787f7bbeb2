"""Options of runs with a teacher, and of pruning in rounds. This module does not import jax."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from bert_jax.commands.finetune import FinetuneRunOptions, records_of
from bert_jax.config import RunOptions
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import Settings
from bert_jax.config.schema import Positive
from bert_jax.io.storage import location
from bert_jax.process import exits
from bert_jax.process.signals import StopRequest

if TYPE_CHECKING:
    from bert_jax.finetuning.supervision import Supervision

# Values of the options of pruning without pruning.
UNPRUNED: dict[str, Any] = {
    "prune_heads": 1.0, "prune_units": 1.0, "prune_rounds": 3, "prune_importance": "gradient"
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TeacherOptions(RunOptions):
    """Options of pretraining with a teacher."""

    # Model, in any format that bert-jax reads, whose outputs the run learns to reproduce (objective.name
    # distillation). It must have the vocabulary of the run. A resumed run does not need this option.
    teacher: tuple[str, ...] = ()
    # Folder for the outputs of the teacher; requires data.masking static. The outputs are computed once, before the
    # first step, and then read from this folder, so that the teacher does not run again. Other runs on the same
    # shards can also read them.
    teacher_outputs: str = ""

    def require_no_inputs(self, objective: str) -> None:
        if self.teacher or self.teacher_outputs:
            raise ValueError(f"--teacher: not allowed with {objective}; set distillation, or omit it")


@dataclass(frozen=True, kw_only=True)
class TaskTeacherOptions(FinetuneRunOptions):
    """Options of fine-tuning with teachers."""

    # Models, in any format that bert-jax reads, whose outputs the run learns to reproduce. Each model must have the
    # output layer of the task. The outputs of several models are averaged. A resumed run does not need this option.
    teacher: tuple[str, ...] = ()

    def supervision(self, config: FinetuneConfig, report: Callable[[str], None]) -> "Supervision":
        from bert_jax.contrib.compression.finetuning.teachers import Teaching, without_labels
        from bert_jax.contrib.compression.teachers.find import find_task_teachers
        from bert_jax.interop.model_bundle import ReadOptions

        reading = ReadOptions(allow_mismatch=self.allow_mismatch)
        teachers, record = find_task_teachers(self.teacher, location(self.folder("finetune")), reading)
        for teacher in teachers:
            for note in teacher.notes:
                report(f"--teacher {teacher.name}: {note}")
        return Teaching(teachers, record, without_labels(records_of(config, "unlabelled")), report)


@dataclass(frozen=True, kw_only=True)
class PruningOptions(FinetuneRunOptions):
    """Options of fine-tuning in rounds of training and pruning."""

    # Share of the attention heads to keep. If the share is below 1, the run trains the model and then removes the
    # least important heads in each of --prune_rounds rounds (see bert-jax prune); a last training follows. Each
    # training has the length that the recipe states.
    prune_heads: float = 1.0
    # Share of the feed-forward units to keep, as for --prune_heads.
    prune_units: float = 1.0
    # Number of rounds of training and pruning; earlier rounds remove more heads and units than later rounds.
    prune_rounds: Positive[int] = 3
    # Measure of the importance of heads and units: gradient (gradient of the loss on training records), magnitude
    # (norm of the parameters), movement (growth of this norm during the training of the round) or random.
    prune_importance: Literal["gradient", "magnitude", "movement", "random"] = "gradient"

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = [name for name in ("prune_rounds", "prune_importance") if getattr(self, name) != UNPRUNED[name]]
        if changed and not self.is_pruned:
            raise ValueError(f"--{changed[0]}: requires --prune_heads or --prune_units, the share to keep")

    @property
    def is_pruned(self) -> bool:
        """True if heads or units are removed in rounds."""
        return self.prune_heads != 1 or self.prune_units != 1

    @property
    def several(self) -> tuple[str, ...]:
        return ("--prune_heads, --prune_units", *super().several) if self.is_pruned else super().several

    def execute(self, settings: Settings, stop: StopRequest) -> int:
        if not self.is_pruned:
            return super().execute(settings, stop)
        from bert_jax.contrib.compression.gradual import prune

        prune(self, settings, stop)
        return exits.OK
