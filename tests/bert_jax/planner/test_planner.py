"""FLOPs of a traced training step and the hardware table."""

import pytest

from bert_jax.config.schema import ModelConfig
from bert_jax.model.flops import training_flops_per_sequence
from bert_jax.parallel.hardware import find_chip, mfu

BASE = ModelConfig()
LARGE = ModelConfig(hidden_size=1024, num_layers=24, num_attention_heads=16, intermediate_size=4096)


@pytest.mark.parametrize(
    ("model", "seq_length", "max_predictions", "gflop"),
    [(BASE, 128, 20, 69.93), (BASE, 512, 76, 300.9), (LARGE, 128, 20, 240.6), (LARGE, 512, 76, 1019.8)],
)
def test_published_table(model, seq_length, max_predictions, gflop):
    flops = training_flops_per_sequence(model, seq_length=seq_length, max_predictions=max_predictions)
    digits = len(str(gflop).split(".")[1])
    assert round(flops / 1e9, digits) == gflop


def test_without_nsp_only_pooler_and_head_are_missing():
    arguments = {"seq_length": 128, "max_predictions": 20}
    difference = training_flops_per_sequence(BASE, **arguments) - training_flops_per_sequence(
        BASE, has_nsp=False, **arguments
    )
    assert difference == 3 * (2 * 768 * 768 + 2 * 768 * 2)


@pytest.mark.parametrize(
    ("device_kind", "tflops", "memory"),
    [
        ("TPU v3", 61.5, 16e9),
        ("TPU v4", 275, 32e9),
        ("TPU v5 lite", 197, 16e9),
        ("TPU v5", 459, 95e9),
        ("TPU v6 lite", 918, 32e9),
        ("TPU7x", 1153.5, 96e9),
        ("NVIDIA H200", 989, 141e9),
        ("NVIDIA H100 80GB HBM3", 989, 80e9),
        ("NVIDIA H100 PCIe", 756, 80e9),
        ("NVIDIA H100 NVL", 835, 94e9),
        ("NVIDIA A100-SXM4-80GB", 312, 80e9),
        ("NVIDIA A100-SXM4-40GB", 312, 40e9),
        ("NVIDIA B200", 2250, 180e9),
    ],
)
def test_device_kinds(device_kind, tflops, memory):
    chip = find_chip(device_kind)
    assert chip.device_peak_flops == tflops * 1e12
    assert chip.device_memory_bytes == memory


@pytest.mark.parametrize("device_kind", ["cpu", "", "TPU v99", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla H1000"])
def test_unknown_hardware_has_no_mfu(device_kind):
    assert find_chip(device_kind) is None
    assert mfu(1e15, device_kind, 8) is None


def test_mfu_is_a_share_of_all_devices():
    assert mfu(989e12, "NVIDIA H200", 2) == pytest.approx(0.5)
    assert mfu(123e12, "TPU v3", 2) == pytest.approx(1.0)  # two devices are one chip
