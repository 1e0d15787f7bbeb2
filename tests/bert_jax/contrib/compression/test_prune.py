"""``bert-jax prune``: importance, choice, the smaller network against the masked one, bad input."""

import dataclasses
import json

import numpy as np
import pytest
from builders import drawn, tiny_model, words
from scipy.special import log_softmax

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.contrib.analysis.attention_heads import attended
from bert_jax.contrib.compression import prune
from bert_jax.contrib.compression.examples import read_examples
from bert_jax.contrib.compression.heads_and_units import Parts, cut, kept, masked, whole_masks
from bert_jax.contrib.compression.importance import gradient_importance, magnitude_importance, movement_importance
from bert_jax.inference.loaded import load, prepare
from bert_jax.interop.model_bundle import check_shapes
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved

PIECES = words(40)
LABELS = ("no", "yes")
EXAMPLES = [{"text": f"w{i} w{2 * i} w7", "label": LABELS[i % 2]} for i in range(6)]


def make_weights(heads=None, **sizes):
    heads = heads or HeadsConfig(pooler=True, sequence_labels=LABELS)
    model = tiny_model(len(PIECES), num_attention_heads=4, **sizes)
    return drawn(ModelSpec(model=model, heads=heads, tokenizer=TokenizerConfig()), 0.2, PIECES)


def save(path, weights):
    write_saved(path, weights)
    return path


def examples(path, entries=EXAMPLES):
    path.write_text("".join(f"{json.dumps(entry) if isinstance(entry, dict) else entry}\n" for entry in entries))
    return path


def command(source, target, *words):
    return main(["prune", "--from", str(source), "--to", str(target), *map(str, words)])


def outputs(loaded):
    rng = np.random.default_rng(3)
    mask = np.arange(20) < rng.integers(2, 20, (5, 1))
    found = loaded.forward({"input_ids": rng.integers(0, len(PIECES), (5, 20)), "attention_mask": mask})
    return {name: values[mask] if values.shape[:2] == mask.shape else values for name, values in found.items()}


def some_masks(model, seed=0):
    """Masks that leave another number of heads and units in each layer."""
    rng = np.random.default_rng(seed)
    return Parts(*(
        tuple(np.isin(np.arange(len(mask)), rng.permutation(len(mask))[: len(mask) // 2 + i])
              for i, mask in enumerate(of_layers))
        for of_layers in whole_masks(model)
    ))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "switches",
    [
        {}, {"feed_forward": "gated", "norm_position": "pre", "without_bias": ("qkv",)},
        pytest.param(
            {"position_embeddings": "rotary", "attention": "causal", "norm_position": "pre_skip_first"},
            marks=pytest.mark.slow,
        ),
        {"attention_windows": (3,), "global_tokens": 1},
    ],
    ids=["bert", "gated", "rotary", "global"],
)  # fmt: skip
def test_a_cut_network_computes_what_the_masked_one_does(switches):
    heads = HeadsConfig(pooler=True, mlm=True, nsp=True, sequence_labels=LABELS)
    weights = make_weights(heads, **switches)
    model, masks = weights.spec.model, some_masks(weights.spec.model)
    smaller = cut(weights, masks)
    assert smaller.spec.model.layer_heads == (2, 3) and smaller.spec.model.layer_units == (12, 13)
    check_shapes(smaller.spec, smaller.params, "cut")
    whole = dataclasses.replace(weights, params=masked(weights.params, masks, model.head_size))
    before, after, other = (outputs(prepare(one)) for one in (whole, smaller, weights))
    assert before.keys() == after.keys() and len(after) > 3
    for name, values in after.items():
        np.testing.assert_allclose(values, before[name], rtol=0, atol=2e-6 * np.abs(values).max())
        assert np.abs(values - other[name]).max() > 1e-3


@pytest.mark.slow
def test_the_saved_model_is_a_model_as_any_other(tmp_path, capsys):
    weights = make_weights(num_layers=3)
    source = save(tmp_path / "whole", weights)
    data = examples(tmp_path / "examples.jsonl")
    options = ("--heads", 0.75, "--units", 0.6, "--layers", 0, 2, "--examples", data)
    assert command(source, tmp_path / "out", *options) == 0
    printed = capsys.readouterr().out.splitlines()
    part = load(tmp_path / "out")
    model = part.spec.model
    assert sum(model.heads_by_layer) == 6 and sum(model.units_by_layer) == 29 and model.num_layers == 2
    assert printed[:2] == ["importance: gradients of 6 examples", "layers 0 2 of 3"]
    assert printed[2] == f"6 of 8 heads, by layer: {' '.join(map(str, model.heads_by_layer))}"
    assert printed[3] == f"29 of 48 units, by layer: {' '.join(map(str, model.units_by_layer))}"
    assert printed[4].startswith("parameters: ") and printed[5].startswith("operations for 64 tokens: ")
    # Saved again, trimmed, pruned further, written in other formats and read again.
    bundle = read_weights(tmp_path / "out")
    again = read_weights(save(tmp_path / "again", bundle)).params
    assert all(np.array_equal(again[name], values) for name, values in bundle.params.items())
    assert command(tmp_path / "out", tmp_path / "twice", "--units", 0.5, "--importance", "random") == 0
    assert sum(load(tmp_path / "twice").spec.model.units_by_layer) == 14


@pytest.mark.slow
def test_heads_of_lower_layers_stay_with_all_layers_and_go_with_a_word(tmp_path, capsys):
    source = save(tmp_path / "whole", make_weights(HeadsConfig(pooler=True, sequence_labels=LABELS, exits=(1,))))
    half = ("--units", 0.5, "--importance", "random", "--layers")
    assert command(source, tmp_path / "all", *half, 0, 1) == 0
    assert load(tmp_path / "all").spec.heads.exits == (1,)
    assert command(source, tmp_path / "part", *half, 1) == 0
    lost = "layers 1 of 2; without the heads of layers 1 (counted from 1), so that no prediction stops early"
    assert lost in capsys.readouterr().out.splitlines()
    assert load(tmp_path / "part").spec.heads.exits == ()


@pytest.mark.slow
def test_a_pruned_model_is_trimmed_and_exported(tmp_path, capsys):
    weights = make_weights()
    smaller = cut(weights, some_masks(weights.spec.model))
    out, corpus = str(save(tmp_path / "out", smaller)), examples(tmp_path / "corpus.txt", ["w1 w2 w7"])
    assert main(["trim", "--from", out, "--to", str(tmp_path / "t"), "--corpus", str(corpus)]) == 0
    assert command(tmp_path / "t", tmp_path / "s", "--units", 0.1, "--importance", "random") == 0
    for name in ("npz", "onnx", "stablehlo"):
        assert main(["export", "--from", out, "--to", str(tmp_path / name), "--format", name]) == 0
    lines = capsys.readouterr().out
    assert "read back: " in lines and "difference from onnxruntime" in lines and "from jax.export" in lines
    assert "no config.json: model.layer_units: (12, 13) is not supported" in lines
    assert "2, 3 (by layer)" in (tmp_path / "npz" / "README.md").read_text()


@pytest.mark.slow
def test_importance_is_the_mean_absolute_gradient_of_the_masks(tmp_path):
    """Against differences of losses that numpy computes from predictions."""
    weights = make_weights()
    loaded, model, step = prepare(weights), weights.spec.model, 1e-2
    ids = np.array([loaded.build(loaded.tokenizer.encode(entry["text"])).ids for entry in EXAMPLES])

    def losses(kind, layer, place, value):
        masks = whole_masks(model)
        getattr(masks, kind)[layer][place] = value
        changed = dataclasses.replace(weights, params=masked(weights.params, masks, model.head_size))
        logits = prepare(changed).forward({"input_ids": ids})["logits"]
        return -log_softmax(logits, axis=-1)[range(6), [LABELS.index(entry["label"]) for entry in EXAMPLES]]

    def slope(*part):
        return np.abs(losses(*part, 1 + step) - losses(*part, 1 - step)).mean() / (2 * step)

    found, count = gradient_importance(loaded, read_examples([str(examples(tmp_path / "x.jsonl"))]), 0, 0)
    assert count == 6
    numbered = [entry | {"label": LABELS.index(entry["label"])} for entry in EXAMPLES]
    again, _ = gradient_importance(loaded, read_examples([str(examples(tmp_path / "y.jsonl", numbered))]), 0, 0)
    assert all(
        np.array_equal(a, b)
        for a, b in zip((*found.heads, *found.units), (*again.heads, *again.units), strict=True)
    )
    for kind, layer, place in (("heads", 0, 1), ("heads", 1, 3), ("units", 0, 5), ("units", 1, 20)):
        own = getattr(found, kind)[layer]
        assert np.linalg.norm(own) == pytest.approx(1, abs=1e-5)
        ratio = slope(kind, layer, place) / slope(kind, layer, 0)
        assert own[place] / own[0] == pytest.approx(ratio, rel=0.03)


ENTRIES = {
    "regression": (
        HeadsConfig(pooler=True, sequence_labels=("score",), problem="regression"),
        [{"text": "w1", "text_pair": "w2", "label": 2.5}],
    ),
    "multi_label": (
        HeadsConfig(pooler=True, sequence_labels=("a", "b", "c"), problem="multi_label"),
        [{"text": "w1 w4", "labels": ["a", "c"]}],
    ),
    "tagging": (HeadsConfig(token_labels=("O", "B-X"), crf=True), [{"words": ["w1", "w2"], "tags": ["O", "B-X"]}]),
    "qa": (
        HeadsConfig(span=True),
        [{"text": "w1", "text_pair": "w2 w3", "answers": [{"text": "w3", "answer_start": 3}]}],
    ),
    "choice": (HeadsConfig(pooler=True, choice=True), [{"text": "w1", "choices": ["w2", "w3 w4"], "label": 1}]),
    "masked_lm": (HeadsConfig(mlm=True), ["w1 w2 w3 w4 w5 w6 w7 w8", "w4 w3 w2 w1 w5 w6 w7 w9"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_every_head_has_a_loss(tmp_path, name):
    heads, entries = ENTRIES[name]
    file = examples(tmp_path / ("x.txt" if name == "masked_lm" else "x.jsonl"), entries)
    texts = read_examples([str(file)], allow_texts=True)
    found, count = gradient_importance(prepare(make_weights(heads)), texts, 0, 0)
    assert count == len(entries)
    assert all(np.isfinite(each).all() and each.min() > 0 for of_layers in found for each in of_layers)


def test_what_is_kept():
    scores = [np.array([0.1, 0.2, 0.3]), np.array([0.9, 0.8, 0.7])]
    as_lists = lambda share, **options: [  # noqa: E731
        each.astype(int).tolist() for each in kept(scores, share, **{"even": False, "option": "--heads"} | options)
    ]
    assert as_lists(1) == [[1, 1, 1], [1, 1, 1]]
    assert as_lists(0.5) == [[0, 0, 1], [1, 1, 0]]
    assert as_lists(1 / 3) == [[0, 0, 1], [1, 0, 0]]  # the best of each layer
    assert as_lists(2 / 3, even=True) == [[0, 1, 1], [1, 1, 0]]
    for share, message in (
        (0, "0 is not allowed; allowed: a share to keep, above 0 and up to 1"), (1.5, "1.5 is not allowed"),
        (float("nan"), "nan is not allowed"), (-0.5, "-0.5 is not allowed"),
        (0.2, "0.2 of 6 leaves a layer with none; allowed: 0.333 or more, so that each layer keeps one"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^--heads: {message}"):
            as_lists(share)
    with pytest.raises(ValueError, match="leaves a layer with none"):
        as_lists(0.1, even=True)


@pytest.mark.slow
def test_magnitude_finds_the_large_parts(tmp_path):
    """Also of gated layers; with --even the network has one size, which is a plain one for the units."""
    weights = make_weights(feed_forward="gated")
    params = {name: values.copy() for name, values in weights.params.items()}
    params["encoder/layer_0/attention/value/kernel"][:, 4:8] *= 5  # head 1
    params["encoder/layer_1/attention/query/bias"][12:] *= 50  # head 3
    params["encoder/layer_0/feed_forward/gate/kernel"][:, 7] *= 9
    params["encoder/layer_1/feed_forward/output/kernel"][2] *= 9
    weights = dataclasses.replace(weights, params=params)
    found = magnitude_importance(weights.spec.model, params)
    assert [int(each.argmax()) for each in (*found.heads, *found.units)] == [1, 3, 7, 2]
    source = save(tmp_path / "whole", weights)
    shares = ("--heads", 0.5, "--units", 0.5, "--importance", "magnitude", "--even")
    assert command(source, tmp_path / "out", *shares) == 0
    model = read_weights(tmp_path / "out").spec.model
    assert (model.layer_heads, model.layer_units, model.intermediate_size) == ((2, 2), (), 12)
    assert model.has_equal_layers


@pytest.mark.slow
def test_movement_is_the_growth_of_the_squared_norm(tmp_path):
    weights = make_weights()
    rng = np.random.default_rng(5)
    moved = {name: array + rng.normal(0, 0.1, array.shape) for name, array in weights.params.items()}
    model, size = weights.spec.model, weights.spec.model.head_size
    found = movement_importance(model, moved, weights.params)

    def squares(params, head):
        place, lanes = "encoder/layer_1/attention/", slice(head * size, (head + 1) * size)
        parts = [params[f"{place}{name}/{part}"][..., lanes] for name in ("query", "key", "value")
                 for part in ("kernel", "bias")]  # fmt: skip
        return sum(np.sum(part**2.0) for part in (*parts, params[f"{place}output/kernel"][lanes]))

    grown = np.array([squares(moved, head) - squares(weights.params, head) for head in range(4)])
    np.testing.assert_allclose(found.heads[1], grown / np.linalg.norm(grown), rtol=1e-5)
    # What shrinks most goes first.
    shrunk = {name: array.copy() for name, array in weights.params.items()}
    shrunk["encoder/layer_0/feed_forward/output/kernel"][5] *= 0.1
    start = save(tmp_path / "start", weights)
    source = save(tmp_path / "end", dataclasses.replace(weights, params=shrunk))
    shares = ("--units", 47 / 48, "--importance", "movement")
    assert command(source, tmp_path / "out", *shares, "--start", start) == 0
    name = "encoder/layer_0/feed_forward/output/kernel"
    kernel = read_weights(tmp_path / "out").params[name]
    np.testing.assert_array_equal(kernel, np.delete(weights.params[name], 5, 0))


@pytest.mark.slow
def test_a_difference_is_found_before_anything_is_saved(tmp_path, capsys, monkeypatch):
    source = save(tmp_path / "whole", make_weights())

    def broken(weights, masks):
        return cut(weights, Parts(masks.heads, tuple(mask[::-1] for mask in masks.units)))

    monkeypatch.setattr(prune, "cut", broken)
    assert command(source, tmp_path / "out", "--units", 0.5, "--importance", "random") == 3
    assert " of the pruned model differs by " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_attentions_of_layers_of_different_sizes_are_no_array():
    loaded = prepare(make_weights(layer_heads=(4, 1)))
    with pytest.raises(ValueError, match="the layers have different numbers of heads; omit attentions"):
        loaded.forward({"input_ids": np.ones((1, 4), np.int32)}, attentions=True)
    with pytest.raises(ValueError, match="its layers have different numbers of heads; give a model before pruning"):
        attended(loaded, [])


@pytest.mark.slow
def test_bad_input_is_one_line(tmp_path, capsys):
    source = save(tmp_path / "whole", make_weights())
    bare = save(tmp_path / "bare", make_weights(HeadsConfig(pooler=True)))
    shared = save(tmp_path / "shared", make_weights(shared_layers=True))
    alibi = save(tmp_path / "alibi", make_weights(relative_positions="alibi", position_embeddings="none"))
    both = save(tmp_path / "both", make_weights(HeadsConfig(token_labels=("O", "X"), span=True)))
    lstm = save(
        tmp_path / "lstm",
        drawn(ModelSpec(model=tiny_model(len(PIECES), encoder="lstm"), heads=HeadsConfig()), 0.2, PIECES),
    )
    half = save(tmp_path / "half", make_weights(num_layers=1))
    data = examples(tmp_path / "good.jsonl")
    texts = examples(tmp_path / "texts.txt", ["w1 w2"])
    unknown = examples(tmp_path / "unknown.jsonl", [{"text": "w1", "label": "perhaps"}])
    wrong = examples(tmp_path / "wrong.jsonl", [{"text": "w1", "answers": [{"text": 3}]}])
    empty = examples(tmp_path / "empty.jsonl", [{"label": "no"}])
    random = ("--importance", "random")
    for model, options, message in (
        (source, ("--heads", 0.5), "--examples: missing; --importance gradient requires examples with labels"),
        (source, ("--heads", 0.5, "--examples", texts), "texts.txt: example 1: no label, which --importance"),
        (
            source,
            ("--heads", 0.5, "--examples", unknown),
            "'perhaps' is no class of the model; allowed: no, yes, or",
        ),
        (source, ("--heads", 0.5, "--examples", "train.tsv"), "train.tsv: a table; use texts, one per line"),
        (source, ("--heads", 0.5, "--examples", wrong), "wrong.jsonl: example 1: answers of another type; write"),
        (source, ("--heads", 0.5, "--examples", empty), 'example 1: neither "text" nor "words"'),
        (source, ("--heads", 0.5, "--examples", data, "--limit", -1), "--limit: -1 is not allowed"),
        (source, ("--heads", 0.5, "--examples", data, *random), "--examples: requires --importance gradient"),
        (source, ("--heads", 0.5, "--importance", "movement"), "--start: missing; --importance movement requires"),
        (source, ("--heads", 0.5, "--start", source, *random), "--start: requires --importance movement, and"),
        (
            source,
            ("--heads", 0.5, "--importance", "movement", "--start", half),
            "the layers differ from those of the model to prune",
        ),
        (source, ("--heads", 0.5, *random, "--seed", -1), "--seed: -1 is not allowed; allowed: 0 or more"),
        (source, random, "nothing to prune; set --heads or --units to the share to keep, or --layers"),
        (source, ("--heads", 0.1, *random), "--heads: 0.1 of 8 leaves a layer with none; allowed: 0.25 or more"),
        (source, ("--units", 1.5, *random), "--units: 1.5 is not allowed; allowed: a share to keep, above 0"),
        (source, ("--layers", 2), "--layers: 2 is not allowed; allowed: layers from 0 to 1"),
        (bare, ("--heads", 0.5, "--examples", data), "neither a task head nor a masked-LM head"),
        (both, ("--heads", 0.5, "--examples", data), "several task heads (token, span)"),
        (lstm, ("--heads", 0.5, *random), "cannot be pruned: the encoder (lstm) has no attention heads"),
        (shared, ("--units", 0.5, *random), "cannot be pruned: all layers share their parameters"),
        (alibi, ("--heads", 0.5, *random), "positions that are relative (alibi) belong to the numbers of"),
    ):
        assert command(model, tmp_path / "out", *options) == 2, message
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert not (tmp_path / "out").exists()
    assert command(source, source, "--units", 0.5, *random) == 2
    assert "not empty; give a new folder" in capsys.readouterr().err
    assert command(alibi, tmp_path / "out", "--units", 0.5, *random) == 0
