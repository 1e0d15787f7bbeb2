"""Options of pretraining (``run_pretrain.py``, ``bert-data``): text and shards, and the config class with all
sections.

The rules of ``schema`` apply: frozen, hashable, validated when created; no JAX import.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from bert_jax import registry
from bert_jax.batch import RowShape
from bert_jax.config.architecture import ModelConfig
from bert_jax.config.lengths import ENOUGH_STEPS, LENGTH, OF_LENGTH, PASSES, Parsed, automatic_steps, with_steps
from bert_jax.config.objective import ObjectiveConfig
from bert_jax.config.options import options_of
from bert_jax.config.schema import (
    CONTIGUOUS,
    MOST,
    SET,
    SWITCH,
    AtLeast0,
    ExecutionConfig,
    Limit,
    MeshConfig,
    OptimizerConfig,
    Positive,
    PositiveShare,
    Probability,
    Range,
    Section,
    TrainingConfig,
    Weighted,
    check_limits,
    limited,
    require,
    require_encoding,
)

# A weight of data.mixture is at least the sum of all weights divided by this number.
MIXTURE_RESOLUTION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section, prefix="data."):
    """Text, vocabulary, training instances, and the order in which the instances are read."""

    # Texts for pretraining. Each entry is one of: a file or folder, local or gs:// (.txt, .jsonl or .json, plain
    # or compressed with gzip, bzip2, xz or zstd); package:NAME, the text files of an installed Python package;
    # tfds:NAME[/CONFIG][:VERSION], a dataset prepared by TensorFlow Datasets; hf:OWNER/NAME[/CONFIG], a dataset on
    # the Hugging Face Hub; hf:FOLDER, a folder written by save_to_disk of Hugging Face datasets.
    corpus: tuple[str, ...] = ()
    # Vocabulary file: vocab.txt (WordPiece), a SentencePiece .model, or a tokenizer.json with the rules of BERT,
    # RoBERTa or another tokenizer. Empty: a vocabulary is trained on the corpus and stored in the folder of
    # shards.
    vocab: str = ""
    # Kind of vocabulary to train if data.vocab is empty: wordpiece, words (the most frequent words; all other words
    # are unknown), unigram (SentencePiece) or bpe (SentencePiece).
    tokenizer: Literal["wordpiece", "words", "unigram", "bpe"] = "wordpiece"
    # Lower-case the text, as BERT's uncased models do. A tokenizer.json or .model in data.vocab applies its own
    # rules instead.
    lower_case: bool = True
    # Strip accents (ä becomes a): true, false, or auto (the value of data.lower_case). true requires a WordPiece
    # vocabulary or data.tokenizer words.
    strip_accents: Literal["auto", "true", "false"] = "auto"
    # Folder of shards, local or gs://. It contains either the folders train and eval that bert-data writes, or
    # TFRecords from another source, for which bert-data index has written an index.
    shards: str = ""
    # Folders of shards that training mixes, as NAME=WEIGHT (in YAML also a mapping); empty: data.shards alone. A
    # name with a slash is a path; any other name is a folder in data.shards. The share of the rows that come from a
    # folder is its weight divided by the sum of the weights. A resumed run cannot change this option.
    mixture: tuple[Weighted, ...] = limited((), Limit(((),), {"data.row_order": CONTIGUOUS}))
    # Folder of held-out shards; empty: the folder eval in data.shards.
    eval_shards: str = ""
    # Folder of the tokenized corpus, which several folders of shards with different sequence lengths can share;
    # empty: a folder in data.shards.
    token_store: str = ""
    # What a line of text contains: sentence, paragraph (which is split into sentences), or auto. auto decides for
    # each file from a sample of 400 lines: it chooses sentence if at most 1 in 20 of these lines has several
    # sentences and the lines with several sentences contain at most a third of the sampled text; otherwise, it
    # chooses paragraph.
    line: Literal["auto", "sentence", "paragraph"] = "auto"
    # Field that contains the text in JSON records and in the records of tfds: and hf: datasets.
    json_field: str = "text"
    # Character encoding of all text files, such as cp1252, latin-1 or gb18030. auto: UTF-16 or UTF-32 for a file
    # with such a byte order mark, and UTF-8 for all other files.
    encoding: str = "auto"
    # Name of the JSON field that contains the class of a document; objective.name masked_lm_classes predicts this
    # class. A document without this field has no class. Empty: no classes.
    label_field: str = ""
    # All class names that occur in the field data.label_field.
    classes: tuple[str, ...] = ()
    # Split of a tfds: or hf: dataset to use as the corpus.
    dataset_split: str = "train"
    # Folder of prepared TensorFlow Datasets, local or gs://; empty: ~/tensorflow_datasets.
    tfds_data_dir: str = ""
    # Sequence length in tokens, including special tokens; at least 8.
    seq_length: Annotated[int, Range("8 or more", lambda value: value >= 8)] = 128
    # Maximum number of masked positions per sequence.
    max_predictions: Positive[int] = 20
    # static: masks are chosen when the shards are built. dynamic: masks are chosen when an example is read; they
    # depend only on the seed, the epoch and the example.
    masking: Literal["static", "dynamic"] = "static"
    # Unit that is masked as a whole: token, whole_word, or span (consecutive whole words, whose number has a
    # geometric distribution).
    mask_unit: Literal["token", "whole_word", "span"] = "token"
    # Segmenter that splits Chinese text into words: none, or jieba (requires the pip extra chinese). Whole-word and
    # span masking use these words. If data.tokenizer is words, the vocabulary is trained on these words, and
    # Chinese text is split into the longest words of the vocabulary.
    word_segmenter: Literal["none", "jieba"] = "none"
    # Fraction of the tokens in a sequence that is selected for prediction; data.max_predictions limits the number
    # of selected tokens.
    mask_fraction: PositiveShare[float] = 0.15
    # Two numbers: the final value of the masked fraction, and the number of batches over which the fraction changes
    # linearly from data.mask_fraction to this value (Ankner et al. 2023: from 0.3 to 0.15). Evaluations use the
    # final value. Requires data.masking dynamic. Empty: the fraction stays data.mask_fraction.
    final_masking: tuple[float, ...] = limited(
        (), Limit(((),), {"data.masking": ("static",)}, ", whose masks are in the shards")
    )
    # Allow [CLS] and [SEP] to be predicted; google-research/bert never predicts them.
    mask_special_tokens: bool = False
    # Share of the predicted tokens that are replaced with [MASK].
    mask_token_share: float = 0.8
    # Share of the predicted tokens that are replaced with a random token. Predicted tokens that are replaced
    # neither with [MASK] nor with a random token remain unchanged.
    random_token_share: float = 0.1
    # Mean and maximum number of words in a masked span, for data.mask_unit span (SpanBERT: a geometric
    # distribution with p = 0.2, truncated at 10).
    span_lengths: tuple[float, ...] = (3.8, 10)
    # Sentence pairs: nsp (the second segment follows the first or is random), sop (the two segments are in their
    # original order or swapped), or none (one segment).
    next_sentence: Literal["nsp", "sop", "none"] = limited("nsp", Limit(("none",), {"data.row_order": CONTIGUOUS}))
    # none: each instance is a row. best_fit: several instances are packed into a row of data.seq_length tokens,
    # longest first, and do not attend to each other. Batch sizes count instances unless training.batch_unit is
    # rows.
    packing: Literal["none", "best_fit"] = limited(
        "none", Limit(("none",), {"data.row_order": CONTIGUOUS}), Limit(("none",), {"model.attention_block": SET})
    )
    # Maximum number of instances in a packed row (data.packing best_fit), at most data.seq_length / 3. With 0, the
    # build chooses the smallest limit that increases the number of rows by at most 1% compared with no limit.
    sequences_per_row: AtLeast0[int] = 0
    # Probability, for each document and pass, that the instances of the document get a random target length below
    # data.seq_length.
    short_sequence_fraction: Probability = 0.1
    # Number of passes over the corpus when the shards are built; each pass has different masks and sentence pairs.
    dupe_factor: Positive[int] = 10
    # Number of training shards.
    num_shards: Positive[int] = 16
    # Share of the documents that are held out of training.
    eval_fraction: Probability = 0.02
    # Seed of the held-out split, of the instances and of their masks.
    seed: int = 12345
    # Number of processes that build shards; 0: one per processor.
    workers: AtLeast0[int] = 0
    # Order of the rows. shuffled: random. contiguous: the instances of a document are consecutive records of one
    # shard, and row r of successive batches contains consecutive records, except where a new segment
    # begins. carried: like contiguous, but in training, the state of the encoder after row r of a batch is
    # also its initial state for row r of the next batch. carried requires an objective that keeps the state, such
    # as causal_lm, and an encoder that has a state, such as an LSTM (Merity et al. 2018).
    row_order: Literal["shuffled", "contiguous", "carried"] = "shuffled"
    # Number of lanes, the streams of records that determine the order of the data. With 0, this number is the
    # greatest common divisor of 64 and all batch sizes (in rows) if data.row_order is shuffled; otherwise, it is
    # the batch size. A resumed run cannot change the number of lanes.
    lanes: AtLeast0[int] = 0
    # Number of segments of a lane that are shuffled together.
    window_segments: Positive[int] = 4
    # Maximum number of consecutive records in a segment of a lane.
    segment_records: Positive[int] = 1024
    # Reader of the shards: tensorflow (a tf.data pipeline), numpy (works without TensorFlow), or auto (tensorflow
    # if it is installed). All readers return the same batches.
    reader: Literal["auto", "tensorflow", "numpy"] = "auto"
    # Number of batches that are prepared in advance.
    prefetch: Positive[int] = 2
    # Maximum number of damaged records, which are replaced with blank rows. If more records are damaged, the run
    # exits with code 43.
    max_blank_records: AtLeast0[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_encoding("data.encoding", self.encoding)
        shares = self.mask_token_share, self.random_token_share
        require(
            min(shares) >= 0 and sum(shares) <= 1 + 1e-9, "data.mask_token_share + data.random_token_share",
            sum(shares), "two shares, 0 or more, whose sum is at most 1",
        )  # fmt: skip
        spans = self.span_lengths
        fits = len(spans) == 2 and min(spans) >= 1 and spans[1] % 1 == 0
        self._require("span_lengths", fits, "a mean length and a longest length in whole words, both 1 or more")
        share, batches = self.final_masking if len(self.final_masking) == 2 else (1, 1)
        fits = len(self.final_masking) in (0, 2) and 0 < share <= 1 and 1 <= batches <= MOST and batches % 1 == 0
        self._require("final_masking", fits, "a share above 0, at most 1, and a number of batches, 1 or more")
        most = self.seq_length // 3 if self.packing != "none" else 0
        allowed = f"0 to {most} (data.seq_length / 3)" if most else "0 with data.packing none"
        self._require("sequences_per_row", self.sequences_per_row <= most, allowed)
        is_wordpiece = bool(self.vocab) or self.tokenizer in ("wordpiece", "words")
        keeps = is_wordpiece or self.strip_accents != "true"
        self._require(
            "strip_accents", keeps, f"auto or false with data.tokenizer {self.tokenizer}, which keeps them"
        )
        self._check_classes()
        self._check_mixture()

    @property
    def mixture_parts(self) -> tuple[tuple[str, float], ...]:
        """Names of the folders in ``mixture``, and their weights (not a number if an item has no weight)."""
        pairs = []
        for item in self.mixture:
            name, _, text = item.rpartition("=")
            try:
                pairs.append((name.strip(), float(text)))
            except ValueError:
                pairs.append((name.strip(), math.nan))
        return tuple(pairs)

    @property
    def is_contiguous(self) -> bool:
        """True if the rows of a document follow each other."""
        return self.row_order in CONTIGUOUS

    @property
    def rules(self) -> dict[str, Any]:
        """Case, accents and Chinese words of WordPiece, as arguments of ``load_tokenizer``."""
        rules = {"lower_case": self.lower_case, "strip_accents": SWITCH[self.strip_accents]}
        return rules | {"cjk_words": self.word_segmenter != "none"}

    def lanes_for(self, *batch_sizes: int) -> int:
        """Return the number of lanes for batches of ``batch_sizes`` rows."""
        return self.lanes or (batch_sizes[0] if self.is_contiguous else math.gcd(*batch_sizes, 64))

    def mask_fraction_at(self, batch: int) -> float:
        """Return the share of the tokens that are predicted in the training batch with the index ``batch``."""
        if not self.final_masking:
            return self.mask_fraction
        final, batches = self.final_masking
        return self.mask_fraction + min(batch / batches, 1.0) * (final - self.mask_fraction)

    def most_predictions(self, sequences: int) -> int:
        """Return the largest number of predictions in a row of ``sequences`` sequences.

        A sequence of n tokens has min(max_predictions, max(1, round(n * share))) predictions at most; the share is
        the larger one of the first and the final share.
        """
        share = max((self.mask_fraction, *self.final_masking[:1]))
        rounding = max(0.5, 1 - 3 * share)  # the shortest sequence has 3 tokens: [CLS], one more, [SEP]
        by_length = int(self.seq_length * share + sequences * rounding)
        return min(by_length, sequences * self.max_predictions, self.seq_length)

    def _check_classes(self) -> None:
        fits = len(set(self.classes)) == len(self.classes) and (len(self.classes) >= 2) == bool(self.label_field)
        allowed = "two or more different names" if self.label_field else "none without data.label_field"
        self._require("classes", fits, allowed)

    def _check_mixture(self) -> None:
        parts = self.mixture_parts
        names = [name for name, _ in parts]
        for item, (name, weight) in zip(self.mixture, parts, strict=True):
            is_pair = name != "" and 0 < weight < math.inf
            require(is_pair, "data.mixture", item, "FOLDER=WEIGHT with a finite weight above 0, such as wiki=0.7")
            require(names.count(name) == 1, "data.mixture", item, "each folder once")
        total = sum(weight for _, weight in parts)
        for item, (_, weight) in zip(self.mixture, parts, strict=True):
            enough = weight / total * MIXTURE_RESOLUTION >= 1
            require(enough, "data.mixture", item, "weights of at least a millionth of their sum")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Options of pretraining."""

    model: ModelConfig = ModelConfig()
    execution: ExecutionConfig = ExecutionConfig()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    mesh: MeshConfig = MeshConfig()

    # Name of the option that defines the length of sequences.
    SEQ_LENGTH_OPTION = "data.seq_length"
    # Arguments of the example in --help.
    EXAMPLE = "--config quickstart --data.corpus my_texts/ --data.shards data/mine --workdir runs/mine"
    # Options of --help; --help_all prints the others too.
    USUAL = (
        "config", "workdir", "init_from", "continue_from", "print_config", "model.hidden_size", "model.num_layers",
        "model.vocab_size", "execution.dtype", "data.corpus", "data.vocab", "data.lower_case", "data.shards",
        "data.seq_length", "data.masking", "objective.name", "optimizer.learning_rate", "training.num_steps",
        "training.global_batch_size", "training.seed",
    )  # fmt: skip

    def __post_init__(self) -> None:
        data, model = self.data, self.model
        model.check_loop(self.execution.scan_layers)
        fits = data.seq_length <= model.max_length or model.position_embeddings == "sinusoidal"
        allowed = f"at most model.max_position_embeddings ({model.max_length})"
        require(fits, "data.seq_length", data.seq_length, allowed)
        has_muon = model.FITS_MUON or self.optimizer.name != "muon"
        allowed = f"another name with model.encoder {model.encoder}, to whose matrices Muon does not apply"
        require(has_muon, "optimizer.name", self.optimizer.name, allowed)
        check_limits(self)
        if data.next_sentence != "none":
            allowed = f"2 or more with data.next_sentence {data.next_sentence}"
            require(model.type_vocab_size >= 2, "model.type_vocab_size", model.type_vocab_size, allowed)
        if data.lanes and not self.has_unknown_rows:
            for size in (self.training.global_batch_size, *self.training.batch_ramp[1::2]):
                allowed = f"a divisor of every batch size, including {size}"
                require(size % data.lanes == 0, "data.lanes", data.lanes, allowed)
        self._check_contiguous()

    @classmethod
    def complete(cls, parsed: Parsed) -> Parsed:
        """Return ``parsed``, the settings of a config, with the settings that follow from them."""
        return with_steps(parsed, options_of(cls))  # type: ignore[arg-type]

    def _check_contiguous(self) -> None:
        data, training = self.data, self.training
        if data.is_contiguous:
            size, lanes = training.global_batch_size, data.lanes
            allowed = f"0 or the batch size, {size}, with data.row_order {data.row_order}"
            require(lanes in (0, size), "data.lanes", lanes, allowed)
        if data.row_order == "carried":
            suffix = "with data.row_order carried"
            sections = {name: registry.load("encoder_options", name) for name in registry.names("encoder_options")}
            allowed = f"{' or '.join(name for name, one in sections.items() if one.HAS_STATE) or 'none'} {suffix}"
            require(self.model.HAS_STATE, "model.encoder", self.model.encoder, allowed)
            require(not self.objective.module, "objective.module", self.objective.module, f"none {suffix}")
            name, allowed = self.objective.name, f"one that keeps the state, such as causal_lm, {suffix}"
            require(self.objective.carries_state, "objective.name", name, allowed)

    @property
    def has_unknown_rows(self) -> bool:
        """True if the shards determine the number of rows of a batch, because batch sizes count packed
        sequences."""
        return self.data.packing != "none" and self.training.batch_unit == "sequences"

    @property
    def row_shape(self) -> RowShape:
        """Shape of the rows that is known without shards: packed rows if batch sizes count rows and
        ``data.sequences_per_row`` is set, else rows of one sequence."""
        data, counts_rows = self.data, self.training.batch_unit == "rows"
        most = data.sequences_per_row if counts_rows else 0
        predictions = data.most_predictions(most) if most else data.max_predictions
        return RowShape(data.seq_length, predictions, most or 1, counts_rows=counts_rows)

    @property
    def parameter_layout(self) -> dict[str, object]:
        """Values outside the model section that determine which parameters exist."""
        objective = Path(self.objective.module).name or self.objective.name
        layout = {"objective": objective, "data.next_sentence (the sentence-pair head)": self.has_nsp}
        if objective == "masked_lm_classes":
            layout["data.classes"] = ", ".join(self.data.classes)
        if objective == "replaced_tokens":
            names = ("generator_size", "embedding_sharing")
            layout |= {f"objective.{name}": getattr(self.objective, name) for name in names}
        return layout

    @property
    def stores_start_params(self) -> bool:
        """True if the train state also contains the parameters from which training started."""
        return False

    @property
    def has_nsp(self) -> bool:
        """True if the model has a sentence-pair head."""
        return self.data.next_sentence != "none"


def with_text_length(config: PretrainConfig, examples: int, given: Collection[str]) -> tuple[PretrainConfig, str]:
    """Return ``config`` with the length that follows from ``examples``, the number of examples in a pass over the
    text, and a line that states it. Options in ``given`` keep their values.

    The batch has 256, 128 or 64 examples if 3 passes are 1,000 steps then, else 32; the number of steps is
    :func:`automatic_steps`. Warmup is a tenth of it, and so is the interval of evaluations and checkpoints.
    """
    size = next((size for size in (256, 128, 64) if PASSES * examples >= ENOUGH_STEPS * size), 32)
    size = config.training.global_batch_size if "training.global_batch_size" in given else size
    steps = automatic_steps(max(1, round(examples / size)))
    found = dict.fromkeys(OF_LENGTH, steps // 10) | {"training.global_batch_size": size}
    kept = {*given, *(["optimizer.warmup_steps"] if config.optimizer.warmup_tokens else [])}
    found = {LENGTH: steps} | {key: value for key, value in found.items() if key not in kept}
    for key, value in found.items():
        section, _, name = key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    named = ", ".join(f"{key} {value:,}" for key, value in found.items())
    passes = f"{examples:,} examples, {steps * size / examples:.1f} passes"
    return config, f"from the size of the text ({passes}): {named}"
