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
    if registry.is_of_trunk("objectives", config.name):
        loaded: type[PretrainObjective] = registry.load("objectives", config.name)
        return loaded
    try:
        return _checked(registry.load("objectives", config.name), config.name)
    except ImportError as error:
        raise ValueError(f"objective.name {config.name}: {error}") from None


def inputs_class(config: ObjectiveConfig) -> type[Inputs]:
    """Return the class of the inputs that the objective of ``config`` reads in addition to the training records.

    An objective of the trunk reads nothing else, so its class, and with it JAX, is not imported. Raises
    ``ValueError`` as :func:`objective_class` does.
    """
    if registry.is_of_trunk("objectives", config.name) and not config.module:
        return Inputs
    return objective_class(config).inputs


def _checked(loaded: type["PretrainObjective"], where: str) -> type["PretrainObjective"]:
    """Return the objective. Raises ``ValueError`` for one that is written for the step of an earlier version."""
    new = "sums(self, params, aux, batch, key, *, axis), which returns (sums, aux.carried)"
    for name in ("carried_sums", "taught_sums", "set_teacher"):
        if hasattr(loaded, name):
            raise ValueError(f"{where}: {name} is a method of another version, which is not called; write {new}")
    try:
        inspect.signature(loaded.sums).bind(*(None for _ in ("self", "params", "aux", "batch", "key")), axis=None)
    except TypeError as error:
        raise ValueError(f"{where}: sums has the arguments of another version ({error}); write {new}") from None
    return loaded
