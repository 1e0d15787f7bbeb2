"""``--gpt_inputs``: a GPT gets the pieces that frame its inputs, in fine-tuning."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from builders import drawn
from golden.family_tokenizer_cases import make_folder

import bert_jax
from bert_jax.config import (
    HeadsConfig,
    ModelConfig,
    ModelSpec,
    PretrainConfig,
    TokenizerConfig,
    load_config,
)
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import build_config, read_settings
from bert_jax.contrib.surgery.run_options import TaskChangeOptions
from bert_jax.finetuning.finetune import FinetuneJob
from bert_jax.interop.export import export_model
from bert_jax.interop.hf.families import FAMILIES
from bert_jax.interop.hf.write import write_hf
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.interop.tokenizers.folder_files import read_tokenizer_files
from bert_jax.records import Record
from bert_jax.start.plan import plan_start
from bert_jax.start.start import Start
from bert_jax.tokenization import build_tokenizer

WORDS = "embeddings/word_embeddings/embedding"
NEW = ("_start_", "_delimiter_", "_classify_", "<pad>")


def save(folder: Path, name: str, spare: int = 0) -> ModelBundle:
    """A drawn GPT of two layers; the table has ``spare`` rows more than the vocabulary has pieces."""
    make_folder(folder.parent / "files", name)
    config, content, _ = read_tokenizer_files(folder.parent / "files", ReadOptions())
    assert config is not None and content is not None
    family = {"gpt2": "gpt2", "openai_gpt": "openai-gpt"}[name]
    pieces = build_tokenizer(config, content, name).vocab_size
    sizes = {"hidden_size": 16, "num_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = ModelConfig(
        vocab_size=pieces + spare, max_position_embeddings=64, family=family, **sizes, **FAMILIES[family].fixed
    )
    if family == "openai-gpt":
        model = dataclasses.replace(model, activation="gelu_tanh")
    spec = ModelSpec(model=model, heads=HeadsConfig(mlm=True), family=family, tokenizer=config)
    bundle = dataclasses.replace(drawn(spec, 0.2), tokenizer_content=content)
    write_saved(folder, bundle)
    return bundle


def test_a_written_folder_states_the_ids_of_its_vocabulary(tmp_path: Path) -> None:
    """transformers reads the last token before ``pad_token_id`` and generates up to ``eos_token_id``; the table of
    the model has more rows than the vocabulary has pieces."""
    bundle = save(tmp_path / "source", "gpt2", 7)
    start = plan(tmp_path / "source")
    assert bundle.spec.tokenizer is not None and start.tokenizer_config is not None
    old, new = build_tokenizer(bundle.spec.tokenizer, bundle.tokenizer_content or b"", "old"), start.tokenizer
    end = old.vocab_size - 1
    spec = dataclasses.replace(bundle.spec, tokenizer=start.tokenizer_config)
    framed = dataclasses.replace(bundle, spec=spec, tokenizer_content=start.tokenizer_content)
    for name, given, expected in (
        ("plain", bundle, [end, end, end]), ("framed", framed, [new.cls_id, new.end_id, new.pad_id]),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        write_hf(tmp_path / name, given)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert [config[f"{key}_token_id"] for key in ("bos", "eos", "pad")] == expected, name


def plan(folder: Path, *words: str, config_type: type = FinetuneConfig) -> Start:
    options = TaskChangeOptions(init_from=str(folder), gpt_inputs=True)
    return plan_start(config_type, options, folder.parent / "run", read_settings(words).all)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "spare"), [("gpt2", 0), ("gpt2", 7), ("openai_gpt", 0), ("openai_gpt", 2)])
def test_texts_and_pairs_are_framed(tmp_path: Path, name: str, spare: int) -> None:
    source = save(tmp_path / "source", name, spare)
    start = plan(tmp_path / "source")
    tokenizer, weights = start.tokenizer, start.weights
    assert weights is not None
    old = build_tokenizer(source.spec.tokenizer or TokenizerConfig(), source.tokenizer_content or b"", name)
    first = old.vocab_size
    assert tokenizer.pieces(range(first, first + 4)) == list(NEW)
    a, b = old.encode("the quick fox"), old.encode("a quiz, _classify_")
    assert tokenizer.encode("the quick fox") == a
    assert not {first, first + 1, first + 2} & set(tokenizer.encode("a quiz, _classify_ _start_"))
    assert tokenizer.build_inputs(a) == ([first, *a, first + 2], [0] * (len(a) + 2))
    ids = [first, *a, first + 1, *b, first + 2]
    assert tokenizer.build_inputs(a, b) == (ids, [0] * len(ids))
    assert tokenizer.build_inputs(a, b, 9)[0][-1] == first + 2 and len(tokenizer.build_inputs(a, b, 9)[0]) == 9
    assert tokenizer.special[first : first + 4].all() and tokenizer.pad_id == first + 3
    table, before = weights.params[WORDS], source.params[WORDS]
    assert len(table) == weights.spec.model.vocab_size == max(len(before), first + 4)
    np.testing.assert_array_equal(table[:first], before[:first])
    added = table[first : first + 4]
    assert 0.005 < added.std() < 0.04 and len(np.unique(added)) == added.size


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "openai_gpt"])
def test_a_run_reads_the_extract_token_and_its_folder_is_whole(tmp_path: Path, name: str) -> None:
    save(tmp_path / "source", name)
    words = ["--task.max_length", "32", "--loss.lm_weight", "0.5", "--input.packing", "false"]
    start = plan(tmp_path / "source", *words)
    config = build_config(FinetuneConfig, [*read_settings(words).all, *start.settings])
    records = [Record(id=str(i), source="f", text="the quick", text_pair="fox", label=str(i % 2)) for i in range(8)]
    job = FinetuneJob(config, {"train": records, "dev": records}, (), start)
    inputs = job.task.featurize(records, training=True)
    ids = inputs[0].sequences[0].ids
    assert start.tokenizer.pieces([ids[0], ids[-1]]) == ["_start_", "_classify_"]
    assert start.tokenizer.pieces(ids).count("_delimiter_") == 1
    kept = job.start().params
    assert len(kept[WORDS]) == config.model.vocab_size and job.model.heads.mlm
    assert start.weights is not None
    write_saved(tmp_path / "framed", start.weights)
    export_model(tmp_path / "framed", tmp_path / "folder", "hf", verify=False)
    back = read_weights(tmp_path / "folder")
    assert back.spec.tokenizer is not None and back.tokenizer_content is not None
    again = build_tokenizer(back.spec.tokenizer, back.tokenizer_content, "folder")
    assert again.build_inputs([5], [6]) == start.tokenizer.build_inputs([5], [6])
    np.testing.assert_array_equal(back.params[WORDS], start.weights.params[WORDS])


def test_what_has_a_frame_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "source", "gpt2")
    start = plan(tmp_path / "source")
    assert start.weights is not None
    write_saved(tmp_path / "framed", start.weights)
    with pytest.raises(ValueError, match=r"^--gpt_inputs: the tokenizer frames its texts already, with _start_"):
        plan(tmp_path / "framed")
    with pytest.raises(ValueError, match=r"^command line: gpt_inputs: unknown"):  # in pretraining
        load_config(PretrainConfig, ["--gpt_inputs", "true"])
    with pytest.raises(ValueError, match=r"^--gpt_inputs: requires --init_from"):
        plan_start(
            FinetuneConfig,
            TaskChangeOptions(gpt_inputs=True),
            tmp_path / "run",
            read_settings(["--data.vocab", "v.txt"]).all,
        )


@pytest.mark.slow
def test_every_word_of_a_text_without_a_frame_gets_a_tag(tmp_path: Path) -> None:
    source = save(tmp_path / "source", "gpt2")
    heads = HeadsConfig(token_labels=("O", "B-X"), dropout=0.0)
    tagger = dataclasses.replace(drawn(dataclasses.replace(source.spec, heads=heads), 0.2))
    write_saved(tmp_path / "tagger", dataclasses.replace(tagger, tokenizer_content=source.tokenizer_content))
    loaded = bert_jax.load(tmp_path / "tagger")
    (found,) = loaded.predict(["the quick fox"])
    assert [token["text"].strip() for token in found["tokens"]] == ["the", "quick", "fox"]
    ids = loaded.tokenizer.encode("the quick fox")
    begins = [i for i in range(len(ids)) if not i or not loaded.tokenizer.continuation[ids[i]]]
    logits = loaded.forward({"input_ids": np.array([ids])})["logits"][0, begins]
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose([token["score"] for token in found["tokens"]], shares.max(-1), rtol=0, atol=1e-6)
