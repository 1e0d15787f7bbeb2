"""Training step on the CPU against its peers: tokens per second, in one run.

    python benchmarks/train_step_cpu.py --ours_python PYTHON --peer_python PYTHON [--steps 12] [--size minilm]

``--peer_python`` is an environment made from ``benchmarks/requirements.lock``. One process per implementation
(``train_step_workers.py``) stays alive; they take turns of two steps each, so that a slow minute of the machine
hits all of them. The medians are compared, ours in the dtype of the peer. Exit code 3 if ours is below 1.15 x Flax
or 1.7 x torch in float32, which both project every position; torch_masked projects the masked ones, as ours does.
"""

import argparse
import statistics
import sys

from harness import Worker

TOKENS = {"base": 8 * 128, "minilm": 16 * 128}
BARS = {"flax": 1.15, "torch_float32": 1.7}
PEERS = ("flax", "torch_float32", "torch_masked_float32", "torch_bfloat16", "torch_masked_bfloat16")


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
    pythons = dict.fromkeys(sorted({"ours", *mine.values()}), arguments.ours_python)
    pythons |= dict.fromkeys(arguments.only, arguments.peer_python)
    script, size = "train_step_workers.py", arguments.size
    workers = {name: Worker(2, script, name, size, python=python) for name, python in pythons.items()}
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    while len(seconds["ours"]) < arguments.steps:
        for name, worker in workers.items():
            seconds[name] += worker()
    rates = {name: TOKENS[size] / statistics.median(own) for name, own in seconds.items()}
    for name, worker in workers.items():
        worker.close()
        own, setup = seconds[name], worker.setup
        print(
            f"{name:21} {rates[name]:7.1f} tokens/s   {statistics.median(own):.3f} s, median of {len(own)} steps"
            f" ({min(own):.3f} to {max(own):.3f}), ready after {setup['setup_seconds']:.0f} s, loss"
            f" {setup['loss']:.3f}"
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
