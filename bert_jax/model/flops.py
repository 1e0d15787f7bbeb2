"""Floating-point operations of training, by formula.

A compiler's own count is no substitute: it counts the body of a scanned loop once. The formula counts matrix
products only (a multiply and an add are two operations) and takes the backward pass as twice the forward.
Recomputation (remat) is not counted, so it lowers the model FLOP utilisation, as it should.
"""

from bert_jax.config.schema import ModelConfig

# Backward = two matrix products per forward product: one for the inputs, one for the weights.
_FORWARD_AND_BACKWARD = 3


def training_flops_per_sequence(
    model: ModelConfig, *, seq_length: int, max_predictions: int, has_nsp: bool = True
) -> int:
    """Operations that one training step spends on one sequence of ``seq_length`` tokens, padding included.

    Args:
        model: sizes of the network.
        seq_length: tokens per sequence (S).
        max_predictions: positions that reach the vocabulary projection (M); fillers count, they are computed.
        has_nsp: whether pooler and sentence-pair head are there.
    """
    hidden, feed_forward = model.hidden_size, model.intermediate_size
    projections = 8 * hidden**2 + 4 * hidden * feed_forward  # query, key, value, output; feed-forward in and out
    attention = 4 * hidden * seq_length**2  # scores, and weights times values
    encoder = model.num_layers * (projections * seq_length + attention)
    mlm_head = max_predictions * (2 * hidden**2 + 2 * hidden * model.vocab_size)
    nsp_head = 2 * hidden**2 + 4 * hidden if has_nsp else 0
    return _FORWARD_AND_BACKWARD * (encoder + mlm_head + nsp_head)
