"""A binary index of text vectors against exact search: recall, memory, disk, queries per second.

    python studies/vector_index/vector_index.py --model MODEL --texts FILE [--count 10000] [--queries 500] [--output JSONL]

FILE has a text per line (.gz: packed). The first ``--count`` distinct texts of 30 to 300 characters are the corpus,
the next ``--queries`` are the queries. Recall is the share of the 10 nearest texts by the exact float32 search that
the index finds, with at most 100 texts rescored from disk; it is also given for the signs alone (Hamming distance),
for Hamming distance with rescoring but without the stage between, and for an index of bytes. The speed is that of a
query after the other on one thread, without embedding it, the median of 3 rounds; memory is what a process of its
own adds when it opens the index and searches, private (codes) and mapped from files (what the system may drop).

A JSON line. Exit code 3 below a recall of 0.95, or if the codes need more than 1/32 of the vectors' memory.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import numpy as np

from bert_jax.contrib.analysis import vector_index
from bert_jax.contrib.analysis.neighbors import Hits, nearest
from bert_jax.contrib.analysis.vector_index import VectorIndex, write_index
from bert_jax.inference.loaded import load
from bert_jax.inference.text_files import read_texts

RECALL, TOP = 0.95, 10
_MEMORY = """
import json, sys
from pathlib import Path
import numpy as np
from bert_jax.contrib.analysis.vector_index import VectorIndex

def used(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))

queries = np.load(sys.argv[2])
before = [used(kind) for kind in ("RssAnon", "RssFile")]
index = VectorIndex(Path(sys.argv[1]))
opened = [used(kind) for kind in ("RssAnon", "RssFile")]
list(index.search(queries, 10))
after = [used(kind) for kind in ("RssAnon", "RssFile")]
print(json.dumps([b - a for a, b in zip(before + before, opened + after)]))
"""


def recall(found: Iterable[Hits], exact: list[Hits]) -> float:
    return round(float(np.mean([len({*a.rows} & {*b.rows}) / TOP for a, b in zip(found, exact, strict=True)])), 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", required=True, help="a text per line")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--output", type=Path, help="file of JSON lines to add to")
    options = parser.parse_args()
    distinct = dict.fromkeys(text for text in read_texts((), options.texts, False) if 30 <= len(text) <= 300)
    texts = list(itertools.islice(distinct, options.count + options.queries))
    vectors = load(options.model).embed(texts)
    corpus, queries = vectors[: options.count], vectors[options.count :]
    exact = list(nearest(queries, corpus, TOP))
    with tempfile.TemporaryDirectory() as folder:
        path, bytes_path = Path(folder) / "binary", Path(folder) / "int8"
        write_index(path, texts[: options.count], corpus, "binary")
        write_index(bytes_path, texts[: options.count], corpus, "int8")
        index = VectorIndex(path)
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            found = list(index.search(queries, TOP))
            seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        for query in queries[:50]:
            list(nearest(query[None], corpus, TOP))
        exact_rate = 50 / (time.perf_counter() - began)
        with mock.patch.object(vector_index, "NEAR", vector_index.RESCORED):
            hamming = recall(index.search(queries, TOP), exact)
        with mock.patch.multiple(vector_index, NEAR=TOP, RESCORED=TOP):
            alone = recall(index.search(queries, TOP), exact)
        of_bytes = recall(VectorIndex(bytes_path).search(queries, TOP), exact)
        np.save(Path(folder) / "queries.npy", queries)
        words = [sys.executable, "-c", _MEMORY, str(path), str(Path(folder) / "queries.npy")]
        opened = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        disk = {file.name: file.stat().st_size for file in path.iterdir()}
    line = {
        "model": Path(options.model).name, "texts": len(corpus), "queries": len(queries), "width": corpus.shape[1],
        "recall": recall(found, exact), "recall_hamming_rescored": hamming, "recall_signs_alone": alone,
        "recall_int8": of_bytes, "queries_per_second": round(len(queries) / statistics.median(seconds)),
        "exact_queries_per_second": round(exact_rate), "vector_bytes": corpus.nbytes, "code_bytes": index.memory,
        "times_smaller": round(corpus.nbytes / index.memory, 1), "private_bytes_opened": opened[0],
        "private_bytes_searched": opened[2], "mapped_bytes_searched": opened[3], "disk_bytes": disk,
    }  # fmt: skip
    print(json.dumps(line))
    if options.output:
        with options.output.open("a") as output:
            output.write(json.dumps(line) + "\n")
    return 0 if line["recall"] >= RECALL and line["times_smaller"] >= 32 else 3


if __name__ == "__main__":
    sys.exit(main())
