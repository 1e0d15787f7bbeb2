"""Table of pretraining objectives, and loading of user-defined objectives. JAX is imported only to load a class."""

import difflib
import importlib
from typing import TYPE_CHECKING

from bert_jax.config.objective import ObjectiveConfig

if TYPE_CHECKING:
    from bert_jax.objectives.objective import PretrainObjective

# Module and class of each ``objective.name``.
OBJECTIVES = {
    "masked_lm": ("bert_jax.objectives.masked_lm", "MaskedLm"),
    "masked_lm_classes": ("bert_jax.objectives.masked_lm_classes", "MaskedLmClasses"),
    "distillation": ("bert_jax.objectives.distillation", "Distillation"),
    "causal_lm": ("bert_jax.objectives.causal_lm", "CausalLm"),
    "replaced_tokens": ("bert_jax.objectives.replaced_tokens", "ReplacedTokens"),
    "bidirectional_lm": ("bert_jax.objectives.ancestors.bidirectional_lm", "BidirectionalLm"),
    "skip_gram": ("bert_jax.objectives.ancestors.word2vec", "SkipGram"),
    "cbow": ("bert_jax.objectives.ancestors.word2vec", "Cbow"),
    "glove": ("bert_jax.objectives.ancestors.glove", "Glove"),
}


def check_name(config: ObjectiveConfig) -> None:
    """Raise ``ValueError`` for an unknown ``objective.name``."""
    if config.name not in OBJECTIVES:
        close = difflib.get_close_matches(config.name, OBJECTIVES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"objective.name: {config.name!r} is not allowed; allowed: {', '.join(OBJECTIVES)}{hint}")


def objective_class(config: ObjectiveConfig) -> type["PretrainObjective"]:
    """Return the class in ``objective.module`` if this option is set, otherwise the class of ``objective.name``.

    Raises ``ValueError`` for an unknown name, and for a file that does not define a class ``Objective``.
    """
    check_name(config)
    if config.module:
        from bert_jax.io.user_module import user_class
        from bert_jax.objectives.objective import PretrainObjective

        return user_class(config.module, "objective.module", PretrainObjective)
    module, name = OBJECTIVES[config.name]
    loaded: type[PretrainObjective] = getattr(importlib.import_module(module), name)
    return loaded
