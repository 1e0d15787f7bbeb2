"""The class of the pretraining objective that a config names. JAX is imported only to load a class."""

import inspect
from typing import TYPE_CHECKING

from bert_jax import registry
from bert_jax.config.objective import ObjectiveConfig
from bert_jax.objectives.inputs import Inputs

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

        return _checked(user_class(config.module, "objective.module", PretrainObjective), config.module)
    loaded: type[PretrainObjective] = registry.load("objectives", config.name)
    if not registry.is_of_trunk("objectives", config.name):
        _checked(loaded, config.name)
    return loaded


def inputs_class(config: ObjectiveConfig) -> type[Inputs]:
    """Return the class of what the objective of ``config`` reads besides the training records.

    An objective of the trunk reads nothing else, so its class, and with it JAX, is not imported. Raises
    ``ValueError`` as :func:`objective_class` does.
    """
    if registry.is_of_trunk("objectives", config.name) and not config.module:
        return Inputs
    return objective_class(config).inputs


def _checked(loaded: type["PretrainObjective"], where: str) -> type["PretrainObjective"]:
    """Return the objective. Raises ``ValueError`` for one that is written for the step of an earlier version."""
    try:
        inspect.signature(loaded.sums).bind(*(None for _ in ("self", "params", "aux", "batch", "key")), axis=None)
    except TypeError as error:
        new = "sums(self, params, aux, batch, key, *, axis), which returns (sums, aux.carried)"
        raise ValueError(f"{where}: sums has the arguments of another version ({error}); write {new}") from None
    return loaded
