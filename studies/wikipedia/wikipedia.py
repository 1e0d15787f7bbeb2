"""Accuracy and speed of ``bert-data wikipedia`` on a dump.

    python studies/wikipedia/wikipedia.py --dump DUMP.xml.bz2 [--workers 2] [--repeat 10]

Reference: paragraphs of 50 articles of the dump that gensim 4.4.0 ships (gensim/test/test_data, the start of enwiki
pages-articles of 2016), drawn at random from the lines of wikitext that look like prose, three an article, and
rendered by hand, up to about 500 characters each. The text is not part of the repository:
``studies/wikipedia/wikipedia_reference.json`` holds the number of words and a hash of the words of each clause. ``--hash
TEXT`` makes that file from the text: ``@@ title``, then paragraphs; lines that start with ``- `` are captions, list
lines, cells and comments, which must not occur.

1. Share of the words of the reference in the output, clause by clause and in order; texts that must not occur.
2. Lines with left-over markup, of the articles and of copies with random damage (2% of the marks removed), at least
   10,000 lines; nowiki elements and the entities of marks are removed before.
3. Speed of the command, start included, on the dump repeated ``--repeat`` times, in MB (10^6 bytes) of XML a
   second; memory of all its processes for the dump once and repeated.

Exit code 3 if a bar is missed: 98% of the words; no text that must not occur; 0 lines; 3 MB/s.
"""

import argparse
import bz2
import hashlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from build_speed import process_tree, proportional_bytes

from data_pipeline.contrib.wikipedia.dump import Dump, Page
from data_pipeline.contrib.wikipedia.paragraphs import article_paragraphs
from data_pipeline.text.compressed import read_blocks

REFERENCE = Path("studies/wikipedia/wikipedia_reference.json")
LEFT_OVER = re.compile(r"\[\[|\]\]|\{\{|\}\}|\{\||\|\}|'''|</?[A-Za-z][^<>]*>")
MARK = re.compile(r"\[\[|\]\]|\{\{|\}\}|\{\||\|\}|'''?|</?[A-Za-z][^<>]*>|<!--|-->")
LITERAL = re.compile(r"<nowiki>.*?</nowiki>|&(?:lt|gt|#\d+|#x[0-9a-f]+);", re.IGNORECASE | re.DOTALL)
SENTENCE = re.compile(r"(?<=[.!?:;,]) ")
LEAST_SHARE, LEAST_LINES, LEAST_SPEED, DAMAGE = 0.98, 10_000, 3.0, 0.02


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFC", text).lower())


def digest(sequence: list[str]) -> str:
    """Return a hash of a sequence of words."""
    return hashlib.blake2b(" ".join(sequence).encode(), digest_size=8).hexdigest()


def hashed(path: Path) -> dict[str, dict[str, list[list[Any]]]]:
    """Return the reference of the sentences in ``path``: per article, [number of words, hash] of each."""
    reference: dict[str, dict[str, list[list[Any]]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("@@ "):
            article = reference.setdefault(line[3:], {"kept": [], "absent": []})
        elif line:
            is_absent = line.startswith("- ")
            # Short clauses are joined, so that a part has at least six words.
            parts: list[str] = []
            for part in [line[2:]] if is_absent else SENTENCE.split(line):
                short = parts and len(words(parts[-1])) < 6
                parts[-1:] = [f"{parts[-1]} {part}"] if short else [*parts[-1:], part]
            found = [words(part) for part in parts]
            article["absent" if is_absent else "kept"] += [[len(part), digest(part)] for part in found if part]
    return reference


def compare(reference: dict[str, dict[str, list[list[Any]]]], texts: dict[str, list[str]]) -> dict[str, Any]:
    """Count the words of the reference that stand in ``texts`` in order, and the texts that must not be there."""
    total = kept = absent = present = sentences = 0
    missed = []
    for title, article in reference.items():
        sequence = [word for line in texts.get(title, []) for word in words(line)]
        start = 0
        for length, value in article["kept"]:
            total, sentences = total + length, sentences + 1
            place = find(sequence, length, value, start)
            if place is None:
                missed.append(f"{title}: part {article['kept'].index([length, value]) + 1}")
            else:
                kept, start = kept + length, place + length
        for length, value in article["absent"]:
            absent += 1
            present += find(sequence, length, value, 0) is not None
    return {
        "articles": len(reference), "parts": sentences, "words": total, "share_kept": round(kept / total, 4),
        "texts_not_allowed": absent, "found_of_them": present, "missed": missed,
    }  # fmt: skip


def find(sequence: list[str], length: int, value: str, start: int) -> int | None:
    """Return the first place from ``start`` on where ``length`` words have the hash ``value``."""
    places = range(start, len(sequence) - length + 1)
    return next((place for place in places if digest(sequence[place : place + length]) == value), None)


def damaged(text: str, rng: random.Random) -> str:
    """Remove a random part of the marks."""
    return MARK.sub(lambda mark: "" if rng.random() < DAMAGE else mark.group(), text)


def articles(path: Path) -> tuple[list[Page], dict[str, str]]:
    """Return the articles of a dump and its namespaces."""
    dump = Dump(path)
    pages = [page for page in dump.pages() if page.namespace == "0" and not page.is_redirect]
    return pages, dump.namespaces


def left_over(pages: list[Page], namespaces: dict[str, str]) -> dict[str, Any]:
    """Count lines with left-over markup, in the articles and in damaged copies of them."""
    rng = random.Random(0)
    lines = found = copies = 0
    while lines < LEAST_LINES:
        for page in pages:
            text = LITERAL.sub(" ", page.text)
            paragraphs = article_paragraphs(damaged(text, rng) if copies else text, namespaces, Counter())
            lines += len(paragraphs)
            found += sum(LEFT_OVER.search(paragraph) is not None for paragraph in paragraphs)
        copies += 1
    return {"lines": lines, "damaged_copies": copies - 1, "lines_with_markup": found}


def repeated(path: Path, times: int) -> Iterator[bytes]:
    """Yield the XML of a dump with its pages ``times`` times."""
    xml = b"".join(read_blocks(path))
    first, last = xml.index(b"<page>"), xml.rindex(b"</page>") + len(b"</page>")
    yield xml[:first]
    for _ in range(times):
        yield xml[first:last] + b"\n"
    yield xml[last:]


def measure(path: Path, times: int, workers: int) -> dict[str, Any]:
    """Run the command on the dump repeated ``times`` times; return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "dump.xml.bz2"
        size = 0
        with bz2.open(dump, "wb", compresslevel=9) as file:
            for block in repeated(path, times):
                size += file.write(block)
        command = [
            sys.executable,
            "-m",
            "bert_jax.commands.data",
            "wikipedia",
            str(dump),
            "--output",
            f"{folder}/text",
        ]
        start = time.monotonic()
        process = subprocess.Popen([*command, "--workers", str(workers)], stdout=subprocess.DEVNULL)
        peak = 0
        while process.poll() is None:
            peak = max(peak, sum(map(proportional_bytes, process_tree(process.pid))))
            time.sleep(0.05)
        seconds = time.monotonic() - start
        if process.returncode:
            raise SystemExit(process.returncode)
    return {
        "xml_mb": round(size / 1e6, 1), "workers": workers, "seconds": round(seconds, 2),
        "mb_per_second": round(size / 1e6 / seconds, 2), "peak_memory_mb": round(peak / 1e6, 1),
    }  # fmt: skip


def main() -> int:
    """Measure, print JSON lines and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dump", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--hash", type=Path, help="sentences of a reference: write the file of hashes and end")
    arguments = parser.parse_args()
    if arguments.hash:
        lines = (f'"{title}": {json.dumps(parts)}' for title, parts in hashed(arguments.hash).items())
        REFERENCE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return 0
    pages, namespaces = articles(arguments.dump)
    texts = {page.title: article_paragraphs(page.text, namespaces, Counter()) for page in pages}
    share = compare(json.loads(REFERENCE.read_text(encoding="utf-8")), texts)
    print(json.dumps(share, ensure_ascii=False), flush=True)
    markup = left_over(pages, namespaces)
    print(json.dumps(markup), flush=True)
    once, large = (measure(arguments.dump, times, arguments.workers) for times in (1, arguments.repeat))
    print(json.dumps(once))
    print(json.dumps(large))
    passed = share["share_kept"] >= LEAST_SHARE and not share["found_of_them"] and not markup["lines_with_markup"]
    return 0 if passed and large["mb_per_second"] >= LEAST_SPEED else 3


if __name__ == "__main__":
    sys.exit(main())
