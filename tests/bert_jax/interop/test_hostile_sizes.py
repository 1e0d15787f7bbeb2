"""Sizes that no tensor supports: refused before anything is allocated, in every family and format."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hf_folders import make_folder

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, TokenizerConfig
from bert_jax.config.spec import TaskSettings
from bert_jax.interop.readers import read_weights

REPOSITORY = Path(__file__).resolve().parents[3]
# The wrong values of the keys of the other families are in test_families.py.
QUICK = ("BertForPreTraining", "npz", "sentence-transformers")
# Keys that transformers ignores or that have no limit in it: no tensor has their size.
UNLIMITED = {
    "block_size", "num_random_blocks", "max_relative_positions", "local_attention", "global_attn_every_n_layers",
    "num_labels", "max_seq_length", "model_max_length",
}  # fmt: skip
# Fields of this library's own files that a model without such a layer does not read.
UNREAD = {
    "context_size", "lstm_cells", "character_size", "max_characters", "relative_buckets", "relative_max_distance",
    "attention_block", "random_blocks", "pair_hidden", "bilstm", "tokenizer.max_length",
    "window_overlap", "max_windows", "doc_stride", "max_query_length", "max_answer_length", "n_best",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "only", [QUICK, pytest.param((), marks=pytest.mark.slow)], ids=["each_reader", "every_family_and_format"]
)
def test_sizes_are_refused_or_have_no_effect(only):
    """One process, whose address space is limited; about 1,700 cases of all families and formats."""
    command = [sys.executable, "benchmarks/hostile_sizes.py", "--read_only", "--seconds", "20"]
    command += ["--only", *only] if only else []
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    table, _, read = done.stdout.partition("\nread:\n")
    assert table.count("\n| ") == len(only) or (not only and table.count("\n| ") > 25)
    for line in read.splitlines():
        key, _, values = line.partition(" = ")
        if re.search(r"2147483647|9223372036854775807|e\+308|-1", values):
            short = key.rpartition(".")[2].rpartition(" ")[2]
            assert {short, key.rpartition(" ")[2]} & (UNLIMITED | UNREAD), line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 2**31 - 1),
        ("num_hidden_layers", 9_999),
        ("hidden_size", 2**30),
        ("vocab_size", 10**400),
    ],
)
def test_one_line_names_the_key(tmp_path, key, value):
    with pytest.raises(ValueError, match=key.removeprefix("num_hidden_")) as error:
        read_weights(make_folder(tmp_path, config={key: value}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_layers": 10_001},
        {"attention_windows": (2**63,)},
        {"max_position_embeddings": 1 << 21, "position_embeddings": "rotary"},
        {"vocab_size": 2**31},
    ],
)
def test_sizes_of_a_model_have_limits(sizes):
    with pytest.raises(ValueError, match=f"model.{next(iter(sizes))}"):
        ModelConfig.of(**sizes)


@pytest.mark.parametrize("length", [513, 2**31 - 1])
def test_a_task_reads_no_more_tokens_than_positions(length):
    spec = ModelSpec(model=ModelConfig(), heads=HeadsConfig(), task=TaskSettings(kind="qa", max_length=512))
    with pytest.raises(ValueError, match=r"task\.max_length"):
        dataclasses.replace(spec, task=TaskSettings(kind="qa", max_length=length))


def test_sizes_of_heads_and_tokenizers_have_limits():
    for make in (lambda: HeadsConfig(bilstm=2**31), lambda: HeadsConfig(pair_hidden=-1)):
        with pytest.raises(ValueError, match=r"heads\."):
            make()
    with pytest.raises(ValueError, match="max_length"):
        TokenizerConfig(max_length=-1)
