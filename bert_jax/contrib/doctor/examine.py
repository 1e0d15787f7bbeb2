"""Examination of a pretraining run from its workdir: data, log, probes and measures of its newest checkpoint."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from bert_jax.batch import Batch
from bert_jax.commands.pretrain import Reopened, corpus_lines, reopen
from bert_jax.contrib.doctor import network, probes
from bert_jax.contrib.doctor.audit import Rows, audit, held_out_rows, held_out_text, sample, unigram_loss
from bert_jax.contrib.doctor.findings import Finding, diagnosis, finding
from bert_jax.contrib.doctor.log_checks import check_log, check_options
from bert_jax.contrib.doctor.probes import MASKED, Subject, Total, chosen, in_float32, main_loss
from bert_jax.contrib.doctor.text_checks import READ, check_text
from bert_jax.model import from_canonical
from bert_jax.model.canonical import Params, abstract_params
from bert_jax.objectives.inputs import Inputs
from bert_jax.objectives.objective import Aux, PretrainObjective, Sums, total_loss
from bert_jax.objectives.registry import objective_class
from bert_jax.optim import make_optimizer
from bert_jax.tokenization import Tokenizer
from bert_jax.training.checkpoint.folder import checkpoint_folder
from bert_jax.training.checkpoint.parameters import Parameters, random_parameters, read_arrays, read_parameters
from bert_jax.training.logging.metrics_file import read_metrics
from bert_jax.training.state import flat
from bert_jax.training.step import loss_and_gradients
from bert_jax.training.workdir import read_record

# Rows that are probed.
PROBED = 16
# Logits of a token that are compared, at most.
_LOGITS = 64


class Examination(NamedTuple):
    """The step of the parameters that were examined, and the results, the most severe first."""

    step: int
    findings: list[Finding]


def examine(workdir: "str | os.PathLike[str]") -> list[Finding]:
    """Return the results of all checks that apply to the pretraining run in ``workdir``, the most severe first."""
    return examine_step(workdir).findings


def examine_step(workdir: "str | os.PathLike[str]", step: int | None = None) -> Examination:
    """Examine the pretraining run in ``workdir`` and its checkpoint of ``step`` (None: the newest; without a
    checkpoint, the randomly initialized parameters).

    Raises ``ValueError`` for a folder without a pretraining run, and if its shards or its checkpoint are missing.
    """
    folder = Path(workdir)
    run = reopen(folder)
    kind = objective_class(run.config.objective)
    name = main_loss(kind)
    train = sample(run.source.training_pass())
    held_out = held_out_rows(run.source, train)
    predicts_masks = name == MASKED
    data, tokenizer = run.config.data, run.tokenizer
    found = audit(data, tokenizer, train, predicts_masks=predicts_masks, documents=run.documents)
    if held_out is not train:
        found += held_out_text(data, tokenizer, train, held_out, run.records)
    found += check_text(corpus_lines(data, READ), data.encoding)
    found += check_options(run.config)
    lines = read_metrics(folder)
    at = max((line["step"] for line in lines), default=0)
    if not name:
        return Examination(at, diagnosis(found))
    unigram = unigram_loss(train, held_out, run.config.model.vocab_size, predicts_masks=predicts_masks)
    found += check_log(run.config, lines, name, unigram)
    if kind.inputs is Inputs and run.config.model.has_attention:
        at, more = _examine_network(folder, run, kind, name, held_out, unigram, step)
        found += more
    return Examination(at, diagnosis(found))


def first_rows(rows: Rows, count: int = PROBED) -> dict[str, np.ndarray]:
    """Return the first ``count`` rows; of packed rows, those with the most sequences."""
    order = np.argsort(-rows["sequence_ids"].max(axis=1), kind="stable")[:count]
    return {name: values[order] for name, values in rows.items()}


def _examine_network(
    folder: Path, run: Reopened, kind: type[PretrainObjective], name: str, held_out: Rows, unigram: float | None,
    step: int | None,
) -> tuple[int, list[Finding]]:  # fmt: skip
    config = in_float32(run.config)
    objective = kind(config, None)
    objective.row_shape = run.source.row_shape
    objective.prepare(run.source, run.tokenizer)
    stored = read_parameters(folder, run.config, objective.model, average=None, report=print, step=step)
    is_random = not config.training.first_step and read_record(folder) is None
    start = random_parameters(config, objective.model, run.tokenizer) if is_random or stored is None else None
    now = stored or start
    assert now is not None
    before = None if start is None else start.arrays
    rows = first_rows(held_out)
    found = check_network(objective, name, run.tokenizer, rows, now.arrays, before, unigram)
    if stored is not None:
        found += optimizer_state(folder, objective, stored)
        if stored.step > dict[str, Any](stored.meta)["phase_start"]:
            found.append(network.rounded_weights(stored.arrays))
    return now.step, found


def optimizer_state(folder: Path, objective: PretrainObjective, stored: Parameters) -> list[Finding]:
    """Compare the number of updates that the optimizer has counted with the steps of the phase, in the checkpoint
    of ``stored``. Returns [] for an optimizer that does not count."""
    config, meta = objective.config, dict[str, Any](stored.meta)
    optimizer = make_optimizer(config.optimizer, vocab_size=config.model.vocab_size)
    state = jax.eval_shape(optimizer.init, nn.unbox(abstract_params(objective.model)))
    names = [f"opt_state/{name}" for name in flat(state) if name.endswith("count")]
    arrays = checkpoint_folder(folder) / str(stored.step) / "state"
    counts = [int(values) for name in names for values in read_arrays(arrays, name).values()]
    steps = stored.step - meta["phase_start"] - meta["meter"]["skipped_steps"]
    return [finding(
        "optimizer state", f"the optimizer has counted {count:,} updates in {steps:,} steps", f"{steps:,} or more",
        "its moments started from 0 when the run was resumed; restore the optimizer with the parameters",
        fail=count < steps, number=float(count - steps),
    ) for count in counts[:1]]  # fmt: skip


def check_network(
    objective: PretrainObjective, name: str, tokenizer: Tokenizer, rows: dict[str, np.ndarray],
    now: Mapping[str, np.ndarray], start: Mapping[str, np.ndarray] | None, unigram: float | None,
) -> list[Finding]:  # fmt: skip
    """Return the results of the probes and of the measures of a network.

    Args:
        objective: the objective, on no mesh and in float32.
        name: the main loss, ``mlm_loss`` or ``lm_loss``.
        rows: features [B, ...].
        now: the parameters by canonical name.
        start: the initial parameters; None for a run that starts from another model.
        unigram: loss of the unigram distribution; None if it is unknown.
    """
    config = objective.config
    total, outputs = _programs(objective, name)
    params, first = _tree(objective, now), None if start is None else _tree(objective, start)
    subject = Subject(
        config, tokenizer, total, None if name == MASKED else outputs, params,
        probes.loud(params if first is None else first), rows, unigram, first,
    )  # fmt: skip
    found = probes.run_all(subject)
    found += _gradients(objective, params, chosen(objective, rows))
    which = next(iter(objective.networks), "")

    def of(arrays: Mapping[str, np.ndarray]) -> network.Network:
        return network.Network(*objective.network(config, objective.model, arrays, which), rows)

    found += network.states_and_attention(of(now))
    size = network.updates(config.optimizer, now if start is None else start, is_random=start is not None)
    masks = network.dropout_masks(of(now if start is None else start), config.execution.prng)
    return [*found, *(one for one in (size, masks) if one is not None)]


# ------------------------------------------------------------------ programs


def _tree(objective: PretrainObjective, arrays: Mapping[str, np.ndarray]) -> Params:
    """Return canonical ``arrays`` as the parameter tree of the model of ``objective``."""
    like: Params = nn.unbox(abstract_params(objective.model))
    return from_canonical(arrays, like, objective.config.model.vocab_size)


def _programs(
    objective: PretrainObjective, name: str
) -> tuple[Callable[[Params, Rows], Total], Callable[[Params, Rows], np.ndarray]]:
    """Return the functions ``total`` and ``outputs`` of a :class:`Subject` on one device."""

    @jax.jit
    def sums(params: Params, batch: Batch) -> Sums:
        return objective.sums(params, Aux(objective.fixed), batch, None, axis=None)[0]

    @jax.jit
    def logits(params: Params, batch: Rows) -> Any:
        return objective.model.apply({"params": params}, batch, None)[..., :_LOGITS]

    def total(params: Params, rows: Rows) -> Total:
        pair = jax.device_get(sums(params, chosen(objective, rows))[name])
        return Total(float(pair[0]), float(pair[1]))

    return total, lambda params, rows: np.asarray(logits(params, chosen(objective, rows)))


def _gradients(objective: PretrainObjective, params: Params, rows: Rows) -> list[Finding]:
    """Return the checks of the gradient of the total loss."""

    def loss(params: Params, rows: Any) -> jax.Array:
        sums, _ = objective.sums(params, Aux(objective.fixed), rows, None, axis=None)
        return total_loss(sums, objective.denominators(rows))

    grads = jax.jit(jax.grad(loss))(params, rows)
    found = [network.gradients(grads, objective.config.model.vocab_size)]
    wanted, size = objective.config.training.accumulation_steps, len(rows["input_ids"])
    count = max(number for number in range(1, min(wanted, size) + 1) if size % number == 0)
    if count > 1:

        @jax.jit
        def accumulated(params: Params, rows: Any) -> Params:
            return loss_and_gradients(objective, params, rows, None, count, aux=Aux(objective.fixed))[1]

        found.append(network.accumulation(grads, accumulated(params, rows)))
    return found
