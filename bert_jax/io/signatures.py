"""Errors of calls from Python that name the parameters of the function."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from bert_jax.io.errors import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def names_parameters(function: Callable[P, R], name: str = "") -> Callable[P, R]:
    """Return ``function``, whose ``TypeError`` for wrong arguments begins with its name (``name`` if it is given)
    and lists its parameters."""
    signature = inspect.signature(function)
    known = [one for one in signature.parameters if one != "self"]

    @functools.wraps(function)
    def called(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            signature.bind(*arguments, **options)
        except TypeError as error:
            hint = next((did_you_mean(one, known) for one in options if one not in known), "")
            which = f"{name or function.__name__}: {error}{hint}"
            raise TypeError(f"{which}; its parameters: {', '.join(known)}") from None
        return function(*arguments, **options)

    return called


def methods_name_parameters(cls: C) -> C:
    """Apply :func:`names_parameters` to the public methods of a class."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, names_parameters(method, name))
    return cls
