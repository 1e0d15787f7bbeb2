"""Settings that a run keeps from its initial model in addition to sizes and parameters.

They are the conversion of texts to vectors and the limits of the inputs; ``WORKDIR/warm_start.yaml`` records them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from bert_jax.config import ModelSpec, SentenceConfig, SentenceModule
from bert_jax.config.loader import Setting


class Kept(TypedDict, total=False):
    """The facts, as plain values; a missing one has the default of a run."""

    sentence: Mapping[str, Any]
    max_length: int
    truncation_side: Literal["right", "left"]
    pair_types: bool


def kept_facts(spec: ModelSpec, *, longer: bool = False) -> tuple[Kept, list[str]]:
    """Return the facts that a run keeps from an initial model with ``spec``, and notes. The dense layers of
    sentence vectors are not kept, nor, if ``longer``, a maximum length below the number of positions."""
    facts: Kept = {}
    notes: list[str] = []
    if spec.sentence is not None:
        modules = tuple(module for module in spec.sentence.modules if module.kind != "dense")
        if modules != spec.sentence.modules:
            notes.append("not kept from the initial model: the dense layers after pooling")
        facts["sentence"] = dataclasses.asdict(dataclasses.replace(spec.sentence, modules=modules))
    if (tokenizer := spec.tokenizer) is not None:
        if not longer and 0 < tokenizer.max_length < spec.model.max_length:
            facts["max_length"] = tokenizer.max_length
        if tokenizer.truncation_side != "right":
            facts["truncation_side"] = tokenizer.truncation_side
        if not tokenizer.pair_types:
            facts["pair_types"] = False
    return facts, notes


def with_kept(spec: ModelSpec, kept: Kept) -> ModelSpec:
    """Return the ``spec`` of a pretraining run with the facts of :func:`kept_facts`."""
    tokenizer = spec.tokenizer
    if tokenizer is not None:
        tokenizer = dataclasses.replace(
            tokenizer,
            max_length=kept.get("max_length", tokenizer.max_length),
            truncation_side=kept.get("truncation_side", tokenizer.truncation_side),
            pair_types=kept.get("pair_types", tokenizer.pair_types),
        )
    return dataclasses.replace(spec, sentence=_sentence(kept) or spec.sentence, tokenizer=tokenizer)


def with_prompts(own: SentenceConfig | None, kept: Kept) -> SentenceConfig | None:
    """Return ``own``, the pooling of a fine-tuned model, with the prompts of the initial model."""
    source = _sentence(kept)
    if own is None or source is None:
        return own
    names = ("prompts", "default_prompt", "include_prompt")
    return dataclasses.replace(own, **{name: getattr(source, name) for name in names})


def sentence_settings(
    given: Mapping[str, tuple[Any, str]], kept: Kept, name: str
) -> tuple[tuple[Setting, ...], list[str]]:
    """Return the options of fine-tuning that follow from ``kept``, unless the command line sets them, and lines
    that name the kept and the other settings."""
    source = _sentence(kept)
    if source is None:
        return (), []
    if given.get("task.kind", ("classification", ""))[0] != "sentence":
        return (), [f"not kept from the initial model, because the task has no text vectors: {described(kept)}"]
    values: dict[str, str | int] = {}
    values["sentence.normalize"] = any(module.kind == "normalize" for module in source.modules)
    if len(source.pooling) == 1:
        values["sentence.pooling"] = source.pooling[0]
    if "max_length" in kept:
        values["task.max_length"] = kept["max_length"]
    taken = {key: value for key, value in values.items() if key not in given}
    lines = [f"{key} {value}" for key, value in taken.items()] + _prompts(source)
    notes = [f"kept from the initial model: {', '.join(lines)}"] if lines else []
    if len(source.pooling) > 1:
        poolings = ", ".join(source.pooling)
        notes.append(f"not kept from the initial model: the poolings {poolings}; set one as sentence.pooling")
    if source.default_prompt:
        notes.append(f"the default prompt {source.default_prompt} is added to texts of embed, not of the run")
    return tuple(Setting(name, key, str(value)) for key, value in taken.items()), notes


def described(kept: Kept) -> str:
    """Return a list of the facts in ``kept``."""
    source, lines = _sentence(kept), list[str]()
    if source is not None:
        lines += [f"pooling {' and '.join(source.pooling)}", *(["normalization"] if source.modules else [])]
        lines += _prompts(source)
    lines += [f"{key} {value}" for key, value in kept.items() if key != "sentence"]
    return ", ".join(lines)


def _prompts(source: SentenceConfig) -> list[str]:
    return [f"the prompts {', '.join(name for name, _ in source.prompts)}"] if source.prompts else []


def _sentence(kept: Kept) -> SentenceConfig | None:
    """Return the pooling in ``kept``, whose tuples may be lists."""
    if "sentence" not in kept:
        return None
    values = dict(kept["sentence"])
    values["pooling"], values["prompts"] = tuple(values["pooling"]), tuple(map(tuple, values["prompts"]))
    values["modules"] = tuple(SentenceModule(**module) for module in values["modules"])
    return SentenceConfig(**values)
