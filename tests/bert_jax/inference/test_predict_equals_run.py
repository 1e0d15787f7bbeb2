"""Predictions of a saved model and of its exports are those of the run that trained it, for every kind of task.

The runs, their records and the comparison are those of ``benchmarks/predict_equals_run.py``, which also trains.
Here the weights are drawn, and each network is compiled once for the run and once for the commands.
"""

import json

import jax
import numpy as np
import pytest
from benchmark_modules import load_benchmark
from finetune_cases import configured
from support import random_params

import bert_jax
from bert_jax.finetuning.best import save_parameters
from bert_jax.finetuning.evaluation import Predictor
from bert_jax.finetuning.finetune import FinetuneJob
from bert_jax.interop.export import export_model
from bert_jax.parallel import make_mesh
from data_pipeline.tasks.reading import read_file

FAST = (
    "classification, windows", "choice", "qa, no answer", "tagging, context", "joint", "sentence, classes",
)  # fmt: skip


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        yield load_benchmark("predict_equals_run", patch)


@pytest.fixture(scope="module")
def source(benchmark, tmp_path_factory):
    return benchmark.start_model(tmp_path_factory.mktemp("start") / "model")


def names():
    with pytest.MonkeyPatch.context() as patch:
        runs = load_benchmark("predict_equals_run", patch).RUNS
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in runs]


def predicted_by_run(benchmark, name, source, folder):
    """The inputs of a run of drawn weights, and its predictions; its model is in ``folder/best``."""
    one, splits = benchmark.RUNS[name], {}
    config, start = configured(source, folder / "w", f"--task.kind {one.kind} {one.options}")
    for number, split in enumerate(("train", "dev")):
        lines = benchmark.records_of(one.data, 24, number)
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        splits[split] = list(read_file(folder / f"{split}.jsonl", config.data, one.kind, split=split))
    job = FinetuneJob(config, splits, (), start)
    params, rng = random_params(job.model), np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), params)
    save_parameters(folder, job.resolved, start, params, 1, {})
    network = job.model.clone(heads=job.resolved.heads, all_layers=False)
    units = job.resolved.inputs["dev"]
    found = Predictor(job.task, network, make_mesh(config.mesh, jax.devices()[:1])).outputs(params, units)
    return lines, json.loads(json.dumps(job.task.decode(splits["dev"], units, found)))


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_predictions_are_those_of_the_run(benchmark, source, tmp_path, name):
    lines, expected = predicted_by_run(benchmark, name, source, tmp_path)
    loaded = bert_jax.load(tmp_path / "best")
    worst, place = benchmark.compared(expected, loaded.predict(lines))
    assert worst <= benchmark.BAR, place
    for form in filter(None, ("npz", benchmark.RUNS[name].export)):
        export_model(tmp_path / "best", tmp_path / form, form, report=lambda line: None)
        again = bert_jax.load(tmp_path / form)
        again._programs.update(loaded._programs)  # of the same network
        assert benchmark.compared(expected, again.predict(lines))[0] <= benchmark.BAR
