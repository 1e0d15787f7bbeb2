"""The teacher of a run (``--teacher``): a model in any readable format that has the vocabulary of the run."""

import json
from pathlib import Path

from bert_jax.interop.exchange import ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.io.storage import Location
from bert_jax.tokenization import Tokenizer, build_tokenizer
from bert_jax.training.checkpoint.parameters import arrays_digest
from bert_jax.training.launch import TEACHER_RECORD, Teacher


def find_teacher(name: str, workdir: Location) -> Teacher | None:
    """Return the model ``name`` or, if it is empty, the teacher with which the run in ``workdir`` began; None if
    there is neither.

    Raises ``ValueError`` if the model cannot be read, or if the run began with another one.
    """
    path = workdir / TEACHER_RECORD
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    name = name or (record["teacher"] if record else "")
    if not name:
        return None
    weights = read_weights(Path(name), ReadOptions())
    digest = arrays_digest(weights.params, weights.spec.model.vocab_size)
    if record and record["digest"] != digest:
        began = f"the run in {workdir} began with {record['teacher']}, another model"
        raise ValueError(f"--teacher {name}: {began}; give that one, or another --workdir")
    config, content = weights.spec.tokenizer, weights.tokenizer_content
    fingerprint = None
    if config is not None and content is not None:
        fingerprint = build_tokenizer(config, content, name).fingerprint
    text = json.dumps({"teacher": str(Path(name).absolute()), "digest": digest}, indent=1)
    return Teacher(name, weights.spec, weights.params, fingerprint, text)


def check_vocabulary(teacher: Teacher, tokenizer: Tokenizer, vocabulary: Path) -> None:
    """Raise ``ValueError`` if the vocabulary of a run is not that of its teacher."""
    if teacher.fingerprint not in (None, tokenizer.fingerprint):
        raise ValueError(
            f"--teacher {teacher.name}: the model has another vocabulary than {vocabulary}; set data.vocab to that "
            "of the teacher, or give a teacher with this one"
        )
