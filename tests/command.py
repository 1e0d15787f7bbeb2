"""The real command line on a made-up corpus, for the entry tests."""

import concurrent.futures
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
# ``bert-jax`` from a copy of the packages, without the finder of an editable installation, which would add what the
# copy lacks.
MAIN_OF_A_COPY = """
import runpy, sys
sys.meta_path[:] = [one for one in sys.meta_path if not getattr(one, "__module__", "").startswith("__editable__")]
runpy.run_module("bert_jax.commands.main", run_name="__main__", alter_sys=True)
"""


SENTENCE_PARTS = (
    ["the cat", "a dog", "my friend", "the old man"],
    ["sees", "likes", "hears", "follows"],
    ["a bird", "the house", "some music", "a red car", "the river"],
)


def write_text(path: Path, documents: int = 40, seed: int = 0) -> Path:
    """A corpus of a small grammar: sentence a line, blank line between documents."""
    rng = np.random.default_rng(seed)
    subjects, verbs, objects = SENTENCE_PARTS
    blocks = []
    for _ in range(documents):
        count = rng.integers(4, 12)
        blocks.append(
            "\n".join(f"{rng.choice(subjects)} {rng.choice(verbs)} {rng.choice(objects)} ." for _ in range(count))
        )
    path.write_text("\n\n".join(blocks) + "\n")
    return path


def recipe(folder: Path, **sections: dict[str, object]) -> Path:
    """A recipe of a tiny run on :func:`write_text` in ``folder``; ``sections`` override it."""
    values: dict[str, dict[str, object]] = {
        "data": {
            "corpus": [str(write_text(folder / "corpus.txt"))], "shards": str(folder / "shards"), "seq_length": 16,
            "max_predictions": 3, "dupe_factor": 2, "num_shards": 2, "eval_fraction": 0.1, "workers": 1,
        },
        "model": {
            "vocab_size": 64, "hidden_size": 16, "num_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 32, "max_position_embeddings": 32,
        },
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 10},
        "training": {
            "num_steps": 60, "global_batch_size": 8, "log_interval": 5, "checkpoint_interval": 10,
            "eval_interval": 20, "compilation_cache": os.environ["JAX_COMPILATION_CACHE_DIR"],
        },
        "mesh": {"data": 8},
    }  # fmt: skip
    for name, options in sections.items():
        values[name] |= options
    import yaml

    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def start(*arguments: object, devices: int = 8) -> subprocess.Popen:
    """``run_pretrain.py`` with ``arguments`` on so many virtual devices, its output captured."""
    return subprocess.Popen(
        [sys.executable, str(REPOSITORY / "run_pretrain.py"), *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
        env=environment(devices),
    )  # fmt: skip


def run(*arguments: object, devices: int = 8) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a whole run."""
    process = start(*arguments, devices=devices)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def environment(devices: int = 8, **variables: str) -> dict[str, str]:
    """Environment of a process with so many virtual devices that imports the project and the tests' modules."""
    # The repository first: tests/ has folders of the same names as the packages.
    paths = f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}"
    return os.environ | {"XLA_FLAGS": xla_flags(devices), "PYTHONPATH": paths} | variables


def xla_flags(devices: int) -> str:
    """Flags for a process with so many virtual devices; its small programs are compiled as quickly as here."""
    return re.sub(r"(device_count)=\d+", rf"\g<1>={devices}", os.environ["XLA_FLAGS"])


def run_hosts(
    count: int, devices: int, *arguments: object, program: Path | None = None, timeout: float = 600
) -> list[tuple[int, str, str]]:
    """The same for ``count`` processes of one run on this machine, with ``devices`` virtual devices each;
    ``program`` takes the place of ``run_pretrain.py``. One process gets no flags about others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for index in range(count):
        others = ["--coordinator", f"127.0.0.1:{port}", "--num_processes", count, "--process_id", index]
        words = [
            sys.executable,
            program or REPOSITORY / "run_pretrain.py",
            *arguments,
            *(others if count > 1 else []),
        ]
        processes.append(
            subprocess.Popen(
                [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                cwd=REPOSITORY, env=environment(devices), start_new_session=True,
            )
        )  # fmt: skip
    try:
        # Read at the same time: one that waits for its full pipe would hold the others.
        with concurrent.futures.ThreadPoolExecutor(count) as readers:
            outputs = list(readers.map(lambda process: process.communicate(timeout=timeout), processes))
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]
