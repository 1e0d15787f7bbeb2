"""What several commands of benchmarks/ need: the environment of a checkout, workers that measure, JSON lines."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def environment(checkout: Path = ROOT, **more: str) -> dict[str, str]:
    """Return the environment of a process that runs the code of ``checkout`` on the CPU."""
    return os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu", **more}


def json_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file; none if it does not exist."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.split("\n") if line]


def write_json_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


class Worker:
    """A process that runs ``benchmarks/SCRIPT WORDS`` of a checkout and measures on request: a number of
    repetitions in, JSON with ``seconds`` out. ``setup`` is its first answer, when it is ready."""

    def __init__(
        self, repetitions: int, script: str, *words: object, checkout: Path = ROOT, python: str = sys.executable
    ) -> None:
        self._repetitions = repetitions
        self._process = subprocess.Popen(
            [python, *map(str, (checkout / "benchmarks" / script, *words))], text=True,
            env=environment(checkout, PYTHONWARNINGS="ignore"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.setup = self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"{' '.join(self._process.args)}: stopped with code {code}; run it to see the error")
        return json.loads(line)

    def __call__(self) -> list[float]:
        """Return the seconds of each repetition."""
        self._process.stdin.write(f"{self._repetitions}\n")
        self._process.stdin.flush()
        return self._answer()["seconds"]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
