"""configs/models: every named model loads, is what its family's folders hold, and has the published size."""

import json
import math
import re

import pytest
from command import REPOSITORY
from hf_folders import FIXTURES

from bert_jax.config import HeadsConfig, ModelSpec, PretrainConfig, load_config
from bert_jax.interop.hf.config_json import unsupported
from bert_jax.interop.hf.families import FAMILIES
from bert_jax.interop.model_bundle import parameter_shapes

MODELS = sorted((REPOSITORY / "configs" / "models").glob("*.yaml"))
# Class and number of parameters of transformers 5.23 (studies/families/named_models.py).
COUNTS = json.loads((FIXTURES / "families" / "model_counts.json").read_text())


# To trace the others takes up to a second each.
QUICK = ("albert_base", "bert_tiny", "deberta_v3_xsmall", "distilbert_base", "electra_small_generator", "ettin_17m")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow) for path in MODELS],
)
def test_a_named_model_has_the_size_that_transformers_counts(path):
    kind, count = COUNTS[path.stem]
    assert re.search(r"Counted as (\w+)", path.read_text())[1] == kind
    model = load_config(PretrainConfig, ["--config", str(path), "--data.next_sentence", "none"]).model
    heads = HeadsConfig(**dict.fromkeys(FAMILIES[model.family].classes[kind], True))
    spec = ModelSpec(model=model, heads=heads, family=model.family)
    assert sum(map(math.prod, parameter_shapes(spec).values())) == count
    assert not unsupported(spec, "hf")


def test_published_counts():
    published = {"modernbert_base": 149_655_232, "modernbert_large": 395_881_664, "bert_base": 110_106_428}
    assert {name: COUNTS[name][1] for name in published} == published
    assert COUNTS.keys() == {path.stem for path in MODELS}
