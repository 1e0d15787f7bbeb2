"""Replaced token detection: its curve against torch, its draws, its gradients, its networks, and its refusals."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from curves import assert_curve
from flax import linen as nn
from golden.cases import (
    CURVE_MODEL,
    SHARINGS,
    rtd_batch,
    rtd_weights,
)
from support import (
    objective_of,
    random_batch,
    random_params,
    relative_difference,
    sums_of,
    tiny_config,
    train_synthetic,
    whole_and_resumed,
)

from bert_jax.config import DataConfig, ModelConfig, PretrainConfig
from bert_jax.config.objective import ObjectiveConfig
from bert_jax.interop.export import export_model
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.model import from_canonical, to_canonical
from bert_jax.model.dropout import TokenKey
from bert_jax.objectives.replaced_tokens import ReplacedTokens, generator_config, gumbel_noise
from bert_jax.optim import make_optimizer
from bert_jax.parallel import make_mesh, to_global
from bert_jax.training.state import abstract_params, abstract_state, make_prng_key
from bert_jax.training.step import loss_and_gradients

OPTIONS = "--objective.name replaced_tokens --data.next_sentence none --objective.generator_size 0.5"
RECORDED = Path(__file__).parents[2] / "golden" / "fixtures" / "replaced_tokens.npz"


class GivenNoise(ReplacedTokens):
    """The objective with the noise of the batch."""

    def noise(self, batch, key, size):
        missing = size - CURVE_MODEL["vocab_size"]
        return jnp.pad(batch["noise"], ((0, 0), (0, 0), (0, missing)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharing", [pytest.param(name, marks=[pytest.mark.slow] if name == "none" else []) for name in SHARINGS]
)
def test_loss_curve_equals_torch(sharing):
    """50 whole training steps from given weights and draws (tests/golden/record_rtd.py)."""
    config = PretrainConfig(
        model=ModelConfig(hidden_dropout=0.0, attention_dropout=0.0, **CURVE_MODEL),
        data=DataConfig(next_sentence="none", seq_length=16, max_predictions=3),
        objective=ObjectiveConfig(name="replaced_tokens", generator_size=(0.5,), embedding_sharing=sharing),
    )
    with np.load(RECORDED) as arrays:
        recorded = {name: arrays[f"{sharing}/{name}"] for name in ("loss", "rtd_loss", "grad_norm")}
    assert_curve(
        GivenNoise(config, None), rtd_weights(sharing), rtd_batch, recorded,
        total="loss", names={"rtd_loss": 1.0}, falls_to=0.6,
    )  # fmt: skip


def run(config: PretrainConfig, *, accumulation: int = 1, devices: int = 1) -> tuple[float, dict[str, Any]]:
    """Loss and canonical gradients of a batch with dropout and draws."""
    mesh = make_mesh(config.mesh, jax.devices()[:devices]) if devices > 1 else None
    objective, batch = objective_of(config, mesh), random_batch(config, rows=8)
    params, key = random_params(objective.model), make_prng_key(config.execution, 1)
    if mesh is not None:
        like = abstract_state(config, objective.model, make_optimizer(config.optimizer), mesh).params
        params = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, like))
        batch = to_global(batch, mesh, 8)
    compute = jax.jit(lambda p, b: loss_and_gradients(objective, p, b, key, accumulation))
    loss, gradients, *_ = compute(params, batch)
    return float(loss), to_canonical(jax.device_get(gradients), config.model.vocab_size)


@pytest.mark.slow
def test_devices_and_accumulation_are_as_one():
    config = tiny_config(OPTIONS)
    loss, gradients = run(config)
    other, others = run(tiny_config(OPTIONS, "--mesh.data 2 --mesh.fsdp 2"), accumulation=2, devices=4)
    assert other == pytest.approx(loss, rel=1e-6)
    assert relative_difference(others, gradients) <= 1e-6


@pytest.mark.slow
def test_draws_depend_on_the_step_the_sequence_and_the_position_alone():
    keys, positions = np.array([[3, 9, 3], [9, 3, 3]]), np.array([[5, 5, 7], [5, 5, 5]])
    noise = np.asarray(gumbel_noise(TokenKey(jax.random.key(0), jnp.int32(keys), jnp.int32(positions)), 40))
    assert np.array_equal(noise[0, 0], noise[1, 1]) and np.array_equal(noise[0, 1], noise[1, 0])
    assert not np.any(noise[0, 0] == noise[0, 1]) and not np.any(noise[0, 0] == noise[0, 2])
    other = np.asarray(gumbel_noise(TokenKey(jax.random.key(1), jnp.int32(keys), jnp.int32(positions)), 40))
    assert not np.any(noise == other)


@pytest.mark.slow
def test_draws_have_the_probabilities_of_the_logits():
    """100,000 draws: each share is within 4.5 standard deviations."""
    logits = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.08, 0.02]))
    count = 100_000
    key = TokenKey(jax.random.key(4), jnp.arange(count)[None] // 100, jnp.arange(count)[None] % 100)
    drawn = np.bincount(np.asarray(jnp.argmax(logits + gumbel_noise(key, 5), -1))[0], minlength=5) / count
    share = np.exp(np.asarray(logits, np.float64))
    assert np.all(np.abs(drawn - share) < 4.5 * np.sqrt(share * (1 - share) / count))


def test_a_sample_equal_to_the_original_counts_as_original():
    config = tiny_config(OPTIONS, "--model.hidden_dropout 0 --model.attention_dropout 0")

    class Original(ReplacedTokens):
        def noise(self, batch, key, size):
            return 1e6 * jax.nn.one_hot(batch["mlm_labels"], size)

    objective, batch = Original(config, None), random_batch(config)
    sums = jax.jit(lambda params: sums_of(objective, params, batch))(random_params(objective.model))
    assert float(sums["rtd_replaced"][0]) == 0.0 and float(sums["rtd_loss"][1]) == (batch["sequence_ids"] > 0).sum()


def test_the_discriminator_sees_samples_at_all_masked_positions(monkeypatch):
    config = tiny_config(OPTIONS)
    objective, batch = objective_of(config), random_batch(config)
    monkeypatch.setattr(
        "bert_jax.objectives.replaced_tokens.detection_sums",
        lambda scores, is_replaced, is_token: {"replaced": is_replaced},
    )
    sums = jax.jit(lambda params: sums_of(objective, params, batch))(random_params(objective.model))
    is_replaced = np.asarray(sums["replaced"])
    is_masked = np.zeros_like(is_replaced)
    rows, slots = np.nonzero(batch["mlm_weights"])
    is_masked[rows, batch["mlm_positions"][rows, slots]] = True
    assert is_replaced.any() and not np.any(is_replaced & ~is_masked)
    assert is_replaced[is_masked].mean() > 0.9  # drawn from 211 pieces


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharing",
    [name if name == "disentangled" else pytest.param(name, marks=pytest.mark.slow) for name in SHARINGS],
)
def test_gradients_of_the_embeddings(sharing):
    """With shared tables both losses reach them; with disentangled ones, the discriminator moves its differences
    alone."""
    config = tiny_config(OPTIONS, f"--objective.embedding_sharing {sharing}")
    objective, batch = objective_of(config), random_batch(config)
    params = random_params(objective.model)

    def loss(params, name):
        total, weight = sums_of(objective, params, batch)[name]
        return total / weight

    table = "embeddings/word_embeddings/embedding"
    found = {}
    for name in ("mlm_loss", "rtd_loss"):
        flat = to_canonical(jax.jit(jax.grad(loss), static_argnums=1)(params, name), config.model.vocab_size)
        found[name] = {part for part, value in flat.items() if part.endswith(table) and np.any(value)}
    ours, theirs = f"discriminator/{table}", f"generator/{table}"
    if sharing == "shared":
        assert found == {"mlm_loss": {ours}, "rtd_loss": {ours}}
    else:
        assert found == {"mlm_loss": {theirs}, "rtd_loss": {ours}}


@pytest.mark.slow
def test_it_trains_resumes_and_both_networks_are_read(tmp_path, curves):
    config = tiny_config(OPTIONS, "--training.num_steps 8 --training.eval_interval 4 --training.eval_batches 2")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, family="electra"))
    lines = whole_and_resumed(config, tmp_path, 9)
    last = [line for line in lines if line.get("split") == "eval"][-1]
    assert last["loss"] == pytest.approx(last["mlm_loss"] + 50 * last["rtd_loss"])
    assert "of the tokens are replaced" in (tmp_path / "cut" / "train.log").read_text()
    assert "discriminator: loss per token" in (tmp_path / "cut" / "report.html").read_text()
    small = config.model.hidden_size // 2
    for name, head, width in (("discriminator", "rtd", 2 * small), ("generator", "mlm", small)):
        options = ReadOptions(network=name)
        bundle = read_weights(tmp_path / "cut", options)
        assert bundle.spec.heads.present() == (head,) and bundle.spec.model.hidden_size == width
        export_model(tmp_path / "cut", tmp_path / name, "hf", options=options)
        assert read_weights(tmp_path / name).spec.heads.present() == (head,)
    assert read_weights(tmp_path / "cut").spec.heads.rtd
    with pytest.raises(
        ValueError, match="--network critic: not a network of the run; use discriminator or generator"
    ):
        read_weights(tmp_path / "cut", ReadOptions(network="critic"))
    with pytest.raises(ValueError, match="omit --network"):
        read_weights(tmp_path / "generator", ReadOptions(network="generator"))


def test_what_is_read_with_disentangled_embeddings_is_the_sum(tmp_path):
    config = tiny_config(OPTIONS, "--training.num_steps 2 --objective.embedding_sharing disentangled")
    train_synthetic(config, tmp_path / "w")
    bundle = read_weights(tmp_path / "w")
    objective, batch = objective_of(config), random_batch(config)
    generator = read_weights(tmp_path / "w", ReadOptions(network="generator"))
    table = "embeddings/word_embeddings/embedding"
    assert np.any(bundle.params[table] != generator.params[table])
    params = {f"generator/{name}": value for name, value in generator.params.items()}
    for name, value in bundle.params.items():
        is_table = name in (table, "embeddings/position_embeddings/embedding")
        params[f"discriminator/{name}"] = value - generator.params[name] if is_table else value
    tree = from_canonical(params, nn.unbox(abstract_params(objective.model)), config.model.vocab_size)
    model = objective.model.part("discriminator")
    apply = jax.jit(model.apply)
    of_run = apply({"params": objective.model.params_of(tree, "discriminator")}, batch).rtd_logits
    own = from_canonical(bundle.params, nn.unbox(abstract_params(model)), config.model.vocab_size)
    np.testing.assert_allclose(of_run, apply({"params": own}, batch).rtd_logits, rtol=0, atol=1e-5)


def test_it_starts_from_the_discriminator_of_a_run():
    config = tiny_config(OPTIONS)
    given = {"embeddings/layer_norm/scale": np.ones(4)}
    assert list(ReplacedTokens.placed(config, given)) == ["discriminator/embeddings/layer_norm/scale"]
    with pytest.raises(ValueError, match=r"--init_from: not allowed with .* disentangled"):
        ReplacedTokens.placed(tiny_config(OPTIONS, "--objective.embedding_sharing disentangled"), given)


def test_the_generator_has_the_given_shares_of_width_and_layers():
    """That of DeBERTa-v3 has the full width and half the layers, and no projection of the embeddings."""
    config = tiny_config(OPTIONS, "--model.num_layers 4 --objective.generator_size 1 0.5")
    generator = generator_config(config)
    assert generator.num_layers == 2
    assert dataclasses.replace(generator, num_layers=4) == config.model


def test_the_generator_of_a_pruned_model_has_whole_layers():
    config = tiny_config(OPTIONS, "--model.num_layers 2 --model.layer_heads 1 2 --model.layer_units 9 8")
    generator = generator_config(config)
    assert (generator.layer_heads, generator.layer_units) == ((), ())


def test_flops_are_those_of_both_networks():
    half, whole = (objective_of(tiny_config(OPTIONS, words)) for words in ("", "--objective.generator_size 1"))
    assert 0 < half.flops_per_sequence() < whole.flops_per_sequence() < 3 * half.flops_per_sequence()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--objective.name replaced_tokens", "data.next_sentence: 'nsp' .* replaced_tokens; set none"),
        (f"{OPTIONS} --model.attention causal", "model.attention: 'causal' .* set bidirectional"),
        (f"{OPTIONS} --execution.prng rbg", "execution.prng: 'rbg' .* set hash or threefry"),
        (
            f"{OPTIONS} --model.num_attention_heads 8 --objective.generator_size 0.8",
            "objective.generator_size: 0.8",
        ),
        (
            f"{OPTIONS} --objective.embedding_sharing none --model.word_rank 16",
            r"generator_size: 0.5 .* model.word_rank 16, because .* have the width 16; use a larger",
        ),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        objective_of(tiny_config(options))
