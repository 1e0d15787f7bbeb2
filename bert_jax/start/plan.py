"""The start of a run: from random parameters, another model (``--init_from``), an earlier phase
(``--continue_from``) or a checkpoint of the run itself.

:func:`plan_start` runs before the options are loaded. An initial model fixes the ``model`` section of the
config and the tokenizer; options on the command line must agree with the model (``fixed_options``).
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import yaml

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, PretrainConfig, RunOptions, TokenizerConfig
from bert_jax.config.loader import Setting, parse_settings, read_settings
from bert_jax.config.options import field_types
from bert_jax.config.schema import SWITCH
from bert_jax.interop.exchange import ModelBundle, parameter_shapes
from bert_jax.interop.hf.families.long import has_own_projections
from bert_jax.interop.taken_over import Kept, described, kept_facts, sentence_settings
from bert_jax.io.errors import one_line
from bert_jax.io.files import require_folder
from bert_jax.io.storage import Location, location
from bert_jax.start.fixed_options import (
    Given,
    fixed_settings,
    kept_settings,
    model_section,
    plan_phase,
    read_record,
    record_text,
    recorded_settings,
    whole_name,
    with_length,
)
from bert_jax.start.model_extension import (
    POSITIONS,
    extend_positions,
    extend_rows,
    initial_weights,
    plan_vocabulary,
)
from bert_jax.tokenization import FILE_NAMES, Tokenizer, WordPieceTokenizer, build_tokenizer, load_tokenizer
from bert_jax.training.checkpoint.restore import saved_steps
from bert_jax.training.launch import RECORD, InitialModel
from bert_jax.training.start import vocabulary_file

# File with the settings of the tokenizer in the workdir of a fine-tuning run.
TOKENIZER_FILE = "tokenizer_settings.json"
_EXTENSIONS = ("add_words", "vocab_slots", "extend_positions")
# Also in fine-tuning.
_BOTH = ("init_layers", "to_long", "gpt_inputs")
_CHANGES = (*_EXTENSIONS, *_BOTH)
_PRETRAINING_HEADS = ("mlm_head", "nsp_head", "rtd_head")
# Options of the case of a WordPiece, and their defaults.
_CASE: dict[str, Any] = {"lower_case": True, "strip_accents": "auto"}
# Layers between the encoder and the task head.
_TASK_LAYERS = ("feature_mix", "bilstm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The plan for the start of a run, created before any file is written."""

    # Options that the initial model or warm_start.yaml fixes; they replace those of the command line.
    settings: tuple[Setting, ...] = ()
    # Lines for the log.
    messages: tuple[str, ...] = ()
    # Initial model, extended to the vocabulary and positions of the run. None: the parameters are randomly
    # initialized, or restored from a checkpoint.
    weights: ModelBundle | None = None
    # Text of WORKDIR/warm_start.yaml; empty: the file is not changed.
    record: str = ""
    # Absolute path or URL of the initial model; empty: the parameters of step 0 were randomly initialized.
    source: str = ""
    # True if the run must resume from a checkpoint in its workdir.
    resumes: bool = False
    # Pretraining: path (or URL) and content of the vocabulary file to write; None: the file exists.
    vocabulary: tuple[str, bytes] | None = None
    # What the run takes over from the initial model besides, as ``taken_over`` describes it.
    kept: Kept = field(default_factory=dict)
    # Fine-tuning: settings and file content of the tokenizer.
    tokenizer_config: TokenizerConfig = TokenizerConfig()  # noqa: RUF009 (frozen)
    tokenizer_content: bytes = b""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a fine-tuning run."""
        return build_tokenizer(self.tokenizer_config, self.tokenizer_content, self.source or "data.vocab")


def plan_start(config_type: type, options: RunOptions, workdir: Location, arguments: Sequence[str]) -> Start:
    """Plan the start of a run whose config has the type ``config_type``.

    ``options`` are the parsed flags of the run, and ``arguments`` are all of its command-line arguments. A run that
    has a checkpoint resumes from it. Raises ``ValueError`` with a one-line message if ``workdir`` is a file, if a
    model cannot be read, if options contradict the model, or if words cannot be added to its vocabulary.
    """
    if isinstance(workdir, Path):
        require_folder(workdir, "--workdir: ")
    given = parse_settings(config_type, read_settings(arguments), [*field_types(type(options))])
    if config_type is PretrainConfig:
        start = _plan_pretraining(options, workdir, given)
        return dataclasses.replace(start, settings=with_length(start.settings, given))
    return _plan_finetuning(options, workdir, given)


def initial_model(
    start: Start, spec: ModelSpec, *, redrawn: tuple[str, ...] = (), redraw_head: bool = False
) -> InitialModel:
    """Return those parameters of the initial model that a model with ``spec`` can use. All other parameters are
    randomly initialized later.

    A task head and its CRF are returned only if both models have the same classes. Parameters whose names begin
    with a prefix in ``redrawn`` are not returned. If ``redraw_head`` is True, neither the task head nor the layers
    between the encoder and the head are returned.
    """
    messages = [*start.messages]
    kept = {}
    if start.weights is not None:
        wanted, heads = parameter_shapes(spec), start.weights.spec.heads
        for name, shape in wanted.items():
            part, values = name.partition("/")[0], start.weights.params.get(name)
            is_of_classes = part == "crf" or (part.endswith("_head") and part not in _PRETRAINING_HEADS)
            if values is None or tuple(values.shape) != shape or name.startswith(redrawn):
                continue
            if redraw_head and (is_of_classes or part in _TASK_LAYERS):
                continue
            if not is_of_classes or _has_classes_of(heads, spec.heads):
                kept[name] = values
        drawn = dict.fromkeys(_part(name) for name in wanted if name not in kept)
        unused = dict.fromkeys(_part(name) for name in start.weights.params if name not in wanted)
        messages += [f"randomly initialized: {', '.join(drawn)}"] if drawn else []
        messages += [f"not used: {', '.join(unused)}"] if unused else []
    return InitialModel(params=kept, messages=tuple(messages), record=start.record, resumes=start.resumes)


def _has_classes_of(source: HeadsConfig, own: HeadsConfig) -> bool:
    names = ("sequence_labels", "token_labels", "pair_labels", "problem")
    return all(getattr(source, name) == getattr(own, name) for name in names)


def _part(name: str) -> str:
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "encoder" else parts[0]


# ------------------------------------------------------------------ pretraining


def _plan_pretraining(options: RunOptions, workdir: Location, given: Given) -> Start:
    flags = [f"--{flag}" for flag in ("init_from", *_CHANGES) if getattr(options, flag)]
    if options.init_from and options.continue_from:
        raise ValueError(
            "--init_from and --continue_from: give only one of them; --init_from starts at step 0, and "
            "--continue_from continues an earlier run"
        )
    if saved_steps(workdir):
        message = f"{', '.join(flags)}: ignored, because the run resumes from its own checkpoint"
        settings = recorded_settings(workdir, given) + kept_settings(workdir, given)
        if options.continue_from and not any(setting.key == "data.vocab" for setting in settings):
            settings += _vocabulary_of(workdir, given)
        return Start(settings=settings, messages=(message,) if flags else ())
    if options.continue_from and set(flags) <= {"--extend_positions"}:
        settings, record = plan_phase(options.continue_from, given)
        return Start(settings=settings + _vocabulary_of(location(options.continue_from), given), record=record)
    if options.init_from:
        return _pretraining_from(options, given)
    if record := read_record(workdir):
        flag = "continue_from" if record["continue_from"] else "init_from"
        start = f"was started with --{flag} {record[flag]} and has no checkpoint"
        raise ValueError(f"{workdir}: the run {start}; give the same --{flag}, or another --workdir")
    if flags:
        first = next((flag for flag in flags if flag != "--extend_positions"), flags[0])
        raise ValueError(f"{first}: requires --init_from, which names the model to extend")
    return Start()


def _vocabulary_of(workdir: Location, given: Given) -> tuple[Setting, ...]:
    """Return the vocabulary of the run in ``workdir`` and its case as settings, so that shards are built with them.
    No settings if an option names a vocabulary, or if the folder of the shards has one."""
    path, shards = vocabulary_file(workdir), given.get("data.shards", ("", ""))[0]
    config = workdir / "config.yaml"
    named = any(given.get(f"data.{name}", ("", ""))[0] for name in ("vocab", "mixture"))
    if path is None or named or not shards or not config.is_file():
        return ()
    if any((location(shards) / name).is_file() for name in FILE_NAMES.values()):
        return ()
    stored = yaml.safe_load(config.read_text(encoding="utf-8"))["data"]
    names = (*_CASE, "word_segmenter")  # determine how the vocabulary is read
    case = {f"data.{name}": str(stored[name]).lower() for name in names if name in stored}
    values = {"data.vocab": str(path.absolute()), **case}
    return tuple(Setting(str(workdir), key, value) for key, value in values.items() if key not in given)


def _pretraining_from(options: RunOptions, given: Given) -> Start:
    """Plan the start of a pretraining run from ``--init_from``, with the words and positions that the run adds."""
    values, name = {key: value for key, (value, _) in given.items()}, options.init_from
    if options.gpt_inputs:
        raise ValueError("--gpt_inputs: allowed in fine-tuning only; omit it in pretraining")
    if options.to_long and options.extend_positions:
        raise ValueError("--extend_positions: not allowed with --to_long, which repeats the positions; omit it")
    weights = initial_weights(options, given)
    source = weights.spec.model
    vocabulary = plan_vocabulary(options, weights, values)
    positions, position_notes = _positions(options, source, given)
    model = dataclasses.replace(
        source,
        vocab_size=max(source.vocab_size, len(vocabulary.extension.pieces)),
        max_position_embeddings=positions,
    )
    params = extend_rows(weights.params, vocabulary.extension.made_of, model.vocab_size)
    table, how = params.get(POSITIONS), options.extend_positions
    if table is not None and how and positions > len(table):
        params[POSITIONS] = extend_positions(table, positions, source.position_offset, how)
    kept, kept_notes = kept_facts(weights.spec, longer=bool(options.extend_positions or options.to_long))
    kept_notes += [f"taken over for embed and exports: {described(kept)}"] if kept else []
    fixed = {"data.vocab": vocabulary.path, **vocabulary.settings}
    before, after = (model_section(config) | fixed for config in (source, model))
    return Start(
        settings=fixed_settings(given, before, after, name),
        messages=(f"starts from {name}", *weights.notes, *vocabulary.notes, *position_notes, *kept_notes),
        weights=dataclasses.replace(weights, spec=dataclasses.replace(weights.spec, model=model), params=params),
        record=record_text(name, before, after, trained_global=has_own_projections(weights.params), kept=kept),
        source=whole_name(name),
        vocabulary=None if vocabulary.content is None else (vocabulary.path, vocabulary.content),
    )


def pretraining_spec(config: PretrainConfig, model: Any) -> ModelSpec:
    """Return the spec of a pretraining run. ``model`` is the model that the objective of the run trains."""
    return ModelSpec(model=config.model, heads=getattr(model, "heads", HeadsConfig()))


def _positions(options: RunOptions, source: ModelConfig, given: Given) -> tuple[int, list[str]]:
    """Return the number of rows that the run needs in the position table, and lines for the log."""
    rows = source.max_position_embeddings
    if source.position_embeddings != "learned":
        return given.get("model.max_position_embeddings", (rows, ""))[0], []
    length = given.get("data.seq_length", (PretrainConfig().data.seq_length, "the default"))
    asked = [("data.seq_length", length[0] + source.position_offset, *length)]
    if "model.max_position_embeddings" in given:
        table = given["model.max_position_embeddings"]
        asked.append(("model.max_position_embeddings", table[0], *table))
    key, wanted, value, where = max(asked, key=lambda one: one[1])
    if wanted <= rows:
        unused = f"--extend_positions: not needed, because {options.init_from} has {source.max_length} positions"
        return rows, [unused] if options.extend_positions else []
    if not options.extend_positions:
        few = f"{options.init_from} has {source.max_length} positions"
        raise ValueError(f"{where}: {key}: {value}, but {few}; lower {key}, or set --extend_positions")
    grown = wanted - source.position_offset
    return wanted, [f"positions: {source.max_length} -> {grown} ({options.extend_positions})"]


# ------------------------------------------------------------------ fine-tuning


def _plan_finetuning(options: RunOptions, workdir: Location, given: Given) -> Start:
    for flag in ("continue_from", "teacher_outputs", *_EXTENSIONS):
        if getattr(options, flag):
            raise ValueError(f"--{flag}: allowed in pretraining only; omit it in fine-tuning")
    if saved_steps(workdir):
        record = read_record(workdir)
        source = record["init_from"] if record else ""
        if options.init_from and whole_name(options.init_from) != whole_name(source):
            began = f"the run in {workdir} started from {source or 'random weights'}"
            raise ValueError(f"--init_from {options.init_from}: {began}; omit --init_from or change --workdir")
        config, content = _stored_tokenizer(workdir)
        kept = record["kept"] if record else {}
        settings = recorded_settings(workdir, given) if record else _vocabulary_size(config, content, given)
        settings += sentence_settings(given, kept, f"{workdir / RECORD}")[0]
        settings += kept_settings(workdir, given)
        flags = [f"--{flag}" for flag in _BOTH if getattr(options, flag)]
        ignored = f"{', '.join(flags)}: ignored, because the run resumes from its own checkpoint"
        return Start(
            settings=settings, messages=(ignored,) if flags else (), source=source, resumes=True,
            kept=kept, tokenizer_config=config, tokenizer_content=content,
        )  # fmt: skip
    if options.init_from:
        return _finetuning_from(options, given)
    for flag in _BOTH:
        if getattr(options, flag):
            raise ValueError(f"--{flag}: requires --init_from, which names the model to change")
    vocab = given.get("data.vocab", ("", ""))[0]
    if not vocab:
        remedy = "give the model to fine-tune, or set data.vocab to start from random weights"
        raise ValueError(f"--init_from: missing; {remedy}")
    if mixout := given.get("regularization.mixout", (0.0, ""))[0]:
        reason = "because mixout restores the weights of the initial model"
        raise ValueError(f"regularization.mixout: {mixout} requires --init_from, {reason}")
    config, content = _vocabulary_file(vocab, given)
    settings = _vocabulary_size(config, content, given)
    tokenizer = build_tokenizer(config, content, vocab)
    if any(given.get(f"model.{switch}", (0, ""))[0] for switch in ("global_tokens", "span_transform")):
        settings += (Setting("data.vocab", "model.separator_id", str(tokenizer.sep_id)),)
    check_padding(given.get("model.position_offset", (0, ""))[0], tokenizer, vocab)
    return Start(settings=settings, tokenizer_config=config, tokenizer_content=content)


def _finetuning_from(options: RunOptions, given: Given) -> Start:
    name, weights = options.init_from, initial_weights(options, given)
    notes = [f"starts from {name}", *weights.notes]
    config, content = weights.spec.tokenizer, weights.tokenizer_content
    if config is None or content is None:
        vocab = given.get("data.vocab", ("", ""))[0]
        if not vocab:
            raise ValueError(f"data.vocab: {name} has no tokenizer; set data.vocab to its vocabulary file")
        config, content = _vocabulary_file(vocab, given)
        notes.append(f"{name} has no tokenizer: {vocab} is used as its vocabulary")
    pieces, model = build_tokenizer(config, content, name).vocab_size, weights.spec.model
    if pieces > model.vocab_size:
        rows = f"{model.vocab_size} word embeddings; use the vocabulary of this model"
        raise ValueError(f"{name}: the vocabulary has {pieces} pieces, but the model has only {rows}")
    section = model_section(model)
    kept, kept_notes = kept_facts(weights.spec)
    settings, setting_notes = sentence_settings(given, kept, name)
    notes += [*kept_notes, *setting_notes]
    if weights.spec.heads.activation:
        notes.append(f"not taken over: the activation {weights.spec.heads.activation} of the scores of the model")
    return Start(
        settings=(*fixed_settings(given, section, section, name), *settings),
        messages=tuple(notes),
        weights=weights,
        record=record_text(whole_name(name), section, section, kept=kept),
        source=whole_name(name),
        kept=kept,
        tokenizer_config=config,
        tokenizer_content=content,
    )


def check_padding(position_offset: int, tokenizer: Tokenizer, name: str | Path) -> None:
    """Raise ``ValueError`` if a model with ``position_offset`` rows before the first position would take another
    piece than that of ``tokenizer``, which ``name`` names, for padding: it is the last of these rows (RoBERTa)."""
    if position_offset and tokenizer.pad_id != position_offset - 1:
        raise ValueError(
            f"model.position_offset: {position_offset}, but padding has id {tokenizer.pad_id} in {name}; allowed: "
            f"{tokenizer.pad_id + 1}, the id of padding + 1 (model.max_position_embeddings counts these rows), or "
            "0 with family bert"
        )


def _vocabulary_size(config: TokenizerConfig, content: bytes, given: Given) -> tuple[Setting, ...]:
    """Return the setting ``model.vocab_size`` of a randomly initialized model; default: the number of pieces.

    Raises ``ValueError`` if the option ``model.vocab_size`` is less than the number of pieces.
    """
    pieces = build_tokenizer(config, content, "data.vocab").vocab_size
    size = given.get("model.vocab_size", (pieces, ""))[0]
    if size < pieces:
        raise ValueError(f"model.vocab_size: {size}, but the vocabulary has {pieces} pieces; omit model.vocab_size")
    return (Setting("data.vocab", "model.vocab_size", str(size)),)


def _vocabulary_file(name: str, given: Given) -> tuple[TokenizerConfig, bytes]:
    """Return the tokenizer settings for the vocabulary file ``name`` (the option ``data.vocab``), and its
    content."""
    path, names = Path(name), {Path(file).suffix: file for file in FILE_NAMES.values()}
    if path.suffix not in names or not path.is_file():
        kinds = "a vocab.txt (WordPiece), .model (SentencePiece) or tokenizer.json"
        raise ValueError(f"data.vocab: {path} is not a vocabulary file; allowed: {kinds}")
    lower_case, strip = (given.get(f"data.{name}", (value, ""))[0] for name, value in _CASE.items())
    tokenizer = load_tokenizer(path, lower_case=lower_case, strip_accents=SWITCH[strip])
    if isinstance(tokenizer, WordPieceTokenizer) and path.suffix == ".json":
        return TokenizerConfig(**tokenizer.rules), tokenizer.vocab_txt
    return TokenizerConfig(file=names[path.suffix], **tokenizer.rules), path.read_bytes()


def store_tokenizer(folder: Path, start: Start) -> None:
    """Write the vocabulary file and the tokenizer settings into ``folder``, the workdir of a fine-tuning run."""
    (folder / start.tokenizer_config.file).write_bytes(start.tokenizer_content)
    text = json.dumps(dataclasses.asdict(start.tokenizer_config), indent=1)
    (folder / TOKENIZER_FILE).write_text(f"{text}\n", encoding="utf-8")


def _stored_tokenizer(workdir: Location) -> tuple[TokenizerConfig, bytes]:
    path = workdir / TOKENIZER_FILE
    try:
        config = TokenizerConfig(**json.loads(path.read_text(encoding="utf-8")))
        return config, (workdir / config.file).read_bytes()
    except (OSError, ValueError, TypeError) as error:
        problem = one_line(error)
        raise ValueError(f"{path}: not readable ({problem}); restore it, or give another --workdir") from None
