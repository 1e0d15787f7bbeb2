"""Inputs of a run that are not part of its config. This module does not import jax."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_jax.config import ModelSpec
from bert_jax.io.files import write_whole
from bert_jax.io.storage import Location
from bert_jax.process.signals import StopRequest
from bert_jax.records import Record

if TYPE_CHECKING:
    import jax
    import numpy as np

    from bert_jax.training.start import RunStart

# Workdir file with the options that the initial model determines, so that a resumed run needs no flags for them.
RECORD = "warm_start.yaml"
# Workdir file with the path and the digest of the teacher.
TEACHER_RECORD = "teacher.json"


@dataclass(frozen=True)
class Teacher:
    """A model whose outputs a pretraining run learns to reproduce. Created by ``contrib/compression/teachers``."""

    # Path, as it was given.
    name: str
    spec: ModelSpec
    # Canonical name -> float32 array; empty if only its outputs are read.
    params: "Mapping[str, np.ndarray]"
    # Fingerprint of its tokenizer; None: it has none.
    fingerprint: str | None
    # Text of WORKDIR/teacher.json.
    record: str
    # Folder of its stored outputs; empty: it runs in the training step.
    outputs: str = ""
    # Lines about how it was read.
    notes: tuple[str, ...] = ()

    def write_record(self, folder: Path) -> None:
        """Write ``record`` to a file in the workdir ``folder``."""
        write_whole(folder / TEACHER_RECORD, self.record)


@dataclass(frozen=True)
class Teaching:
    """Sources of a fine-tuning run beside its labels: teachers, and texts that only they label."""

    # Models with the output layer of the task, each a ``bert_jax.inference.engine.Engine``; empty: no teacher.
    teachers: Sequence[Any] = ()
    # Text of WORKDIR/teacher.json: paths and digests of the teachers.
    record: str = ""
    # Records whose labels are not read.
    unlabelled: Sequence[Record] = ()
    # Called with each line about the reading of the teachers.
    report: Callable[[str], None] = lambda line: None

    def write_record(self, folder: Path) -> None:
        """Write ``record``, unless it is empty, to a file in the workdir ``folder``."""
        if self.record:
            write_whole(folder / TEACHER_RECORD, self.record)


NO_TEACHING = Teaching()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Inputs of one run that are not part of its config."""

    # Folder (or URL) of the run.
    workdir: Location
    # Request to stop, checked between steps and between evaluation batches.
    stop: StopRequest
    # Where the run starts.
    start: "RunStart"
    # Teachers of fine-tuning.
    teaching: Teaching = NO_TEACHING
    # Maximum seconds that the processes of the run wait for each other.
    host_timeout: float = 300.0
    # Start of the process, as a value of ``time.perf_counter()``; None: the current time.
    started: float | None = None
    # Devices of the mesh; None: all devices.
    devices: "list[jax.Device] | None" = None
