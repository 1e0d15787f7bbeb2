"""``--init_layers``: a run starts from chosen layers of ``--init_from``."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from builders import content, drawn, tiny_model, words

from bert_jax.config import HeadsConfig, ModelSpec, PretrainConfig, TokenizerConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import build_config, read_settings
from bert_jax.contrib.surgery.run_options import ChangeOptions
from bert_jax.inference.loaded import prepare
from bert_jax.interop.saved_model import write_saved
from bert_jax.start.plan import plan_start


def save(folder, **changes: Any):
    model = tiny_model(40, num_layers=4, **changes)
    spec = ModelSpec(model=model, heads=HeadsConfig(mlm=True, pooler=True), tokenizer=TokenizerConfig())
    bundle = dataclasses.replace(drawn(spec, 0.2), tokenizer_content=content(words(20)))
    write_saved(folder, bundle)
    return bundle


def start(tmp_path, layers, config_type=FinetuneConfig, *given):
    options = ChangeOptions(init_from=str(tmp_path / "source"), init_layers=layers)
    return plan_start(config_type, options, tmp_path / "run", read_settings(list(given)).all)


def hidden_states(bundle):
    ids = np.random.default_rng(0).integers(5, 25, (3, 9))
    return prepare(bundle).forward({"input_ids": ids}, hidden_states=True)["hidden_states"]


@pytest.mark.slow
@pytest.mark.parametrize("config_type", [FinetuneConfig, PretrainConfig])
def test_the_first_layers_compute_what_they_did(tmp_path, config_type):
    whole = save(tmp_path / "source")
    given = ["--task.max_length", "64"]
    if config_type is PretrainConfig:
        given = ["--data.shards", str(tmp_path / "shards"), "--data.seq_length", "64"]
    found = start(tmp_path, (0, 1), config_type, *given)
    assert "layers 0 1 of 4" in found.messages
    np.testing.assert_allclose(hidden_states(found.weights), hidden_states(whole)[:3], rtol=0, atol=1e-6)
    assert build_config(config_type, [*read_settings(given).all, *found.settings]).model.num_layers == 2


def test_layers_are_taken_in_order_and_may_repeat(tmp_path):
    whole = save(tmp_path / "source").params
    params = start(tmp_path, (3, 1, 1)).weights.params
    for new, old in enumerate((3, 1, 1)):
        own = {name: array for name, array in params.items() if name.startswith(f"encoder/layer_{new}/")}
        assert len(own) == 16
        for name, array in own.items():
            assert np.array_equal(array, whole[name.replace(f"layer_{new}", f"layer_{old}")])
    assert not any("layer_3" in name for name in params)
    others = [name for name in params if not name.startswith("encoder/layer_")]
    assert all(np.array_equal(params[name], whole[name]) for name in others) and "mlm_head/output_bias" in others


@pytest.mark.slow
def test_each_layer_keeps_its_window(tmp_path):
    save(tmp_path / "source", attention_windows=(0, 4, 8))
    assert start(tmp_path, (3, 2)).weights.spec.model.layer_windows == (0, 8)


@pytest.mark.slow
def test_each_layer_of_a_pruned_model_keeps_its_size(tmp_path):
    whole = save(tmp_path / "source", layer_heads=(1, 2, 1, 2), layer_units=(5, 6, 7, 8))
    found = start(tmp_path, (1, 0, 3))
    model = build_config(FinetuneConfig, [*read_settings(["--task.max_length", "64"]).all, *found.settings]).model
    assert (model.layer_heads, model.layer_units) == ((2, 1, 2), (6, 5, 8))
    name = "encoder/layer_{}/feed_forward/output/kernel"
    assert np.array_equal(found.weights.params[name.format(2)], whole.params[name.format(3)])


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("changes", "layers", "message"),
    [
        ({}, (0, 4), "0 4 is not allowed; allowed: layers from 0 to 3"),
        ({}, (-1,), "-1 is not allowed; allowed: layers from 0 to 3"),
        ({"shared_layers": True}, (0,), "0 is not allowed with a model whose layers are one; omit --init_layers"),
        (
            {"norm_position": "pre_skip_first"}, (1, 0),
            "1 0 is not allowed; allowed: layer 0 first, and only there, since it has no LayerNorm before it",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, changes, layers, message):
    save(tmp_path / "source", **changes)
    with pytest.raises(ValueError, match=f"^--init_layers: {message}$"):
        start(tmp_path, layers)


def test_it_needs_a_model(tmp_path):
    with pytest.raises(ValueError, match=r"^--init_layers: requires --init_from, which names the model to change$"):
        plan_start(FinetuneConfig, ChangeOptions(init_layers=(0,)), tmp_path / "run", [])
