"""``run_pretrain.py --teacher_outputs``: stored outputs against a teacher in the step, torn writing, refusals."""

import dataclasses
import errno
import json
import os
import shutil
from types import SimpleNamespace

import command
import jax
import numpy as np
import pytest
import yaml
from builders import content, drawn, tiny_model
from support import untimed

from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.contrib.compression.teachers import outputs as module
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.parallel import make_mesh
from bert_jax.tokenization import SPECIAL_PIECES

pytestmark = pytest.mark.entry
WORDS = {word for parts in command.SENTENCE_PARTS for text in parts for word in text.split()}
PIECES = [*SPECIAL_PIECES, *sorted(WORDS), "."]
LOSSES = {"name": "distillation", "hidden_loss": "mse", "hidden_layers": "all", "attention_loss": "scores"}


def save_teacher(folder, seed=0):
    model = tiny_model(len(PIECES), hidden_size=24, max_position_embeddings=32)
    spec = ModelSpec(model=model, heads=HeadsConfig(mlm=True), tokenizer=TokenizerConfig())
    write_saved(folder, drawn(spec, 0.3, PIECES, seed=seed))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a teacher, a recipe and, after its first run, shards."""
    folder = tmp_path_factory.mktemp("outputs")
    (folder / "vocab.txt").write_bytes(content(PIECES))
    save_teacher(folder / "teacher")
    data = {"vocab": str(folder / "vocab.txt"), "next_sentence": "none", "eval_fraction": 0.2}
    training = {"num_steps": 8, "log_interval": 1, "eval_interval": 4, "checkpoint_interval": 4}
    sizes = {"vocab_size": len(PIECES)}
    recipe = command.recipe(folder, training=training, mesh={"data": 1}, data=data, model=sizes)
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | {"objective": LOSSES}))
    return folder


@pytest.fixture
def run(place, pretrain, monkeypatch):
    """Call: a run of the recipe in the workdir ``name``, with these words; its output, if it ends well."""
    monkeypatch.setattr(module, "make_mesh", lambda config, _: make_mesh(config, jax.devices()[:1]))

    def call(name, *words, code=0):
        found, out, err = pretrain("--config", place / "recipe.yaml", "--workdir", place / name, *words)
        assert found == code, err
        return out if code == 0 else err

    return call


def lines(folder):
    return untimed([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])


def arrays(folder):
    return {str(path.relative_to(folder)): np.load(path) for path in sorted(folder.rglob("*.npy"))}


@pytest.mark.slow
def test_stored_outputs_teach_as_the_teacher_does(run, place):
    teacher, stored = ["--teacher", place / "teacher"], ["--teacher_outputs", place / "stored"]
    run("live", *teacher)
    out = run("first", *teacher, *stored)
    assert "outputs of the teacher: train:" in out and "GB in" in out
    for expected, found in zip(lines(place / "live"), lines(place / "first"), strict=True):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            if "loss" in name and value is not None:
                assert found[name] == pytest.approx(value, abs=1e-6, rel=1e-6), name
    live, first = (read_weights(place / name).params for name in ("live", "first"))
    for name, values in live.items():
        np.testing.assert_allclose(first[name], values, atol=1e-5, err_msg=name)

    # Another run needs no teacher, and computes nothing again.
    shutil.move(place / "teacher", place / "away")
    try:
        assert "outputs of the teacher: train" not in run("second", *stored)
        # It goes on without a flag, bit for bit.
        shutil.rmtree(place / "second/checkpoints/8")
        (place / "second/report.html").unlink()
        assert "continuing at step 4" in run("second")
    finally:
        shutil.move(place / "away", place / "teacher")
    assert lines(place / "second") == lines(place / "first")
    second = read_weights(place / "second").params
    for name, values in first.items():
        np.testing.assert_array_equal(second[name], values, err_msg=name)


def test_a_wrong_teacher_is_refused_before_the_data_are_built(run, place, pretrain, tmp_path):
    """Another vocabulary, no masked-LM head, and a run whose vocabulary would be trained."""
    weights = read_weights(save_teacher(tmp_path / "teacher"))
    spec = weights.spec
    other = dataclasses.replace(weights, tokenizer_content=content([*PIECES[:-1], "other"]))
    write_saved(tmp_path / "other", other)
    params = {name: array for name, array in weights.params.items() if not name.startswith("mlm_head/")}
    write_saved(
        tmp_path / "headless",
        dataclasses.replace(weights, spec=dataclasses.replace(spec, heads=HeadsConfig()), params=params),
    )
    for teacher, words, message in (
        ("other", [], "other: the model has another vocabulary than "),
        ("headless", [], "no masked-LM head; set objective.soft_weight 0 and, since it may not know [MASK]"),
        ("teacher", ["--data.vocab", ""], "data.vocab: missing; set it to the vocabulary of the teacher, "),
    ):
        shards = ["--data.shards", tmp_path / "shards", *words]
        assert message in run("refused", "--teacher", tmp_path / teacher, *shards, code=2)
        assert not (tmp_path / "shards").exists()
    plain = tmp_path / "plain.yaml"
    plain.write_text(yaml.safe_dump(yaml.safe_load((place / "recipe.yaml").read_text()) | {"objective": {}}))
    code, _, err = pretrain("--config", plain, "--teacher", tmp_path / "teacher", "--workdir", tmp_path / "w")
    assert code == 2 and "--teacher: not allowed with objective.name masked_lm; set distillation" in err


@pytest.mark.slow
def test_the_most_probable_pieces(run, place):
    """All of them teach like the whole distribution; few teach another one, stored as in the step."""
    teacher, short = ["--teacher", place / "teacher"], ["--training.num_steps", "4"]
    run("whole", *teacher, *short)
    expected = [line["soft_loss"] for line in lines(place / "whole") if "soft_loss" in line]
    for count in (len(PIECES), 3):
        found = []
        for name, words in (("step", []), ("stored", ["--teacher_outputs", place / f"top{count}"])):
            run(f"{name}{count}", *teacher, *short, *words, "--objective.soft_top_k", count)
            found.append([line["soft_loss"] for line in lines(place / f"{name}{count}") if "soft_loss" in line])
        np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
        difference = np.abs(np.array(found[0]) - expected).max()
        assert difference < 1e-5 if count == len(PIECES) else difference > 0.01
    held = np.load(place / "top3/held_out/teacher_pieces.npy")
    assert held.shape[1:] == (3, 3) and held.dtype == np.int32


@pytest.mark.slow
def test_an_interrupted_writing_goes_on_and_ends_the_same(run, place, monkeypatch):
    teacher = ["--teacher", place / "teacher", "--training.num_steps", "1"]
    run("calm", *teacher, "--teacher_outputs", place / "calm_outputs")
    monkeypatch.setattr(module, "_EVERY", 1)
    expected, saved = arrays(place / "calm_outputs"), module.write_whole
    for most in (3, 5):
        calls = iter(range(most))

        def broken(path, text, calls=calls):
            saved(path, text)
            if path.name == module.PROGRESS and next(calls, None) is None:
                raise SystemExit(137)

        monkeypatch.setattr(module, "write_whole", broken)
        with pytest.raises(SystemExit):
            run("torn", *teacher, "--teacher_outputs", place / "torn_outputs")
        assert not (place / "torn_outputs" / module.RECORD).exists()
    monkeypatch.setattr(module, "write_whole", saved)
    run("torn", *teacher, "--teacher_outputs", place / "torn_outputs")
    found = arrays(place / "torn_outputs")
    assert found.keys() == expected.keys() and len(found) == 6
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    assert not (place / "torn_outputs" / module.PROGRESS).exists()


def test_outputs_that_do_not_belong_to_the_run_are_refused(run, place, tmp_path, monkeypatch):
    teacher, own = ["--teacher", place / "teacher"], ["--teacher_outputs", place / "kept"]
    err = run("w1", "--teacher_outputs", tmp_path / "none", code=2)
    assert "not complete; name the model with --teacher" in err
    err = run("w1", *teacher, *own, "--data.masking", "dynamic", "--data.shards", tmp_path / "dynamic", code=2)
    assert "data.masking: dynamic is not allowed with --teacher_outputs" in err
    usage = SimpleNamespace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "disk_usage", lambda place: usage)
        err = run("w1", *teacher, *own, code=2)
        assert "are free; lower objective.soft_top_k, or omit --teacher_outputs" in err
        assert not (place / "kept" / module.PROGRESS).exists()
    with monkeypatch.context() as patch:  # another process fills the disk: while space is reserved, nothing is lost

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(module.os, "posix_fallocate", full)
        assert "No space left on device" in run("w1", *teacher, *own, code=2)
    run("w1", *teacher, *own, "--training.num_steps", "1")
    files = [*(place / "kept").rglob("*.npy")]
    assert files and all(file.stat().st_blocks * 512 >= file.stat().st_size for file in files)
    err = run("w2", *own, "--objective.hidden_layers", "last", code=2)
    assert "stored for another run (outputs: " in err and "give another folder" in err
    err = run("w2", *own, "--data.shards", tmp_path / "others", "--data.dupe_factor", "1", code=2)
    assert "stored for another run (records: " in err
    err = run("w2", *own, "--teacher", save_teacher(tmp_path / "other", seed=1), code=2)
    assert "of another model than" in err
    run("w3", "--teacher", tmp_path / "other", "--training.num_steps", "1")
    err = run("w3", *own, "--training.num_steps", "2", code=2)
    assert "another teacher; omit it, or change --workdir" in err
    (place / "kept/train/teacher_hidden.npy").write_bytes(b"x")
    err = run("w2", *own, code=2)
    assert "teacher_hidden.npy: not readable" in err
