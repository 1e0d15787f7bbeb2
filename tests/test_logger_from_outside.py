"""A logger outside the project, by entry point: MLflow of docs/examples, with a module in the place of MLflow."""

import sys
import types

import pytest
from outside import EXAMPLES, fresh, install  # noqa: F401 (fresh is a fixture)
from run_logs import log_with_a_kill

from bert_jax.training.logging.logger import make_loggers, scalars
from bert_jax.training.logging.metrics_file import read_metrics


class Service:
    """What the example uses of MLflow: runs by id, with their calls."""

    def __init__(self):
        self.runs = {}

    def start_run(self, run_id, run_name):
        run_id = run_id or f"id{len(self.runs)}"
        self._calls = self.runs.setdefault(run_id, [])
        self._calls.append(("start", run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def log_dict(self, values, name):
        self._calls.append((name, values["training"]["seed"]))

    def log_metrics(self, values, step):
        self._calls.append((step, values))

    def log_artifact(self, path):
        self._calls.append(("artifact", path))

    def end_run(self):
        self._calls.append("end")


@pytest.fixture
def service(tmp_path, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "mlflow", service)
    monkeypatch.delitem(sys.modules, "mlflow_logger", raising=False)
    points = {"loggers": "mlflow = mlflow_logger:Mlflow"}
    monkeypatch.syspath_prepend(install(tmp_path / "installed", EXAMPLES / "mlflow_logger.py", points))
    return service


def test_it_gets_every_row_once_although_the_run_was_killed(tmp_path, service):
    log_with_a_kill(tmp_path / "w", lambda: make_loggers(["mlflow"])[0])
    ((number, calls),) = service.runs.items()
    assert (tmp_path / "w" / "mlflow_run.txt").read_text() == number
    rows = [(row["step"], scalars(row)) for row in read_metrics(tmp_path / "w")]
    before_the_kill = (30, {"eval/mlm_loss": 30 / 7})
    begin = [("start", "w"), ("config.json", 0)]
    assert calls == [*begin, *rows[:3], before_the_kill, "end", *begin, *rows[3:], "end"]
