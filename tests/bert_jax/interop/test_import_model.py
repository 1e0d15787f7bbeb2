"""bert-jax import: what is saved is what was read, and a difference is never passed over."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import drawn, tiny_model
from hf_folders import drop, make_folder

from bert_jax.config import HeadsConfig, ModelSpec
from bert_jax.interop import import_model as module
from bert_jax.interop.hf.names import hf_names
from bert_jax.interop.import_model import import_model
from bert_jax.interop.model_bundle import Differences, ModelBundle, ReadOptions, parameter_shapes
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.interop.verification import check_hf
from bert_jax.process import exits
from bert_jax.training.checkpoint.digest import json_digest, write_checksums


def run(source: Path, target: Path, *, verify: bool = False, **options) -> list[str]:
    lines: list[str] = []
    import_model(source, target, ReadOptions(**options), verify=verify, report=lines.append)
    return lines


@pytest.mark.parametrize("name", ["BertForPreTraining", "RobertaForSequenceClassification"])
def test_saved_model_is_the_source(tmp_path, name):
    source = make_folder(tmp_path / "hf", name, vocabulary=40 if name.startswith("Bert") else None)
    lines = run(source, tmp_path / "out")
    before, after = read_weights(source), read_weights(tmp_path / "out")
    assert (after.spec, after.tokenizer_content) == (before.spec, before.tokenizer_content)
    for key, values in before.params.items():
        assert np.array_equal(after.params[key], values)
    assert f"{len(before.params)} tensors bitwise equal" in " ".join(lines) and set(before.notes) <= set(lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_what_allow_mismatch_accepts_is_accepted_by_every_step(tmp_path, monkeypatch):
    """The comparison with transformers reads config.json too."""
    monkeypatch.setattr(module, "check_hf", lambda *_: "not installed")
    for number, config in enumerate(({"emb_size": 312}, {"type_vocab_size": 3})):
        source = make_folder(tmp_path / f"hf{number}", "BertModel", config=config)
        lines = run(source, tmp_path / f"out{number}", verify=True, allow_mismatch=True)
        assert any(next(iter(config)) in line for line in lines)


def test_saved_model_can_be_imported_again(tmp_path):
    source = make_folder(tmp_path / "hf")
    run(source, tmp_path / "one")
    lines = run(tmp_path / "one", tmp_path / "two", verify=True)
    assert any("outputs not compared: transformers does not read this format" in line for line in lines)


def test_target_with_content_is_kept(tmp_path):
    source = make_folder(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ValueError, match="not empty"):
        run(source, tmp_path / "out")
    assert (tmp_path / "out" / "mine").exists()
    (tmp_path / "out" / "mine").unlink()
    run(source, tmp_path / "out")


class TestOptionsOnASavedModel:
    """What is asked for is done or refused, never passed over."""

    @pytest.fixture
    def saved(self, tmp_path):
        source = make_folder(tmp_path / "hf", "BertForSequenceClassification")
        run(source, tmp_path / "saved", lower_case=True)
        return tmp_path / "saved"

    def test_labels(self, saved):
        count = len(read_weights(saved).spec.heads.sequence_labels)
        names = tuple(f"name {i}" for i in range(count))
        assert read_weights(saved, ReadOptions(labels=names)).spec.heads.sequence_labels == names
        with pytest.raises(ValueError, match=rf"1 labels, .* {count} outputs"):
            read_weights(saved, ReadOptions(labels=("a",)))

    def test_labels_without_a_head(self, tmp_path):
        run(make_folder(tmp_path / "hf", "BertModel"), tmp_path / "saved")
        with pytest.raises(ValueError, match="no sequence or token head"):
            read_weights(tmp_path / "saved", ReadOptions(labels=("a", "b")))

    def test_case(self, saved):
        assert read_weights(saved, ReadOptions(lower_case=True)).spec == read_weights(saved).spec
        with pytest.raises(ValueError, match="the vocabulary of the model is lower-cased"):
            read_weights(saved, ReadOptions(lower_case=False))


def _one_bit(weights: ModelBundle) -> ModelBundle:
    params = dict(weights.params)
    values = params["encoder/layer_1/attention/value/kernel"].copy()
    values.view(np.uint32)[3, 5] ^= 1
    return dataclasses.replace(weights, params={**params, "encoder/layer_1/attention/value/kernel": values})


def _other_spec(weights: ModelBundle) -> ModelBundle:
    model = dataclasses.replace(weights.spec.model, norm_epsilon=1e-6)
    return dataclasses.replace(weights, spec=dataclasses.replace(weights.spec, model=model))


def _other_vocabulary(weights: ModelBundle) -> ModelBundle:
    content = weights.tokenizer_content.replace(b"w1\n", b"x1\n")
    return dataclasses.replace(weights, tokenizer_content=content)


@pytest.mark.parametrize(
    ("change", "words"),
    [(_one_bit, "attention/value/kernel"), (_other_spec, "description"), (_other_vocabulary, "tokenizer file")],
)
def test_what_was_saved_wrong_is_found(tmp_path, monkeypatch, change, words):
    source = make_folder(tmp_path / "hf")
    monkeypatch.setattr(module, "write_saved", lambda folder, weights: write_saved(folder, change(weights)))
    with pytest.raises(exits.Stop, match=words) as stop:
        run(source, tmp_path / "out")
    assert stop.value.code == exits.VERIFICATION_FAILED
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


class TestOutputs:
    """What follows from the comparison with transformers, which is another process's work."""

    def run(self, tmp_path, monkeypatch, result, **folder):
        asked: list[tuple] = []

        def check(*arguments):
            asked.append(arguments)
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(module, "check_hf", check)
        source = make_folder(tmp_path / "hf", **folder)
        return run(source, tmp_path / "out", verify=True), asked

    def test_equal(self, tmp_path, monkeypatch):
        result = Differences("transformers 9", {"logits": (1e-6, 2e-5)}, ("unexpected: cls.x",))
        lines, asked = self.run(tmp_path, monkeypatch, result)
        assert "logits: largest difference from transformers 9 1.0e-06 (allowed 2.0e-05)" in lines
        assert "transformers 9 reports unexpected: cls.x" in lines and asked[0][0] == tmp_path / "hf"

    @pytest.mark.parametrize("difference", [3e-5, math.inf, math.nan])
    def test_different(self, tmp_path, monkeypatch, difference):
        result = Differences("transformers 9", {"a": (0.0, 2e-5), "logits": (difference, 2e-5)})
        with pytest.raises(exits.Stop, match="transformers 9 differs in logits by") as stop:
            self.run(tmp_path, monkeypatch, result)
        assert stop.value.code == exits.VERIFICATION_FAILED and not (tmp_path / "out").exists()

    def test_not_installed(self, tmp_path, monkeypatch):
        lines, _ = self.run(tmp_path, monkeypatch, "transformers: this Python has not")
        assert "outputs not compared: transformers: this Python has not" in lines

    def test_transformers_cannot_load_it(self, tmp_path, monkeypatch):
        with pytest.raises(ValueError, match="cannot load it; set --no_verify to skip this comparison"):
            self.run(tmp_path, monkeypatch, ValueError("transformers cannot load it"))
        assert not (tmp_path / "out").exists()

    def test_heads_beside_the_class_are_not_asked_for(self, tmp_path, monkeypatch):
        """bert-base-uncased: transformers' class has the MLM head alone."""
        config = {"architectures": ["BertForMaskedLM"]}
        result = Differences("transformers 9", {"logits": (0.0, 2e-5)})
        _, asked = self.run(tmp_path, monkeypatch, result, name="BertForPreTraining", config=config)
        assert asked[0][1].spec.heads.present() == ("mlm",)
        assert read_weights(tmp_path / "out").spec.heads.present() == ("pooler", "mlm", "nsp")

    def test_random_heads_are_not_compared(self, tmp_path, monkeypatch):
        lines, asked = self.run(tmp_path, monkeypatch, None, change=drop("cls."))
        assert any("initialize its mlm layer randomly" in line for line in lines) and not asked

    def test_nan_is_refused(self, tmp_path, monkeypatch):
        with pytest.raises(ValueError, match=r"cls\.predictions\.bias has NaN"):
            self.run(tmp_path, monkeypatch, None, change=lambda t: t["cls.predictions.bias"].fill(np.nan))

    @pytest.mark.parametrize("place", ["", "0_Transformer"])
    def test_sentence_transformers_folder(self, tmp_path, monkeypatch, place):
        """The encoder is compared with transformers, the vectors with sentence-transformers."""
        lines, asked = self.run_sentences(tmp_path, monkeypatch, place, 3e-7)
        assert "last_hidden_state: largest difference from transformers 9 1.0e-06 (allowed 2.0e-05)" in lines
        assert "sentence_embedding: largest difference from sentence-transformers 9 3.0e-07" in " ".join(lines)
        encoder, vectors = asked
        assert encoder[0] == tmp_path / "st" / place and encoder[1].spec.sentence is None
        assert vectors[0] == tmp_path / "st" and vectors[1].spec.sentence.pooling == ("mean",)

    def test_sentence_vectors_differ(self, tmp_path, monkeypatch):
        with pytest.raises(exits.Stop, match="sentence-transformers 9 differs in sentence_embedding by"):
            self.run_sentences(tmp_path, monkeypatch, "", 2e-5)
        assert not (tmp_path / "out").exists()

    def run_sentences(self, tmp_path, monkeypatch, place, difference):
        source = tmp_path / "st"
        make_folder(source / place, "BertModel")
        (source / "1_Pooling").mkdir()
        (source / "1_Pooling" / "config.json").write_text("{}")
        kinds = {"Transformer": place, "Pooling": "1_Pooling"}
        (source / "modules.json").write_text(
            json.dumps([{"type": f"sentence_transformers.models.{kind}", "path": at} for kind, at in kinds.items()])
        )
        asked: list[tuple] = []

        def check(result):
            return lambda *arguments: asked.append(arguments) or result

        encoder = Differences("transformers 9", {"last_hidden_state": (1e-6, 2e-5)})
        vectors = Differences("sentence-transformers 9", {"sentence_embedding": (difference, 1e-5)})
        monkeypatch.setattr(module, "check_hf", check(encoder))
        monkeypatch.setattr(module, "check_sentence_transformers", check(vectors))
        return run(source, tmp_path / "out", verify=True), asked


def test_another_python_without_numpy(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    source = make_folder(tmp_path / "hf")
    assert "lacks transformers or torch" in check_hf(source, read_weights(source), str(python))


SCRIPT = """
import sys
from pathlib import Path
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.interop.import_model import import_model

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

before = status("VmRSS")
import_model(Path(sys.argv[1]), Path(sys.argv[2]), ReadOptions(), verify=False, report=lambda line: None)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_memory(tmp_path):
    """Peak above that of the imports: 1.5 x the weights, and 120 MB for the start of jax."""
    config = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 10}
    source = make_folder(tmp_path / "small", "BertModel", vocabulary=None)
    spec = read_weights(source).spec
    model = dataclasses.replace(
        spec.model, hidden_size=1024, num_attention_heads=16, intermediate_size=4096, num_layers=10
    )
    spec = dataclasses.replace(spec, model=model)
    header, end = {}, 0
    for name, shape in parameter_shapes(spec).items():
        entry = hf_names(spec)[name]
        stored = shape[::-1] if entry.transpose else shape
        start, end = end, end + 4 * math.prod(shape)
        header[entry.name] = {"dtype": "F32", "shape": list(stored), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    told = json.loads((source / "config.json").read_text()) | config
    large = tmp_path / "large"
    large.mkdir()
    (large / "config.json").write_text(json.dumps(told))
    with (large / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)  # zeros, which take no room
    command = [sys.executable, "-c", SCRIPT, str(large), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(tmp_path / "out")
    assert int(done.stdout) <= 1.5 * end + 120e6, f"{int(done.stdout) / end:.2f} x the weights"


def test_a_saved_model_of_a_version_with_fewer_fields_is_read(tmp_path):
    weights = drawn(ModelSpec(model=tiny_model(12), heads=HeadsConfig(pooler=True)), 0.2)
    write_saved(tmp_path / "m", weights)
    listing = tmp_path / "m" / "checkpoints" / "0"
    meta = json.loads((listing / "meta.json").read_text())
    spec = json.loads((tmp_path / "m" / "model.json").read_text())
    for fields in (meta["spec"]["model"], spec["model"]):
        del fields["rotary_base"], fields["attention"]
    del meta["json_digest"]
    meta["json_digest"] = json_digest(meta)
    (listing / "meta.json").write_text(json.dumps(meta))
    (tmp_path / "m" / "model.json").write_text(json.dumps(spec))
    write_checksums(listing)
    assert read_weights(tmp_path / "m").spec == weights.spec


def test_parameters_of_another_shape_are_not_written(tmp_path):
    weights = drawn(ModelSpec(model=tiny_model(12), heads=HeadsConfig(pooler=True)), 0.2)
    weights.params["pooler/bias"] = weights.params["pooler/bias"][1:]
    with pytest.raises(ValueError, match="pooler/bias has shape"):
        write_saved(tmp_path / "m", weights)
    assert not (tmp_path / "m").exists()
