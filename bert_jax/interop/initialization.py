"""Starting a pretraining run from a model that is there (``run_pretrain.py --init_from``).

The source fixes the ``model`` section and the vocabulary; what the recipe or the flags say of them must agree. What
was fixed is kept in ``WORKDIR/warm_start.yaml``, so that a resumed run has it without flags and without the source.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bert_jax.config import ModelConfig, ModelSpec, PretrainConfig, TokenizerConfig, pretraining_heads
from bert_jax.config.loader import RunOptions, Setting, parse_settings
from bert_jax.config.schema import PRESETS
from bert_jax.interop.exchange import ReadOptions, Weights, parameter_shapes
from bert_jax.interop.readers import leaves_activation_open, leaves_case_open, read_weights
from bert_jax.interop.vocabulary_extension import (
    POSITIONS,
    Extension,
    compare,
    extend_positions,
    extend_rows,
    read_words,
    require_wordpiece,
    with_words,
)
from bert_jax.io.storage import Location, location
from bert_jax.tokenization import Tokenizer, WordPieceTokenizer, build_tokenizer, load_tokenizer
from bert_jax.training.checkpoint.restore import saved_steps
from bert_jax.training.launch import RECORD, WarmStart

# What a run may say otherwise than its source: it changes no parameter. (A vocabulary is compared by its pieces.)
MAY_DIFFER = {"model.hidden_dropout", "model.attention_dropout", "model.initializer_range", "data.vocab"}
_FILES = {"wordpiece": "vocab.txt", "sentencepiece": "tokenizer.model", "byte_bpe": "tokenizer.json"}
_PARTS = {"mlm_head": "MLM head", "nsp_head": "sentence-pair head", "pooler": "pooler"}
_FLAGS = ("init_from", "add_words", "vocab_slots", "extend_positions")
_FORMAT = 1

Values = Mapping[str, tuple[Any, str]]


@dataclasses.dataclass(frozen=True)
class Start:
    """How a run starts: what training is given, and the vocabulary that has to lie with the shards."""

    warm_start: WarmStart
    # File (or URL) and content; None: the run's vocabulary is there.
    vocabulary: tuple[str, bytes] | None = None


def resolve(options: RunOptions, workdir: Location, settings: Sequence[Setting]) -> tuple[Start, list[Setting]]:
    """The start that ``options`` and ``workdir`` ask for, and ``settings`` with what it fixes. Writes nothing.

    A workdir with a checkpoint continues from that, whatever the options. Raises ``ValueError`` in one line: a
    source that cannot be read, settings that contradict it, words that cannot be added.
    """
    if options.init_from and options.continue_from:
        raise ValueError(
            "--init_from starts at step 0 with a fresh optimizer, --continue_from goes on with an earlier run; "
            "give one of them"
        )
    if saved_steps(workdir):
        unused = [f"--{flag}" for flag in _FLAGS if getattr(options, flag)]
        said = f"{', '.join(unused)}: not looked at, the run continues from its own checkpoint"
        start = Start(WarmStart(messages=(said,) if unused else ()))
        return start, _with_record(workdir, settings)
    if options.continue_from:
        return Start(WarmStart()), _with_record(location(options.continue_from), settings)
    if options.init_from:
        return _fresh(options, settings)
    record = read_record(workdir)
    if record is not None:
        raise ValueError(
            f"{workdir}: its run was to start from {record['init_from']} and saved no checkpoint; give the same "
            "--init_from again, or another --workdir"
        )
    flag = next(flag for flag in _FLAGS if getattr(options, flag))
    raise ValueError(f"--{flag}: needs --init_from, the model that it is about")


def _with_record(workdir: Location, settings: Sequence[Setting]) -> list[Setting]:
    record = read_record(workdir)
    if record is None:
        return list(settings)
    return merge_settings(settings, record["source"], record["resolved"], f"{workdir / RECORD}")


def read_record(workdir: Location) -> dict[str, Any] | None:
    """What a start wrote into ``WORKDIR/warm_start.yaml``, None where there is none."""
    path = workdir / RECORD
    if not path.is_file():
        return None
    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
        if record["format"] != _FORMAT:
            raise ValueError(f"format {record['format']}")
        return {name: record[name] for name in ("init_from", "source", "resolved")}
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(
            f"{path}: not readable ({problem}); delete it and give --config {workdir}/config.yaml"
        ) from None


def record_text(name: str, source: Mapping[str, Any], resolved: Mapping[str, Any]) -> str:
    """Text of ``WORKDIR/warm_start.yaml``: what the model ``name`` has, and what the run made of it."""
    record = {"format": _FORMAT, "init_from": name, "source": dict(source), "resolved": dict(resolved)}
    return yaml.safe_dump(record, sort_keys=False)


def merge_settings(
    settings: Sequence[Setting],
    source: Mapping[str, Any],
    resolved: Mapping[str, Any],
    name: str,
    config_type: type = PretrainConfig,
) -> list[Setting]:
    """``resolved``, then those ``settings`` that it leaves open. Raises ``ValueError`` for one that is neither what
    the source has nor what was resolved."""
    for key, (value, where) in parse_settings(config_type, settings).items():
        if key not in resolved or key in MAY_DIFFER or value in (source[key], resolved[key]):
            continue
        raise ValueError(f"{where}: {key}: {value}, but {name} has {source[key]}; leave it out or give that")
    fixed = [Setting(name, key, str(value)) for key, value in resolved.items()]
    return fixed + [setting for setting in settings if setting.key not in resolved or setting.key in MAY_DIFFER]


def _fresh(options: RunOptions, settings: Sequence[Setting]) -> tuple[Start, list[Setting]]:
    values = parse_settings(PretrainConfig, settings)
    given = {key: value for key, (value, _) in values.items()}
    name = options.init_from
    weights = read_weights(Path(name), _read_options(Path(name), given))
    source = weights.spec.model
    vocabulary = _Vocabulary.of(options, weights, given)
    positions, position_notes = _positions(options, source, values)
    model = dataclasses.replace(
        source,
        vocab_size=max(source.vocab_size, len(vocabulary.extension.pieces)),
        max_position_embeddings=positions,
    )
    params = extend_rows(weights.params, vocabulary.extension.made_of, model.vocab_size)
    if POSITIONS in params and positions > len(params[POSITIONS]):
        assert options.extend_positions
        params[POSITIONS] = extend_positions(
            params[POSITIONS], positions, source.position_offset, options.extend_positions
        )
    has_nsp = given.get("data.next_sentence", PretrainConfig().data.next_sentence) != "none"
    params, head_notes = _for_pretraining(params, model, has_nsp)

    fixed = {"data.vocab": vocabulary.path, **vocabulary.settings}
    before, after = (model_section(config) | fixed for config in (source, model))
    settings = merge_settings(settings, before, after, name)
    notes = [f"starts from {name}", *weights.notes, *vocabulary.notes, *position_notes, *head_notes]
    start = WarmStart(params=params, messages=tuple(notes), record=record_text(name, before, after))
    place = None if vocabulary.content is None else (vocabulary.path, vocabulary.content)
    return Start(start, place), settings


def _read_options(path: Path, given: Mapping[str, Any]) -> ReadOptions:
    """What the settings say where a source leaves it open."""
    preset = PRESETS[given.get("training.mode", "standard")]
    activation = given.get("model.activation", preset.get("model.activation"))
    is_open = leaves_activation_open(path) and activation in ("gelu", "gelu_tanh")
    # A model of ours says its case; where the recipe says another, that is a contradiction to name below.
    lower_case = given.get("data.lower_case") if leaves_case_open(path) else None
    return ReadOptions(lower_case=lower_case, activation=activation if is_open else None)


def model_section(model: ModelConfig) -> dict[str, Any]:
    """The options of the model section by their keys."""
    return {f"model.{key}": value for key, value in dataclasses.asdict(model).items()}


# ------------------------------------------------------------------ vocabulary


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """The run's vocabulary: file, content if it is to be written, settings, words added to the source's, notes."""

    path: str
    content: bytes | None
    settings: dict[str, Any]
    extension: Extension
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: RunOptions, weights: Weights, given: Mapping[str, Any]) -> "_Vocabulary":
        vocab: str = given.get("data.vocab", "")
        config, content = weights.spec.tokenizer, weights.tokenizer_content
        if options.vocab_slots and not options.add_words:
            raise ValueError("--vocab_slots: needs --add_words, the words to put there")
        if config is None or content is None:
            return cls._without_source(options, weights, vocab, given)
        tokenizer = _source_tokenizer(config, content, options.init_from)
        settings = {"data.lower_case": config.lower_case} if tokenizer.kind == "wordpiece" else {}
        if vocab and not options.add_words:
            extension = _given(vocab, tokenizer, config, options.init_from)
            return cls(vocab, None, settings, extension, extension.notes)
        shards: str = given.get("data.shards", "")
        if not shards:
            raise ValueError("data.shards: not given; name the folder of the shards, to be built there if missing")
        path = str(location(shards) / _FILES[tokenizer.kind])
        if not options.add_words:
            return cls(path, content, settings, _as_it_is(tokenizer))
        if vocab and location(vocab).resolve() != location(path).resolve():
            raise ValueError(f"data.vocab: --add_words makes the run's vocabulary, {path}; leave data.vocab out")
        wordpiece = require_wordpiece(tokenizer, "--add_words")
        words, notes = read_words(Path(options.add_words), wordpiece)
        extension = with_words(wordpiece, words, in_slots=options.vocab_slots)
        content = ("\n".join(extension.pieces) + "\n").encode()
        return cls(path, content, settings, extension, (*notes, *extension.notes))

    @classmethod
    def _without_source(
        cls, options: RunOptions, weights: Weights, vocab: str, given: Mapping[str, Any]
    ) -> "_Vocabulary":
        if options.add_words or not vocab:
            what = "--add_words" if options.add_words else "data.vocab"
            raise ValueError(
                f"{what}: {options.init_from} comes without a tokenizer; name its vocabulary in data.vocab"
            )
        lower_case = given.get("data.lower_case", PretrainConfig().data.lower_case)
        tokenizer = load_tokenizer(vocab, lower_case=lower_case)
        rows = weights.spec.model.vocab_size
        if tokenizer.vocab_size > rows:
            raise ValueError(
                f"data.vocab: {vocab} has {tokenizer.vocab_size} pieces, but {options.init_from} {rows} rows"
            )
        note = f"{options.init_from} comes without a tokenizer: {vocab} is taken for its vocabulary"
        return cls(vocab, None, {}, _as_it_is(tokenizer), (note,))


def _as_it_is(tokenizer: Tokenizer) -> Extension:
    return Extension(tuple(tokenizer.pieces(range(tokenizer.vocab_size))), {})


def _source_tokenizer(config: TokenizerConfig, content: bytes, name: str) -> Tokenizer:
    """The source's tokenizer. Raises ``ValueError`` when shards cannot be made with its settings."""
    tokenizer = build_tokenizer(config, content, name)
    plain = TokenizerConfig(file=config.file, lower_case=config.lower_case)
    if build_tokenizer(plain, content, name).fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"{name}: its tokenizer has lower_case {config.lower_case}, strip_accents {config.strip_accents}, "
            f"split_cjk {config.split_cjk}; shards are made with accents stripped where text is lower-cased, and "
            "with CJK characters apart"
        )
    return tokenizer


def _given(vocab: str, tokenizer: Tokenizer, config: TokenizerConfig, name: str) -> Extension:
    """``data.vocab`` as the source's vocabulary or one that begins with it."""
    other = load_tokenizer(vocab, lower_case=config.lower_case)
    if other.fingerprint == tokenizer.fingerprint:
        return _as_it_is(tokenizer)
    if not isinstance(other, WordPieceTokenizer) or not isinstance(tokenizer, WordPieceTokenizer):
        raise ValueError(f"data.vocab: {vocab} is not the vocabulary of {name}; leave it out to use that")
    return compare(tokenizer, other.pieces(range(other.vocab_size)), f"data.vocab: {vocab}")


# ------------------------------------------------------------------ positions and heads


def _positions(options: RunOptions, source: ModelConfig, values: Values) -> tuple[int, list[str]]:
    """Rows of the position table that the run needs, and what to say of them."""
    rows = source.max_position_embeddings
    if source.position_embeddings == "sinusoidal":
        return values.get("model.max_position_embeddings", (rows, ""))[0], []
    length = values.get("data.seq_length", (PretrainConfig().data.seq_length, "the default"))
    asked = [("data.seq_length", length[0] + source.position_offset, *length)]
    if "model.max_position_embeddings" in values:
        table = values["model.max_position_embeddings"]
        asked.append(("model.max_position_embeddings", table[0], *table))
    key, wanted, value, where = max(asked, key=lambda one: one[1])
    if wanted <= rows:
        unused = f"--extend_positions: not needed, {options.init_from} has {source.max_length} positions"
        return rows, [unused] if options.extend_positions else []
    if not options.extend_positions:
        raise ValueError(
            f"{where}: {key}: {value}, but {options.init_from} has {source.max_length} positions; add "
            "--extend_positions tile or interpolate, or give less"
        )
    grown = wanted - source.position_offset
    return wanted, [f"positions: {source.max_length} -> {grown} ({options.extend_positions})"]


def _for_pretraining(
    params: Mapping[str, np.ndarray], model: ModelConfig, has_nsp: bool
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Those of ``params`` that pretraining has, and a line for each head that is left out or starts fresh."""
    shapes = parameter_shapes(ModelSpec(model=model, heads=pretraining_heads(has_nsp)))
    kept = {name: params[name] for name in shapes if name in params}
    missing = {name.partition("/")[0]: None for name in shapes if name not in kept}
    unused = {name.partition("/")[0]: None for name in params if name not in shapes}
    notes = [f"{_PARTS[part]}: not in the source, starts fresh" for part in missing]
    return kept, notes + [f"{_PARTS.get(part, part)}: not part of this pretraining, left out" for part in unused]
