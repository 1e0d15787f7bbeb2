"""Near duplicates, workers and memory of ``bert-data clean`` against brute force.

    python studies/cleaning/clean_text.py --corpus TEXT... [--documents 12000] [--megabytes 200]
        [--only near workers memory] [--output FILE.jsonl]

near: documents of 50 to 500 words, cut from the corpus and changed by known edits (words replaced, deleted and
inserted; parts cut off or exchanged). The Jaccard similarity of the sets of 5-grams of words of all pairs is
computed by a sparse matrix product of sets made with a regular expression, without code of the project. Recall is
the share of the pairs of similarity 0.7 or more of which at least one document is dropped, and of those that have a
common band. workers: bytes of the output with 1, 2 and 4 processes, and under Apache Beam. memory: largest sum over
the process tree of the proportional set size (Linux only), for a tenth of the text and all of it.

Prints JSON lines; exits with code 3 if a bar is missed: recall 0.95, dropped documents whose best similarity to a
kept one is below 0.4 at most 0.1%, the same bytes, memory at most 1.5 times that of a tenth of the text.
"""

import argparse
import gzip
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from build_speed import cpu_of_children, digest, process_tree, proportional_bytes
from scipy.sparse import csr_array

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data_pipeline.contrib.clean.word_hashes import band_hashes, min_hashes, ngrams, word_hashes

LEAST_RECALL, LOW, MOST_LOW, MOST_RATIO = 0.95, 0.4, 0.001, 1.5
SIMILAR = 0.7
FEWEST, MOST = 50, 500  # words of a document
WORD = re.compile(r"[^\W_]+")
BANDS, ROWS = 25, 5
_INTERVAL = 0.05  # seconds between samples of memory


def lines_of(paths: list[Path]) -> Iterator[list[str]]:
    """Yield the words of every line of the files."""
    for path in paths:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for line in file:
                if words := line.split():
                    yield words


def cut(paths: list[Path], draw: random.Random) -> Iterator[list[str]]:
    """Yield documents of 50 to 500 words as lists of words; a document is consecutive text."""
    held: list[str] = []
    size = draw.randint(FEWEST, MOST)
    for words in lines_of(paths):
        held += words
        while len(held) >= size:
            yield held[:size]
            held, size = held[size:], draw.randint(FEWEST, MOST)


def changed(words: list[str], others: list[str], draw: random.Random) -> list[str]:
    """Return a changed copy of a document, of 50 to 500 words; ``others`` is another text."""
    words, rate = list(words), draw.choice((0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1))
    kind = draw.choice(("replace", "delete", "insert", "cut", "exchange", "append"))
    count = max(1, int(rate * len(words)))
    if kind in ("replace", "delete", "insert"):
        for _ in range(count):
            at = draw.randrange(len(words))
            new = [] if kind == "delete" else [draw.choice(others)]
            words[at : at + (kind != "insert")] = new
    else:
        size = int(draw.uniform(0.02, 0.6) * len(words))
        at = draw.randrange(len(words) - size)
        if kind == "cut":
            del words[at : at + size]
        elif kind == "exchange":
            words[at : at + size] = others[:size]
        else:
            words += others[:size]
    words = words[:MOST]
    return words if len(words) >= FEWEST else words + others[: FEWEST - len(words)]


def families(paths: list[Path], count: int, seed: int) -> list[str]:
    """Return ``count`` different documents: half of them unchanged, the others changed copies of these."""
    draw = random.Random(seed)
    texts: dict[str, None] = {}
    before: list[str] = []
    for words in cut(paths, draw):
        if before:
            texts[" ".join(before)] = None
            for _ in range(draw.choice((0, 0, 1, 1, 2, 4))):
                texts[" ".join(changed(before, words, draw))] = None
        before = words
        if len(texts) >= count:
            break
    result = list(texts)
    draw.shuffle(result)
    return result


def similar_pairs(texts: list[str], least: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all pairs (i, j), i < j, of Jaccard similarity ``least`` or more: i, j and the similarity."""
    numbers: dict[tuple[str, ...], int] = {}
    columns, sizes = [], []
    for text in texts:
        words = WORD.findall(text.lower())
        own = {tuple(words[i : i + 5]) for i in range(max(len(words) - 4, 1))}
        columns += [numbers.setdefault(gram, len(numbers)) for gram in own]
        sizes.append(len(own))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    shape = (len(texts), len(numbers))
    matrix = csr_array((np.ones(len(columns), np.int32), np.array(columns), offsets), shape=shape)
    common = (matrix @ matrix.T).tocoo()
    first, second = common.coords
    upper = first < second
    first, second, both = first[upper], second[upper], common.data[upper]
    size = np.array(sizes)
    similarity = both / (size[first] + size[second] - both)
    chosen = similarity >= least
    return first[chosen], second[chosen], similarity[chosen]


def run_clean(corpus: list[Path], output: Path, *options: str) -> tuple[float, float, int]:
    """Run the command; return its seconds, its processor seconds and the peak memory of its processes in bytes."""
    words = ["--corpus", *map(str, corpus), "--output", str(output), *options]
    start, cpu = time.monotonic(), cpu_of_children()
    process = subprocess.Popen(
        [sys.executable, "-m", "bert_jax.commands.data", "clean", *words], stdout=subprocess.DEVNULL
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(proportional_bytes, process_tree(process.pid))))
        time.sleep(_INTERVAL)
    if process.returncode:
        raise SystemExit(process.returncode)
    return time.monotonic() - start, cpu_of_children() - cpu, peak


def common_bands(texts: list[str], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return bool[P]: the pairs of documents that agree in a band."""
    words, counts = word_hashes(texts)
    values, sizes = ngrams(words, counts, np.zeros(len(texts), np.uint64))
    bands = band_hashes(min_hashes(values, sizes, BANDS * ROWS), BANDS, ROWS)
    return (bands[:, first] == bands[:, second]).any(0)


def measure_near(paths: list[Path], count: int, folder: Path) -> tuple[dict[str, Any], bool]:
    """Return the figures of near duplicates, and True if they reach the bars."""
    texts = families(paths, count, seed=1)
    source = folder / "near.txt"
    source.write_text("\n\n".join(texts) + "\n")
    run_clean([source], folder / "near", "--boilerplate", "0", "--encoding", "off")
    kept = set((folder / "near" / "near.txt").read_text().strip("\n").split("\n\n"))
    is_kept = np.array([text in kept for text in texts])
    assert is_kept.sum() == len(kept)
    first, second, similarity = similar_pairs(texts, 0.05)
    best = np.zeros(len(texts))  # similarity of every document to the most similar kept one
    for a, b in ((first, second), (second, first)):
        chosen = is_kept[b]
        np.maximum.at(best, a[chosen], similarity[chosen])
    alike = similarity >= SIMILAR
    shared = common_bands(texts, first, second)
    dropped = ~is_kept
    edges = np.arange(0.1, 1.05, 0.1)
    by_similarity = {}
    for low, high in pairwise(edges):
        bin_ = (similarity >= low) & (similarity < high if high < 0.99 else similarity <= 1)
        if bin_.any():
            expected = 1 - (1 - similarity[bin_] ** ROWS) ** BANDS
            key = f"{low:.1f}"
            by_similarity[key] = [int(bin_.sum()), round(shared[bin_].mean(), 4), round(expected.mean(), 4)]
    figures = {
        "documents": len(texts), "pairs": int(alike.sum()), "dropped": int(dropped.sum()),
        "recall": round(1 - float((is_kept[first] & is_kept[second])[alike].mean()), 5),
        "recall_of_candidates": round(float(shared[alike].mean()), 5),
        "dropped_below_0.4": round(float((best[dropped] < LOW).mean()), 6),
        "dropped_below_0.7": round(float((best[dropped] < SIMILAR).mean()), 6),
        "pairs_candidates_expected_by_similarity": by_similarity,
    }  # fmt: skip
    passed = min(figures["recall"], figures["recall_of_candidates"]) >= LEAST_RECALL
    return figures, passed and figures["dropped_below_0.4"] <= MOST_LOW


def write_text(paths: list[Path], target: Path, size: int) -> None:
    """Write about ``size`` bytes of documents of 50 to 500 words to ``target``; one in five is a changed copy of an
    earlier document, and the text is used again, with other borders, until it suffices."""
    draw = random.Random(2)
    recent: list[list[str]] = []
    with target.open("w") as file:
        while file.tell() < size:
            for words in cut(paths, draw):
                documents = [words]
                if recent and draw.random() < 0.25:
                    documents.append(changed(draw.choice(recent), words, draw))
                recent = [*recent[-200:], words]
                for document in documents:
                    lines = (" ".join(document[i : i + 20]) for i in range(0, len(document), 20))
                    file.write("\n".join(lines) + "\n\n")
                if file.tell() >= size:
                    break


def measure_workers(paths: list[Path], size: int, folder: Path) -> tuple[dict[str, Any], bool]:
    """Return the digests of the output of 1, 2 and 4 processes and of Beam, and True if they are equal."""
    corpus = folder / "workers"
    corpus.mkdir()
    for number, path in enumerate((paths[:1], paths[1:2] or paths[:1])):
        write_text(path, corpus / f"{number}.txt", size // 2)
    digests, seconds = {}, {}
    for name, options in {
        **{f"{count} processes": ["--workers", str(count)] for count in (1, 2, 4)},
        "beam": ["--workers", "2", "--runner", "beam"],
    }.items():
        output = folder / f"out-{name.replace(' ', '-')}"
        seconds[name] = round(run_clean([corpus], output, *options)[0], 1)
        digests[name] = digest(output)[:16]
    return {"text_mb": size / 1e6, "digests": digests, "seconds": seconds}, len(set(digests.values())) == 1


def measure_memory(paths: list[Path], megabytes: int, folder: Path, workers: int) -> tuple[dict[str, Any], bool]:
    """Return time and memory for a tenth of the text and for all of it, and True if memory is bounded."""
    figures = []
    for size in (megabytes // 10, megabytes):
        source = folder / f"memory-{size}.txt"
        write_text(paths, source, size * 1_000_000)
        output = folder / f"memory-{size}"
        seconds, cpu, peak = run_clean([source], output, "--workers", str(workers))
        report = json.loads((output / "cleaned.json").read_text())
        figures.append(
            {
                "text_mb": size, "documents": report["documents_in"], "remaining": report["documents_out"],
                "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "peak_memory_mb": round(peak / 1e6, 1),
            }
        )  # fmt: skip
    ratio = figures[1]["peak_memory_mb"] / figures[0]["peak_memory_mb"]
    return {"workers": workers, "runs": figures, "memory_ratio": round(ratio, 3)}, ratio <= MOST_RATIO


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, nargs="+", required=True, help="text files, plain or .gz")
    parser.add_argument("--documents", type=int, default=12_000)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, help="file to which the JSON lines are appended")
    parser.add_argument("--only", nargs="+", choices=("near", "workers", "memory"))
    arguments = parser.parse_args()
    passed = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = {
            "near": lambda: measure_near(arguments.corpus, arguments.documents, folder),
            "workers": lambda: measure_workers(arguments.corpus, 20_000_000, folder),
            "memory": lambda: measure_memory(arguments.corpus, arguments.megabytes, folder, arguments.workers),
        }
        for case in arguments.only or cases:
            figures, is_good = cases[case]()
            line = json.dumps({"case": case, "passed": bool(is_good), **figures})
            print(line, flush=True)
            if arguments.output:
                with arguments.output.open("a") as file:
                    file.write(f"{line}\n")
            passed &= bool(is_good)
    return 0 if passed else 3


if __name__ == "__main__":
    sys.exit(main())
