"""What a fine-tuning run takes over from the model that it starts from."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from finetune_cases import PIECES, configured, saved_model

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, RunOptions
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import build_config, read_settings
from bert_jax.finetuning.resolve import redrawn_layers
from bert_jax.interop import saved_model as native
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import replace_saved
from bert_jax.start import finetuning as module
from bert_jax.start.fixed_options import whole_name
from bert_jax.start.plan import plan_start
from bert_jax.start.tokenizer import store_tokenizer
from bert_jax.training.launch import RECORD

TAGS = ("O", "B-PER", "I-PER")
LAYERS = ("feature_mix", "bilstm")


def tagger(tags):
    return HeadsConfig(token_labels=tags, crf=True, bilstm=8, features="weighted_all")


@pytest.mark.parametrize(
    ("tags", "options", "drawn"),
    [
        (TAGS, "", ()),
        (("O", "B-LOC", "I-LOC"), "", ("token_head", "crf")),
        (TAGS, "--regularization.reinit_head true", (*LAYERS, "token_head", "crf")),
    ],
    ids=["same", "other tags", "reinit_head"],
)
def test_parts_of_a_tagger(tmp_path, tags, options, drawn):
    """What belongs to the tags is only for the same ones; the task's own layers go with ``reinit_head``."""
    source = saved_model(tmp_path / "model", tagger(TAGS))
    config, start = configured(source, tmp_path / "w", options)
    spec = ModelSpec(model=config.model, heads=tagger(tags))
    found = start.with_parameters(
        spec, redrawn=redrawn_layers(config), redraw_head=config.regularization.reinit_head
    )
    parts = {name.partition("/")[0] for name in found.params}
    assert parts == {"embeddings", "encoder", *LAYERS, "token_head", "crf"}.difference(drawn)
    (said,) = [line for line in found.messages if line.startswith("randomly initialized")] or [""]
    assert set(said.removeprefix("randomly initialized: ").split(", ")) == (set(drawn) or {""})


def test_mixout_needs_weights_to_go_back_to(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    words = ["--data.vocab", str(tmp_path / "vocab.txt"), "--regularization.mixout", "0.1"]
    with pytest.raises(ValueError, match=r"^regularization.mixout: 0.1 .*--init_from"):
        plan_start(FinetuneConfig, RunOptions(), tmp_path / "w", read_settings(words).all)
    plan_start(FinetuneConfig, RunOptions(), tmp_path / "w", read_settings(words[:2]).all)


def test_ids_of_the_vocabulary_in_a_model_with_random_weights(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    words = ["--data.vocab", str(tmp_path / "vocab.txt")]

    def model(*more):
        start = plan_start(FinetuneConfig, RunOptions(), tmp_path / "w", read_settings([*words, *more]).all)
        return build_config(FinetuneConfig, [*read_settings([*words, *more]).all, *start.settings]).model

    global_tokens = ("--model.attention_windows", "4", "--model.global_tokens", "8", "--model.separator_id", "9")
    assert model(*global_tokens).separator_id == PIECES.index("[SEP]")
    assert model().separator_id == ModelConfig().separator_id
    with pytest.raises(ValueError, match=r"^model\.position_offset: 2, but padding has id 0 .* allowed: 1, "):
        model("--model.position_offset", "2")


def test_the_same_model_from_another_working_directory(tmp_path, monkeypatch):
    """Also by another name; and another model of the same relative name is another one."""
    source, workdir = saved_model(tmp_path / "one" / "model"), tmp_path / "w"
    monkeypatch.chdir(tmp_path / "one")
    _, start = configured(Path("model"), workdir)
    workdir.mkdir()
    (workdir / RECORD).write_text(start.record)
    store_tokenizer(workdir, start.tokenizer_config, start.tokenizer_content)
    monkeypatch.setattr(module, "saved_steps", lambda _: [1])
    monkeypatch.chdir(workdir)
    saved_model(workdir / "model")
    (workdir / "link").symlink_to(source)
    for name in (source, "link", "../one/model"):
        plan_start(FinetuneConfig, RunOptions(init_from=str(name)), workdir, [])
    with pytest.raises(ValueError, match=f"^--init_from model: the run in {workdir} started from {source}; "):
        plan_start(FinetuneConfig, RunOptions(init_from="model"), workdir, [])
    assert whole_name("gs://bucket/model") == "gs://bucket/model" and not whole_name("")


def test_best_parameters_whose_replacement_was_killed(tmp_path, monkeypatch):
    """Between the two renames the older ones are there, for every reader, until newer ones are."""
    best = saved_model(tmp_path / "best")
    (tmp_path / "config.yaml").write_text("task:\n  kind: classification\n")
    older = read_weights(best)
    newer = dataclasses.replace(older, params={name: values + 1 for name, values in older.params.items()})
    rename = Path.rename

    def killed(self, target):
        if (self.name, target.name) == (".best.partial", "best"):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            replace_saved(best, newer, 1)
    assert not best.exists()
    for path in (tmp_path, best):
        assert np.array_equal(read_weights(path).params["pooler/kernel"], older.params["pooler/kernel"])

    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(native, "write_saved", full)
        with pytest.raises(OSError, match="no space"):
            replace_saved(best, newer, 2)
    assert np.array_equal(read_weights(tmp_path).params["pooler/kernel"], older.params["pooler/kernel"])
    replace_saved(best, newer, 2)
    assert np.array_equal(read_weights(tmp_path).params["pooler/kernel"], newer.params["pooler/kernel"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "config.yaml"]
