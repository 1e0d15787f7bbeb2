"""TF1 checkpoints of google-research/bert: names and files out, every kind of checkpoint in."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from builders import content, words
from exported import SPECS, random_weights

from bert_jax.config import ModelSpec, TokenizerConfig
from bert_jax.interop.export_table import fit
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions, parameter_shapes
from bert_jax.interop.readers import read_weights
from bert_jax.interop.tf1.checkpoint import PREFIX, write_tf1

tf = pytest.importorskip("tensorflow", reason="the data extra brings TensorFlow")

VOCABULARY = content(words(96))
ELEVEN_KEYS = {
    "attention_probs_dropout_prob", "hidden_act", "hidden_dropout_prob", "hidden_size", "initializer_range",
    "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "type_vocab_size",
    "vocab_size",
}  # fmt: skip


def with_vocabulary(spec: ModelSpec, **settings) -> ModelBundle:
    tokenizer = TokenizerConfig(**settings)
    weights = random_weights(dataclasses.replace(spec, tokenizer=tokenizer))
    return dataclasses.replace(weights, tokenizer_content=VOCABULARY)


def published_names(layers: int) -> set[str]:
    """The variables of a pretraining checkpoint, spelled out."""
    names = {f"bert/embeddings/{table}_embeddings" for table in ("word", "token_type", "position")}
    names |= {f"bert/embeddings/LayerNorm/{leaf}" for leaf in ("gamma", "beta")}
    for i in range(layers):
        layer = f"bert/encoder/layer_{i}"
        for module in (
            "attention/self/query", "attention/self/key", "attention/self/value", "attention/output/dense",
            "intermediate/dense", "output/dense",
        ):  # fmt: skip
            names |= {f"{layer}/{module}/kernel", f"{layer}/{module}/bias"}
        for module in ("attention/output", "output"):
            names |= {f"{layer}/{module}/LayerNorm/gamma", f"{layer}/{module}/LayerNorm/beta"}
    names |= {"bert/pooler/dense/kernel", "bert/pooler/dense/bias", "cls/predictions/output_bias"}
    names |= {f"cls/predictions/transform/dense/{leaf}" for leaf in ("kernel", "bias")}
    names |= {f"cls/predictions/transform/LayerNorm/{leaf}" for leaf in ("gamma", "beta")}
    return names | {"cls/seq_relationship/output_weights", "cls/seq_relationship/output_bias"}


def save(prefix, arrays: dict[str, np.ndarray]) -> None:
    """A checkpoint as TensorFlow itself writes it."""
    names = list(arrays)
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=[tf.constant(arrays[name]) for name in names],
    )


def load(folder) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(folder / PREFIX))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder like Google's: nothing beside checkpoint, bert_config.json and vocab.txt."""
    folder = tmp_path_factory.mktemp("published")
    weights = with_vocabulary(SPECS["pretraining"])
    write_tf1(folder, weights)
    (folder / "bert_jax.json").unlink()
    return folder, weights


def variant(source, target, change=lambda arrays: arrays, config=None):
    """A copy of a folder with other variables or another bert_config.json."""
    target.mkdir(exist_ok=True)
    save(target / PREFIX, change(load(source)))
    said = json.loads((source / "bert_config.json").read_text())
    (target / "bert_config.json").write_text(json.dumps({**said, **(config or {})}))
    (target / "vocab.txt").write_bytes(VOCABULARY)
    return target


def without(*prefixes):
    return lambda arrays: {name: value for name, value in arrays.items() if not name.startswith(prefixes)}


def test_names_shapes_and_files_are_those_of_google_research_bert(published):
    folder, weights = published
    stored, model = load(folder), weights.spec.model
    assert set(stored) == published_names(model.num_layers)
    assert all(values.dtype == np.float32 for values in stored.values())
    kernel = weights.params["encoder/layer_1/feed_forward/intermediate/kernel"]
    assert kernel.shape == (model.hidden_size, model.intermediate_size)
    np.testing.assert_array_equal(stored["bert/encoder/layer_1/intermediate/dense/kernel"], kernel)
    np.testing.assert_array_equal(
        stored["cls/seq_relationship/output_weights"], weights.params["nsp_head/kernel"].T
    )
    config = json.loads((folder / "bert_config.json").read_text())
    assert set(config) == ELEVEN_KEYS and config["hidden_act"] == "gelu"
    assert (folder / "vocab.txt").read_bytes() == VOCABULARY


@pytest.mark.parametrize("name", SPECS)
def test_what_is_written_comes_back_bit_by_bit(name, tmp_path):
    try:
        weights, notes = fit(with_vocabulary(SPECS[name], lower_case=False), "tf1")
    except ValueError as error:
        assert "formats that support this model: " in str(error)
        return
    assert (
        bool(notes) == any(head in SPECS[name].heads.present() for head in ("token", "choice"))
        or "sentence" in name
    )
    write_tf1(tmp_path, weights)
    again = read_weights(tmp_path / PREFIX)
    assert again.spec == weights.spec and again.tokenizer_content == VOCABULARY
    assert again.params.keys() == parameter_shapes(weights.spec).keys()
    for key, values in weights.params.items():
        np.testing.assert_array_equal(values.view(np.uint32), again.params[key].view(np.uint32), err_msg=key)


def test_a_checkpoint_by_its_prefix_its_files_or_its_folder(published, tmp_path):
    folder, weights = published
    for path in (folder, folder / PREFIX, folder / f"{PREFIX}.index", folder / f"{PREFIX}.data-00000-of-00001"):
        again = read_weights(path)
        assert again.spec.model == dataclasses.replace(weights.spec.model, activation="gelu_tanh")
        assert again.spec.heads.present() == ("pooler", "mlm", "nsp")
    assert again.tokenizer_content == VOCABULARY and again.spec.tokenizer.file == "vocab.txt"
    assert any("published code" in note for note in again.notes)
    cased = read_weights(folder, ReadOptions(activation="gelu", lower_case=False))
    assert cased.spec.model.activation == "gelu" and not cased.spec.tokenizer.lower_case
    assert not any("published code" in note for note in cased.notes)
    double = variant(folder, tmp_path / "double")
    save(double / "model.ckpt-7", load(folder))
    with pytest.raises(ValueError, match=r"expected one checkpoint.*bert_model\.ckpt\.index, model\.ckpt-7\.index"):
        read_weights(double)
    assert read_weights(double / "model.ckpt-7").spec.heads.mlm


def test_slots_counters_and_averages_are_left_out(published, tmp_path):
    folder, weights = published

    def trained(arrays):
        extra = {"global_step": np.int64(7), "beta1_power": np.float32(0.9)}
        for name, values in arrays.items():
            extra |= {f"{name}/{slot}": np.zeros_like(values) for slot in ("adam_m", "adam_v", "lamb_m", "lamb_v")}
            extra[f"{name}/ExponentialMovingAverage"] = values + np.float32(1)
        return {**arrays, **extra}

    target = variant(folder, tmp_path / "trained", trained)
    plain, averaged = read_weights(target), read_weights(target, ReadOptions(ema=True))
    assert any("optimizer slots" in note for note in plain.notes)
    assert any("moving averages are ignored" in note for note in plain.notes)
    for name, values in weights.params.items():
        np.testing.assert_array_equal(plain.params[name], values)
        np.testing.assert_array_equal(averaged.params[name], values + np.float32(1))
    with pytest.raises(ValueError, match="no moving average"):
        read_weights(folder, ReadOptions(ema=True))


def test_variables_without_an_average_are_dropped_only_on_request(published, tmp_path):
    folder, _ = published

    def averaged(arrays):
        averages = {f"{name}/ExponentialMovingAverage": values for name, values in arrays.items()}
        return arrays | {
            name: values for name, values in averages.items() if not name.startswith(("bert/pooler", "cls"))
        }

    target = variant(folder, tmp_path / "averaged", averaged)
    with pytest.raises(ValueError, match=r"no moving average of .*bert/pooler"):
        read_weights(target, ReadOptions(ema=True))
    found = read_weights(target, ReadOptions(ema=True, allow_mismatch=True))
    assert not found.spec.heads.pooler and any("bert/pooler" in note for note in found.notes)


def test_heads_are_those_whose_variables_are_there(published, tmp_path):
    folder, _ = published
    bare = read_weights(variant(folder, tmp_path / "bare", without("cls/")))
    assert bare.spec.heads.present() == ("pooler",) and any("no output layers" in note for note in bare.notes)
    encoder = read_weights(variant(folder, tmp_path / "encoder", without("cls/", "bert/pooler")))
    assert encoder.spec.heads.present() == () and any(
        "the model has no pooled output" in note for note in encoder.notes
    )
    head = {"output_weights": np.eye(3, 32, dtype=np.float32), "output_bias": np.arange(3, dtype=np.float32)}
    classes = variant(folder, tmp_path / "classes", lambda arrays: {**without("cls/")(arrays), **head})
    plain = read_weights(classes)
    assert plain.spec.heads.sequence_labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert any("has no labels" in note for note in plain.notes)
    np.testing.assert_array_equal(plain.params["sequence_head/kernel"], head["output_weights"].T)
    named = read_weights(classes, ReadOptions(labels=("a", "b", "c")))
    assert named.spec.heads.sequence_labels == ("a", "b", "c") and "a, b, c" in named.notes[-1]
    with pytest.raises(ValueError, match=r"2 labels, .* 3 outputs"):
        read_weights(classes, ReadOptions(labels=("a", "b")))
    one = {"output_weights": np.eye(1, 32, dtype=np.float32), "output_bias": np.zeros(1, np.float32)}
    value = variant(folder, tmp_path / "value", lambda arrays: {**arrays, **one})
    assert read_weights(value).spec.heads.problem == "regression"
    squad = {
        "cls/squad/output_weights": head["output_weights"][:2],
        "cls/squad/output_bias": head["output_bias"][:2],
    }
    span = read_weights(variant(folder, tmp_path / "squad", lambda arrays: {**without("cls/")(arrays), **squad}))
    assert span.spec.heads.present() == ("pooler", "span")
    np.testing.assert_array_equal(span.params["span_head/kernel"], squad["cls/squad/output_weights"].T)
    orphan = variant(folder, tmp_path / "orphan", lambda arrays: {**without("bert/pooler", "cls/")(arrays), **head})
    with pytest.raises(ValueError, match=r"heads\.pooler: False .* true with heads\.sequence_labels"):
        read_weights(orphan)


def test_contradictions_stop_unless_told_otherwise(published, tmp_path):
    folder, weights = published
    other = variant(folder, tmp_path / "other", config={"num_hidden_layers": 1, "vocab_size": 99})
    with pytest.raises(ValueError, match=r"vocab_size is 99 .* 101 .*; num_layers is 1 .* 2"):
        read_weights(other)
    read = read_weights(other, ReadOptions(allow_mismatch=True))
    assert read.spec.model.num_layers == 2 and any("vocab_size" in note for note in read.notes)
    extra = variant(folder, tmp_path / "extra", lambda arrays: {**arrays, "loss/crf": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match="unexpected loss/crf"):
        read_weights(extra)
    assert any("loss/crf" in note for note in read_weights(extra, ReadOptions(allow_mismatch=True)).notes)
    gap = variant(folder, tmp_path / "gap", without("bert/encoder/layer_0/attention/self/key"))
    with pytest.raises(ValueError, match="missing bert/encoder/layer_0/attention/self/key/bias, bert/"):
        read_weights(gap)
    write_tf1_folder = variant(folder, tmp_path / "details")
    details = json.dumps(
        {"format": 1, **dataclasses.asdict(dataclasses.replace(weights.spec, model=SPECS["relu"].model))}
    )
    (write_tf1_folder / "bert_jax.json").write_text(details.replace('"hidden_size": 32', '"hidden_size": 64'))
    with pytest.raises(ValueError, match="describes a different model"):
        read_weights(write_tf1_folder)


def test_other_float_types_are_raised(published, tmp_path):
    folder, weights = published

    def change(arrays):
        arrays["bert/pooler/dense/kernel"] = arrays["bert/pooler/dense/kernel"].astype(ml_dtypes.bfloat16)
        return arrays

    read = read_weights(variant(folder, tmp_path / "mixed", change))
    expected = weights.params["pooler/kernel"].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(read.params["pooler/kernel"], expected)
    assert any("bfloat16" in note and "float32" in note for note in read.notes)
    whole = variant(
        folder, tmp_path / "whole", lambda a: {**a, "cls/predictions/output_bias": np.zeros(101, np.int32)}
    )
    with pytest.raises(ValueError, match=r"cls/predictions/output_bias .*int32"):
        read_weights(whole)


INDEX, DATA = f"{PREFIX}.index", f"{PREFIX}.data-00000-of-00001"


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


DAMAGE = {
    "no index": (lambda f: (f / INDEX).unlink(), "bert_model.ckpt.index: the file is missing"),
    "empty index": (lambda f: cut(f / INDEX, 0), "damaged or not a TF1 checkpoint"),
    "cut index": (lambda f: cut(f / INDEX, 500), "damaged or not a TF1 checkpoint"),
    "other index": (lambda f: (f / INDEX).write_bytes(b"x" * 4000), "damaged or not a TF1 checkpoint"),
    "no data": (lambda f: (f / DATA).unlink(), "data-00000-of-00001: missing"),
    "empty data": (lambda f: cut(f / DATA, 0), "larger than the files"),
    "cut data": (lambda f: cut(f / DATA, 60_000), "damaged or not a TF1 checkpoint"),
    "flipped bit": (
        lambda f: (f / DATA).write_bytes(bytes([(f / DATA).read_bytes()[0] ^ 1]) + (f / DATA).read_bytes()[1:]),
        "damaged or not a TF1 checkpoint",
    ),
    "no config": (lambda f: (f / "bert_config.json").unlink(), "bert_config.json: the file is missing"),
    "empty config": (lambda f: cut(f / "bert_config.json", 0), "bert_config.json: not JSON"),
    "list config": (lambda f: (f / "bert_config.json").write_text("[]"), "not a JSON object"),
    "long vocabulary": (
        lambda f: (f / "vocab.txt").write_bytes(VOCABULARY + b"one\ntwo\n"), "103 pieces, .*the model has 101"
    ),
    "broken details": (lambda f: (f / "bert_jax.json").write_bytes(b"\xff{"), "bert_jax.json: not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line(kind, published, tmp_path):
    folder = variant(published[0], tmp_path / "damaged")
    damage, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        read_weights(folder / PREFIX)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": "32"}, 'hidden_size is "32", not a whole number'),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"hidden_act": "swish"}, "hidden_act is 'swish'; allowed: gelu, relu"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000; allowed: -2147483648 to"),
        ({"intermediate_size": 49}, "intermediate_size is 49 in bert_config.json, but 48 in the variables"),
    ],
)
def test_a_config_that_cannot_be(config, message, published, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_weights(variant(published[0], tmp_path / "config", config=config))


def test_wrong_shapes_are_named(published, tmp_path):
    wrong = np.zeros((32, 31), np.float32)
    folder = variant(published[0], tmp_path / "wrong", lambda a: {**a, "bert/pooler/dense/kernel": wrong})
    with pytest.raises(ValueError, match=r"bert/pooler/dense/kernel has the shape \(32, 31\), expected \(32, 32\)"):
        read_weights(folder)
