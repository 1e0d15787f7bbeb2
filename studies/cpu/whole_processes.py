"""Seconds of whole processes, in turns: loading and the first vector, --print_config, a second fine-tuning.

    python studies/cpu/whole_processes.py --minilm FOLDER --data GLUE/SST-2 --peer_python PYTHON [--times 3]

The fine-tuning has 5,000 records and one epoch of batches of 32, evaluates and saves; "second": the programs of an
earlier run are in the user's cache. The peer is transformers' Trainer in the environment of ``--peer_python``, with
float32 products of the precision "medium" and with bf16. Prints one JSON line for each process and the medians.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDS = 5000


def seconds(*command: object, cache: Path) -> float:
    """Run a command with the cache ``cache`` of programs and return its time. ``CalledProcessError`` if it fails."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    words = [str(word) for word in command]
    subprocess.run(words, cwd=REPOSITORY, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tsv and dev.tsv")
    parser.add_argument("--peer_python", help="environment with torch and transformers")
    parser.add_argument("--times", type=int, default=3)
    arguments = parser.parse_args()
    model = arguments.minilm.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, kept in {"train": RECORDS + 1, "dev": None}.items():
            lines = (arguments.data / f"{part}.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
            (folder / f"{part}.tsv").write_text("".join(lines[:kept]), encoding="utf-8")
        files = [folder / "train.tsv", folder / "dev.tsv"]
        cache, ours = folder / "cache", sys.executable
        embed = f"import bert_jax; bert_jax.load({str(model)!r}).embed('a text of some words')"
        config = ["--config", "configs/quickstart.yaml", "--print_config"]

        def embed_cold() -> float:
            shutil.rmtree(cache / "bert_jax", ignore_errors=True)
            return seconds(ours, "-c", embed, cache=cache)

        def finetune(*options: str) -> float:
            shutil.rmtree(folder / "run", ignore_errors=True)
            words = ["--config", "configs/finetune/sst2.yaml", "--init_from", model, "--workdir", folder / "run"]
            words += ["--data.train", files[0], "--data.dev", files[1], "--training.num_epochs", 1, "--task.max_length", 128]
            words += ["--optimizer.learning_rate", "1e-4", "--training.global_batch_size", 32, *options]
            return seconds(ours, "run_finetune.py", *words, cache=folder / "programs")

        def trainer(*options: str) -> float:
            script = Path(__file__).parent / "trainer_sst2.py"
            return seconds(arguments.peer_python, script, model, *files, folder / "peer", *options, cache=cache)

        processes: dict[str, Callable[[], float]] = {
            "load and embed, cold": embed_cold,
            "load and embed, warm": lambda: seconds(ours, "-c", embed, cache=cache),
            "--print_config": lambda: seconds(ours, "run_pretrain.py", *config, cache=cache),
            "fine-tuning": finetune,
        }
        if arguments.peer_python:
            processes |= {"Trainer, float32": trainer, "Trainer, bf16": lambda: trainer("--bf16")}
        finetune()  # the first one compiles
        times: dict[str, list[float]] = {name: [] for name in processes}
        for _ in range(arguments.times):
            for process, run in processes.items():
                times[process].append(round(run(), 2))
                print(json.dumps({"process": process, "seconds": times[process][-1]}), flush=True)
        print(json.dumps({process: statistics.median(values) for process, values in times.items()}))


if __name__ == "__main__":
    main()
