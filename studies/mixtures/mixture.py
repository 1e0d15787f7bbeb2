"""Mixtures of folders: shares of the rows, the same rows after resumes and on other hosts, passes in the log.

    python studies/mixtures/mixture.py [--folder DIR] [--output JSONL]

Writes three folders of records that name their part (100,000, 20,000 and 2,000 of length 64) and mixes them in
the proportion 0.7 : 0.2 : 0.1. Reads 100,000 rows with each reader, reads them again in pieces from stored
positions, with a batch ramp, and as 2 and 4 hosts. Then trains a tiny model on such a mixture with
``run_pretrain.py``: a whole run, a run that is killed and resumed, a resume with other weights, and a new phase
with other weights. Prints one JSON line per figure. Exit code 3 if a share is not within 3 sigma (independent
draws), if any row differs, or if the log of the run lacks the passes of the smallest part.
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bert_jax.config.pretrain import DataConfig
from bert_jax.tokenization import SPECIAL_PIECES
from bert_jax.training.logging.metrics_file import TIMING_KEYS, read_metrics
from data_pipeline.read.pretrain_input import PretrainBatches, pretrain_batches
from data_pipeline.shards.mixture_parts import shard_parts
from data_pipeline.shards.shard_files import write_index, write_records
from data_pipeline.shards.tfexample import encode_examples

REPOSITORY = Path(__file__).resolve().parents[2]
WEIGHTS = {"wiki": 0.7, "books": 0.2, "few": 0.1}
LENGTH, MASKS, VOCABULARY = 64, 10, 1000
BATCH, LANES, ROWS = 160, 32, 100_000
FIRST_PIECE = len(SPECIAL_PIECES)  # ids of the part and of the digits of the record begin here


def make_part(folder: Path, part: int, records: int) -> None:
    """Write a folder of ``records`` records: ids 1 to 3 are the part and two digits of the record in base 900."""
    folder.mkdir(parents=True)
    rng, examples = np.random.default_rng(part), list[bytes]()
    for start in range(0, records, 2048):
        numbers = np.arange(start, min(records, start + 2048))
        ids = rng.integers(FIRST_PIECE, VOCABULARY, (len(numbers), LENGTH))
        ids[:, 1], ids[:, 2], ids[:, 3] = part, numbers // 900, numbers % 900
        ids[:, 1:4] += FIRST_PIECE
        examples += encode_examples(
            {
                "input_ids": ids,
                "input_mask": np.ones_like(ids),
                "segment_ids": np.zeros_like(ids),
                "masked_lm_positions": np.tile(np.arange(10, 10 + MASKS), (len(ids), 1)),
                "masked_lm_ids": ids[:, 20 : 20 + MASKS],
                "masked_lm_weights": np.ones((len(ids), MASKS), np.float32),
                "next_sentence_labels": numbers[:, None] % 2,
            }
        )
    write_index(folder, [write_records(folder / "shard-00000-of-00001.tfrecord", examples)])


def make_mixture(root: Path, *records: int) -> Path:
    """Write the parts, with so many records each, and their vocabulary, unless they exist; return ``root``."""
    if not (root / "vocab.txt").is_file():
        for part, (name, count) in enumerate(zip(WEIGHTS, records, strict=True)):
            make_part(root / name, part, count)
        pieces = [*SPECIAL_PIECES, *(f"w{number}" for number in range(VOCABULARY - len(SPECIAL_PIECES)))]
        (root / "vocab.txt").write_text("\n".join(pieces) + "\n")
    return root


def opened(root: Path, reader: Any = "numpy", *, is_mixed: bool = True, **options: Any) -> PretrainBatches:
    """Open the stream of the mixture in ``root``, or of its first part alone."""
    mixture: Any = tuple(f"{name}={weight}" for name, weight in WEIGHTS.items()) if is_mixed else ()
    data = DataConfig(
        shards=str(root),
        mixture=mixture,
        seq_length=LENGTH,
        max_predictions=MASKS,
        reader=reader,
        segment_records=256,
    )
    options = {"lanes": LANES, "batch_size": BATCH, "seed": 1} | options
    return pretrain_batches(data, folder=shard_parts(data) if is_mixed else root / "wiki", **options)


def digests(batches: Iterator[Any], count: int) -> tuple[list[list[bytes]], np.ndarray]:
    """Return a digest of every row of the next ``count`` batches, and the part of every row, int64[rows]."""
    rows, parts = [], []
    for _ in range(count):
        batch, _ = next(batches)
        joined = [np.ascontiguousarray(values).view(np.uint8) for _, values in sorted(batch.items())]
        content = np.concatenate([values.reshape(len(values), -1) for values in joined], 1)
        rows.append([hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in content])
        parts.append(batch["input_ids"][:, 1] - FIRST_PIECE)
    return rows, np.concatenate(parts)


def check_order(root: Path) -> Iterator[dict[str, Any]]:
    """Yield the figures of the shares, the resumes and the hosts."""
    steps = ROWS // BATCH
    expected, parts = digests(opened(root), steps)
    counts, shares = np.bincount(parts, minlength=3), np.array(list(WEIGHTS.values()))
    sigmas = (counts - ROWS * shares) / np.sqrt(ROWS * shares * (1 - shares))
    yield {
        "row": "shares of 100,000 rows", "shares": (counts / ROWS).tolist(), "sigma": sigmas.round(3).tolist(),
        "ok": bool((abs(sigmas) < 3).all()),
    }  # fmt: skip
    other, _ = digests(opened(root, "tensorflow"), steps)
    yield {"row": "tf.data against numpy", "rows": ROWS, "ok": other == expected}
    batches, differ = opened(root), 0
    for step in range(0, steps - 5, 20):
        batches.restore(batches.state() | {"data_step": step})
        differ += digests(batches, 5)[0] != expected[step : step + 5]
    yield {"row": "resumes", "positions": len(range(0, steps - 5, 20)), "different": differ, "ok": not differ}
    ramp = {"batch_ramp": (30, 64, 30, 96)}
    for options in ({}, ramp):
        whole = digests(opened(root, **options), steps)[0] if options else expected
        for hosts in (2, 4):
            share = BATCH // hosts
            found = [
                digests(opened(root, rows=range(h * share, (h + 1) * share), **options), steps)[0]
                for h in range(hosts)
            ]
            joined = [list(itertools.chain(*(host[step] for host in found))) for step in range(steps)]
            yield {"row": f"{hosts} hosts{' with a batch ramp' * bool(options)}", "ok": joined == whole}


def check_speed(root: Path) -> Iterator[dict[str, Any]]:
    """Yield examples per second of the mixture, and of its first part alone, in turns; no bar."""
    rates: dict[str, list[float]] = {"mixture": [], "one folder": []}
    for _ in range(3):
        for name, one in rates.items():
            batches = opened(root, is_mixed=name == "mixture", batch_size=256, lanes=64)
            for _ in range(20):
                next(batches)
            started = time.perf_counter()
            for _ in range(150):
                next(batches)
            one.append(150 * 256 / (time.perf_counter() - started))
    rounded = {name: round(max(values)) for name, values in rates.items()}
    yield {"row": "examples per second, best of three", **rounded, "ok": True}


# ------------------------------------------------------------------ runs


def run(root: Path, workdir: Path, *arguments: object, kill_at: int = 0) -> tuple[int, str]:
    """Run ``run_pretrain.py`` on the mixture; with ``kill_at``, kill it once the checkpoint of this step exists."""
    words = ["--data.shards", root, "--data.mixture", *(f"{name}={weight}" for name, weight in WEIGHTS.items())]
    words += ["--data.seq_length", LENGTH, "--data.max_predictions", MASKS, "--model.vocab_size", VOCABULARY]
    words += ["--model.hidden_size", 16, "--model.num_layers", 1, "--model.num_attention_heads", 2]
    words += ["--model.intermediate_size", 32, "--model.max_position_embeddings", LENGTH]
    words += ["--training.num_steps", 60, "--training.global_batch_size", 32, "--training.log_interval", 5]
    words += [
        "--training.checkpoint_interval",
        10,
        "--optimizer.warmup_steps",
        10,
        "--workdir",
        workdir,
        *arguments,
    ]
    command = [sys.executable, str(REPOSITORY / "run_pretrain.py"), *map(str, words)]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    while kill_at and process.poll() is None:
        if any(line["step"] > kill_at for line in read_metrics(workdir)):
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.02)
    output, _ = process.communicate()
    return process.returncode, output


def untimed(workdir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without the values that depend on the clock."""
    return [{key: value for key, value in line.items() if key not in TIMING_KEYS} for line in read_metrics(workdir)]


def check_runs(root: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the figures of whole runs; the smallest part has 40 records, 50 times fewer than the first."""
    code, output = run(root, folder / "whole")
    lines = untimed(folder / "whole")
    passes = [int(number) for number in re.findall(r"all 40 records of few are read (\d+) time", output)]
    last = lines[-1] if lines else {}
    yield {
        "row": "passes of a folder 50 times smaller", "exit_code": code, "epoch_few": last.get("epoch_few"),
        "share_few": last.get("share_few"), "passes_named": passes,
        "ok": code == 0 and passes == [1, 2, 4] and all("epoch_few" in line for line in lines),
    }  # fmt: skip
    killed, _ = run(root, folder / "killed", kill_at=30)
    resumed, output = run(root, folder / "killed")
    same = untimed(folder / "killed") == lines
    ok = killed == -signal.SIGKILL and resumed == 0 and "continuing at step" in output and same
    yield {"row": "killed and resumed", "equal_lines": same, "lines": len(lines), "ok": ok}
    changed = "--data.mixture", "wiki=1", "books=1", "few=1"
    code, output = run(root, folder / "killed", *changed, "--training.num_steps", 70)
    message = output.strip().splitlines()[-1]
    yield {"row": "resume with other weights", "exit_code": code, "message": message, "ok": code == 2}
    phase = "--continue_from", folder / "whole", "--training.num_steps", 70
    code, output = run(root, folder / "phase", *changed, *phase)
    share = untimed(folder / "phase")[-1]["share_few"]
    yield {"row": "new phase with other weights", "exit_code": code, "share_few": share, "ok": code == 0}


def main() -> int:
    """Measure, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder of the shards, which are kept for the next run")
    parser.add_argument("--output", type=Path, help="file for the JSON lines")
    options = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, scratch = options.folder or Path(temporary) / "shards", Path(temporary)
        large = make_mixture(folder / "large", 100_000, 20_000, 2_000)
        small = make_mixture(folder / "small", 2_000, 400, 40)
        for checks in (check_order(large), check_speed(large), check_runs(small, scratch)):
            for figure in checks:
                figures.append({"command": "python studies/mixtures/mixture.py", **figure})
                print(json.dumps(figures[-1]), flush=True)
    if options.output:
        options.output.write_text("".join(json.dumps(figure) + "\n" for figure in figures))
    return 0 if all(figure["ok"] for figure in figures) else 3


if __name__ == "__main__":
    sys.exit(main())
