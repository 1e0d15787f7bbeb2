"""``bert-jax trim`` writes a model with the part of its vocabulary that a corpus uses."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from bert_jax.contrib.compression.vocabulary import Subset, subset
from bert_jax.inference.forward import forward
from bert_jax.inference.loaded import load, prepare
from bert_jax.inference.text_files import read_texts
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions, parameter_shapes
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.io.files import new_folder, whole_folder
from bert_jax.json_values import Json
from bert_jax.process import exits
from bert_jax.tokenization import build_tokenizer

_COMPARED, _LONGEST = 16, 64  # texts whose hidden states are compared, and their tokens
_LOGITS = 1e-5  # largest difference of the logits of kept pieces: sums of another order


def trim_model(
    source: Path,
    target: Path,
    corpus: Sequence[str],
    options: ReadOptions,
    *,
    ngram: int = 5,
    report: Callable[[str], None] = print,
) -> None:
    """Save the model ``source`` with the pieces that the texts of ``corpus`` use to the new folder ``target``.

    Every text of the corpus has the same pieces and bitwise equal hidden states as before; the probabilities of
    masked tokens are those among the kept pieces. ``corpus`` are files with one text per line (``.gz``: packed;
    ``.jsonl``: objects with ``text``). ``ngram``: see :func:`subset`. ``report`` is called with each line of the
    log.

    Raises ``ValueError`` if the model cannot be read or trimmed, or if ``target`` is not empty; ``exits.Stop`` with
    VERIFICATION_FAILED if an output of the saved model differs.
    """
    if ngram < 0:
        raise ValueError(f"--ngram: {ngram} is not allowed; allowed: 0 or more")
    target = new_folder(target)
    weights = read_weights(source, options)
    for note in weights.notes:
        report(note)
    spec, content = weights.spec, weights.tokenizer_content
    if spec.tokenizer is None or content is None:
        raise ValueError(f"{source}: the model has no tokenizer; add its vocabulary file")
    part = subset(spec.tokenizer, content, str(source), lambda: _texts(corpus), ngram)
    trimmed = _trimmed(weights, part)
    old, new = spec.model.vocab_size, len(part.ids)
    report(f"{part.texts:,} texts, {part.tokens:,} tokens: {new:,} of {old:,} pieces are kept")
    report(_sizes(weights, trimmed))
    with whole_folder(target) as unverified:
        write_saved(unverified, trimmed)
        del trimmed
        report(_compare(weights, unverified, part, corpus))
    report(f"saved: {target}")


def _texts(corpus: Sequence[str]) -> Iterator[str]:
    for name in corpus:
        for number, value in enumerate(read_texts((), name, False), 1):
            found = [value] if isinstance(value, str) else list(_texts_of(value))
            if not found:
                raise ValueError(f'{name}: entry {number}: an object without "text"; write {{"text": "..."}}')
            yield from found


def _texts_of(entry: Mapping[str, Json]) -> Iterator[str]:
    """Yield all texts of an object that ``bert-data records`` or ``bert-jax mine`` prints; words are one text."""
    for name in ("text", "text_pair"):
        if isinstance(text := entry.get(name), str):
            yield text
    for name in ("words", "choices", "negatives", "negative"):
        texts = entry.get(name)
        if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
            yield from [" ".join(texts)] if name == "words" else texts


def _trimmed(weights: ModelBundle, part: Subset) -> ModelBundle:
    """Return the model with the rows of the kept pieces in every array that has one for each piece."""
    spec = weights.spec
    assert spec.tokenizer is not None
    model = dataclasses.replace(spec.model, vocab_size=len(part.ids))
    if spec.model.separator_id in part.ids:
        model = dataclasses.replace(model, separator_id=int(np.searchsorted(part.ids, spec.model.separator_id)))
    smaller = dataclasses.replace(spec, model=model)
    params = {}
    for name, shape in parameter_shapes(smaller).items():
        array = weights.params[name]
        for axis, (before, after) in enumerate(zip(array.shape, shape, strict=True)):
            if before != after:
                array = np.take(array, part.ids, axis)
        params[name] = array
    origin = {**weights.origin, "pieces": f"{len(part.ids)} of {spec.model.vocab_size} pieces"}
    return dataclasses.replace(
        weights, spec=smaller, params=params, tokenizer_content=part.content, origin=origin, notes=()
    )


def _sizes(before: ModelBundle, after: ModelBundle) -> str:
    whole, part = (sum(array.size for array in bundle.params.values()) for bundle in (before, after))
    return f"parameters: {whole:,} to {part:,} ({part / whole:.0%})"


def _compare(weights: ModelBundle, saved: Path, part: Subset, corpus: Sequence[str]) -> str:
    """Compare both models on the first texts; raise ``exits.Stop`` unless hidden states are bitwise equal and the
    logits of kept pieces are equal up to rounding."""
    whole, smaller = prepare(weights), load(saved)
    spec = smaller.spec
    assert spec.tokenizer is not None
    tokenizer = build_tokenizer(spec.tokenizer, part.content, str(saved))
    length = min(_LONGEST, spec.model.max_length)
    rows = [
        tokenizer.build_inputs(tokenizer.encode(text), max_length=length)[0]
        for text in itertools.islice(_texts(corpus), _COMPARED)
    ]
    ids = np.full((len(rows), length), tokenizer.pad_id)
    mask = np.zeros_like(ids)
    for row, own in enumerate(rows):
        ids[row, : len(own)], mask[row, : len(own)] = own, 1
    outputs = [
        forward(model, {"input_ids": values, "attention_mask": mask})
        for model, values in ((whole, part.ids[ids]), (smaller, ids))
    ]
    visible = mask > 0
    for name, values in outputs[1].items():
        other = outputs[0][name]
        if name == "mlm_logits":
            difference = float(np.abs(other[..., part.ids] - values)[visible].max())
            scale = max(1.0, float(np.abs(values[visible]).max()))
            if not difference <= _LOGITS * scale:
                raise _differs(name, difference)
        elif name == "last_hidden_state" and not np.array_equal(other[visible], values[visible]):
            raise _differs(name, float(np.abs(other - values)[visible].max()))
    logits = "; the logits of kept pieces are equal up to rounding" if "mlm_logits" in outputs[1] else ""
    return f"hidden states of {len(rows)} texts: bitwise equal to those of the whole model{logits}"


def _differs(name: str, difference: float) -> exits.Stop:
    problem = f"{name} of the trimmed model differs by {difference:.3g}; nothing was saved"
    return exits.Stop(exits.VERIFICATION_FAILED, f"error: {problem}")
