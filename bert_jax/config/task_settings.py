"""The settings of a task: how texts become model inputs, and how the outputs of the model become predictions.

A fine-tuning run stores them with its model; every command that predicts, and every export, reads them. This module
does not import jax.
"""

import math
from dataclasses import dataclass
from typing import Literal

Truncation = Literal["longest_first", "head", "tail", "head_tail", "key_sentences", "windows"]
TaskKind = Literal["classification", "regression", "multi_label", "qa", "tagging", "joint", "choice", "sentence"]
PairOrder = Literal["given", "both"]

# Kind of a task -> heads of a model whose outputs are its predictions (sentence: vectors of texts).
HEADS_OF: dict[TaskKind, tuple[str, ...]] = {
    "classification": ("sequence",), "regression": ("sequence",), "multi_label": ("sequence",), "qa": ("span",),
    "tagging": ("token",), "joint": ("sequence", "token"), "choice": ("choice",), "sentence": ("sentence",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Settings of a task, with the names, defaults and meanings of the options of fine-tuning."""

    kind: TaskKind
    # Longest input in tokens, special tokens included.
    max_length: int
    truncation: Truncation = "longest_first"
    head_share: float = 0.25
    window_overlap: int = 32
    max_windows: int = 0
    pair_order: PairOrder = "given"
    # Classes (sentence: of its classifier of pairs) in id order, as in the files, and their names in exports; no
    # names: as in the files.
    labels: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    crf: bool = False
    document_context: bool = False
    doc_stride: int = 128
    max_query_length: int = 64
    max_answer_length: int = 30
    n_best: int = 20
    no_answer: bool = False
    null_threshold: float = 0.0
    matryoshka: tuple[int, ...] = ()
    # qa.scoring and tagging.scoring: how predictions are compared with the right answers.
    answer_scoring: Literal["english", "chinese"] = "english"
    tag_scoring: Literal["conlleval", "strict"] = "conlleval"
    # The second text of a pair has another token type than the first.
    pair_types: bool = True
    # File name of a user-defined task, which no command runs; empty: none.
    module: str = ""

    def __post_init__(self) -> None:
        # Settings may be untrusted: the folder of a stranger's model.
        least = {"max_length": 1, "window_overlap": 0, "max_windows": 0} | dict.fromkeys(
            ("doc_stride", "max_query_length", "max_answer_length", "n_best"), 1
        )
        wrong = [name for name, value in least.items() if getattr(self, name) < value]
        wrong += [] if 0 < self.head_share < 1 else ["head_share"]
        wrong += [] if math.isfinite(self.null_threshold) else ["null_threshold"]
        wrong += ["label_names"] if len(self.label_names) not in (0, len(self.labels)) else []
        if wrong:
            raise ValueError(f"{wrong[0]}: {getattr(self, wrong[0])} is not allowed in the settings of a task")
