"""Table of pretraining objectives, and loading of user-defined objectives. JAX is imported only to load a class."""

import difflib
import importlib
from typing import TYPE_CHECKING

from bert_jax import registry
from bert_jax.config.objective import ObjectiveConfig

if TYPE_CHECKING:
    from bert_jax.objectives.objective import PretrainObjective

# Module and class of each ``objective.name`` of the trunk.
OBJECTIVES = {
    "masked_lm": ("bert_jax.objectives.masked_lm", "MaskedLm"),
    "masked_lm_classes": ("bert_jax.objectives.masked_lm_classes", "MaskedLmClasses"),
    "distillation": ("bert_jax.objectives.distillation", "Distillation"),
    "causal_lm": ("bert_jax.objectives.causal_lm", "CausalLm"),
    "replaced_tokens": ("bert_jax.objectives.replaced_tokens", "ReplacedTokens"),
}


def check_name(config: ObjectiveConfig) -> None:
    """Raise ``ValueError`` for an unknown ``objective.name``."""
    if config.name in OBJECTIVES:
        return
    allowed = [*OBJECTIVES, *registry.names("objectives")]
    if config.name not in allowed:
        close = difflib.get_close_matches(config.name, allowed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"objective.name: {config.name!r} is not allowed; allowed: {', '.join(allowed)}{hint}")


def objective_class(config: ObjectiveConfig) -> type["PretrainObjective"]:
    """Return the class in ``objective.module`` if this option is set, otherwise the class of ``objective.name``.

    Raises ``ValueError`` for an unknown name, and for a file that does not define a class ``Objective``.
    """
    check_name(config)
    if config.module:
        from bert_jax.io.user_module import user_class
        from bert_jax.objectives.objective import PretrainObjective

        return user_class(config.module, "objective.module", PretrainObjective)
    loaded: type[PretrainObjective]
    if config.name not in OBJECTIVES:
        loaded = registry.load("objectives", config.name)
        return loaded
    module, name = OBJECTIVES[config.name]
    loaded = getattr(importlib.import_module(module), name)
    return loaded
