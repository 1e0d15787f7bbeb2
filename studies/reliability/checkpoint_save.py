"""Cost of a save: time of the call, slowdown of the steps during the save, memory; and a check of its values.

    python studies/reliability/checkpoint_save.py [--config configs/bert_base_phase1.yaml] [--matmuls 8] [--folder DIR]

The state is that of the recipe with its moments in float32 (1.3 GB for BERT-base). The step updates all of it, its
buffers donated, and multiplies matrices for the rest of the time of a realistic step (--matmuls). Steps continue
during one save, including its digest and list of checksums. Then the same steps run again without a save, and the
restored state is compared, bit for bit, with the state at the save. Prints one JSON object.
Exit code 3 above the limits of LIMITS, or if a bit differs. Linux only (reads /proc).
"""

import argparse
import functools
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import PretrainConfig, load_config
from bert_jax.model import BertForPretraining
from bert_jax.optim import make_optimizer
from bert_jax.parallel import make_mesh
from bert_jax.training.checkpoint.digest import CHECKSUM_FILE
from bert_jax.training.checkpoint.restore import restore_newest
from bert_jax.training.checkpoint.writer import CheckpointWriter
from bert_jax.training.state import TrainState, abstract_state

LIMITS = {"blocking_seconds": 1.0, "step_ratio": 2.3, "extra_seconds": 10.0, "memory_ratio": 2.2}
MATRIX = 1536
STEPS_BEFORE, SAVE_AFTER = 12, 8


def make_state(abstract: TrainState) -> TrainState:
    """Return a state of normal numbers, which compress like the values of a model."""
    leaves, structure = jax.tree.flatten(abstract)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [
        jnp.zeros((), leaf.dtype) if leaf.ndim == 0 else jax.random.normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.device_put(jax.tree.unflatten(structure, drawn), jax.tree.map(lambda leaf: leaf.sharding, abstract))


@functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
def step(state: TrainState, matrix: jax.Array, matmuls: int) -> tuple[TrainState, jax.Array]:
    """Change every value of the state, then compute."""
    scale = 1 - 1e-3 / (1 + state.step.astype(jnp.float32))
    changed = jax.tree.map(lambda leaf: leaf * scale if leaf.dtype == jnp.float32 else leaf + 1, state)
    work = jax.lax.fori_loop(0, matmuls, lambda _, x: jnp.tanh(x @ matrix), matrix)
    return changed, work[0, 0]


class Memory(threading.Thread):
    """Peak resident size of this process since the last ``reset``, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest = 0

    def run(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            self.highest = max(self.highest, int(status.split("VmRSS:")[1].split()[0]) * 1024)
            time.sleep(0.02)

    def reset(self) -> None:
        """Start a new measurement of the peak."""
        self.highest = 0


def measure(config: PretrainConfig, abstract: TrainState, folder: Path, matmuls: int) -> tuple[dict[str, Any], int]:
    """Return the figures of one save, and the saved step."""
    matrix = jax.random.normal(jax.random.key(1), (MATRIX, MATRIX)) / MATRIX**0.5
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    state = make_state(abstract)
    writer = CheckpointWriter(folder, config, abstract)
    memory = Memory()
    memory.start()

    def timed() -> float:
        nonlocal state
        began = time.perf_counter()
        state, result = step(state, matrix, matmuls)
        jax.block_until_ready((state, result))
        writer.poll()
        return time.perf_counter() - began

    timed()
    # The first save of a run comes long after the digest's programs were compiled; here it would wait for them.
    writer.save(state, {"data": {}})
    writer.wait()
    timed()
    memory.reset()
    before = [timed() for _ in range(STEPS_BEFORE)]
    alone = memory.highest
    saved_step = int(state.step)
    memory.reset()
    began = time.perf_counter()
    writer.save(state, {"data": {}})
    blocking = time.perf_counter() - began
    during = []
    # The list of checksums follows the commit.
    listed = writer.folder / str(saved_step) / CHECKSUM_FILE
    while not listed.exists():
        during.append(timed())
    took = time.perf_counter() - began
    highest = memory.highest
    writer.wait()
    after = [timed() for _ in range(SAVE_AFTER)]
    began = time.perf_counter()
    writer.close()
    usual = statistics.median(before + after)
    return {
        "state_gigabytes": size / 1e9,
        "step_seconds": usual,
        "blocking_seconds": blocking,
        "saving_seconds": took,
        "steps_during": len(during),
        "slowest_step_seconds": max(during, default=0.0),
        "step_ratio": statistics.median(during) / usual if during else 1.0,
        "extra_seconds": took - len(during) * usual,
        # The step's own share (temporaries, the runtime) is in both figures.
        "memory_ratio": 1 + (highest - alone) / size,
        "closing_seconds": time.perf_counter() - began,
        "disk_gigabytes_per_save": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2e9,
    }, saved_step


def different_leaves(
    config: PretrainConfig, abstract: TrainState, folder: Path, saved_step: int, matmuls: int
) -> int:
    """Return the leaves of the checkpoint that differ from a rerun to the saved step."""
    matrix = jax.random.normal(jax.random.key(1), (MATRIX, MATRIX)) / MATRIX**0.5
    state = make_state(abstract)
    while int(state.step) < saved_step:
        state, _ = step(state, matrix, matmuls)
    mesh = make_mesh(config.mesh)
    restored = restore_newest(folder, config, mesh, read_only=True, may_change=set(), report=print)
    assert restored is not None and restored.step == saved_step
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(restored.state), strict=True)
    return sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/bert_base_phase1.yaml")
    parser.add_argument("--matmuls", type=int, default=8)
    parser.add_argument("--folder", help="on the disk to be measured; default: a temporary folder")
    options, rest = parser.parse_known_args()
    config = load_config(PretrainConfig, ["--config", options.config, *rest])
    mesh = make_mesh(config.mesh)
    model = BertForPretraining(config.model, config.execution, config.has_nsp, mesh)
    abstract = abstract_state(config, model, make_optimizer(config.optimizer), mesh)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        figures, saved_step = measure(config, abstract, Path(name), options.matmuls)
        figures["different_leaves"] = different_leaves(config, abstract, Path(name), saved_step, options.matmuls)
    figures["above"] = [name for name, limit in LIMITS.items() if figures[name] > limit]
    print(json.dumps(figures, indent=1))
    return 3 if figures["above"] or figures["different_leaves"] else 0


if __name__ == "__main__":
    sys.exit(main())
