"""Run an ONNX program as the network of a task or of text vectors: onnxruntime replaces the model on their batches.

Shapes: B rows, S tokens, C sequences per row, N sequences of a batch.
"""

import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import HeadsConfig, ModelSpec
from bert_jax.interop.export_table import UNSUPPORTED
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.interop.programs.onnx_graph import FILE, write_program
from bert_jax.interop.programs.serving import FIELDS, OF_SEQUENCES, output_names
from bert_jax.model import BertOutput
from bert_jax.tasks.task import Encoded

# Sequences that run together, of similar lengths.
_BATCH = 16
_HIDDEN = "last_hidden_state"
# Outputs that no task reads; some are large.
_UNREAD = (_HIDDEN, "pooler_output", "prediction_logits", "seq_relationship_logits", "rtd_logits")


def open_session(folder: Path) -> Any:
    """Return an onnxruntime session of the program in ``folder``. Raises ``ValueError`` if onnxruntime is not
    installed."""
    try:
        import onnxruntime
    except ImportError:
        raise ValueError("int8 and --check need onnxruntime: pip install 'bert_jax[onnx]'") from None
    options = onnxruntime.SessionOptions()
    if hasattr(os, "sched_getaffinity") and (allowed := len(os.sched_getaffinity(0))) < (os.cpu_count() or 1):
        options.intra_op_num_threads = allowed  # by default one for each core of the machine
    return onnxruntime.InferenceSession(folder / FILE, options, providers=["CPUExecutionProvider"])


def padded(sequences: Sequence[Encoded], pad_id: int) -> dict[str, np.ndarray]:
    """Return the inputs of an exported program for ``sequences``, int64[N, longest]."""
    shape = len(sequences), max(len(one.ids) for one in sequences)
    ids, types, mask = np.full(shape, pad_id), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, one in enumerate(sequences):
        used = slice(len(one.ids))
        ids[row, used], types[row, used], mask[row, used] = one.ids, one.types, 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def encoder_in_8_bits(weights: ModelBundle, pad_id: int, name: str) -> "OnnxNetwork":
    """Return the encoder of the model ``name`` as a program with 8-bit products, whose only output is
    ``sequence_output``. Raises ``ValueError`` if onnx or onnxruntime is not installed, and for a network that an
    ONNX file cannot hold."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError:
        raise ValueError("dtype int8 needs onnx and onnxruntime: pip install 'bert_jax[onnx]'") from None
    spec = dataclasses.replace(weights.spec, heads=HeadsConfig(), sentence=None, task=None)
    if problems := UNSUPPORTED["onnx"](spec):
        raise ValueError(f"{name}: dtype int8: {'; '.join(problems)}; use float32")
    params = {one: weights.params[one] for one in parameter_shapes(spec)}
    with tempfile.TemporaryDirectory(prefix="bert_jax-") as scratch:
        write_program(Path(scratch), ModelBundle(spec=spec, params=params), "int8")
        return OnnxNetwork(open_session(Path(scratch)), spec, pad_id, [_HIDDEN])


class OnnxNetwork:
    """The ONNX program of a model with ``spec`` in an onnxruntime session, with the contract of ``BertModel.apply``
    for packed batches. Only the outputs ``fields`` are computed (None: those that tasks read)."""

    def __init__(self, session: Any, spec: ModelSpec, pad_id: int, fields: Sequence[str] | None = None) -> None:
        self.session, self._pad_id = session, pad_id
        self._fields = {
            name: field
            for name, field in output_names(spec).items()
            if (field not in _UNREAD if fields is None else field in fields)
        }

    def __call__(self, batch: Mapping[str, np.ndarray]) -> BertOutput:
        """Return the outputs of the rows, each sequence of which runs as a separate row."""
        sequences = batch["sequence_ids"]
        places = [
            (row, number, np.flatnonzero(sequences[row] == number))
            for row in range(len(sequences))
            for number in range(1, int(sequences[row].max(initial=0)) + 1)
        ]
        places = sorted((place for place in places if len(place[2])), key=lambda place: len(place[2]))
        arrays: dict[str, np.ndarray] = {}
        for start in range(0, len(places), _BATCH):
            part = places[start : start + _BATCH]
            own = [
                Encoded(batch["input_ids"][row, tokens], batch["token_type_ids"][row, tokens])
                for row, _, tokens in part
            ]
            outputs = self.session.run(list(self._fields), padded(own, self._pad_id))
            for field, values in zip(self._fields.values(), outputs, strict=True):
                self._scatter(arrays, field, values, part, batch)
        return BertOutput(**{"sequence_output": None, **arrays})  # type: ignore[arg-type]

    def _scatter(
        self,
        arrays: dict[str, np.ndarray],
        field: str,
        values: np.ndarray,
        places: Sequence[tuple[int, int, np.ndarray]],
        batch: Mapping[str, np.ndarray],
    ) -> None:
        """Copy the output ``field`` of sequences to its places in the array of the batch."""
        name = {"sentence_embedding": "sentence_embeddings"}.get(field, FIELDS[field])
        if field == "choice_logits":
            values = values[:, 0]
        of_sequences = name in (*OF_SEQUENCES, "choice_logits", "sentence_embeddings")
        if name not in arrays:
            shape = batch["cls_positions"].shape if of_sequences else batch["input_ids"].shape
            inner = values.shape[1:] if of_sequences else values.shape[2:]
            arrays[name] = np.zeros((*shape, *inner), np.float32)
        for one, (row, number, tokens) in zip(values, places, strict=True):
            if of_sequences:
                arrays[name][row, number - 1] = one
            else:
                arrays[name][row, tokens] = one[: len(tokens)]
