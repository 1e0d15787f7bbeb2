"""The soft targets of each kind of task.

Shapes: B rows, S tokens, U units per row, K sequences per unit, C = U K sequences per row, L classes or tags, E
width of a vector.
"""

from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.config import HeadsConfig, ModelSpec
from bert_jax.contrib.compression.distillation_losses import cosine_distance_loss, soft_target_loss
from bert_jax.contrib.compression.finetuning.soft_targets import SoftTargets
from bert_jax.model.bert import BertOutput, present
from bert_jax.objectives.crf import crf_loss
from bert_jax.objectives.objective import Sums, denominator
from bert_jax.objectives.span import ABSENT
from bert_jax.tasks.registry import TASKS
from bert_jax.tasks.task import Level, ModelInput, Outputs, Target, Task
from bert_jax.tasks.text_classification import SequenceTask, mean_over_windows

# Smallest marginal probability of a tag whose logarithm is compared.
_SMALLEST = 1e-7


class Classes(SoftTargets):
    """The divergence of the distribution of classes."""

    task: SequenceTask

    def arrays(self) -> dict[str, Target]:
        return {"soft_logits": Target("unit", np.float32, (len(self.task.config.data.labels),))}

    def outputs(self, output: BertOutput, batch: Batch) -> dict[str, tuple[Level, jax.Array]]:
        return {"soft_logits": ("unit", self.task.logits(output, batch))}

    def has_head(self, spec: ModelSpec) -> bool:
        heads = spec.heads
        return bool(heads.sequence_labels) and heads.problem == "single_label"

    def order(self, heads: HeadsConfig) -> dict[str, Sequence[int]]:
        return {"soft_logits": columns("data.labels", heads.sequence_labels, self.task)}

    def of_units(
        self, units: Sequence[ModelInput], records: int, read: Sequence[ModelInput], outputs: Outputs
    ) -> list[dict[str, np.ndarray]]:
        logits = mean_over_windows("soft_logits", records, read, outputs)
        return [{"soft_logits": logits[unit.record]} for unit in units]

    def loss(self, output: BertOutput, batch: Batch) -> Sums:
        logits, weights = self.task.logits(output, batch), batch["soft_weights"]
        return soft_target_loss("teacher", logits, batch["soft_logits"], weights, self.temperature)


class Labels(Classes):
    """The divergence of the probability of each label, the mean over the labels."""

    def has_head(self, spec: ModelSpec) -> bool:
        return bool(spec.heads.sequence_labels) and spec.heads.problem == "multi_label"

    def loss(self, output: BertOutput, batch: Batch) -> Sums:
        # A label is a choice between two classes with the logits (x, 0).
        student, teacher = (
            jnp.stack([x, jnp.zeros_like(x)], axis=-1)
            for x in (self.task.logits(output, batch), batch["soft_logits"])
        )
        weights = jnp.broadcast_to(batch["soft_weights"][..., None], student.shape[:-1])
        total, _ = soft_target_loss("teacher", student, teacher, weights, self.temperature)["teacher_loss"]
        return {"teacher_loss": (total / student.shape[-2], jnp.sum(batch["soft_weights"]))}


class Values(Classes):
    """The squared difference of the value."""

    needs = "an output layer for a value"

    def arrays(self) -> dict[str, Target]:
        return {"soft_logits": Target("unit", np.float32, (1,))}

    def has_head(self, spec: ModelSpec) -> bool:
        return spec.heads.problem == "regression" and bool(spec.heads.sequence_labels)

    def order(self, heads: HeadsConfig) -> dict[str, Sequence[int]]:
        return {}

    def loss(self, output: BertOutput, batch: Batch) -> Sums:
        error_BxU = jnp.sum((self.task.logits(output, batch) - batch["soft_logits"]) ** 2, axis=-1)
        weights_BxU = batch["soft_weights"]
        return {"teacher_loss": (jnp.sum(error_BxU * weights_BxU), jnp.sum(weights_BxU))}


class Choices(Classes):
    """The divergence of the distribution of choices."""

    needs = "an output layer for choices"

    def has_head(self, spec: ModelSpec) -> bool:
        return spec.heads.choice

    def order(self, heads: HeadsConfig) -> dict[str, Sequence[int]]:
        return {}


class Tags(SoftTargets):
    """The divergence of each word's tag distribution or, with a CRF, of its marginal tag probabilities."""

    needs = "an output layer for tags"

    def arrays(self) -> dict[str, Target]:
        return {"soft_tags": Target("token", np.float32, (len(self.task.config.data.tags),))}

    def outputs(self, output: BertOutput, batch: Batch) -> dict[str, tuple[Level, jax.Array]]:
        return {"soft_tags": ("token", tag_logits(output, batch))}

    def has_head(self, spec: ModelSpec) -> bool:
        return bool(spec.heads.token_labels)

    def order(self, heads: HeadsConfig) -> dict[str, Sequence[int]]:
        return {"soft_tags": columns("data.tags", heads.token_labels, self.task)}

    def of_units(
        self, units: Sequence[ModelInput], records: int, read: Sequence[ModelInput], outputs: Outputs
    ) -> list[dict[str, np.ndarray]]:
        """Return the arrays of the units; the words of a record carry them from the windows of the teacher to those
        of the student."""
        (target,) = (target for target in self.targets.values() if target.level == "token")
        size = Counter[int]()
        for unit in read:
            size[unit.record] += len(unit.extra.words)
        words = {record: np.zeros((count, *target.shape), np.float32) for record, count in size.items()}
        for unit, output in zip(read, outputs, strict=True):
            words[unit.record][unit.extra.words] = output["soft_tags"][unit.extra.tokens]
        arrays = []
        for unit in units:
            array = np.zeros((unit.length, *target.shape), np.float32)
            array[unit.extra.tokens] = words[unit.record][unit.extra.words]
            arrays.append({"soft_tags": array})
        return arrays

    def weights(self, units: Sequence[ModelInput]) -> list[float]:
        return [1.0] * len(units)

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        return {"teacher_tag_loss": denominator(batch["tag_scored"])}

    def loss(self, output: BertOutput, batch: Batch) -> Sums:
        logits, targets, weights = tag_logits(output, batch), batch["soft_tags"], batch["tag_scored"]
        return soft_target_loss("teacher_tag", logits, targets, weights, self.temperature)


class Both(Tags):
    """The divergences of the intent distribution and of the tag distributions."""

    needs = "output layers for classes and for tags"

    def arrays(self) -> dict[str, Target]:
        labels = len(self.task.config.data.labels)
        return super().arrays() | {"soft_logits": Target("unit", np.float32, (labels,))}

    def outputs(self, output: BertOutput, batch: Batch) -> dict[str, tuple[Level, jax.Array]]:
        return super().outputs(output, batch) | {"soft_logits": ("unit", present(output.sequence_logits))}

    def has_head(self, spec: ModelSpec) -> bool:
        return bool(spec.heads.token_labels and spec.heads.sequence_labels)

    def order(self, heads: HeadsConfig) -> dict[str, Sequence[int]]:
        of_labels = columns("data.labels", heads.sequence_labels, self.task)
        return super().order(heads) | {"soft_logits": of_labels}

    def of_units(
        self, units: Sequence[ModelInput], records: int, read: Sequence[ModelInput], outputs: Outputs
    ) -> list[dict[str, np.ndarray]]:
        logits = mean_over_windows("soft_logits", records, read, outputs)
        of_tags = super().of_units(units, records, read, outputs)
        return [{**tags, "soft_logits": logits[unit.record]} for unit, tags in zip(units, of_tags, strict=True)]

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        shares = batch["soft_weights"] * batch["intent_shares"]
        return {"teacher_intent_loss": denominator(shares), **super().counts(batch)}

    def loss(self, output: BertOutput, batch: Batch) -> Sums:
        shares = batch["soft_weights"] * batch["intent_shares"]
        of_intents = soft_target_loss(
            "teacher_intent", present(output.sequence_logits), batch["soft_logits"], shares, self.temperature
        )
        return of_intents | super().loss(output, batch)


class Places(SoftTargets):
    """The mean divergence of two distributions, over the start and over the end of the answer."""

    needs = "an output layer for answers"

    def arrays(self) -> dict[str, Target]:
        return dict.fromkeys(("soft_start", "soft_end"), Target("token", np.float32))

    def outputs(self, output: BertOutput, batch: Batch) -> dict[str, tuple[Level, jax.Array]]:
        start, end = present(output.start_logits), present(output.end_logits)
        return {"soft_start": ("token", start), "soft_end": ("token", end)}

    def has_head(self, spec: ModelSpec) -> bool:
        return spec.heads.span

    def of_units(
        self, units: Sequence[ModelInput], records: int, read: Sequence[ModelInput], outputs: Outputs
    ) -> list[dict[str, np.ndarray]]:
        same = [unit.sequences[0].ids for unit in units] == [unit.sequences[0].ids for unit in read]
        if not same:
            raise ValueError(
                "--teacher: the model splits questions and passages into other tokens or windows; task.kind qa "
                "compares tokens, so give a teacher with the vocabulary and the length of the student"
            )
        return [dict(output) for output in outputs]

    def weights(self, units: Sequence[ModelInput]) -> list[float]:
        return [1.0] * len(units)

    def loss(self, output: BertOutput, batch: Batch) -> Sums:
        weights_BxU = batch["soft_weights"]
        slots_U = 1 + jnp.arange(weights_BxU.shape[1])
        own_BxUxS = batch["sequence_ids"][:, None] == slots_U[:, None]
        total = jnp.zeros(())
        for logits, target in (
            (present(output.start_logits), batch["soft_start"]), (present(output.end_logits), batch["soft_end"]),
        ):  # fmt: skip
            student, teacher = (jnp.where(own_BxUxS, one[:, None], ABSENT) for one in (logits, target))
            total += (
                soft_target_loss("teacher", student, teacher, weights_BxU, self.temperature)["teacher_loss"][0] / 2
            )
        return {"teacher_loss": (total, jnp.sum(weights_BxU))}


class Vectors(SoftTargets):
    """1 minus the cosine between the teacher's and the student's vector of a text, averaged over an example.

    Reimers and Gurevych (2020) use the squared error, which depends on the width and the norm.

    Vectors of a teacher of more than the student's width are projected to the directions in which those of the
    training texts are longest; narrower ones get zeros at their end, which changes no cosine.
    """

    needs = "a pooling that makes vectors of texts"

    @property
    def width(self) -> int:
        """Width of the student's vectors."""
        return present(self.task.sentence).vector_width(self.task.config.model.hidden_size)

    def arrays(self) -> dict[str, Target]:
        texts = self.task.sequences_per_unit
        return {
            "soft_vectors": Target("unit", np.float32, (texts, self.width)),
            "soft_texts": Target("unit", np.float32, (texts,)),  # 1 for a text; a unit may have fewer
        }

    def outputs(self, output: BertOutput, batch: Batch) -> dict[str, tuple[Level, jax.Array]]:
        name = "embeddings"
        return {"soft_vectors": self.task.outputs(output, batch)[name]}

    def has_head(self, spec: ModelSpec) -> bool:
        return spec.sentence is not None

    def of_units(
        self, units: Sequence[ModelInput], records: int, read: Sequence[ModelInput], outputs: Outputs
    ) -> list[dict[str, np.ndarray]]:
        vectors = [
            np.asarray(output["soft_vectors"], np.float32)[: len(unit.sequences)]
            for unit, output in zip(read, outputs, strict=True)
        ]
        fitted = iter(fitted_vectors(np.concatenate(vectors), self.width))
        texts, arrays = self.task.sequences_per_unit, []
        for unit in units:
            array, there = np.zeros((texts, self.width), np.float32), np.zeros(texts, np.float32)
            for k in range(len(unit.sequences)):
                array[k], there[k] = next(fitted), 1
            arrays.append({"soft_vectors": array, "soft_texts": there})
        return arrays

    def weights(self, units: Sequence[ModelInput]) -> list[float]:
        return [1.0] * len(units)

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        return {"teacher_loss": denominator(batch["soft_texts"])}

    def loss(self, output: BertOutput, batch: Batch) -> Sums:
        weights_BxC = batch["soft_texts"].reshape(len(batch["soft_texts"]), -1)
        teacher_BxCxE = batch["soft_vectors"].reshape(*weights_BxC.shape, -1)
        student_BxCxE = jnp.where(weights_BxC[..., None] > 0, present(output.sentence_embeddings), 0.0)
        return cosine_distance_loss("teacher", student_BxCxE, teacher_BxCxE, weights_BxC)


# Soft targets by ``task.kind``.
KINDS: dict[str, type[SoftTargets]] = {
    "classification": Classes, "multi_label": Labels, "regression": Values, "choice": Choices, "tagging": Tags,
    "joint": Both, "qa": Places, "sentence": Vectors,
}  # fmt: skip


def soft_targets(task: Task) -> SoftTargets:
    """Return the soft targets of a task. Raises ``ValueError`` for a user-defined task that extends none of the
    kinds of tasks."""
    kinds = {base: kind for kind, base in TASKS.items()}
    for base in type(task).__mro__:
        if base in kinds:
            return KINDS[kinds[base]](task)
    names = ", ".join(base.__name__ for base in kinds)
    raise ValueError(
        f"--teacher: the task of {task.config.task.module} has no soft targets; derive the task from one of {names}"
    )


def columns(option: str, taught: Sequence[str], task: Task) -> list[int]:
    """Return, for each class or tag of the student, its index in ``taught``, the names of the teacher's classes or
    tags.

    ``option`` is ``data.labels`` or ``data.tags``. The teacher may have the names in the files or
    ``data.label_names``. Raises ``ValueError``, without its subject, if it has others.
    """
    own = task.config.data.tags if option == "data.tags" else task.config.data.labels
    for names in (own, task.names):
        if len(names) == len(own) and sorted(names) == sorted(taught):
            return [taught.index(name) for name in names]
    both = "; ".join(
        f"{who}: {', '.join(names[:10])}{f' and {len(names) - 10} more' if len(names) > 10 else ''}"
        for who, names in (("teacher", taught), (option, own))
    )
    remedy = f"give a teacher of this task, or set {option} to its names"
    raise ValueError(f"has other names than {option} ({both}); {remedy}")


def tag_logits(output: BertOutput, batch: Batch) -> jax.Array:
    """Return float32[B, S, L], the logits of the tags of each token; with a CRF, the logarithms of their marginal
    probabilities: the derivative of the logarithm of the sum over all paths (Sutton and McCallum 2012)."""
    logits_BxSxL, crf = present(output.token_logits), output.crf
    if crf is None:
        return logits_BxSxL
    is_scored_BxS = batch["tag_scored"] > 0
    any_tag_BxS = jnp.zeros(is_scored_BxS.shape, jnp.int32)

    def loss(emissions_BxSxL: jax.Array) -> jax.Array:
        ids = batch["sequence_ids"]
        return crf_loss(emissions_BxSxL, any_tag_BxS, ids, is_scored_BxS, *crf)["loss"][0]

    # The loss is that sum minus the score of the path of tag 0.
    of_path_L = (jnp.arange(logits_BxSxL.shape[-1]) == 0).astype(jnp.float32)
    marginals = jax.grad(loss)(logits_BxSxL) + of_path_L
    return jnp.log(jnp.clip(marginals, _SMALLEST, 1.0))


def fitted_vectors(vectors_NxE: np.ndarray, width: int) -> np.ndarray:
    """Return float32[N, width]: narrower vectors with zeros at their end; wider ones in the ``width`` directions in
    which they are longest (singular vectors, without subtracting a mean, so that cosines change least)."""
    given = vectors_NxE.shape[1]
    if given <= width:
        return np.pad(vectors_NxE, [(0, 0), (0, width - given)]).astype(np.float32)
    _, directions = np.linalg.eigh((vectors_NxE.T @ vectors_NxE).astype(np.float64))
    return (vectors_NxE @ directions[:, ::-1][:, :width]).astype(np.float32)
