"""Folders of transformers: read and written bitwise, and refused in one line."""

import dataclasses
import json

import numpy as np
import pytest
from bert_jax_xlnet.folder import PIECES, read_folder, renamed, write_folder
from safetensors.numpy import load_file, save_file
from xlnet_references import FILE, class_spec, lm_spec, params_of, spec_of

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, TokenizerConfig
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.interop.saved_model import write_saved

SPECIAL = ("<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A SentencePiece model of 29 pieces with the special pieces of XLNet, in their order."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text.txt").write_text("a cat ate a tea\nthe cat sat at the seat\nbet a hat\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "spiece"), vocab_size=29, hard_vocab_limit=False,
        control_symbols=",".join(SPECIAL), bos_id=1, eos_id=2, unk_id=0, pad_id=-1, minloglevel=2,
    )  # fmt: skip
    return (folder / "spiece.model").read_bytes()


def bundle(spec, which="weights", **more):
    params = params_of(spec, np.load(FILE)[which] / np.float32(64))
    return ModelBundle(spec=spec, params=params, **more)


def folder_of(place, weights):

    place.mkdir()
    write_folder(place, weights)
    return place


@pytest.mark.parametrize(("spec", "which"), [(lm_spec, "weights"), (class_spec, "classifier")])
def test_a_folder_is_read_and_written_bitwise(spec, which, pieces, tmp_path):

    ours = renamed(pieces, PIECES, "spiece.model")
    spec = dataclasses.replace(spec(), tokenizer=TokenizerConfig(file="tokenizer.model", lower_case=False))
    weights = bundle(spec, which, tokenizer_content=ours)
    first = folder_of(tmp_path / "first", weights)
    assert (first / "spiece.model").read_bytes() == pieces != ours
    again = read_folder(first)
    assert again.spec == spec and again.tokenizer_content == ours
    assert {n: x.tobytes() for n, x in again.params.items()} == {n: x.tobytes() for n, x in weights.params.items()}
    second = folder_of(tmp_path / "second", again)
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()
    assert json.loads((first / "config.json").read_text())["pad_token_id"] == 5
    names = {"transformer.mask_emb": (1, 1, 8), "transformer.layer.1.rel_attn.o": (8, 2, 4)}
    tensors = load_file(first / "model.safetensors")
    assert {name: tensors[name].shape for name in names} == names


def test_the_layout_of_the_tensors(tmp_path):
    """Each value has its place: the tensors have the values that transformers had in the study."""
    tensors = load_file(folder_of(tmp_path / "model", bundle(lm_spec())) / "model.safetensors")
    flat = np.concatenate([tensors[name].reshape(-1) for name in sorted(tensors)])
    np.testing.assert_array_equal(flat, np.load(FILE)["weights"] / np.float32(64))


def test_an_untied_output_layer_is_read(tmp_path):

    place = folder_of(tmp_path / "model", bundle(lm_spec()))
    tensors, config = load_file(place / "model.safetensors"), json.loads((place / "config.json").read_text())
    save_file(tensors | {"lm_loss.weight": np.full((29, 8), 0.5, np.float32)}, place / "model.safetensors")
    assert "mlm_head/output_embeddings/embedding" not in read_folder(place).params
    (place / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    found = read_folder(place)
    assert not found.spec.model.tied_output
    assert (found.params["mlm_head/output_embeddings/embedding"] == 0.5).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_type": "uni"}, "attn_type is 'uni'; allowed: 'bi'"),
        ({"bi_data": True}, "bi_data is True; allowed: False"),
        ({"ff_activation": "swish"}, "ff_activation is 'swish'; allowed: gelu, gelu_new, relu, silu"),
        ({"n_head": 3}, "not the description of an XLNet (model.num_attention_heads: 3 is not allowed"),
        ({"n_layer": 3}, "the tensors do not match config.json: missing transformer.layer.2.rel_attn.q"),
        ({"n_layer": 1}, "unexpected transformer.layer.1.ff.layer_1.bias"),
        ({"d_inner": 13}, "transformer.layer.0.ff.layer_1.weight has the shape (12, 8), expected (13, 8)"),
        ({"model_type": "bert"}, ""),
    ],
)
def test_a_folder_that_is_refused(change, message, tmp_path, capsys):
    place = folder_of(tmp_path / "model", bundle(lm_spec()))
    content = json.loads((place / "config.json").read_text()) | change
    (place / "config.json").write_text(json.dumps(content))
    assert main(["xlnet", "--model", str(place), "--to", str(tmp_path / "to")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not (tmp_path / "to").exists()


def test_what_is_not_written(tmp_path, capsys):
    heads = HeadsConfig(token_labels=("a", "b"))
    spec = spec_of(heads)

    params = {name: np.zeros(shape, np.float32) for name, shape in parameter_shapes(spec).items()}
    write_saved(tmp_path / "tagger", ModelBundle(spec=spec, params=params))
    assert main(["xlnet", "--model", str(tmp_path / "tagger"), "--to", str(tmp_path / "to")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("heads: no class of XLNet has token; allowed: mlm, or one sequence head of single labels")


def test_a_damaged_sentencepiece_model_is_refused():

    with pytest.raises(ValueError, match=r"^spiece\.model: not a SentencePiece model; copy the file again$"):
        renamed(b"\x0a\xff", PIECES, "spiece.model")
