"""Import of TensorFlow for the host: on first use, hidden from accelerators, with few threads."""

import contextlib
import functools
import os
from typing import Any

THREADS = 2  # of TensorFlow: enough to parse batches without slowing the trainer down


@functools.cache
def load_tensorflow() -> Any:
    """Import TensorFlow without accelerators and log messages; ``ValueError`` if it is not installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # unused here, and logs a line at every start
    try:
        import tensorflow as tf
    except ImportError:
        raise ValueError("TensorFlow is not installed; run: pip install 'bert_jax[data]'") from None

    # The thread pools of a TensorFlow that already runs in this process cannot be changed.
    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(THREADS)
        tf.config.threading.set_inter_op_parallelism_threads(THREADS)
    for kind in ("GPU", "TPU"):
        tf.config.set_visible_devices([], kind)
    return tf
