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
    """The task, and how its texts become inputs of the model."""

    # What the model predicts. classification: a class for a text or a pair of texts. regression: a number for a
    # text or a pair of texts. multi_label: a set of labels for a text or a pair of texts. qa: the part of a
    # passage that answers a question. tagging: a tag for each word. joint: a class for each text and a tag for each
    # word (intent and slots). choice: which of several choices is correct. sentence: a vector for each text
    # (Sentence-BERT). translation: a text in another language.
    kind: TaskKind = "classification"
    # Name of the task in metrics.json and predictions; empty: task.kind.
    name: str = ""
    # Python file that defines a class Task, which replaces the task in task.kind (docs/finetuning.md, User-defined
    # tasks).
    module: str = ""
    # Maximum length of an input in tokens, including special tokens; at least 8.
    max_length: int = 128
    # Part of the text that is kept if an input is longer than task.max_length. longest_first: the longer text of a
    # pair is shortened first; a text is truncated at its end, or at the side that the tokenizer of the model
    # states. head: the start. tail: the end. head_tail: the start and the end. key_sentences: the most central
    # sentences, in their original order. windows: the whole text, as several inputs whose logits are averaged.
    truncation: Truncation = only("longest_first", {KIND: CUT})
    # Share of the kept tokens that head_tail takes from the start of the text (Sun et al. 2019: 128 of 510
    # tokens).
    head_share: float = only(0.25, {KIND: CUT, TRUNCATION: ("head_tail",)})
    # Number of tokens that neighboring windows share.
    window_overlap: AtLeast0[int] = only(32, {KIND: WHOLE, TRUNCATION: ("windows",)})
    # Maximum number of windows per text; 0: no limit.
    max_windows: AtLeast0[int] = only(0, {KIND: WHOLE, TRUNCATION: ("windows",)})
    # given: the model reads the texts of a pair in the given order. both: the model reads them in both orders, and
    # the logits are added; this suits tasks such as similarity, in which the order has no meaning (Radford et al.
    # 2018, section 3.3).
    pair_order: PairOrder = only("given", {KIND: WHOLE})
    # Metric that selects the best checkpoint; empty: the first metric of the task.
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

    # Base folder for relative names of task files. Empty: the current folder.
    dir: str = ""
    # Training files.
    train: tuple[str, ...] = ()
    # Files to evaluate. If there are several, each is a separate split named after its file, and the score on the
    # first file selects the best checkpoint.
    dev: tuple[str, ...] = ()
    # Files to predict at the end; records with labels are also scored.
    test: tuple[str, ...] = ()
    # Format of the files. auto: determined by the file name. tsv: fields are separated by tabs and lines by \n
    # only; there is no quoting. csv: RFC 4180. jsonl: a JSON object per line, or a JSON array. conll: columns of
    # words and tags. squad: the JSON format of SQuAD. slots: folders with the files seq.in, seq.out and label.
    # snips: one file with lines word:slot ... <=> intent. clinc: parts of a JSON file, such as
    # FILE.json:train+oos_train. tfds: NAME[/CONFIG][:VERSION]:SPLIT.
    format: Literal["auto", "tsv", "csv", "jsonl", "conll", "squad", "slots", "snips", "clinc", "tfds"] = "auto"
    # Field separator of tsv and csv: one character, or tab. auto: the separator of the format (tab or comma) or, if
    # that separator does not yield the required columns, the first of , ; tab | that does.
    delimiter: str = "auto"
    # Character encoding of the files, such as cp1252, latin-1 or gb18030. auto: UTF-16 or UTF-32 for a file with
    # such a byte order mark, cp1252 for Western text that is not valid UTF-8, and UTF-8 for all other files.
    encoding: str = "auto"
    # Columns of the files, as ROLE=COLUMN, where COLUMN is a column name or, in files without a header, a column
    # number, counted from 1. Roles: id, text, text_pair, label, labels, negative, choice, choice_prefix (precedes
    # every choice), group, words, tags, answers. negative and choice may each be set several times; their order is
    # kept. SPLIT:ROLE=COLUMN, where SPLIT is train, dev or test, sets a column for the files of one split; entries
    # without SPLIT then do not apply to these files. A required role that is not set is read from the column of the
    # same name.
    columns: tuple[str, ...] = ()
    # Whether the first line contains the column names; auto: true if data.columns is empty or contains a column
    # name.
    header: Literal["auto", "true", "false"] = "auto"
    # Classes in id order, as written in the files; empty: the classes in the training files, sorted.
    labels: tuple[str, ...] = only(
        (), {KIND: ("classification", "multi_label", "choice", "joint", "sentence"), LOSS: ("softmax", "negatives")}
    )
    # Names of the classes in exports and metrics, in id order; empty: the names in the files. Predictions always
    # use the names in the files.
    label_names: tuple[str, ...] = only((), {KIND: ("classification", "multi_label", "joint")})
    # Tags in id order; empty: the tags in the training files, sorted.
    tags: tuple[str, ...] = only((), {KIND: WORDS})
    # Separator between the labels of a text, for task.kind multi_label.
    label_separator: str = ","
    # Share of the training records to use as the dev split if there are no dev files. If a command sets only one of
    # data.dev and data.dev_fraction, the value of the other one in the recipe is ignored.
    dev_fraction: Probability = limited(0.0, Limit((0,), {"data.dev": SET}))
    # Groups of training records that data.dev_fraction puts into one split as a whole. article or document: records
    # of the same group, which the format or the column group states. sentence: records that share a text. none:
    # single records.
    group_by: Literal["none", "article", "document", "sentence"] = "none"
    # Seed with which data.dev_fraction and data.train_limit sample records.
    split_seed: AtLeast0[int] = 0
    # Maximum number of training records to use, sampled with data.split_seed; 0: all.
    train_limit: AtLeast0[int] = 0
    # Maximum number of records to evaluate in each dev split, counted from its first record; 0: all.
    dev_limit: AtLeast0[int] = 0
    # Vocabulary file for a run without --init_from or for an initial model that has no vocabulary, in a format that
    # data.vocab of pretraining accepts.
    vocab: str = ""
    # Lower-case the text. Applies only to a WordPiece vocabulary in data.vocab.
    lower_case: bool = True
    # Strip accents: true, false, or auto (the value of data.lower_case). Applies only to a WordPiece vocabulary in
    # data.vocab.
    strip_accents: Literal["auto", "true", "false"] = "auto"
    # Folder of prepared TensorFlow Datasets; empty: ~/tensorflow_datasets.
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
    """Extractive question answering (run_squad.py of google-research/bert)."""

    # Number of tokens between the starts of consecutive windows of a passage (run_squad.py: 128).
    doc_stride: Positive[int] = 128
    # Maximum number of tokens of a question; longer questions are truncated (run_squad.py: 64).
    max_query_length: Positive[int] = 64
    # Maximum number of tokens of a predicted answer.
    max_answer_length: Positive[int] = 30
    # Number of candidate answers to keep (run_squad.py: 20).
    n_best: Positive[int] = 20
    # Allow questions without an answer (SQuAD 2.0).
    no_answer: bool = False
    # Predict no answer if the score of having no answer exceeds the score of the best answer by more than this
    # number.
    null_threshold: float = 0.0
    # Comparison of answers: english (by words, as for SQuAD) or chinese (by characters, as for CMRC).
    scoring: Literal["english", "chinese"] = limited(
        "english",
        Limit(("english",), {"qa.no_answer": (True,)}, ", the only score for questions without an answer"),
    )


@dataclass(frozen=True, kw_only=True)
class TaggingConfig:
    """Tagging, which assigns a tag to each word."""

    # Use a CRF: transitions between tags are learned, and the tags of a text are decoded jointly (Lafferty et al.
    # 2001).
    crf: bool = False
    # Fill the input with the words of neighboring sentences of the same document (Devlin et al. 2018, section
    # 5.3).
    document_context: bool = False
    # How tags form the entities that are scored: conlleval (an entity may begin with any tag except O, as in the
    # script conlleval) or strict (an entity begins with B-, as in the strict mode of seqeval).
    scoring: Literal["conlleval", "strict"] = "conlleval"


@dataclass(frozen=True, kw_only=True)
class SentenceTaskConfig(Section, prefix="sentence."):
    """Training of sentence embeddings (Reimers and Gurevych 2019)."""

    # Loss. softmax: classification of (u, v, |u - v|), where u and v are the vectors of a pair. cosine: the cosine
    # of a pair is trained to equal its label. cosent: pairs with higher labels must have higher cosines. triplet:
    # anchors must be nearer to their positives than to their negatives. negatives: each anchor must find its
    # positive among all positives and hard negatives of the batch (of the microbatch, unless
    # sentence.gradient_cache is set). simcse: like negatives, but the positive of a text is a second encoding of
    # the same text with different dropout.
    loss: SentenceLoss = "softmax"
    # Pooling of the token outputs into one vector.
    pooling: Pooling = "mean"
    # Divide each vector by its Euclidean norm.
    normalize: bool = False
    # Width of a hidden layer between (u, v, |u - v|) and the classes; 0: none.
    hidden_size: AtLeast0[int] = only(0, {LOSS: ("softmax",)})
    # Factor by which the loss multiplies cosines.
    scale: Positive[float] = only(20.0, {LOSS: ("cosent", "negatives", "simcse")})
    # Distance by which the positive must be nearer to the anchor than the negative.
    margin: Positive[float] = only(5.0, {LOSS: ("triplet",)})
    # Build pairs from the labels of single texts. For negatives and triplet, texts with the same label are
    # positive pairs. For softmax, each text forms a pair of class 1 with a text of the same label, and a pair of
    # class 0 with a text of another label.
    pairs_from_classes: bool = only(False, {LOSS: ("softmax", "negatives", "triplet")})
    # Widths at which truncated vectors are also trained (Kusupati et al. 2022): the first values of each vector,
    # divided by their norm. The loss is the sum of the losses at all widths. Empty: only whole vectors are
    # trained.
    matryoshka: tuple[int, ...] = only((), {LOSS: ("cosine", "cosent", "triplet", "negatives", "simcse")})
    # If training.accumulation_steps is above 1, compare the texts of all microbatches instead of those of one
    # microbatch (GradCache; Gao et al. 2021). The memory use stays that of one microbatch, but every text is
    # encoded twice.
    gradient_cache: bool = only(False, {LOSS: ("cosent", "negatives", "simcse")})
    # Largest possible label, by which the loss divides the labels.
    label_scale: Positive[float] = only(1.0, {LOSS: ("cosine", "cosent")})
