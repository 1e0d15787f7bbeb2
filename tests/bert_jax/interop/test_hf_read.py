"""Hugging Face folders in: outputs as transformers recorded them, and every oddity that such folders have."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from golden.hf_cases import CLASSES, inputs
from hf_folders import FIXTURES, drop, load, make_folder, rename, save

from bert_jax.interop.hf.config_json import CLASSES as READABLE
from bert_jax.interop.hf.config_json import hf_class, hf_config, model_parts
from bert_jax.interop.hf.names import hf_names
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.programs.serving import INPUTS, forward
from bert_jax.interop.readers import read_weights

WORDS = "bert.embeddings.word_embeddings.weight"


def read(folder: Path, **options) -> ModelBundle:
    return read_weights(folder, ReadOptions(**options))


def same_params(one: ModelBundle, other: ModelBundle) -> bool:
    return list(one.params) == list(other.params) and all(
        np.array_equal(one.params[name], other.params[name]) for name in one.params
    )


def said(weights: ModelBundle, *words: str) -> bool:
    return any(all(word in note for word in words) for note in weights.notes)


# The others have the same heads, or a classifier that differs in its input only.
QUICK = (
    "BertModel", "BertForPreTraining", "BertForSequenceClassification", "BertForQuestionAnswering",
    "RobertaForMaskedLM", "RobertaForSequenceClassification",
)  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CLASSES]
)
def test_outputs_are_those_of_transformers(tmp_path, name):
    """Names, transposes, heads, activation, epsilon, positions and segments, of every class."""
    weights = read(make_folder(tmp_path, name, vocabulary=None))
    batch = [np.asarray(inputs(name)[key], np.int32) for key in INPUTS]
    outputs = jax.jit(functools.partial(forward, weights.spec))(weights.params, *batch)
    with np.load(FIXTURES / "hf_classes.npz") as recorded:
        expected = {key.split("/")[1]: recorded[key] for key in recorded if key.startswith(f"{name}/")}
    assert set(outputs) == set(expected)
    for key, values in expected.items():
        np.testing.assert_allclose(np.asarray(outputs[key]), values, atol=1e-5, rtol=0, err_msg=key)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CLASSES)
def test_names_and_config_are_those_that_transformers_writes(tmp_path, name):
    weights = read(make_folder(tmp_path, name, vocabulary=None))
    assert hf_class(weights.spec) == name
    assert {entry.name for entry in hf_names(weights.spec).values()} == set(load(tmp_path))
    assert model_parts(hf_config(weights.spec, "float32"), "config.json").model == weights.spec.model
    assert set(READABLE) >= set(CLASSES)


@pytest.mark.parametrize("prefixed", [True, False])
def test_with_and_without_the_prefix(tmp_path, prefixed):
    """BertModel alone has none; the encoder of a larger class has one, and older files mix both."""
    plain = read(make_folder(tmp_path / "plain", "BertModel"))
    change = (lambda t: [t.update({f"bert.{name}": t.pop(name)}) for name in list(t)]) if prefixed else None
    assert same_params(plain, read(make_folder(tmp_path / "other", "BertModel", change=change)))
    headed = make_folder(tmp_path / "headed", change=rename("bert.", "") if not prefixed else None)
    assert same_params(read(headed), read(make_folder(tmp_path / "as_saved")))


def test_old_names_and_buffers(tmp_path):
    """DataParallel's prefix, gamma and beta, and buffers that count upwards."""

    def change(tensors):
        rename("LayerNorm.weight", "LayerNorm.gamma")(tensors)
        rename("LayerNorm.bias", "LayerNorm.beta")(tensors)
        tensors["bert.embeddings.position_ids"] = np.arange(20)[None]
        tensors["bert.embeddings.token_type_ids"] = np.zeros((1, 20), np.int64)
        for name in list(tensors):
            tensors[f"module.{name}"] = tensors.pop(name)

    weights = read(make_folder(tmp_path / "old", "BertForPreTraining", change=change))
    assert same_params(weights, read(make_folder(tmp_path / "new", "BertForPreTraining")))
    assert not said(weights, "unexpected")


def test_tied_output_layer_is_dropped(tmp_path):
    def change(tensors):
        tensors["cls.predictions.decoder.weight"] = tensors[WORDS]
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]

    weights = read(make_folder(tmp_path / "twice", change=change, config={"tie_word_embeddings": True}))
    assert same_params(weights, read(make_folder(tmp_path / "once")))


def test_an_untied_output_layer_is_a_parameter_of_its_own(tmp_path):
    """Where weights are not tied, transformers adds the bias of the decoder, and predictions.bias is unused."""

    def change(tensors):
        tensors["cls.predictions.decoder.weight"] = tensors[WORDS] + 1
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"] + 2

    weights = read(make_folder(tmp_path / "apart", change=change, config={"tie_word_embeddings": False}))
    tied = read(make_folder(tmp_path / "once"))
    (own,) = weights.params.keys() - tied.params.keys()
    assert own == "mlm_head/output_embeddings/embedding"
    assert np.array_equal(weights.params[own], tied.params["embeddings/word_embeddings/embedding"] + 1)
    assert np.array_equal(weights.params["mlm_head/output_bias"], tied.params["mlm_head/output_bias"] + 2)


def test_tied_copy_alone_is_enough(tmp_path):
    def change(tensors):
        rename(WORDS, "cls.predictions.decoder.weight")(tensors)
        rename("cls.predictions.bias", "cls.predictions.decoder.bias")(tensors)

    weights = read(make_folder(tmp_path / "copy", change=change))
    assert same_params(weights, read(make_folder(tmp_path / "once"))) and said(weights, "tied")


@pytest.mark.parametrize("name", ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"])
def test_a_tied_output_layer_that_differs_is_refused_by_name(tmp_path, name):
    def change(tensors):
        kept = tensors[WORDS if name.endswith("weight") else "cls.predictions.bias"].copy()
        kept.flat[-1] += 1e-6
        tensors[name] = kept

    with pytest.raises(ValueError, match=f"{name} differs from .*; set tie_word_embeddings to false"):
        read(make_folder(tmp_path, change=change))


def test_untied_config_without_the_output_layer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"missing cls\.predictions\.decoder\.weight"):
        read(make_folder(tmp_path, config={"tie_word_embeddings": False}))


def test_absent_pooler_is_left_out(tmp_path):
    weights = read(make_folder(tmp_path, "BertModel", change=drop("pooler.")))
    assert not weights.spec.heads.pooler and said(weights, "pooler", "omitted")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "prefix", "head"),
    [
        ("BertForSequenceClassification", "classifier.", "sequence"),
        ("BertForTokenClassification", "classifier.", "token"),
        ("BertForMultipleChoice", "classifier.", "choice"),
        ("BertForQuestionAnswering", "qa_outputs.", "span"),
        ("BertForMaskedLM", "cls.", "mlm"),
        ("RobertaForMaskedLM", "lm_head.", "mlm"),
    ],
)
def test_absent_head_is_said_and_never_made_up(tmp_path, name, prefix, head):
    weights = read(make_folder(tmp_path, name, change=drop(prefix)))
    assert head not in weights.spec.heads.present() and not any(f"{head}_head" in key for key in weights.params)
    assert said(weights, name, head, "omitted")


def test_heads_go_by_tensors_and_not_by_class(tmp_path):
    """bert-base-uncased says BertForMaskedLM and holds pooler and sentence-pair head too."""
    weights = read(make_folder(tmp_path, "BertForPreTraining", config={"architectures": ["BertForMaskedLM"]}))
    assert weights.spec.heads.present() == ("pooler", "mlm", "nsp")


def test_classifier_without_a_class_that_names_it(tmp_path):
    folder = make_folder(tmp_path / "a", "BertForSequenceClassification", config={"architectures": None})
    with pytest.raises(ValueError, match="architectures does not determine the kind"):
        read(folder)
    # without a pooler only the token head is possible
    weights = read(make_folder(tmp_path / "b", "BertForTokenClassification", config={"architectures": None}))
    assert weights.spec.heads.token_labels == ("zero", "one", "two")


def test_pooler_beside_a_roberta_sequence_head_is_left_out(tmp_path):
    def change(tensors):
        tensors["roberta.pooler.dense.weight"] = np.ones((16, 16), np.float32)
        tensors["roberta.pooler.dense.bias"] = np.ones(16, np.float32)

    weights = read(make_folder(tmp_path / "a", "RobertaForSequenceClassification", change=change))
    assert same_params(weights, read(make_folder(tmp_path / "b", "RobertaForSequenceClassification")))
    assert said(weights, "pooler is omitted")


def test_roberta_positions_and_head_activation(tmp_path):
    weights = read(make_folder(tmp_path / "a", "RobertaForMaskedLM", vocabulary=None))
    assert (weights.spec.model.position_offset, weights.spec.max_length) == (2, 18)
    model = read(make_folder(tmp_path / "b", "RobertaForMaskedLM", config={"hidden_act": "relu"})).spec.model
    assert (model.activation, model.mlm_activation) == ("relu", "gelu")  # in transformers the head has always gelu


class TestLabels:
    def make(self, folder, **config):
        return make_folder(folder, "BertForSequenceClassification", config=config)

    def test_order_is_by_number(self, tmp_path):
        def change(tensors):
            tensors["classifier.weight"] = np.ones((12, 16), np.float32)
            tensors["classifier.bias"] = np.ones(12, np.float32)

        names = {str(i): f"n{i}" for i in sorted(range(12), key=str)}
        folder = make_folder(tmp_path, "BertForTokenClassification", config={"id2label": names}, change=change)
        assert read(folder).spec.heads.token_labels == tuple(f"n{i}" for i in range(12))

    @pytest.mark.parametrize(
        ("stored", "ours"),
        [
            ("single_label_classification", "single_label"),
            ("multi_label_classification", "multi_label"),
            (None, "single_label"),
        ],
    )
    def test_problem_type(self, tmp_path, stored, ours):
        heads = read(self.make(tmp_path, problem_type=stored)).spec.heads
        assert (heads.problem, heads.sequence_labels) == (ours, ("zero", "one", "two"))

    def test_one_label_is_regression(self, tmp_path):
        heads = read(make_folder(tmp_path, "RobertaForSequenceClassification")).spec.heads
        assert (heads.problem, heads.sequence_labels) == ("regression", ("LABEL_0",))

    def test_regression_with_several_outputs_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="problem_type is regression, but the classifier has 3 outputs"):
            read(self.make(tmp_path, problem_type="regression"))

    def test_unknown_problem_type(self, tmp_path):
        with pytest.raises(ValueError, match=r"problem_type .*ranking.* allowed: single_label_classification"):
            read(self.make(tmp_path, problem_type="ranking"))

    def test_classifier_dropout(self, tmp_path):
        assert read(self.make(tmp_path / "a")).spec.heads.dropout == 0.4
        assert read(self.make(tmp_path / "b", classifier_dropout=None)).spec.heads.dropout is None

    def test_names_are_given(self, tmp_path):
        folder = self.make(tmp_path)
        assert read(folder, labels=("x", "y", "z")).spec.heads.sequence_labels == ("x", "y", "z")
        with pytest.raises(ValueError, match=r"2 labels, .* 3 outputs"):
            read(folder, labels=("x", "y"))
        with pytest.raises(ValueError, match="no sequence or token head"):
            read(make_folder(tmp_path / "mlm"), labels=("x", "y"))

    def test_none_are_said(self, tmp_path):
        weights = read(self.make(tmp_path, id2label=None, label2id=None))
        assert weights.spec.heads.sequence_labels == ("LABEL_0", "LABEL_1", "LABEL_2") and said(weights, "labels")

    @pytest.mark.parametrize(
        "table", [{"0": "a", "2": "b", "3": "c"}, {"a": "b"}, ["a", "b", "c"], {"0": "a", "00": "b"}]
    )
    def test_ids_that_are_no_ids(self, tmp_path, table):
        with pytest.raises(ValueError, match="id2label"):
            read(self.make(tmp_path, id2label=table))

    def test_count_contradicts_the_tensors(self, tmp_path):
        folder = self.make(tmp_path, id2label={"0": "a", "1": "b"})
        with pytest.raises(ValueError, match=r"number of labels is 2 in config\.json, but 3 in the tensors"):
            read(folder)
        weights = read(folder, allow_mismatch=True)
        assert weights.spec.heads.sequence_labels == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize(
    ("stored", "ours"),
    [("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu_fast", "gelu_tanh"),
     ("quick_gelu", "gelu_sigmoid"), ("relu", "relu")],
)  # fmt: skip
def test_hidden_act(tmp_path, stored, ours):
    assert read(make_folder(tmp_path, "BertModel", config={"hidden_act": stored})).spec.model.activation == ours


def test_what_is_not_said_has_the_default_of_transformers(tmp_path):
    weights = read(make_folder(tmp_path, "BertForMaskedLM", config={"layer_norm_eps": None, "hidden_act": None}))
    assert (weights.spec.model.norm_epsilon, weights.spec.model.activation) == (1e-12, "gelu")
    assert said(weights, "layer_norm_eps") and said(weights, "hidden_act")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_act", "mish", "allowed: gelu"), ("hidden_act", ["gelu"], "allowed: gelu"),
        ("position_embedding_type", "relative_key", 'supported: "absolute"'),
        ("is_decoder", True, "supported:"), ("add_cross_attention", True, "supported:"),
        ("auto_map", {"AutoModel": "modeling.Evil"}, "supported:"), ("model_type", "t5", "supported:"),
        ("model_type", "xlm-roberta", "architectures is"), ("model_type", 3, "supported:"),
        ("pruned_heads", {"0": [7]}, "heads (0 to "), ("pruned_heads", {"9": [0]}, "a map from layers (0 to "),
        ("pruned_heads", {"0": [0, 1, 2, 3]}, "one or more of which is left"), ("pruned_heads", [0], "a map from"),
        ("quantization_config", {"bits": 4}, "supported: folders without it"),
        ("architectures", ["BertGenerationDecoder"], "supported:"), ("architectures", "BertModel", "not a list"),
        ("architectures", ["RobertaForMaskedLM"], "with model_type bert"),
        ("hidden_size", "16", "not a whole number"), ("hidden_size", 10**30, "allowed: -2147483648 to"),
        ("hidden_size", True, "not a whole number"), ("num_attention_heads", 3, "divisor"),
        ("layer_norm_eps", "x", "not a number"), ("layer_norm_eps", float("inf"), "not a number"),
        ("layer_norm_eps", float("nan"), "not a number"), ("hidden_dropout_prob", 2, "0 to below 1"),
        ("vocab_size", None, "missing vocab_size"), ("num_attention_heads", None, "missing num_attention_heads"),
    ],
)  # fmt: skip
def test_another_function_is_refused_in_one_line(tmp_path, key, value, words):
    """``key`` and the supported list are named, and no tensor is looked at."""
    folder = make_folder(tmp_path, config={key: value})
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError) as error:
        read(folder)
    assert (
        words in str(error.value) and key.removesuffix("_prob") in str(error.value) and "\n" not in str(error.value)
    )
    assert "config.json" in str(error.value)


def test_family_of_an_old_config_is_that_of_its_class(tmp_path):
    assert read(make_folder(tmp_path / "a", config={"model_type": None})).spec.family == "bert"
    with pytest.raises(ValueError, match="neither model_type nor a known class"):
        read(make_folder(tmp_path / "b", config={"model_type": None, "architectures": ["T5Model"]}))


@pytest.mark.parametrize(
    ("dtype", "name"), [(np.float16, "float16"), (ml_dtypes.bfloat16, "bfloat16"), (np.float64, "float64")]
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_other_precisions_become_float32_and_are_said(tmp_path, dtype, name, key):
    def change(tensors):
        for tensor in list(tensors):
            tensors[tensor] = tensors[tensor].astype(dtype)

    weights = read(make_folder(tmp_path, change=change, config={"dtype": None, key: name}))
    stored = load(tmp_path)
    for canonical, entry in hf_names(weights.spec).items():
        values = stored[entry.name].T if entry.transpose else stored[entry.name]
        assert weights.params[canonical].dtype == np.float32
        np.testing.assert_array_equal(weights.params[canonical], values.astype(np.float32))
    assert said(weights, name, "to float32") and not said(weights, "states the dtype")


def test_stored_dtype_goes_before_the_described_one(tmp_path):
    weights = read(make_folder(tmp_path, config={"dtype": "float16"}))
    assert said(weights, "dtype float16", "float32")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("vocab_size", 41, "vocab_size is 41 in config.json, but 40 in the tensors"),
        ("hidden_size", 32, "hidden_size is 32 in config.json, but 16 in the tensors"),
        ("num_hidden_layers", 3, "num_layers is 3 in config.json, but 2 in the tensors"),
        ("num_hidden_layers", 1, "num_layers is 1 in config.json, but 2 in the tensors"),
        ("intermediate_size", 48, "intermediate_size is 48 in config.json, but 24 in the tensors"),
        ("max_position_embeddings", 512, "max_position_embeddings is 512 in config.json, but 20 in the tensors"),
        ("type_vocab_size", 1, "type_vocab_size is 1 in config.json, but 2 in the tensors"),
    ],
)
def test_contradictions_stop_unless_told_otherwise(tmp_path, key, value, words):
    folder = make_folder(tmp_path / "x", config={key: value})
    with pytest.raises(ValueError) as error:
        read(folder)
    assert words in str(error.value) and "--allow_mismatch" in str(error.value)
    weights = read(folder, allow_mismatch=True)
    assert said(weights, words, "the value of the tensors is used")
    assert dataclasses.replace(weights.spec, tokenizer=None) == dataclasses.replace(
        read(make_folder(tmp_path / "right")).spec, tokenizer=None
    )


def test_missing_and_left_over_are_both_listed(tmp_path):
    folder = make_folder(tmp_path, change=rename("layer.1.output.dense", "layer.1.output.rank"))
    with pytest.raises(ValueError) as error:
        read(folder)
    for name in (
        "missing bert.encoder.layer.1.output.dense.bias",
        "unexpected bert.encoder.layer.1.output.rank.bias",
    ):
        assert name in str(error.value)
    with pytest.raises(ValueError, match="missing"):
        read(folder, allow_mismatch=True)


def test_left_over_alone_is_dropped_when_told(tmp_path):
    def change(tensors):
        tensors["adapter.weight"] = np.ones((2, 2), np.float32)

    folder = make_folder(tmp_path, change=change)
    with pytest.raises(ValueError, match=r"unexpected adapter\.weight"):
        read(folder)
    assert said(read(folder, allow_mismatch=True), "unexpected and ignored", "adapter.weight")


def test_vocabulary_shorter_than_the_model_is_said_longer_is_refused(tmp_path):
    assert said(read(make_folder(tmp_path / "short", vocabulary=30)), "30 pieces", "40 word embeddings")
    assert not said(read(make_folder(tmp_path / "equal")), "40 word embeddings")
    with pytest.raises(ValueError, match="41 pieces"):
        read(make_folder(tmp_path / "long", vocabulary=41))


def test_shards_are_one_model(tmp_path):
    whole = read(make_folder(tmp_path / "whole"))
    folder = make_folder(tmp_path / "shards")
    tensors = load(folder)
    (folder / "model.safetensors").unlink()
    places = {}
    for i, part in enumerate((list(tensors)[:20], list(tensors)[20:])):
        save(folder, {name: tensors[name] for name in part})
        (folder / "model.safetensors").rename(folder / f"model-{i}.safetensors")
        places |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert same_params(whole, read(folder))
