"""TensorFlow as this package uses it: on the host, imported only when something needs it."""

import contextlib
import functools
import os
from typing import Any

THREADS = 2  # of TensorFlow: enough for two cores of parsing, no fight with the trainer


@functools.cache
def load_tensorflow() -> Any:
    """TensorFlow, hidden from accelerators, quiet, and with few threads."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # unused here, and announces itself at every start
    try:
        import tensorflow as tf
    except ImportError:
        raise ValueError("TensorFlow is not installed; run: pip install 'bert_jax[data]'") from None

    # TensorFlow that already runs in this process keeps its thread pools.
    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(THREADS)
        tf.config.threading.set_inter_op_parallelism_threads(THREADS)
    for kind in ("GPU", "TPU"):
        tf.config.set_visible_devices([], kind)
    return tf
