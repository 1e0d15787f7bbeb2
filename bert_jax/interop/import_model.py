"""``bert-jax import``: read a model in any supported format, save it, and verify the saved model.

The source is read a second time, and every tensor of the saved model must be bitwise equal to the corresponding
tensor of the source. If transformers is installed, it runs the source in a separate process, and the outputs must
match those of the saved model up to rounding. For a sentence-transformers folder, the outputs of
sentence-transformers must match too.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from bert_jax.config import ModelSpec
from bert_jax.interop.export_table import only_heads
from bert_jax.interop.hf.config_json import CLASSES, CONFIG_FILE, model_parts, names_family, read_config
from bert_jax.interop.hf.read import is_hf
from bert_jax.interop.hf.sentence_transformers import encoder_folder, is_sentence_transformers
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import read_native, write_saved
from bert_jax.interop.verification import check_hf, check_sentence_transformers, fingerprints, judge
from bert_jax.io.files import new_folder, whole_folder
from bert_jax.io.hub import local_folder
from bert_jax.io.untrusted_folder import needed
from bert_jax.process import exits

_NOTHING = "; nothing was imported"


def import_model(
    source: Path,
    target: Path,
    options: ReadOptions,
    *,
    verify: bool,
    report: Callable[[str], None],
    peer_python: str | None = None,
) -> None:
    """Read ``source`` in any supported format and save it to ``target``, which must not exist or must be empty.

    The saved tensors are always compared with those of the source. If ``verify`` is True and transformers is
    installed, the outputs of the saved model are also compared with those of the source in transformers.
    ``peer_python`` is the Python executable that runs transformers; None: the running Python. A model that fails a
    check is not saved. ``report`` is called with each line of the log.

    Raises ``ValueError`` if the model cannot be read or written, and ``exits.Stop`` with VERIFICATION_FAILED if a
    check fails.
    """
    target = new_folder(target)
    weights = read_weights(source, options)
    for note in weights.notes:
        report(note)
    report(_summary(weights))
    with whole_folder(target) as unverified:
        write_saved(unverified, weights)
        del weights  # so that only one model at a time is in memory
        report(_compare_tensors(source, unverified, options))
        if verify:
            _compare_outputs(source, unverified, peer_python, report)
        else:
            report("outputs not compared: --no_verify is set")


def _summary(weights: ModelBundle) -> str:
    model = weights.spec.model
    tokenizer = weights.spec.tokenizer
    return (
        f"{weights.spec.family}: {model.num_layers} layers, width {model.hidden_size}, {model.vocab_size} pieces; "
        f"heads: {', '.join(weights.spec.heads.present()) or 'none'}; "
        f"tokenizer: {tokenizer.file if tokenizer is not None else 'none'}"
    )


def _compare_tensors(source: Path, saved: Path, options: ReadOptions) -> str:
    """Read both models; raise ``exits.Stop`` unless specs and tokenizers are equal and parameters are bitwise
    equal."""
    again = read_weights(source, options)
    spec, content, expected = again.spec, again.tokenizer_content, fingerprints(again)
    del again
    written = read_native(saved, ReadOptions())
    found = fingerprints(written)
    differing = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    if spec != written.spec:
        differing.insert(0, "the model description")
    if content != written.tokenizer_content:
        differing.insert(0, "the tokenizer file")
    if differing:
        parts = ", ".join(differing[:10])
        problem = f"the saved model differs from the source in {parts}"
        raise exits.Stop(exits.VERIFICATION_FAILED, f"error: {source}: {problem}{_NOTHING}")
    return f"saved and read again: {len(found)} tensors bitwise equal to those of the source"


def _compare_outputs(source: Path, saved: Path, peer_python: str | None, report: Callable[[str], None]) -> None:
    """Compare the outputs of ``source`` in transformers with those of ``saved`` in this library.

    For a sentence-transformers folder, the outputs of sentence-transformers are compared too. Raises ``exits.Stop``
    if a difference is larger than allowed.
    """
    source = local_folder(source)
    sentences = is_sentence_transformers(source)
    encoder = encoder_folder(source) if sentences else source
    if not is_hf(encoder):
        report("outputs not compared: transformers does not read this format")
        return
    content = read_config(needed(encoder, CONFIG_FILE))
    if not names_family(content):
        report(f"outputs not compared: {CONFIG_FILE} names neither model_type nor architectures")
        return
    config = model_parts(content, str(encoder / CONFIG_FILE), allow_unknown=True)
    weights = read_native(saved, ReadOptions())
    sentences = sentences and weights.spec.sentence is not None  # a cross-encoder has no vectors
    try:
        random = _random_heads(weights, config.architecture)
        if random:
            what = f"{config.architecture} would initialize its {', '.join(random)} layer randomly"
            report(f"outputs not compared: {what}")
        else:
            spec = _as_class(weights.spec, config.architecture)
            result = check_hf(encoder, dataclasses.replace(weights, spec=spec), peer_python)
            judge(result, f"error: {source}: ", _NOTHING, report, strict=False)
        if sentences:
            result = check_sentence_transformers(source, weights, peer_python)
            judge(result, f"error: {source}: ", _NOTHING, report, strict=False)
    except ValueError as error:
        raise ValueError(f"{error}; set --no_verify to skip this comparison") from None


def _random_heads(weights: ModelBundle, architecture: str | None) -> list[str]:
    """Return the heads of the class ``architecture`` that the source lacks. transformers initializes them
    randomly."""
    held = CLASSES[architecture].classes[architecture] if architecture is not None else ()
    return [name for name in held if name != "pooler" and name not in weights.spec.heads.present()]


def _as_class(spec: ModelSpec, architecture: str | None) -> ModelSpec:
    """Return ``spec`` with only the heads of the class ``architecture``, so that both models have the same output
    names."""
    heads = only_heads(
        spec.heads, CLASSES[architecture].classes[architecture] if architecture is not None else ("pooler",)
    )
    return dataclasses.replace(spec, heads=heads, sentence=None)
