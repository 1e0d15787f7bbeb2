"""The export of a run: its moving average, and the model card of every format."""

import dataclasses

import numpy as np
import pytest
from exported import SPECS, exported, source
from support import tiny_config, train_synthetic

from bert_jax.interop.export import export_model
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.model_card import model_card
from bert_jax.interop.readers import read_weights
from bert_jax.training.checkpoint import parameters


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run that keeps a moving average."""
    workdir = tmp_path_factory.mktemp("run") / "run"
    train_synthetic(tiny_config("--training.num_steps 3 --optimizer.ema_decay 0.5"), workdir)
    return workdir


@pytest.mark.slow
def test_the_moving_average_on_request(run, tmp_path, monkeypatch):
    params = {}
    for ema in (None, True, False):
        options = ReadOptions(ema=ema)
        export_model(run, tmp_path / str(ema), "npz", options=options, report=lambda line: None)
        params[ema] = read_weights(tmp_path / str(ema)).params["pooler/kernel"]
        card = (tmp_path / str(ema) / "README.md").read_text(encoding="utf-8")
        assert ("moving average of the parameters" in card) == (ema is not False)
    np.testing.assert_array_equal(params[None], params[True])
    assert not np.array_equal(params[True], params[False])

    read_meta = parameters.read_meta

    def without_average(folder):
        meta = read_meta(folder)
        del meta["digests"]["ema"]
        return meta

    monkeypatch.setattr(parameters, "read_meta", without_average)
    with pytest.raises(ValueError, match=r"optimizer\.ema_decay was 0"):
        export_model(run, tmp_path / "none", "npz", options=ReadOptions(ema=True))
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.parametrize("format", ["hf", "tf1", "npz"])
def test_the_card_says_data_config_metrics_and_how_to_load(format, run, tmp_path):
    if format == "tf1":
        pytest.importorskip("tensorflow", reason="the data extra brings TensorFlow")
    said = []
    export_model(run, tmp_path / "target", format, report=said.append)
    assert any("bitwise equal" in line for line in said)
    card = (tmp_path / "target/README.md").read_text(encoding="utf-8")
    for part in (
        "## How to load it", "optimizer steps: 3", "0.15 of the tokens masked by token", "| mlm_loss |",
        "exact GELU", "0 = the second text follows the first", '"hidden_size": 32',
    ):  # fmt: skip
        assert part in card, part
    loaded = {"hf": "BertForPreTraining.from_pretrained", "tf1": "tf.train.load_checkpoint", "npz": "np.load"}
    assert loaded[format] in card
    assert (tmp_path / "target/vocab.txt").read_bytes() == (run.parent / "vocab.txt").read_bytes()


def test_labels_and_their_meaning_stand_in_the_card(tmp_path):
    source(tmp_path / "source", SPECS["sequence"], tokenizer=True)
    exported(tmp_path, "hf")
    card = (tmp_path / "target/README.md").read_text(encoding="utf-8")
    assert "classes (softmax over the classes): 0 = no, 1 = yes, 2 = maybe" in card
    assert "pipeline_tag: text-classification" in card and "BertForSequenceClassification.from_pretrained" in card


def test_outputs_are_those_of_the_network():
    def outputs(**changes):
        spec = SPECS["plain"]
        heads = dataclasses.replace(spec.heads, pooler=True, mlm=True)
        spec = dataclasses.replace(spec, heads=heads, model=dataclasses.replace(spec.model, **changes))
        return model_card(ModelBundle(spec=spec, params={}), "npz", "float32", None, []).split("## Outputs")[1]

    assert "pooled output: tanh(dense(first token))" in outputs()
    assert "masked language model: logits" in outputs()
    text = outputs(attention="causal", pooling="last", pooler_layer=("none",))
    assert "pooled output: last token" in text and "dense" not in text and "next token: logits" in text
    assert "pooled output: gelu(dense(mean of the tokens))" in outputs(pooling="mean", pooler_layer=("gelu",))


@pytest.mark.parametrize(
    ("family", "name", "extra"),
    [("bert", "BertModel", ", add_pooling_layer=False"), ("distilbert", "DistilBertModel", "")],
)
def test_only_a_class_with_a_pooler_is_loaded_without_it(family, name, extra):
    weights = ModelBundle(spec=dataclasses.replace(SPECS["plain"], family=family), params={})
    assert f'{name}.from_pretrained("DIR"{extra})' in model_card(weights, "hf", "float32", name, [])


@pytest.mark.parametrize(
    ("name", "spec"), [("AutoModel", "plain"), ("AutoModelForSequenceClassification", "sequence")]
)
def test_a_family_that_transformers_lacks_is_loaded_with_its_authors_code(name, spec):
    weights = ModelBundle(spec=dataclasses.replace(SPECS[spec], family="neobert"), params={})
    card = model_card(weights, "hf", "float32", "NeoBERT", [])
    assert f'{name}.from_pretrained("DIR", trust_remote_code=True)' in card and f"AutoTokenizer, {name}\n" in card
    card = model_card(weights, "sentence-transformers", "float32", None, [])
    assert 'SentenceTransformer("DIR", trust_remote_code=True)' in card


def test_the_metrics_are_those_before_the_model_was_made_smaller():
    origin = {"metrics": {"step": 9, "accuracy": 0.75}}
    found = {}
    for name, changes in (("whole", {}), ("small", {"pruned": "2 of 4 heads", "pieces": "20 of 40 pieces"})):
        bundle = ModelBundle(spec=SPECS["sequence"], params={}, origin=origin | changes)
        found[name] = model_card(bundle, "npz", "float32", None, [])
    assert "On held-out data at step 9:\n\n| | |\n|---|---|\n| accuracy | 0.75 |" in found["whole"]
    assert "after training" not in found["whole"]
    assert "On held-out data at step 9, before the model was pruned and trimmed:\n\n| | |" in found["small"]
    assert "- after training, pruned: 2 of 4 heads\n- after training, trimmed: 20 of 40 pieces" in found["small"]


@pytest.mark.parametrize("format", ["onnx", "stablehlo"])
def test_the_card_of_a_program_lists_the_outputs_that_it_gives(format):
    weights = ModelBundle(spec=SPECS["sequence"], params={})
    card = model_card(weights, format, "float32", None, [])
    outputs = card.split("## Outputs")[1].split("##")[0].strip()
    assert outputs == "- `logits`: classes (softmax over the classes): 0 = no, 1 = yes, 2 = maybe"
    assert "- `last_hidden_state`: one vector per token" in model_card(weights, "npz", "float32", None, [])
