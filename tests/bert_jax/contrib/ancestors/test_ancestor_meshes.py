"""The objectives of the systems before BERT on a mesh of 8 devices: losses and parameters of one device."""

import jax
import numpy as np
import pytest
from support import objective_of, random_batch, tiny_config
from test_encoders import SYSTEMS
from test_word2vec import OPTIONS

from bert_jax.model import to_canonical
from bert_jax.parallel import make_mesh, to_global
from bert_jax.training.programs import train_programs
from bert_jax.training.state import initial_state

CASES = SYSTEMS | {name: f"{OPTIONS} --objective.name {name}" for name in ("skip_gram", "cbow")}


def three_steps(options: str, devices: int):
    mesh = "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2" if devices == 8 else ""
    config = tiny_config(options, mesh, "--training.global_batch_size 8 --optimizer.learning_rate 0.01")
    own = make_mesh(config.mesh, jax.devices()[:devices])
    objective = objective_of(config, own)
    if hasattr(objective, "set_counts"):
        objective.set_counts(np.arange(config.model.vocab_size) % 17 + 1)
    programs = train_programs(objective)
    state, losses = initial_state(programs.model, programs.optimizer, programs.abstract, 0), []
    for seed in range(3):
        batch = {name: x for name, x in random_batch(config, seed).items() if name in objective.features}
        features = to_global(batch, own, 8)
        state, metrics = programs.step_for(features)(state, features)
        losses.append(float(metrics.unpack()["loss"]))
    return np.array(losses), {name: np.asarray(x) for name, x in to_canonical(state.params, 211).items()}


# cbow has the tables of skip_gram; the state of an LSTM on a mesh is in test_carry.
SLOW = ("nnlm", "lstm", "elmo", "cbow")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_a_mesh_computes_what_one_device_computes(name: str):
    (losses, params), (expected, one) = three_steps(CASES[name], 8), three_steps(CASES[name], 1)
    assert np.abs(losses - expected).max() < 1e-5 * np.abs(expected).max()
    for key, values in one.items():
        # Adam divides by the root of the second moment, which magnifies the rounding of small gradients.
        assert np.abs(params[key] - values).max() < 2e-4, key
