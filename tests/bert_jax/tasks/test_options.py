"""Options of training against formulas of their own: rates per parameter, perturbed weights, augmentation."""

import dataclasses
import tempfile
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finetune_cases import PIECES, SPLITS, TWO_LAYERS, configured, saved_model
from support import random_params

from bert_jax.commands.finetune import FinetuneRunOptions
from bert_jax.config import ExecutionConfig, HeadsConfig, from_dict, load_config, to_dict
from bert_jax.config.finetune import FinetuneConfig, FinetuneOptimizerConfig, InputConfig, LossConfig
from bert_jax.config.loader import read_settings, show_help
from bert_jax.config.spec import Features
from bert_jax.finetuning.augment import augmented
from bert_jax.finetuning.finetune import FinetuneJob
from bert_jax.finetuning.task_objective import check_layers, perturbed
from bert_jax.model import BertModel, from_canonical, to_canonical
from bert_jax.optim import lr_multipliers, make_schedule
from bert_jax.tasks.registry import TASKS
from bert_jax.tasks.task import Encoded, ModelInput
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

HEADS = HeadsConfig(pooler=True, sequence_labels=("a", "b"))
TOKENIZER = WordPieceTokenizer(PIECES, lower_case=False)


def params(scan=False, seed=0, model=TWO_LAYERS):
    return random_params(BertModel(model, ExecutionConfig(scan_layers=scan), HEADS), seed)


def rates(step, scan=False, model=TWO_LAYERS, **options):
    """Canonical name -> factor at a step."""
    tree = params(scan, model=model)
    factors = lr_multipliers(FinetuneOptimizerConfig(**options), TWO_LAYERS.num_layers, tree, steps_per_epoch=10)
    full = jax.tree.map(lambda x, f: jnp.broadcast_to(f, x.shape), tree, factors(jnp.int32(step)))
    return {name: np.unique(values).tolist() for name, values in to_canonical(full, TWO_LAYERS.vocab_size).items()}


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_layer_decay_of_each_parameter(scan):
    expected = {
        "embeddings": 0.5**3,
        "encoder/layer_0": 0.5**2,
        "encoder/layer_1": 0.5,
        "pooler": 1,
        "sequence_head": 1,
    }
    for name, values in rates(0, scan, layer_decay=0.5).items():
        (part,) = (part for part in expected if name.startswith(f"{part}/"))
        assert values == [expected[part]], name


@pytest.mark.parametrize("kind", ["buckets", "disentangled"])
def test_tables_of_distances_belong_to_the_encoder_below_its_layers(kind):
    model = dataclasses.replace(TWO_LAYERS, relative_positions=kind)
    for options, expected in (({"layer_decay": 0.5}, 0.5**3), ({"frozen": ("encoder",)}, 0)):
        found = {name: values for name, values in rates(0, model=model, **options).items() if "relative" in name}
        assert found and all(values == [expected] for values in found.values()), (options, found)


def test_layers_that_share_their_parameters_count_once():
    model = dataclasses.replace(TWO_LAYERS, shared_layers=True)
    assert model.own_layers == 1 and TWO_LAYERS.own_layers == TWO_LAYERS.num_layers
    factors = lr_multipliers(FinetuneOptimizerConfig(layer_decay=0.5), 1, params(model=model), steps_per_epoch=10)
    found = factors(jnp.int32(0))
    assert {float(x) for x in jax.tree.leaves(found["encoder"])} == {0.5}
    assert {float(x) for x in jax.tree.leaves(found["embeddings"])} == {0.25}
    with pytest.raises(
        ValueError, match=r"'layer_1' is not allowed; allowed: embeddings, encoder, pooler, layer_0$"
    ):
        lr_multipliers(FinetuneOptimizerConfig(frozen=("layer_1",)), 1, params(model=model), steps_per_epoch=10)


@pytest.mark.parametrize("scan", [False, True])
def test_frozen_parts(scan):
    for name, values in rates(0, scan, frozen=("embeddings", "layer_0")).items():
        assert values == [0.0 if name.startswith(("embeddings/", "encoder/layer_0/")) else 1.0], name
    assert all(
        values == [float(not name.startswith("encoder/"))]
        for name, values in rates(0, scan, frozen=("encoder",)).items()
    )


@pytest.mark.parametrize("step", [0, 19, 20, 40, 60])
def test_gradual_unfreezing_from_the_top(step):
    turns = {20: "encoder/layer_1/", 40: "encoder/layer_0/", 60: "embeddings/"}
    learning = [part for turn, part in turns.items() if step >= turn]
    for name, values in rates(step, unfreeze_every=2.0).items():
        learns = name.startswith(("pooler/", "sequence_head/", *learning))
        assert values == [float(learns)], (name, step)


def test_layers_join_one_by_one_however_small_the_share_of_an_epoch():
    for step in range(4):
        found = rates(step, unfreeze_every=0.01)  # of 10 steps
        parts = {"encoder/layer_1/": 1, "encoder/layer_0/": 2, "embeddings/": 3}
        for name, values in found.items():
            assert values == [float(step >= next((n for part, n in parts.items() if name.startswith(part)), 0))]


@pytest.mark.parametrize("scan", [False, True])
def test_the_final_layer_norm_goes_with_the_top_layer(scan):
    model = dataclasses.replace(TWO_LAYERS, norm_position="pre")
    for options in ({"frozen": ("encoder",)}, {"layer_decay": 0.5}, {"unfreeze_every": 2.0}):
        for step in (0, 20):
            found = rates(step, scan, model, **options)
            top = found["encoder/layer_1/attention/query/kernel"]
            assert top != [1.0] or (step and "unfreeze_every" in options)
            assert {found[f"encoder/final_layer_norm/{part}"][0] for part in ("scale", "bias")} == {*top}, options


def test_nothing_asked_for_costs_nothing():
    assert lr_multipliers(FinetuneOptimizerConfig(), TWO_LAYERS.num_layers, params(), 10) is None


def test_slanted_triangular():
    """Howard and Ruder 2018, equation 3: cut_frac 0.1, ratio 32."""
    config = FinetuneOptimizerConfig(learning_rate=0.01, warmup_steps=10, schedule="slanted_triangular")
    schedule = make_schedule(config, 100)
    for step in range(101):
        p = step / 10 if step < 10 else 1 - (step - 10) / (10 * (1 / 0.1 - 1))
        assert float(schedule(step)) == pytest.approx(0.01 * (1 + p * 31) / 32, rel=1e-5), step


def test_mixout_keeps_the_mean_and_0_is_off():
    now, start = params(seed=1), params(seed=2)
    key = jax.random.key(0)
    same = perturbed(now, start, key, 0.0, 1e-12)
    assert all(
        np.allclose(a, b, atol=1e-6) for a, b in zip(jax.tree.leaves(now), jax.tree.leaves(same), strict=True)
    )
    rate = 0.3
    mixed = to_canonical(perturbed(now, start, key, 0.0, rate), TWO_LAYERS.vocab_size)
    now, start = to_canonical(now, TWO_LAYERS.vocab_size), to_canonical(start, TWO_LAYERS.vocab_size)
    for name, values in mixed.items():
        if not (name.startswith(("encoder/", "pooler/")) and name.endswith("kernel")):
            assert np.array_equal(values, now[name]), name
            continue
        dropped = np.isclose(values, start[name], atol=1e-7)
        kept = (now[name] - rate * start[name]) / (1 - rate)
        assert np.allclose(np.where(dropped, start[name], kept), values, atol=1e-6), name
        assert abs(dropped.mean() - rate) < 0.05, name


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_mixout_leaves_drawn_matrices_alone(scan):
    """The top layer and the pooler are drawn: the start parameters are 0 there."""
    now = params(scan, seed=1)
    start = to_canonical(params(scan, seed=2), TWO_LAYERS.vocab_size)
    start = {n: v * (not n.startswith(("encoder/layer_1/", "pooler/"))) for n, v in start.items()}
    start = from_canonical(start, now, TWO_LAYERS.vocab_size)
    mixed = to_canonical(perturbed(now, start, jax.random.key(0), 0.0, 0.3), TWO_LAYERS.vocab_size)
    now = to_canonical(now, TWO_LAYERS.vocab_size)
    changed = {name for name, values in mixed.items() if not np.array_equal(values, now[name])}
    assert changed == {n for n in now if n.startswith("encoder/layer_0/") and n.endswith("kernel")}


def test_weight_dropout_scales_what_it_keeps():
    now = params()
    found = to_canonical(perturbed(now, None, jax.random.key(1), 0.25, 0.0), TWO_LAYERS.vocab_size)
    plain = to_canonical(now, TWO_LAYERS.vocab_size)
    name = "encoder/layer_0/feed_forward/intermediate/kernel"
    kept = found[name] != 0
    assert abs(kept.mean() - 0.75) < 0.05 and np.allclose(found[name][kept], plain[name][kept] / 0.75)
    assert np.array_equal(found["pooler/kernel"], plain["pooler/kernel"])


def unit(words):
    ids, types = TOKENIZER.build_inputs(TOKENIZER.encode(" ".join(words)))
    return ModelInput(0, (Encoded(ids, types),), {"labels": 1})


def changed(words, seed=0, **options):
    config = FinetuneConfig(input=InputConfig(**options))
    return list(augmented(unit(words), config, TOKENIZER, (seed, 0)).sequences[0].ids)


WORDS = [f"w{i}" for i in range(40)]


def test_word_dropout_leaves_words_out_in_order():
    whole = list(unit(WORDS).sequences[0].ids)
    found = [changed(WORDS, seed, word_dropout=0.1) for seed in range(200)]
    assert all(ids == [i for i in whole if i in set(ids)] for ids in found)
    assert abs(np.mean([(42 - len(ids)) / 40 for ids in found]) - 0.1) < 0.02
    assert changed(WORDS, 3, word_dropout=0.1) == found[3] != found[4]
    assert changed(["w1"], 0, word_dropout=0.99) == list(unit(["w1"]).sequences[0].ids)  # never all of them


def test_span_deletion_takes_runs_of_words():
    found = [changed(WORDS, seed, span_deletion=0.2) for seed in range(50)]
    whole = list(unit(WORDS).sequences[0].ids)
    for ids in found:
        gone = [whole.index(i) for i in whole if i not in ids]
        assert 8 <= len(gone) <= 8 + 4
        assert np.sum(np.diff(gone) > 1) + 1 < len(gone)


def test_nothing_asked_for_gives_the_unit_itself():
    one = unit(WORDS)
    assert augmented(one, FinetuneConfig(), TOKENIZER, (0, 0)) is one


@pytest.mark.parametrize("features", get_args(Features))
def test_the_loss_of_a_layer_needs_a_pooler_of_its_width(features):
    """What is not refused has shapes that fit."""
    model = dataclasses.replace(TWO_LAYERS, num_layers=4, max_position_embeddings=128)
    config = FinetuneConfig(model=model, loss=LossConfig(layers=(1,)))
    heads = dataclasses.replace(HEADS, features=features)
    if features == "concat_last_four":
        message = (
            r"^features.layers: concat_last_four is not allowed with loss.layers \[1\].*; change features.layers"
        )
        with pytest.raises(ValueError, match=message):
            check_layers(config, heads)
        return
    check_layers(config, heads)
    network = BertModel(model, ExecutionConfig(), heads)
    tree, hidden = random_params(network), np.zeros((1, 8, model.hidden_size), np.float32)
    first = {"cls_positions": np.zeros((1, 1), np.int32), "sequence_ids": np.ones((1, 8), np.int32)}
    logits = network.apply({"params": tree}, hidden, first, None, method="pooled_logits")
    assert logits.shape == (1, 1, 2)


CUT = {"classification", "regression", "multi_label", "choice", "sentence"}
CLASSES = {"classification", "multi_label", "choice", "joint", "sentence"}
WHOLE = {"classification", "regression", "multi_label"}


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ("--task.truncation tail", CUT),
        ("--regularization.head_dropout 0.3", {*TASKS} - {"qa"}),
        ("--data.label_names No Yes", {"classification", "multi_label", "joint"}),
        ("--data.labels 0 1", CLASSES),
        ("--data.tags O B", {"tagging", "joint"}),
        ("--tagging.crf true", {"tagging", "joint"}),
        ("--qa.no_answer true", {"qa"}),
        ("--sentence.pooling cls", {"sentence"}),
        ("--loss.class_weights balanced", {"classification"}),
        ("--loss.nsp_weight 1", {*TASKS} - {"choice", "sentence"}),
        ("--loss.layers 1", WHOLE),
        ("--input.word_dropout 0.1", CUT),
        ("--features.bilstm_size 8", {"tagging", "joint"}),
    ],
)
def test_an_option_exists_only_for_the_kinds_that_use_it(words, kinds):
    option = words.split()[0].removeprefix("--")
    for kind in TASKS:
        if kind in kinds:
            labels = "--data.labels 0 1" if option == "data.label_names" else ""
            config = load_config(FinetuneConfig, f"--task.kind {kind} {labels} {words}".split())
            section, name = option.split(".")
            assert name in to_dict(config)[section]
            continue
        with pytest.raises(
            ValueError, match=rf"^command line: {option}: unknown option with task.kind {kind};"
        ) as error:
            load_config(FinetuneConfig, f"--task.kind {kind} {words}".split())
        assert set(str(error.value).rpartition("task.kind ")[2].split(", ")) == set(kinds)


def test_an_option_of_another_kind_may_have_its_default():
    """As in the configs that older runs left behind."""
    config = load_config(FinetuneConfig, ["--task.kind", "regression", "--qa.n_best", "20", "--data.labels"])
    assert config == load_config(FinetuneConfig, ["--task.kind", "regression"])
    stored = to_dict(config)
    assert "qa" not in stored and "labels" not in stored["data"]
    older = stored | {"qa": {"n_best": 7}, "class_weights": [1.0, 5.0], "hard_negatives": 0}
    assert from_dict(FinetuneConfig, older) == config
    # A task of the user's own may read every option.
    words = f"--task.module {__file__} --qa.n_best 7"
    assert to_dict(load_config(FinetuneConfig, words.split()))["qa"]["n_best"] == 7


def test_help_shows_the_options_of_the_kind(capsys):
    for words, shown, hidden in [
        ("--task.kind qa", "--qa.n_best", "--tagging.crf"),
        ("--config recipe.yaml", "--tagging.crf", "--sentence.loss"),
        ("", "task.kind tagging or joint.", None),
    ]:
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            patch.chdir(folder)
            Path("recipe.yaml").write_text("task:\n  kind: tagging\n")
            show_help(FinetuneConfig, read_settings(words.split()), "program", FinetuneRunOptions, whole=True)
        text = capsys.readouterr().out
        assert shown in text and "--init_from" in text
        assert hidden is None or hidden not in text


SENTENCE, CRF = "--task.kind sentence --sentence.loss", "--task.kind tagging --tagging.crf true"


@pytest.mark.parametrize(
    ("words", "option", "where"),
    [
        ("--task.head_share 0.5", "task.head_share", "task.truncation head_tail"),
        ("--task.truncation tail --task.window_overlap 4", "task.window_overlap", "task.truncation windows"),
        ("--task.max_windows 4", "task.max_windows", "task.truncation windows"),
        (f"{SENTENCE} softmax --sentence.margin 2", "sentence.margin", "sentence.loss triplet"),
        (f"{SENTENCE} cosine --sentence.scale 5", "sentence.scale", "sentence.loss cosent, negatives, simcse"),
        (f"{SENTENCE} softmax --sentence.label_scale 5", "sentence.label_scale", "sentence.loss cosine, cosent"),
        (f"{SENTENCE} cosine --sentence.hidden_size 8", "sentence.hidden_size", "sentence.loss softmax"),
        (f"{SENTENCE} cosine --loss.label_smoothing 0.1", "loss.label_smoothing", "sentence.loss softmax"),
        (f"{SENTENCE} simcse --features.frozen_encoder true", "features.frozen_encoder", "sentence.loss softmax"),
        (f"{SENTENCE} cosine --sentence.pairs_from_classes true", "sentence.pairs_from_classes", "triplet"),
        (f"{SENTENCE} cosine --regularization.head_dropout 0.5", "regularization.head_dropout", "softmax"),
        (f"{CRF} --loss.label_smoothing 0.1", "loss.label_smoothing", "tagging.crf false"),
        (f"{CRF} --loss.focal_gamma 2", "loss.focal_gamma", "tagging.crf false"),
    ],
)  # fmt: skip
def test_an_option_exists_only_with_the_choice_that_uses_it(words, option, where):
    with pytest.raises(ValueError, match=rf"^command line: {option}: unknown option .*{where}$"):
        load_config(FinetuneConfig, words.split())


def test_a_former_option_is_read_with_its_default_from_a_stored_config_only(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("input:\n  mask_fraction: 0.0\n  span_max: 5\ntraining:\n  min_delta: 0.0\n")
    assert load_config(FinetuneConfig, ["--config", str(file)]) == load_config(FinetuneConfig, [])
    file.write_text("training:\n  min_delta: 0.1\n")
    for words in (["--config", str(file)], ["--training.min_delta", "0.0"]):
        with pytest.raises(ValueError, match=r": training.min_delta: no longer an option, as if it were 0.0; omit"):
            load_config(FinetuneConfig, words)


def test_class_weights_follow_from_the_training_records(tmp_path):
    with pytest.raises(ValueError, match="command line: class_weights: unknown"):
        load_config(FinetuneConfig, ["--class_weights", "1", "5"])
    config, start = configured(saved_model(tmp_path / "model"), tmp_path / "w", "--loss.class_weights balanced")
    once = FinetuneJob(config, SPLITS, [], start).config
    assert FinetuneJob(once, SPLITS, [], start).config == once and "class_weights" not in to_dict(once)
