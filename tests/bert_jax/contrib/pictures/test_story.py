"""The story of a run: its SVG, and the guesses of checkpoints that the run has kept."""

import re
import xml.etree.ElementTree as ET

import command
import numpy as np
import pytest

import bert_jax
from bert_jax.commands.main import main
from bert_jax.contrib.pictures.story import Stage, story_svg
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.training.checkpoint.parameters import read_arrays

NO_CURVE = (np.zeros(0), np.zeros(0))


def test_the_picture_is_whole_and_safe():
    stages = [Stage(0, [("<b>", 0.2)]), Stage(10, [("a", 0.07), ("b", 0.005)]), Stage(100, [("word", 0.9)])]
    train = np.array([1.0, 50.0, 100.0]), np.array([8.0, 5.0, 4.0])
    text = story_svg('a <script> "[MASK]" & more', stages, 100, (train, (train[0][1:], train[1][1:])), 6.5)
    root = ET.fromstring(text)
    words = ["".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {'a <script> "[MASK]" & more', "step 10", "10%", "<b>", "20%", "7.0%", "0.5%", "90%"} <= set(words)
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert "prefers-color-scheme: dark" in text and len(text) < 60_000
    (curve,) = [one for one in root.iter() if one.get("class") == "train"]
    points = np.array([[float(x) for x in one.split(",")] for one in curve.get("points").split()])
    # The horizontal axis is the square root of the step, the vertical one is linear.
    left, width = 52, 880 - 52 - 16
    assert np.allclose(points[:, 0], left + width * np.sqrt(train[0] / 100), atol=0.1)
    drops = np.diff(points[:, 1])
    assert np.isclose(drops[0] / drops[1], 3, atol=0.01) and (drops > 0).all()
    assert ET.fromstring(story_svg("[MASK]", stages[:1], 100, (NO_CURVE, NO_CURVE), None)) is not None


def test_characters_that_xml_cannot_hold():
    text = story_svg("a\x1b [MASK] \udcff 你 🙂", [Stage(0, [("\x07", 0.2)])], 100, (NO_CURVE, NO_CURVE), None)
    words = [one.text for one in ET.fromstring(text.encode()).iter("{http://www.w3.org/2000/svg}text")]
    assert words[0] == "a\ufffd [MASK] \ufffd 你 🙂" and "\ufffd" in words


def test_what_is_refused(tmp_path, capsys):
    assert main(["story", str(tmp_path), "a [MASK]"]) == 2
    assert f"{tmp_path}: not the workdir of a pretraining run; name one" in capsys.readouterr().err
    assert main(["story", str(tmp_path)]) == 2
    assert "TEXT: missing; write a text with a mask after the workdir" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of six steps whose checkpoints are all kept."""
    folder = tmp_path_factory.mktemp("run")
    steps = {"num_steps": 6, "checkpoint_interval": 1, "keep_every": 1, "log_interval": 1, "eval_interval": 3}
    recipe = command.recipe(folder, training=steps)
    return bert_jax.pretrain(recipe, workdir=folder / "run", report=lambda line: None).workdir


@pytest.mark.slow
def test_a_kept_checkpoint_is_read(run, tmp_path):
    for step in (2, 6):
        stored = read_arrays(run / "checkpoints" / str(step) / "state", "params/")
        name = "embeddings/word_embeddings/embedding"
        own = bert_jax.load(run, options=ReadOptions(step=step)).bundle().params[name]
        assert np.array_equal(own, stored[f"params/{name}"][: len(own)])
    with pytest.raises(ValueError, match=r"run: no checkpoint of step 7; its checkpoints: 1, 2, 3, 4, 5, 6$"):
        bert_jax.load(run, options=ReadOptions(step=7))
    bert_jax.load(run).save(tmp_path / "saved", report=lambda line: None)
    with pytest.raises(ValueError, match="saved: not a pretraining run, which has checkpoints of several steps"):
        bert_jax.load(tmp_path / "saved", options=ReadOptions(step=2))
    bert_jax.load(run).save(tmp_path / "npz", "npz", report=lambda line: None)
    with pytest.raises(ValueError, match="npz: not a pretraining run"):
        bert_jax.load(tmp_path / "npz", options=ReadOptions(step=2))


@pytest.mark.slow
def test_step_0_has_the_parameters_that_the_seed_draws(run, tmp_path):
    """They are those after a step with a learning rate of 1e-30, which changes nothing."""
    options = {"optimizer.learning_rate": 1e-30, "training.num_steps": 1, "optimizer.warmup_steps": 0}
    same = bert_jax.pretrain(
        run.parent / "recipe.yaml", workdir=tmp_path / "same", options=options, report=lambda line: None
    )
    first = bert_jax.load(run, options=ReadOptions(step=0)).bundle().params
    after = bert_jax.load(same.workdir).bundle().params
    assert first.keys() == after.keys()
    for name, values in first.items():
        np.testing.assert_allclose(values, after[name], rtol=0, atol=1e-7, err_msg=name)
    started = bert_jax.pretrain(
        run.parent / "recipe.yaml", workdir=tmp_path / "started", init_from=str(run), num_steps=1,
        report=lambda line: None,
    )  # fmt: skip
    with pytest.raises(ValueError, match="does not start from random parameters; read the model it starts from"):
        bert_jax.load(started.workdir, options=ReadOptions(step=0))


@pytest.mark.slow
def test_command(run, tmp_path, capsys):
    target = tmp_path / "story.svg"
    assert main(["story", str(run), "the [MASK] sees a bird .", "--output", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}: guesses at steps 0, 1, 6\n"
    texts = [one.text for one in ET.fromstring(target.read_text()).iter("{http://www.w3.org/2000/svg}text")]
    for step in (0, 1, 6):
        loaded = bert_jax.load(run, options=ReadOptions(step=step))
        (best, p), *_ = loaded.fill_mask("the [MASK] sees a bird .").masks[0].predictions
        at = texts.index(f"step {step}")
        assert texts[at + 2] == loaded.tokenizer.decode([loaded.tokenizer.piece_id(best)]).strip()
        assert texts[at + 3] == (f"{100 * p:.1f}%" if p < 0.0995 else f"{p:.0%}")
    assert main(["story", str(run), "[MASK] sees [MASK]", "--output", str(target)]) == 2
    assert "2 masks; write a text with one" in capsys.readouterr().err
