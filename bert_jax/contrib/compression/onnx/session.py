"""Run an ONNX export as the network of a task: onnxruntime replaces the model on the batches of the task.

Shapes: B rows, S tokens, C sequences per row, N sequences of a batch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import ModelSpec
from bert_jax.interop.programs.onnx_graph import FILE
from bert_jax.interop.programs.serving import FIELDS, OF_SEQUENCES, output_names
from bert_jax.model import BertOutput
from bert_jax.tasks.task import Encoded

# Sequences that run together, of similar lengths.
_BATCH = 16
# Outputs that no task reads; some are large.
_UNREAD = ("last_hidden_state", "pooler_output", "prediction_logits", "seq_relationship_logits", "rtd_logits")


def open_session(folder: Path) -> Any:
    """Return an onnxruntime session of the export in ``folder``. Raises ``ValueError`` if onnxruntime is not
    installed."""
    try:
        import onnxruntime
    except ImportError:
        raise ValueError("int8 and --check need onnxruntime: pip install 'bert_jax[onnx]'") from None
    return onnxruntime.InferenceSession(folder / FILE, providers=["CPUExecutionProvider"])


def padded(sequences: Sequence[Encoded], pad_id: int) -> dict[str, np.ndarray]:
    """Return the inputs of an exported program for ``sequences``, int64[N, longest]."""
    shape = len(sequences), max(len(one.ids) for one in sequences)
    ids, types, mask = np.full(shape, pad_id), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, one in enumerate(sequences):
        used = slice(len(one.ids))
        ids[row, used], types[row, used], mask[row, used] = one.ids, one.types, 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


class OnnxNetwork:
    """The export of a model with ``spec`` in ``folder``, with the contract of ``BertModel.apply`` for packed
    batches. Only the outputs of tasks are computed."""

    def __init__(self, folder: Path, spec: ModelSpec, pad_id: int) -> None:
        self._session, self._pad_id = open_session(folder), pad_id
        self._fields = {name: field for name, field in output_names(spec).items() if field not in _UNREAD}

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
            outputs = self._session.run(list(self._fields), padded(own, self._pad_id))
            for field, values in zip(self._fields.values(), outputs, strict=True):
                self._scatter(arrays, field, values, part, batch)
        return BertOutput(sequence_output=None, **arrays)  # type: ignore[arg-type]

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
