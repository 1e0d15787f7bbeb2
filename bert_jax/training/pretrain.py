"""Pretraining as a job of ``bert_jax.training.run``: shards, held-out loss, filled masks."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from bert_jax.batch import PretrainSource
from bert_jax.config import PretrainConfig
from bert_jax.io.storage import Location
from bert_jax.model.flops import training_flops_per_sequence
from bert_jax.objectives.filled_masks import FilledText, fill_some
from bert_jax.parallel import host_rows, to_host
from bert_jax.process import hosts
from bert_jax.process.watchdog import PHASE_FACTOR
from bert_jax.tokenization import Tokenizer
from bert_jax.training.evaluate import evaluate_held_out
from bert_jax.training.finish import finish
from bert_jax.training.job import Context, Data, Job
from bert_jax.training.programs import OutOfMemory, TrainPrograms, explain_memory, pretraining_batch, train_programs
from bert_jax.training.run import train
from bert_jax.training.state import TrainState
from bert_jax.training.step import make_eval_step


def pretrain(
    config: PretrainConfig,
    *,
    workdir: Location,
    source: PretrainSource,
    tokenizer: Tokenizer,
    vocabulary: Path,
    **inputs: Any,
) -> None:
    """Pretrain as ``config`` says in ``workdir``, continuing what is there; see ``run.run`` for ``inputs``.

    ``vocabulary`` is the file of ``tokenizer``. Raises ``ValueError`` for what the user can mend and ``exits.Stop``
    when the run ends early.
    """
    train(PretrainJob(config, tokenizer, vocabulary, source), workdir=workdir, **inputs)


class PretrainJob(Job):
    """Masked language model and sentence pairs on the batches of ``source``."""

    config: PretrainConfig

    def __init__(
        self, config: PretrainConfig, tokenizer: Tokenizer, vocabulary: Path, source: PretrainSource
    ) -> None:
        super().__init__(config, tokenizer)
        self._source, self._vocabulary = source, vocabulary
        self.max_blank_records = config.data.max_blank_records
        self._eval_batch_size = config.training.eval_batch_size or config.training.global_batch_size
        self._eval_step: Any = None
        self._eval_rows: list[int] = []

    def programs(self, mesh: Mesh) -> TrainPrograms:
        programs = train_programs(self.config, mesh)
        self._eval_rows, self._eval_step = host_rows(mesh, self._eval_batch_size), None
        return programs

    def write_tokenizer(self, folder: Path) -> None:
        own = folder / self._vocabulary.name
        if self._vocabulary.resolve() != own.resolve():
            shutil.copyfile(self._vocabulary, own)

    def data(self, mesh: Mesh, *, complete: bool) -> Data:
        size = self.config.training.global_batch_size
        rows = host_rows(mesh, size)
        batches = None if complete else self._source.train(rows)
        order = [self.evaluates(), {} if batches is None else batches.state()]
        return Data(batches, len(rows) / size, self.config.data.prefetch, order)

    def batch_shapes(self, mesh: Mesh, data_step: int) -> Mapping[str, Any]:
        training, size = self.config.training, self.config.training.global_batch_size
        for steps, ramp_size in zip(training.batch_ramp[::2], training.batch_ramp[1::2], strict=True):
            if data_step < steps:
                size = ramp_size
                break
            data_step -= steps
        return pretraining_batch(self.config, mesh, size)

    def flops_per_sequence(self) -> float:
        data = self.config.data
        return training_flops_per_sequence(
            self.config.model,
            seq_length=data.seq_length,
            max_predictions=data.max_predictions,
            has_nsp=self.config.has_nsp,
        )

    def evaluates(self) -> bool:
        return self._source.held_out(self._eval_batch_size, self._eval_rows, 1) is not None

    def evaluate(self, context: Context, state: TrainState, step: int) -> bool:
        training, watchdog, programs = self.config.training, context.watchdog, context.programs
        last = step == training.num_steps
        held_out = self._source.held_out(
            self._eval_batch_size, self._eval_rows, 0 if last else training.eval_batches
        )
        if held_out is None:
            return False
        if self._eval_step is None:
            compiled = jax.jit(make_eval_step(programs.model))
            self._eval_step = watchdog.first_call(compiled, "compiling the evaluation step")
        advice = f"lower training.eval_batch_size (now {self._eval_batch_size})"
        with explain_memory("an evaluation step", advice):
            params = programs.gather(state.params if state.ema is None else state.ema)
            values = evaluate_held_out(
                held_out, self._eval_step, params, programs.mesh, self._eval_batch_size,
                lambda: context.before_batch(step), context.host_timeout,
            )  # fmt: skip
        if last:
            with watchdog.phase("counting the unigram distribution"):
                if hosts.is_lead():
                    values["unigram_cross_entropy"] = self._source.unigram_cross_entropy()
                hosts.barrier("counted", PHASE_FACTOR * context.host_timeout)
        context.write(step, {"split": self.eval_split, **values})
        return False

    def is_over(self, step: int) -> bool:
        return False

    def finish(self, context: Context, state: TrainState) -> None:
        batch = next(self._source.held_out(self._eval_batch_size, self._eval_rows, 1) or iter(()), None)
        lead = hosts.is_lead()
        filled: list[FilledText] = []
        try:
            if batch is not None:
                with explain_memory("filling masks", "the report goes without them"):
                    # Every process: the lead may hold only a part of the parameters.
                    params = to_host(state.params if state.ema is None else state.ema)
                    filled = fill_some(self.config, params, self.tokenizer, batch) if lead else []
        except OutOfMemory as shortage:
            context.progress.line(str(shortage))
        for line in finish(context.folder, filled, context.workdir) if lead else []:
            context.progress.line(line)

    def is_finished(self, folder: Path) -> bool:
        return (folder / "report.html").exists()
