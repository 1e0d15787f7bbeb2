"""Folders of sentence-transformers: both spellings, what is refused, and back."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from builders import drawn, tiny_model, words
from golden.family_tokenizer_cases import make_folder as family_case
from golden.tokenizer_cases import byte_pieces
from hf_folders import make_folder

from bert_jax.config import HeadsConfig, ModelSpec, SentenceConfig, SentenceModule, TokenizerConfig
from bert_jax.inference import loaded
from bert_jax.interop.export_table import fit
from bert_jax.interop.hf.config_json import cross_encoder_activation
from bert_jax.interop.hf.sentence_transformers import read_sentence_transformers, write_sentence_transformers
from bert_jax.interop.hf.write import write_hf
from bert_jax.interop.model_bundle import ReadOptions, parameter_shapes
from bert_jax.interop.readers import read_weights
from bert_jax.interop.tokenizers.folder_files import read_tokenizer_files
from bert_jax.tokenization import build_tokenizer
from bert_jax.tokenization.byte_bpe import byte_bpe_content

MODEL = tiny_model(40, hidden_size=8, intermediate_size=16, max_position_embeddings=32)
DENSE = SentenceModule(kind="dense", features=5, activation="tanh")
PLAIN = SentenceModule(kind="dense", features=4, bias=False)
NORMALIZE = SentenceModule(kind="normalize")
SENTENCE = SentenceConfig(
    pooling=("cls", "mean"),
    modules=(DENSE, PLAIN, NORMALIZE),
    prompts=(("query", "query: "), ("passage", "")),
    default_prompt="query",
    similarity="dot",
    include_prompt=False,
)
RELEASE_6 = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}


def make_weights(tmp_path, sentence=SENTENCE, heads=None, **tokenizer):
    """Random weights of a small sentence model."""
    spec = ModelSpec(
        model=MODEL,
        heads=heads or HeadsConfig(pooler=True),
        sentence=sentence,
        tokenizer=TokenizerConfig(max_length=tokenizer.pop("max_length", 20), **tokenizer),
    )
    return drawn(spec, 0.3, words(35))


@pytest.fixture
def weights(tmp_path):
    return make_weights(tmp_path)


@pytest.fixture
def folder(tmp_path, weights):
    target = tmp_path / "model"
    target.mkdir()
    write_sentence_transformers(target, weights)
    return target


ABSENT = object()


def change(file, **values):
    """Set keys of a JSON object; ABSENT takes one away."""
    said = json.loads(file.read_text()) if file.exists() else {}
    said = {key: value for key, value in {**said, **values}.items() if value is not ABSENT}
    file.write_text(json.dumps(said))


def change_modules(folder, edit):
    file = folder / "modules.json"
    modules = json.loads(file.read_text())
    edit(modules)
    file.write_text(json.dumps(modules))


def refused(folder, *words):
    """Reading stops in one line that holds every word."""
    with pytest.raises(ValueError) as caught:
        read_weights(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    "sentence",
    [
        SENTENCE,
        SentenceConfig(),
        SentenceConfig(pooling=("max",), modules=(NORMALIZE,)),
        SentenceConfig(pooling=("mean", "cls"), modules=(DENSE,)),  # no release before 6 can say this order
    ],
)
def test_a_model_comes_back_bitwise(tmp_path, sentence):
    weights = make_weights(tmp_path, sentence)
    target = tmp_path / "model"
    target.mkdir()
    write_sentence_transformers(target, weights)
    again = read_weights(target)
    assert again.spec == weights.spec
    assert again.params.keys() == parameter_shapes(weights.spec).keys()
    for name, values in weights.params.items():
        np.testing.assert_array_equal(again.params[name], values, err_msg=name)
    assert again.tokenizer_content == weights.tokenizer_content


def test_written_is_the_spelling_that_every_release_reads(folder):
    types = [module["type"].removeprefix("sentence_transformers.") for module in load(folder / "modules.json")]
    assert types == ["models.Transformer", "models.Pooling", "models.Dense", "models.Dense", "models.Normalize"]
    pooling = load(folder / "1_Pooling" / "config.json")
    assert pooling["word_embedding_dimension"] == 8 and pooling["include_prompt"] is False
    modes = [key for key, value in pooling.items() if value is True]
    assert modes == ["pooling_mode_cls_token", "pooling_mode_mean_tokens"]
    assert load(folder / "2_Dense" / "config.json") == {
        "in_features": 16, "out_features": 5, "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }  # fmt: skip
    assert load(folder / "sentence_bert_config.json") == {"max_seq_length": 20, "do_lower_case": False}
    assert load(folder / "config_sentence_transformers.json")["default_prompt_name"] == "query"


def load(file):
    return json.loads(file.read_text())


def test_release_6_spelling_says_the_same(folder, weights):
    def spell(modules):
        for module in modules:
            module["type"] = RELEASE_6[module["type"].rpartition(".")[2]]

    change_modules(folder, spell)
    pooling = {"embedding_dimension": 8, "pooling_mode": ["cls", "mean"], "include_prompt": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps(
            {
                "transformer_task": "feature-extraction",
                "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
                "module_output_name": "token_embeddings",
            }
        )
    )
    change(
        folder / "tokenizer_config.json", model_max_length=20, max_length=11, truncation_strategy="longest_first"
    )
    assert read_weights(folder).spec == weights.spec


def test_an_encoder_in_a_folder_of_its_own(folder, weights):
    inner = folder / "0_Transformer"
    inner.mkdir()
    for file in [path for path in folder.iterdir() if path.is_file()]:
        if file.name not in ("modules.json", "config_sentence_transformers.json"):
            file.rename(inner / file.name)
    change_modules(folder, lambda modules: modules[0].update(path="0_Transformer"))
    assert read_weights(folder).spec == weights.spec


def test_length_and_padding_never_come_from_tokenizer_json(folder):
    file = folder / "tokenizer.json"
    state = load(file) if file.exists() else pytest.fail("the writer gives a tokenizer.json")
    state["truncation"] = {"max_length": 7, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    state["padding"] = {
        "strategy": {"Fixed": 7}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "[PAD]",
    }  # fmt: skip
    file.write_text(json.dumps(state))
    change(folder / "tokenizer_config.json", model_max_length=31)
    assert read_weights(folder).spec.max_length == 20
    change(folder / "sentence_bert_config.json", max_seq_length=ABSENT)
    assert read_weights(folder).spec.max_length == 31


@pytest.mark.slow
def test_lower_case_of_the_older_length_file(tmp_path):
    weights = make_weights(tmp_path, lower_case=False)
    target = tmp_path / "cased"
    target.mkdir()
    write_sentence_transformers(target, weights)
    assert not read_weights(target).spec.tokenizer.lower_case
    change(target / "sentence_bert_config.json", do_lower_case=True)
    tokenizer = read_weights(target).spec.tokenizer
    assert tokenizer.lower_case and tokenizer.strip_accents is False


def test_task_heads_are_left_out_and_said(tmp_path):
    weights = make_weights(tmp_path, heads=HeadsConfig(pooler=True, mlm=True, sequence_labels=("a", "b")))
    weights, notes = fit(weights, "sentence-transformers")
    assert any("mlm (" in note and "sequence (" in note for note in notes)
    target = tmp_path / "model"
    target.mkdir()
    write_sentence_transformers(target, weights)
    assert read_weights(target).spec.heads == HeadsConfig(pooler=True)


def test_a_model_without_pooling_gets_the_mean_and_says_so(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    notes = write_sentence_transformers(target, make_weights(tmp_path, sentence=None))
    assert any("mean" in note for note in notes)
    assert read_weights(target).spec.sentence == SentenceConfig()


def test_without_vocabulary_nothing_is_written(tmp_path, weights):
    target = tmp_path / "model"
    target.mkdir()
    bare = dataclasses.replace(weights, tokenizer_content=None)
    with pytest.raises(ValueError, match="no vocabulary"):
        write_sentence_transformers(target, bare)
    assert not list(target.iterdir())


# ------------------------------------------------------------------ other functions than this one


@pytest.mark.parametrize(
    "kind",
    [
        "sentence_transformers.models.LSTM",
        "sentence_transformers.models.Dropout",
        "os.system",
        "my_package.Pooling",
        "sentence_transformers.models.Pooling.evil",
        "sentence_transformers.evil.Pooling",
        "custom_st.Transformer",
    ],
)
def test_foreign_modules_stop_by_name(folder, kind):
    change_modules(folder, lambda modules: modules[1].update(type=kind))
    refused(folder, kind, "supported: Transformer, Pooling, Dense, Normalize")


def test_nothing_of_a_foreign_class_is_imported(folder, tmp_path, monkeypatch):
    package = tmp_path / "packages"
    package.mkdir()
    (package / "evil_module.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(package))
    change_modules(folder, lambda modules: modules[2].update(type="evil_module.Dense"))
    change(folder / "2_Dense" / "config.json", activation_function="evil_module.run")
    refused(folder, "evil_module.Dense")
    change_modules(folder, lambda modules: modules[2].update(type="sentence_transformers.models.Dense"))
    refused(folder, "evil_module.run")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len_tokens"),
        ({"pooling_mode": "lasttoken"}, "lasttoken"),
        ({"pooling_mode": {"a": 1}}, "pooling_mode"),
        ({"pooling_mode": ["mean", 3]}, "3"),
        ({"word_embedding_dimension": 9}, "9"),
        ({"include_prompt": "no"}, "include_prompt"),
        ({"include_prompt": None}, "include_prompt"),
    ],
)
def test_other_poolings_stop_by_name(folder, changes, word):
    change(folder / "1_Pooling" / "config.json", **changes)
    refused(folder, "1_Pooling", word)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"use_residual": True}, "use_residual"),
        ({"module_input_name": "token_embeddings"}, "token_embeddings"),
        ({"activation_function": "torch.nn.modules.activation.Hardtanh"}, "Hardtanh"),
        ({"activation_function": None}, "activation_function"),
        ({"in_features": 8}, "8"),
        ({"out_features": 1 << 40}, str(1 << 40)),
        ({"out_features": "5"}, "5"),
        ({"out_features": 6}, "linear.weight"),
        ({"bias": 1}, "bias"),
    ],
)
def test_other_dense_layers_stop_by_name(folder, changes, word):
    change(folder / "2_Dense" / "config.json", **changes)
    refused(folder, "2_Dense", word)


def test_normalizing_tokens_stops(folder):
    change(folder / "4_Normalize" / "config.json", module_input_name="token_embeddings")
    refused(folder, "4_Normalize", "token_embeddings")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"transformer_task": "fill-mask"}, "transformer_task"),
        ({"modality_config": {"image": {}}}, "modality_config"),
        ({"query_expansion": {"strategy": "x"}}, "query_expansion"),
        ({"max_seq_length": -1}, "max_seq_length"),
        ({"max_seq_length": "20"}, "max_seq_length"),
    ],
)
def test_other_ways_through_the_encoder_stop(folder, changes, word):
    change(folder / "sentence_bert_config.json", **changes)
    refused(folder, "sentence_bert_config.json", word)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "SparseEncoder"}, "SparseEncoder"),
        ({"prompts": ["a"]}, "prompts"),
        ({"prompts": {"query": 3}}, "prompts"),
        ({"default_prompt_name": "other"}, "other"),
        ({"similarity_fn_name": "jaccard"}, "jaccard"),
    ],
)
def test_other_settings_stop(folder, changes, word):
    change(folder / "config_sentence_transformers.json", **changes)
    refused(folder, "config_sentence_transformers.json", word)


# ------------------------------------------------------------------ hostile and damaged folders


@pytest.mark.parametrize("place", ["../outside", "/outside", "1_Pooling/../../outside", "..\\outside", "C:outside"])
def test_a_path_out_of_the_folder(folder, place):
    outside = folder.parent / "outside"
    (folder / "1_Pooling").rename(outside)
    change_modules(folder, lambda modules: modules[1].update(path=place))
    refused(folder, "points outside the folder")


def test_an_absolute_path_to_a_module_that_exists(folder):
    outside = folder.parent / "outside"
    (folder / "1_Pooling").rename(outside)
    change_modules(folder, lambda modules: modules[1].update(path=str(outside)))
    refused(folder, "points outside the folder")


MODULES_AND_FILES = [
    "1_Pooling", "2_Dense", "4_Normalize", "modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES_AND_FILES)
def test_a_module_or_file_linked_out_of_the_folder(folder, name):
    outside = folder.parent / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    refused(folder, "outside the folder")


@pytest.mark.parametrize("name", ["modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"])
def test_a_giant_file_is_not_read(folder, name):
    with (folder / name).open("r+b") as file:
        file.truncate(1 << 36)  # a hole: it takes no room
    refused(folder, Path(name).name, "bytes")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"[1]", b"\xff\xfe", b"[" * 100_000, b'[{"type": 3, "path": ""}]']
)
def test_a_damaged_list_of_modules(folder, content):
    (folder / "modules.json").write_bytes(content)
    refused(folder, "modules.json")


def test_a_list_of_very_many_modules(folder):
    change_modules(folder, lambda modules: modules.extend([modules[-1]] * 100))
    refused(folder, "not a list of 1 to 32 modules")


@pytest.mark.parametrize("edit", [lambda m: m.pop(1), lambda m: m.reverse(), lambda m: m.append(m[1])])
def test_modules_in_another_order(folder, edit):
    change_modules(folder, edit)
    refused(folder, "modules.json")


def test_a_module_that_is_not_there(folder):
    (folder / "1_Pooling" / "config.json").unlink()
    refused(folder, "1_Pooling", "missing")


def test_an_old_normalize_has_no_folder(folder, weights):
    (folder / "4_Normalize" / "config.json").unlink()
    (folder / "4_Normalize").rmdir()
    assert read_sentence_transformers(folder, ReadOptions()).spec == weights.spec


# ------------------------------------------------------------------ facts that other kinds of tokenizers state


def byte_level(tmp_path):
    """A model whose tokenizer is a byte-level BPE, as RoBERTa's."""
    table, merges = byte_pieces()
    spec = ModelSpec(
        model=dataclasses.replace(MODEL, vocab_size=len(table)), heads=HeadsConfig(), sentence=SENTENCE,
        tokenizer=TokenizerConfig(file="tokenizer.json", lower_case=False, max_length=20),
    )  # fmt: skip
    return dataclasses.replace(drawn(spec, 0.3), tokenizer_content=byte_bpe_content(table, merges))


def unigram(tmp_path):
    """A model with the tokenizer of XLM-R."""
    family_case(tmp_path / "xlm", "xlm_roberta")
    config, content, _ = read_tokenizer_files(tmp_path / "xlm", ReadOptions())
    size = build_tokenizer(config, content, "xlm").vocab_size
    model = dataclasses.replace(MODEL, vocab_size=size)
    spec = ModelSpec(model=model, heads=HeadsConfig(), sentence=SENTENCE, tokenizer=config)
    return dataclasses.replace(drawn(spec, 0.3), tokenizer_content=content)


@pytest.mark.parametrize("make", [byte_level, unigram])
def test_every_kind_of_tokenizer_lower_cases_where_the_folder_says_so(tmp_path, make):
    weights = make(tmp_path)
    (folder := tmp_path / "folder").mkdir()
    write_sentence_transformers(folder, weights)
    text = "The QUICK Fox"
    plain = tokenizer_of(read_weights(folder))
    assert plain.encode(text) != plain.encode(text.lower())
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    read = read_weights(folder)
    assert tokenizer_of(read).encode(text) == plain.encode(text.lower())
    (again := tmp_path / "again").mkdir()
    write_sentence_transformers(again, read)
    assert json.loads((again / "sentence_bert_config.json").read_text())["do_lower_case"] is True
    assert tokenizer_of(read_weights(again)).fingerprint == tokenizer_of(read).fingerprint


def tokenizer_of(weights):
    return build_tokenizer(weights.spec.tokenizer, weights.tokenizer_content, "x")


def cross_encoder(folder, activation=None, labels=1):
    """A folder as ``CrossEncoder`` of release 6 saves it."""
    names = {str(i): f"LABEL_{i}" for i in range(labels)}

    def cut(tensors):
        for name in ("classifier.weight", "classifier.bias"):
            tensors[name] = np.resize(tensors[name], (labels, *tensors[name].shape[1:]))

    config = {"id2label": names, "label2id": None, "problem_type": None}
    make_folder(folder, "BertForSequenceClassification", config=config, change=cut)
    modules = [{"idx": 0, "name": "0", "path": "", "type": RELEASE_6["Transformer"]}]
    (folder / "modules.json").write_text(json.dumps(modules))
    form = {"text": {"method": "forward", "method_output_name": "logits"}}
    settings = {
        "transformer_task": "sequence-classification",
        "module_output_name": "scores",
        "modality_config": form,
    }
    change(folder / "sentence_bert_config.json", **settings)
    stated = {} if activation is None else {"activation_fn": activation}
    change(folder / "config_sentence_transformers.json", model_type="CrossEncoder", prompts={}, **stated)
    return folder


SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("activation", "labels", "expected"),
    [(SIGMOID, 1, "sigmoid"), (IDENTITY, 1, "identity"), (None, 1, "sigmoid"), (IDENTITY, 3, "identity")],
)
def test_a_cross_encoder_is_a_classifier_with_an_activation(tmp_path, activation, labels, expected):
    weights = read_weights(cross_encoder(tmp_path / "model", activation, labels))
    assert weights.spec.sentence is None and weights.spec.heads.activation == expected
    assert weights.spec.heads.problem == ("regression" if labels == 1 else "single_label")
    assert any("probabilities" in note for note in weights.notes) == (labels > 1)
    (out := tmp_path / "out").mkdir()
    write_hf(out, weights)
    stated = json.loads((out / "config.json").read_text())["sentence_transformers"]
    assert stated == {"activation_fn": activation or SIGMOID}
    assert read_weights(out).spec.heads == weights.spec.heads


def test_activations_of_older_folders(tmp_path):
    for key, value in (
        ("sbert_ce_default_activation_function", "torch.nn.modules.activation.Tanh"),
        ("sentence_transformers", {"activation_fn": "torch.nn.Tanh", "version": "4.1.0"}),
    ):
        folder = make_folder(tmp_path / key, "BertForSequenceClassification", config={key: value})
        assert read_weights(folder).spec.heads.activation == "tanh"
    change(folder / "config.json", sentence_transformers={"activation_fn": "my.Module"})
    refused(folder, "my.Module", "Sigmoid")


@pytest.mark.parametrize(("labels", "activation"), [(1, "sigmoid"), (3, "")])
def test_a_cross_encoder_without_a_function_has_a_sigmoid_for_one_label(labels, activation):
    config = {"sentence_transformers": {"version": "4.1.0"}}
    assert cross_encoder_activation(config, "config.json", labels) == activation
    assert cross_encoder_activation({}, "config.json", labels) == ""


def test_the_predicted_value_passes_through_the_activation(tmp_path):
    values = {}
    for activation in (SIGMOID, IDENTITY):
        model = loaded.load(cross_encoder(tmp_path / activation.rpartition(".")[2], activation))
        (values[activation],) = [one["value"] for one in model.predict([("w1 w2", "w3")])]
    assert values[SIGMOID] == pytest.approx(1 / (1 + np.exp(-values[IDENTITY])), abs=1e-6)
    assert values[SIGMOID] != values[IDENTITY]


def test_a_snapshot_in_the_cache_of_the_hub_is_read(tmp_path, folder):
    """Files are links into blobs, those of modules too."""
    cache = tmp_path / "hub" / "models--org--name"
    snapshot = cache / "snapshots" / "abc"
    (cache / "blobs").mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        place = snapshot / file.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        (cache / "blobs" / str(number)).write_bytes(file.read_bytes())
        up = "../" * (len(place.relative_to(cache).parts) - 1)
        place.symlink_to(f"{up}blobs/{number}")
    assert read_weights(snapshot).spec.sentence == SENTENCE
    (snapshot / "1_Pooling" / "config.json").unlink()
    (tmp_path / "other.json").write_text("{}")
    (snapshot / "1_Pooling" / "config.json").symlink_to(tmp_path / "other.json")
    refused(snapshot, "1_Pooling", "points outside the folder")
