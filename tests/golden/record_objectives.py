"""Records losses and gradients of torch, transformers and sentence-transformers on given logits and embeddings.

    pip install -r tests/golden/requirements.lock      (an environment of its own)
    python tests/golden/record_objectives.py           writes tests/golden/fixtures/objectives.npz

``input/NAME`` are the inputs; ``CASE/loss`` and ``CASE/gradient`` what came out, the gradient being that of the
embeddings or logits. float64 arithmetic on float32 values, stored as float32.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.util import dot_score
from transformers.loss.loss_utils import ForQuestionAnsweringLoss, ForSequenceClassificationLoss

FIXTURE = Path(__file__).parent / "fixtures" / "objectives.npz"
SPAN_LENGTHS = (5, 7, 4)


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(6, 3, 8))  # (anchor, positive, hard negative)
    embeddings[1, 1] = embeddings[0, 1]  # two anchors with the same positive
    embeddings[2, 2] *= 9  # far enough for a triplet without loss
    return {
        "embeddings": embeddings.astype(np.float32),
        "targets": np.array([0.0, 0.25, 0.25, 1.0, 0.5, 0.75], np.float32),
        "classifier": rng.normal(size=(24, 3)).astype(np.float32),
        "pair_labels": np.array([0, 2, 1, 1, 0, 2]),
        "logits": (3 * rng.normal(size=(7, 4))).astype(np.float32),
        "labels": np.array([0, 3, 1, 1, 2, 0, 1]),
        "class_weights": np.array([0.5, 2.0, 1.0, 3.5], np.float32),
        "label_sets": rng.integers(0, 2, (7, 4)).astype(np.float32),
        "numbers": rng.normal(size=(7, 4)).astype(np.float32),
        "span_logits": rng.normal(size=(2, sum(SPAN_LENGTHS))).astype(np.float32),
        "span_lengths": np.array(SPAN_LENGTHS),
        "span_targets": np.array([[1, 6, 0], [3, 6, 2]]),  # counted from each sequence's start
    }


class Given(torch.nn.Module):
    """In place of a model: its features are the embeddings."""

    device = torch.device("cpu")

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return features


def sentence_losses(given: dict[str, torch.Tensor]) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Losses of embeddings [examples, texts, width]."""

    def of(loss: torch.nn.Module, labels: str | None, texts: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def value(x: torch.Tensor) -> torch.Tensor:
            columns = [{"sentence_embedding": x[:, i]} for i in range(texts)]
            return loss(columns, None if labels is None else given[labels])

        return value

    model = Given()
    softmax = losses.SoftmaxLoss(model, embedding_dimension=8, num_labels=3).double()
    softmax.classifier.weight.data = given["classifier"].T.contiguous()
    softmax.classifier.bias.data.zero_()
    cosine_triplet = losses.TripletLoss(model, losses.TripletDistanceMetric.COSINE, triplet_margin=0.5)
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    return {
        "softmax": of(softmax, "pair_labels", 2),
        "cosine": of(losses.CosineSimilarityLoss(model), "targets", 2),
        "cosent": of(losses.CoSENTLoss(model), "targets", 2),
        "triplet": of(losses.TripletLoss(model), None, 3),
        "triplet_cosine": of(cosine_triplet, None, 3),
        "negatives": of(losses.MultipleNegativesRankingLoss(model), None, 3),
        "negatives_of_pairs": of(losses.MultipleNegativesRankingLoss(model), None, 2),
        "negatives_dot": of(losses.MultipleNegativesRankingLoss(model, 1.0, dot_score), None, 3),
        "negatives_symmetric": of(losses.MultipleNegativesRankingLoss(model, **both), None, 3),
    }


def logit_losses(given: dict[str, torch.Tensor]) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Losses of logits [examples, labels]."""

    def cross_entropy(**options: torch.Tensor | float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.nn.CrossEntropyLoss(**options)(x, given["labels"])

    def problem(kind: str, labels: str) -> Callable[[torch.Tensor], torch.Tensor]:
        config = SimpleNamespace(problem_type=kind, num_labels=4)
        return lambda x: ForSequenceClassificationLoss(given[labels], x, config)

    return {
        "cross_entropy": cross_entropy(),
        "cross_entropy_smoothed": cross_entropy(label_smoothing=0.1),
        "cross_entropy_weighted": cross_entropy(weight=given["class_weights"]),
        "cross_entropy_both": cross_entropy(weight=given["class_weights"], label_smoothing=0.1),
        "multilabel": problem("multi_label_classification", "label_sets"),
        "regression": problem("regression", "numbers"),
    }


def span_loss(given: dict[str, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Mean loss of sequences that transformers sees one at a time, of logits [start and end, tokens of all]."""

    def value(x: torch.Tensor) -> torch.Tensor:
        parts = zip(x.split(SPAN_LENGTHS, dim=1), given["span_targets"].T, strict=True)
        each = [ForQuestionAnsweringLoss(*part[:, None], *targets[:, None]) for part, targets in parts]
        return torch.stack(each).mean()

    return value


def main() -> None:
    arrays = inputs()
    given = {name: torch.from_numpy(x) for name, x in arrays.items()}
    given = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    cases = dict.fromkeys(sentence_losses(given), "embeddings") | dict.fromkeys(logit_losses(given), "logits")
    functions = sentence_losses(given) | logit_losses(given) | {"span": span_loss(given)}
    result = {f"input/{name}": x for name, x in arrays.items()}
    for name, function in functions.items():
        x = given[cases.get(name, "span_logits")].clone().requires_grad_()
        loss = function(x)
        loss.backward()
        result[f"{name}/loss"] = loss.detach().numpy().astype(np.float32)
        result[f"{name}/gradient"] = x.grad.numpy().astype(np.float32)
    np.savez_compressed(FIXTURE, **result)
    print(f"{FIXTURE.name}: {FIXTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
