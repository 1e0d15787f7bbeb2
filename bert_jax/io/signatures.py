"""Errors of calls from Python that name the parameters of the function."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from bert_jax.io.elsewhere import parameter_hint

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def names_parameters(function: Callable[P, R], name: str = "") -> Callable[P, R]:
    """Return ``function``, whose ``TypeError`` for wrong arguments begins with its name (``name`` if it is given,
    the class for a constructor) and lists its parameters."""
    signature = inspect.signature(function)
    known = [one for one in signature.parameters if one != "self"]

    @functools.wraps(function)
    def called(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            signature.bind(*arguments, **options)
        except TypeError as error:
            hint = "".join(parameter_hint(one, known) for one in options if one not in known)
            called_name = name or function.__name__
            if called_name == "__init__":
                called_name = type(arguments[0]).__name__
            raise TypeError(f"{called_name}: {error}{hint}; its parameters: {', '.join(known)}") from None
        return function(*arguments, **options)

    return called


def methods_name_parameters(cls: C) -> C:
    """Apply :func:`names_parameters` to the public methods of a class."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, names_parameters(method, name))
    return cls
