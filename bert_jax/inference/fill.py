"""Prediction of the pieces at masks, with a model that has a masked-LM head."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.inference.batching import BatchOptions, DeviceOutputs, Outputs
from bert_jax.inference.engine import Engine, checked_texts
from bert_jax.io.text_lines import Each
from bert_jax.model.bert import bert_output, present
from bert_jax.model.canonical import Params
from bert_jax.tasks.task import ModelInput

# Maximum number of masked positions of a row; for a row with more masks the program computes every position.
_MASKS = 16
# Logits over the vocabulary are large, so fewer texts are processed together.
_WINDOW = 1024


@dataclasses.dataclass(frozen=True)
class FilledMask:
    """The best pieces for a masked position, with their probabilities."""

    predictions: tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class FilledText:
    """A text with masks, and the predictions for each mask, in order."""

    text: str
    masks: tuple[FilledMask, ...]


def fill_mask(
    loaded: Engine, texts: Iterable[str], *, top: int = 5, batches: BatchOptions = BatchOptions()
) -> Iterator[FilledText]:
    """Yield the ``top`` most probable pieces, with their probabilities, for every mask of each text, in order;
    ``texts`` may be endless.

    The vocabulary defines the text of a mask ([MASK]; <mask> in RoBERTa). Raises ``ValueError`` for a model without
    a masked-LM head, a text without a mask, and a text that exceeds the maximum length of the model.
    """
    if not loaded.spec.heads.mlm:
        raise ValueError(f"{loaded.name}: no masked-LM head; use a model that has one")
    if top < 1:
        raise ValueError(f"top: {top} is not allowed; use 1 or more")
    tokenizer = loaded.need_tokenizer()
    tokenizer.require_mask(loaded.name)
    pieces = min(tokenizer.vocab_size, loaded.spec.model.vocab_size)
    count = min(top, pieces)
    limit = loaded.spec.max_length
    mask = tokenizer.pieces([tokenizer.mask_id])[0]

    def checked(text: str) -> str:
        ids = tokenizer.encode_with_masks(text)
        if tokenizer.mask_id not in ids:
            raise ValueError(f"{text!r} does not contain {mask}; write {mask} in place of the missing word")
        if len(ids) + 2 > limit:
            length = f"{len(ids) + 2} tokens, special tokens included"
            raise ValueError(f"{text[:40]!r} has {length}; the maximum is {limit}")
        return text

    def featurize(part: list[str]) -> list[ModelInput]:
        texts = map(tokenizer.encode_with_masks, part)
        return [ModelInput(number, (loaded.build(ids),)) for number, ids in enumerate(texts)]

    def filled(text: str, unit: ModelInput, output: Outputs) -> FilledText:
        masks = np.flatnonzero(np.asarray(unit.sequences[0].ids) == tokenizer.mask_id)
        best = zip(output["ids"][masks].tolist(), output["probabilities"][masks].tolist(), strict=True)
        return FilledText(
            text,
            tuple(FilledMask(tuple(zip(tokenizer.pieces(ids), values, strict=True))) for ids, values in best),
        )

    def run(params: Params, batch: dict[str, np.ndarray]) -> DeviceOutputs:
        most = int((batch["input_ids"] == tokenizer.mask_id).sum(axis=1).max())
        slots = _MASKS if most <= _MASKS else batch["input_ids"].shape[1]
        best = _best(loaded, tokenizer.mask_id, slots, count, pieces)
        return loaded.program(("fill", slots, count), best)(params, batch)

    windows = loaded.windows(Each(checked_texts(texts), checked), featurize, run, window=_WINDOW, batches=batches)
    return (filled(*one) for part, units, outputs in windows for one in zip(part, units, outputs, strict=True))


def _best(loaded: Engine, mask_id: int, slots: int, count: int, pieces: int) -> Callable[..., DeviceOutputs]:
    """Return a program that computes ``probabilities`` and ``ids`` [B, S, count] of the best pieces at the masks of
    a batch, at most ``slots`` per row; the values at other positions are meaningless."""
    model = loaded.model.clone(sentence=None)

    def run(params: Params, batch: dict[str, jax.Array]) -> DeviceOutputs:
        is_mask_BxS = (batch["input_ids"] == mask_id).astype(jnp.int32)
        _, positions_BxM = jax.lax.top_k(is_mask_BxS, slots)  # masks come first
        output = bert_output(model.apply({"params": params}, {**batch, "mlm_positions": positions_BxM}))
        logits = present(output.mlm_logits)[..., :pieces]
        best = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), count)
        rows_Bx1 = jnp.arange(len(positions_BxM))[:, None]
        return {
            "token": {
                name: jnp.zeros((*is_mask_BxS.shape, count), values.dtype).at[rows_Bx1, positions_BxM].set(values)
                for name, values in zip(("probabilities", "ids"), best, strict=True)
            }
        }

    return run
