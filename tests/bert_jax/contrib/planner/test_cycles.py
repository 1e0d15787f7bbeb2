"""Time of a compiled step: loops multiplied out, what is hidden and what not, and sanity on real compilations."""

import json
import subprocess
import sys

import pytest

from bert_jax.contrib.planner import hlo
from bert_jax.contrib.planner.cycles import collective_seconds, is_ring, step_cost
from bert_jax.model.kernels.common import stated_cost
from bert_jax.parallel.hardware import TPUS

V5E = TPUS["TPU v5e"]
CLOCK = V5E.clock_ghz * 1e9
BANDWIDTH = V5E.device_memory_bandwidth


def cycles(count, scopes="jit(f)/add"):
    estimate = f'"window_config":{{"estimated_cycles":"{count}"}}'
    return f'metadata={{op_name="{scopes}" stack_frame_id=1}}, backend_config={{{estimate}}}'


WORK_BODY = """%work (w.1: f32[8]) -> f32[8] {
  %w.1 = f32[8]{0} parameter(0)
  ROOT %w.2 = f32[8]{0} add(%w.1, %w.1)
}
"""

LOOP = f"""HloModule jit_f, is_scheduled=true, entry_computation_layout={{()->f32[8]{{0}}}}

FileNames
1 "f.py"

{WORK_BODY}
%inner (p.1: s32[]) -> pred[] {{
  %p.1 = s32[]{{:T(128)}} parameter(0)
  %limit = s32[]{{:T(128)}} constant(7)
  ROOT %less = pred[] compare(%p.1, %limit), direction=LT
}}

%condition (c: (s32[], f32[8])) -> pred[] {{
  %c = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%c), index=0
  ROOT %check = pred[] fusion(%i), kind=kLoop, calls=%inner
}}

%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %b = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) parameter(0)
  %i.1 = s32[]{{:T(128)}} get-tuple-element(%b), index=0
  %x = f32[8]{{0:T(128)}} get-tuple-element(%b), index=1
  %two = s32[]{{:T(128)}} constant(2)
  %next = s32[]{{:T(128)}} add(%i.1, %two)
  %y = f32[8]{{0:T(128)}} fusion(%x), kind=kLoop, calls=%work, {cycles(3000, "jit(f)/mlm_head/add")}
  ROOT %out = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) tuple(%next, %y)
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0:T(128)}} parameter(0)
  %one = s32[]{{:T(128)}} constant(START)
  %begin = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) tuple(%one, %a)
  %loop = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) while(%begin), condition=%condition, body=%body
  %z = f32[8]{{0:T(128)}} get-tuple-element(%loop), index=1
  ROOT %last = f32[8]{{0:T(128)}} fusion(%z), kind=kLoop, calls=%work, {cycles(1500)}
}}
"""


def cost(text, devices=1, grid=(1, 1)):
    return step_cost(text, V5E, {"data": devices}, grid)


def test_a_loop_is_multiplied_out():
    found = cost(LOOP.replace("START", "1"))  # 1, 3, 5
    assert found.seconds * CLOCK == pytest.approx(3 * 3000 + 1500, rel=1e-3)
    assert found.parts["mlm_head"] / found.seconds == pytest.approx(9000 / 10500, rel=1e-3)
    assert found.unknown_loops == []


def test_a_loop_of_unknown_length_is_named_and_counted_once():
    found = cost(LOOP.replace("constant(START)", "get-something(%a)").replace("START", "1"))
    assert found.unknown_loops == ["loop"]
    assert found.seconds * CLOCK == pytest.approx(3000 + 1500, rel=0.01)


def test_what_is_not_understood_is_named():
    text = LOOP.replace("START", "1")
    for bad in ("  something else", "  %q = f32[8] add(%x", "  %q = add(%x, %x)"):
        with pytest.raises(ValueError, match="not an instruction"):
            hlo.parse(text.replace("  %two", f"{bad}\n  %two"))
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("HloModule x\n")


def entry(*lines):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule f\n\n{WORK_BODY}\nENTRY %main (a: bf16[4096,4096]) -> bf16[4096,4096] {{\n{body}\n}}\n"


ARGUMENT = "%a = bf16[4096,4096]{1,0:T(8,128)(2,1)} parameter(0)"
WORK = f"%w = bf16[8]{{0}} fusion(%a), kind=kLoop, calls=%work, {cycles(60_000)}"
BYTES = 4096 * 4096 * 2


@pytest.mark.parametrize("between", [False, True])
def test_an_asynchronous_copy_costs_what_nothing_hides(between):
    shape = "bf16[4096,4096]{1,0:T(8,128)(2,1)S(1)}"
    text = entry(
        ARGUMENT,
        f"%s = ({shape}, bf16[4096,4096]{{1,0:T(8,128)(2,1)}}, u32[]{{:S(2)}}) copy-start(%a)",
        WORK if between else "%w = bf16[8]{0} parameter(1)",
        f"ROOT %d = {shape} copy-done(%s)",
    )
    alone = BYTES / BANDWIDTH
    found = cost(text)
    assert found.seconds == pytest.approx(max(alone, 60_000 / CLOCK) if between else alone)


REDUCE = "replica_groups={{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}, to_apply=%add"


def test_collectives_cost_what_the_torus_gives():
    text = entry(ARGUMENT, f"ROOT %r = bf16[4096,4096]{{1,0}} all-reduce(%a), {REDUCE}")
    found = cost(text, 16, (4, 4))
    # Two lines of four: one link at the end of each. There and back, 15 of 16 parts.
    assert found.communication_seconds == pytest.approx(2 * BYTES * 15 / 16 / (2 * 45e9), rel=0.02)
    assert found.communication_seconds == found.seconds and found.parts["communication"] / found.seconds == 1.0
    ring = collective_seconds("all-reduce", BYTES, 256, V5E, (16, 16))
    assert ring == pytest.approx(2 * BYTES * 255 / 256 / (4 * 45e9), rel=0.1)
    assert collective_seconds("reduce-scatter", BYTES, 256, V5E, (16, 16)) == pytest.approx(ring / 2)
    assert collective_seconds("all-gather", BYTES // 256, 256, V5E, (16, 16)) == pytest.approx(ring / 2)
    assert is_ring(16, (16, 16), V5E) and not is_ring(8, (8, 16), V5E)
    assert is_ring(4, (4, 4, 8), TPUS["TPU v4"]) and not is_ring(2, (2, 2, 4), TPUS["TPU v4"])


def test_groups_are_read_in_every_form():
    for groups in (
        "[1,16]<=[16]",
        "mesh['axis_0'=16,'axis_1'=1] {'axis_0'}",
        "{{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}",
    ):
        text = entry(ARGUMENT, f"ROOT %r = bf16[4096,4096]{{1,0}} all-reduce(%a), replica_groups={groups}")
        assert cost(text, 16, (4, 4)).communication_seconds > 5e-4
    alone = entry(ARGUMENT, "ROOT %r = bf16[4096,4096]{1,0} all-reduce(%a), replica_groups={{0},{1}}")
    assert cost(alone, 2, (1, 2)).communication_seconds == 0.0


def test_compute_between_start_and_end_hides_a_collective():
    text = entry(
        ARGUMENT,
        f"%s = bf16[4096,4096]{{1,0}} all-reduce-start(%a), {REDUCE}",
        WORK,
        "ROOT %d = bf16[4096,4096]{1,0} all-reduce-done(%s)",
    )
    found = cost(text, 16, (4, 4))
    alone = collective_seconds("all-reduce", BYTES, 16, V5E, (4, 4))
    assert found.seconds == pytest.approx(alone)
    assert found.communication_seconds == pytest.approx(alone - 60_000 / CLOCK)


def fused(name, root):
    """A fused computation that holds a step of collective 0."""
    return f"""%{name} (x: bf16[4096,4096]) -> bf16[4096,4096] {{
  %x = bf16[4096,4096]{{1,0}} parameter(0)
  %r = bf16[4096,4096]{{1,0}} all-reduce(%x), {REDUCE}, frontend_attributes={{chain_id="0"}}
  ROOT %o = {root}
}}

"""


@pytest.mark.parametrize("between", [False, True])
def test_a_collective_on_the_sparse_core_runs_beside(between):
    """TPU7x: an asynchronous call of a computation that holds it."""
    shape = "bf16[4096,4096]{1,0}"
    text = entry(
        ARGUMENT,
        f'%s = (({shape}), {shape}) call-start(%a), async_execution_thread="sparsecore", to_apply=%away',
        WORK if between else "%w = bf16[8]{0} parameter(1)",
        f"ROOT %d = {shape} call-done(%s)",
    )
    away = f"""%away (x: bf16[4096,4096]) -> bf16[4096,4096] {{
  %x = bf16[4096,4096]{{1,0}} parameter(0)
  ROOT %r = bf16[4096,4096]{{1,0}} all-reduce(%x), {REDUCE}
}}, execution_thread="sparsecore"

"""
    found = cost(text.replace("ENTRY", away + "ENTRY"), 16, (4, 4))
    alone = collective_seconds("all-reduce", BYTES, 16, V5E, (4, 4))
    hidden = 60_000 / CLOCK if between else 0.0
    assert found.communication_seconds == pytest.approx(max(alone - hidden, 0.0))


@pytest.mark.parametrize("work", [20_000, 60_000, 6_000_000])
def test_a_collective_inside_other_instructions_advances_only_while_they_run(work):
    shape = "bf16[4096,4096]{1,0}"
    text = entry(
        ARGUMENT,
        f"%s = {shape} fusion(%a), kind=kCustom, calls=%begin",
        # Runs beside the collective without carrying it: hides nothing.
        WORK,
        f"%f = {shape} fusion(%s), kind=kOutput, calls=%step, {cycles(work, 'jit(f)/mlm_head/dot')}",
        f"%g = {shape} fusion(%f), kind=kOutput, calls=%step, {cycles(work)}",
        f"ROOT %d = {shape} fusion(%g), kind=kCustom, calls=%end",
    )
    inner = (
        fused("begin", f'{shape} custom-call(%r), custom_call_target="AsyncCollectiveStart"')
        + fused("step", f"({shape}, {shape}) tuple(%r, %x)")
        + fused("end", f'{shape} custom-call(%x, %r), custom_call_target="AsyncCollectiveDone"')
    )
    found = cost(text.replace("ENTRY", inner + "ENTRY"), 16, (4, 4))
    alone = collective_seconds("all-reduce", BYTES, 16, V5E, (4, 4))
    assert found.seconds - found.communication_seconds == pytest.approx((60_000 + 2 * work) / CLOCK)
    assert found.communication_seconds == pytest.approx(max(alone - 2 * work / CLOCK, 0.0))
    assert found.parts["mlm_head"] / found.seconds == pytest.approx(work / CLOCK / found.seconds)


def test_a_kernel_is_charged_by_what_it_states_and_listed():
    def kernel(*numbers):
        stated = ",\n".join(f'"{name}":"{value}"' for name, value in stated_cost(*numbers).items())
        return (
            'ROOT %k = bf16[4096,4096]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", '
            f"frontend_attributes={{kernel_metadata={{\n{stated}\n}}}}, "
            'metadata={op_name="jit(f)/dot_product_attention/k"}, backend_config={"custom_call_config":{}}'
        )

    found = cost(entry(ARGUMENT, kernel(10**12, 1)))
    assert found.seconds == pytest.approx(10**12 / V5E.device_peak_flops)
    assert found.parts["attention"] / found.seconds == 1.0
    assert [name for name, _ in found.unestimated] == ["custom-call tpu_custom_call (1)"]
    assert found.unestimated_seconds == found.seconds
    assert cost(entry(ARGUMENT, kernel(1, 10**9))).seconds == pytest.approx(10**9 / BANDWIDTH)
    # The vector units run 4,096 operations per cycle, half of the time beside the matrix units; 160 cycles a step.
    both = cost(entry(ARGUMENT, kernel(10**12, 1, 4096 * CLOCK * 1e-3, 1000, 0.5))).seconds
    assert both == pytest.approx(10**12 / V5E.device_peak_flops + 0.5e-3 + 160_000 / CLOCK, rel=1e-6)


def test_operations_of_a_product_and_of_a_batch_of_products():
    product = "ROOT %c = f32[512,768]{1,0} convolution(%a, %b), dim_labels=bf_io->bf"
    plain = f"""HloModule f
ENTRY %main (a: bf16[512,256]) -> f32[512,768] {{
  %a = bf16[512,256]{{1,0}} parameter(0)
  %b = bf16[256,768]{{1,0}} parameter(1)
  {product}
}}
"""
    assert cost(plain).operations == 2 * 512 * 256 * 768
    # Eight products side by side, written as a dilated window of which one tap in eight meets the input.
    batch = """HloModule f
ENTRY %main (a: bf16[8,128,64]) -> f32[8,128,128] {
  %a = bf16[8,128,64]{2,1,0} parameter(0)
  %b = bf16[8,64,128]{2,1,0} parameter(1)
  ROOT %c = f32[8,128,128] convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf
}
"""
    assert cost(batch).operations == 2 * 8 * 128 * 64 * 128


COMPILE = """
import json
from bert_jax.contrib.planner.topology import parse_topology, prepare_environment, tpu_devices
prepare_environment()
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from bert_jax.contrib.planner.cycles import step_cost
from bert_jax.parallel.hardware import TPUS

devices = tpu_devices(parse_topology("v5e:2x2"))[:1]
sharding = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec())

def cost(f, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    text = jax.jit(f).lower(*arguments).compile().as_text()
    found = step_cost(text, TPUS["TPU v5e"], {"data": 1}, (1, 1))
    assert not found.unknown_loops
    return found

def network(x, weights, unroll):
    def layer(x, w):
        return jax.nn.relu(x @ w[0]) @ w[1] + x, None
    return jax.lax.scan(layer, x, weights, unroll=unroll)[0]

square = cost(lambda a, b: a @ b, (8192, 8192), (8192, 8192))
shapes = (8192, 1024), (6, 2, 1024, 1024)
loops = [cost(lambda x, w, n=n: network(x, w, n), *shapes) for n in (1, 6)]
print(json.dumps({
    "square": 2 * 8192**3 / square.seconds / TPUS["TPU v5e"].device_peak_flops,
    "square_operations": square.operations,
    "seconds": [each.seconds for each in loops], "operations": [each.operations for each in loops],
}))
"""


@pytest.mark.slow
def test_real_compilations_give_sane_times():
    """A lone product at 60 to 100% of the peak; layers in a loop within 10% of layers written out.

    Without gradients: for those a loop must keep what it computed, which the compiler's own copies really cost."""
    pytest.importorskip("libtpu")
    # In a process of its own: libtpu must not meet the eight devices of the tests.
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert 0.6 < found["square"] < 1.0
    assert found["square_operations"] == 2 * 8192**3
    assert found["operations"][0] == pytest.approx(found["operations"][1], rel=0.01)
    assert found["seconds"][0] == pytest.approx(found["seconds"][1], rel=0.1)
