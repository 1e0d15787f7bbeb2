"""Loading of a class from a Python file that the user supplies."""

import importlib.util
import sys
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def user_class(file: str, option: str, base: type[T], name: str = "") -> type[T]:
    """Load the Python ``file``, which the user sets with ``option``, and return the subclass of ``base`` in it.

    ``name``: name of this class; empty: the first part of the name of the option, capitalized, as ``Task`` for
    ``task.module``.

    Raises ``ValueError`` if the file is missing, fails to load or does not define this class.
    """
    section, path = option.partition(".")[0], Path(file)
    name = name or section.capitalize()
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{option}: {path} is not an existing .py file; use a file that defines a class {name}")
    module_name = f"{section}_module_{path.stem}"  # differs from the name of every installed module
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{option}: {path}: {type(error).__name__}: {error}") from error
    defined = getattr(module, name, None)
    if not (isinstance(defined, type) and issubclass(defined, base) and defined is not base):
        rule = f"{path} defines no class {name} that extends {base.__module__}.{base.__qualname__}"
        raise ValueError(f"{option}: {rule}")
    return defined
