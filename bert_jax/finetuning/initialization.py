"""Where a fine-tuning run starts: any readable model, a workdir's own record of it, or drawn parameters."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import RunOptions, Setting, parse_settings
from bert_jax.interop.exchange import ReadOptions, Weights, parameter_shapes
from bert_jax.interop.initialization import merge_settings, model_section, read_record, record_text
from bert_jax.interop.readers import leaves_case_open, read_weights
from bert_jax.io.storage import Location, location
from bert_jax.model.canonical import STACKED
from bert_jax.tokenization import Tokenizer, build_tokenizer
from bert_jax.training.checkpoint.restore import saved_steps
from bert_jax.training.launch import RECORD, WarmStart

# A tokenizer in a workdir, by its kind.
_FILES = {"wordpiece": "vocab.txt", "sentencepiece": "tokenizer.model", "byte_bpe": "tokenizer.json"}
# How the tokenizer is applied, beside its file.
TOKENIZER_FILE = "tokenizer_settings.json"
_PRETRAINING_HEADS = ("mlm_head", "nsp_head")
# What a task has between the encoder and its head.
_TASK_LAYERS = ("feature_mix", "bilstm")


@dataclass(frozen=True)
class Start:
    """The model that a run starts from; ``weights`` is None where it is drawn or a checkpoint is there."""

    weights: Weights | None
    tokenizer_config: TokenizerConfig
    tokenizer_content: bytes
    name: str = ""
    record: str = ""
    notes: tuple[str, ...] = field(default=())
    # Where the parameters of step 0 came from, a whole name; "" where they were drawn.
    source: str = ""

    @property
    def resumes(self) -> bool:
        """Whether it is the workdir's own checkpoint."""
        return self.weights is None and bool(self.name)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return build_tokenizer(self.tokenizer_config, self.tokenizer_content, self.name or "data.vocab")


def resolve(options: RunOptions, workdir: Location, settings: Sequence[Setting]) -> tuple[Start, list[Setting]]:
    """The start that the options ask for, and ``settings`` with the model section that it fixes; writes nothing.

    Raises ``ValueError`` in one line for a source that cannot be read, or settings that contradict it.
    """
    for flag in ("continue_from", "add_words", "vocab_slots", "extend_positions"):
        if getattr(options, flag):
            raise ValueError(f"--{flag}: for pretraining; fine-tuning starts from --init_from as it is")
    given = {key: value for key, (value, _) in parse_settings(FinetuneConfig, settings).items()}
    if saved_steps(workdir):
        record = read_record(workdir)
        before = record["init_from"] if record else ""
        if options.init_from and whole_name(options.init_from) != whole_name(before):
            raise ValueError(
                f"--init_from {options.init_from}: the run in {workdir} began from {before or 'drawn weights'}; "
                "give another --workdir, or leave --init_from out to continue that run"
            )
        if record is not None:
            settings = merge_settings(
                settings, record["source"], record["resolved"], f"{workdir / RECORD}", FinetuneConfig
            )
        start = Start(None, *_stored_tokenizer(workdir), str(workdir), source=before)
        return start, _sized(start, settings, given) if record is None else list(settings)
    if not options.init_from:
        vocab = given.get("data.vocab", "")
        if not vocab:
            raise ValueError(
                "--init_from: not given: the model to fine-tune; without one give data.vocab and a model section"
            )
        if mixout := given.get("regularization.mixout"):
            raise ValueError(
                f"regularization.mixout: {mixout} has no use without --init_from, the model whose weights it goes "
                "back to; give one, or leave it out"
            )
        start = Start(None, *_vocabulary(Path(vocab), bool(given.get("data.lower_case", True))))
        return start, _sized(start, settings, given)
    name = options.init_from
    weights = read_weights(Path(name), _read_options(Path(name), given))
    notes = [f"starts from {name}", *weights.notes]
    config, content = weights.spec.tokenizer, weights.tokenizer_content
    if config is None or content is None:
        vocab = given.get("data.vocab", "")
        if not vocab:
            raise ValueError(f"data.vocab: {name} comes without a tokenizer; name its vocabulary there")
        config, content = _vocabulary(Path(vocab), bool(given.get("data.lower_case", True)))
        notes.append(f"{name} comes without a tokenizer: {vocab} is taken for its vocabulary")
    pieces = build_tokenizer(config, content, name).vocab_size
    if pieces > weights.spec.model.vocab_size:
        raise ValueError(
            f"{name}: its vocabulary has {pieces} pieces and its table {weights.spec.model.vocab_size} rows"
        )
    section = model_section(weights.spec.model)
    settings = merge_settings(settings, section, section, name, FinetuneConfig)
    record = record_text(whole_name(name), section, section)
    return Start(weights, config, content, name, record, tuple(notes), whole_name(name)), settings


def whole_name(source: str) -> str:
    """``--init_from`` as the same name from every working directory: a whole path, links followed; a URL stays."""
    return str(location(source).resolve()) if source else ""


def _sized(start: Start, settings: Sequence[Setting], given: Mapping[str, Any]) -> list[Setting]:
    """``settings`` with a ``model.vocab_size`` for the vocabulary of ``start``: its size where none is given."""
    pieces = start.tokenizer.vocab_size
    size = given.get("model.vocab_size", pieces)
    if size < pieces:
        raise ValueError(
            f"model.vocab_size: {size} is not allowed; the vocabulary has {pieces} pieces: leave it out, or give "
            "at least that"
        )
    return [*settings, Setting("data.vocab", "model.vocab_size", str(size))]


def _read_options(path: Path, given: Mapping[str, Any]) -> ReadOptions:
    return ReadOptions(lower_case=given.get("data.lower_case") if leaves_case_open(path) else None)


def _vocabulary(path: Path, lower_case: bool) -> tuple[TokenizerConfig, bytes]:
    names = {".txt": "vocab.txt", ".model": "tokenizer.model", ".json": "tokenizer.json"}
    if path.suffix not in names or not path.is_file():
        raise ValueError(
            f"data.vocab: {path} is no vocabulary file; give a vocab.txt (WordPiece), .model (SentencePiece) or "
            "tokenizer.json (byte-level BPE)"
        )
    return TokenizerConfig(file=names[path.suffix], lower_case=lower_case), path.read_bytes()


def store_tokenizer(folder: Path, start: Start) -> None:
    """Write the tokenizer's file, and how it is applied."""
    (folder / start.tokenizer_config.file).write_bytes(start.tokenizer_content)
    text = json.dumps(dataclasses.asdict(start.tokenizer_config), indent=1)
    (folder / TOKENIZER_FILE).write_text(f"{text}\n", encoding="utf-8")


def _stored_tokenizer(workdir: Location) -> tuple[TokenizerConfig, bytes]:
    path = workdir / TOKENIZER_FILE
    try:
        config = TokenizerConfig(**json.loads(path.read_text(encoding="utf-8")))
        return config, (workdir / config.file).read_bytes()
    except (OSError, ValueError, TypeError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{path}: not readable ({problem}); restore it, or give another --workdir") from None


def warm_start(start: Start, config: FinetuneConfig, heads: HeadsConfig, sentence: Any) -> WarmStart:
    """The parameters of ``start`` that the run's model has, what is said about the others, and the record of it.

    The encoder always; the pooler and the heads of pretraining where the source has them; without
    ``regularization.reinit_head`` also the layers before a task's head, and the head and its CRF where they are of
    the same classes. The top ``regularization.reinit_layers`` layers and the pooler with them are left to be drawn.
    """
    weights = start.weights
    if weights is None:
        return WarmStart(messages=start.notes, record=start.record)
    wanted = parameter_shapes(ModelSpec(model=config.model, heads=heads, sentence=sentence))
    drawn = _redrawn(config)
    kept: dict[str, np.ndarray] = {}
    for name, shape in wanted.items():
        part = name.partition("/")[0]
        is_of_classes = part == "crf" or (part.endswith("_head") and part not in _PRETRAINING_HEADS)
        is_own = is_of_classes or part in _TASK_LAYERS
        values = weights.params.get(name)
        if values is None or tuple(values.shape) != shape or name.startswith(drawn):
            continue
        if is_own and config.regularization.reinit_head:
            continue
        if is_of_classes and not _same_classes(weights.spec.heads, heads):
            continue
        kept[name] = values
    assert not any(STACKED in name for name in kept)
    fresh = dict.fromkeys(_part(name) for name in wanted if name not in kept)
    unused = dict.fromkeys(_part(name) for name in weights.params if name not in wanted)
    notes = [*start.notes]
    if fresh:
        notes.append(f"drawn anew: {', '.join(fresh)}")
    if unused:
        notes.append(f"left out: {', '.join(unused)}")
    return WarmStart(params=kept, messages=tuple(notes), record=start.record)


def _same_classes(source: HeadsConfig, own: HeadsConfig) -> bool:
    names = ("sequence_labels", "token_labels", "pair_labels", "problem")
    return all(getattr(source, name) == getattr(own, name) for name in names)


def _redrawn(config: FinetuneConfig) -> tuple[str, ...]:
    count, layers = config.regularization.reinit_layers, config.model.num_layers
    if count > layers:
        raise ValueError(f"regularization.reinit_layers: {count} is not allowed; the model has {layers} layers")
    top = tuple(f"encoder/layer_{layers - 1 - i}/" for i in range(count))
    return (*top, "pooler/") if count else ()


def _part(name: str) -> str:
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "encoder" else parts[0]
