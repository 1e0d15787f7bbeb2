"""The state of every optimizer: padding rows begin at 0, and a resumed run has that of a whole one."""

import typing

import jax
import numpy as np
import pytest
from support import objective_of, tiny_config, whole_and_resumed

from bert_jax.config import MeshConfig, OptimizerConfig
from bert_jax.model.canonical import VOCABULARY_ROWS
from bert_jax.optim import make_optimizer
from bert_jax.parallel import make_mesh
from bert_jax.training.checkpoint.digest import tree_digest
from bert_jax.training.checkpoint.restore import restore_newest
from bert_jax.training.state import abstract_state, flat, initial_state

NAMES = typing.get_args(typing.get_type_hints(OptimizerConfig)["name"])
# The others' states begin at 0.
EVERY = [name if name == "adagrad" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def one_device():
    return make_mesh(MeshConfig(), jax.devices()[:1])


def start(*words: str):
    """The state at step 0, and its digest."""
    config = tiny_config("--model.hidden_size 16", *words)
    model, optimizer = objective_of(config).model, make_optimizer(config.optimizer)
    state = initial_state(model, optimizer, abstract_state(config, model, optimizer, one_device()), 3)
    return state, tree_digest(state, config.model.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_padding_rows_begin_at_0(name):
    state, digest = start("--optimizer.name", name)
    padded = {key: leaf for key, leaf in flat(state).items() if key.endswith(VOCABULARY_ROWS)}
    assert padded and all(len(leaf) == 256 and not np.asarray(leaf[211:]).any() for leaf in padded.values())
    state, unpadded = start("--optimizer.name", name, "--execution.vocab_multiple 1")
    assert {len(leaf) for key, leaf in flat(state).items() if key.endswith(VOCABULARY_ROWS)} == {211}
    assert digest == unpadded
    if name == "adagrad":
        sums = [np.asarray(leaf) for key, leaf in flat(state).items() if "sum_of_squares" in key]
        assert sums and all((values == 1).all() for values in sums)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_a_resumed_run_has_the_state_of_an_undisturbed_one(name, tmp_path):
    words = (
        f"--optimizer.name {name} --optimizer.ema_decay 0.9 --training.num_steps 6 --training.checkpoint_interval 3"
    )
    config = tiny_config(words)
    whole_and_resumed(config, tmp_path, 5)
    first, second = (
        restore_newest(
            tmp_path / run, config, one_device(), objective_of(config).model, read_only=True, may_change=set(),
            report=print,
        )
        for run in ("whole", "cut")
    )  # fmt: skip
    assert first.step == second.step == 6
    assert first.meta["digest"] == second.meta["digest"] == tree_digest(first.state, config.model.vocab_size)
    jax.tree.map(np.testing.assert_array_equal, first.state, second.state)
