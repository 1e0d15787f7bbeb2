"""``bert-jax factorize``: word embeddings of a smaller rank, against the product of both tables; what it costs."""

import dataclasses
import json

import numpy as np
import pytest
from builders import drawn, tiny_model, words

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.config.architecture import ModelConfig
from bert_jax.contrib.analysis.word_neighbors import embedding_table
from bert_jax.contrib.compression.factorize import factorized
from bert_jax.inference.loaded import load, prepare
from bert_jax.interop.programs.onnx_graph import check_onnx, write_onnx
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved

PIECES, LABELS = words(40), ("no", "yes")
TABLE = "embeddings/word_embeddings/embedding"
IDS = np.random.default_rng(0).integers(0, len(PIECES), (3, 12))


def make_weights(**sizes):
    heads = HeadsConfig(pooler=True, sequence_labels=LABELS, mlm=True)
    spec = ModelSpec(model=tiny_model(len(PIECES), **sizes), heads=heads, tokenizer=TokenizerConfig())
    return drawn(spec, 0.3, PIECES)


def with_table(weights, table):
    return dataclasses.replace(weights, params={**weights.params, TABLE: table.astype(np.float32)})


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"embedding_size": 10}, {"tied_output": False}])
def test_a_table_of_that_rank_is_kept(sizes):
    """Hidden states and logits of masked words are those of the whole table."""
    weights = make_weights(**sizes)
    rng = np.random.default_rng(1)
    low = rng.normal(0, 1, (len(PIECES), 4)) @ rng.normal(0, 0.3, (4, weights.params[TABLE].shape[1]))
    whole = with_table(weights, low)
    smaller, kept = factorized(whole, 4)
    assert smaller.params[TABLE].shape == (len(PIECES), 4) and kept == pytest.approx(1, abs=1e-6)
    expected, found = (prepare(bundle).forward({"input_ids": IDS}) for bundle in (whole, smaller))
    assert expected.keys() == found.keys() >= {"mlm_logits", "last_hidden_state"}
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-4 * max(1, np.abs(values).max()), err_msg=name)
    np.testing.assert_allclose(embedding_table(prepare(smaller)), low, atol=1e-5)


def test_the_share_that_is_kept_and_the_best_approximation():
    weights = make_weights()
    table = weights.params[TABLE].astype(np.float64)
    values = np.linalg.svd(table, compute_uv=False)
    for rank in (1, 5, 11):
        smaller, kept = factorized(weights, rank)
        assert kept == pytest.approx(np.sum(values[:rank] ** 2) / np.sum(values**2))
        difference = embedding_table(prepare(smaller)) - table
        assert np.sum(difference**2) == pytest.approx(np.sum(values[rank:] ** 2), rel=1e-4)


@pytest.mark.slow
def test_the_command_says_what_it_saves_and_costs(tmp_path, capsys):
    source, out = tmp_path / "model", tmp_path / "out"
    write_saved(source, make_weights())
    lines = [{"text": f"w{i} w{3 * i % 40} w7", "label": LABELS[i % 2]} for i in range(8)]
    (tmp_path / "dev.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = ["factorize", "--from", source, "--to", out, "--rank", 5, "--check", tmp_path / "dev.jsonl"]
    assert main([str(word) for word in words]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("word embeddings: rank 5, ") and told[1].startswith("parameters: ")
    scores = []
    for folder in (source, out):
        found = load(folder).predict([line["text"] for line in lines])
        right = [one["label"] == line["label"] for one, line in zip(found, lines, strict=True)]
        scores.append(np.mean(right))
    assert told[2].endswith(
        f"8 records: accuracy {scores[0]:.4f} to {scores[1]:.4f} ({scores[1] - scores[0]:+.4f})"
    )
    assert read_weights(out).spec.model.word_rank == 5
    # Trimmed, exported, and refused where a format has no place for two tables.
    (tmp_path / "corpus.txt").write_text("w1 w2 w7\n")
    words = ["trim", "--from", out, "--to", tmp_path / "t", "--corpus", tmp_path / "corpus.txt", "--ngram", 0]
    assert main([str(word) for word in words]) == 0
    trimmed = read_weights(tmp_path / "t")
    assert trimmed.params[TABLE].shape[1] == trimmed.spec.model.word_rank == 5
    words = ["export", "--from", out, "--to", tmp_path / "hf", "--format", "hf", "--heads", "sequence"]
    assert main([str(word) for word in words]) == 2
    assert "model.word_rank" in capsys.readouterr().err


@pytest.mark.parametrize("is_static", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_program_in_8_bits_has_a_whole_factor(is_static, tmp_path):
    """It is used in both directions: for words, and for the logits of masked words."""
    smaller, _ = factorized(make_weights(), 6)
    if is_static:
        smaller = dataclasses.replace(smaller, ranges={name: (-8.0, 8.0) for name in smaller.params})
    write_onnx(tmp_path, smaller, dtype="int8")
    assert all(value < 0.6 for value in check_onnx(tmp_path, smaller, ((1, 1), (3, 17))).values())


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "sizes, rank, message",
    [
        ({}, 0, "--rank: 0 is not allowed; allowed: 1 to 11, which make the table of 45 x 16 smaller"),
        ({}, 12, "--rank: 12 is not allowed; allowed: 1 to 11"),
        ({"word_rank": 3}, 2, "cannot be factorized: the model has a table of that kind already"),
    ],
)
def test_bad_input_is_one_line(sizes, rank, message, tmp_path, capsys):
    write_saved(tmp_path / "model", make_weights(**sizes))
    words = ["factorize", "--from", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--rank", str(rank)]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not (tmp_path / "out").exists()


def test_a_rank_must_be_below_the_width():
    with pytest.raises(ValueError, match=r"model.word_rank: 16 is not allowed; allowed: below 16, the width"):
        ModelConfig(**dataclasses.asdict(tiny_model(40)) | {"word_rank": 16})
