"""Every mesh computes what one device does: loss, gradients, update; with and without optimizer state cut over
replicas, with and without accumulation over microbatches of unequal mask counts.

``BERT_JAX_MESHES=full`` runs every combination on a model of 4 layers of width 128 with both vocabularies
(``-s`` prints the figures of each).
"""

import functools
import math
import os

import jax
import pytest
from jax.sharding import PartitionSpec as P
from support import objective_of, random_batch, relative_difference, tiny_config

from bert_jax.config import MeshConfig, PretrainConfig, load_config
from bert_jax.model import to_canonical
from bert_jax.parallel import make_mesh, to_global
from bert_jax.parallel.axes import over_replicas
from bert_jax.training.memory import device_bytes
from bert_jax.training.programs import train_programs
from bert_jax.training.state import initial_state, parameter_count

FULL = os.environ.get("BERT_JAX_MESHES") == "full"
SIZE = (
    "--model.hidden_size 128 --model.num_layers 4 --model.num_attention_heads 4 --model.intermediate_size 512 "
    "--data.seq_length 64 --data.max_predictions 10 --execution.scan_layers true"
    if FULL
    # Adam divides a first gradient by itself: with a larger epsilon small ones' rounding is not blown up.
    else "--model.num_layers 2 --execution.scan_layers true --execution.vocab_multiple 64 --optimizer.epsilon 1e-3"
)
VOCABULARIES = (8192, 30522) if FULL else (211,)
# Gradients are read from the first moment, so nothing may be clipped.
COMMON = (
    "--optimizer.clip_norm 0 --optimizer.warmup_steps 0 --optimizer.ema_decay 0.5 --training.num_steps 100 "
    "--training.global_batch_size 32 --execution.prng threefry"
)
ONE = (1, 1, 1)


@functools.cache
def two_steps(sizes, vocab_size, accumulation, dropout, shard_optimizer=True, optimizer="adamw"):
    """Losses of two steps, and gradients, parameters and average (canonical) after the first."""
    config = tiny_config(
        SIZE, COMMON,
        f"--model.vocab_size {vocab_size} --training.accumulation_steps {accumulation} "
        f"--optimizer.name {optimizer} "
        f"--model.hidden_dropout {dropout} --model.attention_dropout {dropout} "
        f"--mesh.shard_optimizer {str(shard_optimizer).lower()}",
    )  # fmt: skip
    data, fsdp, tensor = sizes
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: math.prod(sizes)])
    programs = train_programs(objective_of(config, mesh))
    state = initial_state(programs.model, programs.optimizer, programs.abstract, 3)
    batches = [to_global(random_batch(config, seed), mesh, 32) for seed in (1, 2)]
    run = programs.step_for(batches[0])
    state, first = run(state, batches[0])
    trees = {"gradients": state.opt_state[0].mu, "params": state.params, "ema": state.ema}
    values = {name: to_canonical(jax.device_get(tree), vocab_size) for name, tree in trees.items()}
    _, second = run(state, batches[1])
    losses = [metrics.unpack()["loss"] for metrics in (first, second)]
    return losses, values


def check(case, reference):
    (losses, values), (expected_losses, expected) = case, reference
    off = [abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True)]
    gradients = relative_difference(values["gradients"], expected["gradients"])
    params = relative_difference(values["params"], expected["params"])
    print(f"loss {max(off):.1e}, gradients {gradients:.1e}, parameters {params:.1e}")
    assert max(off) <= 1e-6
    assert gradients <= 2e-6
    if not FULL:
        assert params <= 2e-6
        assert relative_difference(values["ema"], expected["ema"]) <= 2e-6


MESHES = [(8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 8, 1), (1, 1, 4)]
if FULL:
    # Without replicas there is nothing to share the optimizer state with.
    CASES = [(m, z, a) for m in MESHES for z in (True, False) for a in (1, 4) if z or m[0] > 1]
else:
    # Accumulation below goes over every axis of a mesh; dropout of replicas: test_shard_keys.py.
    CASES = [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (((8, 1, 1), True, 1), ((4, 2, 1), False, 1), ((1, 8, 1), True, 1))
    ]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize(("sizes", "shard_optimizer", "accumulation"), CASES)
def test_mesh_equals_one_device(sizes, shard_optimizer, accumulation, vocab_size):
    check(
        two_steps(sizes, vocab_size, accumulation, 0.1, shard_optimizer),
        two_steps(ONE, vocab_size, accumulation, 0.1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"] if FULL else ["lamb"])
@pytest.mark.parametrize("sizes", MESHES if FULL else [(2, 2, 2), pytest.param((1, 1, 4), marks=pytest.mark.slow)])
def test_accumulation_on_a_mesh_equals_one_pass_on_one_device(sizes, optimizer, vocab_size):
    """LAMB's trust ratios are of whole parameters, however these are cut."""
    check(
        two_steps(sizes, vocab_size, 4, 0.0, optimizer=optimizer),
        two_steps(ONE, vocab_size, 1, 0.0, optimizer=optimizer),
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("mesh", "shares"),
    [
        ("--mesh.data 1 --mesh.fsdp 8", (8, 8)),
        ("--mesh.data 8", (8, 8)),
        ("--mesh.data 8 --mesh.shard_optimizer false", (1, 1)),
        ("--mesh.data 4 --mesh.fsdp 2", (8, 8)),
        ("--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2 --optimizer.ema_decay 0.9", (8, 8)),
    ],
)
def test_bytes_of_a_large_models_state_on_one_device(mesh, shares):
    """Parameters, and two moments (and the average), float32, each cut into so many parts."""
    large = (
        "--model.hidden_size 1024 --model.num_layers 24 --model.num_attention_heads 16 "
        "--model.intermediate_size 4096 --execution.scan_layers true"
    )
    config = load_config(PretrainConfig, f"{large} {mesh}".split())
    programs = train_programs(objective_of(config, make_mesh(config.mesh)))
    count = parameter_count(programs.abstract.params, config.model.vocab_size)
    copies = 3 if config.optimizer.ema_decay else 2
    expected = 4 * count / shares[0] + 4 * copies * count / shares[1]
    assert expected <= device_bytes(programs.abstract) <= 1.02 * expected


def test_what_does_not_divide_falls_to_the_next_dimension():
    sizes = {"data": 8, "fsdp": 2, "tensor": 2}
    assert over_replicas(P("tensor", "fsdp"), ("vocab", "embed"), (64, 32), sizes) == P(("tensor", "data"), "fsdp")
    assert over_replicas(P("tensor", "fsdp"), ("vocab", "embed"), (60, 32), sizes) == P("tensor", ("fsdp", "data"))
    assert over_replicas(P(), ("layers", "norm"), (8, 16), sizes) == P(None, "data")
    assert over_replicas(P(), ("layers", "norm"), (8, 15), sizes) == P("data", None)
    assert over_replicas(P(), ("norm",), (15,), sizes) == P(None)


def test_runs_that_differ_in_their_seed_share_one_compiled_step():
    """So the program cache serves all seeds; the seed itself still decides the dropout."""
    texts, losses = [], []
    for seed in (1, 2):
        config = tiny_config(f"--training.seed {seed} --model.hidden_dropout 0.5 --optimizer.warmup_steps 0")
        programs = train_programs(objective_of(config, make_mesh(config.mesh, jax.devices()[:1])))
        batch = to_global(random_batch(config, 0), programs.mesh, config.training.global_batch_size)
        texts.append(programs.lower(batch).as_text())
        state = initial_state(programs.model, programs.optimizer, programs.abstract, 0)
        losses.append(programs.step_for(batch)(state, batch)[1].unpack()["loss"])
    assert texts[0] == texts[1] and losses[0] != losses[1]
