"""Options of the objective that pretraining minimizes.

The rules of ``schema`` apply: frozen, hashable, validated when created; no JAX import.
"""

from dataclasses import dataclass
from typing import Literal, Self

from bert_jax.config.schema import AtLeast0, Choice, Positive, Section, only


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Section, prefix="objective.", chosen_by=Choice("name", "objectives", "objective_options")):
    """The objective that pretraining minimizes."""

    # Objective. masked_lm: predicts masked tokens and, unless data.next_sentence is none, classifies sentence
    # pairs (Devlin et al. 2018). masked_lm_classes: like masked_lm, and also predicts the class of each labeled
    # document (data.label_field). causal_lm: predicts each next token (Radford et al. 2018; Bengio et al. 2003);
    # requires data.next_sentence none and a causal encoder (a transformer requires model.attention causal).
    # replaced_tokens: predicts which tokens a generator replaced (ELECTRA: Clark et al. 2020); requires
    # data.next_sentence none.
    name: str = "masked_lm"
    # Python file that defines a class Objective, a subclass of bert_jax.objectives.objective.PretrainObjective,
    # which replaces the objective in objective.name; empty: none.
    module: str = ""
    # Coefficient of the z-loss, which keeps the logits from drifting (Chowdhery et al. 2022: 1e-4); 0: off. The
    # z-loss is the mean square of the logarithm of the softmax normalizer of the predicted tokens.
    z_loss: AtLeast0[float] = only(
        0.0, {"objective.name": ("masked_lm", "masked_lm_classes", "causal_lm", "replaced_tokens")}
    )
    # Weight of the document classification loss, which is averaged over the labeled documents; the loss of masked
    # tokens has weight 1.
    class_weight: Positive[float] = only(1.0, {"objective.name": ("masked_lm_classes",)})
    # Weight of the discriminator's loss (ELECTRA: 50; DeBERTa-v3: 10); the generator's loss has weight 1.
    discriminator_weight: Positive[float] = only(50.0, {"objective.name": ("replaced_tokens",)})
    # Width of the generator (hidden_size and intermediate_size) as a share of the model's width, rounded (ELECTRA
    # small: 0.25, base: 0.3333). An optional second number is the generator's number of layers as a share of the
    # model's number of layers (DeBERTa-v3: 1 0.5).
    generator_size: tuple[float, ...] = only((0.25,), {"objective.name": ("replaced_tokens",)})
    # How the generator and the model share embeddings: shared (both use the same embeddings; ELECTRA), none
    # (separate embeddings), or disentangled (the model adds a learned difference to the generator's embeddings,
    # without gradients to them; He et al. 2021, section 3.2).
    embedding_sharing: Literal["shared", "none", "disentangled"] = only(
        "shared", {"objective.name": ("replaced_tokens",)}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.generator_size
        fits = len(size) in (1, 2) and all(share > 0 for share in size)
        self._require("generator_size", fits, "a share of the width, or shares of width and layers; above 0")

    @property
    def carries_state(self) -> bool:
        """True if the objective can keep the state of an encoder between batches."""
        return self.name == "causal_lm"

    @property
    def needs_mask(self) -> bool:
        """True if the vocabulary must have a mask."""
        return self.name != "causal_lm" and not self.module

    @classmethod
    def required(cls, section: "ObjectiveConfig", names: str) -> Self:
        """Return ``section``. Raises ``ValueError`` if it lacks options of an objective of this class, which the
        values ``names`` of ``objective.name`` have."""
        if not isinstance(section, cls):
            raise ValueError(f"objective.name: {section.name} lacks options of objective.module; set {names}")
        return section
