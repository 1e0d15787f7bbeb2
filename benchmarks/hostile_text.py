"""Memory of ``bert-data shards`` on odd text, against ordinary text.

    python benchmarks/hostile_text.py [--megabytes 1000] [--cases long_line ...]

Writes one corpus after the other, ``--megabytes`` of text each, and builds a vocabulary (unless the case gives one)
and shards from it with two worker processes: one line of words, one line without white space, lines that are words
of 10 kB (with equal and with different letters), minified JSON, and gzip, bzip2, xz and zstd files of a few kB that
unpack to one line or to blank lines. Prints one JSON line for each: the largest memory of all processes together
(proportional set size), and how much that is above 10 MB of ordinary text. Exit code 3 if it is above 200 MB, or if
a build ends otherwise than expected.
"""

import argparse
import bz2
import gzip
import json
import lzma
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zstandard
from build_speed import process_tree, proportional_bytes
from harness import environment

MOST = 200  # MB above ordinary text
_WORDS = ("stone", "river", "house", "walks", "slowly", "winter", "bread", "letter", "teacher", "boat", "morning")
_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"acgt.", "##a", "##c", "##g", "##t", *_WORDS)


def _ordinary(size: int) -> Iterator[bytes]:
    draw, made = random.Random(0), 0
    while made < size:
        lines = [" ".join(draw.choices(_WORDS, k=10)).capitalize() + ".\n" for _ in range(20)]
        block = "".join([*lines, "\n"]).encode()
        made += len(block)
        yield block


def _repeated(text: bytes) -> Callable[[int], Iterator[bytes]]:
    block = text * (1 + (1 << 20) // len(text))

    def blocks(size: int) -> Iterator[bytes]:
        yield from (block for _ in range(1 + size // len(block)))
        yield b"\n\nA short text. It has two sentences.\n\nAnother text, the third. It is short.\n"

    return blocks


def _long_words(*, equal: bool) -> Callable[[int], Iterator[bytes]]:
    def blocks(size: int) -> Iterator[bytes]:
        draw = random.Random(0)
        for number in range(size // 10_000):
            letters = b"acgt" * 2500 if equal else draw.randbytes(5000).hex().encode()
            yield letters + (b"\n\n" if number % 50 == 49 else b"\n")
        yield from _ordinary(100_000)

    return blocks


def _json_line(size: int) -> Iterator[bytes]:
    yield b'{"text": "'
    yield from (b"Stone walks. " * 80_000 for _ in range(1 + size // 1_040_000))
    yield b'"}\n'


def _json_array(size: int) -> Iterator[bytes]:
    yield b"["
    made = 0
    while made < size:
        record = json.dumps({"text": f"Stone {made} walks. River sleeps. " * 40}).encode()
        yield b"," * (made > 0) + record
        made += len(record)
    yield b"]"


# Name: (file, content, whether the text alone yields a vocabulary, exit code).
CASES: dict[str, tuple[str, Callable[[int], Iterator[bytes]], bool, int]] = {
    "ordinary": ("a.txt", _ordinary, True, 0),
    "long_line": ("a.txt", _repeated(b"stone walks slowly "), True, 0),
    "no_white_space": ("a.txt", _repeated(b"gattaca"), False, 2),  # every token is unknown
    "equal_words": ("a.txt", _long_words(equal=True), True, 0),
    "different_words": ("a.txt", _long_words(equal=False), True, 0),
    "json_line": ("a.jsonl", _json_line, True, 2),
    "json_array": ("a.json", _json_array, True, 0),
    "gzip": ("a.txt.gz", _repeated(b"stone walks "), True, 0),
    "bzip2": ("a.txt.bz2", _repeated(b"stone walks "), False, 0),
    "xz": ("a.txt.xz", _repeated(b"stone walks "), False, 0),
    "zstd": ("a.txt.zst", _repeated(b"stone walks "), False, 0),
    "zstd_blank_lines": ("a.txt.zst", _repeated(b"\n"), True, 0),
}


def _write(path: Path, blocks: Iterator[bytes]) -> None:
    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": zstandard.open}
    with openers.get(path.suffix, open)(path, "wb") as file:
        for block in blocks:
            file.write(block)


def run(folder: Path, name: str, size: int) -> dict[str, Any]:
    """Build shards from the text of a case; return its figures."""
    file, content, has_words, code = CASES[name]
    _write(folder / file, content(size))
    options = "--vocab_size 300 --seq_length 128 --dupe_factor 1 --num_shards 2 --workers 2 --eval_fraction 0"
    words = [sys.executable, "-m", "bert_jax.commands.data", "shards", *options.split()]
    words += ["--corpus", str(folder / file), "--shards", str(folder / "shards")]
    if not has_words:
        (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in _PIECES))
        words += ["--vocab", str(folder / "vocab.txt")]
    start, peak = time.monotonic(), 0
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()) as process:
        while process.poll() is None:
            peak = max(peak, sum(map(proportional_bytes, process_tree(process.pid))))
            time.sleep(0.05)
        assert process.stdout is not None
        last = process.stdout.read().decode().strip().splitlines()[-1:]
    seconds, is_expected = round(time.monotonic() - start, 1), process.returncode == code
    return {
        "case": name, "file_mb": round((folder / file).stat().st_size / 1e6, 3), "peak_mb": round(peak / 1e6),
        "seconds": seconds, "code": process.returncode, "expected": is_expected, "last": "".join(last)[:300],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    ordinary, good = 0, True
    for name in dict.fromkeys(["ordinary", *options.cases]):
        with tempfile.TemporaryDirectory() as folder:
            found = run(Path(folder), name, options.megabytes * 1_000_000 if name != "ordinary" else 10_000_000)
        ordinary = ordinary or found["peak_mb"]
        found["above_mb"] = found["peak_mb"] - ordinary
        print(json.dumps(found), flush=True)
        good &= found["expected"] and found["above_mb"] <= MOST
    return 0 if good else 3


if __name__ == "__main__":
    sys.exit(main())
