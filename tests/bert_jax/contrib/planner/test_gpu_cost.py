"""Least time of compiled GPU programs: bytes and operations counted from the text, collectives over the links."""

import importlib.util
import os
import subprocess
import sys

import pytest

from bert_jax.config import PretrainConfig, load_config
from bert_jax.contrib.planner import gpu_devices
from bert_jax.contrib.planner.cycles import step_cost
from bert_jax.contrib.planner.plan import Asked, make_plan
from bert_jax.contrib.planner.plan_text import plan_lines
from bert_jax.contrib.planner.topology import parse_topology

H100 = parse_topology("h100:8").chip
BANDWIDTH, PEAK = 3.35e12, 989e12
TABLE, ROWS = 1000 * 64 * 4, 8 * 64 * 4
CALLED = """
%region (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%lookup (t: f32[1000,64], i: s32[8,1]) -> f32[8,64] {
  %t = f32[1000,64]{1,0} parameter(0)
  %i = s32[8,1]{1,0} parameter(1)
  ROOT %g = f32[8,64]{1,0} gather(%t, %i), offset_dims={1}, collapsed_slice_dims={0}
}

%update (t: f32[1000,64], r: f32[8,64], z: s32[]) -> f32[1000,64] {
  %t.1 = f32[1000,64]{1,0} parameter(0)
  %r = f32[8,64]{1,0} parameter(1)
  %z = s32[] parameter(2)
  ROOT %u = f32[1000,64]{1,0} dynamic-update-slice(%t.1, %r, %z, %z)
}
"""
ARGUMENTS = """  %table = f32[1000,64]{1,0} parameter(0)
  %ids = s32[8,1]{1,0} parameter(1)
  %rows = f32[8,64]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %a = bf16[4096,4096]{1,0} parameter(3)
"""


def cost(*lines, devices=1):
    body = "\n".join(f"  {line}" for line in lines)
    text = f"HloModule f\n{CALLED}\nENTRY %main (p: f32[]) -> f32[] {{\n{ARGUMENTS}{body}\n}}\n"
    return step_cost(text, H100, {"data": devices}, (devices,))


def test_a_lookup_reads_the_rows_that_it_selects():
    found = cost("ROOT %f = f32[8,64]{1,0} fusion(%table, %ids), kind=kLoop, calls=%lookup")
    assert found.moved_bytes == 2 * ROWS + 8 * 4
    assert found.seconds == pytest.approx(found.moved_bytes / BANDWIDTH)


def test_an_update_in_place_writes_the_rows_that_it_replaces():
    found = cost("ROOT %f = f32[1000,64]{1,0} fusion(%table, %rows, %zero), kind=kLoop, calls=%update")
    assert found.moved_bytes == 2 * ROWS + 4
    whole = cost("ROOT %f = f32[1000,64]{1,0} copy(%table)")
    assert whole.moved_bytes == 2 * TABLE


def test_a_product_of_the_library_costs_its_operations_and_no_workspace():
    config = 'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    call = f'custom-call(%a, %a), custom_call_target="__cublas$lt$matmul", {config}'
    found = cost(f"ROOT %p = (bf16[4096,4096]{{1,0}}, s8[4194304]{{0}}) {call}")
    assert found.operations == 2 * 4096**3
    assert found.moved_bytes == 3 * 4096 * 4096 * 2
    assert found.seconds == pytest.approx(found.operations / PEAK)
    assert found.unestimated == [("__cublas$lt$matmul (1)", 1.0)]


def test_a_kernel_costs_what_it_states():
    stated = r"serialized_metadata = \"{\22flops\22: \2212884901888\22, \22bytes_accessed\22: \22202899456\22}\""
    stated = stated.replace('\\"', '"')
    call = f'custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", backend_config={{ir = "ML\\EF", {stated}}}'
    found = cost(f"ROOT %p = bf16[4096,4096]{{1,0}} {call}")
    assert (found.operations, found.moved_bytes) == (12884901888, 202899456)
    without = cost(f"ROOT %p = bf16[4096,4096]{{1,0}} {call.replace('serialized', 'other')}")
    assert without.moved_bytes == 2 * 4096 * 4096 * 2


@pytest.mark.parametrize("devices", [1, 8])
def test_gradients_travel_over_the_links_of_the_boards(devices):
    found = cost(
        "%s = f32[1000,64]{1,0} all-reduce-start(%table), replica_groups={}, to_apply=%region",
        "ROOT %d = f32[1000,64]{1,0} all-reduce-done(%s)",
        devices=devices,
    )
    seconds = 2 * (7 / 8 * TABLE / 450e9 + 7e-6) if devices > 1 else 0
    assert found.communication_seconds == pytest.approx(seconds)


CONFIG = "--data.corpus none --data.seq_length 128 --execution.dtype bfloat16 --training.global_batch_size 64"


@pytest.mark.slow
def test_without_the_compiler_a_plan_is_arithmetic_and_says_so(monkeypatch):
    monkeypatch.setattr("bert_jax.contrib.planner.plan.can_compile", lambda: False)
    config, topology = load_config(PretrainConfig, CONFIG.split()), parse_topology("h100:8")
    plan = make_plan(config, topology, Asked())
    assert plan.method == "arithmetic"
    assert any("pip install 'bert_jax[gpu]'" in line for line in plan_lines(plan, ""))
    monkeypatch.setattr(gpu_devices, "can_compile", lambda: False)
    with pytest.raises(ValueError, match="requires the CUDA compiler"):
        gpu_devices.gpu_devices(topology.chip, 8)


@pytest.mark.skipif(
    not gpu_devices.can_compile() or importlib.util.find_spec("nvidia") is None,
    reason="needs the extra gpu, which the test environment leaves out (4 GB)",
)
def test_a_step_is_compiled_for_boards_that_are_not_here():
    config = load_config(PretrainConfig, [*CONFIG.split(), "--model.num_layers", "1"])
    plan = make_plan(config, parse_topology("h100:8"), Asked())
    assert plan.method == "compiled" and plan.fits and plan.moved_bytes > 1e8
    assert "gpu.triton" in " ".join(plan.unestimated)
    assert any(line.startswith("A lower bound") for line in plan_lines(plan, ""))


@pytest.mark.slow
def test_a_plan_keeps_jax_to_the_cpu_even_after_its_import():
    """JAX gives its CUDA compiler up when it looks for a GPU first and finds none."""
    program = (
        "import jax\nfrom bert_jax.contrib.planner.topology import prepare_environment\nprepare_environment()\n"
        "import os\nprint(jax.config.jax_platforms, os.environ['JAX_PLATFORMS'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("cpu cpu\n", "")
