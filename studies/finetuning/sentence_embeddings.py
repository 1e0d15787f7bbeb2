"""Sentence vectors on the dev set of STS-B: Spearman correlation of cosines with human scores.

    python studies/finetuning/sentence_embeddings.py --sts glue/STS-B --minilm FOLDER --tiny runs/quickstart \
        --peer_python PYTHON --workdir runs/sentence_embeddings

Measures a published model without training, by this library and by sentence-transformers'
EmbeddingSimilarityEvaluator; then the quickstart model: its vectors without training (mean, CLS, mean whitened on
the training sentences, Su et al. 2021), after training on STS-B by recipe sbert_sts, and the same network from
drawn weights, trained alike; TF-IDF (of the peer's scikit-learn, fitted on all sentences of both splits). The mean
cosine is that of all pairs of sentences. Finished training runs below ``--workdir`` are not repeated. Exit code 3
if the first two differ in 4 decimals, or training does not gain 0.1 on the better of mean and CLS, or stays below
drawn weights.
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

import bert_jax
from bert_jax.contrib.analysis.anisotropy import anisotropy, counted_embeddings, fit_whitening, frequency_bands
from bert_jax.metrics.correlation import regression_scores
from bert_jax.metrics.score import value

REPOSITORY = Path(__file__).resolve().parents[2]
PEER = """
import json, sys
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sklearn.feature_extraction.text import TfidfVectorizer

given = json.load(sys.stdin)
first, second, scores = given["dev"]
found = EmbeddingSimilarityEvaluator(first, second, scores)(SentenceTransformer(given["model"], device="cpu"))
texts = TfidfVectorizer().fit([*first, *second, *given["train"]])
products = texts.transform(first).multiply(texts.transform(second)).sum(axis=1)
spearman = next(value for name, value in found.items() if name.endswith("spearman_cosine"))
print(json.dumps([float(spearman), [float(row[0]) for row in products.tolist()]]))
"""


def read_sts(path: Path) -> tuple[list[str], list[str], list[float]]:
    """Return both sentences and the score of every pair."""
    with path.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    first, second = ([row[column] for row in rows] for column in ("sentence1", "sentence2"))
    return first, second, [float(row["score"]) for row in rows]


def spearman(cosines: np.ndarray, scores: list[float]) -> float:
    """Return the Spearman correlation."""
    named = {score.name: score for score in regression_scores(np.array(scores), np.asarray(cosines))}
    return float(value(named["spearman"], len(scores)))


def cosines_of(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    return (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)


def trained(options: argparse.Namespace, name: str, *start: str) -> Path:
    """Return the workdir of a run of recipe sbert_sts, after making the run if necessary."""
    folder: Path = options.workdir / name
    command = [
        sys.executable, str(REPOSITORY / "run_finetune.py"), *start, "--data.dir", str(options.sts),
        "--config", str(REPOSITORY / "configs" / "finetune" / "sbert_sts.yaml"), "--workdir", str(folder),
        "--optimizer.learning_rate", str(options.learning_rate), "--training.num_epochs", str(options.epochs),
    ]  # fmt: skip
    if not (folder / "metrics.json").exists():
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def main() -> int:
    """Measure all models and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sts", required=True, type=Path, help="folder with train.tsv and dev.tsv of STS-B")
    parser.add_argument("--minilm", required=True, help="sentence-transformers folder")
    parser.add_argument("--tiny", required=True, type=Path, help="workdir of the quickstart")
    parser.add_argument("--peer_python", required=True, help="Python with sentence-transformers and scikit-learn")
    parser.add_argument("--workdir", required=True, type=Path, help="folder of the training runs")
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--epochs", type=float, default=4.0)
    options = parser.parse_args()
    first, second, scores = dev = read_sts(options.sts / "dev.tsv")
    texts = [*first, *second]
    train = [text for part in read_sts(options.sts / "train.tsv")[:2] for text in part]

    def row(name: str, vectors: np.ndarray) -> float:
        found = spearman(cosines_of(*np.split(vectors, 2)), scores)
        print(f"| {name} | {found:.4f} | {anisotropy(vectors):.3f} |", flush=True)
        return found

    print("| STS-B dev | Spearman | mean cosine of all pairs |\n|---|---|---|")
    minilm = bert_jax.load(options.minilm)
    ours = row("published model, as it is", minilm.embed(texts))
    given = json.dumps({"dev": dev, "train": train, "model": options.minilm})
    done = subprocess.run(
        [options.peer_python, "-c", PEER], input=given, check=True, stdout=subprocess.PIPE, text=True
    )
    theirs, products = json.loads(done.stdout.splitlines()[-1])
    print(f"| the same, sentence-transformers | {theirs:.4f} | |\n| TF-IDF | {spearman(products, scores):.4f} | |")
    tiny = bert_jax.load(options.tiny)
    before = max(row(f"quickstart, {way}", tiny.embed(texts, pooling=way)) for way in ("mean", "cls"))
    whitening = fit_whitening(tiny.embed(train, pooling="mean"))
    row("quickstart, mean, whitened", whitening.apply(tiny.embed(texts, pooling="mean")))
    model = tiny.config
    network = [
        *("--data.vocab", str(options.tiny / "vocab.txt"), "--model.vocab_size", str(model.vocab_size)),
        *("--model.hidden_size", str(model.hidden_size), "--model.num_layers", str(model.num_layers)),
        *("--model.num_attention_heads", str(model.num_attention_heads)),
        *("--model.intermediate_size", str(model.intermediate_size)),
        *("--model.max_position_embeddings", str(model.max_position_embeddings)),
    ]
    drawn = trained(options, "drawn", *network)
    learned = trained(options, "quickstart", "--init_from", str(options.tiny))
    after = row("quickstart, trained", bert_jax.load(learned / "best").embed(texts))
    random = row("drawn weights, trained", bert_jax.load(drawn / "best").embed(texts))
    print("\n| pieces by frequency on dev | mean cosine of all pairs | mean length |\n|---|---|---|")
    for name, loaded in (("published model", minilm), ("quickstart", tiny)):
        for band in frequency_bands(*counted_embeddings(loaded, texts)):
            ranks = f"{band.first:,} to {band.last:,}"
            print(f"| {name}, {ranks} | {band.anisotropy:.3f} | {band.mean_length:.3f} |")
    good = round(ours, 4) == round(theirs, 4) and after >= before + 0.1 and after > random
    return 0 if good else 3


if __name__ == "__main__":
    sys.exit(main())
