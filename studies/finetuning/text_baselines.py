"""TF-IDF with logistic regression (scikit-learn) on the files of classification recipes.

    python studies/finetuning/text_baselines.py --peer_python PYTHON \
        --data clinc150=DIR langid=DIR zh_reviews=DIR sick=DIR snips=DIR long_reviews=DIR [--run runs/clinc150]

RECIPE=DIR is a recipe of configs/finetune/ and the folder of its files; records and splits are those of
run_finetune.py (for snips the intents). Features are words and pairs of words; for langid and zh_reviews 1 to 3
characters; for a pair of texts a and b those of both, |a - b| and a * b. C = 10, otherwise scikit-learn's defaults.

Records with the label oos (CLINC150) are out of scope: accuracy is that of the others, among all classes, and AUROC
measures the separation of both groups by a score: the probability of the class oos, and 1 minus the greatest of the
others. The regression is also trained without oos. ``--run``: the same figures for the predictions of a finished
run of run_finetune.py.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import load_config
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.finetuning.artifacts import predicted_splits, read_predictions
from bert_jax.metrics.classification import auroc
from bert_jax.records import Record
from data_pipeline.tasks import read_splits

RECIPES = Path(__file__).resolve().parents[2] / "configs" / "finetune"
OUT_OF_SCOPE = "oos"
ANALYZERS = {"langid": ("char", (1, 3)), "zh_reviews": ("char", (1, 3))}
PEER = """
import json, sys
from scipy.sparse import hstack
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

given = json.load(sys.stdin)
analyzer, ngrams = given["analyzer"]
texts = [text for part in ("texts", "pairs") for text in given[part]["train"] if text]
vectorizer = TfidfVectorizer(analyzer=analyzer, ngram_range=tuple(ngrams), sublinear_tf=True).fit(texts)

def features(split):
    a = vectorizer.transform(given["texts"][split])
    if not any(given["pairs"][split]):
        return a
    b = vectorizer.transform(given["pairs"][split])
    return hstack([a, b, abs(a - b), a.multiply(b)]).tocsr()

model = LogisticRegression(C=10, max_iter=1000).fit(features("train"), given["labels"])
found = {s: model.predict_proba(features(s)).round(6).tolist() for s in given["texts"] if s != "train"}
print(json.dumps([model.classes_.tolist(), found]))
"""


def regression(python: str, recipe: str, splits: Mapping[str, Sequence[Record]]) -> dict[str, list[dict[str, Any]]]:
    """Return the label and the probability of each class, for every record outside the training files."""
    given = {
        "analyzer": ANALYZERS.get(recipe, ("word", (1, 2))),
        "texts": {name: [record.text for record in records] for name, records in splits.items()},
        "pairs": {name: [record.text_pair or "" for record in records] for name, records in splits.items()},
        "labels": [record.label for record in splits["train"]],
    }
    done = subprocess.run(
        [python, "-c", PEER], input=json.dumps(given), check=True, stdout=subprocess.PIPE, text=True
    )
    classes, found = json.loads(done.stdout)
    return {
        name: [
            {"gold": record.label, "probabilities": dict(zip(classes, row, strict=True))}
            for record, row in zip(splits[name], rows, strict=True)
        ]
        for name, rows in found.items()
    }


def scored(predictions: Sequence[Mapping[str, Any]]) -> str:
    """Return the accuracy in scope and, if some records are out of scope, the AUROC of both scores."""
    outside = np.array([one["gold"] == OUT_OF_SCOPE for one in predictions])
    right = [max(one["probabilities"], key=one["probabilities"].get) == one["gold"] for one in predictions]
    said = f"accuracy {100 * np.array(right)[~outside].mean():.2f} ({(~outside).sum():,})"
    if not outside.any():
        return said
    best = [max(p for name, p in one["probabilities"].items() if name != OUT_OF_SCOPE) for one in predictions]
    said += f"; AUROC out of scope ({outside.sum():,}): 1 - greatest {auroc(outside, 1 - np.array(best)):.4f}"
    if OUT_OF_SCOPE in predictions[0]["probabilities"]:
        of_class = np.array([one["probabilities"][OUT_OF_SCOPE] for one in predictions])
        said += f", class oos {auroc(outside, of_class):.4f}"
    return said


def main() -> int:
    """Print a line for each recipe and split."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer_python", required=True, help="Python with scikit-learn")
    parser.add_argument("--data", nargs="*", default=[], metavar="RECIPE=DIR")
    parser.add_argument("--run", nargs="*", default=[], type=Path, help="workdirs of finished runs with classes")
    options = parser.parse_args()
    for recipe, folder in (word.split("=", 1) for word in options.data):
        config = load_config(FinetuneConfig, ["--config", str(RECIPES / f"{recipe}.yaml"), "--data.dir", folder])
        splits = read_splits(config.data, config.task.kind)
        ways = {"": splits}
        inside = [record for record in splits["train"] if record.label != OUT_OF_SCOPE]
        if len(inside) < len(splits["train"]):
            ways[" without oos in training"] = {**splits, "train": inside}
        for way, chosen in ways.items():
            for name, predictions in regression(options.peer_python, recipe, chosen).items():
                print(f"{recipe}, TF-IDF{way}, {name}: {scored(predictions)}", flush=True)
    for folder in options.run:
        for split in predicted_splits(folder):
            predictions = [line for _, line in read_predictions(folder, split)]
            print(f"{folder}, {split}: {scored(predictions)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
