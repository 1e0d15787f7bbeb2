"""Import of TensorFlow on first use, without access to accelerators and with few threads."""

import contextlib
import functools
import os
from types import ModuleType

THREADS = 2  # TensorFlow threads: enough to parse batches without slowing down the training loop


@functools.cache
def load_tensorflow() -> ModuleType:
    """Import TensorFlow with accelerators hidden and log messages disabled.

    Raises ``ValueError`` if TensorFlow is not installed.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # oneDNN is not used here, and logs a line at every start
    try:
        import tensorflow as tf
    except ImportError:
        raise ValueError("TensorFlow is not installed; run: pip install 'bert_jax[data]'") from None

    # The thread pools cannot be changed if TensorFlow already runs in this process.
    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(THREADS)
        tf.config.threading.set_inter_op_parallelism_threads(THREADS)
    for kind in ("GPU", "TPU"):
        tf.config.set_visible_devices([], kind)
    return tf
