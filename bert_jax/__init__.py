"""bert_jax: BERT-class encoders in JAX. docs/api.md describes the names of ``__all__``.

    run = bert_jax.pretrain("quickstart", corpus="my_texts/", workdir="runs/mine")
    tuned = bert_jax.finetune(run, train=(texts, labels), dev=0.1)
    model = bert_jax.load("runs/mine")
    vectors = model.embed(["a sentence", "another one"])

Importing this package does not import jax; the first access to a name does.
"""

TYPE_CHECKING = False  # typing takes longer to import than the rest of this file
if TYPE_CHECKING:
    from typing import Any

    from bert_jax.commands.estimators import TextClassifier, TextRegressor
    from bert_jax.commands.from_python import finetune, pretrain
    from bert_jax.commands.report import report
    from bert_jax.commands.trained import FinetuneRun, PretrainRun
    from bert_jax.inference.loaded import LoadedModel, load

__version__ = "0.2.0"
# Name -> module.
_MODULES = {
    "FinetuneRun": "bert_jax.commands.trained",
    "LoadedModel": "bert_jax.inference.loaded",
    "PretrainRun": "bert_jax.commands.trained",
    "TextClassifier": "bert_jax.commands.estimators",
    "TextRegressor": "bert_jax.commands.estimators",
    "finetune": "bert_jax.commands.from_python",
    "load": "bert_jax.inference.loaded",
    "pretrain": "bert_jax.commands.from_python",
    "report": "bert_jax.commands.report",
}
__all__ = [
    "FinetuneRun", "LoadedModel", "PretrainRun", "TextClassifier", "TextRegressor", "finetune", "load", "pretrain",
    "report",
]  # fmt: skip


def __getattr__(name: str) -> "Any":
    if name in _MODULES:
        import importlib

        return getattr(importlib.import_module(_MODULES[name]), name)
    if not name.startswith("_"):
        from bert_jax.io.elsewhere import package_hint

        if hint := package_hint(name):  # the text of an AttributeError is lost in "from bert_jax import NAME"
            raise ImportError(f"{__name__} has no {name}; {hint}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
