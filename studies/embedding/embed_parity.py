"""Embeddings of short and long texts against sentence-transformers.

    python studies/embedding/embed_parity.py --model FOLDER --sentences STS-B/dev.tsv --long FOLDER --peer_python PYTHON

Compares every sentence of a table of scored pairs together with 200 texts of 100 to 600 words cut from the .txt,
.tsv or .jsonl files of ``--long``, in one shuffled list. Exit code 3 if vectors differ by more than 1e-5 or the
Spearman correlations of the pairs' cosines with their scores differ in 4 decimals. ``--ours`` names a folder
that this library reads instead of FOLDER, for example an import of it.
"""

import argparse
import csv
import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
from embed_speed import Worker
from scipy.stats import spearmanr


def long_texts(folder: Path, count: int) -> list[str]:
    """Return ``count`` texts of 100 to 600 words."""
    words: list[str] = []
    for file in sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".tsv", ".jsonl")):
        words += file.read_text(encoding="utf-8", errors="replace")[: 1 << 21].split()
        if len(words) > 600 * count:
            break
    rng = random.Random(0)
    texts = []
    for _ in range(count):
        length = rng.randint(100, 600)
        start = rng.randrange(len(words) - length)
        texts.append(" ".join(words[start : start + length]))
    return texts


def main() -> int:
    """Compare, and print the largest difference and both correlations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="sentence-transformers folder")
    parser.add_argument("--ours", help="what this library reads (default: the same folder)")
    parser.add_argument("--sentences", required=True, type=Path, help="table with sentence1, sentence2 and score")
    parser.add_argument("--long", required=True, type=Path, help="folder of text files")
    parser.add_argument("--peer_python", required=True, help="Python with torch and sentence-transformers")
    arguments = parser.parse_args()

    with arguments.sentences.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    pairs = [row[column] for row in rows for column in ("sentence1", "sentence2")]
    everything = pairs + long_texts(arguments.long, 200)
    order = list(range(len(everything)))
    random.Random(1).shuffle(order)
    with tempfile.TemporaryDirectory() as scratch:
        texts = Path(scratch) / "texts.json"
        texts.write_text(json.dumps([everything[i] for i in order]), encoding="utf-8")
        given = []
        for kind, python, model in (
            ("ours", sys.executable, arguments.ours or arguments.model),
            ("torch", arguments.peer_python, arguments.model),
        ):
            worker = Worker(kind, python, model, str(texts))
            vectors = np.empty_like(shuffled := worker.vectors(Path(scratch) / f"{kind}.npy"))
            vectors[order] = shuffled
            given.append(vectors)
            worker.close()
    difference = float(np.abs(given[0] - given[1]).max())
    scores = [float(row["score"]) for row in rows]
    correlations = []
    for vectors in given:
        first, second = vectors[: len(pairs) : 2], vectors[1 : len(pairs) : 2]
        cosines = np.sum(first * second, 1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
        correlations.append(round(float(spearmanr(cosines, scores).statistic), 4))
    print(f"{len(everything)} texts, largest difference {difference:.2e} (at most 1e-5)")
    print(f"Spearman ours {correlations[0]:.4f}, sentence-transformers {correlations[1]:.4f}")
    return 0 if difference <= 1e-5 and correlations[0] == correlations[1] else 3


if __name__ == "__main__":
    sys.exit(main())
