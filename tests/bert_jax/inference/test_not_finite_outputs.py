"""Outputs that are not finite: every use of a model ends with one line that names the first text."""

import json

import numpy as np
import pytest
from inference_models import make_weights

from bert_jax.config import HeadsConfig
from bert_jax.contrib.generation.generate import choose
from bert_jax.inference.loaded import LoadedModel, prepare
from bert_jax.inference.text_files import write_json_lines
from bert_jax.io.files import json_line

GOOD, BAD = "w1 w2", "W3 w4 w5 w6 w7 w8 w9"


def model(*heads: HeadsConfig, **options) -> LoadedModel:
    """A model whose output is NaN for every text of 8 tokens or more."""
    weights = make_weights(*heads, **options)
    loaded = prepare(weights, name="small")
    table = np.array(loaded.params["embeddings"]["position_embeddings"]["embedding"])
    table[7] = np.nan
    loaded.params["embeddings"]["position_embeddings"]["embedding"] = table
    return loaded


def refused(run, text: str = BAD) -> None:
    with pytest.raises(ValueError, match="NaN or infinite") as error:
        run()
    assert text in str(error.value) and GOOD not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_vectors_and_words():
    loaded = model()
    assert np.isfinite(loaded.embed([GOOD])).all()
    refused(lambda: loaded.embed([GOOD, GOOD, BAD, GOOD]))
    refused(lambda: loaded.embed(BAD, pooling="cls"))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("heads", "text"),
    [
        (HeadsConfig(pooler=True, sequence_labels=("a", "b")), BAD),
        (HeadsConfig(token_labels=("a", "b")), BAD),
        (HeadsConfig(span=True), (BAD, "w1 w2")),
    ],
)
def test_predictions(heads, text):
    good = GOOD if isinstance(text, str) else ("w1", "w2")
    refused(lambda: model(heads).predict([good, text]))


@pytest.mark.slow
def test_masks_and_scores():
    loaded = model(HeadsConfig(mlm=True))
    refused(lambda: loaded.fill_mask(["w1 [MASK]", f"{BAD} [MASK]"]))
    refused(lambda: loaded.score([GOOD, BAD]))
    refused(lambda: loaded.zero_shot([BAD], ["w4", "w5"], template="{text} [MASK]"))


def test_arrays_of_ids():
    loaded = model()
    ids = np.full((2, 7), loaded.tokenizer.encode("w1")[0])
    assert loaded.forward({"input_ids": ids})
    refused(lambda: loaded.forward({"input_ids": np.pad(ids, ((0, 0), (0, 1)))}), "row 0 of input_ids")


def test_json_has_no_nan(tmp_path, capsys):
    target = tmp_path / "rows.jsonl"
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"NaN or infinite.*b"):
            write_json_lines(iter([{"a": 1.0}, {"b": [value]}]), target)
        assert not target.exists()
    assert json.loads(json_line({"a": 1e30})) == {"a": 1e30}


def test_generated_tokens():
    logits = np.zeros((2, 5), np.float32)
    logits[1, 3] = np.nan
    settings = (np.uint32(0), np.float32(0), np.int32(0), np.float32(1))
    assert choose(logits, np.int32(0), np.arange(2, dtype=np.uint32), *settings).tolist() == [0, -1]
