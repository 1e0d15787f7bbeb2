"""The work of ``bert-jax import``: read any model, save it, prove that what was saved is what was read.

Two proofs: every tensor of the saved model has the bits of the source's, which is read once more for it; and the
outputs equal those of transformers, and of sentence-transformers for a folder of its kind, on the source itself, in
a process of its own, where those are installed.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bert_jax.config import HeadsConfig, ModelSpec
from bert_jax.interop.exchange import ModelBundle, ReadOptions
from bert_jax.interop.hf.config_json import CLASSES, CONFIG_FILE, model_parts, read_config
from bert_jax.interop.hf.read import is_hf
from bert_jax.interop.hf.sentence_transformers import encoder_folder, is_sentence_transformers
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import read_native, write_saved
from bert_jax.interop.verification import check_hf, check_sentence_transformers, fingerprints, judge
from bert_jax.io.files import whole_folder
from bert_jax.io.untrusted_folder import needed
from bert_jax.process import exits


def import_model(
    source: Path,
    target: Path,
    options: ReadOptions,
    *,
    verify: bool,
    report: Callable[[str], None],
    peer_python: str | None = None,
) -> None:
    """Read ``source`` in any readable format and save it at ``target``, which must not exist or be empty.

    The saved tensors are always compared with the source's. ``verify`` also compares outputs with transformers,
    for which ``peer_python`` may name another Python. A model that fails a check is not left at ``target``.
    Raises ``ValueError`` for what cannot be read or written, ``exits.Stop`` with VERIFICATION_FAILED for a check.
    """
    target = target.resolve()  # a link is followed, also to where there is nothing yet
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target}: {'a file' if target.is_file() else 'not empty'}; give a new folder")
    weights = read_weights(source, options)
    for note in weights.notes:
        report(note)
    report(_summary(weights))
    with whole_folder(target) as unverified:
        write_saved(unverified, weights)
        del weights  # so that one model at a time is in memory
        report(_compare_tensors(source, unverified, options))
        if verify:
            _compare_outputs(source, unverified, peer_python, report)
        else:
            report("outputs not compared: not wanted")


def _summary(weights: ModelBundle) -> str:
    model = weights.spec.model
    tokenizer = weights.spec.tokenizer
    return (
        f"{weights.spec.family}: {model.num_layers} layers, width {model.hidden_size}, {model.vocab_size} pieces; "
        f"heads: {', '.join(weights.spec.heads.present()) or 'none'}; "
        f"tokenizer: {tokenizer.file if tokenizer is not None else 'none'}"
    )


def _compare_tensors(source: Path, saved: Path, options: ReadOptions) -> str:
    """Read both once more; raise ``exits.Stop`` unless spec, tokenizer and every bit agree."""
    again = read_weights(source, options)
    spec, content, expected = again.spec, again.tokenizer_content, fingerprints(again)
    del again
    written = read_native(saved, ReadOptions())
    found = fingerprints(written)
    differing = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    if spec != written.spec:
        differing.insert(0, "its description")
    if content != written.tokenizer_content:
        differing.insert(0, "its tokenizer file")
    if differing:
        raise exits.Stop(
            exits.VERIFICATION_FAILED,
            f"error: {source}: what was saved differs from the source, read again, in {', '.join(differing[:10])}; "
            "nothing was imported",
        )
    return f"saved and read again: {len(found)} tensors bitwise equal to the source's"


def _compare_outputs(source: Path, saved: Path, peer_python: str | None, report: Callable[[str], None]) -> None:
    """Run transformers (and sentence-transformers, for a folder of its kind) on ``source`` and this library on
    ``saved``; raise ``exits.Stop`` above the bar."""
    sentences = is_sentence_transformers(source)
    encoder = encoder_folder(source) if sentences else source
    if not is_hf(encoder):
        report("outputs not compared: transformers does not read this format")
        return
    config = model_parts(read_config(needed(encoder, CONFIG_FILE)), str(encoder / CONFIG_FILE))
    weights = read_native(saved, ReadOptions())
    if not all(np.isfinite(values).all() for values in weights.params.values()):
        report("outputs not compared: some weights are NaN or infinite")
        return
    end = "; nothing was imported"
    try:
        random = _random_heads(weights, config.architecture)
        if random:
            what = f"{config.architecture} would take random values for its {', '.join(random)} layer"
            report(f"outputs not compared: {what}")
        else:
            spec = _as_class(weights.spec, config.architecture)
            result = check_hf(encoder, dataclasses.replace(weights, spec=spec), peer_python)
            judge(result, f"error: {source}: ", end, report, strict=False)
        if sentences:
            result = check_sentence_transformers(source, weights, peer_python)
            judge(result, f"error: {source}: ", end, report, strict=False)
    except ValueError as error:
        raise ValueError(f"{error}; without this comparison: --no_verify") from None


def _random_heads(weights: ModelBundle, architecture: str | None) -> list[str]:
    """Return the heads of the transformers class that the source lacks; they would be random in transformers."""
    held = CLASSES[architecture] if architecture is not None else ()
    return [name for name in held if name != "pooler" and name not in weights.spec.heads.present()]


def _as_class(spec: ModelSpec, architecture: str | None) -> ModelSpec:
    """``spec`` with the heads that the transformers class has, so that outputs have that class's names."""
    held = CLASSES[architecture] if architecture is not None else ("pooler",)
    none = HeadsConfig()
    heads = dataclasses.replace(
        spec.heads,
        **{name: getattr(none, name) for name in ("mlm", "nsp", "span", "choice", "pooler") if name not in held},
        **{f"{name}_labels": () for name in ("sequence", "token") if name not in held},
    )
    return dataclasses.replace(spec, heads=heads, sentence=None)
