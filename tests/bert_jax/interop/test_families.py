"""Hugging Face folders of every family: outputs, gradients, names and config as transformers recorded them."""

import collections
import dataclasses
import hashlib
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import content, words
from drawn_families import digest, drawn_models
from family_folders import close, features, make_folder, read, recorded, run, told_of
from golden.family_cases import CASES, classes, gradient_inputs, inputs, values
from hf_folders import FIXTURES

from bert_jax.config import HeadsConfig, TokenizerConfig
from bert_jax.config.architecture import FamilyName
from bert_jax.interop.hf.config_json import hf_class, hf_config, model_parts
from bert_jax.interop.hf.families import FAMILIES
from bert_jax.interop.hf.names import hf_names
from bert_jax.interop.hf.write import write_hf
from bert_jax.interop.model_bundle import parameter_shapes
from bert_jax.interop.programs.onnx_graph import check_onnx, write_onnx
from bert_jax.interop.programs.serving import forward, output_names
from bert_jax.interop.programs.stablehlo import check_stablehlo, write_stablehlo
from bert_jax.interop.stored_model import stored_array
from bert_jax.io.safetensors_file import read_header, read_values
from bert_jax.model.canonical import canonical_shapes

REPOSITORY = Path(__file__).resolve().parents[3]
READ = FIXTURES / "families" / "read.json"
ALL = [(case, name) for case in CASES for name in classes(case)]
# One class for each layer, output layer or mask that another network does not have. BERT's and RoBERTa's are in
# test_hf_read.py, ModernBERT's in the test of gradients, BigBird's in test_family_classes.py.
NETWORKS = [
    ("albert", "AlbertForPreTraining"), ("electra", "ElectraForPreTraining"), ("mpnet_untied", "MPNetForMaskedLM"),
    ("deberta-v2", "DebertaV2ForMaskedLM"), ("gpt2", "GPT2ForSequenceClassification"),
    ("openai-gpt", "OpenAIGPTLMHeadModel"), ("nomic_bert", "NomicBertForMaskedLM"),
    ("neobert", "NeoBERTForSequenceClassification"), ("longformer", "LongformerForQuestionAnswering"),
    ("longformer_untied", "LongformerForMaskedLM"),
]  # fmt: skip


def compare_outputs(case, name, outputs, side):
    _, arrays = recorded(case, name)
    expected = {key.partition("/")[2]: array for key, array in arrays.items() if key.startswith(f"{side}/")}
    mask = inputs(case, side == "left")["attention_mask"]
    assert set(outputs) == set(expected)
    for key, values_ in expected.items():
        real = mask.astype(bool) if values_.shape[:2] == mask.shape else slice(None)
        close(np.asarray(outputs[key]).reshape(values_.shape)[real], values_[real], f"{side} {key}")


def sides(case, name):
    _, arrays = recorded(case, name)
    return [side for side in ("right", "left") if any(key.startswith(f"{side}/") for key in arrays)]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), NETWORKS)
def test_outputs_are_those_of_transformers(tmp_path, case, name):
    weights, padded = read(make_folder(tmp_path, case, name)), sides(case, name)
    assert padded
    for side, outputs in zip(padded, run(weights, *(inputs(case, s == "left") for s in padded)), strict=True):
        compare_outputs(case, name, outputs, side)


def joined(specs):
    """A model with all heads of ``specs``, whose encoders are equal."""
    heads = [spec.heads for spec in specs]
    held = {
        field.name: max(getattr(one, field.name) for one in heads)
        for field in dataclasses.fields(heads[0])
        if field.name != "dropout"
    }
    return dataclasses.replace(specs[0], heads=HeadsConfig(**held))


def apart(spec):
    """What the heads change in layers that others read too."""
    model, heads = spec.model, spec.heads
    of_pooler = bool(heads.sequence_labels) and len(model.pooler_layer) > 1
    return of_pooler, bool(model.global_tokens) and (heads.sequence_labels, heads.span, heads.choice)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.startswith("modernbert") else [pytest.mark.slow]) for case in CASES],
)
def test_every_class_has_outputs_and_gradients_of_transformers(tmp_path, monkeypatch, case):
    """Classes whose heads do not change what the others compute are one program."""
    groups = collections.defaultdict(list)
    for name in classes(case):
        weights = read(make_folder(tmp_path / name, case, name))
        groups[apart(weights.spec)].append((name, weights))
    batch = gradient_inputs(case)
    mask = np.float32(batch["attention_mask"])
    for group in groups.values():
        spec = joined([weights.spec for _, weights in group])
        fields = {field: field for _, weights in group for field in output_names(weights.spec).values()}
        monkeypatch.setattr("bert_jax.interop.programs.serving.output_names", lambda _, fields=fields: fields)

        def loss(params, chosen, arrays, more, spec=spec):
            outputs, total = forward(spec, params, *arrays, more=more), 0
            for field, value in outputs.items():
                real = mask.reshape(*mask.shape, *[1] * (value.ndim - 2)) if value.shape[:2] == mask.shape else 1
                total += chosen[field] * jnp.mean(jnp.square(value * real))
            return total, outputs

        program = jax.jit(jax.grad(loss, has_aux=True))
        zeros = {key: np.zeros(shape, np.float32) for key, shape in parameter_shapes(spec).items()}
        for name, weights in group:
            params, names = zeros | weights.params, output_names(weights.spec)
            chosen = {field: np.float32(field in names.values()) for field in fields}
            for side in sides(case, name):
                _, outputs = program(params, chosen, *features(inputs(case, side == "left")))
                compare_outputs(case, name, {key: outputs[field] for key, field in names.items()}, side)
            gradients, _ = program(params, chosen, *features(batch))
            compare_gradients(case, name, weights.spec, gradients)


def compare_gradients(case, name, spec, gradients):
    told, arrays = recorded(case, name)
    found, names = {}, hf_names(spec)
    for stored in {entry.name for entry in names.values()}:
        parts = [(entry, np.asarray(gradients[ours])) for ours, entry in names.items() if entry.name == stored]
        found[stored] = stored_array(parts)
    # torch lists a tied tensor once, under either name.
    # torch has no gradients for the projections of global tokens where there are none.
    unused = {key for key in found if "_global." in key and key not in told["gradients"]}
    assert not any(np.any(found.pop(key)) for key in unused)
    tied = {copy: names[ours].name for copy, ours in FAMILIES[spec.family].tied.items() if ours in names}
    current = {key: FAMILIES[spec.family].rename(key) for key in told["gradients"]}
    place = {key: name if name in found else tied[name] for key, name in current.items()}
    assert set(found) == set(place.values())
    largest = max(1, arrays["gradients"][:, 0].max())
    for key, (norm, product) in zip(told["gradients"], arrays["gradients"], strict=True):
        gradient = np.float64(found[place[key]])
        probe = np.float64(values(f"probe {key}", gradient.shape))
        assert abs(np.linalg.norm(gradient) - norm) <= 2e-5 * largest, key
        assert abs((gradient * probe).sum() - product) <= 2e-4 * largest, key


def differing(config):
    """Fields of a dataclass that have another value than the default."""
    pairs = zip(dataclasses.fields(config), dataclasses.astuple(config), strict=True)
    return {field.name: value for field, value in pairs if value != getattr(type(config)(), field.name)}


def short_digest(*values_):
    return hashlib.sha256(b"\0".join(values_)).hexdigest()[:16]


def same_as_recorded(case, name, weights):
    """UPDATE_GOLDEN=1 with -n 0 writes what is read; the slow tests must pass then."""
    spec, arrays = weights.spec, sorted(weights.params.items())
    network = json.dumps([differing(spec.model), differing(spec.heads)], sort_keys=True)
    config = json.dumps(hf_config(spec, "float32"), sort_keys=True)
    found = {
        "network": short_digest(network.encode()),
        "parameters": short_digest(*(f"{key} {array.shape}".encode() + array.tobytes() for key, array in arrays)),
        "config.json": short_digest(config.encode()),
    }
    stored = json.loads(READ.read_text())
    if os.environ.get("UPDATE_GOLDEN"):
        stored.setdefault(case, {})[name] = found
        READ.write_text(json.dumps(stored, indent=1) + "\n")
    assert stored[case][name] == found


EVERY_HEAD = HeadsConfig(
    pooler=True, mlm=True, nsp=True, rtd=True, sequence_labels=("a", "b", "c"), token_labels=("a", "b", "c"),
    span=True, choice=True,
)  # fmt: skip


@pytest.fixture
def traced_once(monkeypatch):
    """The classes of a case share one trace, that of the network with every head."""

    def shapes(network):
        heads = network.heads
        modules = {"embeddings", "encoder", *(f"{head}_head" for head in heads.present())}
        modules |= {"pooler", "pooler_norm"} if heads.pooler else set()
        modules |= {"span_transform"} if heads.span else set()
        whole = canonical_shapes(network.clone(heads=EVERY_HEAD))
        return {name: shape for name, shape in whole.items() if name.split("/")[0] in modules}

    monkeypatch.setattr("bert_jax.model.canonical.canonical_shapes", shapes)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(("case", "name"), ALL)
def test_what_is_read_is_written_bit_by_bit(tmp_path, case, name):
    source = make_folder(tmp_path / "source", case, name)
    weights = read(source)
    assert hf_class(weights.spec) == name and weights.spec.family == CASES[case].get("family", case.split("_")[0])
    same_as_recorded(case, name, weights)
    (tmp_path / "written").mkdir()
    write_hf(tmp_path / "written", weights)
    stored, written = (read_header(path / "model.safetensors") for path in (source, tmp_path / "written"))
    stored = {FAMILIES[weights.spec.family].rename(key): entry for key, entry in stored.items()}
    assert set(stored) == set(written)
    if not weights.spec.model.tied_output:
        # transformers has a second bias in its place, which is written under both names.
        second = [copy for copy, ours in FAMILIES[weights.spec.family].tied.items() if ours.endswith("bias")]
        if any(copy in stored for copy in second):
            stored.pop(hf_names(weights.spec)["mlm_head/output_bias"].name)
    idle = {"bert.pooler.weight", "bert.pooler.bias"} if name in FAMILIES[weights.spec.family].idle_pooler else ()
    for key, entry in stored.items():
        expected = read_values(entry) * (key not in idle)
        assert np.array_equal(expected, read_values(written[key])), key
    again = read(tmp_path / "written")
    assert again.spec == weights.spec and again.notes == weights.notes
    assert all(np.array_equal(again.params[key], array) for key, array in weights.params.items())


WRONG = (
    [], {}, [["a"]], [1, "a"], {"a": 1}, "x", "", True, False, None, -1, 0, 3, 1.5, float("nan"), 10**12, 1e308,
    2**31 - 1, 2**63 - 1,
)  # fmt: skip


# Family -> the first case of it.
FIRST = {told_of(case)[classes(case)[0]]["config"]["model_type"]: case for case in reversed(CASES)}


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", FIRST.values())
def test_a_value_of_the_wrong_type_is_one_line(case):
    """Each key of a family with each wrong value is read, or refused in one line; nothing else is raised."""
    config = told_of(case)[classes(case)[0]]["config"]
    family, refused = FAMILIES[config["model_type"]], 0
    keys = {*config, *family.keys, *family.other_keys, *family.refused, "problem_type", "id2label", "num_labels"}
    for key in sorted({*keys, "tie_word_embeddings", "dtype", "auto_map"}):
        for value in WRONG:
            try:
                model_parts(config | {key: value}, "config.json")
            except ValueError as error:
                refused += 1
                assert str(error).startswith("config.json") and "\n" not in str(error), (key, value)
    assert refused > 50


def test_an_encoder_may_state_that_it_has_no_classes():
    config = told_of("mpnet")["MPNetModel"]["config"] | {"id2label": {}, "label2id": {}}
    assert model_parts(config, "config.json").labels == ()


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_of_the_config_class_are_known(name):
    """Each key that a class of a release stores is read, without effect, or refused unless it has its default."""
    fields = json.loads((FIXTURES / "families" / "config_fields.json").read_text())
    for release, defaults in fields[name].items():
        model_parts({"model_type": name, **defaults}, f"{name} of {release}")


# The recorded models have no classes of these families; those of the others are slow.
QUICK = "bert", "roberta"


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FAMILIES]
)
def test_written_folders_are_those_that_each_release_loaded(tmp_path, family):
    """``studies/families/families.py --record`` recorded the folders with which transformers had no problem."""
    loaded = json.loads((FIXTURES / "families" / "loaded.json").read_text())[family]
    releases = set(json.loads((FIXTURES / "families" / "config_fields.json").read_text())[family])
    for i, (name, bundle) in enumerate(drawn_models(family)):
        folder = tmp_path / str(i)
        folder.mkdir()
        write_hf(folder, bundle)
        assert set(loaded[name].values()) == {digest(folder)}, name
        assert set(loaded[name]) == releases, name


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("case", "name", "key", "rate"),
    [
        ("distilbert", "DistilBertForSequenceClassification", "seq_classif_dropout", 0.3),
        ("distilbert", "DistilBertForTokenClassification", "seq_classif_dropout", None),
        ("modernbert", "ModernBertForTokenClassification", "classifier_dropout", 0.0),
        ("albert", "AlbertForSequenceClassification", "classifier_dropout_prob", 0.2),
        ("electra", "ElectraForTokenClassification", "classifier_dropout", 0.2),
        ("electra", "ElectraForMultipleChoice", "summary_last_dropout", 0.3),
        ("deberta-v2", "DebertaV2ForSequenceClassification", "cls_dropout", 0.2),
        ("gpt2_untied", "GPT2ForTokenClassification", "classifier_dropout", 0.2),
        ("gpt2", "GPT2ForTokenClassification", "classifier_dropout", 0.1),
        ("xlm-roberta", "XLMRobertaForSequenceClassification", "classifier_dropout", None),
    ],
)
def test_dropout_before_a_head_is_that_of_the_class(tmp_path, case, name, key, rate):
    weights = read(make_folder(tmp_path, case, name))
    assert weights.spec.heads.dropout == rate
    written = hf_config(weights.spec, "float32")
    assert written.get(key, "absent") == (rate if name != "DistilBertForTokenClassification" else "absent")
    unset = dataclasses.replace(weights.spec, heads=dataclasses.replace(weights.spec.heads, dropout=None))
    has_default = case not in ("xlm-roberta", "deberta-v2") and (case, key) != ("electra", "classifier_dropout")
    expected = weights.spec.model.hidden_dropout if has_default else None
    assert hf_config(unset, "float32").get(key, expected) == expected


def test_an_untied_output_layer_is_written_with_both_biases(tmp_path):
    spec = dict(drawn_models("roberta"))["RobertaForMaskedLM, untied"]
    write_hf(tmp_path, spec)
    stored = read_header(tmp_path / "model.safetensors")
    biases = [read_values(stored[f"lm_head.{name}"]) for name in ("bias", "decoder.bias")]
    assert np.array_equal(*biases) and np.array_equal(biases[0], spec.params["mlm_head/output_bias"])
    again = read(tmp_path)
    assert again.spec == spec.spec
    assert all(np.array_equal(again.params[key], array) for key, array in spec.params.items())


def test_modernbert_states_the_special_ids_of_its_own_vocabulary(tmp_path):
    """Otherwise transformers assumes those of the published vocabulary, here beyond the last piece."""
    bare = dict(drawn_models("modernbert"))["ModernBertForMaskedLM"]
    spec = dataclasses.replace(bare.spec, tokenizer=TokenizerConfig())
    vocabulary = content(words(bare.spec.model.vocab_size - len(words(0))))
    for name, bundle, (first, last) in (
        ("bare", bare, (None, None)),
        ("whole", dataclasses.replace(bare, spec=spec, tokenizer_content=vocabulary), (2, 3)),
    ):
        (tmp_path / name).mkdir()
        write_hf(tmp_path / name, bundle)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert [config[f"{token}_token_id"] for token in ("bos", "cls", "eos", "sep")] == [first, first, last, last]
        assert config["pad_token_id"] == 0 and read(tmp_path / name).spec.model == bare.spec.model


def test_a_key_that_the_class_does_not_read_is_a_note(tmp_path):
    config = {"attention_twist": 2, "nothing": None}
    weights = read(make_folder(tmp_path / "modern", "modernbert", "ModernBertModel", config=config))
    assert any("attention_twist 2" in note and "nothing" not in note for note in weights.notes)
    for family, key, value in (
        ("bert", "position_embedding_type", "relative_key"),
        ("roberta", "is_decoder", True),
        ("neobert", "attention_twist", 2),  # the authors' own code may read it
    ):
        with pytest.raises(ValueError, match=key):
            model_parts({"model_type": family, key: value}, "config.json")


def test_every_family_is_an_option():
    assert tuple(FAMILIES) == FamilyName.__args__
    for name, family in FAMILIES.items():
        assert family.name == name


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("electra", "ElectraForMultipleChoice"),
        ("electra", "ElectraForTokenClassification"),
        ("distilbert", "DistilBertForTokenClassification"),
    ],
)
def test_the_tensors_of_a_head_say_whose_classifier_it_is(tmp_path, case, name):
    weights = read(make_folder(tmp_path / "stated", case, name))
    again = read(make_folder(tmp_path / "unstated", case, name, config={"architectures": None}))
    assert again.spec.heads.present() == weights.spec.heads.present()


def test_a_classifier_of_two_heads_is_not_guessed(tmp_path):
    case = "distilbert", "DistilBertForSequenceClassification"
    with pytest.raises(ValueError, match="architectures does not determine the kind of classifier"):
        read(make_folder(tmp_path, *case, config={"architectures": None}))


@pytest.mark.parametrize(
    ("case", "name", "config", "words"),
    [
        ("electra", "ElectraForMultipleChoice", {"summary_type": "mean"}, 'summary_type is "mean"; supported'),
        ("electra", "ElectraForMultipleChoice", {"summary_activation": None}, "summary_activation is null; supp"),
        ("electra", "ElectraForMultipleChoice", {"summary_use_proj": False}, "summary_use_proj is false; supp"),
        ("electra", "ElectraForPreTraining", {"embedding_size": 20}, "embedding_size is 0 in config.json, but 12"),
        ("electra", "ElectraForPreTraining", {"hidden_size": 30}, "hidden_size is 30 in config.json, but 20"),
        ("gpt2", "GPT2Model", {"scale_attn_weights": False}, "scale_attn_weights is false; supported"),
        ("gpt2", "GPT2Model", {"scale_attn_by_inverse_layer_idx": True}, "by_inverse_layer_idx is true; supported"),
        ("gpt2", "GPT2Model", {"add_cross_attention": True}, "add_cross_attention is true; supported"),
        ("gpt2", "GPT2Model", {"n_inner": None}, "intermediate_size is 80 in config.json, but 14"),
        ("gpt2", "GPT2Model", {"architectures": ["GPT2DoubleHeadsModel"]}, "DoubleHeadsModel.* with model_type"),
        (
            "openai-gpt",
            "OpenAIGPTModel",
            {"afn": "gelu_new"},
            'afn is "gelu_new"; allowed: gelu, relu, silu, swish',
        ),
        ("openai-gpt", "OpenAIGPTModel", {"n_positions": 30}, "is 30 in config.json, but 26"),
        ("mpnet", "MPNetModel", {"relative_attention_num_buckets": 64}, "num_buckets is 64; supported"),
        ("mpnet", "MPNetModel", {"pad_token_id": 0}, "pad_token_id is 0; supported: 1"),
        (
            "longformer",
            "LongformerModel",
            {"attention_window": 5},
            "attention_window is 5; allowed: an even",
        ),
        ("longformer", "LongformerModel", {"attention_window": [4, 8]}, "allowed: .* a list of 3 such numbers"),
        ("albert", "AlbertForMaskedLM", {"num_hidden_groups": 3}, "num_hidden_groups is 3; supported: 1"),
        ("albert", "AlbertForMaskedLM", {"inner_group_num": 2}, "inner_group_num is 2; supported: 1"),
        ("albert", "AlbertForMaskedLM", {"embedding_size": 13}, "embedding_size is 13 in config.json, but 12"),
        ("albert", "AlbertForMaskedLM", {"hidden_size": 30}, "hidden_size is 30 in config.json, but 20"),
        ("distilbert", "DistilBertForMaskedLM", {"hidden_dim": 30}, "intermediate_size is 30 .*, but 14"),
        ("distilbert", "DistilBertForMaskedLM", {"n_layers": 4}, "num_layers is 4 in config.json, but 3"),
    ],
)
def test_another_network_is_refused(tmp_path, case, name, config, words):
    with pytest.raises(ValueError, match=words):
        read(make_folder(tmp_path, case, name, config=config))


# One class per case, each time another.
ONCE = [(case, classes(case)[i % len(classes(case))]) for i, case in enumerate(CASES)]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), ONCE)
def test_programs_compute_the_same(tmp_path, case, name):
    weights = read(make_folder(tmp_path / "source", case, name))
    longest = weights.spec.model.max_length
    shapes = ((1, 1), (3, 17), (5, longest))
    for format, write, check, bar in (
        ("onnx", write_onnx, check_onnx, 1e-4), ("stablehlo", write_stablehlo, check_stablehlo, 1e-5),
    ):  # fmt: skip
        (tmp_path / format).mkdir()
        write(tmp_path / format, weights)
        found = check(tmp_path / format, weights, shapes)
        assert found and max(found.values()) <= bar, (format, found)


def test_the_families_in_the_docs_are_those_of_the_reader():
    rows = [f"| `{name}` | {family.title} | {', '.join(family.classes)} |" for name, family in FAMILIES.items()]
    text = (REPOSITORY / "docs" / "weights.md").read_text(encoding="utf-8")
    text = text.partition("## Families of Hugging Face folders")[2].partition("\n## ")[0]
    assert [line for line in text.splitlines() if line.startswith("| `") and line.count("|") == 4] == rows
