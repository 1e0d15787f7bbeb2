"""Causal language model: every token predicts the next one (Radford et al. 2018, section 3.1).

Shapes: B rows, S tokens per row, H hidden size, V vocabulary size.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax.config import HeadsConfig, PretrainConfig
from bert_jax.model import BertModel
from bert_jax.model.bert import present
from bert_jax.model.canonical import Params, Shapes
from bert_jax.model.dense import matmul_f32_grad
from bert_jax.model.dropout import DropoutKey
from bert_jax.objectives.display import Column, Display, Examples, Panel, ReportData, Sample, Tile
from bert_jax.objectives.objective import (
    TEXT_FEATURES,
    Aux,
    Batch,
    PretrainObjective,
    Summed,
    apply_carried,
    cache_shapes,
    denominator,
    padding_sums,
    weighted_cross_entropy,
    with_predictions,
    z_loss,
)
from bert_jax.parallel.axes import constrain
from bert_jax.tokenization import Tokenizer

SAMPLE_ROWS = 5
SAMPLE_TOKENS = 12


class CausalModel(BertModel):
    """The encoder with the word embedding table as its output layer, without a transform or a bias; with encoders
    other than the Transformer, with the output layer of the head mlm."""

    def __call__(self, features: Mapping[str, jax.Array], dropout_key: DropoutKey | None = None) -> jax.Array:  # type: ignore[override]
        """Return float32[B, S, V], the logits of the next token; -inf for padding rows of the embedding table."""
        if self.heads.mlm:
            every = {name: values for name, values in features.items() if name != "mlm_positions"}
            return present(super().__call__(every, dropout_key).mlm_logits)
        x_BxSxH, table_VxH = self.embeddings(
            features["input_ids"], features["token_type_ids"], features["position_ids"], dropout_key
        )
        tokens = {name: features[name] for name in ("sequence_ids", "position_ids")}
        x_BxSxH, _ = self.encoder(x_BxSxH, tokens, dropout_key)
        logits_BxSxV = matmul_f32_grad(x_BxSxH, table_VxH, 1, jnp.dtype("float32"))
        logits_BxSxV = constrain(logits_BxSxV, ("act_batch", "act_length", "act_vocab"), self.mesh)
        is_piece_V = jnp.arange(table_VxH.shape[0]) < self.config.vocab_size
        return jnp.where(is_piece_V, logits_BxSxV, -jnp.inf)


def original_ids(batch: Batch) -> jax.Array:
    """Return int32[B, S], the token ids of ``batch`` before masking."""
    return with_predictions(batch["input_ids"], batch, batch["mlm_labels"])


def next_weights(sequence_ids_BxS: jax.Array) -> jax.Array:
    """Return float32[B, S - 1], 1 where a token and the next token belong to the same sequence, otherwise 0."""
    first, second = sequence_ids_BxS[:, :-1], sequence_ids_BxS[:, 1:]
    return ((first == second) & (first > 0)).astype(jnp.float32)


def _sections(data: ReportData) -> list[Examples]:
    samples = data.get("samples", ())
    texts = [sample["prompt"] for sample in samples]
    items = [
        f'<div dir="auto">{html.escape(text)} <b>{html.escape(sample["continuation"])}</b></div>'
        for text, sample in zip(texts, samples, strict=True)
    ]
    note = "Bold: the most probable tokens after a held-out beginning."
    return [Examples("Held-out beginnings, continued by the model", note, texts, items)] if items else []


class CausalLm(PretrainObjective):
    """Cross-entropy of each token, given the preceding tokens of its sequence."""

    display = Display(
        keys=("lm_loss", "lm_accuracy"),
        columns=(Column("lm {}", "lm_loss", accuracy="lm_accuracy"),),
        panels=(Panel("next-token loss (nats)", "lm_loss"), Panel("accuracy", "lm_accuracy", percent=True)),
        tiles=(Tile("held-out next-token loss", "lm_loss"), Tile("held-out perplexity", "perplexity")),
        sections=_sections,
    )
    features = TEXT_FEATURES

    @staticmethod
    def make_model(config: PretrainConfig, mesh: Mesh | None) -> CausalModel:
        model, suffix = config.model, "is not allowed with objective.name causal_lm"
        for key, value, wanted, ok in (
            ("model.attention", model.attention, "causal", model.is_causal or not model.has_attention),
            ("model.encoder", model.encoder, "a causal one, such as transformer", model.is_causal),
            ("data.next_sentence", config.data.next_sentence, "none", not config.has_nsp),
        ):
            if not ok:
                raise ValueError(f"{key}: {value!r} {suffix}; set {wanted}")
        return CausalModel(model, config.execution, HeadsConfig(mlm=not model.has_attention), mesh=mesh)

    def carried(self) -> Shapes | None:
        is_carried = self.config.data.row_order == "carried"
        return cache_shapes(self.model, self.batch_rows) if is_carried else None

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        total = denominator(next_weights(batch["sequence_ids"]))
        return {"lm_loss": total} | ({"lm_z_loss": total} if self.config.objective.z_loss else {})

    def sums(self, params: Params, aux: Aux, batch: Batch, key: DropoutKey | None, *, axis: str | None) -> Summed:
        ids_BxS = original_ids(batch)
        own = {**batch, "input_ids": ids_BxS}
        logits_BxSxV, carried = apply_carried(self.model, params, own, key, aux.carried)
        weights = next_weights(batch["sequence_ids"])
        sums = weighted_cross_entropy("lm", logits_BxSxV[:, :-1], ids_BxS[:, 1:], weights)
        sums |= z_loss("lm", self.config.objective.z_loss, logits_BxSxV[:, :-1], weights)
        return sums | padding_sums(batch["sequence_ids"]), carried

    def evaluation(self, totals: Mapping[str, np.ndarray]) -> dict[str, float]:
        values = super().evaluation(totals)
        loss = values.get("lm_loss", float("nan"))
        targets = int(totals["lm_loss"][1]) if "lm_loss" in totals else 0
        return values | {"loss": loss, "perplexity": float(np.exp(loss)), "targets": targets}

    def samples(self, params: Params, tokenizer: Tokenizer, batch: Mapping[str, np.ndarray]) -> list[Sample]:
        """Return, for some held-out rows, a prompt (the first half of the row) and its continuation, in which each
        next token is the most probable one."""
        model = self.model.clone(mesh=None)
        rows: dict[str, Any] = {name: np.array(batch[name][:SAMPLE_ROWS]) for name in self.features}
        ids_BxS = np.array(original_ids(rows))
        lengths_B = (rows["sequence_ids"] > 0).sum(axis=1)
        starts_B = np.maximum(lengths_B // 2, 1)
        pieces = tokenizer.vocab_size

        @jax.jit
        def next_tokens(params: Params, ids_BxS: jax.Array) -> jax.Array:
            return jnp.argmax(
                model.apply({"params": params}, rows | {"input_ids": ids_BxS}, None)[..., :pieces], -1
            )

        on_device = jax.tree.map(jnp.asarray, params)
        ends_B = np.minimum(starts_B + SAMPLE_TOKENS, lengths_B)
        generated = ids_BxS.copy()
        for step in range(int((ends_B - starts_B).max(initial=0))):
            likely_BxS = np.asarray(next_tokens(on_device, generated))
            for row in np.flatnonzero(starts_B + step < ends_B):
                generated[row, starts_B[row] + step] = likely_BxS[row, starts_B[row] + step - 1]

        def text(ids: np.ndarray) -> str:
            return tokenizer.decode(
                [int(token) for token in ids if token not in (tokenizer.cls_id, tokenizer.sep_id)]
            )

        return [
            {"prompt": text(own[:start]), "continuation": text(own[start:end])}
            for own, start, end in zip(generated, starts_B, ends_B, strict=True)
            if end
        ]

    def result_lines(self, final: Mapping[str, float], samples: Sequence[Sample]) -> list[str]:
        lines = []
        if final:
            lines.append(
                f"held-out: next-token loss {final['lm_loss']:.4f} nats on {final['targets']:,} targets, "
                f"perplexity {final['perplexity']:.1f}, accuracy {final['lm_accuracy']:.4f}"
            )
        return lines + [f"{sample['prompt']} -> {sample['continuation']}" for sample in samples]
