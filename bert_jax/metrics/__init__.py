"""Metrics of fine-tuned models, each a ``Score`` that can be taken of any resample of the records."""

from bert_jax.metrics.chinese_qa import chinese_answer_scores
from bert_jax.metrics.classification import (
    auroc,
    average_precision,
    classification_scores,
    confusion_matrix,
    multi_label_scores,
)
from bert_jax.metrics.clustering import clustering_scores
from bert_jax.metrics.correlation import pearson, regression_scores, spearman
from bert_jax.metrics.entities import entities, joint_scores, tag_accuracy, tagging_scores
from bert_jax.metrics.resampling import (
    Difference,
    Interval,
    McNemar,
    confidence_interval,
    confidence_intervals,
    mcnemar,
    paired_bootstrap,
)
from bert_jax.metrics.retrieval import retrieval_scores
from bert_jax.metrics.score import Score, value
from bert_jax.metrics.squad import BestThresholds, squad_scores

__all__ = [
    "BestThresholds",
    "Difference",
    "Interval",
    "McNemar",
    "Score",
    "auroc",
    "average_precision",
    "chinese_answer_scores",
    "classification_scores",
    "clustering_scores",
    "confidence_interval",
    "confidence_intervals",
    "confusion_matrix",
    "entities",
    "joint_scores",
    "mcnemar",
    "multi_label_scores",
    "paired_bootstrap",
    "pearson",
    "regression_scores",
    "retrieval_scores",
    "spearman",
    "squad_scores",
    "tag_accuracy",
    "tagging_scores",
    "value",
]
