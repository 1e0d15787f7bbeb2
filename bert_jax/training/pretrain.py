"""The pretraining job: batches from shards, evaluation on held-out data, and samples for the report."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax import registry
from bert_jax.batch import Batch, BatchShapes, DataBudgetError, PretrainSource, first_sequences
from bert_jax.config import PretrainConfig
from bert_jax.json_values import Json
from bert_jax.model.canonical import Params
from bert_jax.objectives.display import Sample
from bert_jax.objectives.inputs import Inputs
from bert_jax.objectives.objective import PretrainObjective, Sums
from bert_jax.parallel import host_rows, to_global, to_host
from bert_jax.process import hosts
from bert_jax.tokenization import Tokenizer
from bert_jax.training.job import Context, Data, Job
from bert_jax.training.logging.report import write_report
from bert_jax.training.logging.run_files import has_report
from bert_jax.training.memory import OutOfMemory, explain_memory
from bert_jax.training.programs import TrainPrograms, pretraining_batch, train_programs
from bert_jax.training.state import TrainState

# Processes whose rows the log states.
_SHOWN_PROCESSES = 8
# Largest number of groups of held-out batches whose sums the report keeps.
_GROUPS = 100


class PretrainJob(Job):
    """Job that trains an objective on the batches of ``source``. ``vocabulary`` is the path of the vocabulary file
    from which ``tokenizer`` was loaded; ``inputs`` are further inputs of the objective."""

    config: PretrainConfig

    def __init__(
        self,
        config: PretrainConfig,
        objective: type[PretrainObjective],
        tokenizer: Tokenizer,
        vocabulary: Path,
        source: PretrainSource,
        inputs: Inputs,
    ) -> None:
        super().__init__(config, tokenizer)
        self._make_objective, self._inputs = objective, inputs
        self._source, self._vocabulary = source, vocabulary
        self.max_blank_records = config.data.max_blank_records
        self._rows_of = source.row_shape.rows
        self._eval_batch_size = self._rows_of(config.training.eval_batch_size or config.training.global_batch_size)
        self._eval_step: Callable[[Params, Batch], Sums] | None = None
        # (sum, weight) of each held-out batch of the last evaluation, by name.
        self._batch_sums: dict[str, list[np.ndarray]] = {}

    def programs(self, mesh: Mesh) -> TrainPrograms:
        self._objective = self._make_objective(self.config, mesh)
        self._objective.row_shape = self._source.row_shape
        self._objective.prepare(self._source, self.tokenizer)
        self._inputs.give(self._objective)
        if self.config.training.doctor:
            make = registry.load("extensions", "training.doctor")
            self._doctor = make(self.config, self._objective, self.tokenizer, self._source)
        programs = train_programs(self._objective)  # raises if the mesh does not divide a batch
        self._eval_rows, self._eval_step = host_rows(mesh, self._eval_batch_size), None
        return programs

    def write_tokenizer(self, folder: Path) -> None:
        own = folder / self._vocabulary.name
        if self._vocabulary.resolve() != own.resolve():
            shutil.copyfile(self._vocabulary, own)
        self._inputs.write_record(folder)

    def data(self, mesh: Mesh, *, complete: bool) -> Data:
        size = self._rows_of(self.config.training.global_batch_size)
        rows = host_rows(mesh, size)
        batches = None if complete else self._source.train(rows)
        order: Json = [self.has_eval_data(), {} if batches is None else batches.state()]
        of_processes = [
            host_rows(mesh, size, process) for process in range(min(hosts.count(), _SHOWN_PROCESSES + 1))
        ]
        line = f"rows of a batch of {size:,}: {_ranges(of_processes)}" if hosts.count() > 1 else ""
        return Data(batches, len(rows) / size, self.config.data.prefetch, order, self._objective.features, line)

    def batch_shapes(self, mesh: Mesh, data_step: int) -> BatchShapes:
        training, size = self.config.training, self.config.training.global_batch_size
        for steps, ramp_size in zip(training.batch_ramp[::2], training.batch_ramp[1::2], strict=True):
            if data_step < steps:
                size = ramp_size
                break
            data_step -= steps
        return pretraining_batch(self._objective, self._rows_of(size))

    def flops_per_sequence(self) -> float:
        return self._objective.flops_per_sequence()

    def has_eval_data(self) -> bool:
        return self._held_out(1) is not None

    def _held_out(self, max_batches: int) -> Iterator[dict[str, np.ndarray]] | None:
        return self._source.held_out(self._eval_batch_size, self._eval_rows, max_batches)

    def evaluate(self, context: Context, state: TrainState, step: int) -> bool:
        training = self.config.training
        last = step == training.num_steps or context.log.ends_early
        held_out = self._held_out(0 if last else training.eval_batches)
        if held_out is None:
            return False
        now = training.eval_batch_size or training.global_batch_size
        with explain_memory("an evaluation step", f"lower training.eval_batch_size (now {now})"):
            params = context.programs.gather(state)
            totals = self._totals(context, params, held_out, step)
            values: dict[str, float | None] = {**self._objective.evaluation(totals)}
        with context.watchdog.phase("computing the baselines"):
            if hosts.is_lead() and (last or not context.log.last(self.eval_split)):
                values |= self._objective.baselines(self._source)
            context.barrier("counted")
        context.log.write(step, {"split": self.eval_split, **values})
        if training.doctor:
            self._doctor.look(context, params, self._held_out(1), self._eval_batch_size, step)
        return False

    def _totals(
        self, context: Context, params: Params, held_out: Iterator[dict[str, np.ndarray]], step: int
    ) -> dict[str, np.ndarray]:
        """Return the totals (sum, weight) over all held-out rows, as one float64[2] per metric name.

        If one process raises ``DataBudgetError``, all processes raise it.
        """
        programs, totals, in_flight = context.programs, dict[str, np.ndarray](), list[Sums]()
        self._batch_sums = {}
        if self._eval_step is None:
            self._eval_step = context.watchdog.first_call(programs.eval_step, "compiling the evaluation step")

        def drain(leave: int) -> None:
            while len(in_flight) > leave:
                for name, pair in jax.device_get(in_flight.pop(0)).items():
                    self._batch_sums.setdefault(name, []).append(np.asarray(pair, np.float64))
                    totals[name] = totals.get(name, np.zeros(2)) + self._batch_sums[name][-1]

        problem = ""
        try:
            for batch in held_out:
                context.before_batch(step)
                features = {name: batch[name] for name in self._objective.features}
                in_flight.append(self._eval_step(params, to_global(features, programs.mesh, self._eval_batch_size)))
                drain(2)
        except DataBudgetError as error:
            problem = str(error)
        drain(0)
        problems = [
            text for text in hosts.all_gather_text("evaluation", problem, context.launch.host_timeout) if text
        ]
        if problems:
            raise DataBudgetError(problems[0])
        return totals

    def finish(self, context: Context, state: TrainState) -> None:
        batch = next(self._held_out(1) or iter(()), None)
        lead, objective = hosts.is_lead(), self._objective
        samples: list[Sample] = []
        try:
            if batch is not None:
                with explain_memory("computing the samples", "the report contains no samples"):
                    # Called on every process, because the lead may store only a part of the parameters.
                    params = to_host(state.params if state.ema is None else state.ema)
                    first = first_sequences(batch, self.tokenizer.pad_id)
                    samples = objective.samples(params, self.tokenizer, first) if lead else []
        except OutOfMemory as shortage:
            context.log.line(str(shortage))
        if not lead:
            return
        final = context.log.last(self.eval_split)
        data = objective.report_data(final, samples)
        data["evaluation_groups"] = self._groups(final)
        write_report(context.folder, objective.display, data, name=context.launch.workdir.name)
        context.log.report()
        for line in objective.result_lines(final, samples):
            context.log.line(line)
        context.log.line(f"report: {context.launch.workdir}/report.html")

    def _groups(self, final: Mapping[str, float]) -> dict[str, list[tuple[float, float]]]:
        """Return (sum, weight) over groups of consecutive held-out batches for each mean in ``final``, the last
        evaluation; empty if this process did not compute it."""
        found = {}
        for name, sums in self._batch_sums.items():
            total, weight = np.sum(sums, axis=0)
            if weight and np.isclose(final.get(name) or np.nan, total / weight):
                starts = np.linspace(0, len(sums), min(_GROUPS, len(sums)), endpoint=False).astype(int)
                found[name] = [(float(a), float(b)) for a, b in np.add.reduceat(sums, starts)]
        return found

    def is_finished(self, folder: Path) -> bool:
        return has_report(folder)


def _ranges(rows_of: Sequence[Sequence[int]]) -> str:
    """Return in words which rows each process reads, such as ``process 0 reads 0-15, process 1 reads 16-31``."""
    said = []
    for process, rows in enumerate(rows_of[:_SHOWN_PROCESSES]):
        own = {*rows}
        starts = [row for row in rows if row - 1 not in own]
        stops = [row for row in rows if row + 1 not in own]
        parts = " and ".join(f"{first}-{last}" for first, last in zip(starts, stops, strict=True))
        said.append(f"process {process} reads {parts}")
    return ", ".join([*said, *(["..."] if len(rows_of) > _SHOWN_PROCESSES else [])])
