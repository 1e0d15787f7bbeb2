"""The tasks by their kinds, and tasks of the user's own."""

import dataclasses

from bert_jax.config.finetune import FinetuneConfig, QaConfig, SentenceTaskConfig, TaggingConfig
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

# Whose texts task.truncation cuts: words with tags and passages go through windows of their own. (It has no windows
# for choice and sentence.)
_CUT = {"classification", "regression", "multi_label", "choice", "sentence"}
_WINDOWED = _CUT - {"choice", "sentence"}
# Options that only some kinds of tasks have a use for.
_USED_BY: dict[str, set[str]] = {
    "task.truncation": _CUT,
    "task.head_share": _CUT,
    "task.window_overlap": _WINDOWED,
    "task.max_windows": _WINDOWED,
    "data.label_names": {"classification", "multi_label", "joint"},
    "data.labels": {"classification", "multi_label", "choice", "joint", "sentence"},
    "data.tags": {"tagging", "joint"},
    "loss.class_weights": {"classification"},
    "loss.label_smoothing": {"classification", "choice", "tagging", "joint", "sentence"},
    "loss.focal_gamma": {"classification", "multi_label", "choice", "tagging", "joint", "sentence"},
    "loss.nsp_weight": set(TASKS) - {"choice", "sentence"},
    "regularization.head_dropout": set(TASKS) - {"qa", "sentence"},
    "features.layers": set(TASKS) - {"sentence"},
    "features.frozen_encoder": set(TASKS),  # but where a loss of vectors has no head that could learn
    "features.bilstm_size": {"tagging", "joint"},
    "input.balanced": {"classification"},
    "input.few_shot": {"classification"},
    **{f"qa.{field.name}": {"qa"} for field in dataclasses.fields(QaConfig)},
    **{f"tagging.{field.name}": {"tagging", "joint"} for field in dataclasses.fields(TaggingConfig)},
    **{f"sentence.{field.name}": {"sentence"} for field in dataclasses.fields(SentenceTaskConfig)},
}
# Of those, what a sentence task uses with every loss, and with some; the others are of its classifier.
_OF_TEXTS = {
    "task.truncation", "task.head_share", "sentence.loss", "sentence.pooling", "sentence.normalize",
    "sentence.pairs_from_classes",  # which says itself what it goes with
}  # fmt: skip
_USED_BY_LOSS: dict[str, set[str]] = {
    "data.labels": {"softmax", "negatives"},
    "sentence.scale": {"cosent", "negatives", "simcse"},
    "sentence.margin": {"triplet"},
    "sentence.label_scale": {"cosine", "cosent"},
}
# Options of one truncation.
_USED_BY_TRUNCATION = {
    "task.head_share": "head_tail", "task.window_overlap": "windows", "task.max_windows": "windows"
}  # fmt: skip


def check_options(config: FinetuneConfig) -> None:
    """``ValueError`` for an option that the kind of task would ignore."""
    if config.task.module:
        return  # whose author knows
    plain, kind = FinetuneConfig(), config.task.kind
    for option, kinds in _USED_BY.items():
        section, name = option.split(".")
        value = getattr(getattr(config, section), name)
        if value == getattr(getattr(plain, section), name):
            continue
        if kind not in kinds:
            raise ValueError(
                f"{option}: {value!r} has no use for task.kind {kind}; it is for {', '.join(sorted(kinds))}; leave "
                "it out"
            )
        losses = _USED_BY_LOSS.get(option, {"softmax"})
        if kind == "sentence" and config.sentence.loss not in losses and option not in _OF_TEXTS:
            raise ValueError(
                f"{option}: {value!r} has no use for sentence.loss {config.sentence.loss}; it is for "
                f"{', '.join(sorted(losses))}; leave it out"
            )
        truncation = _USED_BY_TRUNCATION.get(option, config.task.truncation)
        if config.task.truncation != truncation:
            raise ValueError(
                f"{option}: {value!r} has no use for task.truncation {config.task.truncation}; it is for "
                f"{truncation}; leave it out"
            )


def task_class(config: FinetuneConfig) -> type[Task]:
    """The class of ``task.kind``, or the ``Task`` that the file ``task.module`` defines. Raises ``ValueError``."""
    if not config.task.module:
        if config.task.kind not in TASKS:
            raise ValueError(f"task.kind: {config.task.kind!r} is not there yet; allowed: {', '.join(TASKS)}")
        return TASKS[config.task.kind]
    return user_class(config.task.module, "task.module", Task)
