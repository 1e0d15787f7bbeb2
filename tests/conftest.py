"""Every test runs on 8 virtual CPU devices; jax and TensorFlow must see this before they start."""

import gc
import os
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Quick compilation rather than quick programs: they are tiny and many.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
# Programs compiled by one test serve the others (jax keys them by program and version).
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"bert-jax-tests-{os.getuid()}")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# As the commands do (bert_jax/process/exits.py): an eighth of the time.
gc.set_threshold(100_000, 20, 50)

import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of larger text sets and published vocabularies, which are not part of the project."""
    if not os.environ.get("BERT_JAX_DATA"):
        pytest.skip("BERT_JAX_DATA names no folder of larger text sets (CONTRIBUTING.md)")
    return Path(os.environ["BERT_JAX_DATA"])
