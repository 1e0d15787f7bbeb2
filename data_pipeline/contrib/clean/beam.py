"""``bert-data clean`` under Apache Beam: one pipeline runs the jobs of the process pool, stage after stage.

The steps exchange only names and counts; all data is in files (``data_pipeline.contrib.clean.workspace``), as for
``data_pipeline.contrib.beam.pipeline``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from bert_jax.json_values import Json
from data_pipeline.contrib.beam.pipeline import Jobs, check_options, expect, run_pipeline
from data_pipeline.contrib.clean.job_table import STAGES
from data_pipeline.contrib.clean.scanning import cut_source, find_exact, scan_chunk
from data_pipeline.contrib.clean.workspace import Plan, chunk_name, load_plan

_SHARE_BYTES = 4 << 20  # a job scans at least this much of a larger source
_MOST_SHARES = 8  # largest number of jobs that scan one source, each of which reads all of it


def clean_with_beam(plan: Plan, options: Sequence[str]) -> None:
    """Run all jobs of ``plan``. ``options`` are arguments for Beam.

    An exception of a job is re-raised. Raises ``ValueError`` (one line) if the pipeline fails for another reason.
    """
    jobs = _Jobs(plan.folder)
    for failure in plan.folder.glob("failure-*"):
        failure.unlink()
    chosen = check_options(plan.options.data.workers, options)
    run_pipeline(jobs, options, chosen, partial(_add_steps, jobs=jobs))


def _add_steps(beam: ModuleType, pipeline: Any, *, jobs: "_Jobs") -> None:
    """Add the steps to ``pipeline``: ``Reshuffle`` distributes jobs, ``ToList`` waits for all of them."""

    def step(name: str, *bound: Any) -> Callable[[Json], Json]:
        return partial(_run, jobs, name, bound)

    done = (
        pipeline
        | "sources" >> beam.Create(jobs.shares)
        | "spread sources" >> beam.Reshuffle()
        | "scan" >> beam.Map(step("scan"))
        | "all chunks" >> beam.combiners.ToList()
        | "exact" >> beam.Map(step("find_exact"))
    )
    for number, stage in enumerate(STAGES):
        done = (
            done
            | f"list {stage.name}" >> beam.FlatMap(step("list_items", number))
            | f"spread {stage.name}" >> beam.Reshuffle()
            | stage.name >> beam.Map(step("run_item", number))
            | f"all {stage.name}" >> beam.combiners.ToList()
            | f"check {stage.name}" >> beam.Map(step("check", number))
        )


def _run(jobs: "_Jobs", name: str, bound: tuple[Any, ...], value: Any) -> Any:
    return jobs.run(name, (*bound, value))


class _Jobs(Jobs):
    """The steps of a run; a stage is denoted by its index in ``STAGES``."""

    @property
    def _plan(self) -> Plan:
        return load_plan(self.folder)

    @property
    def shares(self) -> list[tuple[int, int, int]]:
        """Shares of the text, one per job: (source, k, n) denotes the chunks k, k + n, k + 2n, ... of a source."""
        sizes = (source.path.stat().st_size for source in self._plan.sources)
        counts = [min(max(1, size // _SHARE_BYTES), _MOST_SHARES) for size in sizes]
        return [(source, k, n) for source, n in enumerate(counts) for k in range(n)]

    def scan(self, values: tuple[tuple[int, int, int]]) -> tuple[int, int]:
        """Scan a share; return its source and the number of chunks of this source."""
        (source, first, step), pieces = values[0], 0
        for name, start, documents in cut_source(self._plan, source):
            if pieces % step == first:
                scan_chunk(self.folder, name, start, documents)
            pieces += 1
        return source, pieces

    def find_exact(self, values: tuple[list[tuple[int, int]]]) -> int:
        """Find the exact duplicates of all chunks."""
        (done,) = values
        expect(len(self.shares), len(done))
        names = [chunk_name(source, piece) for source, pieces in dict(done).items() for piece in range(pieces)]
        find_exact(self.folder, names)
        return 0

    def list_items(self, values: tuple[int, int]) -> list[Any]:
        """Return the items of a stage."""
        return list(STAGES[values[0]].items(self.folder))

    def run_item(self, values: tuple[int, Any]) -> int:
        """Run the job of a stage on one item."""
        stage, item = values
        STAGES[stage].job(self.folder, item)
        return 1

    def check(self, values: tuple[int, list[int]]) -> int:
        """Check that all jobs of a stage have run."""
        stage, done = values
        expect(len(STAGES[stage].items(self.folder)), len(done))
        return 0
