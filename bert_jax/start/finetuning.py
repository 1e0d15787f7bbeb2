"""The plan of the start of a fine-tuning run."""

from bert_jax.config import RunOptions
from bert_jax.config.loader import Setting
from bert_jax.interop.model_bundle import ModelBundle
from bert_jax.interop.taken_over import Kept, kept_facts, sentence_settings
from bert_jax.io.storage import Location
from bert_jax.start.fixed_options import (
    Given,
    fixed_settings,
    kept_settings,
    model_section,
    recorded_settings,
    value_of,
    whole_name,
)
from bert_jax.start.initial_model import initial_weights
from bert_jax.start.start import Start
from bert_jax.start.tokenizer import check_padding, named_vocabulary, stored_tokenizer, vocabulary_size
from bert_jax.tokenization import build_tokenizer
from bert_jax.training.checkpoint.folder import saved_steps
from bert_jax.training.launch import RECORD
from bert_jax.training.workdir import read_record, record_text


def plan_finetuning(
    options: RunOptions, workdir: Location, given: Given, model: ModelBundle | None = None
) -> Start:
    """Plan the start of a fine-tuning run; see :func:`bert_jax.start.plan.plan_start`."""
    if saved_steps(workdir):
        record = read_record(workdir)
        source = record["init_from"] if record else ""
        if options.init_from and whole_name(options.init_from) != whole_name(source):
            began = f"the run in {workdir} started from {source or 'random weights'}"
            raise ValueError(f"--init_from {options.init_from}: {began}; omit --init_from or change --workdir")
        config, content = stored_tokenizer(workdir)
        kept: Kept = record["kept"] if record else {}
        settings = recorded_settings(workdir, given) if record else vocabulary_size(config, content, given)
        settings += sentence_settings(given, kept, f"{workdir / RECORD}")[0]
        settings += kept_settings(workdir, given)
        flags = [f"--{flag}" for flag in options.changes]
        ignored = f"{', '.join(flags)}: ignored, because the run resumes from its own checkpoint"
        return Start(
            settings=settings, messages=(ignored,) if flags else (), source=source, resumes=True,
            kept=kept, tokenizer_config=config, tokenizer_content=content,
        )  # fmt: skip
    if options.init_from:
        return _from_model(options, given, model)
    if options.changes:
        raise ValueError(f"--{options.changes[0]}: requires --init_from, which names the model to change")
    vocab = value_of(given, "data.vocab", "")
    if not vocab:
        remedy = "give the model to fine-tune, or set data.vocab to start from random weights"
        raise ValueError(f"--init_from: missing; {remedy}")
    if mixout := value_of(given, "regularization.mixout", 0.0):
        reason = "because mixout restores the weights of the initial model"
        raise ValueError(f"regularization.mixout: {mixout} requires --init_from, {reason}")
    config, content = named_vocabulary(vocab, given)
    settings = vocabulary_size(config, content, given)
    tokenizer = build_tokenizer(config, content, vocab)
    parts: tuple[str, ...] = value_of(given, "model.head_parts", ())
    if value_of(given, "model.global_tokens", 0) or "span_transform" in parts:
        settings += (Setting("data.vocab", "model.separator_id", str(tokenizer.sep_id)),)
    check_padding(value_of(given, "model.position_offset", 0), tokenizer, vocab)
    return Start(settings=settings, tokenizer_config=config, tokenizer_content=content)


def _from_model(options: RunOptions, given: Given, model: ModelBundle | None) -> Start:
    name, (_, weights) = options.init_from, initial_weights(options, given, model)
    notes = [f"starts from {name}", *weights.notes]
    config, content = weights.spec.tokenizer, weights.tokenizer_content
    if config is None or content is None:
        vocab = value_of(given, "data.vocab", "")
        if not vocab:
            raise ValueError(f"data.vocab: {name} has no tokenizer; set data.vocab to its vocabulary file")
        config, content = named_vocabulary(vocab, given)
        notes.append(f"{name} has no tokenizer: {vocab} is used as its vocabulary")
    pieces, network = build_tokenizer(config, content, name).vocab_size, weights.spec.model
    if pieces > network.vocab_size:
        rows = f"{network.vocab_size} word embeddings; use the vocabulary of this model"
        raise ValueError(f"{name}: the vocabulary has {pieces} pieces, but the model has only {rows}")
    section = model_section(network)
    kept, kept_notes = kept_facts(weights.spec)
    settings, setting_notes = sentence_settings(given, kept, name)
    notes += [*kept_notes, *setting_notes]
    if weights.spec.heads.activation:
        notes.append(f"not kept from the initial model: the score activation {weights.spec.heads.activation}")
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
