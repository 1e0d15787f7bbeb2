"""The tasks by their kinds, and tasks of the user's own."""

import importlib.util
import sys
from pathlib import Path

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.tasks.intent_slots import JointTask
from bert_jax.tasks.multiple_choice import ChoiceTask
from bert_jax.tasks.question_answering import QaTask
from bert_jax.tasks.sentence_embedding import SentenceTask
from bert_jax.tasks.tagging import TaggingTask
from bert_jax.tasks.task import Task
from bert_jax.tasks.text_classification import ClassificationTask, MultiLabelTask, RegressionTask

TASKS: dict[str, type[Task]] = {
    "classification": ClassificationTask,
    "regression": RegressionTask,
    "multi_label": MultiLabelTask,
    "choice": ChoiceTask,
    "qa": QaTask,
    "tagging": TaggingTask,
    "joint": JointTask,
    "sentence": SentenceTask,
}


def task_class(config: FinetuneConfig) -> type[Task]:
    """The class of ``task.kind``, or the ``Task`` that the file ``task.module`` defines. Raises ``ValueError``."""
    if not config.task.module:
        return TASKS[config.task.kind]
    path = Path(config.task.module)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"task.module: {path} is no Python file; give one that defines a class Task")
    name = f"task_module_{path.stem}"  # not one that another module has
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"task.module: {path}: {type(error).__name__}: {error}") from error
    task = getattr(module, "Task", None)
    if not (isinstance(task, type) and issubclass(task, Task) and task is not Task):
        raise ValueError(f"task.module: {path} defines no class Task that extends bert_jax.tasks.task.Task")
    return task
