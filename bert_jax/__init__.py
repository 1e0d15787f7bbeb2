"""bert_jax: BERT-class encoders in JAX.

    model = bert_jax.load(path)
    vectors = model.embed(["a sentence", "another one"])

Importing this package does not import jax; the first access to ``load`` or ``LoadedModel`` does.
"""

TYPE_CHECKING = False  # typing takes longer to import than the rest of this file
if TYPE_CHECKING:
    from typing import Any

    from bert_jax.inference.loaded import LoadedModel, load

__all__ = ["LoadedModel", "load"]


def __getattr__(name: str) -> "Any":
    if name in __all__:
        from bert_jax.inference import loaded

        return getattr(loaded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
