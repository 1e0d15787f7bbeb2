"""Small files of tasks and what is read from them."""

from pathlib import Path
from typing import Any

from bert_jax.config.task import TaskDataConfig, TaskKind
from bert_jax.records import Record
from data_pipeline.tasks import read_file


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(
    path: Path | str, *columns: str, kind: TaskKind = "classification", split: Any = "train", **options: Any
) -> list[Record]:
    return list(read_file(path, TaskDataConfig(columns=columns, **options), kind, split=split))
