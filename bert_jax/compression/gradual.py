"""Gradual pruning: rounds of fine-tuning and removal of attention heads and feed-forward units.

WORKDIR/rounds/K is the workdir of the training of round K, from 1, and WORKDIR/rounds/K/pruned the smaller model,
with which the next round starts; the last training is that of WORKDIR itself. A round whose smaller model exists is
not repeated, so the same command continues a killed one.
"""

import gc
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from bert_jax.compression.parts import kept, whole_masks
from bert_jax.compression.prune import Importance, Pruning, check_prunable, prune_model
from bert_jax.config import ModelConfig
from bert_jax.interop.exchange import ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.process import exits
from bert_jax.process.signals import StopRequest
from bert_jax.records import Record

ROUNDS, SMALLER = "rounds", "pruned"


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Number of rounds, and the shares that remain after the last one."""

    # Shares of the heads and of the units that are kept.
    heads: float
    units: float
    # Number of rounds.
    count: int
    importance: Importance
    # Training records, for the importance gradient.
    records: Sequence[Record]
    seed: int

    def check(self, model: ModelConfig, name: str) -> None:
        """Raise ``ValueError`` if ``model``, the architecture of the model ``name``, cannot be pruned so."""
        for part, scores in zip(("heads", "units"), whole_masks(model), strict=True):
            kept(scores, getattr(self, part), even=False, option=f"--prune_{part}")
        check_prunable(model, Pruning(heads=self.heads, units=self.units, importance="magnitude"), name)


def share_after(share: float, number: int, count: int) -> float:
    """Return the share that is left after round ``number``, from 1, of ``count`` rounds, the last of which leaves
    ``share``: most are removed in the first rounds (Zhu and Gupta 2017, arXiv:1710.01878, equation 1)."""
    return share + (1 - share) * (1 - number / count) ** 3


def train_in_rounds(
    rounds: Rounds,
    workdir: Path,
    source: str,
    train: Callable[[Path, str], None],
    *,
    stop: StopRequest,
    report: Callable[[str], None] = print,
) -> None:
    """Train and prune in rounds, then train once more in ``workdir``.

    ``train`` trains in a workdir from a model; ``source`` is the first model. ``report`` is called with each line
    of the log.

    Raises ``ValueError`` if a model cannot be pruned so, and ``exits.Stop`` after a signal.
    """
    for number in range(1, rounds.count + 1):
        folder = workdir / ROUNDS / str(number)
        smaller = folder / SMALLER
        if not smaller.exists():
            report(f"--- round {number} of {rounds.count}: {folder}")
            train(folder, source)
            _stop_between(stop)
            pruning = _pruning(rounds, number, workdir / ROUNDS, source)
            prune_model(folder, smaller, pruning, ReadOptions(), report=report)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            jax.clear_caches()
            gc.collect()
        source = str(smaller)
    _stop_between(stop)
    report(f"--- last training, of the pruned model: {workdir}")
    train(workdir, source)


def _pruning(rounds: Rounds, number: int, folder: Path, source: str) -> Pruning:
    """Return what the removal of a round keeps, as shares of the model that was trained in the round; ``folder`` is
    that of all rounds, and ``source`` the model with which the training started."""
    whole, model = (read_weights(folder / str(n), ReadOptions()).spec.model for n in (1, number))
    counts = {
        "heads": (sum(whole.heads_by_layer), sum(model.heads_by_layer)),
        "units": (sum(whole.units_by_layer), sum(model.units_by_layer)),
    }
    shares = {
        name: round(share_after(getattr(rounds, name), number, rounds.count) * before) / now
        for name, (before, now) in counts.items()
    }
    importance = rounds.importance
    return Pruning(
        **shares,
        importance=importance,
        examples=rounds.records if importance == "gradient" else (),
        start=source if importance == "movement" else "",
        seed=rounds.seed,
    )


def _stop_between(stop: StopRequest) -> None:
    if stop.reached():
        raise exits.Stop(stop.exit_code, f"stopped, {stop.reason()}: run the same command to continue")
