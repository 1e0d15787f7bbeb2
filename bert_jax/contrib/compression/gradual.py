"""Gradual pruning alternates fine-tuning with the removal of attention heads and feed-forward units.

WORKDIR/rounds/K is the workdir of the training of round K, from 1, and WORKDIR/rounds/K/pruned the smaller model,
with which the next round starts; the last training happens in WORKDIR itself. A round whose smaller model exists is
not repeated, so the same command continues a killed one.
"""

import dataclasses
import gc
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from bert_jax.commands.finetune import configure, train, training_records
from bert_jax.config import ModelConfig
from bert_jax.config.loader import Settings
from bert_jax.contrib.compression.heads_and_units import kept, whole_masks
from bert_jax.contrib.compression.prune import Importance, Pruning, check_prunable, prune_model
from bert_jax.contrib.compression.run_options import UNPRUNED, PruningOptions
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.io.files import write_whole
from bert_jax.process import exits, hosts
from bert_jax.process.signals import StopRequest
from bert_jax.records import Record
from bert_jax.start.fixed_options import whole_name

ROUNDS, SMALLER, RECORD = "rounds", "pruned", "rounds.json"


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

    def counts(self, model: ModelConfig) -> list[tuple[int, int]]:
        """Return how many heads and units ``model`` has left after each round that removes any."""
        before = sum(model.heads_by_layer), sum(model.units_by_layer)
        found = [before]
        for number in range(1, self.count + 1):
            shares = (share_after(share, number, self.count) for share in (self.heads, self.units))
            after = tuple(round(share * whole) for share, whole in zip(shares, before, strict=True))
            if after != found[-1]:
                found.append((after[0], after[1]))
        return found[1:]


def share_after(share: float, number: int, count: int) -> float:
    """Return the share that remains after round ``number``, from 1, of ``count`` rounds. ``share`` remains after
    the last round; most parts are removed in the first rounds (Zhu and Gupta 2017, arXiv:1710.01878, equation
    1)."""
    return share + (1 - share) * (1 - number / count) ** 3


def prune(options: PruningOptions, settings: Settings, stop: StopRequest) -> None:
    """Fine-tune as ``options`` and ``settings``, those of the config, state, with removals in rounds.

    Raises ``ValueError`` for options that pruning in rounds does not allow.
    """
    _check(options)
    workdir = Path(options.folder("finetune"))
    config, _ = configure(dataclasses.replace(options, workdir=str(workdir / ROUNDS / "1")), settings)
    needs_loss = options.prune_importance == "gradient"
    if needs_loss and config.task.kind in ("sentence", "joint"):
        raise ValueError(
            f"--prune_importance: gradient is not allowed with task.kind {config.task.kind}, whose loss does "
            "not come from a single head; use --prune_importance magnitude or movement"
        )
    records = training_records(config)
    if needs_loss and not records:
        raise ValueError(
            "--prune_importance: gradient is not allowed without data.train, whose labels it reads; use magnitude, "
            "movement or random"
        )
    rounds = Rounds(
        heads=options.prune_heads,
        units=options.prune_units,
        count=options.prune_rounds,
        importance=options.prune_importance,
        records=records,
        seed=config.training.seed,
    )

    def one(folder: Path, source: str) -> None:
        own = dataclasses.replace(options, workdir=str(folder), init_from=source, **UNPRUNED)
        if source != options.init_from:
            without: Any = {one.name: one.default for one in dataclasses.fields(own) if one.name in own.changes}
            own = dataclasses.replace(own, **without)
        train(own, settings, stop, time.perf_counter())

    train_in_rounds(rounds, config.model, workdir, options.init_from, one, stop=stop)


def _check(options: PruningOptions) -> None:
    """Raise ``ValueError`` for options with which pruning in rounds cannot start."""
    if hosts.count() > 1:
        raise ValueError("--prune_heads, --prune_units: not allowed with several processes; start one")
    if not options.init_from:
        raise ValueError("--init_from: missing; --prune_heads and --prune_units require the model to prune")
    if options.prune_importance == "movement" and {"init_layers", "to_long"} & {*options.changes}:
        changed = "which change the model before its training; use another importance"
        raise ValueError(f"--prune_importance: movement is not allowed with --init_layers and --to_long, {changed}")


def train_in_rounds(
    rounds: Rounds,
    model: ModelConfig,
    workdir: Path,
    source: str,
    train: Callable[[Path, str], None],
    *,
    stop: StopRequest,
    report: Callable[[str], None] = print,
) -> None:
    """Train and prune in rounds, then train once more in ``workdir``.

    ``train`` trains in a workdir from a model; ``source`` is the first model, and ``model`` the architecture of its
    training. A round that would remove nothing is skipped. ``report`` is called with each line of the log.

    Raises ``ValueError`` if a model cannot be pruned so, or if ``workdir`` has rounds with other options, and
    ``exits.Stop`` after a signal.
    """
    rounds.check(model, source)
    _same_rounds(workdir / ROUNDS / RECORD, rounds, source)
    counts = rounds.counts(model)
    for number, after in enumerate(counts, start=1):
        folder = workdir / ROUNDS / str(number)
        smaller = folder / SMALLER
        if not smaller.exists():
            report(f"--- round {number} of {len(counts)}: {folder}")
            train(folder, source)
            _stop_between(stop)
            pruning = _pruning(rounds, after, folder, source)
            prune_model(folder, smaller, pruning, ReadOptions(), report=report)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            jax.clear_caches()
            gc.collect()
        source = str(smaller)
    _stop_between(stop)
    report(f"--- last training, of the pruned model: {workdir}")
    train(workdir, source)


def _same_rounds(path: Path, rounds: Rounds, source: str) -> None:
    """Write the options of the rounds to ``path``. Raises ``ValueError`` if the file contains others, and a round
    has begun with them."""
    now = {
        "--prune_heads": rounds.heads, "--prune_units": rounds.units, "--prune_rounds": rounds.count,
        "--prune_importance": rounds.importance, "training.seed": rounds.seed, "--init_from": whole_name(source),
    }  # fmt: skip
    if not path.is_file() or not (path.parent / "1").exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(now, indent=1))
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    other = [f"{name}: {before[name]} -> {value}" for name, value in now.items() if before[name] != value]
    if other:
        raise ValueError(
            f"{path}: the rounds began with other options (saved -> now): {'; '.join(other)}; use the saved ones, "
            "or another --workdir"
        )


def _pruning(rounds: Rounds, after: tuple[int, int], folder: Path, source: str) -> Pruning:
    """Return the pruning of a round, which keeps ``after`` heads and units of the model that was trained in
    ``folder`` from ``source``."""
    model = read_weights(folder, ReadOptions()).spec.model
    heads, units = after
    importance = rounds.importance
    return Pruning(
        heads=heads / sum(model.heads_by_layer),
        units=units / sum(model.units_by_layer),
        importance=importance,
        examples=rounds.records if importance == "gradient" else (),
        start=source if importance == "movement" else "",
        seed=rounds.seed,
    )


def _stop_between(stop: StopRequest) -> None:
    if stop.reached():
        raise exits.Stop(stop.exit_code, f"stopped, {stop.reason()}: run the same command to continue")
