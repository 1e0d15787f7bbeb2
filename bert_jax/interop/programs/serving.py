"""Interface of an exported program: the names of its inputs and outputs, and the reference function."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from bert_jax.config import ExecutionConfig, ModelSpec
from bert_jax.interop.hf.config_json import CONFIG_FILE, hf_config
from bert_jax.interop.hf.families import FAMILIES
from bert_jax.interop.hf.write import write_json
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.interop.tokenizers.folder_writer import write_tokenizer_files
from bert_jax.model import BertModel, BertOutput
from bert_jax.model.bert import bert_output

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# Scores below belong to tokens that a head excludes (-1e6: the question in BigBird's question answering).
EXCLUDED = -1e5
# Name of an output of a model with several heads -> field of BertOutput.
FIELDS = {
    "last_hidden_state": "sequence_output", "pooler_output": "pooled_output", "prediction_logits": "mlm_logits",
    "seq_relationship_logits": "nsp_logits", "rtd_logits": "rtd_logits", "sequence_logits": "sequence_logits",
    "token_logits": "token_logits",
    "start_logits": "start_logits", "end_logits": "end_logits", "choice_logits": "choice_logits",
    "sentence_embedding": "sentence_embedding",
}  # fmt: skip
# Fields of BertOutput that have one entry for each sequence of a row.
OF_SEQUENCES = ("pooled_output", "nsp_logits", "sequence_logits")
HEAD_OUTPUTS = {
    "mlm": ("prediction_logits",), "nsp": ("seq_relationship_logits",), "rtd": ("rtd_logits",),
    "sequence": ("sequence_logits",),
    "token": ("token_logits",), "span": ("start_logits", "end_logits"), "choice": ("choice_logits",),
}  # fmt: skip


def output_names(spec: ModelSpec) -> dict[str, str]:
    """Return a dict from the name of each output of the exported program, in order, to its key in :data:`FIELDS`.

    The names follow transformers. A model without task heads has the output last_hidden_state and, with a
    pooler, pooler_output. A model with one task head has the output logits (start_logits and end_logits for a span
    head). With several task heads each output has its name in :data:`FIELDS`, such as prediction_logits and
    seq_relationship_logits. A sentence model has last_hidden_state as its first output and sentence_embedding as
    its last.
    """
    heads = [head for head in spec.heads.present() if head in HEAD_OUTPUTS]
    fields = [field for head in heads for field in HEAD_OUTPUTS[head]]
    if spec.sentence is not None or not heads:
        pooler = ["pooler_output"] if spec.heads.pooler and not heads else []
        sentence = ["sentence_embedding"] if spec.sentence is not None else []
        fields = ["last_hidden_state", *pooler, *fields, *sentence]
    if len(heads) == 1 and heads != ["span"]:
        return {"logits" if field == HEAD_OUTPUTS[heads[0]][0] else field: field for field in fields}
    names = FAMILIES[spec.family].outputs
    return {names.get(field, field): field for field in fields}


def write_companions(folder: Path, weights: ModelBundle, dtype: str) -> list[str]:
    """Write the tokenizer files and, if a transformers class implements the model, config.json; return
    notes."""
    notes = []
    try:
        config = hf_config(weights.spec, dtype)
    except ValueError as error:
        notes.append(f"no {CONFIG_FILE}: {error}")
    else:
        write_json(folder / CONFIG_FILE, config)
    if weights.spec.heads.choice:
        notes.append("choice: each choice is a row; reshape the scores from [batch, 1] to [questions, choices]")
    if weights.spec.model.type_vocab_size == 1:
        notes.append("token_type_ids: this model has only one segment; use zeros")
    exact, content = weights.exact_tokenizer, weights.tokenizer_content
    return [*notes, *write_tokenizer_files(folder, weights.spec, content, exact=exact)]


def position_ids(spec: ModelSpec, input_ids: jax.Array) -> jax.Array:
    """Return the position of every token, int32[B, S], before ``position_offset`` is added.

    BERT counts every token. RoBERTa counts only the tokens that are not padding; padding has position -1.
    """
    if spec.skips_padding:
        real = (input_ids != spec.model.position_offset - 1).astype(jnp.int32)
        return jnp.cumsum(real, axis=1) * real - 1
    return jnp.cumsum(jnp.ones_like(input_ids, jnp.int32), axis=1) - 1


def forward(
    spec: ModelSpec,
    params: Mapping[str, jax.Array],
    input_ids: jax.Array,
    attention_mask: jax.Array,
    token_type_ids: jax.Array,
    more: Mapping[str, jax.Array] | None = None,
) -> dict[str, jax.Array]:
    """Return the float32 outputs of the model under their exported names. JAX can trace this function.

    ``params`` must have canonical names; the inputs are int[B, S]. A token is visible if its ``attention_mask`` is
    not 0. ``more`` has further features of the batch, such as ``global_tokens``.
    """
    network = BertModel(spec.model, ExecutionConfig(vocab_multiple=1), spec.heads, spec.sentence)
    features = {
        "input_ids": input_ids,
        "token_type_ids": token_type_ids,
        "position_ids": position_ids(spec, input_ids),
        "sequence_ids": (attention_mask != 0).astype(jnp.int32),
        **(more or {}),
    }
    output = bert_output(network.apply({"params": traverse_util.unflatten_dict(dict(params), sep="/")}, features))
    return {name: output_array(output, FIELDS[field]) for name, field in output_names(spec).items()}


def output_array(output: BertOutput, field: str) -> jax.Array:
    """Return the output named ``field`` as [B, ...]. Each row of the batch must contain one sequence."""
    values = getattr(output, field)
    return values[:, 0] if field in OF_SEQUENCES else values


def output_shapes(spec: ModelSpec) -> dict[str, list[str | int]]:
    """Return the shape of every output by name; the variable sizes are "batch" and "sequence"."""
    batch, sequence = symbolic_sizes(spec)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in parameter_shapes(spec).items()}
    ids = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    shapes = jax.eval_shape(lambda params, *inputs: forward(spec, params, *inputs), params, ids, ids, ids)
    return {
        name: [size if isinstance(size, int) else str(size) for size in shapes[name].shape]
        for name in output_names(spec)
    }


def symbolic_sizes(spec: ModelSpec) -> Sequence[Any]:
    """Return the symbolic sizes "batch" and "sequence". "sequence" is at most the maximum length of the model."""
    limit = f"sequence <= {spec.model.max_length}"
    return jax.export.symbolic_shape("batch, sequence", constraints=[limit])


def sample_inputs(
    spec: ModelSpec, shapes: tuple[tuple[int, int], ...] = (), padding: int | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of int64 inputs for testing a program.

    ``shapes`` are pairs (batch, length). Default: a single token, short rows, and rows of the maximum length (at
    most 1,024 without a position table). All rows of a batch except the first may have padding on the right or
    left. Rows whose separators bound global tokens have three of them, as the classes of transformers require.
    With the pooling last, transformers recognizes padding by its id, ``padding`` (None: the family's).
    """
    rng = np.random.default_rng(0)
    longest = spec.model.max_length
    if spec.model.position_embeddings != "learned":
        longest = min(longest, 1024)  # no table has a row for the last position, and attention costs length squared
    if padding is None:
        stated = FAMILIES[spec.family].write(spec.model).get("pad_token_id")
        padding = stated if isinstance(stated, int) else 0
    # Two tokens, two separators, and a separator at the end.
    separated = spec.model.global_tokens > 0 and (spec.heads.span or spec.heads.choice)
    least = 5 if separated else 1
    sizes = [*shapes] or [(1, least), (3, min(17, longest)), (2, longest)]
    if spec.model.attention_block:
        # transformers fills the last block beyond the length, and no longer divides rows after a short one.
        whole = longest - longest % spec.model.attention_block
        sizes = sorted(((batch, min(length, whole)) for batch, length in sizes), key=lambda size: -size[1])
    for batch, length in sizes:
        ids = rng.integers(0, spec.model.vocab_size, (batch, length))
        types = rng.integers(0, max(spec.model.type_vocab_size, 1), (batch, length))
        mask = np.ones((batch, length), np.int64)
        if spec.model.pooling == "last":
            ids = np.where(ids == padding, (padding + 1) % spec.model.vocab_size, ids)
        for row in range(1, batch):
            used = int(rng.integers(min(least, length), length + 1))
            hidden = slice(used, None) if row % 2 else slice(None, length - used)
            mask[row, hidden] = types[row, hidden] = 0
            if spec.skips_padding:
                ids[row, hidden] = spec.model.position_offset - 1
            if spec.model.pooling == "last":
                ids[row, hidden] = padding
        if separated:
            separator = spec.model.separator_id
            ids[ids == separator] = (separator + 1) % spec.model.vocab_size
            for row in range(batch):
                real = np.flatnonzero(mask[row])
                ids[row, [*real[2:4], real[-1]]] = separator
        yield {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def largest_differences(
    spec: ModelSpec,
    params: Mapping[str, np.ndarray],
    program: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]],
    batches: Iterable[dict[str, np.ndarray]],
    *,
    names: Sequence[str] | None = None,
) -> dict[str, float]:
    """For each output, return the largest absolute difference between ``program`` and :func:`forward`.

    The maximum is over all ``batches``; outputs of padding tokens that see no token, which differ between
    implementations, do not count. It is infinite if shapes differ or a value is not finite. ``names`` are the
    outputs of ``program``; None: all outputs in :func:`output_names`. Raises ``ValueError`` if ``program`` returns
    other names.
    """
    reference = jax.jit(functools.partial(forward, spec))
    worst = dict.fromkeys(output_names(spec) if names is None else names, 0.0)
    on_device = {name: jnp.asarray(values, jnp.float32) for name, values in params.items()}
    for inputs in batches:
        expected = reference(on_device, *(jnp.asarray(inputs[name], jnp.int32) for name in INPUTS))
        given = program(inputs)
        if list(given) != list(worst):
            raise ValueError(f"the outputs are {', '.join(given)}; expected {', '.join(worst)}")
        for name in worst:
            compared = [given[name], np.asarray(expected[name])]
            if not spec.model.padding_sees_tokens and compared[0].shape[:2] == inputs["attention_mask"].shape:
                compared = [values[inputs["attention_mask"] != 0] for values in compared]
            worst[name] = max(worst[name], _difference(*compared))
    return worst


def _difference(given: np.ndarray, expected: np.ndarray) -> float:
    if given.shape != expected.shape:
        return float("inf")
    # Scores that exclude a token (-1e6) are equal up to the rounding of the sum.
    excluded = (expected < EXCLUDED) & (np.abs(given - expected) < 1)
    given, expected = (np.where(excluded, 0, values) for values in (given, expected))
    # NaN becomes infinity, because no comparison with NaN is true.
    return float(np.nan_to_num(np.max(np.abs(np.asarray(given, np.float32) - expected)), nan=np.inf, posinf=np.inf))
