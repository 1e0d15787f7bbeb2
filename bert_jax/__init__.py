"""bert_jax: BERT-class encoders in JAX. docs/api.md describes the names of ``__all__``.

    model = bert_jax.load(path)
    vectors = model.embed(["a sentence", "another one"])

Importing this package does not import jax; the first access to a name does.
"""

TYPE_CHECKING = False  # typing takes longer to import than the rest of this file
if TYPE_CHECKING:
    from typing import Any

    from bert_jax.inference.loaded import LoadedModel, load

__version__ = "0.1.0"
# Name -> module.
_MODULES = {
    "LoadedModel": "bert_jax.inference.loaded",
    "load": "bert_jax.inference.loaded",
}
__all__ = ["LoadedModel", "load"]


def __getattr__(name: str) -> "Any":
    if name in _MODULES:
        import importlib

        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
