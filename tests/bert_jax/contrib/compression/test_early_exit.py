"""Early exit: stages of layers against the whole network, training of the heads, the command, bad input."""

import json

import jax
import numpy as np
import pytest
from builders import drawn, tiny_model, words
from finetune_cases import SPLITS, TWO_LAYERS, configured, lines, run, saved_model
from scipy.special import entr, softmax

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig, load_config
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.contrib.compression.early_exit import exit_curve
from bert_jax.contrib.surgery.network_changes import with_layers
from bert_jax.finetuning import finetune as module
from bert_jax.inference.loaded import load, prepare
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved

PIECES, LABELS = words(40), ("no", "yes", "maybe")
TEXTS = [" ".join(f"w{(7 * i + k) % 40}" for k in range(1 + i % 9)) for i in range(24)]


def make_weights(exits=(1, 3), heads=None, **sizes):
    heads = heads or HeadsConfig(pooler=True, sequence_labels=LABELS, exits=exits)
    model = tiny_model(len(PIECES), **{"num_layers": 4, **sizes})
    return drawn(ModelSpec(model=model, heads=heads, tokenizer=TokenizerConfig()), 0.3, PIECES)


@pytest.fixture(scope="module")
def weights():
    return make_weights()


@pytest.fixture(scope="module")
def loaded(weights):
    """Ready for use: its programs are compiled once."""
    return prepare(weights)


@pytest.fixture
def saved(weights, tmp_path):
    write_saved(tmp_path / "model", weights)
    return tmp_path / "model"


def by_layer(loaded, texts):
    """Probabilities of each text, alone in a row of 32, at every layer with a head, by the number of the layer."""
    count, names = len(texts), ("input_ids", "token_type_ids", "sequence_ids")
    features = {name: np.zeros((count, 32), np.int32) for name in names}
    for row, encoded in enumerate(loaded.model_inputs(texts)):
        for name, values in zip(names, (encoded.ids, encoded.types, [1] * len(encoded.ids)), strict=True):
            features[name][row, : len(values)] = values
    places = np.tile(np.arange(32, dtype=np.int32), (count, 1))
    features |= {"position_ids": places, "cls_positions": np.zeros((count, 1), np.int32)}
    output = jax.device_get(jax.jit(loaded.model.apply)({"params": loaded.params}, features))
    logits = [*output.exit_logits[:, :, 0], output.sequence_logits[:, 0]]
    layers = (*loaded.spec.heads.exits, loaded.config.num_layers)
    return [
        {layer: softmax(one[row].astype(np.float64)) for layer, one in zip(layers, logits, strict=True)}
        for row in range(count)
    ]


def entropies(probabilities):
    return {layer: float(entr(values).sum()) for layer, values in probabilities.items()}


def median_entropy(layers):
    """A threshold at which half of the texts stop at the first layer."""
    return float(np.median([entropies(one)[1] for one in layers]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        pytest.param(
            {"norm_position": "pre", "position_embeddings": "rotary", "pooling": "mean"}, marks=pytest.mark.slow
        ),
        pytest.param({"shared_layers": True, "head_parts": ("pooler_norm",)}, marks=pytest.mark.slow),
        pytest.param({"relative_positions": "disentangled", "position_embeddings": "none"}, marks=pytest.mark.slow),
    ],
    ids=["bert", "pre-norm", "shared", "disentangled"],
)
def test_a_prediction_stops_at_the_first_layer_that_is_sure(loaded, sizes):
    loaded = loaded if not sizes else prepare(make_weights(**sizes))
    layers = by_layer(loaded, TEXTS)
    middle = median_entropy(layers)
    for threshold in (0.0, middle, 9.0):
        found = loaded.predict(TEXTS, exit_entropy=threshold)
        for prediction, probabilities in zip(found, layers, strict=True):
            first = next((n for n, value in entropies(probabilities).items() if value < threshold), 4)
            assert prediction["layers"] == first
            values = [prediction["probabilities"][label] for label in LABELS]
            np.testing.assert_allclose(values, probabilities[first], atol=2e-6)
        if threshold == middle:
            assert len({prediction["layers"] for prediction in found}) > 1, "the case shows something"
    assert "layers" not in loaded.predict(TEXTS[0])


def test_the_stages_run_fewer_rows(loaded, monkeypatch):
    """What exits is not computed again: the later programs see the other texts alone."""
    seen, whole = [], loaded.program

    def counted(key, function, *more):
        program = whole(key, function, *more)
        return lambda params, features: (
            seen.append((key, int(features["weights"].shape[0]), int((features["sequence_ids"] > 0).sum()))),
            program(params, features),
        )[1]

    monkeypatch.setattr(loaded, "program", counted)
    done = []
    threshold = median_entropy(by_layer(loaded, TEXTS))
    layers = [one["layers"] for one in loaded.predict(TEXTS, exit_entropy=threshold, progress=done.append)]
    tokens = [len(one.ids) for one in loaded.model_inputs(TEXTS)]
    for (_, first, _), _, count in seen:
        assert count == sum(size for size, last in zip(tokens, layers, strict=True) if last > first)
    assert len({*layers}) > 1 and sum(done) == len(TEXTS)


@pytest.mark.slow
def test_both_orders_of_a_pair_are_added_at_each_layer():
    heads = HeadsConfig(pooler=True, sequence_labels=LABELS, exits=(2,), both_orders=True)
    loaded = prepare(make_weights(heads=heads))
    pairs = [(TEXTS[i], TEXTS[i + 1]) for i in range(6)]
    both = (by_layer(loaded, pairs), by_layer(loaded, [pair[::-1] for pair in pairs]))
    for own, other, found in zip(*both, loaded.predict(pairs, exit_entropy=9.0), strict=True):
        product = own[2] * other[2]  # the logits are added
        values = [found["probabilities"][label] for label in LABELS]
        np.testing.assert_allclose(values, product / product.sum(), atol=2e-6)


OWN = "--loss.layers 1 --loss.layer_weight 1 --loss.layer_heads own"


@pytest.mark.slow
def test_heads_of_lower_layers_are_trained_saved_and_read_again(tmp_path):
    source = saved_model(tmp_path / "model", model=TWO_LAYERS)
    run(source, tmp_path / "w", f"{OWN} --training.num_epochs 12 --training.restore_best false")
    found = [line["layer_1_loss"] for line in lines(tmp_path / "w") if line.get("layer_1_loss") is not None]
    assert found[-1] < 0.5 * found[0]
    trained = read_weights(tmp_path / "w" / "best")
    assert trained.spec.heads.exits == (1,)
    loaded = load(tmp_path / "w" / "best")
    predictions = loaded.predict([record.text for record in SPLITS["dev"]], exit_entropy=9.0)
    right = [one["label"] == record.label for one, record in zip(predictions, SPLITS["dev"], strict=True)]
    assert np.mean(right) > 0.8 and all(one["layers"] == 1 for one in predictions)
    config, start = configured(tmp_path / "w" / "best", tmp_path / "v", OWN)
    first = module.FinetuneJob(config, SPLITS, (), start).start()
    kernel = "exit_1_head/output/kernel"
    np.testing.assert_array_equal(first.params[kernel], trained.params[kernel])
    config, start = configured(tmp_path / "w" / "best", tmp_path / "u")
    first = module.FinetuneJob(config, SPLITS, (), start).start()
    assert "not used: exit_1_head" in first.messages


def test_exports_keep_the_heads_or_say_that_they_are_left_out(saved, tmp_path, capsys):
    for form in ("npz", "hf", "onnx"):
        words = ["export", "--from", saved, "--to", tmp_path / form, "--format", form, "--no_verify"]
        assert main([str(word) for word in words]) == 0
        told = "".join(capsys.readouterr())
        assert ("cannot represent exits (early-exit heads" in told) == (form == "onnx")
        assert ("which only bert_jax reads" in told) == (form == "hf")
    assert read_weights(tmp_path / "npz").spec.heads.exits == (1, 3)
    assert read_weights(tmp_path / "hf").spec.heads.exits == (1, 3)


def test_fewer_layers_have_no_heads_below_the_last(weights):
    smaller = with_layers(weights, (0, 2))
    assert smaller.spec.heads.exits == () and "layers" not in prepare(smaller).predict(TEXTS[0])


def examples(path, label=lambda i: LABELS[i % 3]):
    path.write_text("".join(json.dumps({"text": text, "label": label(i)}) + "\n" for i, text in enumerate(TEXTS)))
    return path


@pytest.mark.slow
def test_the_command_prints_what_exits_cost_and_give(loaded, saved, tmp_path, capsys):
    file, output = examples(tmp_path / "dev.jsonl"), tmp_path / "curve.jsonl"
    words = ["early-exit", "--model", str(saved), "--examples", str(file), "--output", str(output)]
    threshold = median_entropy(by_layer(loaded, TEXTS))
    assert main([*words, "--entropies", str(threshold), "5"]) == 0
    whole, some, least = [json.loads(line) for line in output.read_text().splitlines()]
    assert (whole["entropy"], whole["layers"], least["layers"]) == (None, 4, 1) and 1 < some["layers"] < 4
    for point in (some, least):
        found = loaded.predict(TEXTS, exit_entropy=point["entropy"])
        assert point["layers"] == pytest.approx(np.mean([one["layers"] for one in found]))
        right = [one["label"] == LABELS[i % 3] for i, one in enumerate(found)]
        assert point["metrics"]["accuracy"] == pytest.approx(np.mean(right))
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["entropy", "layers", "share", "accuracy"] and len(rows) == 3
    assert rows[0].split()[:3] == ["all", "4.00", "1.00"] and rows[2].split()[1:3] == ["1.00", "0.25"]


@pytest.mark.slow
def test_default_thresholds_are_shares_of_the_greatest_entropy(loaded, tmp_path):
    points = exit_curve(loaded, [str(examples(tmp_path / "dev.jsonl"))])
    expected = np.log(3) * np.array([0.05, 0.1, 0.2, 0.4, 0.8])
    np.testing.assert_allclose([point.entropy for point in points[1:]], expected, atol=1e-4)
    layers = [point.layers for point in points[1:]]
    assert layers == sorted(layers, reverse=True) and len({*layers}) > 1


def test_bad_input_is_refused_in_one_line(saved, weights, tmp_path, capsys):
    plain = make_weights(exits=())
    write_saved(tmp_path / "plain", plain)
    file = examples(tmp_path / "dev.jsonl")
    bare = examples(tmp_path / "bare.jsonl", lambda i: None)
    cases = (
        (["predict", "--model", saved, "--exit_entropy", "-1", "w1"], "exit_entropy: -1.0 is not allowed"),
        (["predict", "--model", tmp_path / "plain", "--exit_entropy", "1", "w1"], "have no heads for early exit"),
        (["early-exit", "--model", tmp_path / "plain", "--examples", file], "loss.layer_heads own"),
        (["early-exit", "--model", saved, "--examples", file, "--entropies", "0"], "--entropies: 0.0 is not"),
        (["early-exit", "--model", saved, "--examples", bare], "no example has a label"),
    )  # fmt: skip
    for arguments, message in cases:
        assert main([str(word) for word in arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


@pytest.mark.parametrize(
    "options, message",
    [
        ("--loss.layer_heads own", "loss.layer_heads: 'own' is not allowed; allowed: shared without loss.layers"),
        ("--loss.layers 12 --loss.layer_heads own", r"loss.layers: .*12.* allowed: different layers from 1 to 11"),
        (
            "--loss.layers 1 --loss.layer_heads own --features.layers embeddings",
            r"features.layers: .* last with",
        ),
        (
            "--task.kind regression --loss.layers 1 --loss.layer_heads own",
            "unknown option with task.kind regression",
        ),
    ],
)
def test_options_without_a_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        load_config(FinetuneConfig, options.split())


def test_a_description_with_impossible_exits_is_refused():
    plain = {"pooler": True, "sequence_labels": LABELS}
    with pytest.raises(ValueError, match=r"heads.exits: \(4,\) .* allowed: layers below the last, from 1 to 3"):
        make_weights(exits=(4,))
    lstm = tiny_model(len(PIECES), encoder="lstm")
    with pytest.raises(ValueError, match=r"heads.exits: \(1,\) .* none with model.encoder lstm"):
        ModelSpec(model=lstm, heads=HeadsConfig(**plain, exits=(1,)))
    with pytest.raises(ValueError, match="different layers in ascending order"):
        HeadsConfig(**plain, exits=(2, 1))
    with pytest.raises(ValueError, match="none without a sequence head of single labels"):
        HeadsConfig(**plain, exits=(1,), problem="multi_label")
