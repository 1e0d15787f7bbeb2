"""Losses beside the task's own, frozen and late layers: the parameters that a step moves, and its loss."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from finetune_cases import (
    SPLITS,
    TWO_LAYERS,
    configured,
    lines,
    run,
    saved_model,
)
from support import random_params

import bert_jax
from bert_jax.config import HeadsConfig, load_config
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.finetuning import finetune as module
from bert_jax.finetuning.task_objective import TaskObjective
from bert_jax.interop.readers import read_weights
from bert_jax.model import BertModel, to_canonical
from bert_jax.parallel import batch_sharding, make_mesh
from bert_jax.training.state import initial_state, key_words, make_prng_key
from bert_jax.training.step import loss_and_gradients


@pytest.mark.slow
def test_the_heads_of_pretraining_go_on_learning(tmp_path):
    """The task's classes are not the source's, but masked words are masked words."""
    source = saved_model(tmp_path / "model", HeadsConfig(pooler=True, mlm=True, nsp=True))
    config, start = configured(source, tmp_path / "w", "--loss.mlm_weight 0.5 --loss.nsp_weight 0.5")
    job = module.FinetuneJob(config, SPLITS, (), start)
    first = job.start()
    assert {"mlm_head/transform/kernel", "mlm_head/output_bias", "nsp_head/kernel"} < set(first.params)
    assert "randomly initialized: sequence_head" in first.messages


LOWER = "--loss.layers 1 --loss.layer_weight 0.2"


@pytest.mark.slow
def test_losses_beside_the_task_are_learned_and_leave_no_trace(two_layers, tmp_path):
    run(two_layers, tmp_path / "w", f"{LOWER} --loss.mlm_weight 0.5 --training.num_epochs 3")
    found = [line for line in lines(tmp_path / "w") if "mlm_loss" in line and line["mlm_loss"] is not None]
    assert found[-1]["mlm_loss"] < found[0]["mlm_loss"] and "layer_1_loss" in found[0]
    assert not any(name.startswith("mlm_head") for name in read_weights(tmp_path / "w" / "best").params)
    predictions = [json.loads(line) for line in (tmp_path / "w" / "predictions_dev.jsonl").open()]
    again = bert_jax.load(tmp_path / "w" / "best").predict([record.text for record in SPLITS["dev"]])
    assert all(
        abs(one["probabilities"]["1"] - other["probabilities"]["1"]) < 1e-5
        for one, other in zip(again, predictions, strict=True)
    )


def stepped(source, folder, options):
    """Names of the parameters that a training step moves, and its FLOPs as a share of those before compilation."""
    config, start = configured(source, folder, f"--optimizer.warmup_fraction 0 {options}")
    job = module.FinetuneJob(config, SPLITS, (), start)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    programs = job.programs(mesh)
    batch = {name: jax.device_put(x, batch_sharding(mesh)) for name, x in job.batches(mesh).pack(0)[0].items()}
    lowered = programs.lower(batch)
    program = lowered.compile()
    state = initial_state(programs.model, programs.optimizer, programs.abstract, 0)
    before = jax.tree.map(np.array, state.params)  # its buffers are the step's to reuse
    words = key_words(make_prng_key(config.execution, 0))
    after = program(state, batch, fixed={}, seed_words=words)[0].params
    before, after = (to_canonical(tree, config.model.vocab_size) for tree in (before, after))
    moved = {name for name, values in before.items() if not np.array_equal(values, after[name])}
    return moved, program.cost_analysis()["flops"] / lowered.cost_analysis()["flops"]


@pytest.mark.slow
def test_frozen_parts_stay_as_they_are_and_cost_no_backward_pass(two_layers, tmp_path):
    head = {f"{part}/{name}" for part in ("pooler", "sequence_head") for name in ("bias", "kernel")}
    moved, share = stepped(two_layers, tmp_path, "--optimizer.frozen embeddings encoder")
    # A forward and a backward pass are three forward passes; the first of them is left.
    assert moved == head and share < 0.5
    # Neither weight decay nor other losses move it.
    moved, share = stepped(two_layers, tmp_path, f"--features.frozen_encoder true --loss.mlm_weight 0.5 {LOWER}")
    assert {name for name in moved if not name.startswith("mlm_head/")} == head and share < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "",
        pytest.param(
            "--execution.scan_layers true --mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2", marks=pytest.mark.slow
        ),
    ],
)
def test_a_layer_that_joins_late_begins_with_steps_of_the_usual_size(two_layers, tmp_path, options):
    """Without what else scales it, Adam's first step is 1; the top layer's comes after an epoch."""
    options += " --optimizer.unfreeze_every 1 --optimizer.weight_decay 0 --optimizer.clip_norm 0"
    config, start = configured(two_layers, tmp_path, options)
    job = module.FinetuneJob(config, SPLITS, (), start)
    mesh = make_mesh(config.mesh, jax.devices()[: 8 if "mesh" in options else 1])
    programs = job.programs(mesh)
    state = initial_state(programs.model, programs.optimizer, programs.abstract, 0)
    (adam,) = state.opt_state
    moments = (adam._replace(count=adam.count + job.resolved.steps_per_epoch),)
    grads = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), state.params)
    direction = to_canonical(jax.jit(programs.optimizer.update)(grads, moments, None)[0], config.model.vocab_size)
    top = {name for name in direction if name.startswith("encoder/layer_1/")}
    assert top and all(np.allclose(direction[name], 1, rtol=1e-4) for name in top)
    below = {name for name in direction if name.startswith(("encoder/layer_0/", "embeddings/"))}
    assert below and not any(np.any(direction[name]) for name in below)


def test_the_loss_of_a_lower_layer_is_that_of_a_model_which_ends_there(two_layers, tmp_path):
    """With weight w the loss is loss(2 layers) + w * loss(1 layer), the same pooler and head on both."""
    config, start = configured(
        two_layers, tmp_path, f"{LOWER} --model.hidden_dropout 0 --model.attention_dropout 0"
    )
    job = module.FinetuneJob(config, SPLITS, (), start)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    batch = {name: jax.numpy.asarray(x) for name, x in job.batches(mesh).pack(0)[0].items()}
    params = random_params(job.model)
    params["sequence_head"]["kernel"] *= 200  # so that the layers differ
    objective = TaskObjective(job.task, job.config, job.model)
    whole, *_ = jax.jit(lambda tree: loss_and_gradients(objective, tree, batch, None, 1))(params)
    one_layer = {**params, "encoder": {"layer_0": params["encoder"]["layer_0"]}}
    losses = []
    for layers, tree in ((2, params), (1, one_layer)):
        shape = dataclasses.replace(job.config.model, num_layers=layers)
        model = BertModel(shape, job.config.execution, job.heads)
        output = jax.jit(model.apply)({"params": tree}, batch)
        logits = np.asarray(output.sequence_logits, np.float64)
        right = np.take_along_axis(logits, np.asarray(batch["labels"])[..., None], -1)[..., 0]
        weights = np.asarray(batch["weights"])
        losses.append(((np.log(np.exp(logits).sum(-1)) - right) * weights).sum() / weights.sum())
    assert float(whole) == pytest.approx(losses[0] + 0.2 * losses[1], rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("has_head", [True, False], ids=["head of GPT", "run of causal_lm"])
def test_the_next_token_loss_is_its_formula(tmp_path, has_head):
    """Task + 0.5 * mean over the tokens that another of their sequence follows (Radford et al. 2018, 3.2)."""
    model = dataclasses.replace(
        TWO_LAYERS, attention="causal", pooling="last", hidden_dropout=0.0, attention_dropout=0.0
    )
    if has_head:
        model = dataclasses.replace(model, mlm_layer="none", without_bias=("mlm_output",))
    source = saved_model(tmp_path / "model", HeadsConfig(pooler=True, mlm=has_head), model)
    losses = []
    for options in ("", "--loss.lm_weight 0.5"):
        config, start = configured(source, tmp_path / "w", options)
        job = module.FinetuneJob(config, SPLITS, (), start)
        batch = job.batches(make_mesh(config.mesh, jax.devices()[:1])).pack(0)[0]
        params = random_params(job.model)
        objective = TaskObjective(job.task, job.config, job.model)
        compute = jax.jit(lambda tree, b, objective=objective: loss_and_gradients(objective, tree, b, None, 1)[0])
        losses.append(float(compute(params, batch)))
    assert batch["sequence_ids"].max() > 1  # several examples in a row
    assert not any(name.startswith("mlm_head") for name in to_canonical(params, model.vocab_size))
    network = BertModel(config.model, config.execution, job.heads)
    hidden = jax.jit(network.apply)({"params": params}, batch).sequence_output
    table = np.asarray(params["embeddings"]["word_embeddings"]["embedding"], np.float64)[: model.vocab_size]
    logits = np.asarray(hidden, np.float64) @ table.T
    ids, rows = batch["input_ids"], batch["sequence_ids"]
    found = [
        np.log(np.exp(logits[row, at]).sum()) - logits[row, at, ids[row, at + 1]]
        for row, at in np.ndindex(rows.shape[0], rows.shape[1] - 1)
        if rows[row, at] and rows[row, at] == rows[row, at + 1]
    ]
    assert losses[1] - losses[0] == pytest.approx(0.5 * np.mean(found), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--loss.lm_weight 0.5", "loss.lm_weight: 0.5 .* 0 with a bidirectional model"),
        (
            "--loss.lm_weight 0.5 --loss.mlm_weight 1 --model.attention causal",
            "loss.mlm_weight: 1.0 .* 0 with loss.lm",
        ),
    ],
)
def test_a_next_token_loss_needs_a_causal_model(options, message):
    with pytest.raises(ValueError, match=message):
        load_config(FinetuneConfig, options.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--loss.layers 2", "different layers from 1 to 1"),
        ("--task.kind choice --loss.layers 1", "loss.layers: unknown option with task.kind choice"),
    ],
)
def test_layers_that_cannot_have_a_loss(two_layers, tmp_path, arguments, message):
    splits = {name: [dataclasses.replace(r, choices=("a", "b")) for r in found] for name, found in SPLITS.items()}
    with pytest.raises(ValueError, match=message):
        run(two_layers, tmp_path / "w", arguments, splits)
