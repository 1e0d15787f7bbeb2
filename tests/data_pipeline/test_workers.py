"""The pool of worker processes: results, errors, a killed worker, the main script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.build.workers import Workers


def _leave(code: int) -> None:
    os._exit(code)


def test_a_killed_worker_is_reported() -> None:
    with Workers(2) as workers, pytest.raises(ValueError, match="worker processes was killed"):
        list(workers.run(_leave, [(9,), (9,)]))


def _sum(a: int, b: int) -> int:
    if a < 0:
        raise ValueError(f"{a} is below 0")
    return a + b


def test_worker_results_and_errors() -> None:
    with Workers(2) as workers:
        assert sorted(workers.run(_sum, ((i, i) for i in range(9)))) == [2 * i for i in range(9)]
        with pytest.raises(ValueError, match="-3 is below 0"):
            list(workers.run(_sum, [(1, 1), (-3, 1), (2, 2)]))


@pytest.mark.parametrize("before", [None, "true"])
def test_the_threads_of_tokenizers_are_as_before(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TOKENIZERS_PARALLELISM"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with Workers(2):
        assert os.environ[name] == "false"
    assert os.environ.get(name) == before


def test_workers_do_not_import_the_main_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "print('main script')\n"
        "from operator import add\n"
        "from data_pipeline.build.workers import Workers\n"
        "with Workers(2) as workers:\n"
        "    print(sum(workers.run(add, [(1, 2), (3, 4)])))\n"
        "import sys\n"
        "assert sys.modules['__main__'].__file__ == __file__\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split("\n") == ["main script", "10", ""]
