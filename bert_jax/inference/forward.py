"""A model on arrays of ids: every output it has, as transformers gives them.

Shapes: B rows, S tokens, H width, L layers, A heads, V vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.inference.engine import Engine
from bert_jax.interop.programs.serving import position_ids
from bert_jax.interop.stored import listed
from bert_jax.io.files import whole_file
from bert_jax.io.npz_file import NpzFile
from bert_jax.model import BertOutput
from bert_jax.model.layers import INTERMEDIATES

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# Tokens that run at a time: the memory does not grow with the number of rows, but for the outputs.
_TOKENS = 4096


def forward_npz(
    loaded: Engine, source: Path, target: Path, *, hidden_states: bool = False, attentions: bool = False
) -> dict[str, tuple[int, ...]]:
    """:func:`forward` from the arrays of one npz file to another; shapes of what was written, by name.

    Raises ``ValueError`` for a file that is no npz, holds Python objects, or other arrays than :data:`INPUTS`.
    """
    with NpzFile(source) as arrays:
        unknown = [name for name in arrays.names if name not in INPUTS]
        if unknown:
            raise ValueError(f"{source}: holds {listed(unknown, 10)}; allowed: {', '.join(INPUTS)}")
        inputs = {name: arrays.read(name) for name in arrays.names}
    outputs = forward(loaded, inputs, hidden_states=hidden_states, attentions=attentions)
    with whole_file(target) as partial, partial.open("wb") as stream:
        np.savez(stream, **outputs)
    return {name: values.shape for name, values in outputs.items()}


def forward(
    loaded: Engine,
    inputs: Mapping[str, np.ndarray],
    *,
    hidden_states: bool = False,
    attentions: bool = False,
) -> dict[str, np.ndarray]:
    """Return the float32 outputs of the model for ``input_ids`` int[B, S].

    Outputs, as far as the model has them: last_hidden_state, pooler_output, mlm_logits [B, S, V], nsp_logits,
    logits, start_logits, end_logits, sentence_embedding. A model with more than one of the sequence, token and
    choice heads returns sequence_logits, token_logits, choice_logits instead of logits.

    ``attention_mask`` (default: all 1) hides tokens, ``token_type_ids`` (default: 0) are the segments. The mask may
    be 0 on the left: the outputs at visible tokens equal those of transformers for the same arrays (BERT counts
    positions from the first column, RoBERTa from the first id that is not padding). Outputs of a row whose mask is
    all 0 are finite but meaningless. A model with a choice head also accepts [B, choices, S].

    Args:
        hidden_states: add hidden_states [L + 1, B, S, H], the embeddings first.
        attentions: add attentions [L, B, A, S, S], the probabilities.

    Raises ``ValueError`` for invalid ids, shapes or dtypes.
    """
    arrays, choices = _checked(loaded, inputs)
    names = _outputs(loaded)
    run = loaded.program(("forward", hidden_states, attentions), _run(loaded, names, hidden_states, attentions))
    rows, length = arrays["input_ids"].shape
    size = min(rows, max(1, _TOKENS // length))
    parts: list[dict[str, np.ndarray]] = []
    for start in range(0, rows, size):
        part = {name: values[start : start + size] for name, values in arrays.items()}
        count = len(part["input_ids"])
        # One compiled shape: the last rows are filled up.
        part = {name: np.pad(values, ((0, size - count), (0, 0))) for name, values in part.items()}
        output = jax.tree.map(np.asarray, run(loaded.params, part))
        parts.append({name: np.take(values, range(count), _axis(name)) for name, values in output.items()})
    joined = {name: np.concatenate([part[name] for part in parts], _axis(name)) for name in parts[0]}
    if choices and "choice" in loaded.spec.heads.present():
        name = names["choice_logits"]
        joined[name] = joined[name].reshape(-1, choices)
    return joined


def _axis(name: str) -> int:
    return 1 if name in ("hidden_states", "attentions") else 0


def _checked(loaded: Engine, inputs: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], int]:
    """int32[B, S] of every input, and the number of choices per example (0: rows are examples)."""
    spec = loaded.spec
    if "input_ids" not in inputs:
        raise ValueError(f"input_ids is missing; given: {', '.join(inputs) or 'nothing'}")
    arrays = {name: np.asarray(inputs[name]) for name in INPUTS if name in inputs}
    shape = arrays["input_ids"].shape
    ranks = "[batch, sequence]" + (" or [batch, choices, sequence]" if spec.heads.choice else "")
    if len(shape) not in ((2, 3) if spec.heads.choice else (2,)) or 0 in shape:
        raise ValueError(f"input_ids has the shape {shape}; allowed: {ranks}, none of them 0")
    limits = {
        "input_ids": spec.model.vocab_size, "attention_mask": 2, "token_type_ids": spec.model.type_vocab_size
    }  # fmt: skip
    for name, values in arrays.items():
        if values.dtype.kind not in ("iu" if name != "attention_mask" else "iub"):
            raise ValueError(f"{name} is {values.dtype}; allowed: integers")
        if values.shape != shape:
            raise ValueError(f"{name} has the shape {values.shape}, input_ids {shape}; they must be equal")
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= limits[name]:
            raise ValueError(f"{name} holds {low if low < 0 else high}; allowed: 0 to {limits[name] - 1}")
    if shape[-1] > spec.model.max_length:
        raise ValueError(f"input_ids has {shape[-1]} tokens a row; the model has {spec.model.max_length} positions")
    arrays.setdefault("attention_mask", np.ones(shape, np.int32))
    arrays.setdefault("token_type_ids", np.zeros(shape, np.int32))
    flat = {name: values.reshape(-1, shape[-1]).astype(np.int32) for name, values in arrays.items()}
    return flat, shape[1] if len(shape) == 3 else 0


def _outputs(loaded: Engine) -> dict[str, str]:
    """Field -> name of every output that the model has."""
    heads = loaded.spec.heads
    tasks = {
        "sequence_logits": bool(heads.sequence_labels),
        "token_logits": bool(heads.token_labels),
        "choice_logits": heads.choice,
    }
    alone = sum(tasks.values()) == 1
    there = {
        "last_hidden_state": True, "pooler_output": heads.pooler, "mlm_logits": heads.mlm, "nsp_logits": heads.nsp,
        **tasks, "start_logits": heads.span, "end_logits": heads.span,
        "sentence_embedding": loaded.spec.sentence is not None,
    }  # fmt: skip
    return {field: "logits" if alone and field in tasks else field for field, is_there in there.items() if is_there}


def _field(output: BertOutput, field: str) -> jax.Array:
    match field:
        case "last_hidden_state":
            values = output.sequence_output
        case "pooler_output":
            values = output.pooled_output[:, 0]
        case "nsp_logits" | "sequence_logits":
            values = getattr(output, field)[:, 0]
        case _:
            values = getattr(output, field)
    return values.astype(jnp.float32)


def _run(loaded: Engine, names: Mapping[str, str], hidden_states: bool, attentions: bool) -> Any:
    spec, model = loaded.spec, loaded.model

    def run(params: Any, part: dict[str, jax.Array]) -> dict[str, jax.Array]:
        features = {
            "input_ids": part["input_ids"],
            "token_type_ids": part["token_type_ids"],
            "position_ids": position_ids(spec, part["input_ids"]),
            "sequence_ids": part["attention_mask"],
        }
        output, state = model.apply({"params": params}, features, mutable=[INTERMEDIATES])
        given = {name: _field(output, field) for field, name in names.items()}
        seen = state[INTERMEDIATES]
        layers = [seen["encoder"][f"layer_{i}"] for i in range(spec.model.num_layers)]
        if hidden_states:
            stacked = [seen["hidden_states"][0], *(layer["hidden_states"][0] for layer in layers)]
            given["hidden_states"] = jnp.stack(stacked).astype(jnp.float32)
        if attentions:
            given["attentions"] = jnp.stack([layer["attention"]["attentions"][0] for layer in layers])
        return given

    return run
