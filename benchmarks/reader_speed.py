"""Speed, start and memory of the input path: examples per second from shards to host batches, checksums on.

    python benchmarks/reader_speed.py [--folder DIR] [--seconds 3] [--repeat 3] [--small] [--readers numpy]

Makes shards of random content (about 3 GB; kept in DIR for the next run, else in a temporary folder), then runs
every case with every reader in a separate process and prints a table. Examples per second: best of the repeats.
Start: from the call to the first batch of step 100,000, index read included, TensorFlow imported before. The bars
that studies/text_input quotes are for two idle cores. Exits with code 3 if the numpy reader reads less than 50,000
examples of length 128 per second.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bert_jax.config.pretrain import DataConfig
from data_pipeline.host_tensorflow import load_tensorflow
from data_pipeline.read.pretrain_input import pretrain_batches
from data_pipeline.shards.shard_files import write_index, write_records
from data_pipeline.shards.tfexample import encode_examples

# name: sequence length, predictions, files, records in all, lanes
CASES = {
    "length 128, 16 files": (128, 20, 16, 262_144, 64),
    "length 512, 16 files": (512, 76, 16, 131_072, 64),
    "length 128, one file of 1 GB": (128, 20, 1, 1_310_720, 64),
    "length 512, one file of 1 GB": (512, 76, 1, 401_408, 64),
    "length 128, 3 files, 64 lanes": (128, 20, 3, 262_144, 64),
}
BATCH = 256
LEAST_NUMPY = 50_000
Reader = Literal["numpy", "tensorflow"]
START_STEP = 100_000


def random_examples(count: int, seq_length: int, predictions: int, seed: int) -> Iterator[bytes]:
    """Return serialized full-length examples of random ids."""
    rng = np.random.default_rng(seed)
    for start in range(0, count, 2048):
        rows = min(2048, count - start)
        segments = (np.arange(seq_length) > seq_length // 2).astype(np.int32)
        yield from encode_examples(
            {
                "input_ids": rng.integers(5, 30522, (rows, seq_length), dtype=np.int32),
                "input_mask": np.ones((rows, seq_length), np.int32),
                "segment_ids": np.tile(segments, (rows, 1)),
                "masked_lm_positions": rng.integers(1, seq_length, (rows, predictions), dtype=np.int32),
                "masked_lm_ids": rng.integers(5, 30522, (rows, predictions), dtype=np.int32),
                "masked_lm_weights": np.ones((rows, predictions), np.float32),
                "next_sentence_labels": rng.integers(0, 2, (rows, 1)),
            }
        )


def make_shards(folder: Path, seq_length: int, predictions: int, files: int, records: int) -> None:
    """Write the shards of a case unless they exist."""
    if (folder / "records.index").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    share = -(-records // files)
    entries = []
    for i in range(files):
        count = min(share, records - i * share)
        name = folder / f"shard-{i:05d}-of-{files:05d}.tfrecord"
        entries.append(write_records(name, random_examples(count, seq_length, predictions, i)))
    write_index(folder, entries)


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_case(
    folder: Path, seq_length: int, predictions: int, lanes: int, seconds: float, repeat: int, reader: Reader
) -> dict[str, Any]:
    """Measure one case in this process."""
    if reader == "tensorflow":
        load_tensorflow()
    imported = peak_bytes()
    data = DataConfig(seq_length=seq_length, max_predictions=predictions, reader=reader)
    started = time.perf_counter()
    batches = pretrain_batches(data, folder=folder, lanes=lanes, batch_size=BATCH, seed=1)
    batches.restore(batches.state() | {"data_step": START_STEP})
    next(batches)
    first = time.perf_counter() - started
    rates, cpu = [], []
    for _ in range(repeat):
        count, start, start_cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - start < seconds:
            next(batches)
            count += BATCH
        rates.append(count / (time.perf_counter() - start))
        cpu.append(count / (time.process_time() - start_cpu))
    return {
        "examples_per_second": round(max(rates)),
        "all": [round(rate) for rate in rates],
        "examples_per_cpu_second": round(max(cpu)),
        "start_seconds": round(first, 2),
        "peak_mb": peak_bytes() >> 20,
        "imported_mb": imported >> 20,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder of the shards, which are kept")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    parser.add_argument("--repeat", type=int, default=3, help="measurements per case")
    parser.add_argument("--only", default="", help="only cases with this text in their name")
    parser.add_argument("--small", action="store_true", help="a tenth of the records, to test the benchmark")
    parser.add_argument("--readers", nargs="+", choices=("numpy", "tensorflow"), default=["numpy", "tensorflow"])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case = json.loads(options.case)
        print(json.dumps(run_case(**case | {"folder": Path(case["folder"])})))
        return 0
    is_slow = False
    with tempfile.TemporaryDirectory() as temporary:
        root = options.folder or Path(temporary)
        for name, (seq_length, predictions, files, records, lanes) in CASES.items():
            if options.only not in name:
                continue
            records //= 10 if options.small else 1
            folder = root / f"{seq_length}-{files}-{records}"
            make_shards(folder, seq_length, predictions, files, records)
            case = {"folder": str(folder), "seq_length": seq_length, "predictions": predictions, "lanes": lanes}
            case |= {"seconds": options.seconds, "repeat": options.repeat}
            for reader in options.readers:
                command = [sys.executable, __file__, "--case", json.dumps(case | {"reader": reader})]
                result = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                line = result.strip().splitlines()[-1]
                print(f"{name:32} {reader:10} {line}", flush=True)
                rate = json.loads(line)["examples_per_second"]
                is_slow |= reader == "numpy" and seq_length == 128 and rate < LEAST_NUMPY
    return 3 if is_slow else 0


if __name__ == "__main__":
    sys.exit(main())
