"""FLOPs of a traced training step and the hardware table."""

import jax
import jax.numpy as jnp
import pytest

from bert_jax.config.architecture import ModelConfig
from bert_jax.model.flops import traced_flops, training_flops, training_flops_per_sequence
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


@pytest.mark.parametrize(("model", "has_nsp"), [(BASE, True), (LARGE, False)])
def test_traced_operations_are_those_of_the_formula(model, has_nsp):
    """The published formula."""
    length, predictions, hidden = 128, 20, model.hidden_size
    found = training_flops(model, seq_length=length, max_predictions=predictions, has_nsp=has_nsp)
    attention = 4 * model.num_layers * hidden * length**2
    products = model.num_layers * length * (8 * hidden**2 + 4 * hidden * model.intermediate_size)
    heads = predictions * (2 * hidden**2 + 2 * hidden * model.vocab_size)
    heads += (2 * hidden**2 + 4 * hidden) * has_nsp
    assert found.total() == 3 * (attention + products + heads)
    assert sum(n for scope, n in found.items() if "dot_product_attention" in scope) == 3 * attention


def test_loops_and_branches_count_as_they_run():
    x = jax.ShapeDtypeStruct((4, 4), "float32")
    one = 2 * 4**3

    def loop(x):
        return jax.lax.scan(lambda carry, _: (carry @ carry, None), x, length=5)[0]

    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, lambda y: y @ y @ y, lambda y: y, x)

    assert traced_flops(loop, x).total() == 5 * one
    assert traced_flops(lambda x: loop(branch(x)), x).total() == 7 * one
    # Recomputation is in the trace: the product and, backward, the product again and its two gradients.
    again = jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(y @ y))(x).sum())
    assert traced_flops(again, x).total() == 4 * one
    kernel = jax.ShapeDtypeStruct((3, 3, 4, 8), "float32")
    image = jax.ShapeDtypeStruct((1, 6, 6, 4), "float32")
    convolved = traced_flops(
        lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        image,
        kernel,
    )
    assert convolved.total() == 2 * 36 * 8 * 9 * 4
    with pytest.raises(ValueError, match=r"loop .* jax\.lax\.scan"):
        traced_flops(lambda x: jax.lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y @ y, x), x)


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
