"""Pruned models in Hugging Face folders: missing heads, and what no class of transformers computes."""

import json

import numpy as np
import pytest
from builders import drawn, tiny_model

from bert_jax.config import HeadsConfig, ModelSpec
from bert_jax.interop.export_table import fit
from bert_jax.interop.hf.families import FAMILIES
from bert_jax.interop.hf.write import write_hf
from bert_jax.interop.readers import read_weights


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "distilbert"])
def test_pruned_heads_are_written_and_read(tmp_path, family):
    """As transformers 4 reads them; the first layer is the smallest, from whose tensors sizes are read."""
    sizes = {"layer_heads": (1, 3), "num_attention_heads": 4, "intermediate_size": 12, "norm_epsilon": 1e-12}
    fixed = FAMILIES[family].fixed | ({"position_offset": 1} if family == "roberta" else {})
    model = tiny_model(40, **sizes | dict(fixed) | {"family": family})
    weights = drawn(ModelSpec(model=model, heads=HeadsConfig(mlm=True), family=family), 0.2)
    notes = write_hf(tmp_path, weights)
    assert any("load the folder with transformers 4" in note for note in notes)
    assert json.loads((tmp_path / "config.json").read_text())["pruned_heads"] == {"0": [1, 2, 3], "1": [3]}
    again = read_weights(tmp_path)
    assert again.params.keys() == weights.params.keys()
    assert all(np.array_equal(again.params[name], values) for name, values in weights.params.items())
    assert again.spec.model.layer_heads == (1, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_units": (5, 24)}, r"model\.layer_units: \(5, 24\) is not supported by hf for BERT"),
        ({"layer_heads": (1, 2), "family": "big_bird"}, r"model\.layer_heads: \(1, 2\) is not supported by hf"),
    ],
)
def test_a_pruned_model_that_no_class_computes_is_refused(changes, message):
    model = tiny_model(40, **changes)
    spec = ModelSpec(model=model, heads=HeadsConfig(), family=model.family)
    with pytest.raises(ValueError, match=message):
        fit(drawn(spec, 0.2), "hf")
