"""Savings by packed rows in fine-tuning: padding and real tokens per second; and a check that predictions agree.

    python studies/finetuning/finetune_padding.py [--steps 40] [--rounds 3] -- \\
        --config configs/finetune/sst2.yaml --init_from MODEL --data.dir glue/SST-2 --data.train_limit 20000

The arguments after ``--`` are options of run_finetune.py. The same batches are made in three ways: packed into the
planned shapes, rows of task.max_length (``--input.packing false``), and rows as long as the batch's longest
example, to the next multiple of 8 (dynamic padding). They take turns, a round of steps each; compilation is not
counted, but the number of shapes is printed. Padding is over a whole epoch. Then the dev split is predicted packed
and in rows of task.max_length: the largest difference of a logit.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np
from finetune_runs import prepare

from bert_jax.finetuning.evaluation import Predictor
from bert_jax.finetuning.finetune import FinetuneJob
from bert_jax.inference.batching import Shape
from bert_jax.parallel import make_mesh, to_global
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from bert_jax.training.programs import TrainPrograms
from bert_jax.training.state import TrainState, initial_state


class Way:
    """One way to make rows of the batches of a run."""

    def __init__(self, name: str, job: FinetuneJob, given: dict[str, np.ndarray], shapes: Sequence[Shape]) -> None:
        config = job.config
        self.name, self.mesh = name, make_mesh(config.mesh, jax.devices()[:1])
        if shapes:
            job.shapes = list(shapes)
        self.programs: TrainPrograms = job.programs(self.mesh)
        self.batches = job.batches(self.mesh)
        self.steps_per_epoch = job.resolved.steps_per_epoch
        self.state: TrainState = initial_state(
            self.programs.model, self.programs.optimizer, self.programs.abstract, config.training.seed, dict(given)
        )
        self.seconds, self.tokens = 0.0, 0

    def padding(self) -> tuple[float, int]:
        """Return the share of padding among the tokens of an epoch, and the number of different shapes."""
        real, computed, shapes = 0, 0, set()
        for step in range(self.steps_per_epoch):
            rows = self.batches.pack(step)[0]["sequence_ids"]
            real, computed = real + int((rows > 0).sum()), computed + rows.size
            shapes.add(rows.shape)
        return 1 - real / computed, len(shapes)

    def run(self, first: int, steps: int) -> None:
        """Run timed steps, after the compilation of their programs."""
        packed = [self.batches.pack(step)[0] for step in range(first, first + steps)]
        batches = [to_global(one, self.mesh, len(one["input_ids"])) for one in packed]
        programs = [self.programs.step_for(batch) for batch in batches]
        self.state, _ = programs[0](self.state, batches[0])
        jax.block_until_ready(self.state)
        began = time.perf_counter()
        for program, batch in zip(programs, batches, strict=True):
            self.state, _ = program(self.state, batch)
        jax.block_until_ready(self.state)
        self.seconds += time.perf_counter() - began
        self.tokens += sum(int((one["sequence_ids"] > 0).sum()) for one in packed)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("arguments", nargs="+", metavar="-- OPTIONS", help="options of run_finetune.py")
    options = parser.parse_args()
    keep_to_cpu_without_accelerator()
    packed, dynamic = (prepare(options.arguments, compared=False) for _ in range(2))
    fixed = prepare([*options.arguments, "--input.packing", "false"], compared=False)
    config = packed.config
    size, limit = config.training.global_batch_size, config.task.max_length
    start = packed.job.start().params
    ways = [
        Way("packed", packed.job, start, []),
        Way(f"rows of {limit}", fixed.job, start, []),
        Way("dynamic padding", dynamic.job, start, [Shape(size, length, 1) for length in range(8, limit + 8, 8)]),
    ]
    for turn in range(options.rounds):
        for way in ways:
            way.run(turn * options.steps, options.steps)
    print("| rows | padding | shapes | real tokens per second | speedup by packing |\n|---|---|---|---|---|")
    for way in ways:
        share, shapes = way.padding()
        print(f"| {way.name} | {share:.1%} | {shapes} | {way.rate:,.0f} | {ways[0].rate / way.rate:.2f} |")
    params, units = ways[0].state.params, packed.units("dev")
    outputs = []
    for run in (packed, fixed):
        model = run.job.model.clone(heads=run.job.heads, mesh=ways[0].mesh)
        outputs.append(Predictor(run.task, model, ways[0].mesh).outputs(params, units))
    names = [name for name, array in outputs[0][0].items() if np.issubdtype(array.dtype, np.floating)]
    worst = max(
        float(np.abs(a[name] - b[name]).max()) for a, b in zip(*outputs, strict=True) for name in names
    )  # fmt: skip
    print(f"\ndev, packed against rows of {limit}: {len(units):,} inputs, largest difference {worst:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
