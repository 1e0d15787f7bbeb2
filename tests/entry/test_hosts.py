"""Several processes make one run, and it learns what one process would: same examples, same losses, same files.

BERT_JAX_HOSTS=full runs every layout with a model of four layers (half an hour on two cores).
"""

import json
import os
from collections import defaultdict
from pathlib import Path

import command
import pytest
from support import objective_of

from bert_jax.config import PretrainConfig, load_config
from bert_jax.parallel import make_mesh
from bert_jax.training.checkpoint.restore import restore_newest
from bert_jax.training.logging.metrics_file import read_metrics

pytestmark = pytest.mark.entry
FULL = os.environ.get("BERT_JAX_HOSTS") == "full"
# Steps of a leg of the chain, and of the whole run.
LEG, STEPS = (30, 150) if FULL else (6, 12)
RECORDED = Path(__file__).with_name("recorded_run.py")
# Processes, devices of each, and mesh (data, fsdp, tensor).
LAYOUTS = [(2, 2, (4, 1, 1)), (4, 2, (8, 1, 1)), (2, 2, (1, 1, 4)), (2, 2, (2, 1, 2))]
CHAIN = [(1, 4, (2, 2, 1)), (1, 1, (1, 1, 1)), (1, 8, (2, 2, 2)), (2, 2, (1, 1, 4)), (1, 2, (1, 2, 1))]
QUICK_CHAIN = [(1, 4, (2, 2, 1)), (2, 2, (1, 1, 4))]


def recipe(folder, vocab_size=64):
    size = {
        "vocab_size": vocab_size, "hidden_size": 128, "num_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 512, "max_position_embeddings": 64,
    }  # fmt: skip
    full = {
        "model": size, "training": {"global_batch_size": 32, "num_steps": STEPS},
        "data": {"seq_length": 64, "max_predictions": 10, "dupe_factor": 4},
    }  # fmt: skip
    sections = {"model": {}, "training": {"num_steps": STEPS}, "data": {}} | (full if FULL else {})
    sections["training"] |= {"log_interval": 1, "checkpoint_interval": LEG, "eval_interval": LEG}
    sections["optimizer"] = {"decay_steps": STEPS}  # the schedule does not depend on where a leg ends
    return command.recipe(folder, mesh={"data": 1}, **sections)


def mesh_flags(mesh):
    return [word for axis, size in zip(("data", "fsdp", "tensor"), mesh, strict=True)
            for word in (f"--mesh.{axis}", str(size))]  # fmt: skip


def train(recipe, workdir, layout, *arguments):
    """Run ``recipe`` on ``layout``; every process ends well."""
    processes, devices, mesh = layout
    results = command.run_hosts(
        processes, devices, workdir.with_suffix(".rows"), "--config", recipe, "--workdir", workdir,
        *mesh_flags(mesh), *arguments, program=RECORDED, timeout=3600,
    )  # fmt: skip
    for code, _, err in results:
        assert code == 0, f"{layout}: {err[-2000:]}"
    # What is said is said once, by the lead.
    assert not any("held-out" in out or "parameters" in out for _, out, _ in results[1:])
    assert ("process 1 reads" in results[0][1]) == (processes > 1)
    return results[0][1]


def losses(workdir):
    return {line["step"]: line["loss"] for line in read_metrics(workdir) if "split" not in line}


def examples(workdir, steps):
    """(data step, row) -> digest of what was read, of the steps that were trained; no two processes disagree."""
    found = defaultdict(set)
    for path in workdir.with_suffix(".rows").glob("rows.*"):
        for line in path.read_text().splitlines():
            step, row, digest = map(int, line.split())
            if step < steps:
                found[step, row].add(digest)
    assert all(len(digests) == 1 for digests in found.values())
    return found


def worst(got, expected):
    assert got.keys() == expected.keys()
    return max(abs(got[step] - loss) / loss for step, loss in expected.items())


def restored_digest(workdir, recipe):
    """Step of the newest checkpoint; restoring it here proves its digest on a third layout of devices."""
    config = load_config(PretrainConfig, ["--config", str(recipe), *mesh_flags((2, 2, 2))])
    lines = []
    restored = restore_newest(
        workdir,
        config,
        make_mesh(config.mesh),
        objective_of(config).model,
        read_only=True,
        may_change=set(),
        report=lines.append,
    )  # fmt: skip
    assert not lines
    return restored.step


@pytest.fixture(scope="module", params=[8192, 30522] if FULL else [64])
def whole(request, tmp_path_factory):
    """Recipe, and the workdir of an uninterrupted run of one process with one device."""
    folder = tmp_path_factory.mktemp(f"hosts{request.param}")
    path = recipe(folder, request.param)
    train(path, folder / "whole", (1, 1, (1, 1, 1)))
    return path, folder / "whole"


@pytest.mark.slow
def test_a_chain_of_layouts_is_one_run(whole):
    path, reference = whole
    workdir = reference.with_name("chain")
    for leg, layout in enumerate(CHAIN if FULL else QUICK_CHAIN, start=1):
        out = train(path, workdir, layout, "--training.num_steps", leg * LEG)
        assert "damaged" not in out
        if layout == (2, 2, (1, 1, 4)) and not FULL:  # the axis tensor spans both processes
            assert "rows of a batch of 8: process 0 reads 0-7, process 1 reads 0-7\n" in out
        assert leg == 1 or f"continuing at step {(leg - 1) * LEG:,}" in out
        assert restored_digest(workdir, path) == leg * LEG
    difference = worst(losses(workdir), losses(reference))
    print(f"chain, vocabulary of {path.parent.name}: {difference:.1e} relative")
    assert difference <= 1e-6
    assert examples(workdir, STEPS) == examples(reference, STEPS)
    evaluations = [[line for line in read_metrics(folder) if line.get("split")] for folder in (workdir, reference)]
    assert [line["step"] for line in evaluations[0]] == [line["step"] for line in evaluations[1]]
    assert {path.name for path in workdir.iterdir()} == {path.name for path in reference.iterdir()}


@pytest.mark.skipif(not FULL, reason="BERT_JAX_HOSTS=full")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_processes_learn_what_one_process_learns(whole, layout):
    path, reference = whole
    workdir = reference.with_name(f"{layout[0]}-{'-'.join(map(str, layout[2]))}")
    train(path, workdir, layout, "--training.num_steps", "50")
    difference = worst(losses(workdir), {k: v for k, v in losses(reference).items() if k <= 50})
    print(f"{layout}, vocabulary of {path.parent.name}: {difference:.1e} relative")
    assert difference <= 1e-6
    assert examples(workdir, 50) == {key: value for key, value in examples(reference, 50).items() if key[0] < 50}
    assert len(json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])) > 3
