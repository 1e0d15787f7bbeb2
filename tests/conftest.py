"""Every test runs on 8 virtual CPU devices; JAX and TensorFlow must see this before they start."""

import ctypes
import gc
import importlib.metadata
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Quick compilation rather than quick programs, which are tiny and many: a quarter of the time.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1 "
    # XLA ends the process if a device of a collective is 40 s late, as on a machine that stalls.
    "--xla_cpu_collective_call_terminate_timeout_seconds=600"
)
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later versions do not have the flag
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# Programs compiled by one test serve the others (JAX keys them by program and version).
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"bert-jax-tests-{os.getuid()}")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# As the commands do (bert_jax/process/exits.py): an eighth of the time.
gc.set_threshold(100_000, 20, 50)

import pytest


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """Drops compiled programs, so that a worker stays below 2.5 GB; what remains after that are not programs."""

    least = 1_700_000_000

    def check(self) -> None:
        if sys.platform != "linux" or "jax" not in sys.modules or resident_bytes() < self.least:
            return
        sys.modules["jax"].clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # freed memory stays with the process otherwise
        self.least = max(self.least, resident_bytes() + 300_000_000)


MEMORY = Memory()


@pytest.hookimpl(tryfirst=True)  # before the tests that -m leaves out are taken away
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a test after the first N, where the test has the mark ``cases(N)``, as slow."""
    seen: dict[str, int] = {}
    for item in items:
        name, mark = item.nodeid.partition("[")[0], item.get_closest_marker("cases")
        seen[name] = seen.get(name, 0) + 1
        if mark and seen[name] > mark.args[0]:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def memory_goes_back() -> Iterator[None]:
    yield
    MEMORY.check()


@pytest.fixture(scope="session", autouse=True)
def diagrams_are_empty() -> Iterator[None]:
    """Draw no diagrams: they take as long as the rest of a tiny run, those of the runs of fixtures included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bert_jax.training.logging.report.draw_curves", lambda *_: b"")
        yield


@pytest.fixture(scope="module")
def handlers() -> Iterator[None]:
    """The handlers of signals, which a command replaces, are those of before after the tests of a file."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at the diagrams of a run."""
    from bert_jax.training.logging.curves import draw_curves

    monkeypatch.setattr("bert_jax.training.logging.report.draw_curves", draw_curves)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of larger text sets and published vocabularies, which are not part of the project."""
    if not os.environ.get("BERT_JAX_DATA"):
        pytest.skip("BERT_JAX_DATA names no folder of larger text sets (CONTRIBUTING.md)")
    return Path(os.environ["BERT_JAX_DATA"])
