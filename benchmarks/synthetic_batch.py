"""A batch of random content for benchmarks of the training step."""

import numpy as np

from bert_jax.batch import feature_shapes


def synthetic_batch(
    batch_size: int, seq_length: int, max_predictions: int, vocab_size: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return a full batch of random content, without padding."""
    rng = np.random.default_rng(seed)
    shapes = feature_shapes(batch_size, seq_length, max_predictions)
    batch: dict[str, np.ndarray] = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
    batch["input_ids"] = rng.integers(5, vocab_size, (batch_size, seq_length), dtype=np.int32)
    batch["token_type_ids"][:, seq_length // 2 :] = 1
    batch["sequence_ids"][:] = 1
    batch["position_ids"][:] = np.arange(seq_length)
    positions = [rng.permutation(np.arange(1, seq_length))[:max_predictions] for _ in range(batch_size)]
    batch["mlm_positions"] = np.sort(np.stack(positions)).astype(np.int32)
    batch["mlm_labels"] = rng.integers(5, vocab_size, (batch_size, max_predictions), dtype=np.int32)
    batch["mlm_weights"][:] = 1
    batch["nsp_labels"] = rng.integers(0, 2, (batch_size, 1), dtype=np.int32)
    batch["nsp_weights"][:] = 1
    batch["sequence_keys"] = np.arange(batch_size, dtype=np.uint32)[:, None]
    return batch
