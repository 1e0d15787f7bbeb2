"""Table of the task classes by ``task.kind``, and loading of user-defined tasks."""

from bert_jax import registry
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.io.user_module import user_class
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


def task_of_kind(kind: str) -> type[Task]:
    """Return the class of the tasks of ``kind``: that of the table or, from a room, the part ``task.kind KIND`` of
    ``EXTENSIONS``. Raises ``ValueError`` if no room has it."""
    if kind in TASKS:
        return TASKS[kind]
    found: type[Task] = registry.load("extensions", f"task.kind {kind}")
    return found


def task_class(config: FinetuneConfig) -> type[Task]:
    """Return the class of ``task.kind`` or, if ``task.module`` is set, the class named ``Task`` in that Python
    file.

    Raises ``ValueError`` if the file is missing, cannot be loaded or does not define this class.
    """
    if not config.task.module:
        return task_of_kind(config.task.kind)
    return user_class(config.task.module, "task.module", Task)
