"""A batch of random content for benchmarks of the training step."""

from collections.abc import Sequence

import numpy as np

from bert_jax.batch import feature_shapes


def synthetic_batch(
    batch_size: int,
    seq_length: int,
    max_predictions: int,
    vocab_size: int,
    seed: int = 0,
    lengths: Sequence[int] = (),
) -> dict[str, np.ndarray]:
    """Return a batch of random content. Every row holds sequences of ``lengths`` tokens, one after the other, then
    padding, and predictions in the same proportion; by default one sequence without padding."""
    rng = np.random.default_rng(seed)
    lengths = lengths or (seq_length,)
    ends = np.cumsum(lengths)
    shapes = feature_shapes(batch_size, seq_length, max_predictions, len(lengths))
    batch: dict[str, np.ndarray] = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
    tokens = slice(0, ends[-1])
    batch["input_ids"][:, tokens] = rng.integers(5, vocab_size, (batch_size, ends[-1]), dtype=np.int32)
    for number, (end, length) in enumerate(zip(ends, lengths, strict=True), start=1):
        batch["token_type_ids"][:, end - length + length // 2 : end] = 1
        batch["sequence_ids"][:, end - length : end] = number
        batch["position_ids"][:, end - length : end] = np.arange(length)
    maskable = np.flatnonzero(batch["position_ids"][0])
    count = min(max_predictions * ends[-1] // seq_length, len(maskable))
    positions = [rng.permutation(maskable)[:count] for _ in range(batch_size)]
    batch["mlm_positions"][:, :count] = np.sort(np.stack(positions))
    batch["mlm_labels"][:, :count] = rng.integers(5, vocab_size, (batch_size, count), dtype=np.int32)
    batch["mlm_weights"][:, :count] = 1
    batch["cls_positions"][:] = ends - lengths
    batch["nsp_labels"] = rng.integers(0, 2, batch["nsp_labels"].shape, dtype=np.int32)
    batch["nsp_weights"][:] = 1
    batch["sequence_keys"] = np.arange(batch_size * len(lengths), dtype=np.uint32).reshape(batch_size, -1)
    return batch
