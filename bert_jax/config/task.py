"""Options of a task: its kind, its files, and the options of particular kinds of tasks.

These options define the inputs, outputs and predictions of the model, during and after training; ``finetune``
defines how a model is trained for the task. The rules of ``schema`` apply: frozen, hashable, validated when
created; no JAX import. An option names the kinds of tasks that have it (``only``); for other kinds it does not
exist. Empty labels and tags are replaced by those of the training records, so the config in a checkpoint contains
them.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from bert_jax.config.schema import (
    SET,
    AtLeast0,
    Limit,
    Positive,
    Probability,
    Section,
    limited,
    only,
    require,
    require_encoding,
)
from bert_jax.config.spec import PairOrder, Pooling, TaskKind, Truncation

# Options that determine which other options exist.
KIND, TRUNCATION, LOSS, CRF = "task.kind", "task.truncation", "sentence.loss", "tagging.crf"
# Kinds of tasks with a label for a whole text or pair, kinds whose texts task.truncation truncates, and kinds with
# a tag per word.
WHOLE = ("classification", "regression", "multi_label")
CUT = (*WHOLE, "choice", "sentence")
WORDS = ("tagging", "joint")

SentenceLoss = Literal["softmax", "cosine", "cosent", "triplet", "negatives", "simcse"]


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Section, prefix="task."):
    """The task, and the conversion of its texts to model inputs."""

    # classification, regression, multi_label: a label for a text or pair. qa: answers in a passage. tagging: a tag
    # per word. joint: a class per text and a tag per word (intent and slots). choice: the correct one of several
    # choices. sentence: a vector per text (Sentence-BERT).
    kind: TaskKind = "classification"
    # Name in metrics.json and predictions; empty: the kind.
    name: str = ""
    # Python file that defines a class Task, a user-defined task (docs/finetuning.md).
    module: str = ""
    # Longest input in tokens, special tokens included.
    max_length: int = 128
    # Part of a longer text that is kept: longest_first (the longer text of a pair is truncated at its end, or at
    # the side that the tokenizer of the model states), head, tail, head_tail, key_sentences (the most central
    # sentences, in order), windows (the whole text, in several inputs whose logits are averaged).
    truncation: Truncation = only("longest_first", {KIND: CUT})
    # Share of the tokens that head_tail keeps at the head (Sun et al. 2019: 128 of 510).
    head_share: float = only(0.25, {KIND: CUT, TRUNCATION: ("head_tail",)})
    # Number of tokens that neighboring windows share.
    window_overlap: AtLeast0[int] = only(32, {KIND: WHOLE, TRUNCATION: ("windows",)})
    # Maximum number of windows of one text; 0: no limit.
    max_windows: AtLeast0[int] = only(0, {KIND: WHOLE, TRUNCATION: ("windows",)})
    # Order of the texts of a pair: given, or both (both orders are read, and their logits are added; for
    # similarity, where neither text comes first: Radford et al. 2018, section 3.3).
    pair_order: PairOrder = only("given", {KIND: WHOLE})
    # The metric that selects the best checkpoint; empty: the first one of the task.
    metric: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("max_length", self.max_length >= 8, "8 or more")
        self._require("head_share", 0 < self.head_share < 1, "above 0, below 1")
        if self.truncation == "windows":
            allowed = f"a value other than windows with task.kind {self.kind}"
            self._require("truncation", self.kind in WHOLE or bool(self.module), allowed)
            allowed = f"at most half of task.max_length ({self.max_length // 2})"
            self._require("window_overlap", self.window_overlap <= self.max_length // 2, allowed)


@dataclass(frozen=True, kw_only=True)
class TaskDataConfig(Section, prefix="data."):
    """The files of a task."""

    # Options that name files.
    SPLITS: ClassVar[tuple[str, ...]] = ("train", "dev", "test")

    # Folder to which the file names below are relative.
    dir: str = ""
    # Training files.
    train: tuple[str, ...] = ()
    # Files to evaluate on. With several files, each is a separate split named after the file, and the first one
    # selects the best checkpoint.
    dev: tuple[str, ...] = ()
    # Files to predict; predictions of records with labels are scored as well.
    test: tuple[str, ...] = ()
    # tsv (split at tabs and \n only, no quoting), csv (RFC 4180), jsonl, conll (word and tag columns), squad
    # (JSON), slots (folders of seq.in, seq.out, label), snips (one file, word:slot ... <=> intent), clinc (parts of
    # a JSON file: FILE.json:train+oos_train), tfds (NAME[/CONFIG][:VERSION]:SPLIT); auto: by the file's name.
    format: Literal["auto", "tsv", "csv", "jsonl", "conll", "squad", "slots", "snips", "clinc", "tfds"] = "auto"
    # Character between the fields of tsv and csv, or tab; auto: that of the format (tab, comma) or, if the columns
    # are not found with it, the first of , ; tab | with which they are.
    delimiter: str = "auto"
    # Encoding of the files, such as cp1252, latin-1 or gb18030; auto: UTF-8, UTF-16 with a byte order mark, and for
    # Western text that is neither, cp1252.
    encoding: str = "auto"
    # Columns of a line: ROLE=COLUMN, the column by name, or by number from 1 if the file has no header. Roles: id,
    # text, text_pair, label, labels, negative and choice (may occur several times, in order), choice_prefix
    # (precedes every choice), group, words, tags, answers. SPLIT:ROLE=COLUMN (train, dev, test) sets
    # the columns of the files of one split; entries without SPLIT then do not apply to these files. A role that
    # the records of a split need and that is not set is the column of its name; empty: so are all roles.
    columns: tuple[str, ...] = ()
    # The first line names the columns; auto: true if data.columns is empty or names a column.
    header: Literal["auto", "true", "false"] = "auto"
    # Classes in id order, as written in the files; empty: those of the training files, sorted.
    labels: tuple[str, ...] = only(
        (), {KIND: ("classification", "multi_label", "choice", "joint", "sentence"), LOSS: ("softmax", "negatives")}
    )
    # Names of the classes in exports and metrics; empty: as in the files. Predictions always use the names in the
    # files.
    label_names: tuple[str, ...] = only((), {KIND: ("classification", "multi_label", "joint")})
    # Tags in id order; empty: those of the training files, sorted.
    tags: tuple[str, ...] = only((), {KIND: WORDS})
    # Separator of several labels of one text (multi_label).
    label_separator: str = ","
    # Share of the training records that is used as dev if there are no dev files.
    dev_fraction: Probability = limited(0.0, Limit((0,), {"data.dev": SET}))
    # Records that stay together when dev is split from train: none, those of an article, those of a document, or
    # those that share a text (sentence).
    group_by: Literal["none", "article", "document", "sentence"] = "none"
    # Seed of data.dev_fraction and data.train_limit.
    split_seed: AtLeast0[int] = 0
    # Number of training records to use, sampled with split_seed; 0: all.
    train_limit: AtLeast0[int] = 0
    # Maximum number of records of each split to evaluate on, from the first; 0: all.
    dev_limit: AtLeast0[int] = 0
    # Vocabulary, for a model without one and without --init_from; see data.vocab of pretraining.
    vocab: str = ""
    # Lower-case the text; only with data.vocab, a WordPiece.
    lower_case: bool = True
    # Strip accents: true, false, or auto (as data.lower_case); only with data.vocab, a WordPiece.
    strip_accents: Literal["auto", "true", "false"] = "auto"
    # Folder of prepared TensorFlow Datasets (tfds); empty: ~/tensorflow_datasets.
    tfds_data_dir: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("labels", "label_names", "tags"):
            values = getattr(self, name)
            self._require(name, len(set(values)) == len(values), "each value once")
        number = len(self.labels)
        one_each = len(self.label_names) in (0, number)
        self._require("label_names", one_each, f"one for each of data.labels ({number})")
        fits = self.delimiter in ("auto", "tab") or (len(self.delimiter) == 1 and self.delimiter not in '\r\n"')
        self._require("delimiter", fits, "auto, tab, or one character that is not a quote")
        require_encoding("data.encoding", self.encoding)
        for column in self.columns:
            split, colon, rest = column.partition(":")
            role, equals, where = (rest if colon and split in self.SPLITS else column).partition("=")
            known = role in COLUMN_ROLES and equals and where
            require(bool(known), "data.columns", column, f"ROLE=COLUMN with a role of {', '.join(COLUMN_ROLES)}")


COLUMN_ROLES = (
    "id", "text", "text_pair", "label", "labels", "negative", "choice", "choice_prefix", "group", "words", "tags",
    "answers",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class QaConfig(Section, prefix="qa."):
    """Extractive question answering (google-research/bert ``run_squad.py``)."""

    # Number of tokens between the starts of two windows of a passage (run_squad.py: 128).
    doc_stride: Positive[int] = 128
    # Maximum number of tokens of the question; the rest is truncated (run_squad.py: 64).
    max_query_length: Positive[int] = 64
    # Longest answer in tokens.
    max_answer_length: Positive[int] = 30
    # Number of candidate answers that are kept (run_squad.py: 20).
    n_best: Positive[int] = 20
    # A question may have no answer (SQuAD 2.0).
    no_answer: bool = False
    # "No answer" is predicted if its score exceeds the score of the best answer by more than this.
    null_threshold: float = 0.0
    # How answers are compared: english (SQuAD's words) or chinese (CMRC's characters).
    scoring: Literal["english", "chinese"] = limited(
        "english",
        Limit(("english",), {"qa.no_answer": (True,)}, ", the only score for questions without an answer"),
    )


@dataclass(frozen=True, kw_only=True)
class TaggingConfig:
    """Tagging, which assigns a tag to each word."""

    # Use a CRF: learned transitions between tags, which are decoded jointly (Lafferty et al. 2001).
    crf: bool = False
    # Add as many words of neighboring sentences of the document as fit (Devlin et al. 2018, 5.3).
    document_context: bool = False
    # Entities as conlleval reads them, or only those that begin with B- (strict, as in seqeval).
    scoring: Literal["conlleval", "strict"] = "conlleval"


@dataclass(frozen=True, kw_only=True)
class SentenceTaskConfig(Section, prefix="sentence."):
    """Training of sentence embeddings (Reimers and Gurevych 2019)."""

    # softmax: classification of (u, v, |u - v|). cosine: regression of the cosine. cosent: ranking of the cosines.
    # triplet: anchors nearer to their positives than to their negatives. negatives: retrieval of the positive of
    # each anchor among all positives of the batch (of a microbatch, without gradient_cache) and any hard negatives.
    # simcse: the same, with a second encoding of each text, with other dropout, as its positive.
    loss: SentenceLoss = "softmax"
    # Pooling of the token outputs to one vector.
    pooling: Pooling = "mean"
    # Divide vectors by their Euclidean norm.
    normalize: bool = False
    # Width of a hidden layer between (u, v, |u - v|) and the classes; 0: none.
    hidden_size: AtLeast0[int] = only(0, {LOSS: ("softmax",)})
    # Cosines are multiplied by this (cosent, negatives, simcse).
    scale: Positive[float] = only(20.0, {LOSS: ("cosent", "negatives", "simcse")})
    # Margin by which the positive must be nearer than the negative (triplet).
    margin: Positive[float] = only(5.0, {LOSS: ("triplet",)})
    # Positive pairs are texts with the same label (negatives, triplet). softmax: each text makes a pair of class 1
    # with a text of the same label, and a pair of class 0 with a text of another label.
    pairs_from_classes: bool = only(False, {LOSS: ("softmax", "negatives", "triplet")})
    # Widths at which the first values of a vector, divided by their norm, are trained too (Kusupati et al. 2022);
    # the loss is the sum of those of all widths. Empty: whole vectors only.
    matryoshka: tuple[int, ...] = only((), {LOSS: ("cosine", "cosent", "triplet", "negatives", "simcse")})
    # With training.accumulation_steps, compare the texts of all microbatches instead of those of one (GradCache;
    # Gao et al. 2021). The memory stays that of one, and every text is encoded twice.
    gradient_cache: bool = only(False, {LOSS: ("cosent", "negatives", "simcse")})
    # Largest possible label; labels of cosine and cosent are divided by it.
    label_scale: Positive[float] = only(1.0, {LOSS: ("cosine", "cosent")})
