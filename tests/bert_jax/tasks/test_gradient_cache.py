"""Losses that compare the texts of a batch, with its microbatches: those of one large batch (GradCache)."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from finetune_cases import configured, records, run, saved_model

from bert_jax.finetuning.finetune import FinetuneJob
from bert_jax.finetuning.task_objective import TaskObjective
from bert_jax.parallel import batch_sharding, make_mesh
from bert_jax.training.state import initial_params
from bert_jax.training.step import loss_and_gradients

TEXTS = [record.text for record in records(20, 4)]
PAIRS = [
    dataclasses.replace(record, text_pair=TEXTS[i - 1], label=str(i % 3)) for i, record in enumerate(records(16, 4))
]
MANY = "--mesh.data 4 --mesh.fsdp 2"


def computed(source, folder, loss, steps, *, cached=True, devices=1, options="", key=None):
    """Loss, gradients and accuracy of a batch of 16 pairs, a row for each of them, in ``steps`` microbatches."""
    words = (
        f"--task.kind sentence --sentence.loss {loss} --sentence.gradient_cache {str(cached).lower()} "
        f"--training.global_batch_size 16 --input.packing false --training.accumulation_steps {steps} {options}"
    )
    config, start = configured(source, folder / "w", words)
    job = FinetuneJob(config, {"train": PAIRS}, (), start)
    mesh = make_mesh(config.mesh, jax.devices()[:devices])
    objective = TaskObjective(job.task, job.config, job.model.clone(mesh=mesh))
    batch = {name: jax.device_put(x, batch_sharding(mesh)) for name, x in job.batches(mesh).pack(0)[0].items()}
    compute = jax.jit(lambda params: loss_and_gradients(objective, params, batch, key, steps))
    value, gradients, sums, _ = compute(initial_params(job.model, 0))
    return np.asarray(value), jax.tree.map(np.asarray, gradients), {name: pair[0] for name, pair in sums.items()}


KEY = jax.random.key(1)
MIXED = "--sentence.matryoshka 8 --loss.mlm_weight 0.5"


@pytest.mark.parametrize(
    ("loss", "options", "mesh"),
    [
        ("negatives", "", MANY),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("negatives", "", ""),
                ("cosent", MIXED, ""),
                ("cosent", MIXED, MANY),
                ("simcse", "", MANY),
            )
        ),
    ],
)
def test_microbatches_are_one_large_batch(source, tmp_path, loss, options, mesh):
    """Also with dropout, whose bits depend on the text alone, and on several devices."""
    whole = computed(source, tmp_path, loss, 1, options=options, key=KEY)
    devices, steps = (8, 4) if mesh else (1, 8)
    found = computed(source, tmp_path, loss, steps, devices=devices, options=f"{options} {mesh}", key=KEY)
    np.testing.assert_allclose(found[0], whole[0], rtol=1e-6)
    assert set(found[2]) == set(whole[2])
    for name in set(whole[2]) - {"padding_fraction"}:
        np.testing.assert_allclose(found[2][name], whole[2][name], rtol=1e-6, err_msg=name)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(whole[1]))
    for one, other in zip(*map(jax.tree.leaves, (found[1], whole[1])), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * largest)


@pytest.mark.slow
def test_without_the_cache_there_are_fewer_texts_to_compare(source, tmp_path):
    whole, apart = (computed(source, tmp_path, "negatives", 8, cached=cached, key=KEY) for cached in (True, False))
    assert abs(float(apart[0]) - float(whole[0])) > 0.1


@pytest.mark.slow
def test_a_run_has_the_lines_of_one_large_batch(tmp_path):
    source = saved_model(tmp_path / "model")
    lines = []
    for steps in (1, 4):
        words = (
            "--task.kind sentence --sentence.loss negatives --sentence.gradient_cache true --input.packing false "
            f"--training.global_batch_size 16 --training.accumulation_steps {steps} --training.log_interval 1"
        )
        run(source, tmp_path / str(steps), words, splits={"train": PAIRS})
        text = (tmp_path / str(steps) / "metrics.jsonl").read_text()
        lines.append([line["loss"] for line in map(json.loads, text.splitlines()) if line.get("loss") is not None])
    assert len(lines[0]) == len(lines[1]) > 1
    np.testing.assert_allclose(lines[0], lines[1], rtol=1e-4)
