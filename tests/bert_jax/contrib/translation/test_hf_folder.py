"""Folders of EncoderDecoderModel: read, written, and compared with what transformers computed."""

import json

import numpy as np
import pytest
from golden.family_cases import values
from golden.translation_cases import BEAMS, CASES, END, LENGTHS, NEW, PENALTY, START, drawn, inputs
from hf_folders import FIXTURES, pieces, save
from safetensors.numpy import load_file

from bert_jax.commands.main import main
from bert_jax.contrib.translation.hf_folder import is_folder, read_folder, write_folder
from bert_jax.contrib.translation.translate import ids_features, translate_ids
from bert_jax.inference.loaded import prepare

TOLD = json.loads((FIXTURES / "translation.json").read_text())


def folder_of(folder, case, change=None, scale=3, **keys):
    """The model of ``case`` as transformers saves it; ``keys`` override those of config.json, ``change`` edits the
    tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TOLD[case]["config"] | keys))
    tensors = {name: drawn(name, tuple(shape), values, scale) for name, shape in TOLD[case]["tensors"].items()}
    if change is not None:
        change(tensors)
    save(folder, tensors)
    return folder


def shared(tensors):
    """The tensors of a model whose decoder has the layers of the encoder."""
    for name in [name for name in tensors if name.startswith("encoder.")]:
        twin = name.replace("encoder.", "decoder.bert.", 1)
        if twin in tensors:
            tensors[twin] = tensors[name]


@pytest.fixture(scope="module")
def recorded():
    with np.load(FIXTURES / "translation.npz") as arrays:
        return dict(arrays)


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", ["bert_to_roberta", "bert", "roberta_to_bert"])
def test_logits_and_loss_are_those_of_transformers(tmp_path, recorded, case):
    loaded = prepare(read_folder(folder_of(tmp_path / "model", case)))
    source, target = CASES[case]
    for side in ("right", "left"):
        # RoBERTa counts only tokens: its left padding changes nothing.
        left = side == "left" and source["model_type"] == "bert"
        given = inputs(source["vocab_size"], target["vocab_size"], source.get("pad_token_id", 0), left)
        labels = given["labels"]
        before = np.where(labels[:, :-1] == -100, 0, labels[:, :-1])
        decoder_ids = np.concatenate([np.full((len(labels), 1), START), before], axis=1)
        features = ids_features(given["ids"], given["mask"], decoder_ids)
        logits = np.asarray(loaded.model.apply({"params": loaded.params}, features).mlm_logits, np.float64)
        expected = recorded[f"{case}/{side}/logits"]
        is_label = labels != -100
        assert np.abs(logits - expected)[is_label].max() < 2e-5 * max(1, np.abs(expected).max())
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        rows, places = np.nonzero(is_label)
        loss = -log_p[rows, places, labels[is_label]].mean()
        assert abs(loss - recorded[f"{case}/{side}/loss"]) < 2e-5 * loss


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_greedy_and_beam_search_have_the_tokens_of_transformers(tmp_path, recorded, case):
    assert TOLD[case]["margin"] > 1e-4
    loaded = prepare(read_folder(folder_of(tmp_path / "model", case, scale=5)))
    source, target = CASES[case]
    given = inputs(source["vocab_size"], target["vocab_size"], source.get("pad_token_id", 0), False)
    sources = [given["ids"][row, :length].tolist() for row, (length, _) in enumerate(LENGTHS)]
    for beams in (1, BEAMS):
        found = translate_ids(
            loaded, sources, start_id=START, end_id=END, most_tokens=NEW, beams=beams, length_penalty=PENALTY
        )
        # transformers fills with the end token.
        expected = [
            row[: row.index(END)] if END in row else row for row in recorded[f"{case}/tokens_{beams}"].tolist()
        ]
        assert found == expected


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_written_folder_is_read_back_bitwise(tmp_path, is_shared):
    change = shared if is_shared else None
    first = folder_of(tmp_path / "first", "bert", change, tie_encoder_decoder=is_shared)
    assert is_folder(first)
    (first / "vocab.txt").write_text("\n".join(pieces(31)) + "\n")
    weights = read_folder(first)
    assert weights.spec.model.shared == is_shared
    assert ("encoder/target/embeddings/word_embeddings/embedding" in weights.params) != is_shared
    again = tmp_path / "again"
    again.mkdir()
    write_folder(again, weights)
    one, other = (load_file(path / "model.safetensors") for path in (first, again))
    assert set(one) == set(other)
    for name in one:
        assert np.array_equal(one[name], other[name]) or name.startswith("encoder.pooler."), name
    second = read_folder(again)
    assert second.spec.model == weights.spec.model and set(second.params) == set(weights.params)
    assert all(np.array_equal(second.params[name], weights.params[name]) for name in weights.params)
    config = json.loads((again / "config.json").read_text())
    assert (config["decoder_start_token_id"], config["eos_token_id"], config["pad_token_id"]) == (2, 3, 0)


@pytest.mark.parametrize(
    ("keys", "change", "message"),
    [
        ({"model_type": "bert"}, None, "model_type is 'bert'"),
        ({"decoder": None}, None, "decoder is missing"),
        ({"encoder": {"model_type": "t5"}}, None, "model_type is"),
        (
            {},
            lambda tensors: tensors.pop("decoder.bert.embeddings.LayerNorm.weight"),
            "missing decoder.bert.embeddings",
        ),
        ({}, lambda tensors: tensors.update({"decoder.other": np.ones(2, np.float32)}), "unexpected decoder.other"),
    ],
)
def test_other_folders_are_refused(tmp_path, keys, change, message):
    with pytest.raises(ValueError, match=message):
        read_folder(folder_of(tmp_path / "model", "bert", change, **keys))


def test_layers_that_differ_are_not_shared(tmp_path):
    weights = read_folder(folder_of(tmp_path / "model", "bert", tie_encoder_decoder=True))
    assert not weights.spec.model.shared and any("not shared" in note for note in weights.notes)


def test_the_command_converts_in_both_directions(tmp_path, capsys):
    first = folder_of(tmp_path / "first", "bert", shared, tie_encoder_decoder=True)
    for source, target, said in (("first", "saved", "a saved model"), ("saved", "again", "bitwise equal")):
        assert main(["encoder-decoder", "--model", str(tmp_path / source), "--to", str(tmp_path / target)]) == 0
        assert said in "".join(capsys.readouterr())
    one, other = (load_file(path / "model.safetensors") for path in (first, tmp_path / "again"))
    assert all(np.array_equal(one[name], other[name]) for name in one if "pooler" not in name)
    assert main(["encoder-decoder", "--model", str(tmp_path / "saved"), "--to", str(tmp_path / "again")]) == 2
    assert "not empty" in capsys.readouterr().err
