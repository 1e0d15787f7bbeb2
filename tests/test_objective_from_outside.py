"""An objective outside the project, by entry point and by ``objective.module``: contrastive, of docs/examples."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from outside import EXAMPLES, fresh, install  # noqa: F401 (fresh is a fixture)
from support import objective_of, random_batch, tiny_config, train_synthetic, whole_and_resumed

from bert_jax import registry
from bert_jax.commands.main import main
from bert_jax.config import PretrainConfig
from bert_jax.config.loader import Settings, show_help
from bert_jax.model.flops import training_flops_per_sequence
from bert_jax.objectives.objective import Aux
from bert_jax.parallel import make_mesh, to_global
from bert_jax.training.checkpoint.restore import restore_newest
from bert_jax.training.programs import train_programs
from bert_jax.training.state import flat, initial_params, initial_state

FILE = EXAMPLES / "contrastive_objective.py"
OPTIONS = (
    "--data.next_sentence none --training.num_steps 4 --training.log_interval 1 --training.checkpoint_interval 2 "
    "--training.eval_interval 2 --training.eval_batches 1 --training.global_batch_size 4"
)
BY_FILE = f"{OPTIONS} --objective.module {FILE}"
POINTS = {
    "objectives": "contrastive = contrastive_objective:Objective",
    "objective_options": "contrastive = contrastive_objective:Config",
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The options of a run with the installed objective, whose queue has two batches."""
    monkeypatch.syspath_prepend(install(tmp_path / "installed", FILE, POINTS))
    return f"{OPTIONS} --objective.name contrastive --objective.queue_batches 2"


def programs_of(config, devices=1):
    return train_programs(objective_of(config, make_mesh(config.mesh, jax.devices()[:devices])))


def end_of(workdir, config):
    """The arrays of the last checkpoint by name."""
    programs = programs_of(config)
    restored = restore_newest(
        workdir, config, programs.mesh, programs.model, read_only=True, may_change=set(), report=print,
        carry=programs.abstract.carry,
    )  # fmt: skip
    return {name: np.asarray(x) for name, x in flat(restored.state).items()}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["entry point", pytest.param("file", marks=pytest.mark.slow)])
def test_it_trains_resumes_and_embeds(how, tmp_path, capsys, request, monkeypatch):
    config = tiny_config(BY_FILE if how == "file" else request.getfixturevalue("installed"))
    lines = whole_and_resumed(config, tmp_path, 5)
    evaluations = [line for line in lines if line.get("split") == "eval"]
    assert [line["step"] for line in evaluations] == [2, 4]
    for line in evaluations:
        assert line["loss"] == pytest.approx(line["mlm_loss"] + 0.1 * line["contrastive_loss"])
    whole, cut = (end_of(tmp_path / folder, config) for folder in ("whole", "cut"))
    assert whole.keys() == cut.keys() and all(np.array_equal(x, cut[name]) for name, x in whole.items())
    assert whole["carry/queue"].shape == (4, 4 if how == "file" else 2, 32)
    assert np.all(np.any(whole["carry/queue"] != 0, axis=-1))
    capsys.readouterr()
    assert main(["embed", "--model", str(tmp_path / "whole"), "a text", "another one"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    if how == "entry point":
        monkeypatch.undo()
        registry.names.cache_clear()
        assert main(["embed", "--model", str(tmp_path / "whole"), "a text"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            "objective.name: 'contrastive' is not allowed" in line and "install the package that brings it" in line
        )


@pytest.mark.slow
def test_the_loss_and_the_queue(installed):
    changed = "--objective.queue_batches 4 --objective.temperature 2"
    objective = objective_of(tiny_config(installed, changed))
    params = jax.tree.map(lambda x: 3 * x, initial_params(objective.model, 1))
    batch = random_batch(objective.config)
    batch["sequence_ids"][3], batch["mlm_weights"][3] = 0, 0  # the row of a damaged record
    queue = np.random.default_rng(0).normal(size=(4, 4, 32)).astype(np.float32)
    queue[:, 2:] = 0
    step = jax.jit(lambda queue: objective.sums(params, Aux({}, {"queue": queue}), batch, None, axis=None))
    sums, carried = step(queue)
    masks, rows = batch["sequence_ids"] > 0, np.arange(4)[:, None]
    ids = batch["input_ids"].copy()
    kept = batch["mlm_weights"] > 0
    ids[(rows + 0 * batch["mlm_positions"])[kept], batch["mlm_positions"][kept]] = batch["mlm_labels"][kept]

    encode = jax.jit(lambda ids: objective.model.apply({"params": params}, batch | {"input_ids": ids}))

    def vectors(ids):
        states = encode(ids).sequence_output
        return (np.asarray(states, np.float64) * masks[..., None]).sum(1)[:3] / masks.sum(1)[:3, None]

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    first, second = vectors(batch["input_ids"]), vectors(ids)
    others = unit(np.concatenate([second, *queue[:3, :2]]).astype(np.float64))
    logits = unit(first) @ others.T / 2
    expected = np.log(np.exp(logits).sum(1)) - np.diag(logits)
    total, weight = sums["contrastive_loss"]
    assert weight == 3 and float(total) == pytest.approx(expected.sum(), rel=1e-4)
    found = np.asarray(carried["queue"])
    np.testing.assert_allclose(found[:3, 0], second, atol=1e-5)
    assert np.array_equal(found[:3, 1:], queue[:3, :3]) and np.array_equal(found[3], queue[3])


@pytest.mark.slow
def test_a_mesh_computes_what_one_device_computes():
    def losses(mesh, devices):
        programs = programs_of(tiny_config(BY_FILE, "--execution.prng hash", mesh), devices)
        state = initial_state(programs.model, programs.optimizer, programs.abstract, 0)
        found = []
        for seed in range(3):
            every = random_batch(programs.objective.config, seed)
            batch = to_global({name: every[name] for name in programs.objective.features}, programs.mesh, 4)
            state, metrics = programs.step_for(batch)(state, batch)
            found.append(metrics.unpack()["loss"])
        return np.array(found), np.asarray(state.carry["queue"])

    (found, queue), (expected, one) = losses("--mesh.data 2", 2), losses("", 1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(queue, one, atol=1e-4)


@pytest.mark.slow
def test_its_operations_are_counted_and_planned(capsys):
    config = tiny_config(BY_FILE)
    sizes = {"seq_length": 16, "max_predictions": 4, "has_nsp": False}
    both = training_flops_per_sequence(config.model, **sizes)
    second = training_flops_per_sequence(config.model, **sizes | {"max_predictions": 0})
    assert objective_of(config).flops_per_sequence() == both + second
    plan = ["plan", "--config", "quickstart", "--data.next_sentence", "none", "--topology", "h100:8", "--json"]
    shares = []
    for words in ([], ["--objective.module", str(FILE)]):
        assert main([*plan, *words]) == 0
        shares.append(json.loads(capsys.readouterr().out)["predicted_mfu"])
    assert 1.5 < shares[1] / shares[0] < 2


def test_a_checkpoint_without_the_same_queue_continues_with_an_empty_one(installed, tmp_path):
    config = tiny_config(installed)
    train_synthetic(config, tmp_path / "run")
    more = dataclasses.replace(config, objective=dataclasses.replace(config.objective, queue_batches=3))
    state = end_of(tmp_path / "run", more)
    assert state["carry/queue"].shape == (4, 3, 32) and not state["carry/queue"].any()
    assert np.array_equal(end_of(tmp_path / "run", config)["params/embeddings/word_embeddings/embedding"],
                          state["params/embeddings/word_embeddings/embedding"])  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--training.accumulation_steps 2",
            r"^training\.accumulation_steps: 2 .*allowed: 1 with an objective that",
        ),
        (
            "--training.batch_ramp 2 2",
            r"^training\.batch_ramp: \(2, 2\) .*allowed: none with an objective that car",
        ),
        ("--data.next_sentence nsp", r"^data\.next_sentence: 'nsp' .*allowed: none with the contrastive objective"),
        ("--data.packing best_fit", r"^data\.packing: 'best_fit' .*allowed: none with the contrastive objective"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        programs_of(tiny_config(BY_FILE, options))


def test_its_options_are_those_of_its_name(installed):
    with pytest.raises(ValueError, match=r"objective\.queue_batches: 0 is not allowed; allowed: .*above 0"):
        tiny_config(installed, "--objective.queue_batches 0")
    with pytest.raises(
        ValueError, match=r"objective\.queue_batches: .*exists only with objective\.name contrastive"
    ):
        tiny_config(BY_FILE, "--objective.queue_batches 2")


def test_help_describes_it(installed, capsys):
    show_help(PretrainConfig, Settings(), "program", whole=True)
    assert "contrastive: masked tokens, and each masked text" in " ".join(capsys.readouterr().out.split())
