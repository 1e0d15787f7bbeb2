"""The checks of ``training.doctor``, at every evaluation of a run, within a share of its time."""

import time
from collections.abc import Callable, Iterator
from itertools import islice

import jax
import numpy as np

from bert_jax.batch import PretrainSource
from bert_jax.config import PretrainConfig
from bert_jax.contrib.doctor import findings
from bert_jax.contrib.doctor.audit import Rows, audit, held_out_rows, sample, unigram_loss
from bert_jax.contrib.doctor.findings import Finding
from bert_jax.contrib.doctor.log_checks import check_log, check_options
from bert_jax.contrib.doctor.probes import MASKED, PROBES, Subject, Total, chosen, main_loss
from bert_jax.model.canonical import Params
from bert_jax.objectives.objective import PretrainObjective
from bert_jax.parallel import to_global
from bert_jax.process import hosts
from bert_jax.tokenization import Tokenizer
from bert_jax.training.job import Context
from bert_jax.training.logging.metrics_file import read_metrics

# Share of the time of the run that the checks may take, and rows of the audit and of the unigram distribution.
SHARE, AUDITED = 0.01, 1024


class Doctor:
    """Checks of one run. Each evaluation runs the checks whose turn it is until their share of the time is used.
    The program of the evaluation computes the losses, so that nothing is compiled."""

    def __init__(
        self, config: PretrainConfig, objective: PretrainObjective, tokenizer: Tokenizer, source: PretrainSource
    ) -> None:
        """Raises ``ValueError`` with several processes."""
        if hosts.count() > 1:
            raise ValueError(
                "training.doctor: true is not allowed with several processes; set false, and run bert-jax doctor "
                "with the workdir on one machine"
            )
        self._config, self._objective, self._tokenizer, self._source = config, objective, tokenizer, source
        self._name = main_loss(type(objective))
        self._began, self._spent = time.perf_counter(), 0.0
        self._unigram: float | None = None
        self._found: dict[str, Finding] = {}
        probes = PROBES if self._name == MASKED and config.model.has_attention else ()
        # Waiting checks, the next one first. Data and options do not change, so their checks run once.
        self._once: list[Callable[[Subject], list[Finding]]] = [self._audit, lambda subject: check_options(config)]
        self._turns: list[Callable[[Subject], list[Finding]]] = [
            *self._once,
            *(self._turn_of(probe) for probe in probes),
        ]
        # Seconds of the last check of each kind, and of the log.
        self._took: dict[Callable[[Subject], list[Finding]], float] = {}
        self._log_took = 0.0

    def look(
        self, context: Context, params: Params, held_out: Iterator[dict[str, np.ndarray]] | None, size: int,
        step: int,
    ) -> None:  # fmt: skip
        """Check the run at ``step``: write doctor.json, and a line of the log for each new LOOK or FAIL.

        ``held_out`` yields the first held-out batch, of ``size`` rows; None without held-out data.
        """
        batch = next(held_out or iter(()), None)
        if batch is None or not self._name:
            return
        programs, name = context.programs, self._name

        def total(params: Params, rows: Rows) -> Total:
            features = to_global(chosen(self._objective, rows), programs.mesh, size)
            pair = jax.device_get(programs.eval_step(params, features)[name])
            return Total(float(pair[0]), float(pair[1]))

        subject = Subject(self._config, self._tokenizer, total, None, params, params, batch, self._unigram)
        before = dict(self._found)
        for turn in [*self._turns]:
            began = time.perf_counter()
            expected = self._took.get(turn, max(self._took.values(), default=0.0))
            if self._spent + expected + self._log_took > SHARE * (began - self._began):
                break
            self._add(turn(subject))
            self._turns.remove(turn)
            took = time.perf_counter() - began
            self._spent += took
            if turn not in self._once:
                self._turns.append(turn)
                self._took[turn] = took
        began = time.perf_counter()
        self._add(check_log(self._config, read_metrics(context.folder), name, self._unigram))
        found = findings.diagnosis(self._found.values())
        findings.write(context.folder, step, found)
        for one in found:
            if one.status != "OK" and (one.check not in before or before[one.check].status != one.status):
                context.log.line(f"doctor: {one}")
        self._log_took = time.perf_counter() - began
        self._spent += self._log_took

    def _add(self, found: list[Finding]) -> None:
        self._found |= {one.check: one for one in found}

    def _audit(self, subject: Subject) -> list[Finding]:
        train = sample(islice(self._source.training_pass(), 1 + AUDITED // 512), AUDITED)
        held_out = held_out_rows(self._source, train, AUDITED)
        predicts_masks = self._name == MASKED
        self._unigram = unigram_loss(train, held_out, self._config.model.vocab_size, predicts_masks=predicts_masks)
        return audit(self._config.data, self._tokenizer, train, predicts_masks=predicts_masks)

    @staticmethod
    def _turn_of(probe: Callable[[Subject], Finding | None]) -> Callable[[Subject], list[Finding]]:
        def turn(subject: Subject) -> list[Finding]:
            found = probe(subject)
            return [] if found is None else [found]

        return turn
