"""Log the metrics of a run to Weights & Biases, online or, with WANDB_MODE=offline, in WORKDIR/wandb."""

import importlib.util
from pathlib import Path

from bert_jax.io.files import write_whole
from bert_jax.training.logging.logger import LoggedRun, Logger, Row, scalars, split_of, step_of

# File in a workdir with the id of its run in Weights & Biases, which a resumed run continues.
ID_FILE = "wandb_run.txt"


class WeightsAndBiases(Logger):
    """Logger of the active run of ``wandb`` if the caller has started one, else of a run with the name of the
    workdir. Environment variables of ``wandb``, such as WANDB_PROJECT, apply.

    Metrics have the names SPLIT/NAME, and ``step`` is the axis. A service cannot remove values, so steps that are
    repeated after a kill or a rollback keep their first values.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ValueError("--loggers wandb: wandb is not installed; run: pip install 'bert_jax[wandb]'")

    def open(self, run: LoggedRun) -> None:
        import wandb

        self._wandb, file = wandb, run.folder / ID_FILE
        known = file.read_text() if file.exists() else None
        self._is_own = wandb.run is None
        self._run = wandb.run or wandb.init(id=known, resume="allow", name=run.name, dir=str(run.folder))
        self._run.config.update(dict(run.config), allow_val_change=True)
        self._run.define_metric("*", step_metric="step")
        write_whole(file, self._run.id)
        self._seen = run.seen if self._run.id == known else {}
        for row in run.rows:
            self.line(row)

    def line(self, row: Row) -> None:
        if step_of(row) > self._seen.get(split_of(row), -1):
            self._run.log({"step": step_of(row), **scalars(row)})

    def report(self, page: Path, image: Path) -> None:
        self._run.log(
            {"report": self._wandb.Html(str(page), inject=False), "curves": self._wandb.Image(str(image))}
        )

    def close(self) -> None:
        if self._is_own:
            self._run.finish()
