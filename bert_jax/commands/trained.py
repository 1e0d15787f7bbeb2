"""The results of runs that a program has started: ``PretrainRun`` and ``FinetuneRun``."""

import functools
import html
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_jax import registry
from bert_jax.config import PretrainConfig, RunConfig, load_config
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.options import extended
from bert_jax.finetuning.artifacts import read_results
from bert_jax.training.logging.metrics_file import read_metrics
from bert_jax.training.logging.run_files import HTML_FILE

if TYPE_CHECKING:
    from bert_jax.inference.loaded import LoadedModel

# A line of metrics.jsonl: step, split (of an evaluation) and metrics by name.
Row = dict[str, Any]


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class TrainedRun:
    """A run and its results, as far as it got."""

    # Folder of the run.
    workdir: Path
    # The resolved options.
    config: RunConfig
    # Metrics of the last evaluation by name; None: undefined. Empty without held-out records.
    metrics: dict[str, float | None]
    # The lines of metrics.jsonl.
    history: list[Row]
    # Lines of the best and of the last evaluation; empty without one.
    best: Row
    last: Row

    @functools.cached_property
    def model(self) -> "LoadedModel":
        """The trained model, loaded at the first access: the one that an export of the workdir contains. After
        pretraining, these are the parameters of the last checkpoint, or their moving average if the run has one;
        after fine-tuning, the parameters of the best evaluation or, with ``training.restore_best`` false, the last
        ones. Raises ``ValueError`` if a stopped run has not saved them yet."""
        from bert_jax.inference.loaded import load

        return load(self.workdir)

    @property
    def report(self) -> Path:
        """The file report.html, which is written at the start and again at every evaluation."""
        return self.workdir / HTML_FILE

    def __repr__(self) -> str:
        """Return two or three lines: folder and steps, the last evaluation, the report."""
        total, step = self.config.training.num_steps, max((row["step"] for row in self.history), default=0)
        lines = [f"{type(self).__name__}({str(self.workdir)!r}): step {step:,} of {total:,}"]
        if self.metrics:
            values = (f"{name} {value:.4g}" for name, value in self.metrics.items() if isinstance(value, float))
            lines.append(f"  {', '.join([*values][:6])}")
        lines += [f"  report: {self.report}"] if self.report.is_file() else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        if not self.report.is_file():
            return f"<pre>{html.escape(repr(self))}</pre>"
        page = html.escape(self.report.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 640px; border: 0"></iframe>'


class PretrainRun(TrainedRun):
    """A pretraining run. ``best`` is the evaluation with the lowest loss."""

    config: PretrainConfig

    @classmethod
    def of(cls, workdir: str | PathLike[str]) -> "PretrainRun":
        """Return the run in ``workdir``."""
        workdir = Path(workdir)
        rows = read_metrics(workdir)
        evaluations = [row for row in rows if row.get("split") == "eval"]
        scored = [row for row in evaluations if row.get("loss") is not None]
        last: Row = evaluations[-1] if evaluations else {}
        return cls(
            workdir=workdir,
            config=load_config(PretrainConfig, ["--config", str(workdir / "config.yaml")]),
            metrics=_values(last),
            history=rows,
            best=min(scored, key=lambda row: float(row["loss"]), default={}),
            last=last,
        )

    def doctor(self) -> list[Any]:
        """Check data, log and network, and return the results, the most severe first (``bert-jax doctor``). Each
        has ``check``, ``status`` (OK, LOOK or FAIL), ``value``, ``allowed``, ``advice`` and ``number``; ``str`` of
        a result is its line. See ``bert_jax.contrib.doctor``."""
        findings: list[Any] = registry.load("extensions", "PretrainRun.doctor")(self.workdir)
        return findings


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class FinetuneRun(TrainedRun):
    """A fine-tuning run. ``metrics`` are those of :attr:`model` on the dev records (without these, on the test
    records), and ``best`` is the evaluation that selected the parameters of the model."""

    config: FinetuneConfig
    # Metrics of the model by split and name: dev and test.
    results: dict[str, dict[str, float | None]]

    @classmethod
    def of(cls, workdir: str | PathLike[str]) -> "FinetuneRun":
        """Return the run in ``workdir``."""
        workdir = Path(workdir)
        rows, entries = read_metrics(workdir), read_results(workdir)
        results = {
            entry["split"]: {name: one["value"] for name, one in entry["metrics"].items()} for entry in entries
        }
        evaluations = [row for row in rows if "split" in row]
        last: Row = evaluations[-1] if evaluations else {}
        chosen = [row for row in evaluations if entries and row["step"] == entries[0]["step"]]
        return cls(
            workdir=workdir,
            config=load_config(extended(FinetuneConfig), ["--config", str(workdir / "config.yaml")]),
            metrics=next(iter(results.values()), _values(last)),
            history=rows,
            best=chosen[0] if chosen else {},
            last=last,
            results=results,
        )


def _values(row: Row) -> dict[str, float | None]:
    return {name: value for name, value in row.items() if name not in ("step", "split")}
