"""Builds killed at any moment give the bytes of an unkilled build.

More kills: BERT_JAX_KILLS=10 python -m pytest -m "" -n 0 tests/data_pipeline/test_build_kills.py
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from text_corpora import tree, write_corpus

KILLS = int(os.environ.get("BERT_JAX_KILLS", "2"))


def command(folder: Path) -> list[str]:
    options = "--seq_length 32 --max_predictions 5 --dupe_factor 6 --num_shards 8 --eval_fraction 0.1 --workers 2"
    return [
        sys.executable, "-m", "bert_jax.commands.data", "shards", "--corpus", str(folder.parent / "corpus.txt"),
        "--output", str(folder), "--vocab_size", "500", *options.split(),
    ]  # fmt: skip


def finished(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every finished chunk, part, shard and vocabulary, by name."""
    kept = [*folder.glob("**/*.npz"), *folder.glob("**/*.table"), *folder.glob("**/shard-*"), folder / "vocab.txt"]
    found = {}
    for path in kept:
        if path.exists() and "scratch-" not in str(path):
            split = "eval" if "eval" in str(path.relative_to(folder)) else "train"
            found[f"{split} {path.name}"] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found


def children(pid: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.slow
def test_kill_at_any_moment(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt", documents=200, sentences=50)
    start = time.monotonic()
    subprocess.run(command(tmp_path / "whole"), check=True, stdout=subprocess.DEVNULL)
    duration = time.monotonic() - start
    expected = tree(tmp_path / "whole")
    moments = random.Random(KILLS)
    folder = tmp_path / "killed"
    for kill in range(KILLS):
        # Progress is kept, so a fixed share of the time would hit the same stage only once.
        process = subprocess.Popen(command(folder), stdout=subprocess.DEVNULL)
        time.sleep(moments.uniform(0.15, 0.9) * duration)
        workers = children(process.pid)
        was_running = process.poll() is None
        process.kill()
        process.wait()
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < deadline, "workers outlive their killed parent"
            time.sleep(0.01)
        before = finished(folder) if folder.exists() else {}
        assert (folder / "train").exists() or was_running
        subprocess.run(command(folder), check=True, stdout=subprocess.DEVNULL)
        after = finished(folder)
        for name, mark in before.items():
            assert after.get(name, mark) == mark, f"{name} was made again"
        assert tree(folder) == expected, f"kill {kill}"
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
