"""Phases of a recipe: lengths in tokens, another rotary base and length, a longer position table, moments kept."""

import shutil

import jax
import numpy as np
import pytest
import yaml
from builders import StopAt
from support import TINY, objective_of, tiny_config, train_synthetic, untimed

from bert_jax.config import MeshConfig, PretrainConfig, RunOptions
from bert_jax.config.loader import build_config, read_settings
from bert_jax.model import to_canonical
from bert_jax.parallel import make_mesh
from bert_jax.process.exits import Stop
from bert_jax.start.plan import plan_start
from bert_jax.start.start import Start
from bert_jax.start.state import _extension, extend_positions
from bert_jax.training.checkpoint.folder import saved_steps
from bert_jax.training.checkpoint.restore import Unfit, restore_newest
from bert_jax.training.launch import RECORD
from bert_jax.training.logging.metrics_file import read_metrics
from bert_jax.training.state import POSITIONS
from bert_jax.training.workdir import record_text

ROTARY = "--model.position_embeddings rotary --optimizer.name stable_adamw --optimizer.clip_norm 0"
BASE = TINY.replace("--training.num_steps 20 ", "").replace("--optimizer.warmup_steps 4 ", "")
AVERAGE = "--optimizer.ema_decay 0.9 --optimizer.decay_steps 20"
TOKENS = 8 * 16  # of a batch of the first phase
FIRST = f"{ROTARY} --training.num_tokens {7 * TOKENS} --optimizer.warmup_tokens {3 * TOKENS}"
SECOND = (
    f"{ROTARY} --model.rotary_base 160000 --model.max_position_embeddings 128 --data.seq_length 32 "
    "--data.max_predictions 6 --training.global_batch_size 4 --optimizer.learning_rate 5e-4 "
    f"--optimizer.warmup_tokens 0 --optimizer.warmup_steps 0 --training.num_tokens {8 * TOKENS} "
    "--optimizer.schedule wsd --optimizer.wsd_decay one_minus_sqrt --optimizer.final_fraction 0.001 "
    f"--optimizer.wsd_decay_tokens {8 * TOKENS} --optimizer.restart_schedule true --training.checkpoint_interval 3"
)


def planned(folder, words, *, continue_from=""):
    """The config of the command ``words`` in ``folder``, as ``run_pretrain.py`` resolves it."""
    words = f"{BASE} {words}".split()
    options = RunOptions(continue_from=str(continue_from))
    start = plan_start(PretrainConfig, options, folder, read_settings(words).all)
    return build_config(PretrainConfig, [*read_settings(words).all, *start.settings])


def state_of(workdir, config, **options):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    options = {"read_only": True, "may_change": set(), "report": print} | options
    return restore_newest(workdir, config, mesh, objective_of(config, mesh).model, **options)


@pytest.mark.slow
def test_phases_in_tokens_change_base_length_and_rate_and_resume_bitwise(tmp_path):
    one, two, straight = (tmp_path / name for name in ("one", "two", "straight"))
    first = planned(one, FIRST)
    assert (first.training.num_steps, first.optimizer.warmup_steps, first.training.first_step) == (7, 3, 0)
    train_synthetic(first, one)
    second = planned(two, SECOND, continue_from=one)
    assert (second.training.first_step, second.training.num_steps) == (7, 15)
    assert second.optimizer.wsd_decay_steps == 8
    with pytest.raises(Stop):
        train_synthetic(second, two, continue_from=one, stop=StopAt(0))
    with pytest.raises(Stop):
        train_synthetic(planned(two, SECOND, continue_from=one), two, continue_from=one, stop=StopAt(6))
    assert 7 < saved_steps(two)[-1] < 15
    # The first phase goes on, or is deleted: the second one keeps its steps.
    shutil.copytree(one / "checkpoints" / "7", one / "checkpoints" / "9")
    for source in (one, ""):
        again = planned(two, SECOND, continue_from=source)
        assert again == second
    train_synthetic(again, two)
    train_synthetic(second, straight, continue_from=rolled(one, to=7))
    found, expected = state_of(two, second), state_of(straight, second)
    assert found.step == expected.step == 15
    jax.tree.map(np.testing.assert_array_equal, found.state, expected.state)
    assert untimed(read_metrics(two)) == untimed(read_metrics(straight))
    rates = [line["learning_rate"] for line in read_metrics(two) if "split" not in line]
    exact = [5e-4 * (1e-3 + 0.999 * (1 - np.sqrt((step - 7) / 8))) for step in (7, 9, 11, 13, 14)]
    np.testing.assert_allclose(rates, exact, rtol=1e-5)


@pytest.mark.slow
def test_a_phase_with_another_first_step_is_refused(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train_synthetic(tiny_config(AVERAGE, "--training.num_steps 4"), one)
    train_synthetic(tiny_config(AVERAGE, "--training.num_steps 6"), two, continue_from=one)
    # The phase began with a number of steps, so its config has no first step.
    words = f"{AVERAGE} --optimizer.warmup_steps 4 --training.num_tokens {5 * TOKENS}"
    with pytest.raises(ValueError, match=r"^training\.first_step: 0, but training\.num_tokens counts .* 4$"):
        train_synthetic(planned(two, words), two)
    longer = planned(two, f"{words} --training.first_step 4")
    train_synthetic(longer, two)
    assert saved_steps(two)[-1] == longer.training.num_steps == 9
    (two / "config.yaml").write_text("damaged")
    with pytest.raises(ValueError, match=r"set training\.first_step 4$"):
        train_synthetic(planned(two, words), two)


def rolled(workdir, to):
    """``workdir`` without the checkpoints after step ``to``."""
    for step in saved_steps(workdir):
        if step > to:
            shutil.rmtree(workdir / "checkpoints" / str(step))
    assert saved_steps(workdir)[-1] == to
    return workdir


@pytest.mark.slow
def test_moments_cross_the_border_of_phases(tmp_path):
    first = planned(tmp_path / "one", FIRST)
    train_synthetic(first, tmp_path / "one")
    second = planned(tmp_path / "two", SECOND, continue_from=tmp_path / "one")
    with pytest.raises(Unfit, match=r"model\.rotary_base: 10000\.0 -> 160000\.0"):
        state_of(tmp_path / "one", second)
    changed = {"model.rotary_base", "model.max_position_embeddings"}
    carried, before = state_of(tmp_path / "one", second, may_change=changed), state_of(tmp_path / "one", first)
    jax.tree.map(np.testing.assert_array_equal, carried.state, before.state)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(carried.state.opt_state))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tile", pytest.param("interpolate", marks=pytest.mark.slow)])
def test_a_phase_extends_the_position_table_with_its_moments_and_average(tmp_path, how):
    first = tiny_config(AVERAGE, "--training.num_steps 4")
    train_synthetic(first, tmp_path / "one")
    longer = f"{AVERAGE} --training.num_steps 6 --model.max_position_embeddings 100 --data.seq_length 80"
    longer += " --optimizer.learning_rate 0"
    second = tiny_config(longer)
    with pytest.raises(ValueError, match=r"max_position_embeddings: 64 -> 100.*; --extend_positions extends"):
        train_synthetic(second, tmp_path / "two", continue_from=tmp_path / "one")
    train_synthetic(second, tmp_path / "two", continue_from=tmp_path / "one", extend_positions=how)
    # The rate is 0 in the second phase, so its parameters are those of its start.
    found = to_canonical(state_of(tmp_path / "two", second).state.params, 211)
    extend = _extension(second.model, how)
    options = {"may_change": {"model.max_position_embeddings"}, "convert": extend}
    border = to_canonical(state_of(tmp_path / "one", second, **options).state, 211)
    before = to_canonical(state_of(tmp_path / "one", first).state, 211)
    tables = [name for name in before if name.endswith(POSITIONS)]
    assert len(tables) == 4  # parameters, two moments, average
    for name, value in before.items():
        value = np.asarray(value)
        expected = extend_positions(value, 100, 0, how) if name in tables else value
        np.testing.assert_allclose(border[name], expected, rtol=1e-6, atol=1e-8, err_msg=name)
        if name.startswith("params/"):
            np.testing.assert_allclose(
                found[name.removeprefix("params/")], expected, rtol=1e-6, atol=1e-8, err_msg=name
            )
    assert np.any(border[tables[0]][64:])


def test_a_table_is_not_cut(tmp_path):
    train_synthetic(tiny_config(AVERAGE, "--training.num_steps 2"), tmp_path / "one")
    shorter = tiny_config(AVERAGE, "--training.num_steps 4 --model.max_position_embeddings 32")
    with pytest.raises(ValueError, match="position_embeddings"):
        train_synthetic(shorter, tmp_path / "two", continue_from=tmp_path / "one", extend_positions="tile")


def test_a_phase_of_a_run_with_an_initial_model_keeps_its_record(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    (one / "checkpoints" / "5").mkdir(parents=True)
    model = {"model.num_layers": 3, "model.rotary_base": 10_000.0, "model.max_position_embeddings": 128}
    (one / RECORD).write_text(record_text("source", model, model))
    words = ["--model.rotary_base", "160000", "--training.num_tokens", "640"]
    start = plan_start(PretrainConfig, RunOptions(continue_from=str(one)), two, read_settings(words).all)
    record = yaml.safe_load(start.record)
    assert record["source"] == model and record["resolved"] == model | {"model.rotary_base": 160_000.0}
    assert record["init_from"] == "source" and record["continue_from"] == str(one)
    config = build_config(PretrainConfig, [*read_settings(words).all, *start.settings])
    assert (config.model.num_layers, config.model.rotary_base, config.training.first_step) == (3, 160_000.0, 5)
    with pytest.raises(ValueError, match=r"model\.num_layers: 4, but .* has 3"):
        plan_start(
            PretrainConfig, RunOptions(continue_from=str(one)), two, read_settings(["--model.num_layers", "4"]).all
        )
    # Killed before its first checkpoint, and then without the flag.
    two.mkdir()
    (two / RECORD).write_text(start.record)
    with pytest.raises(ValueError, match=f"started with --continue_from {one} and has no checkpoint"):
        plan_start(PretrainConfig, RunOptions(), two, read_settings(words).all)
    (two / "checkpoints" / "7").mkdir(parents=True)
    again = plan_start(PretrainConfig, RunOptions(), two, [])
    assert build_config(PretrainConfig, [*again.settings]).model == config.model


@pytest.mark.parametrize("flag", ["add_words", "vocab_slots"])
def test_a_phase_has_the_vocabulary_of_the_one_before(tmp_path, flag):
    options = RunOptions(continue_from=str(tmp_path), **{flag: "w.txt" if flag == "add_words" else True})
    with pytest.raises(ValueError, match=f"^--{flag}: requires --init_from"):
        plan_start(PretrainConfig, options, tmp_path / "two", [])


@pytest.mark.slow
def test_a_start_that_is_not_finite_is_refused(tmp_path, monkeypatch):
    config, name = tiny_config(AVERAGE), "embeddings/layer_norm/scale"
    scale = np.ones(config.model.embedding_width, np.float32)
    scale[3] = np.nan
    start = Start(params={name: scale})
    with pytest.raises(ValueError, match=f"initial model: {name} has NaN"):
        train_synthetic(config, tmp_path / "refused", start=start)
    assert not saved_steps(tmp_path / "refused")
    start = Start(params={name: scale})
    with monkeypatch.context() as change, pytest.raises(Stop):
        change.setattr("bert_jax.start.state._require_finite", lambda *_: None)
        train_synthetic(config, tmp_path / "one", start=start, stop=StopAt(2))
    with pytest.raises(ValueError, match=f"continue_from .*one: {name} has NaN"):
        train_synthetic(
            tiny_config(AVERAGE, "--training.num_steps 30"), tmp_path / "two", continue_from=tmp_path / "one"
        )
