"""One step of every task, from records to gradients, against transformers' classes and modules around its BERT, as
recorded by tests/golden/record_tasks.py: there an example has a row of its own, here examples share rows.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import linen as nn
from golden.task_cases import PIECES, TASK_CASES, TaskCase, weight

from bert_jax.config import ExecutionConfig, MeshConfig, ModelConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.finetuning.finetune import FinetuneJob
from bert_jax.finetuning.task_objective import TaskObjective
from bert_jax.inference.batching import Shape, fill_rows, pack_batch
from bert_jax.model import to_canonical
from bert_jax.model.canonical import from_canonical
from bert_jax.objectives.objective import split_microbatches
from bert_jax.parallel import make_mesh, to_global
from bert_jax.records import Answer, Record
from bert_jax.start.start import Start
from bert_jax.training.state import abstract_params
from bert_jax.training.step import loss_and_gradients

FIXTURE = Path(__file__).parents[2] / "golden" / "fixtures" / "tasks.npz"
CASES = {case.name: case for case in TASK_CASES}
EXECUTIONS = {
    "unrolled": ExecutionConfig(),
    "scanned": ExecutionConfig(scan_layers=True, remat="full", fused_qkv=True, vocab_multiple=64),
}
# Five layers that are not scanned compile for seconds.
SLOW = [("classification", "scanned"), ("weighted_all", "scanned")]
SLOW += [("weighted_last_four", "unrolled"), ("concat_last_four", "unrolled")]
SCANNED = ("classification", "weighted_all", "weighted_last_four", "concat_last_four")
RUNS = [
    pytest.param(*case, marks=pytest.mark.slow if case in SLOW else ())
    for case in [*((name, "unrolled") for name in CASES), *((name, "scanned") for name in SCANNED)]
]
ROW, UNITS = 64, 3
LOSS_BAR, GRADIENT_BAR, SHARE = 1e-5, 1e-4, 1e-3
# One device against several, and one pass against two.
SAME_BAR = 1e-5
KEY_BIAS = "attention/key/bias"
VOCAB = len(PIECES)


@functools.cache
def recorded() -> dict[str, np.ndarray]:
    with np.load(FIXTURE) as stored:
        return dict(stored)


def records_of(case: TaskCase) -> list[Record]:
    found = []
    for i, fields in enumerate(case.records):
        if "answers" in fields:
            fields = fields | {"answers": tuple(Answer(**answer) for answer in fields["answers"])}
        found.append(Record(id=str(i), source=f"file:{i}", **fields))
    return found


def make_job(case: TaskCase, execution: str = "unrolled") -> FinetuneJob:
    """What run_finetune.py makes of the case's config and records."""
    plain = FinetuneConfig()
    options = {"task": {"kind": case.kind, "max_length": ROW}, **case.options}
    sections = {name: dataclasses.replace(getattr(plain, name), **given) for name, given in options.items()}
    config = FinetuneConfig(model=ModelConfig(**case.model), execution=EXECUTIONS[execution], **sections)
    start = Start(tokenizer_content=("\n".join(PIECES) + "\n").encode())
    return FinetuneJob(config, {"train": records_of(case)}, (), start)


def packed(job: FinetuneJob, records: list[Record], *, length: int = ROW, rows: int = 0) -> dict[str, np.ndarray]:
    """The batch of all records, in ``rows`` rows, of which some are blank; 0: one more than are needed."""
    units = job.task.featurize(records, training=True)
    filled = fill_rows([unit.length for unit in units], (length,), UNITS)
    assert len(filled) < len(units), "no units share a row"
    assert not rows or len(filled) < rows, "no row is blank"
    shape, pad_id = Shape(rows or len(filled) + 1, length, UNITS), job.task.tokenizer.pad_id
    given = {"sequences": job.task.sequences_per_unit, "targets": job.task.targets, "pad_id": pad_id}
    return pack_batch(units, filled, shape, **given).features


def drawn(job: FinetuneJob) -> dict:
    """The case's weights in their running layout."""
    like = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), nn.unbox(abstract_params(job.model)))
    weights = {name: weight(name, leaf.shape) for name, leaf in to_canonical(like, VOCAB).items()}
    return from_canonical(weights, like, VOCAB)


def compiled(job: FinetuneJob, accumulation: int = 1, model=None):
    """Function of a batch: (loss, canonical gradients), without dropout."""
    objective = TaskObjective(job.task, job.config, model or job.model)
    run = jax.jit(lambda p, b: loss_and_gradients(objective, p, b, None, accumulation)[:2])

    def computed(batch):
        loss, gradients = jax.device_get(run(drawn(job), batch))
        return float(loss), {name: np.asarray(value) for name, value in to_canonical(gradients, VOCAB).items()}

    return computed


def step(job: FinetuneJob, batch: dict, accumulation: int = 1, mesh_sizes: tuple[int, int, int] | None = None):
    """(loss, canonical gradients) of the batch on a mesh, without dropout."""
    model = job.model
    if mesh_sizes is not None:
        mesh = make_mesh(MeshConfig(**dict(zip(("data", "fsdp", "tensor"), mesh_sizes, strict=True))))
        model, batch = model.clone(mesh=mesh), to_global(batch, mesh, len(batch["input_ids"]))
    return compiled(job, accumulation, model)(batch)


def worst_gradient(given: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest norm(g - g0) / max(norm(g0), 1e-3 * global norm) of a parameter, and which one it is."""
    assert set(given) == set(expected)
    norms = {name: float(np.linalg.norm(value)) for name, value in expected.items()}
    least = SHARE * np.sqrt(sum(norm**2 for norm in norms.values()))
    for name, value in given.items():
        assert value.shape == expected[name].shape, name
    return max(
        (float(np.linalg.norm(given[name] - value)) / max(norms[name], least), name)
        for name, value in expected.items()
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "execution"), RUNS)
def test_loss_and_gradients_equal_transformers(name: str, execution: str) -> None:
    """Of question answering: the softmax runs over the tokens of an input. In transformers it does so over padding
    too, so there the recorder pads nothing."""
    job = make_job(CASES[name], execution)
    loss, gradients = step(job, packed(job, records_of(CASES[name])))
    prefix = f"{name}/gradient:"
    expected = {key.removeprefix(prefix): x for key, x in recorded().items() if key.startswith(prefix)}
    off, (worst, where) = abs(loss - float(recorded()[f"{name}/loss"])), worst_gradient(gradients, expected)
    print(f"{name} {execution}: loss {off:.1e}, gradients {worst:.1e} ({where})")
    assert off <= LOSS_BAR
    assert worst <= GRADIENT_BAR, where


def test_every_recorded_case_is_tested() -> None:
    assert {key.split("/")[0] for key in recorded()} == set(CASES)


# ------------------------------------------------------------------ microbatches and meshes

MESHES = [((2, 2, 2), 2)]
MESHES += [pytest.param(*case, marks=pytest.mark.slow) for case in (((8, 1, 1), 1), ((8, 1, 1), 2), ((4, 2, 1), 1))]
ROWS = 16


@functools.cache
def job_and_batch(name: str) -> tuple[FinetuneJob, dict[str, np.ndarray]]:
    """17 examples in 16 rows, blank ones among them; microbatches and replicas have unequal numbers of examples."""
    case = CASES[name]
    fields = [case.records[i % len(case.records)] for i in range(17)]
    # An equal text would be a negative of its own.
    fields = [r | {"text": f"{r['text']} w{i}", "text_pair": f"w{2 * i} w{i}x"} for i, r in enumerate(fields)]
    case = dataclasses.replace(case, records=tuple(fields))
    job = make_job(case)
    batch = packed(job, records_of(case), length=48 if name == "negatives" else 32, rows=ROWS)
    counts = [int((rows > 0).sum()) for rows in split_microbatches(batch, 2)["weights"]]
    assert sum(counts) == len(fields) and counts[0] != counts[1]
    return job, batch


@functools.cache
def one_device(name: str, accumulation: int):
    return step(*job_and_batch(name), accumulation)


def assert_same(given, expected) -> None:
    # Softmax does not see what a key bias adds to all scores of a query: its gradient is nothing but rounding.
    whole = np.sqrt(sum(float(np.sum(value**2)) for value in expected[1].values()))
    for gradients in (given[1], expected[1]):
        assert all(np.linalg.norm(gradients[name]) <= 1e-6 * whole for name in gradients if KEY_BIAS in name)
    seen = [
        {name: x for name, x in gradients.items() if KEY_BIAS not in name} for gradients in (given[1], expected[1])
    ]
    off, (worst, where) = abs(given[0] - expected[0]), worst_gradient(*seen)
    print(f"loss {off:.1e}, gradients {worst:.1e} ({where})")
    assert off <= SAME_BAR
    assert worst <= SAME_BAR, where


@pytest.mark.slow
def test_accumulation_of_negatives_is_the_mean_over_microbatches() -> None:
    """Each microbatch is a batch of its own to this loss, and weighs as much as it has examples."""
    job, batch = job_and_batch("negatives")
    halves = [{name: np.asarray(x[i]) for name, x in split_microbatches(batch, 2).items()} for i in range(2)]
    counts = [float(half["weights"].sum()) for half in halves]
    shares = [count / sum(counts) for count in counts]
    run = compiled(job)
    (a, a_grads), (b, b_grads) = (run(half) for half in halves)
    mean = {name: shares[0] * a_grads[name] + shares[1] * b_grads[name] for name in a_grads}
    assert_same(one_device("negatives", 2), (shares[0] * a + shares[1] * b, mean))


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "accumulation"), MESHES)
def test_mesh_and_microbatches_of_classes_equal_one_pass(sizes: tuple[int, int, int], accumulation: int) -> None:
    """Two microbatches need two rows of each part of the mesh."""
    assert_same(step(*job_and_batch("classification"), accumulation, sizes), one_device("classification", 1))


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "accumulation"), MESHES)
def test_mesh_of_negatives_equals_one_device(sizes: tuple[int, int, int], accumulation: int) -> None:
    """Every replica sees the texts of all as negatives."""
    assert_same(step(*job_and_batch("negatives"), accumulation, sizes), one_device("negatives", accumulation))
