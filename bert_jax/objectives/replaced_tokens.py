"""Replaced token detection (Clark et al. 2020, ELECTRA; google-research/electra ``run_pretraining.py``).

A generator fills the masked positions with samples of its predictions; a discriminator predicts for every token
whether it is the original one. Both are trained together.

Shapes: B rows, S tokens per row, M masked positions, V vocabulary size.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from bert_jax.config import ExecutionConfig, HeadsConfig, ModelConfig, PretrainConfig
from bert_jax.model import BertModel
from bert_jax.model.bert import bert_output, present
from bert_jax.model.canonical import Params
from bert_jax.model.dropout import TOKEN_FEATURES, DropoutKey, TokenKey, mix, whole_key
from bert_jax.model.flops import traced_flops
from bert_jax.objectives.causal_lm import original_ids
from bert_jax.objectives.display import Column, Display, Panel, Sample, Tile
from bert_jax.objectives.objective import (
    TEXT_FEATURES,
    Aux,
    Batch,
    PretrainObjective,
    Summed,
    Sums,
    denominator,
    padding_sums,
    weighted_cross_entropy,
    with_predictions,
    z_loss,
)

NETWORKS = DISCRIMINATOR, GENERATOR = "discriminator", "generator"
HEADS = {DISCRIMINATOR: HeadsConfig(rtd=True), GENERATOR: HeadsConfig(mlm=True)}
# Numbers that derive the keys of the discriminator's dropout and of the samples from the key of a step, beyond the
# numbers of layers; the key of the samples of evaluations.
_DISCRIMINATOR_KEY, _SAMPLE_KEY, _EVALUATION_SEED = 1 << 20, 1 << 21, 0
# Part of the embeddings that no two networks share, and the tables that GDES adds.
_PROJECTION, _TABLES = "projection", ("word_embeddings", "position_embeddings")


def generator_config(config: PretrainConfig) -> ModelConfig:
    """Return the architecture of the generator: the discriminator's, with fewer or narrower layers.

    Its heads are as wide as the discriminator's, or as its own layers if these are narrower. Shared embeddings keep
    their width. Raises ``ValueError`` if its heads do not divide its width.
    """
    model, objective = config.model, config.objective

    def part(share: float, size: int) -> int:
        return max(1, round(share * size))

    share, depth = (*objective.generator_size, 1.0)[:2]
    width = part(share, model.hidden_size)
    heads = max(1, width // model.head_size)
    if width % heads:
        given = f"objective.generator_size: {share:g} is not allowed"
        why = f"because its {heads} heads do not divide the width of the generator, {width}"
        raise ValueError(f"{given}, {why}; use another share")
    if model.word_rank and objective.embedding_sharing == "disentangled":
        given = f"model.word_rank: {model.word_rank} is not allowed"
        raise ValueError(f"{given} with objective.embedding_sharing disentangled; allowed: 0")
    is_own = objective.embedding_sharing == "none"
    embedding = 0 if is_own and not model.embedding_size else model.embedding_width
    if model.word_rank and model.word_rank >= (embedding or width):
        given = f"objective.generator_size: {share:g} is not allowed"
        raise ValueError(
            f"{given} with model.word_rank {model.word_rank}, because the word embeddings of the generator have "
            f"the width {embedding or width}; use a larger share or a smaller rank"
        )
    return dataclasses.replace(
        model, hidden_size=width, num_attention_heads=heads, layer_heads=(), layer_units=(),
        intermediate_size=part(share, model.intermediate_size),
        num_layers=part(depth, model.num_layers),
        embedding_size=0 if embedding == width else embedding,
    )  # fmt: skip


class TwoNetworks(nn.Module):
    """Generator and discriminator. The parameters that both use are stored once, with the discriminator; with GDES
    (He et al. 2021, section 3.2) the tables of the discriminator are differences from those of the generator."""

    config: ModelConfig  # of the discriminator
    generator: ModelConfig
    sharing: str  # objective.embedding_sharing
    execution: ExecutionConfig
    mesh: Mesh | None = None

    @property
    def heads(self) -> HeadsConfig:
        """Heads of the discriminator."""
        return HEADS[DISCRIMINATOR]

    @nn.nowrap
    def part(self, name: str) -> BertModel:
        """Return one of the networks."""
        config = self.config if name == DISCRIMINATOR else self.generator
        return BertModel(config, self.execution, HEADS[name], mesh=self.mesh, parent=None)

    @nn.nowrap
    def params_of(self, params: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return the parameters that a network uses: of this network, and shared ones of the other. No gradient of
        the discriminator reaches the tables of the generator with GDES."""
        own, embeddings = dict(params[name]), dict(params[name]["embeddings"])
        if name == GENERATOR and self.sharing == "shared":
            others = params[DISCRIMINATOR]["embeddings"]
            embeddings |= {part: value for part, value in others.items() if part != _PROJECTION}
        if name == DISCRIMINATOR and self.sharing == "disentangled":
            others = params[GENERATOR]["embeddings"]
            for part in _TABLES:
                if part in embeddings:
                    embeddings[part] = jax.tree.map(
                        lambda own, other: own + jax.lax.stop_gradient(other), embeddings[part], others[part]
                    )
        return own | {"embeddings": embeddings}

    @nn.compact
    def __call__(self, features: Mapping[str, jax.Array]) -> None:
        """Initialize the parameters of both networks; nothing is computed."""
        for name in NETWORKS:
            self.param(name, lambda key, name=name: self._initial(name, key, features))

    @nn.nowrap
    def _initial(self, name: str, key: jax.Array, features: Mapping[str, jax.Array]) -> Params:
        params = dict(self.part(name).init(key, features)["params"])
        embeddings = dict(params["embeddings"])
        if name == GENERATOR and self.sharing == "shared":
            embeddings = {part: value for part, value in embeddings.items() if part == _PROJECTION}
        if name == DISCRIMINATOR and self.sharing == "disentangled":
            zeros = {part: jax.tree.map(jnp.zeros_like, embeddings[part]) for part in _TABLES if part in embeddings}
            embeddings |= zeros
        return params | {"embeddings": embeddings}


def gumbel_noise(key: TokenKey, size: int) -> jax.Array:
    """Return Gumbel noise float32[B, M, size] for the tokens [B, M] of ``key``: -log(-log(u)), where u is a
    multiple of 2**-24 plus 2**-25, from the hash of the key, the token and the column."""
    first, second = (words[..., None] for words in key.words())
    shape = (*first.shape[:-1], size)
    bits = mix(jax.lax.broadcasted_iota(jnp.int32, shape, 2) + first, second)
    uniform = (jax.lax.shift_right_logical(bits, 8).astype(jnp.float32) + 0.5) * jnp.float32(2**-24)
    return -jnp.log(-jnp.log(uniform))


class ReplacedTokens(PretrainObjective):
    """Cross-entropy of the masked tokens (generator), plus ``objective.discriminator_weight`` times the binary
    cross-entropy of every token (discriminator)."""

    display = Display(
        keys=("mlm_loss", "rtd_loss", "mlm_accuracy", "rtd_accuracy"),
        columns=(
            Column("mlm {}", "mlm_loss", accuracy="mlm_accuracy"),
            Column("rtd {}", "rtd_loss", accuracy="rtd_accuracy"),
        ),
        panels=(
            Panel("generator: masked-token loss (nats)", "mlm_loss"),
            Panel("generator: masked-token accuracy", "mlm_accuracy", percent=True),
            Panel("discriminator: loss per token (nats)", "rtd_loss"),
            Panel("discriminator: replaced tokens that are found", "rtd_recall", percent=True),
        ),
        tiles=(
            Tile("held-out discriminator loss", "rtd_loss"),
            Tile("held-out replaced tokens found", "rtd_recall"),
            Tile("held-out share of replaced tokens", "rtd_replaced"),
            Tile("held-out generator loss", "mlm_loss"),
        ),
    )
    features = TEXT_FEATURES
    networks = NETWORKS
    model: TwoNetworks

    @staticmethod
    def make_model(config: PretrainConfig, mesh: Mesh | None) -> TwoNetworks:
        for key, value, allowed in (
            ("data.next_sentence", config.data.next_sentence, ("none",)),
            ("model.attention", config.model.attention, ("bidirectional",)),
            ("execution.prng", config.execution.prng, ("hash", "threefry")),
        ):
            if value not in allowed:
                wanted = f"with objective.name replaced_tokens; set {' or '.join(allowed)}"
                raise ValueError(f"{key}: {value!r} is not allowed {wanted}")
        generator = generator_config(config)
        return TwoNetworks(config.model, generator, config.objective.embedding_sharing, config.execution, mesh)

    @classmethod
    def network(
        cls, config: PretrainConfig, model: nn.Module, params: Mapping[str, np.ndarray], name: str
    ) -> tuple[ModelConfig, HeadsConfig, Mapping[str, np.ndarray]]:
        assert isinstance(model, TwoNetworks)
        trees = {part: _nested(params, f"{part}/") for part in NETWORKS}
        flat = _flat(model.params_of(trees, name))
        arrays = {path: np.asarray(array) for path, array in flat.items()}
        return (config.model if name == DISCRIMINATOR else model.generator), HEADS[name], arrays

    @classmethod
    def placed(cls, config: PretrainConfig, params: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        if params and config.objective.embedding_sharing == "disentangled":
            raise ValueError(
                "--init_from: not allowed with objective.embedding_sharing disentangled, which combines the tables "
                "of two networks; set shared or none, or omit --init_from"
            )
        return {f"{DISCRIMINATOR}/{name}": array for name, array in params.items()}

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        masked = denominator(batch["mlm_weights"])
        tokens = denominator((batch["sequence_ids"] > 0).astype(jnp.float32))
        losses = {"mlm_loss": masked, "rtd_loss": tokens / self.config.objective.discriminator_weight}
        return losses | ({"mlm_z_loss": masked} if self.config.objective.z_loss else {})

    def noise(self, batch: Batch, key: DropoutKey | None, size: int) -> jax.Array:
        """Return the Gumbel noise of the samples, float32[B, M, size]; without a key it is always the same."""
        if not isinstance(key, TokenKey):
            of_step = jax.random.key(_EVALUATION_SEED, impl="threefry2x32") if key is None else whole_key(key)
            key = TokenKey.of(of_step, *(batch[name] for name in TOKEN_FEATURES))
        of_samples = dataclasses.replace(key, key=jax.random.fold_in(key.key, _SAMPLE_KEY))
        return gumbel_noise(of_samples.at(batch["mlm_positions"]), size)

    def sums(self, params: Params, aux: Aux, batch: Batch, key: DropoutKey | None, *, axis: str | None) -> Summed:
        model, weights = self.model, batch["mlm_weights"]
        generator, discriminator = (model.part(name) for name in (GENERATOR, DISCRIMINATOR))
        with jax.named_scope(GENERATOR):
            output = generator.apply({"params": model.params_of(params, GENERATOR)}, batch, key)
            logits = present(bert_output(output).mlm_logits)
            sums = weighted_cross_entropy("mlm", logits, batch["mlm_labels"], weights)
            sums |= z_loss("mlm", self.config.objective.z_loss, logits, weights)
            noise = self.noise(batch, key, logits.shape[-1])
            sampled_BxM = jnp.argmax(jax.lax.stop_gradient(logits) + noise, axis=-1).astype(jnp.int32)
        original_BxS = original_ids(batch)
        ids_BxS = with_predictions(original_BxS, batch, sampled_BxM)
        with jax.named_scope(DISCRIMINATOR):
            folded = None if key is None else _folded(key)
            output = discriminator.apply(
                {"params": model.params_of(params, DISCRIMINATOR)}, {**batch, "input_ids": ids_BxS}, folded
            )
            scores_BxS = present(bert_output(output).rtd_logits)
        sums |= detection_sums(scores_BxS, ids_BxS != original_BxS, batch["sequence_ids"] > 0)
        return sums | padding_sums(batch["sequence_ids"]), aux.carried

    def flops_per_sequence(self) -> float:
        scans = self.config.model.has_equal_layers
        execution = ExecutionConfig(scan_layers=scans, vocab_multiple=1, attention="xla", residual_norm="xla")
        config = dataclasses.replace(self.config, execution=execution)
        alone = type(self)(config, None)
        shapes = self.row_shape.features(1)
        batch = {name: jax.ShapeDtypeStruct(*shapes[name]) for name in alone.features}
        length = jnp.zeros((1, 8), jnp.int32)
        features = {name: length for name in ("input_ids", "token_type_ids", "sequence_ids", "position_ids")}
        params = nn.unbox(jax.eval_shape(lambda: alone.model.init(jax.random.key(0), features)["params"]))

        def loss(params: Params, batch: Batch) -> jax.Array:
            sums, _ = alone.sums(params, Aux({}), batch, None, axis=None)
            return sums["mlm_loss"][0] + sums["rtd_loss"][0]

        return traced_flops(jax.grad(loss), params, batch).total() / self.row_shape.sequences

    def evaluation(self, totals: Mapping[str, np.ndarray]) -> dict[str, float]:
        values = super().evaluation(totals)
        weighted = self.config.objective.discriminator_weight * values.get("rtd_loss", 0.0)
        values["loss"] = values.get("mlm_loss", 0.0) + weighted
        values["targets"] = int(totals["rtd_loss"][1]) if "rtd_loss" in totals else 0
        return values

    def result_lines(self, final: Mapping[str, float], samples: Sequence[Sample]) -> list[str]:
        if not final:
            return []
        return [
            f"held-out: discriminator loss {final['rtd_loss']:.4f} nats on {final['targets']:,} tokens, accuracy "
            f"{final['rtd_accuracy']:.4f}; {final['rtd_replaced']:.4f} of the tokens are replaced, of which "
            f"{final.get('rtd_recall', 0.0):.4f} are found",
            f"held-out: generator loss {final['mlm_loss']:.4f} nats, accuracy {final['mlm_accuracy']:.4f}",
        ]


def detection_sums(scores_BxS: jax.Array, is_replaced_BxS: jax.Array, is_token_BxS: jax.Array) -> Sums:
    """Return the binary cross-entropy of ``scores`` (float32, positive: replaced), the accuracy, the share of the
    replaced tokens that are found and the share of the tokens that are replaced."""
    labels, weights = is_replaced_BxS.astype(jnp.float32), is_token_BxS.astype(jnp.float32)
    loss = jax.nn.softplus(scores_BxS) - labels * scores_BxS
    found, total = (scores_BxS > 0).astype(jnp.float32), jnp.sum(weights)
    return {
        "rtd_loss": (jnp.sum(loss * weights), total),
        "rtd_accuracy": (jnp.sum((found == labels) * weights), total),
        "rtd_recall": (jnp.sum(found * labels * weights), jnp.sum(labels * weights)),
        "rtd_replaced": (jnp.sum(labels * weights), total),
    }


def _folded(key: DropoutKey) -> DropoutKey:
    """Return the dropout key of the discriminator, so that its bits differ from the generator's."""
    folded = jax.random.fold_in(whole_key(key), _DISCRIMINATOR_KEY)
    return folded if isinstance(key, jax.Array) else dataclasses.replace(key, key=folded)


def _nested(params: Mapping[str, np.ndarray], prefix: str) -> Params:
    """Return the arrays whose names begin with ``prefix``; embeddings are a tree."""
    tree: dict[str, Any] = {"embeddings": {}}
    for name, array in params.items():
        if name.startswith(f"{prefix}embeddings/"):
            part, leaf = name.removeprefix(f"{prefix}embeddings/").split("/")
            tree["embeddings"].setdefault(part, {})[leaf] = array
        elif name.startswith(prefix):
            tree[name.removeprefix(prefix)] = array
    return tree


def _flat(tree: Mapping[str, Any]) -> dict[str, jax.Array]:
    embeddings = {
        f"embeddings/{part}/{leaf}": array
        for part, leaves in tree["embeddings"].items()
        for leaf, array in leaves.items()
    }
    return {name: array for name, array in tree.items() if name != "embeddings"} | embeddings
