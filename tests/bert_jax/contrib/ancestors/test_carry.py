"""The state of LSTM language models, carried from each row to the same row of the next batch."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from support import (
    objective_of,
    random_batch,
    random_params,
    tiny_config,
    train_synthetic,
    whole_and_resumed,
)
from test_encoders import ELMO, LSTM, NNLM

from bert_jax.model import from_canonical, to_canonical
from bert_jax.objectives.objective import Aux, apply_carried
from bert_jax.parallel import make_mesh, to_global
from bert_jax.training.checkpoint.digest import json_digest, write_checksums
from bert_jax.training.checkpoint.folder import checkpoint_folder, saved_steps
from bert_jax.training.checkpoint.restore import META_FILE, restore_newest
from bert_jax.training.programs import train_programs
from bert_jax.training.state import initial_state
from bert_jax.training.step import loss_and_gradients

CARRY = " --data.row_order carried"
SYSTEMS = {"lstm": LSTM + CARRY, "elmo": ELMO + CARRY}


def programs_of(*options: str, devices: int = 1):
    config = tiny_config(*options)
    mesh = make_mesh(config.mesh, jax.devices()[:devices])
    return train_programs(objective_of(config, mesh))


def full_batch(config, seed: int, used: int = 0):
    """Rows of random tokens without padding, except that row 0 has ``used`` tokens if this is not 0."""
    return full_rows(config, seed, used=used)


def full_rows(config, seed: int = 0, rows: int | None = None, used: int = 9):
    batch = random_batch(config, seed, rows)
    ids = np.random.default_rng(seed).integers(5, 211, batch["input_ids"].shape)
    batch["input_ids"][:], batch["mlm_weights"][:], batch["sequence_ids"][:] = ids, 0, 1
    batch["sequence_ids"][0, used or None :] = 0 if used else 1
    return batch


@pytest.fixture
def long_texts(monkeypatch):
    """Runs on synthetic batches see full rows."""
    monkeypatch.setattr(support, "random_batch", full_rows)


def zero_state(objective):
    mesh = make_mesh(objective.config.mesh, jax.devices()[:1])
    carry = train_programs(objective_of(objective.config, mesh)).abstract.carry
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), carry)


def joined(one, two):
    """Rows of twice the length: those of ``one``, continued by those of ``two``."""
    names = ("input_ids", "token_type_ids", "sequence_ids", "position_ids")
    return one | {name: np.concatenate([one[name], two[name]], axis=1) for name in names}


def step_of(objective):
    """Compiled: loss, gradients, sums and state of a batch."""
    return jax.jit(
        lambda params, batch, state: loss_and_gradients(objective, params, batch, None, 1, aux=Aux({}, state))
    )


def carried(objective, params, batches):
    """Outputs of the model for ``batches``, the state carried between them."""
    state, outputs = zero_state(objective), []
    apply = jax.jit(lambda batch, state: apply_carried(objective.model, params, batch, None, state))
    for batch in batches:
        output, state = apply(batch, state)
        outputs.append(jax.device_get(output))
    return outputs


@pytest.mark.slow
def test_two_batches_are_one_of_twice_the_length():
    """Except in row 0, whose padding ends its text."""
    objective = objective_of(tiny_config(SYSTEMS["lstm"]))
    params = jax.tree.map(lambda x: 3 * x, random_params(objective.model, 1))
    one, two = full_batch(objective.config, 1, used=11), full_batch(objective.config, 2)
    apply = jax.jit(objective.model.apply)
    whole, alone = (np.asarray(apply({"params": params}, batch))[..., :211] for batch in (joined(one, two), two))
    first, second = (logits[..., :211] for logits in carried(objective, params, (one, two)))
    assert np.abs(first[1:] - whole[1:, :16]).max() < 1e-5 and np.abs(first[0] - whole[0, :16])[:11].max() < 1e-5
    assert np.abs(second[1:] - whole[1:, 16:]).max() < 1e-5
    assert np.array_equal(second[0], alone[0]) and np.abs(second[1:] - alone[1:]).max() > 0.1


def recurrence(layer, x, state):
    """States of one LSTM layer after each column of ``x`` [B, S, I], in numpy and float64."""
    kernel, recurrent, bias = (
        np.asarray(layer[n], np.float64) for n in ("input_kernel", "recurrent_kernel", "bias")
    )
    hidden, cell = (np.asarray(part, np.float64) for part in state)
    for column in range(x.shape[1]):
        gates = np.asarray(x[:, column], np.float64) @ kernel + bias + hidden @ recurrent
        enter, forget, new, out = np.split(gates, 4, axis=-1)
        cell = cell / (1 + np.exp(-forget - 1)) + np.tanh(new) / (1 + np.exp(-enter))
        hidden = np.tanh(cell) / (1 + np.exp(-out))
    return hidden, cell


def test_the_carried_state_is_that_of_the_recurrence():
    objective = objective_of(tiny_config(SYSTEMS["lstm"], "--model.embedding_norm no"))
    params, state = random_params(objective.model, 1), zero_state(objective)
    batches = [full_batch(objective.config, seed) for seed in (1, 2)]
    layer, expected = params["encoder"]["layer_0"]["forward"], (np.zeros((8, 24)), np.zeros((8, 24)))
    step = step_of(objective)
    for batch in batches:
        *_, state = step(params, batch, state)
        table = params["embeddings"]["word_embeddings"]["embedding"]
        expected = recurrence(layer, np.asarray(table)[batch["input_ids"]], expected)
        found = state["encoder"]["layer_0"]["forward"]["state"]
        for value, part in zip(found, expected, strict=False):
            assert value.dtype == np.float32 and np.abs(value - part).max() < 1e-5
        assert np.array_equal(found[2], np.ones(8))


@pytest.mark.slow
def test_gradients_stop_between_batches():
    """The gradient of the second batch is that of its half of the long rows, with a constant state before it."""
    objective = objective_of(tiny_config(SYSTEMS["lstm"]))
    params, zero = random_params(objective.model, 1), zero_state(objective)
    one, two = (full_batch(objective.config, seed) for seed in (1, 2))
    step = step_of(objective)
    *_, state = step(params, one, zero)
    _, gradients, _, _ = step(params, two, state)

    def half(params, stops):
        """Loss of the second half of the long rows."""
        before = params if not stops else jax.lax.stop_gradient(params)
        *_, state = objective.sums(before, Aux({}, zero), one, None, axis=None)
        total, weight = objective.sums(params, Aux({}, state), two, None, axis=None)[0]["lm_loss"]
        return total / weight

    slope = jax.jit(jax.grad(half), static_argnums=1)
    stopped, through = (slope(params, stops) for stops in (True, False))
    distances = [
        max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (gradients, other)), strict=True))
        for other in (stopped, through)
    ]
    assert distances[0] < 1e-6 < 1e-4 < distances[1]


@pytest.mark.slow
def test_both_directions_of_elmo_carry():
    """The backward direction has read the previous batch as if it followed, as in bilm-tf."""
    objective = objective_of(tiny_config(SYSTEMS["elmo"]))
    params = jax.tree.map(lambda x: 3 * x, random_params(objective.model, 1))
    one, two = (full_batch(objective.config, seed) for seed in (1, 2))
    _, (forward, backward) = carried(objective, params, (one, two))
    apply = jax.jit(objective.model.apply)
    after, _ = jax.device_get(apply({"params": params}, joined(one, two)))
    _, before = jax.device_get(apply({"params": params}, joined(two, one)))
    assert np.abs(forward[..., :211] - after[:, 16:, :211]).max() < 1e-5
    assert np.abs(backward[..., :211] - before[:, :15, :211]).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm", pytest.param("elmo", marks=pytest.mark.slow)])
def test_a_run_resumes_bit_for_bit(name, tmp_path, long_texts):
    config = tiny_config(SYSTEMS[name], "--model.hidden_dropout 0.2")
    whole_and_resumed(config, tmp_path, 7)
    forget_shapes(tmp_path / "cut")
    ends = [end_of(tmp_path / folder, config) for folder in ("whole", "cut")]
    for key, value in ends[0].items():
        assert np.array_equal(value, ends[1][key]), key
    assert all(np.any(value) for key, value in ends[0].items() if key.startswith("carry/"))


def forget_shapes(workdir):
    """Make the last checkpoint one of an earlier version, which did not record what it carries."""
    folder = checkpoint_folder(workdir) / str(saved_steps(workdir)[-1])
    unit = json.loads((folder / "meta" / META_FILE).read_text())
    assert unit.pop("carried")
    unit["json_digest"] = json_digest({name: value for name, value in unit.items() if name != "json_digest"})
    (folder / "meta" / META_FILE).write_text(json.dumps(unit))
    write_checksums(folder)


def end_of(workdir, config):
    """The arrays of the last checkpoint by name."""
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    programs = train_programs(objective_of(config, mesh))
    restored = restore_newest(
        workdir, config, mesh, programs.model, read_only=True, may_change=set(), report=print,
        carry=programs.abstract.carry,
    )  # fmt: skip
    return {name: np.asarray(x) for name, x in to_canonical(restored.state, 211).items()}


@pytest.mark.slow
def test_a_checkpoint_without_a_state_continues_from_zero(tmp_path):
    plain = tiny_config(LSTM)
    train_synthetic(plain, tmp_path / "run")
    names = end_of(tmp_path / "run", plain).keys()
    assert not any(name.startswith("carry") for name in names)
    carrying = tiny_config(SYSTEMS["lstm"])
    state = end_of(tmp_path / "run", carrying)
    assert state.keys() - names and not any(state[name].any() for name in state.keys() - names)
    longer = dataclasses.replace(carrying, training=dataclasses.replace(carrying.training, num_steps=24))
    train_synthetic(longer, tmp_path / "run")
    assert any(x.any() for name, x in end_of(tmp_path / "run", longer).items() if name.startswith("carry"))
    assert end_of(tmp_path / "run", plain).keys() == names


@pytest.mark.slow
def test_a_new_phase_starts_at_zero(tmp_path, long_texts):
    undropped = SYSTEMS["lstm"] + " --model.hidden_dropout 0 --model.attention_dropout 0"
    config = tiny_config(undropped, "--training.num_steps 5")
    train_synthetic(config, tmp_path / "one")
    end = end_of(tmp_path / "one", config)
    longer = tiny_config(undropped, "--training.num_steps 6")
    train_synthetic(longer, tmp_path / "two", continue_from=tmp_path / "one")
    objective, batch = objective_of(longer), full_rows(longer, seed=1000)
    params = from_canonical(
        {name.removeprefix("params/"): x for name, x in end.items() if name.startswith("params/")},
        random_params(objective.model, 0),
        211,
    )
    state = zero_state(objective)
    *_, state = step_of(objective)(params, batch, state)
    found = end_of(tmp_path / "two", longer)
    for name, value in to_canonical({"carry": state}, 211).items():
        assert np.abs(found[name] - value).max() < 1e-6
        assert end[name].any(), "the earlier phase ends with a state"


def three_steps(options: str, devices: int):
    mesh = "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2" if devices == 8 else ""
    programs = programs_of(options, mesh, "--optimizer.learning_rate 0.01", devices=devices)
    state, losses = initial_state(programs.model, programs.optimizer, programs.abstract, 0), []
    for seed in range(3):
        batch = {
            name: np.asarray(x)
            for name, x in full_batch(programs.objective.config, seed, used=9).items()
            if name in programs.objective.features
        }
        features = to_global(batch, programs.mesh, 8)
        state, metrics = programs.step_for(features)(state, features)
        losses.append(float(metrics.unpack()["loss"]))
    return np.array(losses), jax.device_get(state.carry)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm", pytest.param("elmo", marks=pytest.mark.slow)])
def test_a_mesh_carries_what_one_device_carries(name):
    (losses, carry), (expected, one) = three_steps(SYSTEMS[name], 8), three_steps(SYSTEMS[name], 1)
    assert np.abs(losses - expected).max() < 1e-5 * np.abs(expected).max()
    for found, wanted in zip(*map(jax.tree.leaves, (carry, one)), strict=True):
        assert np.abs(found - wanted).max() < 1e-4


@pytest.mark.slow
def test_a_skipped_step_keeps_the_state():
    programs = programs_of(SYSTEMS["lstm"])
    state = initial_state(programs.model, programs.optimizer, programs.abstract, 0)
    batch = {n: np.asarray(x) for n, x in full_batch(programs.objective.config, 0).items()}
    batch = {name: x for name, x in batch.items() if name in programs.objective.features}
    features = to_global(batch, programs.mesh, 8)
    step = programs.step_for(features)
    state, _ = step(state, features)
    before = jax.device_get(state.carry)
    broken = state.replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
    after, metrics = step(broken, features)
    assert metrics.unpack()["finite"] == 0
    for old, new in zip(*map(jax.tree.leaves, (before, jax.device_get(after.carry))), strict=True):
        assert np.array_equal(old, new)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SYSTEMS["lstm"] + " --training.accumulation_steps 2", r"training.accumulation_steps: 2 .*allowed: 1 with"),
        (SYSTEMS["lstm"] + " --training.batch_ramp 2 4", r"training.batch_ramp: \(2, 4\) .*allowed: none with"),
        (SYSTEMS["lstm"] + " --data.lanes 4", r"data.lanes: 4 .*allowed: 0 or the batch size, 8, with data.row_o"),
        (SYSTEMS["lstm"] + " --data.packing best_fit", "data.packing: 'best_fit' .*allowed: none with data.row_or"),
        (SYSTEMS["lstm"] + " --data.next_sentence nsp", "data.next_sentence: 'nsp' .*allowed: none with data.row"),
        (SYSTEMS["lstm"] + " --data.mixture a=1 b=1", r"data.mixture: .*allowed: none with data.row_order carried"),
        (NNLM + CARRY, "model.encoder: 'nnlm' .*allowed: lstm or bidirectional_lstm with data.row_order carried"),
        (f"{CARRY} --data.next_sentence none", "model.encoder: .transformer. .*allowed: lstm or bidir"),
        (LSTM.replace("causal_lm", "masked_lm") + CARRY, "objective.name: 'masked_lm' .*allowed: one that"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_a_carried_state(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(options)
