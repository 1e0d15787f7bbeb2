"""``--to_long``: a BERT or RoBERTa becomes a Longformer that computes the same on short texts."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from builders import drawn, tiny_model
from flax import linen as nn
from support import tiny_config, train_synthetic
from warm_start_source import PIECES, byte_bpe

from bert_jax.config import (
    ExecutionConfig,
    HeadsConfig,
    ModelConfig,
    ModelSpec,
    PretrainConfig,
    TokenizerConfig,
)
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import build_config, read_settings
from bert_jax.config.switches import function_of
from bert_jax.contrib.surgery.run_options import ChangeOptions
from bert_jax.interop.export import export_model
from bert_jax.interop.hf.families.long import has_own_projections
from bert_jax.interop.model_bundle import ModelBundle
from bert_jax.interop.programs.serving import sample_inputs
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.model import BertModel, from_canonical
from bert_jax.start.plan import plan_start
from bert_jax.tokenization import build_tokenizer
from bert_jax.training.launch import RECORD
from bert_jax.training.state import abstract_params
from bert_jax.training.workdir import record_text

LENGTH, WINDOW = 600, 20
HEADS = HeadsConfig(mlm=True, pooler=True, sequence_labels=("no", "yes"))
TOKENIZERS = {
    "bert": (TokenizerConfig(), "\n".join(PIECES).encode()),
    "roberta": (TokenizerConfig(file="tokenizer.json", lower_case=False), byte_bpe()),
}


def save(folder: Path, family: str, **changes: Any) -> ModelBundle:
    config, content = TOKENIZERS.get(family, TOKENIZERS["bert"])
    offset = 2 if family == "roberta" else 0
    sizes: dict[str, Any] = {"max_position_embeddings": 48 + offset, "position_offset": offset}
    sizes |= {"family": family, "type_vocab_size": 1 if offset else 2, "num_layers": 3, **changes}
    spec = ModelSpec(model=tiny_model(40, **sizes), heads=HEADS, tokenizer=config)
    bundle = dataclasses.replace(drawn(spec, 0.2), tokenizer_content=content)
    write_saved(folder, bundle)
    return bundle


def converted(folder: Path, *words: str, config_type: type = FinetuneConfig) -> ModelBundle:
    options = ChangeOptions(init_from=str(folder), to_long=LENGTH)
    given = ["--model.attention_windows", str(WINDOW), *words]
    start = plan_start(config_type, options, folder.parent / "run", read_settings(given).all)
    assert any(f"48 -> {LENGTH}, windows of {WINDOW} tokens" in line for line in start.messages)
    assert start.weights is not None
    return start.weights


def outputs(bundle: ModelBundle, lengths: tuple[int, ...], total: int, heads: HeadsConfig = HEADS) -> Any:
    """Outputs on rows of ``lengths`` tokens in rows of ``total``; the drawn ids are the same for every model."""
    model = BertModel(bundle.spec.model, ExecutionConfig(vocab_multiple=1), heads)
    absent = "-" if heads.sequence_labels else "sequence_head"
    used = {name: values for name, values in bundle.params.items() if not name.startswith(absent)}
    params = from_canonical(used, nn.unbox(abstract_params(model)), bundle.spec.model.vocab_size)
    real = np.arange(total) < np.array(lengths)[:, None]
    ids = np.random.default_rng(2).integers(5, 40, (len(lengths), max(lengths)))
    ids = np.pad(ids, [(0, 0), (0, total - max(lengths))])
    features = {
        "input_ids": np.where(real, ids, 0),
        "token_type_ids": np.zeros_like(ids),
        "sequence_ids": real.astype(np.int32),
        "position_ids": np.broadcast_to(np.arange(total), ids.shape),
    }
    return jax.jit(lambda: model.apply({"params": params}, features))()


WINDOWS_ALONE = HeadsConfig(mlm=True, pooler=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "heads"),
    [
        pytest.param("bert", HEADS, id="bert, global token"),
        pytest.param("roberta", WINDOWS_ALONE, id="roberta, windows"),
        pytest.param("bert", WINDOWS_ALONE, id="bert, windows", marks=pytest.mark.slow),
        pytest.param("roberta", HEADS, id="roberta, global token", marks=pytest.mark.slow),
    ],
)
def test_short_texts_have_the_outputs_of_the_source(tmp_path: Path, family: str, heads: HeadsConfig) -> None:
    """Up to WINDOW + 1 tokens; a longer text differs, because its first token does not see its last."""
    source = save(tmp_path / "source", family)
    long = converted(tmp_path / "source")
    assert long.spec.model.max_length == LENGTH and long.spec.model.layer_windows == (WINDOW,) * 3
    # 300 tokens to a row: the chunks of windows are computed.
    lengths = (WINDOW + 1, 3, WINDOW + 9)
    short, expected = outputs(long, lengths, 300, heads), outputs(source, lengths, 48, heads)
    for row, count in enumerate((WINDOW + 1, 3)):
        for name in ("sequence_output", "mlm_logits"):
            one, other = (np.asarray(getattr(found, name))[row, :count] for found in (short, expected))
            assert np.abs(one - other).max() <= 1e-5 * max(1, np.abs(other).max()), name
    if heads.sequence_labels:
        one, other = (np.asarray(found.sequence_logits)[:2] for found in (short, expected))
        assert np.abs(one - other).max() <= 1e-5
    one, other = (np.asarray(found.mlm_logits)[2, 20] for found in (short, expected))
    assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_positions_repeat_and_global_projections_are_copies(tmp_path: Path, family: str) -> None:
    source = save(tmp_path / "source", family)
    params, table = converted(tmp_path / "source").params, "embeddings/position_embeddings/embedding"
    offset = source.spec.model.position_offset
    rows = source.params[table][offset:]
    assert len(params[table]) == LENGTH + (offset or 1)
    for position in (0, 47, 48, 100, LENGTH - 1):
        np.testing.assert_array_equal(params[table][(offset or 1) + position], rows[position % 48])
    name = "encoder/layer_2/attention/key_global/kernel"
    np.testing.assert_array_equal(params[name], source.params["encoder/layer_2/attention/key/kernel"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_converted_model_is_a_longformer_folder(tmp_path: Path, family: str) -> None:
    save(tmp_path / "source", family)
    long = converted(tmp_path / "source")
    saved = dataclasses.replace(long, spec=dataclasses.replace(long.spec, heads=HeadsConfig(mlm=True)))
    kept = {name: value for name, value in long.params.items() if not name.startswith(("pooler", "sequence_head"))}
    write_saved(tmp_path / "long", dataclasses.replace(saved, params=kept))
    export_model(tmp_path / "long", tmp_path / "folder", "hf")
    back = read_weights(tmp_path / "folder")
    assert function_of(back.spec.model) == function_of(long.spec.model)
    for name, values in kept.items():
        np.testing.assert_array_equal(back.params[name], values)


@pytest.mark.parametrize("heads", [HeadsConfig(span=True), HeadsConfig(pooler=True, choice=True)])
def test_samples_for_transformers_have_the_separators_that_it_counts(heads: HeadsConfig) -> None:
    """Its classes for answers and choices accept only rows with three separators."""
    model = tiny_model(40, attention_windows=(4,), global_tokens=8, separator_id=3, family="longformer")
    spec = ModelSpec(model=model, heads=heads, family="longformer")
    for batch in sample_inputs(spec):
        is_separator = batch["input_ids"] == 3
        assert (is_separator.sum(1) == 3).all() and batch["attention_mask"][is_separator].all()
    assert [batch["input_ids"].shape for batch in sample_inputs(spec, ((2, 1),))] == [(2, 1)]


@pytest.mark.slow
def test_a_pretraining_run_is_read_with_copies_of_the_projections_that_it_trained(tmp_path: Path) -> None:
    """Without global tokens in its batches; a run that began with trained projections keeps them."""
    words = "--model.attention_windows 4 --model.global_tokens 8 --training.num_steps 1 --optimizer.warmup_steps 0"
    run, name = tmp_path / "run", "encoder/layer_0/attention/value{}/kernel"
    train_synthetic(tiny_config(*words.split(), "--optimizer.learning_rate", "0.1"), run)
    bundle = read_weights(run)
    params = bundle.params
    # That of the recipe is the default, whatever the vocabulary.
    assert bundle.spec.tokenizer is not None and bundle.tokenizer_content is not None
    tokenizer = build_tokenizer(bundle.spec.tokenizer, bundle.tokenizer_content, "run")
    assert bundle.spec.model.separator_id == tokenizer.sep_id != ModelConfig().separator_id
    np.testing.assert_array_equal(params[name.format("_global")], params[name.format("")])
    (run / RECORD).write_text(record_text("source", {}, {}, trained_global=True))
    stored = read_weights(run).params
    np.testing.assert_array_equal(stored[name.format("")], params[name.format("")])
    assert np.abs(stored[name.format("_global")] - params[name.format("")]).max() > 0.01
    changed = dict(params) | {name.format("_global"): params[name.format("")] + 1}
    assert has_own_projections(changed) and not has_own_projections(params)


def test_pretraining_starts_from_it_too(tmp_path: Path) -> None:
    save(tmp_path / "source", "bert")
    words = ["--data.shards", str(tmp_path / "shards"), "--data.seq_length", "500"]
    options = ChangeOptions(init_from=str(tmp_path / "source"), to_long=LENGTH)
    start = plan_start(PretrainConfig, options, tmp_path / "run", read_settings(words).all)
    model = build_config(PretrainConfig, [*read_settings(words).all, *start.settings]).model
    assert (model.family, model.layer_windows, model.max_length) == ("longformer", (256,) * 3, LENGTH)
    assert model.separator_id == PIECES.index("[SEP]")
    both = dataclasses.replace(options, extend_positions="tile")
    with pytest.raises(ValueError, match=r"^--extend_positions: not allowed with --to_long"):
        plan_start(PretrainConfig, both, tmp_path / "run", read_settings(words).all)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "options", "words", "message"),
    [
        ({"position_embeddings": "rotary"}, {}, (), "--to_long: .* are rotary and have no table"),
        ({"relative_positions": "buckets"}, {}, (), r"--to_long: .* relative positions \(buckets\); use .*: bert"),
        ({"family": "distilbert"}, {}, (), "--to_long: .* of the family distilbert; use .*: bert, roberta"),
        ({"attention": "causal"}, {}, (), "--to_long: the model is causal"),
        ({"embedding_size": 8}, {}, (), "--to_long: .* narrow embeddings"),
        ({"attention_windows": (4,)}, {}, (), "--to_long: the model has windows already; .*--extend_positions"),
        ({}, {"to_long": 48}, (), "--to_long: 48, but the model has 48 positions already"),
        ({}, {}, ("--model.attention_windows", "300"), "model.attention_windows: 300 is not .* below 300"),
        ({}, {"init_from": ""}, ("--data.vocab", "v.txt"), "--to_long: requires --init_from"),
    ],
)
def test_what_cannot_become_long_is_refused(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], words: tuple[str, ...], message: str
) -> None:
    save(tmp_path / "source", **{"family": "bert"} | changes)
    given = ChangeOptions(**{"init_from": str(tmp_path / "source"), "to_long": LENGTH} | options)
    with pytest.raises(ValueError, match=rf"^{message}[^\n]*$") as refusal:
        plan_start(
            FinetuneConfig,
            given,
            tmp_path / "run",
            read_settings(list(words) or ["--model.attention_windows", "20"]).all,
        )
    assert not re.search(r"\n", str(refusal.value))
