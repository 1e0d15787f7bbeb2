"""Questions to paragraphs: vectors alone, vectors and a cross-encoder for the best 50, a cross-encoder for all.

    python studies/rerank/rerank.py --model MINILM --squad train-v1.1.json --folder DIR [--questions 200]

The paragraphs are those of 12 articles of SQuAD 1.1, and the questions are drawn from them. The cross-encoder is
--model, tuned on pairs of question and paragraph of the other articles, half of them right, half with one of the 50
nearest wrong paragraphs. Reported are the mean reciprocal rank among all paragraphs, with a 95% bootstrap interval,
and seconds a question, without the encoding of the paragraphs. The last row, all pairs, is measured on --sample
questions.

About 25 minutes of two processors for the first run; a tuned cross-encoder in DIR is used again. Exit code 3 unless
the best 50 in the order of the cross-encoder have a higher reciprocal rank than the vectors, by two standard errors
of the paired differences.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
from small_runs import cells, command

from bert_jax.contrib.analysis.texts_or_vectors import Collection
from bert_jax.contrib.analysis.neighbors import Hits, nearest
from bert_jax.contrib.analysis.retrieval import reranked
from bert_jax.hashing import permutation
from bert_jax.inference.loaded import LoadedModel, load
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

ARTICLES, PAIRS, CANDIDATES, RESAMPLES = 12, 8000, 50, 1000


def questions_of(articles: Sequence[Any]) -> tuple[list[str], list[tuple[str, int]]]:
    """Return the paragraphs of articles, and each question with the number of its paragraph."""
    paragraphs = [one["context"] for article in articles for one in article["paragraphs"]]
    numbers = {text: i for i, text in enumerate(paragraphs)}
    questions = [
        (qa["question"].strip(), numbers[one["context"]])
        for article in articles for one in article["paragraphs"] for qa in one["qas"]
    ]  # fmt: skip
    return paragraphs, questions


def write_pairs(path: Path, articles: Sequence[Any], model: LoadedModel) -> None:
    """Write pairs of questions with their paragraph (label 1) and with another one (label 0), which is drawn from
    the nearest, of which the cross-encoder has to choose."""
    paragraphs, questions = questions_of(articles)
    chosen = [questions[i] for i in permutation(len(questions), 0)[: PAIRS // 2]]
    vectors = model.embed(paragraphs)
    found = nearest(model.embed([text for text, _ in chosen]), vectors, CANDIDATES)
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for (question, own), hits in zip(chosen, found, strict=True):
            other = int(rng.choice(hits.rows[hits.rows != own]))
            for label, row in ((1, own), (0, other)):
                line = {"text": question, "text_pair": paragraphs[row], "label": str(label)}
                file.write(json.dumps(line) + "\n")


def tuned(folder: Path, model: Path, articles: Sequence[Any]) -> Path:
    """Return the workdir of the cross-encoder, which is trained if it is missing."""
    workdir = folder / "cross"
    if not (workdir / "report_data.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_pairs(folder / "pairs.jsonl", articles, load(model))
        options = {
            "init_from": model, "task.kind": "classification", "task.max_length": 192,
            "data.train": folder / "pairs.jsonl", "training.num_epochs": 1.0, "optimizer.learning_rate": 1e-4,
            "training.global_batch_size": 32,
        }  # fmt: skip
        command("run_finetune.py", options, workdir)
    return workdir


def reciprocal_ranks(found: Sequence[Hits], right: Sequence[int]) -> np.ndarray:
    places = [np.flatnonzero(hits.rows == own) for hits, own in zip(found, right, strict=True)]
    return np.array([1 / (1 + place[0]) if len(place) else 0.0 for place in places])


def interval(values: np.ndarray) -> str:
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model of vectors, which is tuned too")
    parser.add_argument("--squad", type=Path, required=True, help="train-v1.1.json")
    parser.add_argument("--folder", type=Path, required=True, help="pairs and the cross-encoder")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--sample", type=int, default=4, help="questions of the row of all pairs")
    parser.add_argument("--output", type=Path, help="write the line there")
    options = parser.parse_args()
    keep_to_cpu_without_accelerator()
    articles = json.loads(options.squad.read_text())["data"]
    held_out, others = articles[:ARTICLES], articles[ARTICLES:]
    cross, model = load(tuned(options.folder, options.model, others)), load(options.model)
    paragraphs, questions = questions_of(held_out)
    drawn = [questions[i] for i in permutation(len(questions), 1)[: options.questions]]
    texts, right = [text for text, _ in drawn], [own for _, own in drawn]
    corpus = Collection("paragraphs", range(len(paragraphs)), texts=paragraphs)
    queries = Collection("questions", range(len(texts)), texts=texts)
    vectors = model.embed(paragraphs)

    began = time.perf_counter()
    alone = list(nearest(model.embed(texts), vectors, len(paragraphs)))
    seconds = [(time.perf_counter() - began) / len(texts)]
    best = [Hits(hits.rows[:CANDIDATES], hits.scores[:CANDIDATES]) for hits in alone]
    began = time.perf_counter()
    ordered = list(reranked(iter(best), queries, corpus, cross, "1", CANDIDATES))
    seconds.append(seconds[0] + (time.perf_counter() - began) / len(texts))
    few = Collection("questions", range(options.sample), texts=texts[: options.sample])
    began = time.perf_counter()
    every = list(reranked(iter(alone[: options.sample]), few, corpus, cross, "1", len(paragraphs)))
    seconds.append((time.perf_counter() - began) / options.sample)

    ranks = [reciprocal_ranks(found, right[: len(found)]) for found in (alone, ordered, every)]
    gain = ranks[1] - ranks[0]
    error = float(gain.std(ddof=1)) / math.sqrt(len(gain))
    names = ("vectors", f"and the best {CANDIDATES} reordered", f"all {len(paragraphs):,} pairs")
    print(cells(["", "questions", "mean reciprocal rank", "seconds a question"]))
    print(cells(["---"] * 4))
    line: dict[str, Any] = {"paragraphs": len(paragraphs), "gain": round(float(gain.mean()), 4)}
    for name, own, time_of in zip(names, ranks, seconds, strict=True):
        print(cells([name, len(own), interval(own), f"{time_of:.3f}"]))
        line[name] = {"mrr": round(float(own.mean()), 4), "n": len(own), "seconds": round(time_of, 4)}
    line["standard_errors"] = round(float(gain.mean()) / error, 2) if error else None
    print(json.dumps(line))
    if options.output:
        options.output.write_text(json.dumps(line) + "\n")
    return 0 if gain.mean() > 2 * error else 3


if __name__ == "__main__":
    sys.exit(main())
