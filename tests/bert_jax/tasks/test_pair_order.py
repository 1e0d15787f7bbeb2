"""Both orders of a pair of texts, whose logits are added (``task.pair_order both``)."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from builders import drawn, tiny_model, words
from finetune_cases import configured, run, saved_model
from support import random_params

import bert_jax
from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.finetuning.finetune import FinetuneJob
from bert_jax.interop.export import export_model
from bert_jax.interop.saved_model import write_saved
from bert_jax.records import Record

OPTIONS = (
    "--task.pair_order both --task.kind regression --input.max_shapes 2 --model.hidden_dropout 0 "
    "--model.attention_dropout 0 --regularization.head_dropout 0"
)


def pairs(count, seed):
    """Pairs of texts; the value tells whether the first letters are equal."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        a, b = (" ".join("abcdefgh"[n] for n in rng.integers(0, 8, rng.integers(1, 6))) for _ in range(2))
        found.append(Record(id=str(i), source=f"file:{i}", text=a, text_pair=b, label=str(int(a[0] == b[0]))))
    return found


SPLITS = {"train": pairs(40, 1), "dev": pairs(9, 2)}


@pytest.mark.slow
def test_both_orders_are_read_and_added(tmp_path):
    config, start = configured(saved_model(tmp_path / "source"), tmp_path / "w", OPTIONS)
    job = FinetuneJob(config, SPLITS, (), start)
    tokenizer, unit = job.task.tokenizer, job.resolved.inputs["train"][0]
    a, b = (tokenizer.encode(text) for text in (SPLITS["train"][0].text, SPLITS["train"][0].text_pair))
    assert [one.ids for one in unit.sequences] == [tokenizer.build_inputs(a, b)[0], tokenizer.build_inputs(b, a)[0]]
    mesh = bert_jax.parallel.make_mesh(config.mesh, jax.devices()[:1])
    batch, params = job.batches(mesh).pack(0)[0], random_params(job.model)
    output = jax.jit(job.model.apply)({"params": params}, batch)
    single = np.asarray(output.sequence_logits)
    np.testing.assert_allclose(job.task.logits(output, batch), single[:, ::2] + single[:, 1::2], rtol=0, atol=1e-6)


def test_predictions_do_not_depend_on_the_order(tmp_path):
    run(saved_model(tmp_path / "source"), tmp_path / "w", OPTIONS, splits=SPLITS)
    told = [json.loads(line)["value"] for line in (tmp_path / "w" / "predictions_dev.jsonl").open()]
    loaded = bert_jax.load(tmp_path / "w" / "best")
    given = [(one.text, one.text_pair) for one in SPLITS["dev"]]
    for texts in (given, [(b, a) for a, b in given]):
        found = [one["value"] for one in loaded.predict(texts)]
        np.testing.assert_allclose(found, told, rtol=0, atol=1e-5)
    assert np.ptp(told) > 1e-4
    with pytest.raises(ValueError, match="reads both orders of a pair; give text and text_pair"):
        loaded.predict("a")
    said = []
    export_model(tmp_path / "w" / "best", tmp_path / "hf", "hf", report=said.append)
    assert any("cannot state that the logits of both orders" in line for line in said)


@pytest.mark.slow
def test_models_without_settings_of_a_task_keep_their_order_in_an_export(tmp_path):
    heads = HeadsConfig(pooler=True, sequence_labels=("a", "b"), both_orders=True)
    spec = ModelSpec(model=tiny_model(40), heads=heads, tokenizer=TokenizerConfig())
    weights = drawn(spec, 0.1, words(35))
    write_saved(tmp_path / "source", weights)
    export_model(tmp_path / "source", tmp_path / "hf", "hf", verify=False, report=lambda line: None)
    before, after = (bert_jax.load(tmp_path / name).predict([("w1 w2", "w3")])[0] for name in ("source", "hf"))
    assert after["probabilities"] == pytest.approx(before["probabilities"], abs=1e-6)


def test_what_both_orders_do_not_allow(tmp_path):
    source = saved_model(tmp_path / "source")
    config, start = configured(source, tmp_path / "w", OPTIONS)
    single = [dataclasses.replace(SPLITS["train"][0], text_pair=None)]
    with pytest.raises(ValueError, match=r"file:0: task\.pair_order both needs a pair of texts"):
        FinetuneJob(config, {"train": single}, (), start)
    with pytest.raises(ValueError, match=r"loss\.nsp_weight: 1\.0 .* task\.pair_order both"):
        configured(source, tmp_path / "w", f"{OPTIONS} --loss.nsp_weight 1")
    with pytest.raises(ValueError, match=r"task\.pair_order"):
        configured(source, tmp_path / "w", "--task.kind qa --task.pair_order both")
