"""Weights out: the table of what each format holds, whole folders or none, what is read back."""

import dataclasses
import functools
import json
import re
import shutil
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from exported import MODEL, SPECS, VOCABULARY, exported, random_weights, source
from safetensors import safe_open
from support import objective_of

from bert_jax.config import (
    HeadsConfig,
    ModelConfig,
    ModelSpec,
    PretrainConfig,
    SentenceConfig,
    TokenizerConfig,
    load_config,
)
from bert_jax.inference.loaded import load
from bert_jax.interop import export
from bert_jax.interop.export import export_model
from bert_jax.interop.export_table import DTYPES, FORMATS, ROWS, TABLE, fit, formats_of, rows_of
from bert_jax.interop.hf import peer as peer_program
from bert_jax.interop.hf.config_json import hf_class, unsupported
from bert_jax.interop.model_bundle import ModelBundle
from bert_jax.interop.programs import serving
from bert_jax.interop.readers import read_weights
from bert_jax.process import exits
from bert_jax.start.plan import pretraining_spec

DOCS = Path(__file__).resolve().parents[3] / "docs" / "weights.md"


def model(heads=None, family="bert", **values) -> ModelSpec:
    return ModelSpec(
        model=dataclasses.replace(MODEL, family=family, **values), heads=heads or HeadsConfig(), family=family
    )


ROBERTA = {"position_offset": 2, "type_vocab_size": 1, "mlm_layer": "gelu"}
# A model for every row of the table, with nothing that another row refuses.
SAMPLES = {
    "no head": SPECS["plain"],
    "pooler": SPECS["pooler"],
    "mlm": SPECS["mlm"],
    "nsp": SPECS["nsp"],
    "rtd": SPECS["rtd"],
    "sequence": SPECS["sequence"],
    "token": SPECS["token"],
    "span": SPECS["span"],
    "choice": SPECS["choice"],
    "crf": model(HeadsConfig(token_labels=("a", "b", "c"), crf=True)),
    "pair": dataclasses.replace(model(HeadsConfig(pair_labels=("a", "b"))), sentence=SentenceConfig()),
    "exits": model(HeadsConfig(pooler=True, sequence_labels=("a", "b"), exits=(1,))),
    "features": model(HeadsConfig(token_labels=("a", "b", "c"), features="weighted_all", bilstm=4)),
    "sentence": SPECS["sentence_dense"],
    "several heads": model(HeadsConfig(mlm=True, span=True)),
    "roberta": model(family="roberta", **ROBERTA),
    "family": model(family="xlm-roberta", **ROBERTA),
    "roberta mlm": model(HeadsConfig(mlm=True), "roberta", **ROBERTA | {"mlm_layer": "relu"}),
    "pre-norm": model(norm_position="pre"),
    "sinusoidal": model(position_embeddings="sinusoidal"),
    "offset": model(position_offset=3),
    "gelu": model(activation="gelu"),
    "gelu_tanh": model(activation="gelu_tanh"),
    "gelu_sigmoid": model(activation="gelu_sigmoid"),
    "relu": model(activation="relu"),
    "epsilon": model(norm_epsilon=1e-5),
    "pruned heads": model(layer_heads=(1, 3)),
    "pruned units": model(layer_units=(48, 20)),
    "float16": model(),
    "bfloat16": model(),
    "int8": model(),
}


# For tests that compile programs.
ONE_LAYER = {
    name: dataclasses.replace(SPECS[name], model=dataclasses.replace(MODEL, num_layers=1))
    for name in ("span", "sentence", "sentence_dense")
}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ------------------------------------------------------------------ the table


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtendedModel(ModelConfig):
    """A model with a switch that no writer lists."""

    new_switch: int = 0


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_refuses_an_unknown_switch_by_name(format):
    def weights(value):
        extended = ExtendedModel(**dataclasses.asdict(MODEL), new_switch=value)
        spec = dataclasses.replace(SPECS["plain"], model=extended, tokenizer=TokenizerConfig())
        return dataclasses.replace(random_weights(spec), tokenizer_content=VOCABULARY)

    fit(weights(0), format)
    with pytest.raises(ValueError, match=rf"^{format}: model\.new_switch: 1 is not supported by {format} "):
        fit(weights(1), format)


def test_a_refusal_shows_one_activation_for_all_heads():
    spec = model(HeadsConfig(pooler=True, sequence_labels=("no", "yes")), pooler_layer=("gelu",))
    (line,) = unsupported(spec, "hf")
    assert line == "model.pooler_layer: ('gelu',) is not supported by hf for BERT (supported: ('tanh',))"


def test_the_table_in_the_docs_is_the_exporters():
    section = DOCS.read_text(encoding="utf-8").partition("## What each format holds")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    formats = cells[0][1:]
    shown = {re.match(r"`([^`]+)`", row[0])[1]: dict(zip(formats, row[1:], strict=True)) for row in cells[2:]}
    assert shown == TABLE and tuple(formats) == FORMATS
    lines = [f"| | {' | '.join(FORMATS)} |", f"|{'---|' * (len(FORMATS) + 1)}"]
    for row, meaning in ROWS.items():
        lines.append(f"| `{row}`: {meaning} | {' | '.join(TABLE[row][format] for format in FORMATS)} |")
    assert "\n".join(lines) + "\n" in DOCS.read_text(encoding="utf-8")


@pytest.mark.cases(1)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("row", TABLE)
def test_every_cell_is_what_happens(row, format):
    dtype = row if row in DTYPES else "float32"
    spec = SAMPLES[row]
    assert row in list(rows_of(spec, dtype))
    weights = random_weights(spec)
    if TABLE[row][format] == "refused":
        with pytest.raises(ValueError, match=f"^{format}"):
            fit(weights, format, dtype)
        return
    fitted, notes = fit(weights, format, dtype)
    dropped = any(note.startswith("WARNING") for note in notes)
    others = [TABLE[other][format] for other in rows_of(spec, dtype)]
    assert dropped == ("encoder only" in others)
    if TABLE[row][format] == "encoder only" and row != "several heads":
        assert row not in (*fitted.spec.heads.present(), *(["sentence"] if fitted.spec.sentence else []))
        assert any(row in note for note in notes)
    elif not dropped:
        assert fitted.spec.sentence == spec.sentence
        assert set(spec.heads.present()) - {"pooler"} == set(fitted.spec.heads.present()) - {"pooler"}


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("row", [row for row in TABLE if row not in DTYPES])
def test_what_hugging_face_folders_hold_comes_back_bit_by_bit(row, dtype, tmp_path):
    source(tmp_path / "source", SAMPLES[row])
    if TABLE[row]["hf"] == "refused":
        with pytest.raises(ValueError, match=r"^hf"):
            exported(tmp_path, "hf", dtype=dtype)
        assert names(tmp_path) == {"source"}
        return
    exported(tmp_path, "hf", dtype=dtype)
    weights, _ = fit(random_weights(SAMPLES[row]), "hf", dtype)
    again = read_weights(tmp_path / "target")
    assert (again.spec.model, again.spec.heads) == (weights.spec.model, weights.spec.heads)
    assert set(again.params) == set(weights.params)
    for name, values in weights.params.items():
        stored = values.astype(ml_dtypes.bfloat16).astype(np.float32) if dtype == "bfloat16" else values
        np.testing.assert_array_equal(stored.view(np.uint32), again.params[name].view(np.uint32), err_msg=name)
    config = json.loads((tmp_path / "target/config.json").read_text())
    assert config["architectures"] == [hf_class(weights.spec)] and config["dtype"] == dtype


@pytest.mark.parametrize("format", ["hf", "npz"])
def test_float16_comes_back_bit_by_bit(format, tmp_path):
    source(tmp_path / "source", SPECS["mlm"])
    said = exported(tmp_path, format, dtype="float16", verify=True, peer_python=sys.executable)
    assert any("bitwise equal" in line for line in said)
    weights, again = random_weights(SPECS["mlm"]), read_weights(tmp_path / "target")
    assert any("float16" in note for note in again.notes)
    for name, values in weights.params.items():
        np.testing.assert_array_equal(values.astype(np.float16).astype(np.float32), again.params[name])
    if format == "npz":
        with np.load(tmp_path / "target/weights.npz") as arrays:
            assert {arrays[name].dtype for name in arrays.files} == {np.dtype(np.float16)}


def test_float16_refuses_what_it_cannot_hold(tmp_path):
    params = random_weights(SPECS["plain"]).params
    params["embeddings/layer_norm/bias"][3] = 1e5
    (tmp_path / "source").mkdir()
    export.WRITERS["npz"](tmp_path / "source", ModelBundle(spec=SPECS["plain"], params=params), dtype="float32")
    message = "float16: embeddings/layer_norm/bias has the value 1e[+]05, but the largest float16 is 65504; use"
    with pytest.raises(ValueError, match=message):
        exported(tmp_path, "npz", dtype="float16")
    exported(tmp_path, "npz", dtype="bfloat16")


def test_safetensors_are_torchs_without_a_copy_of_the_tied_layer(tmp_path):
    source(tmp_path / "source", SPECS["pretraining"])
    exported(tmp_path, "hf", dtype="bfloat16")
    weights = random_weights(SPECS["pretraining"])
    with safe_open(tmp_path / "target/model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert not [name for name in stored if "decoder" in name]
    assert "cls.predictions.bias" in stored and len(stored) == len(weights.params)
    kernel = weights.params["encoder/layer_0/feed_forward/intermediate/kernel"]
    torch_weight = stored["bert.encoder.layer.0.intermediate.dense.weight"]
    assert torch_weight.dtype == ml_dtypes.bfloat16 and torch_weight.shape == kernel.T.shape
    np.testing.assert_array_equal(torch_weight.view(np.uint16), kernel.T.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_heads_are_chosen_by_name(tmp_path):
    source(tmp_path / "source", SPECS["several"])
    with pytest.raises(ValueError, match="select some of them with --heads"):
        exported(tmp_path, "hf")
    with pytest.raises(
        ValueError, match="heads: the model has no choice; it has pooler, mlm, sequence, token, span"
    ):
        exported(tmp_path, "hf", heads=("choice",))
    exported(tmp_path, "hf", heads=("sequence",))
    assert read_weights(tmp_path / "target").spec.heads.present() == ("pooler", "sequence")
    exported(tmp_path, "hf", heads=(), force=True)
    assert read_weights(tmp_path / "target").spec.heads.present() == ()


@pytest.mark.parametrize("head", ["crf", "pair", "exits"])
def test_a_chosen_head_brings_those_that_it_needs(tmp_path, head):
    source(tmp_path / "source", SAMPLES[head])
    exported(tmp_path, "npz", heads=(head,))
    assert read_weights(tmp_path / "target").spec == SAMPLES[head]


def test_the_first_values_of_vectors_are_exported(tmp_path):
    """Also where a dense layer comes before, and the division by the norm after them."""
    texts = ["w1 w2", "w3"]
    for name, format in (("sentence_dense", "sentence-transformers"), ("sentence", "npz")):
        source(tmp_path / "source", ONE_LAYER[name], tokenizer=True)
        whole = load(tmp_path / "source")
        exported(tmp_path, format, width=3, force=True)
        vectors = load(tmp_path / "target").embed(texts)
        np.testing.assert_allclose(vectors, whole.embed(texts, width=3), rtol=0, atol=1e-6)
        shutil.rmtree(tmp_path / "source")
    with pytest.raises(
        ValueError, match=r"^--width: 99 is not allowed; allowed: 1 to \d+, the width of whole vectors$"
    ):
        source(tmp_path / "source", SPECS["sentence"])
        exported(tmp_path, "npz", width=99, force=True)
    allowed = "allowed with sentence-transformers, onnx, stablehlo, npz"
    with pytest.raises(ValueError, match=f"^--width: not allowed with --format hf; {allowed}$"):
        exported(tmp_path, "hf", width=3, force=True)
    source(tmp_path / "plain", SPECS["plain"])
    with pytest.raises(ValueError, match=r"^--width: 3: the model has no sentence vectors; omit --width$"):
        export_model(tmp_path / "plain", tmp_path / "out", "npz", width=3)


# ------------------------------------------------------------------ whole or not at all


def test_a_folder_is_replaced_only_when_told_and_only_by_a_complete_one(tmp_path, monkeypatch):
    source(tmp_path / "source", SPECS["plain"])
    exported(tmp_path, "npz")
    (tmp_path / "target/mine.txt").write_text("kept")
    with pytest.raises(ValueError, match="not empty; give a new folder, or set --force"):
        exported(tmp_path, "npz")
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):

        def broken(folder, weights, *, dtype, error=error):
            (folder / "half").write_text("half")
            raise error

        monkeypatch.setitem(export.WRITERS, "npz", broken)
        with pytest.raises(type(error)):
            exported(tmp_path, "npz", force=True)
        assert names(tmp_path) == {"source", "target"} and (tmp_path / "target/mine.txt").exists()
    monkeypatch.undo()
    exported(tmp_path, "npz", force=True)
    assert names(tmp_path / "target") == {"weights.npz", "dtypes.json", "model.json", "README.md"}
    assert names(tmp_path) == {"source", "target"}


def test_force_never_deletes_the_model_or_where_one_stands(tmp_path, monkeypatch):
    place = tmp_path / "target"
    place.mkdir()
    source(place / "inner", SPECS["plain"])
    for target in (place, place / "inner"):
        with pytest.raises(ValueError, match="would delete the source"):
            export_model(place / "inner", target, "npz", force=True)
    source(tmp_path / "source", SPECS["plain"])
    monkeypatch.chdir(place / "inner")
    with pytest.raises(ValueError, match="would delete the working folder"):
        exported(tmp_path, "npz", force=True)
    assert (place / "inner/weights.npz").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="a file; give a folder"):
        export_model(tmp_path / "source", tmp_path / "file", "npz", force=True)
    (tmp_path / "empty").mkdir()
    export_model(tmp_path / "source", tmp_path / "empty", "npz", report=lambda line: None)
    assert read_weights(tmp_path / "empty").spec == SPECS["plain"]


@pytest.mark.parametrize(("option", "value"), [("format", "pickle"), ("dtype", "float64")])
def test_unknown_formats_and_dtypes_list_the_known(option, value, tmp_path):
    source(tmp_path / "source", SPECS["plain"])
    arguments = {"format": "npz", "dtype": "float32", option: value}
    with pytest.raises(ValueError, match=f"--{option}: '{value}' is not allowed; allowed: .*(npz|bfloat16)"):
        exported(tmp_path, arguments.pop("format"), **arguments)


# ------------------------------------------------------------------ read back


@pytest.mark.parametrize("format", ["npz", "hf"])
def test_a_wrong_value_is_found_and_nothing_is_left(format, tmp_path, monkeypatch):
    source(tmp_path / "source", SPECS["pretraining"])
    write = export.WRITERS[format]

    def careless(folder, weights, *, dtype):
        values = weights.params["nsp_head/bias"]
        return write(
            folder,
            dataclasses.replace(
                weights, params={**weights.params, "nsp_head/bias": np.nextafter(values, np.float32(9))}
            ),
            dtype=dtype,
        )

    monkeypatch.setitem(export.WRITERS, format, careless)
    with pytest.raises(exits.Stop, match="nsp_head/bias differs from the model; nothing was exported") as caught:
        exported(tmp_path, format, verify=True)
    assert caught.value.code == exits.VERIFICATION_FAILED and names(tmp_path) == {"source"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_largest_difference_is_printed(dtype, tmp_path):
    source(tmp_path / "source", SPECS["mlm"])
    said = exported(tmp_path, "npz", verify=True, dtype=dtype)
    assert "read back: 42 arrays, bitwise equal" in said
    assert "arrays: largest difference from numpy 0.0e+00 (allowed 0.0e+00)" in said


PEER = """#!{python}
import json, sys
from pathlib import Path
import numpy as np
mode, scratch = {mode!r}, Path(sys.argv[-1])
if mode == "absent":
    sys.exit(7)
if mode == "familyless":
    print("transformers 0 has no family bert", file=sys.stderr)
    sys.exit(8)
if mode == "broken":
    sys.exit("ValueError: no such class")
for i in range(len(list(scratch.glob("in_*.npz")))):
    values = np.load({answers!r} + f"/out_{{i}}.npz")
    outputs = {{name: values[name] + (1e-3 if mode == "wrong" else 0) for name in values.files}}
    np.savez(scratch / f"out_{{i}}.npz", **outputs)
problems = ["missing_keys: bert.pooler.dense.bias"] if mode == "missing" else []
(scratch / "report.json").write_text(json.dumps({{"version": "0", "problems": problems}}))
"""


# Shapes of the batches whose outputs are compared: two, of one program each.
COMPARED = ((1, 1), (3, 17))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What this library computes, as another program's outputs."""
    from bert_jax.interop.programs.serving import INPUTS, forward, sample_inputs

    folder, weights = tmp_path_factory.mktemp("answers"), random_weights(ONE_LAYER["span"])
    ours = jax.jit(lambda params, *inputs: forward(weights.spec, params, *inputs))
    for i, batch in enumerate(sample_inputs(weights.spec, COMPARED)):
        outputs = ours(weights.params, *(batch[name].astype(np.int32) for name in INPUTS))
        np.savez(folder / f"out_{i}.npz", **{name: np.asarray(values) for name, values in outputs.items()})
    return folder


def peer(tmp_path, answers, mode) -> str:
    """A Python that plays transformers."""
    script = tmp_path / mode
    script.write_text(PEER.format(python=sys.executable, mode=mode, answers=str(answers)))
    script.chmod(0o755)
    return str(script)


def test_transformers_own_outputs_decide(tmp_path, answers, monkeypatch):
    compared = functools.partial(serving.sample_inputs, shapes=COMPARED)
    monkeypatch.setattr("bert_jax.interop.verification.sample_inputs", compared)
    source(tmp_path / "source", ONE_LAYER["span"])
    said = exported(tmp_path, "hf", verify=True, peer_python=peer(tmp_path, answers, "right"))
    assert any(re.match(r"end_logits: largest difference from transformers 0 \S+", line) for line in said)
    for mode, message in (
        ("wrong", r"transformers 0 differs in start_logits by 0\.001 \(allowed: \S+e-05\)"),
        ("missing", "transformers 0 reports missing_keys: bert.pooler.dense.bias; nothing was exported"),
    ):
        with pytest.raises(exits.Stop, match=message) as caught:
            exported(tmp_path, "hf", verify=True, force=True, peer_python=peer(tmp_path, answers, mode))
        assert caught.value.code == exits.VERIFICATION_FAILED and (tmp_path / "target/config.json").exists()
    said = exported(tmp_path, "hf", verify=True, force=True, peer_python=peer(tmp_path, answers, "absent"))
    assert any(line.startswith("outputs not compared: ") and "lacks transformers" in line for line in said)
    said = exported(tmp_path, "hf", verify=True, force=True, peer_python=peer(tmp_path, answers, "familyless"))
    assert "outputs not compared: transformers 0 has no family bert" in said
    with pytest.raises(ValueError, match="transformers cannot load the model: ValueError: no such class"):
        exported(tmp_path, "hf", verify=True, force=True, peer_python=peer(tmp_path, answers, "broken"))
    with pytest.raises(ValueError, match=r"nowhere: .* --peer_python"):
        exported(tmp_path, "hf", verify=True, force=True, peer_python=str(tmp_path / "nowhere"))


def test_the_first_model_of_a_newcomer_leaves():
    """The quickstart fits every format that holds other families than BERT."""
    config = load_config(PretrainConfig, ["--config", "quickstart"])
    spec = pretraining_spec(config, objective_of(config).model)
    assert formats_of(spec) == ["hf", "sentence-transformers", "onnx", "stablehlo", "npz", "gguf"]
    bert = load_config(PretrainConfig, ["--config", "quickstart_bert"])
    assert "tf1" in formats_of(pretraining_spec(bert, objective_of(bert).model))


def test_a_python_without_this_library_runs_the_program_of_the_peer(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "bert_jax"]:
        monkeypatch.setitem(sys.modules, name, None)
    program = {"__name__": "peer"}
    exec(Path(peer_program.__file__).read_text(encoding="utf-8"), program)
    assert program["main"]
