"""The teacher of a pretraining run and its stored outputs, as inputs of the objective."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bert_jax.config import PretrainConfig, RunOptions
from bert_jax.config.options import Setting
from bert_jax.contrib.compression.run_options import TeacherOptions
from bert_jax.contrib.compression.teachers.find import TEACHER_RECORD, check_vocabulary, find_teacher
from bert_jax.contrib.compression.teachers.outputs import Teacher, TeacherOutputs, prepared_outputs
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.io.files import write_whole
from bert_jax.io.storage import Location
from bert_jax.objectives.inputs import Inputs
from bert_jax.process.signals import StopRequest
from bert_jax.tokenization import Tokenizer


class TeacherInputs(Inputs):
    """A teacher, which objectives with the methods ``teach`` and ``use_stored`` read."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self._outputs: TeacherOutputs | None = None
        width = str(teacher.spec.model.hidden_size)
        self.settings = (Setting("--teacher", "objective.teacher_width", width),)
        self.notes = tuple(f"--teacher {teacher.name}: {note}" for note in teacher.notes)

    @classmethod
    def find(cls, config: PretrainConfig, options: RunOptions, workdir: Location) -> "TeacherInputs":
        reading = ReadOptions(allow_mismatch=options.allow_mismatch)
        given = options if isinstance(options, TeacherOptions) else TeacherOptions()
        teacher = find_teacher(given.teacher, workdir, reading, given.teacher_outputs)
        if teacher is None:
            raise ValueError("--teacher: missing; name the model whose outputs the run learns to reproduce")
        if teacher.outputs and config.data.masking != "static":
            shown = f"data.masking: {config.data.masking} is not allowed with --teacher_outputs"
            raise ValueError(f"{shown}, because each pass has other masks; use static")
        return cls(teacher)

    def check_vocabulary(self, tokenizer: Tokenizer | None, vocabulary: Location) -> None:
        check_vocabulary(self.teacher, tokenizer, vocabulary)

    def features(
        self, config: PretrainConfig, objective: Any, source: Any, stop: StopRequest, report: Callable[[str], None]
    ) -> TeacherOutputs | None:
        if self.teacher.outputs:
            with stop.at_once("stopped; the same command continues with the outputs of the teacher"):
                self._outputs = prepared_outputs(config, objective, self.teacher, source, report)
        return self._outputs

    def give(self, objective: Any) -> None:
        if self._outputs is not None:
            objective.teach(self.teacher.spec)
            objective.use_stored(self._outputs.shapes)
        else:
            objective.teach(self.teacher.spec, self.teacher.params)

    def write_record(self, folder: Path) -> None:
        write_whole(folder / TEACHER_RECORD, self.teacher.record)
