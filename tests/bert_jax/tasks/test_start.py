"""What a fine-tuning run takes over from the model that it starts from."""

import pytest
from finetune_cases import PIECES, configured, saved_model

from bert_jax.config import HeadsConfig
from bert_jax.config.loader import RunOptions, Setting
from bert_jax.tasks.start import resolve, warm_start

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
    found = warm_start(start, config, tagger(tags), None)
    parts = {name.partition("/")[0] for name in found.params}
    assert parts == {"embeddings", "encoder", *LAYERS, "token_head", "crf"}.difference(drawn)
    (said,) = [line for line in found.messages if line.startswith("drawn anew")] or [""]
    assert set(said.removeprefix("drawn anew: ").split(", ")) == (set(drawn) or {""})


def test_mixout_needs_weights_to_go_back_to(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    given = {"data.vocab": str(tmp_path / "vocab.txt"), "regularization.mixout": "0.1"}
    settings = [Setting("command line", key, value) for key, value in given.items()]
    with pytest.raises(ValueError, match=r"^regularization.mixout: 0.1 has no use without --init_from, the model "):
        resolve(RunOptions(), tmp_path / "w", settings)
    resolve(RunOptions(), tmp_path / "w", settings[:1])
