"""docs/weights.md: the heads of each family that each format holds, as the writers do.

UPDATE_GOLDEN=1 python -m pytest -n 0 tests/bert_jax/interop/test_family_matrix.py      writes the table
"""

import dataclasses
import os
from functools import cache

import numpy as np
import pytest
from command import REPOSITORY
from drawn_families import drawn_specs, random_params
from exported import VOCABULARY

from bert_jax.config import HeadsConfig, ModelSpec, SentenceConfig, TokenizerConfig
from bert_jax.interop import export
from bert_jax.interop.export_table import FORMATS, fit
from bert_jax.interop.hf.families import FAMILIES
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.model_card import model_card
from bert_jax.interop.readers import read_weights

DOCS = REPOSITORY / "docs" / "weights.md"
BEGIN, END = "<!-- families x formats: begin -->\n", "<!-- families x formats: end -->\n"
LABELS = ("a", "b", "c")
# Head -> fields of HeadsConfig.
HEADS = {
    "encoder": {}, "pooler": {"pooler": True}, "mlm": {"mlm": True}, "nsp": {"pooler": True, "nsp": True},
    "rtd": {"rtd": True}, "sequence": {"pooler": True, "sequence_labels": LABELS},
    "token": {"token_labels": LABELS}, "span": {"span": True}, "choice": {"pooler": True, "choice": True},
    "sentence": {},
}  # fmt: skip
PROGRAMS = {"onnx": 1e-4, "stablehlo": 1e-5}


@cache
def model_of(family):
    _, plain = next(drawn_specs(family))
    return dataclasses.replace(plain.model, vocab_size=101)


def bundle_of(family, held, drawn) -> ModelBundle:
    """A model of the family with the heads ``held``, with drawn parameters or without parameters."""
    model = model_of(family)
    fields = {name: value for head in held for name, value in HEADS[head].items()}
    fields |= (
        {"pooler": True} if "token_pooler" in model.head_parts and {"token", "span"}.intersection(held) else {}
    )
    spec = ModelSpec(
        model=model, heads=HeadsConfig(**fields), family=family, tokenizer=TokenizerConfig(),
        sentence=SentenceConfig() if "sentence" in held else None,
    )  # fmt: skip
    params = random_params(spec) if drawn else {}
    return ModelBundle(spec=spec, params=params, tokenizer_content=VOCABULARY)


def fitted(family, head, format, drawn=False) -> ModelBundle | None:
    """What the exporter writes, if the head is in it."""
    try:
        bundle, _ = fit(bundle_of(family, [head], drawn), format)
    except ValueError:
        return None
    if head == "sentence":
        return bundle if bundle.spec.sentence is not None else None
    return bundle if head == "encoder" or head in bundle.spec.heads.present() else None


def cell(family, format) -> str:
    held = [head for head in HEADS if fitted(family, head, format) is not None]
    missing = [head for head in HEADS if head not in held]
    if not held:
        return "no"
    if not missing:
        return "all"
    return f"all but {', '.join(missing)}" if len(missing) <= 4 else ", ".join(held)


def table() -> str:
    lines = [f"| family | {' | '.join(FORMATS)} |", f"|{'---|' * (len(FORMATS) + 1)}"]
    for family in FAMILIES:
        lines.append(f"| `{family}` | {' | '.join(cell(family, format) for format in FORMATS)} |")
    return "\n".join(lines) + "\n"


def test_the_matrix_in_the_docs_is_that_of_the_exporter(monkeypatch):
    monkeypatch.setattr(
        "bert_jax.interop.export_table.parameter_shapes", lambda spec: {}
    )  # specs without parameters
    text = DOCS.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    if os.environ.get("UPDATE_GOLDEN"):
        DOCS.write_text(f"{before}{BEGIN}{table()}{END}{after}", encoding="utf-8")
    assert f"{BEGIN}{table()}{END}" in DOCS.read_text(encoding="utf-8")


QUICK = (("neobert", "sentence-transformers"),)
CELLS = [
    pytest.param(family, format, marks=() if (family, format) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for format in FORMATS
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "format"), CELLS)
def test_every_head_of_a_cell_is_written(tmp_path, family, format):
    """Formats of parameters are read back; a program has all heads and is run."""
    bundles = {head: fitted(family, head, format, drawn=True) for head in HEADS}
    held = {head: bundle for head, bundle in bundles.items() if bundle is not None}
    if format in PROGRAMS and held:
        bundle, _ = fit(bundle_of(family, held, drawn=True), format)
        assert {*bundle.spec.heads.present()} >= {*held} - {"encoder", "sentence"}
        assert (bundle.spec.sentence is not None) == ("sentence" in held)
        export.WRITERS[format](tmp_path, bundle, dtype="float32")
        check = {"onnx": export.check_onnx, "stablehlo": export.check_stablehlo}[format]
        found = check(tmp_path, bundle, ((3, 17),))
        assert found and max(found.values()) <= PROGRAMS[format], found
        return
    for head, bundle in held.items():
        (tmp_path / head).mkdir()
        export.WRITERS[format](tmp_path / head, bundle, dtype="float32")
        again = read_weights(tmp_path / head, ReadOptions())
        assert set(bundle.spec.heads.present()) <= set(again.spec.heads.present()) | {"pooler"}, head
        if format == "tf1":
            continue  # a checkpoint of the encoder has the pooler of zeros
        assert again.params.keys() == bundle.params.keys(), head
        assert all(np.array_equal(again.params[name], array) for name, array in bundle.params.items()), head


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_of_each_family_has_a_card(family):
    *_, (name, spec) = drawn_specs(family)
    bundle = ModelBundle(spec=spec, params={})
    card = model_card(bundle, "hf", "float32", name, [])
    assert "How to load it" in card and ("trust_remote_code" in card) == bool(FAMILIES[family].code)
    assert f"`{bundle.spec.model.activation}`: " in card and ("RMSNorm" in card) == (family == "neobert")


@pytest.mark.parametrize("family", ["electra", "neobert"])
def test_a_task_model_of_a_family_without_a_pooler_becomes_an_encoder(tmp_path, family):
    """The head and the dense layer before it are left out of the folder of sentence-transformers, by name."""
    bundle, notes = fit(bundle_of(family, ["sequence"], drawn=True), "sentence-transformers")
    assert not bundle.spec.heads.present()
    assert any("cannot represent sequence" in note for note in notes) and "has no pooler" in notes[-1]
    export.WRITERS["sentence-transformers"](tmp_path, bundle, dtype="float32")
    again = read_weights(tmp_path, ReadOptions())
    assert again.params.keys() == bundle.params.keys()
