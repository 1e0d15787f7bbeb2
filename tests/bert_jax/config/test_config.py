"""Configs from files and flags: the right value or one line that says where, what and what is allowed."""

from typing import get_args

import pytest
from config_words import FILE, load, refusal

from bert_jax.config import PretrainConfig, differences, dump_yaml, from_dict, to_dict
from bert_jax.config.options import field_types
from bert_jax.config.schema import PRESETS

pytestmark = pytest.mark.usefixtures("here")


def given(key, value, where):
    """One option, written in YAML or on the command line."""
    if where == "flag":
        return load(f"--{key} {value}")
    if where == "flag=":
        return load(f"--{key}={value}")
    section, name = key.split(".")
    return load(text=f"{section}:\n  {name}: {value}\n")


def value_of(config, key):
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


# ------------------------------------------------------------------ values

GOOD = [
    ("training.num_steps", "1e6", 1_000_000),
    ("training.num_steps", "1_000", 1000),
    ("training.num_steps", "010", 10),  # octal in YAML 1.1
    ("training.num_steps", "+7", 7),
    ("training.seed", "0", 0),
    ("optimizer.learning_rate", "1e-4", 1e-4),  # text in YAML 1.1
    ("optimizer.learning_rate", "3", 3.0),
    ("optimizer.epsilon", ".5", 0.5),
    ("execution.scan_layers", "true", True),
    ("execution.scan_layers", "True", True),
    ("data.lower_case", "false", False),
    ("data.line", "sentence", "sentence"),
    ("data.json_field", "yes", "yes"),
    ("data.json_field", "010", "010"),
    ("data.json_field", "1e3", "1e3"),
    ("data.corpus", "one.txt", ("one.txt",)),
    ("mesh.data", "-1", -1),
    ("mesh.fsdp", "-1", -1),
]


@pytest.mark.parametrize("where", ["yaml", "flag", "flag="])
@pytest.mark.parametrize(("key", "written", "value"), GOOD)
def test_right_values(key, written, value, where):
    extra = " --mesh.data 1" if key == "mesh.fsdp" else ""
    config = given(key, written + (extra if where == "flag" else ""), where) if not extra else None
    if extra:
        config = load(f"--{key}={written}", extra)
    found = value_of(config, key)
    assert found == value and type(found) is type(value)


BAD = [
    ("training.num_steps", "many", "'many' is not a whole number"),
    ("training.num_steps", "1.5", "'1.5' is not a whole number"),
    ("training.num_steps", "1:30", "'1:30' is not a whole number"),  # 90 in YAML 1.1
    ("training.num_steps", "0x10", "'0x10' is not a whole number"),
    ("training.num_steps", "true", "'true' is not a whole number"),
    ("training.num_steps", "nan", "'nan' is not allowed; allowed: a finite number"),
    ("training.num_steps", "1e400", "'1e400' is not allowed; allowed: a finite number"),
    ("training.num_steps", "-5", "-5 is not allowed; allowed: 0 or more"),
    ("optimizer.learning_rate", "nan", "'nan' is not allowed; allowed: a finite number"),
    ("optimizer.learning_rate", "inf", "'inf' is not allowed; allowed: a finite number"),
    ("optimizer.learning_rate", "-inf", "'-inf' is not allowed; allowed: a finite number"),
    ("optimizer.learning_rate", "fast", "'fast' is not a number"),
    ("optimizer.learning_rate", "false", "'false' is not a number"),
    ("optimizer.learning_rate", "-1", "-1.0 is not allowed; allowed: 0 or more"),
    ("execution.scan_layers", "off", "'off' is not allowed; allowed: true, false"),  # False in YAML 1.1
    ("execution.scan_layers", "yes", "'yes' is not allowed; allowed: true, false"),
    ("execution.scan_layers", "1", "'1' is not allowed; allowed: true, false"),
    ("data.masking", "dynamc", "'dynamc' is not allowed; allowed: static, dynamic; did you mean 'dynamic'?"),
    ("data.masking", "no", "'no' is not allowed; allowed: static, dynamic"),
    ("training.mode", "old", "'old' is not allowed; allowed: standard, bert2018"),
    ("training.batch_ramp", "ten", "'ten' is not a whole number"),
]  # fmt: skip


@pytest.mark.parametrize("where", ["yaml", "flag", "flag="])
@pytest.mark.parametrize(("key", "written", "message"), BAD)
def test_wrong_values(key, written, message, where):
    with pytest.raises(ValueError) as raised:
        given(key, written, where)
    source = f"{FILE}:2" if where == "yaml" else "command line"
    assert str(raised.value) == f"{source}: {key}: {message}"


KEYS = [
    ("model.hiden_size", "unknown option; did you mean 'model.hidden_size'?"),
    ("training.batch_size", "unknown option; did you mean 'training.global_batch_size' or "
     "'training.eval_batch_size'?"),
    ("model.corpus", "unknown option; allowed in model: vocab_size, hidden_size, "),
    ("modle.hidden_size", "unknown section; allowed: data, execution, mesh, model, objective, optimizer, training; "
     "did you mean 'model'?"),
    ("zebra.hidden_size", "unknown section; allowed: data, execution, mesh, model, objective, optimizer, training"),
]  # fmt: skip


@pytest.mark.parametrize("where", ["yaml", "flag", "flag="])
@pytest.mark.parametrize(("key", "message"), KEYS)
def test_unknown_keys(key, message, where):
    with pytest.raises(ValueError) as raised:
        given(key, "3", where)
    source = f"{FILE}:2" if where == "yaml" else "command line"
    assert str(raised.value).startswith(f"{source}: {key}: {message}")
    assert "\n" not in str(raised.value)


def test_keys_without_a_section():
    assert refusal("--hidden_size 64").endswith("did you mean 'model.hidden_size'?")
    assert refusal(text="hidden_size: 64\n").endswith("did you mean 'model.hidden_size'?")
    assert refusal("--wokdir x").endswith("did you mean 'workdir'?")
    assert refusal(text="data: 5\n") == f"{FILE}:1: data: is a section; use one of its options, such as data.corpus"
    assert "is a section" in refusal("--model 5")
    assert refusal(text="model:\n  hidden_size:\n    wide: 64\n") == (
        f"{FILE}:3: model.hidden_size.wide: unknown option; model.hidden_size is an option, not a section"
    )


def test_lists():
    assert load(text="training:\n  batch_ramp: [10, 64, 1e1, 128]\n").training.batch_ramp == (10, 64, 10, 128)
    assert load("--training.batch_ramp 10 64 --training.num_steps 5").training.batch_ramp == (10, 64)
    assert load(text="data:\n  corpus:\n  - b.txt\n  - a.txt\n").data.corpus == ("b.txt", "a.txt")
    # An empty list is an empty list, and takes the place of one given before.
    ramp = "training:\n  batch_ramp: [10, 64]\n"
    assert load("--training.batch_ramp", text=ramp).training.batch_ramp == ()
    assert load(text="data:\n  corpus: []\n").data.corpus == ()
    # A list or nothing where one value is wanted.
    for written, count in (("[]", 0), ("[1, 2]", 2)):
        assert refusal(text=f"model:\n  num_layers: {written}\n") == (
            f"{FILE}:2: model.num_layers: requires exactly one value, got {count}"
        )
    assert refusal("--model.num_layers") == "command line: model.num_layers: requires exactly one value, got 0"
    assert refusal("--model.num_layers 1 2") == "command line: model.num_layers: requires exactly one value, got 2"
    assert "requires exactly one value, got 0" in refusal("--execution.scan_layers")
    assert (
        refusal(text="data:\n  corpus: [a, ~]\n")
        == f"{FILE}:2: data.corpus: the list has an item without a value; add a value or remove the item"
    )
    assert refusal(text="data:\n  corpus: [a, [b]]\n") == f"{FILE}:2: data.corpus: a list may contain only scalars"


MIXTURE = "data:\n  shards: mix\n  mixture: {wiki: 0.7, books: 3e-1}\n"


def test_a_mapping_of_weights(here):
    mixture = ("wiki=0.7", "books=3e-1")
    assert load(text=MIXTURE).data.mixture == mixture
    assert load(text="data:\n  mixture:\n    wiki: 0.7\n    books: 3e-1\n  seed: 1\n").data.mixture == mixture
    assert load(text="data:\n  mixture: [wiki=0.7, books=3e-1]\n").data.mixture == mixture
    assert load("--data.mixture wiki=0.7 books=3e-1").data.mixture == mixture
    data = load(text="data: {mixture: {gs://a.b/c=d: 2, c4.en: 1}}\n").data
    assert data.mixture_parts == (("gs://a.b/c=d", 2.0), ("c4.en", 1.0))
    # Later values take the place of the whole mapping.
    assert load("--data.mixture=c4=1", text=MIXTURE).data.mixture == ("c4=1",)
    (here / "later.yaml").write_text("data: {mixture: {c4: 1}}\n")
    assert load("--config later.yaml", text=MIXTURE).data.mixture == ("c4=1",)
    for empty in ("{}", "[]"):
        (here / "later.yaml").write_text(f"data:\n  mixture: {empty}\n")
        assert load("--config later.yaml", text=MIXTURE).data.mixture == ()
    assert load("--data.mixture", text=MIXTURE).data.mixture == ()


def test_a_mixture_survives_its_stored_form():
    config = load(text=MIXTURE)
    assert load(text=dump_yaml(config)) == config
    assert from_dict(PretrainConfig, to_dict(config)) == config
    assert differences(load(), config)[1] == "data.mixture: [] -> ['wiki=0.7', 'books=3e-1']"


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        (
            "{wiki: 0.7, books: 0}",
            "3: data.mixture: 'books=0' is not allowed; allowed: FOLDER=WEIGHT with a finite",
        ),
        ("{wiki: -1, books: 1}", "3: data.mixture: 'wiki=-1' is not allowed; allowed: FOLDER=WEIGHT with a finite"),
        ("{wiki: 1, books: many}", "3: data.mixture: 'books=many' is not allowed"),
        ("{wiki: inf, books: 1}", "3: data.mixture: 'wiki=inf' is not allowed; allowed: FOLDER=WEIGHT with a "),
        ("{wiki: nan, books: 1}", "3: data.mixture: 'wiki=nan' is not allowed"),
        ("[wiki, books=1]", "3: data.mixture: 'wiki' is not allowed"),
        ('["=1", books=1]', "3: data.mixture: '=1' is not allowed"),
        ("[a=1, b=1, a=2]", "3: data.mixture: 'a=1' is not allowed; allowed: each folder once"),
        ("{a: 1, b: 1, a: 2}", "3: data.mixture.a: occurs twice in this file; remove one"),
        ("{a: 1, b: 1e-7}", "3: data.mixture: 'b=1e-7' is not allowed; allowed: weights of at least a millionth"),
        ("{a: [1, 2]}", "3: data.mixture.a: requires exactly one weight, got 2"),
        ("{a: ~}", "3: data.mixture.a: has no value"),
    ],
)
def test_wrong_mixtures(mixture, message):
    refused = refusal(text=f"data:\n  seed: 1\n  mixture: {mixture}\n")
    assert refused.startswith(f"{FILE}:{message}") and "\n" not in refused


def test_a_mapping_is_only_for_options_of_weights():
    assert "data.mixture is an option, not a section" in refusal("--data.mixture.wiki 0.7")
    assert refusal(text="data:\n  seed: {}\n") == f"{FILE}:2: data.seed: requires exactly one value, got 0"


# ------------------------------------------------------------------ files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  num_layers: 2\n  hidden_size: 64\n  num_layers: 4\n", "4: model.num_layers: "),
        ("model:\n  num_layers: 2\ndata:\n  seed: 1\nmodel:\n  hidden_size: 64\n", "5: model: "),
        ("model:\n  num_layers:\n", "2: model.num_layers: has no value"),
        ("model:\n  num_layers: null\n", "2: model.num_layers: has no value"),
        ("model:\n  num_layers: ~\n", "2: model.num_layers: has no value"),
        ("model:\n", "1: model: has no value"),
        ("- model\n", "1: not a recipe"),
        ("model\n", "1: not a recipe"),
        ("model:\n\tnum_layers: 2\n", "2: not valid YAML: "),
        ("model: &x\n  a: *x\n", "2: model.a: the alias"),
        ("&x model: 1\nb: &y {c: {d: *y}}\n", "2: b.c.d: the alias"),
        ("&top {model: *top}\n", "1: model: the alias"),
        ("model: {\n", "2: not valid YAML: "),
        ("a: 1\n---\nb: 2\n", "2: not valid YAML: "),
        ("? [a]\n: 3\n", "1: top level: a key must be a string"),
    ],
)
def test_wrong_files(text, message):
    assert refusal(text=text).startswith(f"{FILE}:{message}")


def test_files_that_cannot_be_read(here):
    assert refusal("--config no.yaml") == "command line: config: cannot read no.yaml: No such file or directory"
    assert refusal(f"--config {here}") == f"command line: config: cannot read {here}: Is a directory"
    assert refusal("--config") == "command line: config: needs a file, such as --config recipe.yaml"
    (here / FILE).write_bytes(b"model:\n  activation: \xff\n")
    assert refusal(f"--config {FILE}") == f"{FILE}: not UTF-8 text; save it as UTF-8"
    (here / FILE).write_bytes(b"model: \x00\n")
    assert refusal(f"--config {FILE}").startswith(f"{FILE}: not valid YAML: ")


@pytest.mark.parametrize("text", ["", "# nothing\n", "model: {}\n"])
def test_an_empty_file_changes_nothing(text):
    assert load(text=text) == PretrainConfig()


def test_later_files_win_and_flags_win_over_files(here):
    (here / "one.yaml").write_text("model:\n  num_layers: 2\n  hidden_size: 64\n  num_attention_heads: 2\n")
    (here / "two.yaml").write_text("model:\n  num_layers: 3\ntraining:\n  num_steps: 7\n")
    for arguments in (
        "--config one.yaml --config two.yaml", "--config one.yaml two.yaml", "--config=one.yaml --config=two.yaml",
    ):  # fmt: skip
        model = load(arguments).model
        assert (model.num_layers, model.hidden_size) == (3, 64)
    assert load("--config two.yaml one.yaml").model.num_layers == 2
    assert load("--model.num_layers 5 --config one.yaml").model.num_layers == 5
    assert load("--model.num_layers 5 --model.num_layers 6").model.num_layers == 6
    # A combination that fails names the layer that gave the value it complains of.
    (here / "one.yaml").write_text("model:\n  hidden_size: 100\n  num_attention_heads: 7\n")
    expected = "model.num_attention_heads: 7 is not allowed; allowed: a divisor of model.hidden_size (100)"
    assert refusal("--config one.yaml") == f"one.yaml:3: {expected}"
    assert refusal("--config one.yaml --model.num_attention_heads 7") == f"command line: {expected}"


def test_words_that_are_no_options():
    for word in ("model.num_layers", "--", "-x"):
        assert refusal(word) == f"command line: {word}: not an option; options look like --section.key value"


# ------------------------------------------------------------------ presets


def test_bert2018_lies_under_what_is_given():
    standard, preset = load(), load("--training.mode bert2018")
    assert (standard.optimizer.name, standard.optimizer.schedule, standard.model.activation) == (
        "adamw", "linear", "gelu",
    )  # fmt: skip
    assert (preset.optimizer.name, preset.optimizer.schedule, preset.model.activation) == (
        "bert_adam", "bert2018", "gelu_tanh",
    )  # fmt: skip
    changed = {line.partition(":")[0] for line in differences(standard, preset)}
    assert changed == {"training.mode", *PRESETS["bert2018"]}
    # In any order, from file or flag, a value given stays.
    recipe = "optimizer:\n  name: lamb\ntraining:\n  mode: bert2018\n"
    mixed = load("--model.activation relu", text=recipe)
    assert (mixed.optimizer.name, mixed.optimizer.schedule, mixed.model.activation) == ("lamb", "bert2018", "relu")
    # The default, given, is a value given.
    assert load("--training.mode bert2018 --model.activation gelu").model.activation == "gelu"
    assert load("--training.mode standard", text=recipe).optimizer.schedule == "linear"


def test_presets_name_options_that_are_there():
    types = field_types(PretrainConfig)
    assert {key for preset in PRESETS.values() for key in preset} <= set(types)
    assert set(PRESETS) == set(get_args(types["training.mode"]))
