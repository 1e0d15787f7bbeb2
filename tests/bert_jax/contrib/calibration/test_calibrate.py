"""``bert-jax calibrate``: the probabilities against their definition, the printed values, bad input."""

import json
import re

import numpy as np
import pytest
from builders import drawn, tiny_model, words
from scipy.special import log_softmax, softmax

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.contrib.calibration.calibrate import fitted_temperature, log_loss, with_logits
from bert_jax.inference.loaded import load, prepare
from bert_jax.interop.saved_model import write_saved
from bert_jax.metrics.classification import calibration_error

PIECES, LABELS = words(40), ("no", "yes", "maybe")
TEXTS = [" ".join(f"w{(7 * i + k) % 40}" for k in range(1 + i % 9)) for i in range(24)]
RNG = np.random.default_rng(0)


def make_weights(**heads):
    heads = HeadsConfig(**{"pooler": True, "sequence_labels": LABELS, **heads})
    return drawn(ModelSpec(model=tiny_model(len(PIECES)), heads=heads, tokenizer=TokenizerConfig()), 0.5, PIECES)


def examples(folder, labels=LABELS, pairs=False):
    """A file of labeled examples, in which the classes have different frequencies."""
    entries = [
        {"text": text, "label": labels[min(i % 4, len(labels) - 1)], **({"text_pair": f"w{i}"} if pairs else {})}
        for i, text in enumerate(TEXTS)
    ]
    (folder / "dev.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return folder / "dev.jsonl", entries


def calibrate(folder, weights, *words):
    write_saved(folder / "model", weights)
    given = ["calibrate", "--model", folder / "model", "--to", folder / "out", *words]
    return main([str(word) for word in given])


def test_the_temperature_of_drawn_labels_is_found():
    logits = RNG.normal(0, 3, (20_000, 4))
    gold = np.array([RNG.choice(4, p=row) for row in softmax(logits / 2.5, -1)])
    found = fitted_temperature(gold, logits)
    assert found == pytest.approx(2.5, rel=0.05)
    assert log_loss(gold, logits / found) <= min(log_loss(gold, logits / (found * x)) for x in (0.99, 1.01))
    # The labels are drawn from the calibrated probabilities.
    after, before = (calibration_error(gold, softmax(logits / x, -1)) for x in (found, 1))
    assert after < 0.01 < 0.1 < before


def test_log_loss_and_calibration_error_by_hand():
    p = np.array([[0.9, 0.1], [0.92, 0.08], [0.3, 0.7], [0.0, 1.0]])
    gold, logits = np.array([0, 1, 1, 1]), np.log(np.maximum(p, 1e-30))
    assert log_loss(gold, logits) == pytest.approx(-np.mean(np.log([0.9, 0.08, 0.7, 1.0])))
    # Bins of a fifteenth: {0.9, 0.92} has accuracy 0.5, {0.7} and {1} have accuracy 1.
    assert calibration_error(gold, p) == pytest.approx((abs(1.82 - 1) + 0.3) / 4)


@pytest.mark.parametrize("equal", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("both", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_new_model_has_the_probabilities(both, equal, tmp_path, capsys):
    """Also where the logits of both orders of a pair are added."""
    weights = make_weights(both_orders=both)
    file, entries = examples(tmp_path, pairs=both)
    assert calibrate(tmp_path, weights, "--examples", file, *(["--equal_classes"] if equal else [])) == 0
    lines = capsys.readouterr().out.splitlines()
    temperature = float(re.match(r"temperature (\S+), from 24 records", lines[0])[1])
    inputs = [(one["text"], one["text_pair"]) if both else one["text"] for one in entries]
    before, after = (log_softmax_of(model, inputs) for model in (prepare(weights), load(tmp_path / "out")))
    gold = np.array([LABELS.index(one["label"]) for one in entries])
    expected = before / temperature
    if equal:
        expected = expected - np.log(np.bincount(gold) / len(gold))
    np.testing.assert_allclose(after, log_softmax(expected, -1), atol=2e-3)  # the printed digits
    values = {name: [*map(float, rest.split(", "))] for name, rest in (line.split(": ") for line in lines[2:6])}
    assert values["  log_loss"] == pytest.approx([log_loss(gold, before), log_loss(gold, after)], abs=1e-4)
    assert values["  accuracy"] == pytest.approx(
        [np.mean(one.argmax(-1) == gold) for one in (before, after)], abs=1e-4
    )
    if not equal:
        assert values["  log_loss"][1] < values["  log_loss"][0]
        assert (before.argmax(-1) == after.argmax(-1)).all()


def log_softmax_of(model, inputs):
    return np.log(model.predict_proba(inputs))


@pytest.mark.slow
def test_values_of_other_records_and_an_export(tmp_path, capsys):
    file, entries = examples(tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries[:5]))
    assert calibrate(tmp_path, make_weights(), "--examples", file, "--check", other) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("from 24 records") and lines[1].startswith("5 records: ")
    words = ["export", "--model", tmp_path / "out", "--to", tmp_path / "hf", "--format", "hf"]
    assert main([str(word) for word in words]) == 0
    found = [load(tmp_path / name).predict_proba(TEXTS) for name in ("out", "hf")]
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "heads, labels, words, message",
    [
        (
            {"sequence_labels": ("x",), "problem": "regression"},
            LABELS,
            [],
            "no head that predicts one class per text",
        ),
        ({"problem": "multi_label"}, LABELS, [], "no head that predicts one class per text"),
        ({"exits": (1,)}, LABELS, [], "heads for early exit are not calibrated"),
        ({}, (None,), [], "dev.jsonl: no record has a label; give labeled records"),
        ({}, LABELS[:2], ["--equal_classes"], "--equal_classes: --examples has no record of maybe"),
        ({}, ("never",), [], "'never' is no class of the model; allowed: no, yes, maybe"),
    ],
)
def test_bad_input_is_one_line(heads, labels, words, message, tmp_path, capsys):
    file, _ = examples(tmp_path, labels)
    assert calibrate(tmp_path, make_weights(**heads), "--examples", file, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not (tmp_path / "out").exists()


def test_biases_need_a_place():
    weights = make_weights()
    del weights.params["sequence_head/bias"]
    assert with_logits(weights, 2.0, np.zeros(3)).params.keys() == weights.params.keys()
    with pytest.raises(ValueError, match="--equal_classes: not allowed for a model whose output layer has no bias"):
        with_logits(weights, 2.0, np.ones(3))
