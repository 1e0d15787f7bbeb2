"""What a run keeps of a sentence-transformers source: pooling, normalization, prompts, maximum length."""

import dataclasses

import pytest
import yaml
from builders import drawn, tiny_model, words

from bert_jax.config import (
    HeadsConfig,
    ModelSpec,
    PretrainConfig,
    RunOptions,
    SentenceConfig,
    SentenceModule,
    TokenizerConfig,
)
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import build_config, read_settings
from bert_jax.interop.saved_model import write_saved
from bert_jax.interop.taken_over import with_kept, with_prompts
from bert_jax.start.plan import plan_start
from bert_jax.training.launch import RECORD
from bert_jax.training.workdir import read_record

NORMALIZE = SentenceModule(kind="normalize")
MEAN = SentenceConfig(
    pooling=("mean",), modules=(NORMALIZE,), prompts=(("query", "query: "),), similarity="dot", include_prompt=False
)
MODEL = tiny_model(40, hidden_size=8, intermediate_size=16, max_position_embeddings=32)


def source(tmp_path, sentence=MEAN, heads=None, **tokenizer):
    settings = TokenizerConfig(**{"max_length": 24, "truncation_side": "left", **tokenizer})
    spec = ModelSpec(model=MODEL, heads=heads or HeadsConfig(), sentence=sentence, tokenizer=settings)
    write_saved(tmp_path / "source", drawn(spec, 0.3, words(35)))
    return spec


def plan(tmp_path, config_type, settings, **options):
    given = [word for key, value in settings.items() for word in (f"--{key}", value)]
    options = RunOptions(init_from=str(tmp_path / "source"), **options)
    start = plan_start(config_type, options, tmp_path / "run", read_settings(given).all)
    return start, build_config(config_type, [*read_settings(given).all, *start.settings])


@pytest.mark.slow
def test_a_pretrained_model_has_the_vectors_of_its_source(tmp_path):
    spec = source(tmp_path)
    start, _ = plan(tmp_path, PretrainConfig, {"data.shards": str(tmp_path / "shards"), "data.seq_length": "16"})
    (line,) = [message for message in start.messages if message.startswith("kept from the initial model")]
    for word in ("mean", "normalization", "query", "max_length 24", "truncation_side left"):
        assert word in line
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECORD).write_text(start.record)
    own = ModelSpec(model=MODEL, heads=HeadsConfig(mlm=True), tokenizer=TokenizerConfig())
    again = with_kept(own, read_record(tmp_path / "run")["kept"])
    assert again.sentence == spec.sentence and again.tokenizer == spec.tokenizer
    assert again.heads == own.heads


def test_longer_positions_drop_the_limit_and_dense_layers_are_named(tmp_path):
    dense = SentenceModule(kind="dense", features=4)
    source(tmp_path, dataclasses.replace(MEAN, modules=(dense, NORMALIZE)))
    settings = {"data.shards": str(tmp_path / "shards"), "data.seq_length": "64"}
    start, _ = plan(tmp_path, PretrainConfig, settings, extend_positions="tile")
    assert "max_length" not in start.kept and start.kept == {}
    kept = yaml.safe_load(start.record)["kept"]
    assert "max_length" not in kept and [module["kind"] for module in kept["sentence"]["modules"]] == ["normalize"]
    assert any("not kept from the initial model: the dense layers" in message for message in start.messages)


def test_a_source_without_such_facts_leaves_the_record_as_it_was(tmp_path):
    source(tmp_path, None, max_length=0, truncation_side="right")
    start, _ = plan(tmp_path, PretrainConfig, {"data.shards": str(tmp_path / "shards"), "data.seq_length": "16"})
    assert "kept" not in yaml.safe_load(start.record)
    assert not any("kept from the initial model" in message for message in start.messages)


SENTENCE = {"task.kind": "sentence", "sentence.loss": "negatives", "data.train": "pairs.jsonl"}


def test_fine_tuned_vectors_are_those_of_the_source_unless_an_option_says_otherwise(tmp_path):
    spec = source(tmp_path, dataclasses.replace(MEAN, pooling=("cls",)))
    start, config = plan(tmp_path, FinetuneConfig, SENTENCE)
    assert (config.sentence.pooling, config.sentence.normalize, config.task.max_length) == ("cls", True, 24)
    assert any(
        "kept from the initial model" in message and "the prompts query" in message for message in start.messages
    )
    own = SentenceConfig(pooling=("cls",), modules=(NORMALIZE,), similarity="cosine")
    made = with_prompts(own, start.kept)
    assert (made.prompts, made.include_prompt, made.similarity) == (spec.sentence.prompts, False, "cosine")
    changed = {"sentence.pooling": "mean", "sentence.normalize": "false", "task.max_length": "16"}
    _, config = plan(tmp_path, FinetuneConfig, SENTENCE | changed)
    assert (config.sentence.pooling, config.sentence.normalize, config.task.max_length) == ("mean", False, 16)


@pytest.mark.parametrize("pooling", [("mean", "max"), ("mean",)])
def test_what_a_task_cannot_take_over_is_named(tmp_path, pooling):
    heads = HeadsConfig(pooler=True, sequence_labels=("score",), problem="regression", activation="sigmoid")
    source(tmp_path, dataclasses.replace(MEAN, pooling=pooling), heads)
    settings = {"task.kind": "classification", "data.train": "x.jsonl", "task.max_length": "32"}
    start, config = plan(tmp_path, FinetuneConfig, settings)
    (line, activation) = [message for message in start.messages if message.startswith("not kept from")]
    assert " and ".join(pooling) in line and "normalization" in line and "sigmoid" in activation
    assert config.task.max_length == 32
    start, config = plan(tmp_path, FinetuneConfig, SENTENCE)
    poolings = [message for message in start.messages if "set one as sentence.pooling" in message]
    assert len(poolings) == len(pooling) - 1


@pytest.mark.parametrize("field", ["source: null", "resolved: 3"])
def test_a_damaged_record_is_refused(tmp_path, field):
    text = "format: 1\ninit_from: there\nsource: {}\nresolved: {}\n"
    name = field.partition(":")[0]
    (tmp_path / "warm_start.yaml").write_text(text.replace(f"{name}: {{}}", field))
    with pytest.raises(ValueError, match=r"warm_start\.yaml: not readable .*; delete it and give --config"):
        read_record(tmp_path)
