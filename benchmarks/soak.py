"""Endurance of pretraining: memory of a long run, and equality of a run after many kills with an undisturbed one.

    python benchmarks/soak.py FOLDER [--steps 5000] [--seed 0]

Both runs are of run_pretrain.py on a made-up corpus, a tiny model on one CPU device, with a save every 50 steps and
an evaluation every 200. (a) runs undisturbed; its resident memory, threads and open files are sampled throughout
(Linux only). (b) receives kill -9 or SIGTERM after random 20 to 60 seconds and is started again, until it is
complete. Prints one JSON object. Exit code 3 if memory, threads or open files of (a) at the end are more than 5%
above those at a tenth of the way (medians over neighboring steps), or if parameters, optimizer, data position or
metrics.jsonl of the two differ by one bit, timings aside. FOLDER keeps both workdirs.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
WORDS = ["the", "cat", "dog", "friend", "sees", "likes", "hears", "bird", "house", "music", "river", "old", "red"]
GROWTH = 1.05


def write_recipe(folder: Path, steps: int) -> Path:
    """Write a corpus of random words and the recipe of a run on it."""
    rng = random.Random(0)
    documents = [
        "\n".join(" ".join(rng.choices(WORDS, k=rng.randint(4, 9))) + " ." for _ in range(rng.randint(4, 12)))
        for _ in range(300)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.txt").write_text("\n\n".join(documents) + "\n")
    path = folder / "recipe.yaml"
    path.write_text(
        f"""
data: {{corpus: [{folder}/corpus.txt], shards: {folder}/shards, seq_length: 32, max_predictions: 5, dupe_factor: 2,
  num_shards: 4, eval_fraction: 0.1, workers: 1}}
model: {{vocab_size: 96, hidden_size: 64, num_layers: 2, num_attention_heads: 2, intermediate_size: 256,
  max_position_embeddings: 32}}
optimizer: {{learning_rate: 1e-3, warmup_steps: 100}}
training: {{num_steps: {steps}, global_batch_size: 64, log_interval: 10, checkpoint_interval: 50,
  eval_interval: 200, compilation_cache: {folder}/cache}}
"""
    )
    return path


def start(recipe: Path, workdir: Path) -> subprocess.Popen[bytes]:
    """Start the run, with its output appended to a file next to its workdir."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    with (workdir.parent / f"{workdir.name}.output").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, REPOSITORY / "run_pretrain.py", "--config", recipe, "--workdir", workdir],
            stdout=output, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=environment,
        )  # fmt: skip


def newest_step(workdir: Path) -> int:
    """Return the last step in the metrics file."""
    path = workdir / "metrics.jsonl"
    lines = path.read_bytes()[-4096:].splitlines() if path.exists() else []
    return next((json.loads(line)["step"] for line in reversed(lines) if line.endswith(b"}")), 0)


def resources(pid: int) -> dict[str, int]:
    """Return resident bytes, threads and open files of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "memory": int(status["VmRSS"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


def undisturbed(recipe: Path, workdir: Path) -> list[dict[str, int]]:
    """Run to the end; return samples of the resources of the process by step."""
    samples = []
    process = start(recipe, workdir)
    try:
        while process.poll() is None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, KeyError):  # it has just ended
                samples.append({"step": newest_step(workdir), **resources(process.pid)})
            time.sleep(0.25)
    finally:
        process.kill()
    if process.wait() != 0:
        raise SystemExit(f"the undisturbed run ended with code {process.returncode}; see {workdir}.output")
    return samples


def killed_again_and_again(recipe: Path, workdir: Path, seed: int) -> dict[str, list[float]]:
    """Run to the end through kills; return the waiting times for each kind of kill."""
    rng = random.Random(seed)
    kills: dict[str, list[float]] = {"SIGKILL": [], "SIGTERM": []}
    while True:
        process = start(recipe, workdir)
        try:
            patience = rng.uniform(20, 60)
            process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            number = rng.choice([signal.SIGKILL, signal.SIGTERM])
            process.send_signal(number)
            kills[number.name].append(round(patience, 1))
            if process.wait(timeout=120) not in (-number, 42, 0):
                raise SystemExit(
                    f"{number.name} ended the run with code {process.returncode}; see {workdir}.output"
                ) from None
            if process.returncode != 0:
                continue
        finally:
            process.kill()
        if process.returncode != 0:
            raise SystemExit(f"the run ended by itself with code {process.returncode}; see {workdir}.output")
        return kills


def differences(recipe: Path, first: Path, second: Path) -> list[str]:
    """Return the bitwise differences between two finished runs, except timings."""
    import jax
    import numpy as np

    from bert_jax.config import PretrainConfig, load_config
    from bert_jax.parallel import make_mesh
    from bert_jax.training.checkpoint.restore import restore_newest
    from bert_jax.training.logging.metrics_file import TIMING_KEYS, read_metrics

    config = load_config(PretrainConfig, ["--config", str(recipe)])
    mesh = make_mesh(config.mesh)
    one, two = (
        restore_newest(workdir, config, mesh, read_only=True, may_change=set(), report=print)
        for workdir in (first, second)
    )
    assert one is not None and two is not None
    found = [f"step: {one.step} and {two.step}"] if one.step != two.step else []
    for (path, left), right in zip(
        jax.tree_util.tree_leaves_with_path(one.state), jax.tree.leaves(two.state), strict=True
    ):
        if np.asarray(left).tobytes() != np.asarray(right).tobytes():
            found.append(f"state{jax.tree_util.keystr(path)}")
    if one.meta["data"] != two.meta["data"]:
        found.append(f"data position: {one.meta['data']} and {two.meta['data']}")
    lines = [
        [{key: value for key, value in line.items() if key not in TIMING_KEYS} for line in read_metrics(workdir)]
        for workdir in (first, second)
    ]
    if lines[0] != lines[1]:
        where = next((i for i, pair in enumerate(zip(*lines, strict=False)) if pair[0] != pair[1]), "the end")
        found.append(f"metrics.jsonl: {len(lines[0])} and {len(lines[1])} lines, first difference at {where}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder: Path = options.folder.absolute()
    recipe = write_recipe(folder, options.steps)

    samples = undisturbed(recipe, folder / "whole")
    (folder / "samples.json").write_text(json.dumps(samples))
    early, width = options.steps // 10, max(options.steps // 25, 50)
    result: dict[str, Any] = {"samples": len(samples)}
    grown = []
    for name in ("memory", "threads", "files"):
        at = {
            "early": [sample[name] for sample in samples if abs(sample["step"] - early) <= width],
            "late": [
                sample[name] for sample in samples if options.steps - 2 * width <= sample["step"] < options.steps
            ],
        }
        first, last = (statistics.median(values) for values in at.values())
        result[name] = {"early": first, "late": last, "most": max(sample[name] for sample in samples)}
        if last > GROWTH * first:
            grown.append(name)
    result["grown"] = grown
    print(json.dumps(result), file=sys.stderr, flush=True)
    result["kills"] = killed_again_and_again(recipe, folder / "killed", options.seed)
    result["different"] = differences(recipe, folder / "whole", folder / "killed")
    print(json.dumps(result, indent=1))
    return 3 if grown or result["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
