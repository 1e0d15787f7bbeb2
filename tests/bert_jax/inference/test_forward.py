"""Arrays of ids through a model: names and shapes of every output, masks, and what is refused."""

import dataclasses
import zipfile

import jax
import numpy as np
import pytest
from inference_models import make_weights, shared_model

from bert_jax.config import HeadsConfig, SentenceConfig
from bert_jax.inference.embed import embed_tokens
from bert_jax.inference.forward import forward_npz
from bert_jax.inference.loaded import prepare

BAR = 1e-5
IDS = np.array([[2, 7, 8, 9, 3], [2, 10, 11, 3, 0]])
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])


@pytest.fixture(scope="module")
def model():
    return shared_model()


@pytest.mark.slow
def test_outputs_of_every_head():
    heads = HeadsConfig(pooler=True, mlm=True, nsp=True, sequence_labels=("a", "b", "c"), span=True)
    loaded = shared_model(heads, SentenceConfig(), layers=2)
    outputs = loaded.forward({"input_ids": IDS}, hidden_states=True, attentions=True)
    assert {name: values.shape for name, values in outputs.items()} == {
        "last_hidden_state": (2, 5, 16), "pooler_output": (2, 16), "mlm_logits": (2, 5, 52), "nsp_logits": (2, 2),
        "logits": (2, 3), "start_logits": (2, 5), "end_logits": (2, 5), "sentence_embedding": (2, 16),
        "hidden_states": (3, 2, 5, 16), "attentions": (2, 2, 4, 5, 5),
    }  # fmt: skip
    assert all(values.dtype == np.float32 and np.isfinite(values).all() for values in outputs.values())
    np.testing.assert_allclose(outputs["hidden_states"][-1], outputs["last_hidden_state"], atol=BAR)
    np.testing.assert_allclose(outputs["attentions"].sum(-1), 1, atol=BAR)


@pytest.mark.slow
def test_each_use_of_shared_layers_has_its_own_hidden_states_and_attentions():
    """The layers of ALBERT: the outputs are those of a model whose layers hold copies of the same parameters."""
    apart = make_weights(layers=3)
    params = {
        name: apart.params[
            f"encoder/layer_0/{name.split('/', 2)[2]}" if name.startswith("encoder/layer_") else name
        ]
        for name in apart.params
    }
    apart = dataclasses.replace(apart, params=params)
    model = dataclasses.replace(apart.spec.model, shared_layers=True)
    once = {
        name: values
        for name, values in params.items()
        if not name.startswith(("encoder/layer_1", "encoder/layer_2"))
    }
    shared = dataclasses.replace(apart, spec=dataclasses.replace(apart.spec, model=model), params=once)
    expected = prepare(apart).forward({"input_ids": IDS}, hidden_states=True, attentions=True)
    found = prepare(shared).forward({"input_ids": IDS}, hidden_states=True, attentions=True)
    assert found.keys() == expected.keys() and len(found["hidden_states"]) == 4
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-6, err_msg=name)
    pairs = zip(
        embed_tokens(prepare(shared), ["w1 w2"], layers=[0, -1]),
        embed_tokens(prepare(apart), ["w1 w2"], layers=[0, -1]),
        strict=True,
    )
    for (pieces, ours), (expected_pieces, theirs) in pairs:
        assert pieces == expected_pieces
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.slow
def test_absent_heads_give_nothing(model):
    assert list(model.forward({"input_ids": IDS})) == ["last_hidden_state", "pooler_output"]
    assert list(shared_model(HeadsConfig()).forward({"input_ids": IDS})) == ["last_hidden_state"]


def test_heads_that_meet_keep_their_names():
    outputs = shared_model(HeadsConfig(pooler=True, sequence_labels=("a", "b"), token_labels=("x", "y"))).forward(
        {"input_ids": IDS}
    )
    assert outputs["sequence_logits"].shape == (2, 2) and outputs["token_logits"].shape == (2, 5, 2)
    assert "logits" not in outputs


def test_choices():
    loaded = shared_model(HeadsConfig(pooler=True, choice=True))
    outputs = loaded.forward({"input_ids": np.stack([IDS, IDS, IDS])})
    assert outputs["logits"].shape == (3, 2) and outputs["last_hidden_state"].shape == (6, 5, 16)
    flat = loaded.forward({"input_ids": IDS})["logits"]
    np.testing.assert_allclose(outputs["logits"][1], flat[:, 0], atol=BAR)


def test_what_is_missing_is_zero_types_and_a_mask_of_ones(model):
    bare = model.forward({"input_ids": IDS})
    full = model.forward(
        {"input_ids": IDS.astype(np.uint16), "attention_mask": np.ones((2, 5), bool), "token_type_ids": IDS * 0}
    )
    for name, values in bare.items():
        np.testing.assert_array_equal(full[name], values)
    other = model.forward({"input_ids": IDS, "token_type_ids": np.ones((2, 5), int)})
    assert np.abs(other["pooler_output"] - bare["pooler_output"]).max() > 1e-3


def test_padding_on_the_right_changes_nothing(model):
    padded = model.forward({"input_ids": IDS, "attention_mask": MASK})["last_hidden_state"]
    alone = model.forward({"input_ids": IDS[1:, :4]})["last_hidden_state"]
    np.testing.assert_allclose(padded[1, :4], alone[0], atol=BAR)
    unmasked = model.forward({"input_ids": IDS})["last_hidden_state"]
    assert np.abs(unmasked[1, :4] - alone[0]).max() > 1e-3


def test_a_row_that_is_padding_all_over_changes_no_other(model):
    outputs = model.forward({"input_ids": IDS, "attention_mask": MASK * [[1], [0]]})
    alone = model.forward({"input_ids": IDS[:1]})
    for name, values in outputs.items():
        assert np.isfinite(values).all()
        np.testing.assert_allclose(values[0], alone[name][0], atol=BAR)


def test_padding_on_the_left_counts_positions_from_the_first_column(model):
    """As transformers does with absolute positions: the padded tokens use up positions."""
    left = np.roll(IDS[1:], 1, axis=1)
    padded = model.forward({"input_ids": left, "attention_mask": np.roll(MASK[1:], 1, axis=1)}, attentions=True)
    assert np.abs(padded["attentions"][:, 0, :, :, 0]).max() == 0  # nobody looks at the padding
    features = {
        "input_ids": IDS[1:, :4], "token_type_ids": np.zeros((1, 4), int), "sequence_ids": np.ones((1, 4), int),
        "position_ids": np.arange(1, 5)[None],
    }  # fmt: skip
    apply = jax.jit(lambda params, batch: model.model.apply({"params": params}, batch).sequence_output)
    expected = apply(model.params, features)
    np.testing.assert_allclose(padded["last_hidden_state"][0, 1:], expected[0], atol=BAR)


@pytest.mark.slow
def test_padding_on_the_left_of_roberta_takes_no_position():
    loaded = shared_model(HeadsConfig(), family="roberta", types=1)
    ids = np.array([[5, 7, 8, 9, 3]])
    left = np.concatenate([np.full((1, 2), 1), ids], axis=1)  # 1 is its padding
    mask = (left != 1).astype(int)
    padded = loaded.forward({"input_ids": left, "attention_mask": mask})["last_hidden_state"]
    alone = loaded.forward({"input_ids": ids})["last_hidden_state"]
    np.testing.assert_allclose(padded[0, 2:], alone[0], atol=BAR)


@pytest.mark.slow
def test_many_rows_run_in_parts(model, monkeypatch):
    ids = np.random.default_rng(0).integers(5, 45, (23, 5))
    whole = model.forward({"input_ids": ids}, hidden_states=True)
    monkeypatch.setattr("bert_jax.inference.forward._TOKENS", 50)
    parts = model.forward({"input_ids": ids}, hidden_states=True)
    for name, values in whole.items():
        np.testing.assert_allclose(parts[name], values, atol=BAR, err_msg=name)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "input_ids is missing"),
        ({"input_ids": IDS + 43}, "input_ids contains 54; allowed: 0 to 51"),
        ({"input_ids": -IDS}, "input_ids contains -11"),
        ({"input_ids": IDS.astype(np.float32)}, "input_ids has the dtype float32; allowed: integers"),
        ({"input_ids": IDS > 3}, "input_ids has the dtype bool"),
        ({"input_ids": IDS[0]}, r"the shape \(5,\)"),
        ({"input_ids": IDS[:0]}, r"the shape \(0, 5\)"),
        ({"input_ids": IDS[None]}, r"the shape \(1, 2, 5\)"),
        ({"input_ids": np.ones((1, 71), int)}, "71 tokens per row; the maximum is 70"),
        ({"input_ids": IDS, "attention_mask": MASK[:1]}, "they must be equal"),
        ({"input_ids": IDS, "attention_mask": MASK * 2}, "attention_mask contains 2; allowed: 0 to 1"),
        ({"input_ids": IDS, "attention_mask": MASK * 1.0}, "attention_mask has the dtype float64"),
        ({"input_ids": IDS, "token_type_ids": MASK * 2}, "token_type_ids contains 2; allowed: 0 to 1"),
        ({"input_ids": IDS.astype(np.uint64) + np.uint64(2**63)}, "input_ids contains"),
    ],
)
def test_what_the_model_cannot_take(model, inputs, message):
    with pytest.raises(ValueError, match=message) as caught:
        model.forward(inputs)
    assert "\n" not in str(caught.value)


def test_npz_files_as_numpy_writes_them(model, tmp_path):
    expected = model.forward({"input_ids": IDS, "attention_mask": MASK})["pooler_output"]
    for ids, mask, save in [
        (np.asfortranarray(IDS), MASK.astype(bool), np.savez),
        (IDS.astype(np.uint16), MASK.astype(np.int8), np.savez_compressed),
    ]:
        save(tmp_path / "in.npz", input_ids=ids, attention_mask=mask)
        forward_npz(model, tmp_path / "in.npz", tmp_path / "out.npz")
        with np.load(tmp_path / "out.npz") as outputs:
            np.testing.assert_array_equal(outputs["pooler_output"], expected)


def test_npz_in_and_out(model, tmp_path):
    np.savez(tmp_path / "in.npz", input_ids=IDS, attention_mask=MASK)
    shapes = forward_npz(model, tmp_path / "in.npz", tmp_path / "new" / "out.npz", hidden_states=True)
    with np.load(tmp_path / "new" / "out.npz") as outputs:
        assert {name: outputs[name].shape for name in outputs.files} == shapes
        expected = model.forward({"input_ids": IDS, "attention_mask": MASK})
        np.testing.assert_array_equal(outputs["pooler_output"], expected["pooler_output"])
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["in.npz", "new", "out.npz"]


class Boom:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return (print, ("unpickled",))


@pytest.mark.parametrize("kind", ["objects", "other", "empty", "text", "array", "cut", "huge", "locked"])
def test_files_that_are_no_inputs(model, tmp_path, kind, capsys):
    source = tmp_path / "in.npz"
    if kind == "objects":
        np.savez(source, input_ids=np.array([Boom()], object))
    elif kind == "other":
        np.savez(source, input_ids=IDS, labels=IDS)
    elif kind == "array":
        with source.open("wb") as file:
            np.save(file, IDS)
    elif kind == "cut":
        np.savez(source, input_ids=np.ones((50, 60), int))
        source.write_bytes(source.read_bytes()[:5000])
    elif kind == "huge":
        with zipfile.ZipFile(source, "w") as archive, archive.open("input_ids.npy", "w") as member:
            header = {"descr": "<i8", "fortran_order": False, "shape": (1 << 30, 1 << 30)}
            np.lib.format.write_array_header_1_0(member, header)
    elif kind == "locked":
        np.savez(source, input_ids=IDS)
        content = source.read_bytes()
        flags = content.index(b"PK\1\2") + 8  # of the directory's entry: bit 0 says encrypted
        source.write_bytes(content[:flags] + b"\1" + content[flags + 1 :])
    else:
        source.write_bytes(b"" if kind == "empty" else b"no zip at all")
    with pytest.raises(ValueError) as caught:
        forward_npz(model, source, tmp_path / "out.npz")
    assert "in.npz" in str(caught.value) and "\n" not in str(caught.value)
    assert "unpickled" not in capsys.readouterr().out
    assert not (tmp_path / "out.npz").exists()
