"""The class of the pretraining objective that a config names. JAX is imported only to load a class."""

from typing import TYPE_CHECKING

from bert_jax import registry
from bert_jax.config.objective import ObjectiveConfig

if TYPE_CHECKING:
    from bert_jax.objectives.objective import PretrainObjective


def objective_class(config: ObjectiveConfig) -> type["PretrainObjective"]:
    """Return the class in ``objective.module`` if this option is set, otherwise the class of ``objective.name``.

    Raises ``ValueError`` for an unknown name, and for a file that does not define a class ``Objective``.
    """
    registry.check("objectives", config.name, "objective.name")
    if config.module:
        from bert_jax.io.user_module import user_class
        from bert_jax.objectives.objective import PretrainObjective

        return user_class(config.module, "objective.module", PretrainObjective)
    loaded: type[PretrainObjective] = registry.load("objectives", config.name)
    return loaded
