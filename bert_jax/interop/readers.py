"""One way to read a model from any format that is known, by what lies in its folder."""

from pathlib import Path

from bert_jax.interop.exchange import ReadOptions, Weights
from bert_jax.interop.native import is_native, read_native

SUPPORTED = (
    "a saved model or workdir of this library, a Hugging Face folder (config.json), a sentence-transformers "
    "folder (modules.json), a TF1 checkpoint prefix (.../bert_model.ckpt beside bert_config.json) or an npz export "
    "(weights.npz)"
)


def read_weights(path: Path, options: ReadOptions | None = None) -> Weights:
    """Read ``path``, whatever its format. Raises ``ValueError`` in one line when it is none that is known."""
    options = options or ReadOptions()
    if is_native(path):
        return read_native(path, options)
    raise ValueError(f"{path}: no model there; readable: {SUPPORTED}")
