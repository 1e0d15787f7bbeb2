"""Starting from a model that is there: what must agree with the source, what is grown, what the state holds."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import yaml
from builders import words
from support import objective_of
from warm_start_source import MODEL, PIECES, arrays, byte_bpe, write_words

from bert_jax.config import (
    ExecutionConfig,
    HeadsConfig,
    MeshConfig,
    ModelSpec,
    PretrainConfig,
    RunOptions,
    TokenizerConfig,
)
from bert_jax.config.finetune import FinetuneConfig, FinetuneOptimizerConfig
from bert_jax.config.loader import build_config, read_settings
from bert_jax.interop.model_bundle import ModelBundle
from bert_jax.interop.saved_model import write_saved
from bert_jax.model import BertForPretraining, to_canonical
from bert_jax.optim import make_optimizer
from bert_jax.parallel import make_mesh
from bert_jax.start.plan import plan_start, pretraining_spec
from bert_jax.tokenization import load_tokenizer
from bert_jax.training.launch import RECORD
from bert_jax.training.state import abstract_state, initial_state

ALL = HeadsConfig(mlm=True, nsp=True, pooler=True)


def save(folder, *, model=MODEL, heads=ALL, config=TokenizerConfig(), content="\n".join(PIECES).encode()):  # noqa: B008
    spec = ModelSpec(
        model=model, heads=heads, tokenizer=config, family="roberta" if model.position_offset else "bert"
    )
    write_saved(folder, ModelBundle(spec=spec, params=arrays(spec), tokenizer_content=content if config else None))
    return arrays(spec)


def refused():
    return pytest.raises(ValueError, match=r"^[^\n]+$")  # in one line


# ------------------------------------------------------------------ resolve


def plan(tmp_path, *flags, settings=None, workdir="run", **options):
    """(start, config) of ``plan_start`` on the model in ``tmp_path / "source"``."""
    options = {"init_from": str(tmp_path / "source")} | options
    given = {"data.shards": str(tmp_path / "shards"), "data.seq_length": "16"} | (settings or {})
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    start = plan_start(PretrainConfig, RunOptions(**options), tmp_path / workdir, read_settings(words).all)
    return start, build_config(PretrainConfig, [*read_settings(words).all, *start.settings])


def initial(start, config):
    """The parameters that the run starts from, and its messages."""
    return start.with_parameters(pretraining_spec(config, objective_of(config).model))


@pytest.mark.slow
def test_the_source_gives_model_vocabulary_and_parameters(tmp_path):
    params = save(tmp_path / "source")
    start, config = plan(tmp_path, settings={"model.hidden_dropout": "0", "optimizer.learning_rate": "1e-5"})
    assert config.model == dataclasses.replace(MODEL, hidden_dropout=0.0)
    assert config.optimizer.learning_rate == 1e-5
    assert config.data.vocab == str(tmp_path / "shards" / "vocab.txt")
    assert start.vocabulary == (str(tmp_path / "shards" / "vocab.txt"), "\n".join(PIECES).encode())
    bucket, _ = plan(tmp_path, settings={"data.shards": "gs://bucket/shards"})
    assert bucket.vocabulary == ("gs://bucket/shards/vocab.txt", start.vocabulary[1])
    found = initial(start, config).params
    assert list(found) == list(params)
    for name, values in params.items():
        np.testing.assert_array_equal(found[name], values)
    assert not (tmp_path / "shards").exists() and not (tmp_path / "run").exists()


def test_the_length_is_open_unless_it_is_set(tmp_path):
    save(tmp_path / "source")
    assert plan(tmp_path)[1].training.num_steps == 0
    assert plan(tmp_path, settings={"training.num_steps": "7"})[1].training.num_steps == 7
    tokens = {"training.num_tokens": "4096", "training.global_batch_size": "8"}
    assert plan(tmp_path, settings=tokens)[1].training.num_steps == 32
    assert plan(tmp_path, init_from="")[1].training.num_steps == 0


def test_a_model_without_token_types_reads_no_sentence_pairs(tmp_path):
    save(tmp_path / "source", model=dataclasses.replace(MODEL, type_vocab_size=0), heads=HeadsConfig(mlm=True))
    start, config = plan(tmp_path)
    assert config.data.next_sentence == "none" and any("has no token types" in line for line in start.messages)
    with pytest.raises(ValueError, match=r"model.type_vocab_size: 0 is not allowed"):
        plan(tmp_path, settings={"data.next_sentence": "nsp"})
    save(tmp_path / "other")
    assert plan(tmp_path, init_from=str(tmp_path / "other"))[1].data.next_sentence == "nsp"


def test_the_source_decides_over_the_preset(tmp_path):
    save(tmp_path / "source")
    _, config = plan(tmp_path, settings={"training.mode": "bert2018"})
    assert (config.model.activation, config.optimizer.name) == ("gelu", "bert_adam")


def test_what_contradicts_the_source_names_both_values(tmp_path):
    save(tmp_path / "source", config=TokenizerConfig(lower_case=False))
    for key, value, message in [
        ("model.num_layers", "12", f"command line: model.num_layers: 12, but {tmp_path}/source has 2"),
        ("model.vocab_size", "30522", "command line: model.vocab_size: 30522, but"),
        ("model.max_position_embeddings", "8", "command line: model.max_position_embeddings: 8, but"),
        ("data.lower_case", "true", "command line: data.lower_case: True, but"),
        ("data.seq_length", "17", f"command line: data.seq_length: 17, but {tmp_path}/source has 16 positions"),
    ]:  # fmt: skip
        with refused() as error:
            plan(tmp_path, settings={key: value})
        assert message in str(error.value)


def test_what_changes_no_parameter_may_differ(tmp_path):
    save(tmp_path / "source")
    _, config = plan(tmp_path)
    assert config.model.pooling == "first"
    _, config = plan(tmp_path, settings={"model.pooling": "mean", "model.hidden_dropout": "0.3"})
    assert (config.model.pooling, config.model.hidden_dropout) == ("mean", 0.3)


@pytest.mark.slow
def test_heads_that_are_not_there_start_fresh_and_others_are_left_out(tmp_path):
    save(tmp_path / "source", heads=HeadsConfig(pooler=True, sequence_labels=("no", "yes")))
    found = initial(*plan(tmp_path))
    assert {name.partition("/")[0] for name in found.params} == {"embeddings", "encoder", "pooler"}
    assert {"randomly initialized: mlm_head, nsp_head", "not used: sequence_head"} < set(found.messages)
    start, config = plan(tmp_path, settings={"data.next_sentence": "none"})
    found = initial(start, config)
    assert {"randomly initialized: mlm_head", "not used: pooler, sequence_head"} < set(found.messages)
    assert not config.has_nsp and not any(name.startswith("pooler") for name in found.params)


def test_added_words_grow_the_model_and_its_vocabulary(tmp_path):
    params = save(tmp_path / "source")
    path = str(write_words(tmp_path, "covid", "cats", "the"))
    # The source's own size in a recipe is no contradiction.
    start, config = plan(tmp_path, add_words=path, settings={"model.vocab_size": "17"})
    assert config.model.vocab_size == 19
    (tmp_path / "vocab.txt").write_bytes(start.vocabulary[1])
    assert load_tokenizer(tmp_path / "vocab.txt").encode("covid cats the") == [17, 18, 10]
    name = "embeddings/word_embeddings/embedding"
    found = initial(start, config)
    new = found.params[name]
    np.testing.assert_array_equal(new[:17], params[name])
    np.testing.assert_allclose(new[17], (params[name][7] + params[name][8]) / 2, rtol=1e-6)
    assert found.params["mlm_head/output_bias"].shape == (19,)
    assert "1 word(s) are already pieces: the" in start.messages
    slots, config = plan(tmp_path, add_words=path, vocab_slots=True)
    assert config.model.vocab_size == 17
    assert slots.vocabulary[1].decode().split("\n")[5:8] == ["covid", "cats", "co"]
    # The vocabulary that came out can be named, by itself or with the same flags.
    grown = str(tmp_path / "vocab.txt")
    named, config = plan(tmp_path, settings={"data.vocab": grown})
    assert (config.data.vocab, config.model.vocab_size, named.vocabulary) == (grown, 19, None)
    np.testing.assert_array_equal(initial(named, config).params[name], new)
    with pytest.raises(
        ValueError, match=r"data.vocab: --add_words creates the vocabulary of the run, .*omit data.vocab"
    ):
        plan(tmp_path, add_words=path, settings={"data.vocab": grown})


@pytest.mark.slow
def test_rows_that_no_piece_has_are_used_first(tmp_path):
    save(tmp_path / "source", model=dataclasses.replace(MODEL, vocab_size=18))
    _, config = plan(tmp_path, add_words=str(write_words(tmp_path, "covid")))
    assert config.model.vocab_size == 18
    _, config = plan(tmp_path, add_words=str(write_words(tmp_path, "covid", "cats")))
    assert config.model.vocab_size == 19


def test_a_vocabulary_that_is_not_the_sources(tmp_path):
    save(tmp_path / "source")
    other = tmp_path / "other.txt"
    other.write_text("\n".join(words(12)))
    with pytest.raises(ValueError, match=r"data.vocab: .*other.txt: piece 5 is 'w0', .*has '\[unused0\]'|piece 7"):
        plan(tmp_path, settings={"data.vocab": str(other)})


def test_a_source_without_a_tokenizer_needs_a_vocabulary(tmp_path):
    save(tmp_path / "source", config=None)
    with pytest.raises(ValueError, match=r"data.vocab: .* has no tokenizer; set data.vocab"):
        plan(tmp_path)
    with pytest.raises(ValueError, match=r"--add_words: .* has no tokenizer"):
        plan(tmp_path, add_words=str(write_words(tmp_path, "covid")))
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(PIECES))
    start, config = plan(tmp_path, settings={"data.vocab": str(vocab)})
    assert config.model == MODEL and start.vocabulary is None
    assert any("is used as its vocabulary" in line for line in start.messages)
    vocab.write_text("\n".join([*PIECES, "more"]))
    with pytest.raises(ValueError, match=r"has 18 pieces, but .* only 17 embeddings"):
        plan(tmp_path, settings={"data.vocab": str(vocab)})


def test_a_tokenizer_that_shards_cannot_be_made_with(tmp_path):
    save(tmp_path / "source", config=TokenizerConfig(split_cjk=False))
    with pytest.raises(ValueError, match=r"split_cjk False .*shards need True"):
        plan(tmp_path)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("lower_case", "strip"), [(True, False), (False, True), (True, True), (False, None)])
def test_accents_are_those_of_the_source(tmp_path, lower_case, strip):
    save(tmp_path / "source", config=TokenizerConfig(lower_case=lower_case, strip_accents=strip))
    start, config = plan(tmp_path)
    rules = config.data.rules
    assert rules["lower_case"] == lower_case and start.vocabulary is not None
    stripped = lower_case if strip is None else strip
    assert (lower_case if rules["strip_accents"] is None else rules["strip_accents"]) == stripped
    same = {"data.strip_accents": str(stripped).lower()}
    assert plan(tmp_path, settings=same)[1].data.strip_accents == same["data.strip_accents"]
    with pytest.raises(ValueError, match=r"data\.strip_accents: .* but .* has (auto|true|false)"):
        plan(tmp_path, settings={"data.strip_accents": str(not stripped).lower()})
    # A vocabulary that is named is compared with the accents of the source.
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    _, config = plan(tmp_path, settings={"data.vocab": str(tmp_path / "vocab.txt")})
    assert config.data.rules == rules


def test_positions_grow_when_asked_for(tmp_path):
    table = save(tmp_path / "source")["embeddings/position_embeddings/embedding"]
    longer = {"data.seq_length": "24", "model.max_position_embeddings": "16"}
    start, config = plan(tmp_path, extend_positions="tile", settings=longer)
    assert config.model.max_position_embeddings == config.data.seq_length == 24
    np.testing.assert_array_equal(
        initial(start, config).params["embeddings/position_embeddings/embedding"],
        np.concatenate([table, table[:8]]),
    )
    assert "positions: 16 -> 24 (tile)" in start.messages
    wider = {"model.max_position_embeddings": "40"}
    start, config = plan(tmp_path, extend_positions="interpolate", settings=wider)
    assert config.model.max_position_embeddings == 40
    start, config = plan(tmp_path, extend_positions="tile")
    assert config.model == MODEL
    assert "--extend_positions: not needed" in " ".join(start.messages)


def test_a_roberta_keeps_the_rows_before_its_first_position(tmp_path):
    content = byte_bpe()
    model = dataclasses.replace(
        MODEL, vocab_size=32, max_position_embeddings=18, position_offset=2, type_vocab_size=1
    )
    config = TokenizerConfig(file="tokenizer.json", lower_case=False)
    params = save(tmp_path / "source", model=model, heads=HeadsConfig(mlm=True), config=config, content=content)
    longer = {"data.seq_length": "20", "data.next_sentence": "none"}
    start, config = plan(tmp_path, extend_positions="tile", settings=longer)
    assert (config.model.max_position_embeddings, config.model.position_offset) == (22, 2)
    table = params["embeddings/position_embeddings/embedding"]
    np.testing.assert_array_equal(
        initial(start, config).params["embeddings/position_embeddings/embedding"],
        np.concatenate([table, table[2:6]]),
    )
    assert start.vocabulary == (str(tmp_path / "shards" / "tokenizer.json"), content)
    with pytest.raises(ValueError, match=r"model.type_vocab_size: 1 is not allowed; allowed: 2 or more"):
        plan(tmp_path, settings={"data.next_sentence": "nsp"})
    with pytest.raises(ValueError, match="--add_words: byte-level BPE"):
        plan(tmp_path, add_words=str(write_words(tmp_path, "covid")), settings={"data.next_sentence": "none"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"continue_from": "runs/a"}, "--init_from and --continue_from: give only one"),
        ({"init_from": "", "add_words": "w.txt"}, "--add_words: requires --init_from"),
        ({"init_from": "", "extend_positions": "tile"}, "--extend_positions: requires --init_from"),
        ({"vocab_slots": True}, "--vocab_slots: needs --add_words"),
        ({"init_from": "nowhere/at/all"}, "nowhere/at/all"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, options, message):
    save(tmp_path / "source")
    with refused() as error:
        plan(tmp_path, **options)
    assert message in str(error.value)


def test_a_workdir_that_was_to_start_from_a_model_does_not_start_from_nothing(tmp_path):
    save(tmp_path / "source")
    start, _ = plan(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECORD).write_text(start.record)
    with pytest.raises(
        ValueError, match=r"was started with --init_from .*source and has no checkpoint; give the same"
    ):
        plan(tmp_path, init_from="")
    for text in ("{", "format: 7", "[]", "format: 1"):
        (tmp_path / "run" / RECORD).write_text(text)
        with pytest.raises(ValueError, match=f"{RECORD}: not readable .*; delete it and give --config"):
            plan(tmp_path, init_from="")


def test_a_checkpoint_goes_before_every_flag_and_needs_none(tmp_path):
    save(tmp_path / "source")
    start, config = plan(
        tmp_path, add_words=str(write_words(tmp_path, "covid")), settings={"model.vocab_size": "17"}
    )
    run = tmp_path / "run"
    (run / "checkpoints" / "5").mkdir(parents=True)
    (run / RECORD).write_text(start.record)
    assert json.loads(json.dumps(yaml.safe_load(start.record)))["init_from"] == str(tmp_path / "source")
    again, same = plan(tmp_path, init_from="gone", add_words="gone.txt", settings={"model.vocab_size": "17"})
    assert same == config and not again.weights and again.vocabulary is None
    assert again.messages == ("--init_from, --add_words: ignored, because the run resumes from its own checkpoint",)
    bare, same = plan(tmp_path, init_from="")
    assert same == config and not bare.messages
    # The next phase has the same model without flags.
    _, same = plan(tmp_path, init_from="", workdir="two", continue_from=str(run))
    assert same == config
    with pytest.raises(ValueError, match=f"command line: model.num_layers: 3, but .*{RECORD} has 2"):
        plan(tmp_path, init_from="", settings={"model.num_layers": "3"})


# ------------------------------------------------------------------ state


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_state_holds_what_was_loaded_and_draws_the_rest(scan_layers):
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    model = BertForPretraining(MODEL, ExecutionConfig(scan_layers=scan_layers), True, mesh)
    optimizer = make_optimizer(PretrainConfig().optimizer)
    config = FinetuneConfig(optimizer=FinetuneOptimizerConfig(ema_decay=0.9, decay_to_start=True))
    abstract = abstract_state(config, model, optimizer, mesh)
    drawn = to_canonical(initial_state(model, optimizer, abstract, 3).params, MODEL.vocab_size)
    loaded = arrays(ModelSpec(model=MODEL, heads=HeadsConfig(mlm=True)))
    state = initial_state(model, optimizer, abstract, 3, loaded)
    for tree in (state.params, state.ema):
        params = to_canonical(tree, MODEL.vocab_size)
        assert sorted(params) == sorted(drawn)
        for name, values in params.items():
            np.testing.assert_array_equal(values, loaded.get(name, drawn[name]), err_msg=name)
    # Nothing is pulled towards what was drawn.
    for name, values in to_canonical(state.start, MODEL.vocab_size).items():
        np.testing.assert_array_equal(values, loaded.get(name, np.zeros_like(drawn[name])), err_msg=name)
    assert int(state.step) == 0
    assert all(not np.any(moment) for moment in jax.tree.leaves(state.opt_state))
    with pytest.raises(ValueError, match="unexpected token_head/bias"):
        initial_state(model, optimizer, abstract, 3, {"token_head/bias": np.zeros(3, np.float32)})


@pytest.mark.parametrize("file", ["vocab.txt", "tokenizer.model"])
def test_a_phase_takes_over_the_vocabulary_and_the_case(tmp_path, file):
    """Unless an option names a vocabulary, or the shards have one."""
    run, shards = tmp_path / "run", tmp_path / "shards"
    run.mkdir()
    (run / file).write_text("\n".join(PIECES))
    (run / "config.yaml").write_text("data: {lower_case: false, strip_accents: 'true', vocab: ''}\n")

    def planned(*words):
        words = ["--data.shards", str(shards), *words]
        start = plan_start(
            PretrainConfig, RunOptions(continue_from=str(run)), tmp_path / "two", read_settings(words).all
        )
        data = build_config(PretrainConfig, [*read_settings(words).all, *start.settings]).data
        return data.vocab, data.lower_case, data.strip_accents

    assert planned() == (str(run / file), False, "true")
    assert planned("--data.lower_case", "true")[1] is True
    assert planned("--data.vocab", "other.txt") == ("other.txt", True, "auto")
    shards.mkdir()
    (shards / "vocab.txt").write_text("kept")
    assert planned() == ("", True, "auto")
