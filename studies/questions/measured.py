"""Questions that are measured on a model at hand (``--model``), on the pairs of STS-B (``--sts``), or by time."""

import argparse
import csv
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from question import Figures, question

import bert_jax
from bert_jax.config import ExecutionConfig, ModelConfig
from bert_jax.contrib.analysis.anisotropy import anisotropy, counted_embeddings, fit_whitening, frequency_bands
from bert_jax.inference.loaded import LoadedModel, prepare
from bert_jax.interop.readers import read_weights
from bert_jax.metrics.correlation import regression_scores
from bert_jax.metrics.score import value
from bert_jax.model import BertModel, to_canonical
from bert_jax.model.layers import SelfAttention
from bert_jax.model.task_layers import BiLstm
from bert_jax.training.state import initial_params

SENTENCES = 10_000  # of the question of Sentence-BERT


@functools.cache
def model_at(path: Path) -> LoadedModel:
    """Return the model of ``--model``."""
    return bert_jax.load(path)


@functools.cache
def sts(folder: Path, split: str) -> tuple[list[str], list[str], np.ndarray]:
    """Return both sentences and the scores of the pairs in ``split`` (train or dev) of STS-B."""
    with (folder / f"{split}.tsv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    first, second = ([row[column] for row in rows] for column in ("sentence1", "sentence2"))
    return first, second, np.array([float(row["score"]) for row in rows])


def spearman(first: np.ndarray, second: np.ndarray, scores: np.ndarray) -> float:
    """Return the Spearman correlation of the cosines of vectors with ``scores``."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    named = {score.name: score for score in regression_scores(scores, cosines)}
    return float(value(named["spearman"], len(scores)))


def sentences_of(folder: Path) -> list[str]:
    """Return the different sentences of the training pairs."""
    first, second, _ = sts(folder, "train")
    return list(dict.fromkeys([*first, *second]))


# ------------------------------------------------------------------ heads


def distance_of_heads(model: LoadedModel, texts: Sequence[str]) -> float:
    """Return the mean Jensen-Shannon divergence, in nats, between the attention of two heads of a layer at a token,
    over all pairs of heads."""
    sums, count = 0.0, 0
    for maps_LxAxSxT in model.attentions(list(texts)):
        p = np.maximum(np.asarray(maps_LxAxSxT, np.float64), 1e-12)
        heads = p.shape[1]
        for i in range(heads):
            for j in range(i):
                mean = (p[:, i] + p[:, j]) / 2
                of_both = [(one * np.log(one / mean)).sum(-1) for one in (p[:, i], p[:, j])]
                sums, count = sums + float(np.mean(of_both)), count + 1
    return sums / count


@question(
    "1", "measured", "Why several heads? Do they see different things?",
    {"distance of the heads / with random weights": (2, np.inf)},
)  # fmt: skip
def heads(options: argparse.Namespace) -> Figures:
    """Mean distance between the attention maps of two heads of a layer (0: equal, 0.693: no common token), of the
    model and of the same network with random weights."""
    texts = sts(options.sts, "dev")[0][:100]
    weights = read_weights(options.model)
    network = BertModel(weights.spec.model, ExecutionConfig(vocab_multiple=1), weights.spec.heads,
                        weights.spec.sentence)  # fmt: skip
    drawn = to_canonical(initial_params(network, 0), weights.spec.model.vocab_size)
    random = prepare(dataclasses.replace(weights, params={name: np.asarray(x) for name, x in drawn.items()}))
    trained, untrained = (distance_of_heads(model, texts) for model in (model_at(options.model), random))
    return {
        "distance of the heads": trained, "with random weights": untrained,
        "distance of the heads / with random weights": trained / untrained,
    }  # fmt: skip


# ------------------------------------------------------------------ sentence vectors


@question(
    "16", "measured", "[CLS], the mean or the maximum of the tokens?",
    {"mean - cls": (0, 1), "mean - max": (-0.02, 1)},
)  # fmt: skip
def poolings(options: argparse.Namespace) -> Figures:
    """Spearman correlation of cosines with the scores of STS-B's dev pairs, without training on them."""
    first, second, scores = sts(options.sts, "dev")
    found = {}
    for pooling in ("cls", "mean", "max"):
        a, b = (model_at(options.model).embed(texts, pooling=pooling) for texts in (first, second))
        found[pooling] = spearman(a, b, scores)
    return found | {f"mean - {other}": found["mean"] - found[other] for other in ("cls", "max")}


@question(
    "20", "measured", "What makes the vectors anisotropic, and what cures it?",
    {"mean cosine, mean removed": (-0.02, 0.02), "mean cosine, whitened": (-0.02, 0.02),
     "STS-B, whitened": (0.6, 1)},
)  # fmt: skip
def anisotropic_vectors(options: argparse.Namespace) -> Figures:
    """Mean cosine of the training sentences of STS-B and Spearman correlation on its dev pairs: of mean vectors,
    without their mean, and whitened (Su et al. 2021); mean and whitening of the training sentences. Bands of
    pieces by frequency: norm and mean cosine of their embeddings."""
    model, texts = model_at(options.model), sentences_of(options.sts)
    first, second, scores = sts(options.sts, "dev")
    train, a, b = (model.embed(each, pooling="mean", normalize=False) for each in (texts, first, second))
    whitening, mean = fit_whitening(train), train.mean(axis=0)
    cures: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "raw": lambda x: x, "mean removed": lambda x: x - mean, "whitened": whitening.apply,
    }  # fmt: skip
    found = {}
    for name, cure in cures.items():
        found[f"mean cosine, {name}"] = anisotropy(cure(train))
        found[f"STS-B, {name}"] = spearman(cure(a), cure(b), scores)
    for band in frequency_bands(*counted_embeddings(model, texts)):
        found[f"pieces {band.first} to {band.last}: norm"] = band.mean_length
        found[f"pieces {band.first} to {band.last}: mean cosine"] = band.anisotropy
    return found


@question(
    "Sentence-BERT", "measured", "65 hours or 5 seconds for the most similar of 10,000 sentences?",
    {"hours by pairs / hours by vectors": (1000, np.inf)},
)  # fmt: skip
def sixty_five_hours(options: argparse.Namespace) -> Figures:
    """The most similar pair of 10,000 sentences (Reimers and Gurevych 2019, section 1). By vectors: all sentences
    are embedded, and all cosines computed; both are measured. By pairs: the encoder reads both sentences of each
    pair together; the time of 400 pairs, times the number of pairs. Times are those of the processor."""
    model, texts = model_at(options.model), sentences_of(options.sts)[:SENTENCES]
    if len(texts) < SENTENCES:
        raise ValueError(f"--sts {options.sts}: {len(texts)} different sentences; {SENTENCES} are needed")
    rng = np.random.default_rng(0)
    pairs = [f"{texts[i]} {texts[j]}" for i, j in rng.integers(0, SENTENCES, (400, 2))]
    model.embed(pairs[:100])  # compiles
    model.embed(texts[:100])
    began = time.process_time()
    model.embed(pairs)
    pair = (time.process_time() - began) / len(pairs)
    began = time.process_time()
    vectors = model.embed(texts, normalize=True)
    embedded = time.process_time() - began
    best = max(float(np.triu(vectors[i : i + 500] @ vectors.T, i + 1).max()) for i in range(0, SENTENCES, 500))
    whole = time.process_time() - began
    number = SENTENCES * (SENTENCES - 1) // 2
    return {
        "seconds by vectors": whole, "of them for the vectors": embedded, "cosine of the nearest pair": best,
        "pairs": float(number), "milliseconds of a pair": 1000 * pair, "hours by pairs": number * pair / 3600,
        "hours by pairs / hours by vectors": number * pair / whole,
    }  # fmt: skip


# ------------------------------------------------------------------ time


@question(
    "9", "measured", "What does a Transformer compute at once, and an LSTM one after the other?",
    {"LSTM / attention at 512": (1.5, np.inf)},
)  # fmt: skip
def parallel(_: argparse.Namespace) -> Figures:
    """Time of one row of n tokens of width 256, in one layer of attention and in a two-layer BiLSTM of 128 a
    direction; the fastest of 15, in turns. The BiLSTM has n steps after each other, attention none."""
    config = ModelConfig(
        hidden_size=256, num_attention_heads=4, intermediate_size=1024, max_position_embeddings=512
    )
    execution = ExecutionConfig()
    found: dict[str, float] = {}
    for length in (32, 128, 512):
        x = jax.random.normal(jax.random.key(0), (1, length, 256))
        ids = jnp.ones((1, length), jnp.int32)
        tokens = {"sequence_ids": ids, "position_ids": jnp.arange(length)[None]}
        layer, lstm = SelfAttention(config, execution), BiLstm(128, config)
        attention_params = layer.init(jax.random.key(1), x, tokens, None, None, None)
        lstm_params = lstm.init(jax.random.key(1), x, ids)

        def attend(layer: SelfAttention = layer, params: object = attention_params, x: jax.Array = x,
                   tokens: dict[str, jax.Array] = tokens) -> Callable[[], jax.Array]:  # fmt: skip
            run = jax.jit(lambda x: layer.apply(params, x, tokens, None, None, None))
            return lambda: run(x)

        def recur(lstm: BiLstm = lstm, params: object = lstm_params, x: jax.Array = x,
                  ids: jax.Array = ids) -> Callable[[], jax.Array]:  # fmt: skip
            run = jax.jit(lambda x: lstm.apply(params, x, ids))
            return lambda: run(x)

        seconds: dict[str, list[float]] = {"attention": [], "LSTM": []}
        runs = {"attention": attend(), "LSTM": recur()}
        for repetition in range(16):
            for name, run in runs.items():
                began = time.perf_counter()
                jax.block_until_ready(run())
                if repetition:  # the first one compiles
                    seconds[name].append(time.perf_counter() - began)
        fastest = {name: min(values) for name, values in seconds.items()}
        found |= {f"{name}, {length} tokens: milliseconds": 1000 * value for name, value in fastest.items()}
        found[f"LSTM / attention at {length}"] = fastest["LSTM"] / fastest["attention"]
    return found
