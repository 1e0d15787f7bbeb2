"""Options of XLNet: of its network (section ``model``) and of its objective (section ``objective``).

This module does not import jax.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from bert_jax.config import ModelConfig
from bert_jax.config.architecture import Biased, Presence
from bert_jax.config.objective import ObjectiveConfig
from bert_jax.config.schema import AtLeast0


@dataclass(frozen=True, kw_only=True)
class XlnetConfig(ModelConfig):
    """Section ``model`` of the encoder xlnet (Yang et al. 2019). Raises ``ValueError`` for values that it does not
    allow."""

    TITLE: ClassVar[str] = "XLNet"
    TAG: ClassVar[str] = "xlnet"
    HAS_STATE: ClassVar[bool] = True
    # The places of tokens, their segments and the two streams are parts of the attention of XLNet, which has no
    # other kinds.
    FIXED: ClassVar[tuple[str, ...]] = (
        "position_embeddings", "relative_positions", "type_vocab_size", "embedding_norm", "embedding_size",
        "embedding_scale", "position_offset", "norm_position", "norm", "final_norm", "attention",
        "attention_windows", "attention_block", "global_tokens", "shared_layers", "layer_heads", "layer_units",
        "feed_forward", "mlm_layer", "pooling",
    )  # fmt: skip

    position_embeddings: Literal["none"] = "none"  # type: ignore[assignment]
    type_vocab_size: AtLeast0[int] = 0
    embedding_norm: Presence = "no"
    mlm_layer: Literal["none"] = "none"  # type: ignore[assignment]
    # Number of hidden states of each layer that a row keeps for the next row of its text (data.row_order carried).
    # A number above the length of a row keeps those of several rows. 0: no memory.
    memory_length: AtLeast0[int] = 0
    # Largest distance between two tokens; the attention treats larger distances as this one. 0: no limit.
    largest_distance: AtLeast0[int] = 0

    def _check_encoder(self) -> None:
        super()._check_encoder()
        width, heads = self.hidden_size, self.num_attention_heads
        self._require("num_attention_heads", width % heads == 0, f"a divisor of model.hidden_size ({width})")
        self._require("hidden_size", width % 2 == 0, "an even number, for the encodings of distances")

    @property
    def biased_parts(self) -> tuple[Biased, ...]:
        return tuple(part for part in super().biased_parts if part not in ("qkv", "attention_output", "mlm_layer"))

    @property
    def padding_sees_tokens(self) -> bool:
        return False

    @property
    def unread_fields(self) -> set[str]:
        rotary = {"rotary_base", "rotary_window_base", "relative_buckets", "relative_max_distance"}
        return rotary | {"memory_length", "separator_id", "random_blocks", "max_position_embeddings"}


@dataclass(frozen=True, kw_only=True)
class PermutationLmConfig(ObjectiveConfig):
    """Section ``objective`` of ``objective.name`` permutation_lm."""

    TITLE: ClassVar[str] = (
        "predicts the chosen tokens of a text one after the other in a random order (XLNet: Yang et al. 2019); "
        "requires model.encoder xlnet"
    )

    @property
    def carries_state(self) -> bool:
        return True


def xlnet_config(**values: Any) -> XlnetConfig:
    """Return the section ``model`` of an XLNet with ``values``."""
    return XlnetConfig(encoder="xlnet", **values)
