"""Verification of an export or import: a bitwise comparison of parameters, and a comparison of outputs with other
libraries."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bert_jax.config import ModelSpec, SentenceConfig
from bert_jax.config.switches import function_of, training_values
from bert_jax.interop.hf.config_json import CONFIG_FILE, read_config
from bert_jax.interop.hf.peer import peer_outputs
from bert_jax.interop.model_bundle import Differences, ModelBundle
from bert_jax.interop.programs.serving import EXCLUDED, largest_differences, output_names, sample_inputs
from bert_jax.interop.readers import read_weights
from bert_jax.json_values import Json
from bert_jax.process.exits import VERIFICATION_FAILED, Stop

# Largest allowed difference of an output from transformers, and of a sentence vector from sentence-transformers.
# Both are relative to max(1, largest absolute value of the output).
BAR, SENTENCE_BAR = 2e-5, 1e-5


def judge(result: Differences | str, where: str, end: str, report: Callable[[str], None], *, strict: bool) -> None:
    """Report the differences in ``result``. If ``result`` is a string, it is the reason why nothing was compared.

    Raises ``Stop`` with VERIFICATION_FAILED if a difference is larger than allowed or, if ``strict`` is True, if
    the other library reports problems. The message begins with ``where`` and ends with ``end``.
    """
    if isinstance(result, str):
        report(f"outputs not compared: {result}")
        return
    for name, (difference, bar) in result.values.items():
        limit = f" (allowed {bar:.1e})" if np.isfinite(bar) else ""
        report(f"{name}: largest difference from {result.consumer} {difference:.1e}{limit}")
    if result.problems and strict:
        raise Stop(VERIFICATION_FAILED, f"{where}{result.consumer} reports {'; '.join(result.problems[:10])}{end}")
    for problem in result.problems:
        report(f"{result.consumer} reports {problem}")
    above = [
        f"{name} by {difference:.3g} (allowed: {bar:.3g})"
        for name, (difference, bar) in result.values.items()
        if not (difference <= bar and np.isfinite(difference))
    ]
    if above:
        raise Stop(VERIFICATION_FAILED, f"{where}{result.consumer} differs in {', '.join(above)}{end}")


def fingerprints(bundle: ModelBundle) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Return the shape and the SHA-256 digest of every array by name.

    With these values two models can be compared while only one of them is in memory.
    """
    return {
        name: (values.shape, hashlib.sha256(np.ascontiguousarray(values).data.cast("B")).digest())
        for name, values in bundle.params.items()
    }


def _description(spec: ModelSpec) -> dict[str, Json]:
    """Return the fields of ``spec`` that determine the outputs of a model, by name."""
    heads = {f"heads.{name}": value for name, value in dataclasses.asdict(spec.heads).items() if name != "dropout"}
    return {f"model.{name}": value for name, value in function_of(spec.model, spec.heads).items()} | heads


def check_read_back(folder: Path, bundle: ModelBundle, report: Callable[[str], None]) -> None:
    """Read the export in ``folder``; raise ``Stop`` if its config or parameters differ from those of ``bundle``.

    The values of ``bundle`` must already be rounded to the dtype of the export.
    """
    again = read_weights(folder)
    wanted, found = (_description(one.spec) for one in (bundle, again))
    if wanted != found:
        differing = {name: (wanted.get(name), value) for name, value in found.items() if wanted.get(name) != value}
        problem = ", ".join(f"{name} is {now}, expected {before}" for name, (before, now) in differing.items())
        raise Stop(VERIFICATION_FAILED, f"read back: {problem}; nothing was exported")
    wanted, found = (training_values(one.spec.model) for one in (bundle, again))
    for name, value in wanted.items():
        if found[name] != value:
            report(f"the format does not state model.{name} {value}; set it to train the exported model")
    expected, stored = fingerprints(bundle), fingerprints(again)
    other = [name for name in expected if expected[name] != stored.get(name)]
    if other:
        raise Stop(VERIFICATION_FAILED, f"read back: {other[0]} differs from the model; nothing was exported")
    report(f"read back: {len(stored)} arrays, bitwise equal")


def check_hf(folder: Path, bundle: ModelBundle, peer_python: str | None = None) -> Differences | str:
    """Compare the float32 outputs of ``folder`` in transformers with those of ``bundle``.

    ``bundle`` must have the values as stored, and no sentence head. The inputs are one token, padded rows, and rows
    of the maximum length. If transformers or torch is not installed, returns a string that reports this. Raises
    ``ValueError`` if transformers cannot load the folder or does not return an output of the model.
    """
    stated = read_config(folder / CONFIG_FILE).get("pad_token_id")
    padding = stated if isinstance(stated, int) and 0 <= stated < bundle.spec.model.vocab_size else None
    batches = list(sample_inputs(bundle.spec, padding=padding))
    return _check_peer("transformers", folder, bundle, batches, list(output_names(bundle.spec)), BAR, peer_python)


def check_sentence_transformers(
    folder: Path, bundle: ModelBundle, peer_python: str | None = None
) -> Differences | str:
    """Compare the sentence vectors of ``folder`` in sentence-transformers with those of ``bundle``.

    As :func:`check_hf`, except that all padding is on the right.
    """
    spec = dataclasses.replace(bundle.spec, sentence=bundle.spec.sentence or SentenceConfig())
    batches = []
    for batch in sample_inputs(spec):
        # sentence-transformers uses column 0 as the first token, so padding must not come first.
        order = np.argsort(1 - batch["attention_mask"], axis=1, kind="stable")
        batches.append({name: np.take_along_axis(values, order, axis=1) for name, values in batch.items()})
    bundle = dataclasses.replace(bundle, spec=spec)
    name = "sentence-transformers"
    return _check_peer(name, folder, bundle, batches, ["sentence_embedding"], SENTENCE_BAR, peer_python)


def _check_peer(
    package: str,
    folder: Path,
    bundle: ModelBundle,
    batches: list[dict[str, np.ndarray]],
    names: list[str],
    bar: float,
    peer_python: str | None,
) -> Differences | str:
    try:
        peer = peer_outputs(folder, batches, peer_python, sentences=package == "sentence-transformers")
    except LookupError as error:
        return str(error)
    if peer is None:
        python = peer_python or "this Python"
        return f"{python} lacks {package} or torch; set --peer_python to a Python that has both"
    version, outputs, problems = peer
    for batch in outputs:
        missing = [name for name in names if name not in batch]
        if missing:
            raise ValueError(f"{folder}: {package} returns {', '.join(batch)}, but not {', '.join(missing)}")
    answers = ({name: batch[name] for name in names} for batch in outputs)
    differences = largest_differences(bundle.spec, bundle.params, lambda _: next(answers), batches, names=names)
    largest = {
        name: max(float(np.abs(batch[name]).max(initial=0, where=batch[name] > EXCLUDED)) for batch in outputs)
        for name in names
    }
    values = {name: (value, bar * max(1.0, largest[name])) for name, value in differences.items()}
    return Differences(f"{package} {version}", values, problems)
