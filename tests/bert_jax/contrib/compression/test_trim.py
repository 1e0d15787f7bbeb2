"""``bert-jax trim``: the saved model against the whole one, what is compared before it is saved, bad input."""

import dataclasses
import json

import numpy as np
import pytest
from builders import drawn, tiny_model, words

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.contrib.compression import trim
from bert_jax.inference.loaded import load, prepare
from bert_jax.interop.model_bundle import parameter_shapes
from bert_jax.interop.saved_model import write_saved

PIECES = ["[unused0]", *words(40), "w", *(f"##{i}" for i in range(10)), "##x", "##y", "##xy", ",", "?"]
LINES = ["w1 w3 w5 , w39 ?", "w3 w38##x", "w20x w21xy w1", "w7 " * 80]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    return path


def make_weights(heads, **sizes):
    """A model whose table has three rows more than the vocabulary has pieces."""
    model = tiny_model(len(PIECES) + 3, **sizes)
    return drawn(ModelSpec(model=model, heads=heads, tokenizer=TokenizerConfig()), 0.2, PIECES)


def save(path, weights):
    write_saved(path, weights)
    return path


def command(source, target, corpus, *words):
    return main(["trim", "--from", str(source), "--to", str(target), "--corpus", str(corpus), *words])


@pytest.mark.slow
def test_outputs_are_those_of_the_whole_model(tmp_path, corpus, capsys):
    heads = HeadsConfig(pooler=True, mlm=True, nsp=True, sequence_labels=("no", "yes"))
    weights = make_weights(heads)
    assert command(save(tmp_path / "whole", weights), tmp_path / "out", corpus) == 0
    printed = capsys.readouterr().out.splitlines()
    whole, part = prepare(weights), load(tmp_path / "out")
    kept = [whole.tokenizer.piece_id(piece) for piece in part.tokenizer.pieces(range(part.tokenizer.vocab_size))]
    assert printed[0] == f"4 texts, 96 tokens: {len(kept)} of {len(PIECES) + 3} pieces are kept"
    assert printed[2].endswith("the whole model; the logits of kept pieces are equal up to rounding")
    assert part.spec.model.vocab_size == len(kept) < len(PIECES)
    texts = LINES[:3]
    assert np.array_equal(part.embed(texts, pooling="mean"), whole.embed(texts, pooling="mean"))
    assert part.predict(texts) == whole.predict(texts)
    rows = np.array([part.tokenizer.build_inputs(part.tokenizer.encode(text))[0][:7] for text in texts])
    own = part.forward({"input_ids": rows})["mlm_logits"]
    other = whole.forward({"input_ids": np.array(kept)[rows]})["mlm_logits"][..., kept]
    assert np.abs(own - other).max() <= 1e-5 * np.abs(own).max()
    # The saved model is a model as any other.
    assert main(["export", "--from", str(tmp_path / "out"), "--to", str(tmp_path / "npz"), "--format", "npz"]) == 0
    assert command(tmp_path / "out", tmp_path / "again", corpus) == 0
    assert f"{len(kept)} of {len(kept)} pieces are kept" in capsys.readouterr().out


@pytest.mark.slow
def test_all_texts_of_an_object_count(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    entries = [
        {"text": "w1", "text_pair": "w2", "label": "no"},
        {"text": "w3", "choices": ["w4", "w5"], "negative": ["w6"]},
        {"words": ["w7", "w8"], "tags": ["O", "O"], "negatives": ["w9"]},
    ]
    corpus.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    source = save(tmp_path / "whole", make_weights(HeadsConfig(pooler=True)))
    assert command(source, tmp_path / "out", corpus, "--ngram", "0") == 0
    tokenizer = load(tmp_path / "out").tokenizer
    kept = set(tokenizer.pieces(range(tokenizer.vocab_size)))
    assert {word for word in words(40) if word[0] == "w"} & kept == {f"w{i}" for i in range(1, 10)}


@pytest.mark.slow
def test_every_array_of_pieces_is_cut(tmp_path, corpus):
    """Factorized embeddings, an output layer of its own, and an id in the description."""
    sizes = {"embedding_size": 8, "tied_output": False, "separator_id": PIECES.index("[SEP]")}
    weights = make_weights(HeadsConfig(mlm=True), **sizes)
    assert command(save(tmp_path / "whole", weights), tmp_path / "out", corpus) == 0
    part = load(tmp_path / "out")
    assert part.spec.model.separator_id == part.tokenizer.sep_id == PIECES.index("[SEP]") - 1
    cut = {
        name for name, shape in parameter_shapes(part.spec).items() if shape != weights.params[name].shape
    }  # fmt: skip
    assert cut == {
        "embeddings/word_embeddings/embedding", "mlm_head/output_bias", "mlm_head/output_embeddings/embedding",
    }  # fmt: skip


@pytest.mark.slow
def test_a_difference_is_found_before_anything_is_saved(tmp_path, corpus, capsys, monkeypatch):
    weights = make_weights(HeadsConfig(mlm=True))
    source = save(tmp_path / "whole", weights)
    for name, message in (
        ("layer_1/feed_forward/output/bias", "last_hidden_state"),
        ("mlm_head/output_bias", "mlm_logits"),
    ):
        key = next(key for key in weights.params if key.endswith(name))

        def broken(bundle, part, key=key, cut=trim._trimmed):
            smaller = cut(bundle, part)
            return dataclasses.replace(smaller, params={**smaller.params, key: smaller.params[key] + 0.1})

        with monkeypatch.context() as patch:
            patch.setattr(trim, "_trimmed", broken)
            assert command(source, tmp_path / "out", corpus) == 3
        assert f"error: {message} of the trimmed model differs by" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_bad_input_is_one_line(tmp_path, corpus, capsys):
    weights = make_weights(HeadsConfig(pooler=True))
    source = save(tmp_path / "whole", weights)
    bare = save(
        tmp_path / "bare",
        dataclasses.replace(
            weights, spec=dataclasses.replace(weights.spec, tokenizer=None), tokenizer_content=None
        ),
    )  # fmt: skip
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "other.jsonl").write_text('{"txt": "w1"}\n')
    for model, target, text, message in (
        (source, tmp_path / "full", corpus, "not empty; give a new folder"),
        (source, tmp_path / "out", tmp_path / "none.txt", "none.txt"),
        (source, tmp_path / "out", tmp_path / "empty.txt", "empty.txt: no text given; write one per line"),
        (source, tmp_path / "out", tmp_path / "other.jsonl", 'other.jsonl: entry 1: an object without "text"'),
        (bare, tmp_path / "out", corpus, "the model has no tokenizer; add its vocabulary file"),
        (tmp_path / "no_model", tmp_path / "out", corpus, "no_model"),
    ):
        assert command(model, target, text) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert not (tmp_path / "out").exists()
