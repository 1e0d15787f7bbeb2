"""Distillation in pretraining: the student learns masked tokens and the outputs of a teacher that reads the same
batch (DistilBERT, Sanh et al. 2019; TinyBERT, Jiao et al. 2020; MiniLM v2, Wang et al. 2021).

Shapes: B rows, S tokens, L layers, H width.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh
from jax.typing import DTypeLike

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, PretrainConfig
from bert_jax.contrib.compression import distillation_losses as losses
from bert_jax.contrib.compression.config import DistillationConfig
from bert_jax.contrib.compression.teachers.inputs import TeacherInputs
from bert_jax.model import BertModel, BertOutput, from_canonical
from bert_jax.model.bert import bert_output, of_layers, present
from bert_jax.model.canonical import Params, abstract_params, canonical_shapes
from bert_jax.model.dense import Dense
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.flops import training_flops_per_sequence
from bert_jax.model.layers import VECTORS, compute_dtype
from bert_jax.objectives.display import Column, Panel
from bert_jax.objectives.masked_lm import COLUMNS, MLM_EPSILON, PANELS, MaskedLm
from bert_jax.objectives.objective import (
    Aux,
    Batch,
    Summed,
    Sums,
    denominator,
    padding_sums,
    weighted_cross_entropy,
    z_loss,
)
from bert_jax.parallel import shardings

# Features of a batch that hold outputs of the teacher: logits [B, M, V], or those of the most probable pieces
# [B, M, K] with their ids; hidden states of N layers [B, N, S, H]; queries, keys (and values) of N layers
# [B, N, 2 or 3, S, H].
LOGITS, PIECES, HIDDEN, ATTENTION = "teacher_logits", "teacher_pieces", "teacher_hidden", "teacher_attention"
_PROJECTION = "teacher_projection"
_HEADS = HeadsConfig(mlm=True)
# The losses with a teacher and the options of their weights.
_LOSSES = ("soft", "hidden", "attention")


class Student(BertModel):
    """A model with a projection of its hidden states to ``teacher_width``; 0: none."""

    teacher_width: int = 0

    def setup(self) -> None:
        super().setup()
        if self.teacher_width:
            dtype = compute_dtype(self.execution)
            self.teacher_projection = Dense(self.teacher_width, ("embed", "pooled"), self.config, dtype, True)

    def __call__(self, features: Mapping[str, jax.Array], dropout_key: DropoutKey | None = None) -> BertOutput:
        output = super().__call__(features, dropout_key)
        if self.teacher_width and self.is_initializing():
            self.teacher_projection(output.sequence_output)
        return output

    def projected(self, x_BxSxH: jax.Array) -> jax.Array:
        """Return the hidden states in the width of the teacher."""
        return self.teacher_projection(x_BxSxH) if self.teacher_width else x_BxSxH


class Distillation(MaskedLm):
    """``objective.mlm_weight`` times the loss of masked tokens, plus losses between student and teacher: the
    distributions of masked tokens (soft), the hidden states (hidden), the attention (attention).

    The teacher runs in the step, with the parameters ``fixed["teacher"]``, or its outputs are features of the batch
    (:meth:`use_stored`).
    """

    display = dataclasses.replace(
        MaskedLm.display,
        keys=("mlm_loss", "mlm_accuracy", *(f"{name}_loss" for name in _LOSSES)),
        columns=(COLUMNS[0], *(Column(f"{name} {{}}", f"{name}_loss") for name in _LOSSES)),
        panels=(
            *PANELS[:2],
            Panel("divergence from the teacher's masked tokens (nats)", "soft_loss"),
            Panel("difference from the teacher's hidden states", "hidden_loss"),
            Panel("difference from the teacher's attention", "attention_loss"),
        ),
    )
    inputs = TeacherInputs
    model: Student
    teacher: BertModel | None = None
    # Features that hold outputs of the teacher, as (shape of a row, dtype); empty: the teacher runs in the step.
    stored: Mapping[str, tuple[tuple[int, ...], DTypeLike]] = MappingProxyType({})

    @staticmethod
    def make_model(config: PretrainConfig, mesh: Mesh | None) -> Student:
        options = DistillationConfig.required(config.objective, "distillation")
        if config.data.next_sentence != "none":
            given = f"data.next_sentence: {config.data.next_sentence!r} is not allowed"
            raise ValueError(f"{given} with objective.name distillation; set none")
        if options.hidden_loss == "none" or options.teacher_width == config.model.hidden_size:
            width = 0
        else:
            width = options.teacher_width
        return Student(
            config.model, config.execution, _HEADS, mesh=mesh, all_layers=options.hidden_loss != "none",
            teacher_width=width,
        )  # fmt: skip

    @classmethod
    def network(
        cls, config: PretrainConfig, model: nn.Module, params: Mapping[str, np.ndarray], name: str
    ) -> tuple[ModelConfig, HeadsConfig, Mapping[str, np.ndarray]]:
        own = {name: array for name, array in params.items() if not name.startswith(f"{_PROJECTION}/")}
        return config.model, _HEADS, own

    @property
    def options(self) -> DistillationConfig:
        """The section ``objective``."""
        return DistillationConfig.required(self.config.objective, "distillation")

    def teach(self, spec: ModelSpec, params: Mapping[str, np.ndarray] | None = None) -> None:
        """Set ``teacher`` to the model that ``spec`` describes and, on a mesh, copy its canonical parameters
        ``params`` to the devices. Raises ``ValueError`` if the model cannot teach the student."""
        config, options, own = spec.model, self.options, self.config.model
        if options.soft_weight and not spec.heads.mlm:
            raise ValueError(
                "--teacher: the model has no masked-LM head; set objective.soft_weight 0 and, since it may not "
                "know [MASK], objective.mlm_weight 0, data.mask_token_share 0 and data.random_token_share 0"
            )
        if config.vocab_size != own.vocab_size:
            sizes = f"has {config.vocab_size} pieces, but model.vocab_size is {own.vocab_size}"
            raise ValueError(f"--teacher: the model {sizes}; use the vocabulary of the teacher")
        if config.max_length < self.config.data.seq_length:
            few = f"has {config.max_length} positions, but data.seq_length is {self.config.data.seq_length}"
            raise ValueError(f"--teacher: the model {few}; lower data.seq_length")
        if options.soft_top_k > own.vocab_size:
            pieces = f"1 to {own.vocab_size}, the pieces of the vocabulary, or 0 (all)"
            raise ValueError(f"objective.soft_top_k: {options.soft_top_k} is not allowed; allowed: {pieces}")
        if options.hidden_loss != "none" and config.hidden_size != options.teacher_width:
            raise ValueError(
                f"objective.teacher_width: {options.teacher_width} is not allowed; the width of the teacher is "
                f"{config.hidden_size}"
            )
        every = options.hidden_loss != "none" and options.hidden_layers == "all"
        if (every or options.attention_loss == "scores") and config.num_layers % own.num_layers:
            raise ValueError(
                f"model.num_layers: {own.num_layers} is not allowed with a teacher of {config.num_layers} layers, "
                f"whose layers are compared in proportion; use a divisor of {config.num_layers}"
            )
        self._check_attention(config, own)
        heads = HeadsConfig(mlm=options.soft_weight > 0)
        execution = dataclasses.replace(self.config.execution, dtype=options.teacher_dtype)
        self.teacher = BertModel(config, execution, heads, mesh=self.mesh, all_layers=options.hidden_loss != "none")
        if params is not None and self.mesh is not None:
            self.fixed["teacher"] = _placed(self.teacher, params, self.mesh)

    def use_stored(self, arrays: Mapping[str, tuple[tuple[int, ...], DTypeLike]]) -> None:
        """Read :meth:`outputs` from the batch, where ``arrays`` gives the shape of a row and the dtype of each."""
        self.stored, self.features = arrays, (*self.features, *arrays)

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        stored = self.stored.items()
        own = {name: jax.ShapeDtypeStruct((batch_size, *shape), dtype) for name, (shape, dtype) in stored}
        return super().batch_shapes(batch_size) | own

    def _check_attention(self, teacher: ModelConfig, own: ModelConfig) -> None:
        options = self.options
        kind, heads, layer = options.attention_loss, options.relation_heads, options.relation_layer
        if kind == "none":
            return
        for name, model in (("the teacher", teacher), ("the student", own)):
            if not model.has_attention:
                raise ValueError(f"objective.attention_loss: {kind}, but {name} has no attention; set none")
        if kind == "relations" and not -teacher.num_layers <= layer < teacher.num_layers:
            allowed = f"{-teacher.num_layers} to {teacher.num_layers - 1}"
            raise ValueError(f"objective.relation_layer: {layer} is not allowed; allowed: {allowed}")
        for name, model, compared in (("the teacher", teacher, layer), ("the student", own, -1)):
            if kind == "relations" and (width := model.heads_by_layer[compared] * model.head_size) % heads:
                allowed = f"a divisor of {width}, the width of {name}"
                raise ValueError(f"objective.relation_heads: {heads} is not allowed; allowed: {allowed}")
        if kind == "scores" and len({*teacher.heads_by_layer, *own.heads_by_layer}) > 1:
            given = f"model.num_attention_heads: {own.num_attention_heads} is not allowed"
            allowed = f"{teacher.num_attention_heads}, as in the teacher, or objective.attention_loss relations"
            if own.layer_heads or teacher.layer_heads:
                given = "objective.attention_loss: scores is not allowed with layers of different numbers of heads"
                allowed = "relations"
            raise ValueError(f"{given}; allowed: {allowed}")

    # ------------------------------------------------------------------ losses

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        options = self.options
        masked = jnp.sum(batch["mlm_weights"]) + MLM_EPSILON
        tokens = denominator((batch["sequence_ids"] > 0).astype(jnp.float32))
        of_attention = tokens
        if options.attention_loss == "scores":
            of_attention = jnp.maximum(losses.visible_pairs(batch["sequence_ids"]), 1)
        found = {}
        if options.mlm_weight:
            found["mlm_loss"] = masked / options.mlm_weight
            if options.z_loss:
                found["mlm_z_loss"] = found["mlm_loss"]
        if options.soft_weight:
            found["soft_loss"] = masked / options.soft_weight
        if options.hidden_loss != "none":
            found["hidden_loss"] = tokens / options.hidden_weight
        if options.attention_loss != "none":
            found["attention_loss"] = of_attention / options.attention_weight
        return found

    def sums(self, params: Params, aux: Aux, batch: Batch, key: DropoutKey | None, *, axis: str | None) -> Summed:
        if self.stored:
            return self._losses(params, batch, batch, key), aux.carried
        if "teacher" not in aux.fixed:
            plan = "bert-jax plan has no teacher, so plan the student with objective.name masked_lm"
            raise ValueError(f"--teacher: missing; name the model that teaches; {plan}")
        with jax.named_scope("teacher"):
            outputs = self.outputs(aux.fixed["teacher"], batch)
        return self._losses(params, outputs, batch, key), aux.carried

    def _losses(self, params: Params, outputs: Batch, batch: Batch, key: DropoutKey | None) -> Sums:
        """Return the sums of all losses; ``outputs`` has the :meth:`outputs` of the teacher."""
        options = self.options
        student, vectors = self._run(self.model, params, batch, key)
        sums = padding_sums(batch["sequence_ids"])
        if options.mlm_weight or options.soft_weight:
            logits, weights = present(student.mlm_logits), batch["mlm_weights"]
            sums |= weighted_cross_entropy("mlm", logits, batch["mlm_labels"], weights)
            sums |= z_loss("mlm", options.z_loss, logits, weights)
        if options.soft_weight:
            of_teacher = self._teacher_logits(outputs, logits.shape[-1])
            sums |= losses.soft_target_loss("soft", logits, of_teacher, weights, options.temperature)
        if options.hidden_loss != "none":
            sums |= self._hidden(params, student, outputs[HIDDEN], batch)
        ids = batch["sequence_ids"]
        if options.attention_loss == "scores":
            count = self.config.model.heads_by_layer[0]  # of all layers, of student and teacher
            vectors_of_teacher = [
                [x.reshape(*x.shape[:2], count, -1) for x in layer.swapaxes(0, 1)]
                for layer in outputs[ATTENTION].swapaxes(0, 1)
            ]
            pairs = zip(vectors, vectors_of_teacher, strict=True)
            sums |= _added([losses.score_loss("attention", (s[0], s[1]), (t[0], t[1]), ids) for s, t in pairs])
        elif options.attention_loss == "relations":
            sums |= _added(
                [
                    losses.relation_loss("attention", s.reshape(*s.shape[:2], -1), t, ids, options.relation_heads)
                    for s, t in zip(vectors[-1], outputs[ATTENTION][:, 0].swapaxes(0, 1), strict=True)
                ]
            )
        return sums

    def _teacher_logits(self, outputs: Batch, size: int) -> jax.Array:
        """Return the logits of the teacher, float32[B, M, size], -inf where a piece does not count."""
        values = outputs[LOGITS]
        if PIECES not in outputs:
            padding = size - values.shape[-1]  # of the vocabulary in memory
            return jnp.pad(values, [(0, 0), (0, 0), (0, padding)], constant_values=-jnp.inf)
        rows, columns = (jnp.arange(n) for n in values.shape[:2])
        empty = jnp.full((*values.shape[:2], size), -jnp.inf, jnp.float32)
        return empty.at[rows[:, None, None], columns[:, None], outputs[PIECES]].set(values)

    # ------------------------------------------------------------------ the teacher

    def outputs_record(self) -> dict[str, Any]:
        """Return a JSON-serializable description of :meth:`outputs`; called after :meth:`teach`."""
        options = self.options
        record: dict[str, Any] = {"dtype": options.teacher_dtype}
        if options.soft_weight:
            record["pieces"] = options.soft_top_k or "all"
        if options.hidden_loss != "none":
            record["hidden_layers"] = self._hidden_layers()
        if options.attention_loss != "none":
            record |= {"attention": options.attention_loss, "attention_layers": self._attention_layers()}
        return record

    def outputs(self, params: Any, batch: Batch) -> dict[str, jax.Array]:
        """Return the outputs of the teacher that the losses read, float32 or int32 [B, ...], by the names that they
        have as features of a batch; ``params`` are the parameters of the teacher."""
        assert self.teacher is not None
        options, found = self.options, dict[str, jax.Array]()
        teacher, vectors = self._run(self.teacher, params, batch, None)
        if options.soft_weight:
            found[LOGITS] = present(teacher.mlm_logits)[..., : self.teacher.config.vocab_size]
            if options.soft_top_k:
                found[LOGITS], found[PIECES] = jax.lax.top_k(found[LOGITS], options.soft_top_k)
        if options.hidden_loss != "none":
            states = [present(teacher.hidden_states)[n] for n in self._hidden_layers()]
            found[HIDDEN] = jnp.stack(states, axis=1).astype(jnp.float32)
        if options.attention_loss != "none":
            parts = 2 if options.attention_loss == "scores" else 3
            of_layers = [vectors[n][:parts] for n in self._attention_layers()]  # each [parts, B, S, A, D]
            stacked = [x.reshape(*x.shape[:3], -1).swapaxes(0, 1) for x in of_layers]
            found[ATTENTION] = jnp.stack(stacked, axis=1).astype(jnp.float32)
        return found

    def _hidden_layers(self) -> list[int]:
        """Return the layers of the teacher whose hidden states are compared; 0: the embeddings."""
        assert self.teacher is not None
        layers = self.teacher.config.num_layers
        if self.options.hidden_layers == "last":
            return [layers]
        return list(range(0, layers + 1, layers // self.config.model.num_layers))

    def _attention_layers(self) -> list[int]:
        """Return the layers of the teacher whose attention is compared, from 0."""
        assert self.teacher is not None
        layers, options = self.teacher.config.num_layers, self.options
        if options.attention_loss == "relations":
            return [options.relation_layer % layers]
        every = layers // self.config.model.num_layers
        return list(range(every - 1, layers, every))

    def _run(
        self, model: BertModel, params: Params, batch: Batch, key: DropoutKey | None
    ) -> tuple[BertOutput, list[jax.Array]]:
        """Return the outputs of a network and, for a loss of attention, the queries, keys and values of its layers,
        each [3, B, S, A, D]."""
        if self.options.attention_loss == "none":
            return bert_output(model.apply({"params": params}, batch, key)), []
        output, state = model.apply({"params": params}, batch, key, mutable=[VECTORS])
        return bert_output(output), of_layers(state[VECTORS]["encoder"], model.config, "attention", "attention")

    def _hidden(self, params: Params, student: BertOutput, teacher_BxNxSxH: jax.Array, batch: Batch) -> Sums:
        options, weights = self.options, (batch["sequence_ids"] > 0).astype(jnp.float32)
        every = present(student.hidden_states)
        own = every if options.hidden_layers == "all" else every[-1:]
        loss = losses.cosine_distance_loss if options.hidden_loss == "cosine" else losses.squared_error_loss

        def projected(x_BxSxH: jax.Array) -> Any:
            return self.model.apply({"params": params}, x_BxSxH, method="projected")

        return _added([
            loss("hidden", projected(x), y, weights)
            for x, y in zip(own, teacher_BxNxSxH.swapaxes(0, 1), strict=True)
        ])  # fmt: skip

    def evaluation(self, totals: Mapping[str, np.ndarray]) -> dict[str, float]:
        options, values = self.options, super().evaluation(totals)
        weights = {"mlm": options.mlm_weight, "soft": options.soft_weight, "hidden": options.hidden_weight,
                   "attention": options.attention_weight}  # fmt: skip
        if any(f"{name}_loss" in values for name in _LOSSES):
            values["loss"] = sum(weight * values.get(f"{name}_loss", 0.0) for name, weight in weights.items())
        return values

    def flops_per_sequence(self) -> float:
        shape, flops = self.row_shape, super().flops_per_sequence()
        if self.teacher is None or self.stored:
            return flops
        of_row = training_flops_per_sequence(
            self.teacher.config, seq_length=shape.seq_length, max_predictions=shape.max_predictions, has_nsp=False
        )
        return flops + of_row / 3 / shape.sequences  # forward only


def _placed(teacher: BertModel, params: Mapping[str, np.ndarray], mesh: Mesh) -> Params:
    """Return the canonical parameters of the teacher in its layout, on the devices."""
    boxed, vocab_size = abstract_params(teacher), teacher.config.vocab_size
    own = {name: params[name] for name in canonical_shapes(teacher)}
    place = jax.jit(
        lambda params: from_canonical(params, nn.unbox(boxed), vocab_size), out_shardings=shardings(boxed, mesh)
    )
    return place(own)


def _added(parts: list[Sums]) -> Sums:
    """Return the sum of losses of the same name, with their common weight."""
    (name,) = parts[0]
    return {name: (sum((part[name][0] for part in parts), jnp.zeros(())), parts[0][name][1])}
