"""Outputs of a teacher over static shards, computed once and stored (``--teacher_outputs``).

A folder holds, for the training and the held-out records, one npy file per array with a row for each record, in the
order of the shards, and ``outputs.json``, which is written last. An unfinished folder has ``progress.json``.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.typing import DTypeLike
from numpy.lib import format as npy

from bert_jax.batch import PretrainSource
from bert_jax.config import ModelSpec, PretrainConfig
from bert_jax.config.spec import spec_from_json, spec_to_json
from bert_jax.io.files import write_whole
from bert_jax.io.folder_lock import hold_folder
from bert_jax.parallel import check_batches, host_rows, make_mesh, to_global
from bert_jax.process import hosts

RECORD, PROGRESS = "outputs.json", "progress.json"
_SPLITS = ("train", "held_out")
_EVERY = 50  # batches between two records of the progress
Numbered = tuple[np.ndarray, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Teacher:
    """A model whose outputs a pretraining run learns to reproduce."""

    # Path, as it was given.
    name: str
    spec: ModelSpec
    # Canonical name -> float32 array; empty if only its outputs are read.
    params: Mapping[str, np.ndarray]
    # Fingerprint of its tokenizer; None: it has none.
    fingerprint: str | None
    # Text of WORKDIR/teacher.json.
    record: str
    # Folder of its stored outputs; empty: it runs in the training step.
    outputs: str = ""
    # Lines about how it was read.
    notes: tuple[str, ...] = ()


class NumberedSource(PretrainSource, Protocol):
    """A source of batches whose records have numbers; ``data_pipeline.read.pretrain_input`` implements it."""

    def content(self, *, held_out: bool) -> tuple[int, str]:
        """Return the number of records and a digest of their shards; (0, "") without such records."""

    def numbered(self, *, held_out: bool, batch_size: int, first: int) -> Iterator[Numbered]:
        """Yield the batches from ``first`` on, in which each record occurs once: the numbers of the records,
        int64[at most B], and the features of B rows. Rows after the records are blank."""


class TeacherOutputs:
    """Stored outputs, read by the numbers of records."""

    def __init__(self, folder: Path) -> None:
        """Open the complete ``folder``. Raises ``ValueError`` if it is not, or if a file is missing or damaged."""
        self.folder, self.record = folder, read_record(folder)
        if not self.record:
            raise ValueError(f"--teacher_outputs {folder}: not complete; name the model with --teacher")
        counts = self.record["records"]
        self._arrays = {
            split: {name: self._open(split, name, counts[split]) for name in self.record["arrays"]}
            for split in _SPLITS
            if counts[split]
        }

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], DTypeLike]]:
        """The shape of a row and the dtype of each array."""
        return {name: (array.shape[1:], array.dtype) for name, array in self._arrays["train"].items()}

    def rows(self, numbers: np.ndarray, *, held_out: bool) -> dict[str, np.ndarray]:
        """Return the outputs of the records ``numbers`` int64[B]; a number beyond the last record, of a blank row,
        gets those of the last record."""
        arrays = self._arrays[_SPLITS[held_out]]
        return {name: array[np.minimum(numbers, len(array) - 1)] for name, array in arrays.items()}

    def _open(self, split: str, name: str, count: int) -> np.ndarray:
        path = self.folder / split / f"{name}.npy"
        try:
            array: np.ndarray = np.load(path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise ValueError(f"--teacher_outputs: {path}: not readable ({error}); remove the folder") from None
        if len(array) != count:
            raise ValueError(f"--teacher_outputs: {path}: {len(array)} rows instead of {count}; remove the folder")
        return array


def read_record(folder: Path) -> dict[str, Any]:
    """Return the content of ``outputs.json``; empty if the folder is not complete."""
    path = folder / RECORD
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def stored_teacher(folder: Path) -> Teacher | None:
    """Return the teacher whose outputs ``folder`` holds, without its parameters; None if it is not complete."""
    record = read_record(folder)
    if not record:
        return None
    spec = spec_from_json(json.dumps(record["spec"]), f"{folder / RECORD}: spec")
    return Teacher(record["teacher"], spec, {}, record["vocabulary"], _text(record, folder), str(folder))


def _text(record: Mapping[str, Any], folder: Path) -> str:
    """Return the text of WORKDIR/teacher.json."""
    kept = {name: record[name] for name in ("teacher", "digest")}
    return json.dumps(kept | {"outputs": str(folder.absolute())}, indent=1)


def prepared_outputs(
    config: PretrainConfig,
    objective_type: Any,
    teacher: Teacher,
    source: NumberedSource,
    report: Callable[[str], None],
) -> TeacherOutputs:
    """Return the outputs of ``teacher`` that its folder stores; if some are missing, compute them first.
    ``objective_type`` is a class like ``compression.distillation.Distillation``.

    Masks must be static. Raises ``ValueError`` for outputs of other shards, of another teacher or for other losses,
    too little space, and an incomplete folder in a run of several processes.
    """
    folder = Path(teacher.outputs)
    objective = objective_type(config, make_mesh(config.mesh, jax.devices()))
    objective.row_shape = source.row_shape
    objective.teach(teacher.spec)
    contents = [source.content(held_out=split == "held_out") for split in _SPLITS]
    made = json.loads(teacher.record)
    wanted = {
        "digest": made["digest"],
        "outputs": objective.outputs_record(),
        "records": {split: count for split, (count, _) in zip(_SPLITS, contents, strict=True)},
        "shards": {split: digest for split, (_, digest) in zip(_SPLITS, contents, strict=True)},
    }
    for name in (RECORD, PROGRESS):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            other = [key for key, value in wanted.items() if found[key] != value]
            if other:
                differences = "; ".join(f"{key}: {found[key]}, now {wanted[key]}" for key in other)
                raise ValueError(
                    f"--teacher_outputs {folder}: stored for another run ({differences}); give another folder"
                )
    if not (folder / RECORD).is_file():
        if hosts.count() > 1:
            raise ValueError(
                f"--teacher_outputs {folder}: not complete; a run of several processes reads complete outputs, so "
                "start the same command with one process first"
            )
        record = {
            **wanted, "teacher": made["teacher"], "vocabulary": teacher.fingerprint,
            "spec": json.loads(spec_to_json(teacher.spec)),
        }  # fmt: skip
        with hold_folder(folder, "another process writes these outputs; wait for it, or give another folder"):
            _write(folder, objective, teacher, source, record, report)
    return TeacherOutputs(folder)


def _write(
    folder: Path,
    objective: Any,
    teacher: Teacher,
    source: NumberedSource,
    record: dict[str, Any],
    report: Callable[[str], None],
) -> None:
    """Compute the outputs of all records, and store them in ``folder``."""
    mesh, training = objective.mesh, objective.config.training
    check_batches(training, mesh.shape, source.row_shape.rows)
    objective.teach(teacher.spec, teacher.params)
    params, compute = objective.fixed["teacher"], jax.jit(objective.outputs)
    # A microbatch fits into memory with the student, too.
    size = source.row_shape.rows(training.global_batch_size // training.accumulation_steps)
    shapes = jax.eval_shape(objective.outputs, params, objective.batch_shapes(size))
    assert len(host_rows(mesh, size)) == size
    done = {split: 0 for split in _SPLITS}  # records
    progress = folder / PROGRESS
    if progress.is_file():
        done = json.loads(progress.read_text(encoding="utf-8"))["done"]
    else:
        _check_space(folder, shapes, sum(record["records"].values()), report)
        write_whole(progress, json.dumps({**record, "done": done}, indent=1))
    for split in _SPLITS:
        count = record["records"][split]
        if done[split] == count:
            continue
        arrays = {
            name: _array(folder / split / f"{name}.npy", (count, *one.shape[1:]), one.dtype, is_new=not done[split])
            for name, one in shapes.items()
        }
        batches = source.numbered(held_out=split == "held_out", batch_size=size, first=done[split] // size)
        for number, (numbers, batch) in enumerate(batches, start=done[split] // size + 1):
            features = {name: batch[name] for name in objective.features}
            for name, values in compute(params, to_global(features, mesh, size)).items():
                arrays[name][numbers] = np.asarray(values)[: len(numbers)]
            done[split] = min(number * size, count)
            if number % _EVERY == 0 or done[split] == count:
                for array in arrays.values():
                    array.flush()
                write_whole(progress, json.dumps({**record, "done": done}, indent=1))
                report(f"outputs of the teacher: {split}: {done[split]:,} of {count:,} records")
    write_whole(folder / RECORD, json.dumps({**record, "arrays": sorted(shapes)}, indent=1))
    progress.unlink()


def _array(path: Path, shape: tuple[int, ...], dtype: DTypeLike, *, is_new: bool) -> np.memmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    array = npy.open_memmap(path, "w+" if is_new else "r+", dtype, None if not is_new else shape)
    if is_new and hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:  # a write to a page without space would end the process by a signal
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _check_space(
    folder: Path,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    records: int,
    report: Callable[[str], None],
) -> None:
    """Report the size of the outputs. Raises ``ValueError`` if there is less space."""
    sizes = {name: math.prod(one.shape[1:]) * one.dtype.itemsize * records for name, one in shapes.items()}
    total, free = sum(sizes.values()), shutil.disk_usage(folder).free
    parts = ", ".join(f"{name} {size / 1e9:.3f}" for name, size in sizes.items())
    report(f"outputs of the teacher: {total / 1e9:.3f} GB in {folder} ({parts})")
    if total > free:
        raise ValueError(
            f"--teacher_outputs {folder}: {total / 1e9:.1f} GB are needed ({parts}), but {free / 1e9:.1f} GB are "
            "free; lower objective.soft_top_k, or omit --teacher_outputs"
        )
