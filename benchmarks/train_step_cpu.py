"""Training step on the CPU against its peers: tokens per second, in one run.

    python benchmarks/train_step_cpu.py --ours_python PYTHON --peer_python PYTHON [--steps 12] [--size minilm]

``--peer_python`` is an environment made from ``benchmarks/requirements.lock``. One process per implementation
(``train_step_workers.py``) stays alive; they take turns of two steps each, so that a slow minute of the machine
hits all of them. The medians are compared, ours in the dtype of the peer. Exit code 3 if ours is below 1.15 x Flax
or 1.7 x torch in float32, which both project every position; torch_masked projects the masked ones, as ours does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TOKENS = {"base": 8 * 128, "minilm": 16 * 128}
BARS = {"flax": 1.15, "torch_float32": 1.7}
PEERS = ("flax", "torch_float32", "torch_masked_float32", "torch_bfloat16", "torch_masked_bfloat16")


class Worker:
    """One implementation in its own process and environment."""

    def __init__(self, name: str, python: str, size: str) -> None:
        script = REPOSITORY / "benchmarks" / "train_step_workers.py"
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONWARNINGS": "ignore",
        }
        self.name = name
        self.seconds: list[float] = []
        self.process = subprocess.Popen(
            [python, str(script), name, size], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        self.setup = self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(
                f"{self.name}: the worker stopped with code {self.process.wait()}; run it alone to see the error"
            )
        return json.loads(line)

    def run(self, steps: int) -> None:
        """Run ``steps`` timed steps."""
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        self.seconds += self._answer()["seconds"]

    def close(self) -> None:
        """End the process by closing its input."""
        self.process.stdin.close()
        self.process.wait()


def main() -> int:
    """Run, and print one line per implementation and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours_python", default=sys.executable, help="Python with bert_jax's dependencies")
    parser.add_argument("--peer_python", required=True, help="Python with benchmarks/requirements.lock")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each implementation")
    parser.add_argument("--size", choices=TOKENS, default="base", help="sizes of BERT-base, or of MiniLM")
    parser.add_argument("--only", nargs="*", default=list(PEERS), choices=PEERS, help="peers to run")
    arguments = parser.parse_args()

    mine = {name: "ours_bfloat16" if name.endswith("bfloat16") else "ours" for name in arguments.only}
    workers = [Worker(name, arguments.ours_python, arguments.size) for name in sorted({"ours", *mine.values()})]
    workers += [Worker(name, arguments.peer_python, arguments.size) for name in arguments.only]
    while len(workers[-1].seconds) < arguments.steps:
        for worker in workers:
            worker.run(2)
    rates = {worker.name: TOKENS[arguments.size] / statistics.median(worker.seconds) for worker in workers}
    for worker in workers:
        worker.close()
        low, high = min(worker.seconds), max(worker.seconds)
        median, setup = statistics.median(worker.seconds), worker.setup
        print(
            f"{worker.name:21} {rates[worker.name]:7.1f} tokens/s   {median:.3f} s, median of"
            f" {len(worker.seconds)} steps ({low:.3f} to {high:.3f}), ready after {setup['setup_seconds']:.0f} s,"
            f" loss {setup['loss']:.3f}"
        )
    passed = True
    for name in arguments.only:
        ratio = rates[mine[name]] / rates[name]
        bar = BARS.get(name) if arguments.size == "base" else None
        passed &= bar is None or ratio >= bar
        print(f"{mine[name]} / {name}: {ratio:.2f}" + (f" (bar {bar})" if bar else ""))
    return 0 if passed else 3


if __name__ == "__main__":
    sys.exit(main())
