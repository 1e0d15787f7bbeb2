"""A logger of one's own: MLflow.

    MLFLOW_TRACKING_URI=sqlite:///runs.db run_pretrain.py --config configs/quickstart.yaml --loggers mlflow

An installed package offers it by the entry point ``mlflow = mlflow_logger:Mlflow`` of ``bert_jax.loggers``.
"""

import mlflow

from bert_jax.training.logging.logger import Logger, scalars, split_of, step_of

ID_FILE = "mlflow_run.txt"  # in the workdir, so that a resumed run continues its run in MLflow


class Mlflow(Logger):
    """The metrics SPLIT/NAME over steps, the options of the run, and its report."""

    def open(self, run):
        file = run.folder / ID_FILE
        known = file.read_text() if file.exists() else None
        self._run = mlflow.start_run(run_id=known, run_name=run.name)
        file.write_text(self._run.info.run_id)
        mlflow.log_dict(dict(run.config), "config.json")
        self._seen = run.seen if known else {}  # nothing can be removed, so repeated steps keep their first values
        for row in run.rows:
            self.line(row)

    def line(self, row):
        if step_of(row) > self._seen.get(split_of(row), -1):
            mlflow.log_metrics(scalars(row), step=step_of(row))

    def report(self, page, image):
        for file in (page, image):
            mlflow.log_artifact(str(file))

    def close(self):
        mlflow.end_run()
