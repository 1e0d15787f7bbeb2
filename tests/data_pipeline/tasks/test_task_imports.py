"""Every format but tfds is read where TensorFlow, JAX and pandas cannot be imported."""

import json
import subprocess
import sys
from pathlib import Path

from task_files import write

REPOSITORY = Path(__file__).resolve().parents[3]
BLOCKED = ("tensorflow", "tensorflow_datasets", "jax", "flax", "pandas", "datasets")
CODE = """
import sys
sys.modules.update(dict.fromkeys({blocked}))
from bert_jax.config.task import TaskDataConfig
from data_pipeline.tasks import read_splits
for kind, file, columns in {files}:
    splits = read_splits(TaskDataConfig(train=(file,), columns=tuple(columns)), kind)
    assert len(splits["train"]) == 1, (file, splits)
    print(file)
try:
    read_splits(TaskDataConfig(train=("tfds:glue/rte:train",)), "classification")
except ValueError as error:
    print(error)
"""


def test_without_tensorflow(tmp_path):
    question = {"id": 1, "question": "q", "answers": []}
    squad = {"data": [{"paragraphs": [{"context": "c", "qas": [question]}]}]}
    contents = {
        "x.tsv": ("classification", "text\tlabel\nA\t1\n"),
        "x.csv": ("classification", "text,label\nA,1\n"),
        "x.jsonl": ("classification", '{"text": "A", "label": 1}'),
        "x.conll": ("tagging", "a O\n"),
        "x.json": ("qa", json.dumps(squad)),
        "snips.txt": ("joint", "a:O <=> X\n"),
        "clinc.json": ("classification", '{"train": [["a", "b"]]}'),
    }
    for name, (_, content) in contents.items():
        write(tmp_path / name, content)
    for name, line in (("seq.in", "a\n"), ("seq.out", "O\n"), ("label", "i\n")):
        write(tmp_path / "slots" / name, line)
    parts = {"clinc.json": ":train"}
    files = [(kind, f"{tmp_path / name}{parts.get(name, '')}", []) for name, (kind, _) in contents.items()]
    files.append(("joint", str(tmp_path / "slots"), []))
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(blocked=BLOCKED, files=files)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *read, error = done.stdout.splitlines()
    assert read == [file for _, file, _ in files] and len(read) == 8
    assert "TensorFlow is not installed; run: pip install" in error
