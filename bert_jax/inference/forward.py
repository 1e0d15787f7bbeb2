"""Compute every output of a model from arrays of token ids, as in transformers.

Shapes: B rows, S tokens, H width, L layers, A heads, V vocabulary.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.inference.batching import row_lengths
from bert_jax.inference.engine import Engine, Text, checked_texts, not_finite
from bert_jax.interop.programs.serving import FIELDS, INPUTS, output_array, position_ids
from bert_jax.interop.stored_model import listed
from bert_jax.io.files import whole_file
from bert_jax.io.npz_file import NpzFile
from bert_jax.model import BertOutput
from bert_jax.model.bert import of_layers
from bert_jax.model.canonical import Params
from bert_jax.model.layers import INTERMEDIATES

# Field of BertOutput -> name of the output.
_NAMES = {field: name for name, field in FIELDS.items()} | {"mlm_logits": "mlm_logits", "nsp_logits": "nsp_logits"}
# Number of tokens processed at a time, so that only the outputs are in memory for all rows.
_TOKENS = 4096


def forward_npz(
    loaded: Engine, source: Path, target: Path, *, hidden_states: bool = False, attentions: bool = False
) -> dict[str, tuple[int, ...]]:
    """Run :func:`forward` on the arrays of an npz file, write the outputs to another npz file, and return their
    shapes by name. Raises ``ValueError`` if ``source`` is not an npz file, or contains Python objects or arrays
    other than ``INPUTS``.
    """
    with NpzFile(source) as arrays:
        unknown = [name for name in arrays.names if name not in INPUTS]
        if unknown:
            raise ValueError(f"{source}: contains {listed(unknown, 10)}; allowed arrays: {', '.join(INPUTS)}")
        inputs = {name: arrays.read(name) for name in arrays.names}
    outputs = forward(loaded, inputs, hidden_states=hidden_states, attentions=attentions)
    with whole_file(target) as partial, partial.open("wb") as stream:
        np.savez(stream, **outputs)  # type: ignore[arg-type]
    return {name: values.shape for name, values in outputs.items()}


def forward(
    loaded: Engine,
    inputs: Mapping[str, np.ndarray],
    *,
    hidden_states: bool = False,
    attentions: bool = False,
) -> dict[str, np.ndarray]:
    """Return the float32 outputs of the model for ``input_ids`` int[B, S].

    Outputs, if the model has them: last_hidden_state, pooler_output, mlm_logits [B, S, V], nsp_logits, logits,
    start_logits, end_logits, sentence_embedding. A model with more than one of the sequence, token and choice heads
    returns sequence_logits, token_logits, choice_logits instead of logits.

    ``attention_mask`` (default: all 1) is 0 for tokens to hide; ``token_type_ids`` (default: all 0) are the indices
    of the segments.
    The mask may be 0 on the left: the outputs at visible tokens equal those of transformers for the same arrays
    (BERT counts positions from the first column, RoBERTa from the first id that is not padding). Outputs of a row
    whose mask is all 0 are finite but meaningless. A model with a choice head also accepts [B, choices, S].

    Args:
        hidden_states: add hidden_states [L + 1, B, S, H], the embeddings first.
        attentions: add attentions [L, B, A, S, S], the probabilities.

    Raises ``ValueError`` for invalid ids, shapes or dtypes, for the attentions of an encoder without attention or
    with layers of different numbers of heads, for the hidden states of one whose layers have different widths, and
    for outputs that are not finite.
    """
    encoder = loaded.spec.model.encoder
    if attentions and not loaded.spec.model.has_attention:
        raise ValueError(f"{loaded.name}: the encoder ({encoder}) has no attention; omit attentions")
    if attentions and len(set(loaded.spec.model.heads_by_layer)) > 1:
        raise ValueError(f"{loaded.name}: the layers have different numbers of heads; omit attentions")
    if hidden_states:
        loaded.spec.model.require_equal_widths()
    arrays, choices = _checked(loaded, inputs)
    run = loaded.program(("forward", hidden_states, attentions), _run(loaded, hidden_states, attentions))
    rows, length = arrays["input_ids"].shape
    size = min(rows, max(1, _TOKENS // length))
    parts: list[dict[str, np.ndarray]] = []
    for start in range(0, rows, size):
        part = {name: values[start : start + size] for name, values in arrays.items()}
        count = len(part["input_ids"])
        # Pad the last part with rows, so that it has the compiled shape.
        part = {name: np.pad(values, ((0, size - count), (0, 0))) for name, values in part.items()}
        output = jax.tree.map(np.asarray, run(loaded.params, part))
        parts.append({name: np.take(values, range(count), _axis(name)) for name, values in output.items()})
    joined = {name: np.concatenate([part[name] for part in parts], _axis(name)) for name in parts[0]}
    for name, values in joined.items():
        if not np.isfinite(values).all():
            row = np.argwhere(~np.isfinite(values))[0][_axis(name)]
            raise not_finite(loaded, f"row {row} of input_ids ({name})")
    if choices and "choice" in loaded.spec.heads.present():
        name = "logits" if "logits" in joined else "choice_logits"
        joined[name] = joined[name].reshape(-1, choices)
    return joined


def token_arrays(loaded: Engine, texts: Iterable[Text]) -> dict[str, np.ndarray]:
    """Return the inputs of :func:`forward` for texts and pairs of texts: int32[B, S], padded to the longest."""
    encoded = loaded.model_inputs([*checked_texts(texts, pairs=True)])
    arrays = {
        name: np.zeros((len(encoded), max((len(one.ids) for one in encoded), default=0)), np.int32)
        for name in INPUTS
    }
    arrays["input_ids"][:] = loaded.need_tokenizer().pad_id
    for row, one in enumerate(encoded):
        for name, values in zip(INPUTS, (one.ids, 1, one.types), strict=True):
            arrays[name][row, : len(one.ids)] = values
    return arrays


def outputs_of_texts(loaded: Engine, texts: Iterable[Text], name: str, batch_size: int) -> Iterator[np.ndarray]:
    """Yield the output ``name`` of :func:`forward` for every text or pair of texts, without padding, in order;
    ``batch_size`` texts are processed together. Raises ``ValueError`` for a model without this output."""
    if batch_size < 1:
        raise ValueError(f"batch_size: {batch_size} is not allowed; use 1 or more")
    if name == "pooler_output" and not loaded.spec.heads.pooler:
        raise ValueError(f"{loaded.name}: no pooler; use embed or sequence_output")
    ladder, reading = row_lengths(loaded.spec.max_length), checked_texts(texts, pairs=True)
    while part := [*itertools.islice(reading, batch_size)]:
        given = token_arrays(loaded, part)
        lengths = given["attention_mask"].sum(axis=1)
        # Few shapes, so that few programs are compiled.
        rows = 1 << (len(part) - 1).bit_length()
        length = next(length for length in ladder if length >= lengths.max())
        extra = (0, rows - len(part)), (0, length - lengths.max())
        fill = {"input_ids": loaded.need_tokenizer().pad_id}
        inputs = {one: np.pad(values, extra, constant_values=fill.get(one, 0)) for one, values in given.items()}
        flags = {one: one == name for one in ("hidden_states", "attentions")}
        found = np.moveaxis(forward(loaded, inputs, **flags)[name], _axis(name), 0)
        for values, count in zip(found, lengths, strict=False):
            yield _without_padding(values, name, count)


def _without_padding(values: np.ndarray, name: str, length: int) -> np.ndarray:
    match name:
        case "last_hidden_state":
            return values[:length]
        case "hidden_states":
            return values[:, :length]
        case "attentions":
            return values[..., :length, :length]
    return values


def _axis(name: str) -> int:
    return 1 if name in ("hidden_states", "attentions") else 0


def _checked(loaded: Engine, inputs: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], int]:
    """Check the inputs. Return them as int32[B, S] by name, and the number of choices per example (0: each row is
    an example)."""
    spec = loaded.spec
    if "input_ids" not in inputs:
        raise ValueError(f"input_ids is missing; the arrays are {', '.join(inputs) or 'none'}")
    arrays = {name: np.asarray(inputs[name]) for name in INPUTS if name in inputs}
    shape = arrays["input_ids"].shape
    ranks = "[batch, sequence]" + (" or [batch, choices, sequence]" if spec.heads.choice else "")
    if len(shape) not in ((2, 3) if spec.heads.choice else (2,)) or 0 in shape:
        raise ValueError(f"input_ids has the shape {shape}; allowed: {ranks}, with all sizes above 0")
    limits = {
        "input_ids": spec.model.vocab_size, "attention_mask": 2,
        # A model without segments reads no types; those of one segment are allowed.
        "token_type_ids": max(spec.model.type_vocab_size, 1),
    }  # fmt: skip
    for name, values in arrays.items():
        if values.dtype.kind not in ("iu" if name != "attention_mask" else "iub"):
            raise ValueError(f"{name} has the dtype {values.dtype}; allowed: integers")
        if values.shape != shape:
            shapes = f"{name} has the shape {values.shape}, but input_ids has the shape {shape}"
            raise ValueError(f"{shapes}; they must be equal")
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= limits[name]:
            raise ValueError(f"{name} contains {low if low < 0 else high}; allowed: 0 to {limits[name] - 1}")
    if shape[-1] > spec.model.max_length:
        raise ValueError(f"input_ids has {shape[-1]} tokens per row; the maximum is {spec.model.max_length}")
    arrays.setdefault("attention_mask", np.ones(shape, np.int32))
    arrays.setdefault("token_type_ids", np.zeros(shape, np.int32))
    flat = {name: values.reshape(-1, shape[-1]).astype(np.int32) for name, values in arrays.items()}
    return flat, shape[1] if len(shape) == 3 else 0


def _named(output: BertOutput) -> dict[str, jax.Array]:
    """Return the outputs that the model has as float32 arrays by name. The logits of the only task head of a model
    have the name "logits"."""
    fields = [field for field in _NAMES if getattr(output, field) is not None]
    tasks = [field for field in ("sequence_logits", "token_logits", "choice_logits") if field in fields]
    names = _NAMES | (dict.fromkeys(tasks, "logits") if len(tasks) == 1 else {})
    return {names[field]: output_array(output, field).astype(jnp.float32) for field in fields}


def _run(loaded: Engine, hidden_states: bool, attentions: bool) -> Callable[[Params, Batch], dict[str, jax.Array]]:
    spec, model = loaded.spec, loaded.model

    def run(params: Params, part: Batch) -> dict[str, jax.Array]:
        features = {
            "input_ids": part["input_ids"],
            "token_type_ids": part["token_type_ids"],
            "position_ids": position_ids(spec, part["input_ids"]),
            "sequence_ids": part["attention_mask"],
        }
        output, state = model.apply({"params": params}, features, mutable=[INTERMEDIATES])
        given = _named(output)
        seen = state[INTERMEDIATES]
        if hidden_states:
            stacked = [seen["hidden_states"][0], *of_layers(seen.get("encoder", {}), spec.model, "hidden_states")]
            given["hidden_states"] = jnp.stack(stacked).astype(jnp.float32)
        if attentions:
            given["attentions"] = jnp.stack(of_layers(seen["encoder"], spec.model, "attention", "attentions"))
        return given

    return run
