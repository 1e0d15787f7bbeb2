"""The export of a run: its moving average, and the model card of every format."""

import dataclasses
import sys

import numpy as np
import pytest
from exported import SPECS, exported, source
from support import tiny_config, train_synthetic

from bert_jax.commands.main import main
from bert_jax.config import SentenceConfig, SentenceModule, TokenizerConfig
from bert_jax.interop.export import export_model
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.model_card import Publication, model_card
from bert_jax.interop.readers import read_weights
from bert_jax.tokenization.byte_bpe import byte_bpe_content
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


def test_the_card_of_a_published_model():
    facts = Publication(("en", "zh"), "apache-2.0", "me/mine")
    weights = ModelBundle(spec=SPECS["sentence"], params={}, origin={"recipe": {"a": 1}})
    card = model_card(weights, "sentence-transformers", "float32", None, ["a note"], facts, has_programs=True)
    assert card.startswith("---\nlanguage:\n- en\n- zh\nlicense: apache-2.0\nlibrary_name: sentence-transformers\n")
    assert "tags:\n- bert\n- onnx\n- transformers.js\n---" in card
    assert 'SentenceTransformer("me/mine")' in card and 'bert_jax.load("me/mine")' in card and "DIR" not in card
    assert 'pipeline("feature-extraction", "me/mine", { dtype: "q8" })' in card
    assert 'run("a text", { pooling: "mean", normalize: true })' in card
    # The files' details and the config come last, folded.
    assert card.index("## Metrics") < card.index("<details><summary>Notes on the files</summary>\n\n- a note")
    assert card.rstrip().endswith("</details>") and card.count("<details>") == 2
    card = model_card(dataclasses.replace(weights, spec=SPECS["mlm"]), "hf", "float32", "BertForMaskedLM", [])
    assert "language" not in card.split("---")[1] and "license" not in card.split("---")[1]
    assert 'outputs = model(**tokenizer("a text", return_tensors="pt"))' in card


def test_the_example_in_javascript_fits_the_model():
    def example(spec, content=None):
        weights = ModelBundle(spec=spec, params={}, tokenizer_content=content)
        return model_card(weights, "hf", "float32", "AnyModel", [], has_programs=True).partition("In JavaScript")[2]

    rules = TokenizerConfig(file="tokenizer.json", lower_case=False)
    content = byte_bpe_content(
        {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])}, []
    )
    assert 'run("a <mask> text")' in example(dataclasses.replace(SPECS["roberta"], tokenizer=rules), content)
    assert 'run("a [MASK] text")' in example(SPECS["mlm"])
    assert 'pooling: "cls"' in example(_pooled("cls"))
    dense = (SentenceModule(kind="dense", features=8),)
    for spec in (_pooled("max"), _pooled("mean", "max"), _pooled("mean", modules=dense), SPECS["choice"]):
        assert not example(spec)


def _pooled(*pooling, modules=()):
    return dataclasses.replace(SPECS["plain"], sentence=SentenceConfig(pooling=pooling, modules=modules))


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("language", "English", "--language: 'English' is not allowed; allowed: codes of ISO 639, as en,zh"),
        ("license", "Apache 2", "--license: 'Apache 2' is not allowed; allowed: identifiers, as apache-2.0"),
        ("push", "mine", "--push: 'mine' is not allowed; allowed: OWNER/NAME"),
    ],
)
def test_facts_of_a_card_that_the_hub_refuses(option, value, problem, tmp_path, capsys):
    words = ["export", "--model", "none", "--to", str(tmp_path / "out"), "--format", "hf", f"--{option}", value]
    assert main(words) == 2
    assert problem in capsys.readouterr().err


def test_an_export_is_uploaded(tmp_path, monkeypatch, capsys):
    import huggingface_hub

    asked = []

    class Api:
        def create_repo(self, name, exist_ok):
            if name == "other/one":
                raise huggingface_hub.errors.LocalTokenNotFoundError("Token is required.\nMore lines")
            asked.append((name, exist_ok))
            return f"https://hub/{name}"

        def upload_folder(self, repo_id, folder_path):
            asked.append((repo_id, sorted(file.name for file in folder_path.iterdir())))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    source(tmp_path / "source", SPECS["mlm"])
    words = ["export", "--model", str(tmp_path / "source"), "--format", "npz", "--no_verify"]
    assert main([*words, "--to", str(tmp_path / "out"), "--push", "me/mine", "--language", "en"]) == 0
    assert "uploaded to https://hub/me/mine" in capsys.readouterr().out
    assert asked == [("me/mine", True), ("me/mine", ["README.md", "dtypes.json", "model.json", "weights.npz"])]
    assert 'bert_jax.load("me/mine")' in (tmp_path / "out" / "README.md").read_text()
    assert main([*words, "--to", str(tmp_path / "kept"), "--push", "other/one"]) == 2
    said = capsys.readouterr().err
    assert "--push other/one: Token is required; " in said and "is complete; hf auth login, then: hf upload" in said
    assert (tmp_path / "kept" / "README.md").is_file()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main([*words, "--to", str(tmp_path / "third"), "--push", "me/mine"]) == 2
    assert "--push me/mine: pip install huggingface_hub" in capsys.readouterr().err
