"""One way to read a model from any format that is known, by what lies in its folder."""

from collections.abc import Callable
from pathlib import Path

from bert_jax.interop.exchange import ReadOptions, Weights
from bert_jax.interop.hf_read import is_hf, read_hf
from bert_jax.interop.native import is_native, read_native
from bert_jax.interop.npz import is_npz, read_npz
from bert_jax.interop.sentence_transformers import is_sentence_transformers, read_sentence_transformers
from bert_jax.interop.tf1 import is_tf1, read_tf1

SUPPORTED = (
    "a saved model or workdir of this library, a Hugging Face folder (config.json), a sentence-transformers "
    "folder (modules.json), a TF1 checkpoint prefix (.../bert_model.ckpt beside bert_config.json) or an npz export "
    "(weights.npz)"
)
Reader = Callable[[Path, ReadOptions], Weights]
# The first that knows the path reads it: an npz export has a model.json like a saved model, and a folder of
# Hugging Face may hold the TF1 checkpoint that it was made from. One of sentence-transformers is also one of those.
_READERS: tuple[tuple[Callable[[Path], bool], Reader], ...] = (
    (is_npz, read_npz),
    (is_native, read_native),
    (is_sentence_transformers, read_sentence_transformers),
    (is_hf, read_hf),
    (is_tf1, read_tf1),
)


def read_weights(path: Path, options: ReadOptions | None = None) -> Weights:
    """Read ``path``, whatever its format. Raises ``ValueError`` in one line when it is none that is known, or when
    an option is given that its format has no use for."""
    options = options or ReadOptions()
    read = _reader(path)
    _check_options(path, options, read)
    return read(path, options)


def leaves_activation_open(path: Path) -> bool:
    """Whether the model at ``path`` may not say which activation it was trained with (a TF1 checkpoint)."""
    return _reader(path) is read_tf1


def _reader(path: Path) -> Reader:
    for knows, read in _READERS:
        if knows(path):
            return read
    raise ValueError(f"{path}: no model there; readable: {SUPPORTED}")


def _check_options(path: Path, options: ReadOptions, read: Reader) -> None:
    if options.ema and read not in (read_native, read_tf1):
        raise ValueError(f"{path}: no moving average there; pretraining runs and TF1 checkpoints may have one")
    if options.activation is not None and read is not read_tf1:
        raise ValueError(f"{path}: says its activation itself; only a TF1 checkpoint leaves it open")
