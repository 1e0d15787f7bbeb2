"""Settings of a task: what a config states, what files keep of it, and the documents of words."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from builders import drawn, tiny_model, words
from inference_models import make_model, shared_model

import bert_jax
from bert_jax.config import HeadsConfig, ModelSpec, SentenceConfig, TaskSettings, TokenizerConfig, spec_from_json
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.spec import spec_to_json
from bert_jax.contrib.analysis.retrieval import relevance_label
from bert_jax.inference import predict as module
from bert_jax.inference.text_files import read_texts
from bert_jax.inference.zero_shot import zero_shot
from bert_jax.interop.export import export_model
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.tasks.tagging import TaggingTask
from bert_jax.tokenization import WordPieceTokenizer

PIECES = [*words(40), "."]
TOKENIZER = WordPieceTokenizer(PIECES, lower_case=True)
SCRIPT = Path(__file__).resolve().parents[3] / "docs" / "examples" / "serve_onnx.py"


def saved(folder, heads, task=None, *, sentence=None, origin=None, length=64):
    """A saved model with drawn weights; its folder."""
    spec = ModelSpec(
        model=tiny_model(len(PIECES), max_position_embeddings=length), heads=heads, sentence=sentence,
        tokenizer=TokenizerConfig(), task=task,
    )  # fmt: skip
    write_saved(folder, dataclasses.replace(drawn(spec, 0.3, PIECES), origin=origin or {}))
    return folder


# ------------------------------------------------------------------ the record


@pytest.mark.parametrize("kind", ["classification", "qa", "tagging", "sentence"])
def test_defaults_are_those_of_fine_tuning(kind):
    config = FinetuneConfig()
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, kind=kind))
    assert config.settings == TaskSettings(kind=kind, max_length=config.task.max_length)


def test_settings_of_a_stranger_are_checked():
    spec = ModelSpec(model=tiny_model(9), heads=HeadsConfig(), task=TaskSettings(kind="qa", max_length=40))
    values = json.loads(spec_to_json(spec))
    assert spec_from_json(json.dumps(values), "f") == spec
    for name, value in (
        ("max_length", 65), ("max_length", 0), ("max_length", 2**63), ("doc_stride", 0), ("n_best", -1),
        ("head_share", 1e308), ("null_threshold", float("nan")), ("kind", "image"), ("label_names", ["a"]),
    ):  # fmt: skip
        changed = json.dumps({**values, "task": {**values["task"], name: value}})
        with pytest.raises(ValueError, match=f"^f: .*{name}"):
            spec_from_json(changed, "f")


def test_a_model_without_settings_has_the_file_of_before():
    spec = ModelSpec(model=tiny_model(9), heads=HeadsConfig())
    assert "task" not in json.loads(spec_to_json(spec))


def test_an_older_run_is_noted(tmp_path):
    heads = HeadsConfig(pooler=True, sequence_labels=("a", "b"))
    old = saved(tmp_path / "old", heads, origin={"format": "fine-tuning run"})
    (note,) = read_weights(old).notes
    assert "older version" in note and "at most 64 tokens" in note
    assert read_weights(saved(tmp_path / "imported", heads)).notes == ()
    new = saved(tmp_path / "new", heads, TaskSettings(kind="classification", max_length=32))
    assert read_weights(new).notes == ()


def test_names_of_classes():
    heads = HeadsConfig(pooler=True, sequence_labels=("bad", "good"))
    task = TaskSettings(kind="classification", max_length=16, labels=("0", "1"), label_names=("bad", "good"))
    loaded = make_model(heads)
    loaded.spec = dataclasses.replace(loaded.spec, task=task)
    assert loaded.spec.settings_of("classification").labels == ("0", "1")
    assert [relevance_label(loaded, given) for given in (None, "bad", "1")] == ["1", "0", "1"]
    renamed = dataclasses.replace(heads, sequence_labels=("no", "yes"))
    spec = dataclasses.replace(loaded.spec, heads=renamed)
    assert spec.settings_of("classification").labels == ("no", "yes")


# ------------------------------------------------------------------ folders of other libraries

KEPT = {
    "crf": (
        "hf", HeadsConfig(token_labels=("O", "B"), crf=True), None,
        TaskSettings(kind="tagging", max_length=24, tags=("O", "B"), crf=True, document_context=True),
    ),
    "exits": (
        "hf", HeadsConfig(pooler=True, sequence_labels=("a", "b"), exits=(1,)), None,
        TaskSettings(kind="classification", max_length=24, labels=("a", "b"), truncation="tail"),
    ),
    "pair": (
        "sentence-transformers", HeadsConfig(pair_labels=("a", "b"), pair_hidden=4), SentenceConfig(),
        TaskSettings(kind="sentence", max_length=24, labels=("a", "b")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_folders_of_other_libraries_keep_what_they_have_no_class_for(tmp_path, name):
    form, heads, sentence, task = KEPT[name]
    source, told = saved(tmp_path / "model", heads, task, sentence=sentence), []
    export_model(source, tmp_path / "out", form, verify=False, report=told.append)
    assert any("only bert_jax reads" in line for line in told)
    one, other = read_weights(source), read_weights(tmp_path / "out")
    assert other.spec.task == task and other.spec.heads == one.spec.heads
    assert one.params.keys() == other.params.keys()
    assert all(np.array_equal(values, other.params[key]) for key, values in one.params.items())
    # Without both files it is a folder of the other library.
    for file in ("bert_jax.json", "bert_jax.safetensors"):
        (tmp_path / "out" / file).unlink()
    plain = read_weights(tmp_path / "out").spec
    assert plain.task is None and not (plain.heads.crf or plain.heads.exits or plain.heads.pair_labels)


def test_damaged_details_are_refused_in_one_line(tmp_path):
    form, heads, sentence, task = KEPT["crf"]
    source, out = saved(tmp_path / "model", heads, task, sentence=sentence), tmp_path / "out"
    export_model(source, out, form, verify=False, report=lambda line: None)
    content = json.loads((out / "bert_jax.json").read_text())
    for changes in ({"exits": [1]}, {"exits": [9]}, {"pair_hidden": 2**62, "pair_labels": ["a"]}, {"key": 1}):
        (out / "bert_jax.json").write_text(json.dumps(content | changes))
        with pytest.raises(ValueError, match="bert_jax") as error:
            read_weights(out)
        assert "\n" not in str(error.value)
    (out / "bert_jax.json").write_text(json.dumps(content))
    (out / "bert_jax.safetensors").write_bytes(b"\x01")
    with pytest.raises(ValueError, match=r"bert_jax\.safetensors"):
        read_weights(out)


# ------------------------------------------------------------------ documents


def sentences(rng, count):
    return [{"words": [f"w{n}" for n in rng.integers(0, 40, rng.integers(1, 6))]} for _ in range(count)]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_context_does_not_depend_on_the_chunks(size):
    settings = TaskSettings(kind="tagging", max_length=16, tags=("O", "B"), document_context=True)
    task, rng = TaggingTask(settings, TOKENIZER), np.random.default_rng(0)
    lines = [{**line, "document": i // 9} for i, line in enumerate(sentences(rng, 40))]
    lines.insert(20, "w1 w2 w3")  # a plain text has no context, and divides its document
    inputs = [module._input(task, "token", line) for line in lines]
    found = []
    for chunk in module._chunks(iter(inputs), size, settings.max_length):
        units = module._units(task, chunk)
        assert {unit.record for unit in units} == set(range(len(chunk.own)))
        found += [unit.sequences[0].ids for unit in units]
    (whole,) = module._chunks(iter(inputs), 1000, settings.max_length)
    assert found == [unit.sequences[0].ids for unit in module._units(task, whole)]
    assert found[0] != task.featurize([inputs[0].record], training=False)[0].sequences[0].ids


def test_blank_lines_and_fields_divide_documents(tmp_path):
    file = tmp_path / "words.jsonl"
    lines = [
        '{"words": ["a"]}',
        '{"words": ["b"]}',
        "",
        "",
        '{"words": ["c"]}',
        '{"words": ["d"], "document": "x"}',
    ]
    file.write_text("\n".join(lines) + "\n")
    values = list(read_texts((), str(file), False, of_tasks=True))
    assert [value["document"] for value in values] == [0, 0, 2, "x"]
    assert "document" not in next(read_texts((), str(file), False))
    settings = TaskSettings(kind="tagging", max_length=16, tags=("O", "B"), document_context=True)
    task = TaggingTask(settings, TOKENIZER)
    # The field of the lines that bert-data records prints.
    groups = [module._input(task, "token", {**value, "group": "g"}).record.group for value in values]
    assert len({*groups}) == 1


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.conll", "-DOCSTART- O\n\nw1 O\nw2 B\n\nw3 O\n\n-DOCSTART- O\n\nw4 O\n", [1, 1, 2]),
        ("a.bio", "w1\tO\nw2\tB\n\nw3\tO\n\nw4\tO\n", ["sentence 0", "sentence 1", "sentence 2"]),
        ("a.conllu", "# newdoc\n1\tw1\t_\n2-3\tx\t_\n2\tw2\t_\n\n1\tw3\t_\n\n# newdoc\n1\tw4\t_\n", [1, 1, 2]),
    ],
)  # fmt: skip
def test_conll_files_are_inputs(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    values = list(read_texts((), str(tmp_path / name), False, of_tasks=True))
    assert [value["words"] for value in values] == [["w1", "w2"], ["w3"], ["w4"]]
    assert [value["document"] for value in values] == expected


def test_files_of_fine_tuning_that_predict_does_not_read(tmp_path):
    for name in ("dev.csv", "dev.tsv.gz", "dev.json"):
        with pytest.raises(ValueError, match=rf"{name}: .*bert-data records"):
            read_texts((), name, False)
    for name, json_lines in (("dev.jsonl", False), ("dev.json", True)):
        read_texts((), name, json_lines)  # opened when the first one is read
    (tmp_path / "a.conllu").write_text("w1\n")
    with pytest.raises(ValueError, match=r"a\.conllu:1: no word"):
        list(read_texts((), str(tmp_path / "a.conllu"), False, of_tasks=True))


@pytest.mark.parametrize("given", [{"negative": "w3"}, {"negatives": ["w3"]}, {"negative": ["w3"]}])
def test_triplets_are_inputs(given):
    record = module._record({"text": "w1", "text_pair": "w2", **given})
    assert (record.text_pair, record.negatives) == ("w2", ("w3",))


# ------------------------------------------------------------------ other readers of the settings


@pytest.mark.parametrize(("options", "orders"), [({}, 1), ({"pair_order": "both", "truncation": "tail"}, 2)])
def test_zero_shot_reads_texts_as_the_run(monkeypatch, options, orders):
    loaded = shared_model(HeadsConfig(pooler=True, sequence_labels=("contradiction", "entailment")))
    task = TaskSettings(kind="classification", max_length=12, **options)
    loaded.spec, units = dataclasses.replace(loaded.spec, task=task), []
    monkeypatch.setattr(
        loaded, "windows", lambda texts, featurize, *_, **__: units.extend(featurize([*texts])) or ()
    )
    text = " ".join(f"w{n}" for n in range(20))
    list(zero_shot(loaded, [text], ["w1", "w2"], template="w30 {}"))
    assert len(units) == 2 and all(len(unit.sequences) == orders for unit in units)
    ids = units[0].sequences[0].ids
    kept = loaded.tokenizer.encode(text)[-7:] if orders == 2 else loaded.tokenizer.encode(text)[:7]
    assert len(ids) == 12 and ids[1:8] == kept


def serving_example():
    """The module ``docs/examples/serve_onnx.py``."""
    pytest.importorskip("onnxruntime")
    spec = importlib.util.spec_from_file_location("serve_onnx", SCRIPT)
    served = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(served)
    return served


SERVED = {
    "names": {"labels": ("0", "1"), "label_names": ("a", "b")},
    "tail": {"truncation": "tail"},
    "both": {"pair_order": "both"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_the_serving_example_answers_as_the_run(tmp_path, name):
    heads = HeadsConfig(pooler=True, sequence_labels=("a", "b"))
    task = TaskSettings(kind="classification", max_length=12, **{"labels": ("a", "b"), **SERVED[name]})
    source = saved(tmp_path / "model", heads, task)
    export_model(source, tmp_path / "out", "onnx", verify=False, report=lambda line: None)
    served = serving_example()
    long = " ".join(f"w{n}" for n in range(15))
    pairs = [["w1 w2", long], ["w3", "w4"]]
    answers = served.Model(tmp_path / "out").answers(pairs)
    expected = bert_jax.load(source).predict([tuple(pair) for pair in pairs])
    for answer, one in zip(answers, expected, strict=True):
        assert answer["scores"] == pytest.approx(one["probabilities"], abs=1e-5)
        assert answer["truncated"] is one.get("truncated", False)


def test_the_serving_example_does_not_read_long_texts_otherwise(tmp_path):
    heads = HeadsConfig(pooler=True, sequence_labels=("a", "b"))
    task = TaskSettings(kind="classification", max_length=12, labels=("a", "b"), truncation="windows")
    source = saved(tmp_path / "model", heads, task)
    export_model(source, tmp_path / "out", "onnx", verify=False, report=lambda line: None)
    served = serving_example()
    model = served.Model(tmp_path / "out")
    assert model.answers(["w1 w2"])[0]["truncated"] is False
    with pytest.raises(ValueError, match=r"text 1: more than 12 tokens; .* windows"):
        model.answers(["w1", "w1 " * 30])
