"""Causal attention: what a query sees, and who refuses it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import random_batch, random_params, tiny_config

from bert_jax.model import BertForPretraining
from bert_jax.model.kernels.ranges import visible_keys


@pytest.mark.parametrize(
    "execution",
    [
        "",
        *(
            pytest.param(option, marks=pytest.mark.slow)
            for option in ("--execution.scan_layers true", "--execution.remat attention")
        ),
    ],
)
def test_a_later_token_changes_nothing_before_it(execution):
    config = tiny_config("--model.attention causal", execution)
    model = BertForPretraining(config.model, config.execution, config.has_nsp)
    params = random_params(model)
    batch = random_batch(config, rows=2)
    batch["sequence_ids"][:] = 1
    run = jax.jit(lambda ids: model.apply({"params": params}, batch | {"input_ids": ids}, None).sequence_output)
    before = np.asarray(run(batch["input_ids"]))
    changed = batch["input_ids"].copy()
    changed[:, 9] = (changed[:, 9] + 7) % config.model.vocab_size
    after = np.asarray(run(changed))
    assert np.array_equal(before[:, :9], after[:, :9])
    assert (np.abs(before[:, 9:] - after[:, 9:]).max(axis=-1) > 0).all()


def test_packed_sequences_see_themselves_up_to_the_query():
    ids = jnp.array([[1, 1, 2, 2, 2, 0]])
    visible = np.asarray(visible_keys(ids, causal=True))[0, 0]
    assert [np.flatnonzero(row).tolist() for row in visible] == [[0], [0, 1], [2], [2, 3], [2, 3, 4], [0, 1]]
