"""Figures of docs/articles.md that follow from definitions or from other figures in seconds.

    python studies/articles/articles.py parameters
    python studies/articles/articles.py pairs
    python studies/articles/articles.py poolings --model MODEL --sts DIR [--output JSONL]

parameters: the formula 30k·H + 12·L·H² beside the parameters of BERT, part by part (exit code 1 unless the parts are
all of them). pairs: the share of random sentence pairs by the number of sentences of a document (exit code 1 unless
it is that of the rule within four standard errors). poolings: Spearman's
correlation on STS-B dev with each pooling.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

import bert_jax
from bert_jax.config import ModelConfig, PretrainConfig
from bert_jax.config.pretrain import DataConfig
from bert_jax.contrib.planner.arithmetic import parameter_count
from bert_jax.metrics.correlation import regression_scores
from bert_jax.metrics.resampling import confidence_intervals, paired_bootstrap
from data_pipeline.build.instances import IS_RANDOM, InstanceSettings, Segment, plan_document

POOLINGS = ("cls", "mean", "max")
SENTENCE = 20  # tokens of a sentence of the documents of ``pairs``
MODELS = {
    "BERT-base": ModelConfig(),
    "BERT-large": ModelConfig(num_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096),
}


def counted(model: ModelConfig) -> int:
    """Return the number of parameters of ``model`` with the heads of pretraining, traced from the network."""
    return parameter_count(PretrainConfig(model=model))


def parts(model: ModelConfig) -> dict[str, int]:
    """Return the parameters of BERT by part. The first two are those of the formula."""
    width, layers = model.hidden_size, model.num_layers
    return {
        "30,000 word embeddings": 30_000 * width,
        "matrices of the layers, 12·L·H²": 12 * layers * width**2,
        f"{model.vocab_size - 30_000} more word embeddings": (model.vocab_size - 30_000) * width,
        "positions and segments": (model.max_position_embeddings + model.type_vocab_size) * width,
        "biases and LayerNorms of the layers": 13 * layers * width,
        "LayerNorm of the embeddings": 2 * width,
        "pooler": width**2 + width,
        "heads of MLM and NSP": width**2 + width + 2 * width + model.vocab_size + 2 * width + 2,
    }


def parameters() -> bool:
    """Print the parameters of BERT-base and BERT-large by part; return True if the parts are all of them."""
    whole = True
    for name, model in MODELS.items():
        found, total = parts(model), counted(model)
        formula = sum(list(found.values())[:2])
        print(f"{name}: {total:,} parameters; the formula has {formula:,}, {formula / total:.1%}")
        for part, count in found.items():
            print(f"  {count:>11,}  {part}")
        whole &= sum(found.values()) == total
    base = MODELS["BERT-base"]
    by_heads = {heads: counted(replace(base, num_attention_heads=heads)) for heads in (1, 12, 96)}
    print("BERT-base by heads:", ", ".join(f"{heads}: {count:,}" for heads, count in by_heads.items()))
    more = counted(replace(base, tied_output=False)) - counted(base)
    print(f"an output table of its own: {more:,} more, {more / counted(base):.1%}")
    return whole and len(set(by_heads.values())) == 1


def pairs() -> bool:
    """Print the share of random pairs of documents with equal sentences; return True if it is that of the rule."""
    data = DataConfig(seq_length=128, short_sequence_fraction=0.0)
    settings = InstanceSettings(data=data, cls_id=2, sep_id=3, pad_id=0, mask_id=4, vocab_size=1000)
    fits = True
    print(f"sentences of {SENTENCE} tokens, rows of {data.seq_length}")
    print("sentences  rows with a single one  random pairs  (1 + q) / 2")
    for sentences in (1, 2, 4, 8, 16, 64):
        rows = []
        for document in range(40_000 // sentences):
            rows += plan_document(
                np.full(sentences, SENTENCE), document=document, pass_number=0, first_token=0, settings=settings,
                random_next=lambda *_: Segment(0, SENTENCE),
            )  # fmt: skip
        # A row has a single sentence if A begins with the last sentence of its document.
        single = float(np.mean([row[2] == (sentences - 1) * SENTENCE for row in rows]))
        random = float(np.mean([row[-1] == IS_RANDOM for row in rows]))
        print(f"{sentences:9}  {single:22.3f}  {random:12.3f}  {(1 + single) / 2:11.3f}")
        fits &= abs(random - (1 + single) / 2) < 4 * np.sqrt(0.25 / len(rows))
    return fits


def poolings(model: str, sts: Path, output: Path | None) -> bool:
    """Print Spearman's correlation of cosines and scores on the dev split of STS-B with each pooling, and that of the
    mean minus that of the others; with 95% bootstrap intervals."""
    fields = [line.split("\t") for line in (sts / "dev.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    gold, loaded = np.array([float(row[9]) for row in fields]), bert_jax.load(model)
    scores = {}
    for pooling in POOLINGS:
        first, second = (
            loaded.embed([row[i] for row in fields], pooling=pooling, normalize=True) for i in (7, 8)
        )
        (scores[pooling],) = (
            score for score in regression_scores(gold, (first * second).sum(1)) if score.name == "spearman"
        )
    intervals = confidence_intervals(list(scores.values()), len(gold), seed=0)
    line = {"model": Path(model).name, "pairs": len(gold)}
    for pooling, (value, low, high) in zip(scores, intervals, strict=True):
        print(f"{pooling}: {value:.3f} [{low:.3f}, {high:.3f}]")
        line[pooling] = round(value, 4)
    for other in ("cls", "max"):
        more = paired_bootstrap(scores["mean"], scores[other], len(gold), seed=0)
        print(f"mean - {other}: {more.difference:+.3f} [{more.low:+.3f}, {more.high:+.3f}]")
        line[f"mean - {other}"] = [round(number, 4) for number in more[:3]]
    if output:
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return True


def main() -> None:
    """Print the figures that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="figure", required=True)
    plain: dict[str, Callable[[], bool]] = {"parameters": parameters, "pairs": pairs}
    for name, function in plain.items():
        commands.add_parser(name, help=function.__doc__)
    pooled = commands.add_parser("poolings", help=poolings.__doc__)
    pooled.add_argument("--model", required=True, help="folder of a model")
    pooled.add_argument("--sts", required=True, type=Path, help="folder with STS-B's dev.tsv")
    pooled.add_argument("--output", type=Path, help="file to which a line of JSON is added")
    arguments = parser.parse_args()
    if arguments.figure == "poolings":
        fits = poolings(arguments.model, arguments.sts, arguments.output)
    else:
        fits = plain[arguments.figure]()
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    main()
