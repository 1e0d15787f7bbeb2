"""Groups of switches of the network, as families of encoders combine them, at tiny sizes."""

from bert_jax.config import ModelConfig

SIZES = dict(
    vocab_size=40, hidden_size=24, num_layers=3, num_attention_heads=3, intermediate_size=20,
    max_position_embeddings=24, initializer_range=0.3,
)  # fmt: skip
# One group of switches per family of encoders.
SWITCHES: dict[str, dict] = {
    "albert": dict(embedding_size=10, shared_layers=True, activation="gelu_tanh"),
    "electra": dict(embedding_size=10, pooler_layer=("gelu",)),
    "gated": dict(
        feed_forward="gated",
        activation="silu",
        without_bias=("qkv", "feed_forward", "pooler_layer", "mlm_layer"),
        final_norm="yes",
    ),
    "rms": dict(
        norm="rms_norm", norm_position="pre", without_bias=("attention_output",), position_embeddings="none"
    ),
    "alibi": dict(relative_positions="alibi", position_embeddings="none", tied_output=False),
    "buckets": dict(relative_positions="buckets", relative_buckets=8, relative_max_distance=12),
    "disentangled": dict(relative_positions="disentangled", relative_buckets=16, relative_max_distance=24),
    "windows": dict(attention_windows=(3,), pooling="mean", head_parts=("pooler_norm", "token_pooler")),
    "blocks": dict(
        attention_block=2,
        random_blocks=1,
        embedding_scale=True,
        pooler_layer=("tanh", "relu"),
        head_parts=("span_transform",),
    ),
    "gpt": dict(embedding_norm="no", pooling="last", pooler_layer=("none",), without_bias=("sequence_head",)),
    "low rank": dict(word_rank=7, embedding_scale=True),
    "pruned": dict(layer_heads=(1, 3, 2), layer_units=(7, 20, 12)),
    "head": dict(mlm_layer="none", without_bias=("norm", "mlm_output"), type_vocab_size=0),
}
# Groups that one network combines: every group once.
COMBINED = (
    ("albert", "disentangled"), ("electra", "blocks"), ("gated", "windows"), ("rms", "gpt", "pruned"),
    ("alibi", "head"), ("buckets", "low rank"),
)  # fmt: skip


def combined(groups: tuple[str, ...]) -> ModelConfig:
    """A network with all switches of ``groups``."""
    return ModelConfig(**SIZES | {name: value for group in groups for name, value in SWITCHES[group].items()})
