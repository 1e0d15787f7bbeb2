"""The teachers of a run (``--teacher``): models in any readable format. A run records them, keeps them when it
resumes, and refuses others."""

import json
from collections.abc import Sequence
from pathlib import Path

from bert_jax.contrib.compression.teachers.outputs import Teacher, stored_teacher
from bert_jax.inference.loaded import LoadedModel, prepare
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.io.hub import is_hub_name, model_path
from bert_jax.io.storage import Location
from bert_jax.tokenization import Tokenizer, build_tokenizer
from bert_jax.training.checkpoint.parameters import arrays_digest

# Workdir file with the paths and the digests of the teachers.
TEACHER_RECORD = "teacher.json"


def find_teacher(
    names: Sequence[str], workdir: Location, options: ReadOptions, outputs: str = ""
) -> Teacher | None:
    """Return the teacher of a pretraining run: the model that ``names`` names or, if it is empty, the one with
    which the run in ``workdir`` began; None if there is neither.

    ``outputs`` (default: stored with the run in ``workdir``) is a folder of stored outputs. If it is complete, the
    model is not read, and need not be named. ``options``: how the model is read.

    Raises ``ValueError`` if there are several names, if the model cannot be read, if the run began with another
    one, or if ``outputs`` is neither complete nor of a named model.
    """
    if len(names) > 1:
        raise ValueError(f"--teacher: {len(names)} models are not allowed in pretraining; give one")
    (recorded,) = _recorded(workdir) or [{}]
    outputs = outputs or recorded.get("outputs", "")
    stored = stored_teacher(Path(outputs)) if outputs else None
    if stored is not None:
        digest = json.loads(stored.record)["digest"]
        if recorded and recorded["digest"] != digest:
            began = f"the run in {workdir} began with {recorded['teacher']}, another teacher"
            raise ValueError(f"--teacher_outputs {outputs}: {began}; omit it, or change --workdir")
        if names and _read(names[0], options)[1]["digest"] != digest:
            other = f"of another model than {names[0]}"
            raise ValueError(f"--teacher_outputs {outputs}: {other}; give another folder, or omit --teacher")
        return stored
    found = _find(names, workdir, options)
    if not found:
        if outputs:
            raise ValueError(f"--teacher_outputs {outputs}: not complete; name the model with --teacher")
        return None
    ((name, weights, record),) = found
    record |= {"outputs": str(Path(outputs).absolute())} if outputs else {}
    config, content = weights.spec.tokenizer, weights.tokenizer_content
    fingerprint = None
    if config is not None and content is not None:
        fingerprint = build_tokenizer(config, content, name).fingerprint
    text = json.dumps(record, indent=1)
    return Teacher(name, weights.spec, weights.params, fingerprint, text, outputs, weights.notes)


def find_task_teachers(
    names: Sequence[str], workdir: Location, options: ReadOptions
) -> tuple[tuple[LoadedModel, ...], str]:
    """Return the teachers of a fine-tuning run, as :func:`find_teacher` finds them, and the text of the file that
    records them; empty without teachers. Raises ``ValueError`` as :func:`find_teacher` does."""
    found = _find(names, workdir, options)
    record = json.dumps([record for _, _, record in found], indent=1) if found else ""
    return tuple(prepare(weights, name=name) for name, weights, _ in found), record


def _find(
    names: Sequence[str], workdir: Location, options: ReadOptions
) -> list[tuple[str, ModelBundle, dict[str, str]]]:
    """Return name, weights and record of each teacher."""
    recorded = _recorded(workdir)
    found = [(name, *_read(name, options)) for name in names or [one["teacher"] for one in recorded]]
    digests = [record["digest"] for _, _, record in found]
    if recorded and digests != [one["digest"] for one in recorded]:
        given, before = " ".join(names), " ".join(one["teacher"] for one in recorded)
        other = "another model" if len(recorded) == len(found) == 1 else "other models"
        raise ValueError(
            f"--teacher {given}: the run in {workdir} began with {before}, {other}; give "
            f"{'that one' if len(recorded) == 1 else 'those'}, or another --workdir"
        )
    return found


def _recorded(workdir: Location) -> list[dict[str, str]]:
    """Return the records of the teachers with which the run in ``workdir`` began."""
    path = workdir / TEACHER_RECORD
    recorded = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return recorded if isinstance(recorded, list) else [recorded]


def _read(name: str, options: ReadOptions) -> tuple[ModelBundle, dict[str, str]]:
    """Return weights and record of a model."""
    weights = read_weights(model_path(name), options)
    digest = arrays_digest(weights.params, weights.spec.model.vocab_size)
    place = name if is_hub_name(Path(name)) else str(Path(name).absolute())
    return weights, {"teacher": place, "digest": digest}


def check_vocabulary(teacher: Teacher, tokenizer: Tokenizer | None, vocabulary: Location) -> None:
    """Raise ``ValueError`` if a run and its teacher have different vocabularies. ``tokenizer``: of the file
    ``vocabulary``; None if this file does not exist yet, so that it would be trained."""
    if tokenizer is None and teacher.fingerprint is not None:
        raise ValueError(f"data.vocab: missing; set it to the vocabulary of the teacher, {teacher.name}")
    if tokenizer is not None and teacher.fingerprint not in (None, tokenizer.fingerprint):
        raise ValueError(
            f"--teacher {teacher.name}: the model has another vocabulary than {vocabulary}; set data.vocab to the "
            "vocabulary of the teacher, or give a teacher with the vocabulary of the run"
        )
