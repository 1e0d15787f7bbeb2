"""Memory that runs on a CPU keep between their steps."""

import ctypes
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bert_jax.config.architecture import ModelConfig
from bert_jax.process import accelerators, allocator

SMALL = ModelConfig(vocab_size=1000, hidden_size=64, num_layers=2, num_attention_heads=2, intermediate_size=128)


@pytest.fixture
def calls(monkeypatch):
    """Calls of mallopt on a machine with free memory and without an accelerator."""
    found: dict[int, int] = {}
    library = SimpleNamespace(mallopt=lambda name, value: found.update({name: value}) or 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(allocator, "may_have_accelerator", lambda: False)
    monkeypatch.setattr(allocator, "_free_memory", lambda: 8 * 2**30)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    return found


def test_parameters_of_shared_layers_are_counted_once():
    """ALBERT xlarge has about 60 million parameters (Lan et al. 2019, table 1)."""
    sizes = {"vocab_size": 30_000, "hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 8192}
    model = ModelConfig(**sizes, num_layers=24, embedding_size=128, shared_layers=True)
    assert 5.0e7 < allocator._parameters(model) < 6.0e7
    assert allocator._parameters(ModelConfig(**sizes, num_layers=24)) > 1.2e9


def test_freed_memory_of_small_models_is_kept(calls):
    assert allocator.keep_freed_memory(SMALL, 4096, 64)
    # M_MMAP_MAX, M_TRIM_THRESHOLD and M_ARENA_MAX of malloc.h
    assert calls == {-4: 0, -1: 2**31 - 1, -8: 1}


@pytest.mark.parametrize("reason", ["base", "accelerator", "memory", "large batch", "container"])
def test_freed_memory_is_returned_where_keeping_it_gains_nothing(calls, monkeypatch, reason, tmp_path):
    if reason == "accelerator":
        monkeypatch.setattr(allocator, "may_have_accelerator", lambda: True)
    if reason == "memory":
        monkeypatch.setattr(allocator, "_free_memory", lambda: 2**30)
    if reason == "container":
        monkeypatch.undo()
        assert allocator._free_memory() > 0
        files = tmp_path / "limit", tmp_path / "used"
        for file, text in zip(files, (f"{3 * 2**30}\n", f"{2**30}\n"), strict=True):
            file.write_text(text)
        monkeypatch.setattr(allocator, "_LIMITS", (tuple(map(str, files)),))
        assert allocator._free_memory() <= 2 * 2**30
        files[0].write_text("max\n")
        assert allocator._free_memory() > 0
        return
    tokens = 2**20 if reason == "large batch" else 4096
    assert not allocator.keep_freed_memory(ModelConfig() if reason == "base" else SMALL, tokens, 512)
    assert not calls


@pytest.mark.parametrize(
    ("environment", "may"),
    [
        ({"JAX_PLATFORMS": "cpu"}, False),
        ({"JAX_PLATFORMS": "tpu"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a"}, True),
        ({}, False),
    ],
)
def test_variables_of_the_environment_indicate_an_accelerator(monkeypatch, environment, may):
    monkeypatch.setattr(accelerators, "DEVICE_FILES", ())
    for name in ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert accelerators.may_have_accelerator() is may


@pytest.mark.slow
def test_a_process_that_keeps_its_memory_has_fewer_page_faults():
    program = """
import resource, sys
from bert_jax.config.architecture import ModelConfig
from bert_jax.process import allocator
allocator._free_memory = lambda: 8 * 2**30
kept = "keep" in sys.argv and allocator.keep_freed_memory(ModelConfig(num_layers=1), 1024, 128)
import ctypes
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
c.malloc.argtypes = [ctypes.c_size_t]
c.free.argtypes = [ctypes.c_void_p]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    block = c.malloc(2**26)
    ctypes.memset(block, 1, 2**26)
    c.free(block)
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    found = {}
    for word in ("keep", "return"):
        words = [sys.executable, "-c", program, word]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
        kept, faults = done.stdout.split()
        found[word] = int(faults)
        assert kept == str(int(word == "keep"))
    pages = 2**26 // resource.getpagesize()
    assert found["keep"] < 2 * pages
    assert found["return"] > 4 * pages


@pytest.mark.slow
def test_a_model_is_read_before_devices_start():
    """Threads of devices that start before the call keep their own memory."""
    program = """
from jax._src import xla_bridge
from bert_jax.config import ExecutionConfig, ModelConfig
from bert_jax.model import BertForPretraining
from bert_jax.model.canonical import canonical_shapes
shapes = canonical_shapes(BertForPretraining(ModelConfig(num_layers=1), ExecutionConfig(), has_nsp=True))
print(len(shapes) > 20, xla_bridge.backends_are_initialized())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
