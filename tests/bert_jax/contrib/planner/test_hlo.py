"""The program that a TPU slice would run: what is summed over devices, in which dtype, how often, and where."""

import importlib.util
import re
from dataclasses import dataclass

import pytest
from support import objective_of, tiny_config

from bert_jax.contrib.planner.topology import parse_topology, tpu_devices
from bert_jax.parallel import make_mesh
from bert_jax.training.programs import compiler_options, pretraining_batch, train_programs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (extra tpu)")

# No two of these sizes are equal, so an array's shape tells what it is.
HIDDEN, FEED_FORWARD, LENGTH, VOCABULARY = 256, 640, 24, 1536
MODEL = (
    f"--model.vocab_size {VOCABULARY - 50} --model.hidden_size {HIDDEN} --model.num_layers 2 "
    f"--model.num_attention_heads 4 --model.intermediate_size {FEED_FORWARD} --data.seq_length {LENGTH} "
    "--execution.scan_layers false --execution.dtype bfloat16 --execution.prng rbg --execution.attention xla "
    "--execution.residual_norm xla --training.accumulation_steps 4 --training.global_batch_size 128"
)
ARRAY = re.compile(r"\b(f32|bf16|f16)\[([\d,]*)\]")
OPERATIONS = "all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute"
COLLECTIVE = re.compile(rf"^\s*(?:ROOT )?%[\w.-]+ = (.*?) ({OPERATIONS})(?:-start)?\(")
CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|branch_computations|called_computations)=\{?([%\w., -]+)")


@dataclass(frozen=True)
class Collective:
    """One array of a collective operation."""

    operation: str
    dtype: str
    shape: tuple[int, ...]
    in_loop: bool

    @property
    def is_sum(self) -> bool:
        return self.operation in ("all-reduce", "reduce-scatter")


def collectives(text: str) -> list[Collective]:
    """Every array that a collective of the program gives, asynchronous and fused ones too."""
    found: list[tuple[str, str, str, str, tuple[int, ...]]] = []
    calls: dict[str, set[str]] = {}
    computation = ""
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{\s*$", line):
            computation = head[1]
        names = {name for group in CALLED.findall(line) for name in re.findall(r"%([\w.-]+)", group)}
        calls.setdefault(computation, set()).update(names)
        if match := COLLECTIVE.match(line):
            chain = re.search(r'chain_id="\d+"', line)
            for index, (dtype, dims) in enumerate(ARRAY.findall(match[1])):
                shape = tuple(int(n) for n in dims.split(",") if n)
                found.append((f"{chain[0]}, {index}" if chain else "", computation, match[2], dtype, shape))
    inside: set[str] = set()
    left = re.findall(r"\bbody=%?([\w.-]+)", text)
    while left:
        name = left.pop()
        if name not in inside:
            inside.add(name)
            left += calls.get(name, ())
    # One that the compiler runs inside other instructions (a chain) is written to each of them: counted once.
    once: dict[object, Collective] = {}
    for index, (name, place, operation, dtype, shape) in enumerate(found):
        key = (name, place in inside) if name else index
        once.setdefault(key, Collective(operation, dtype, shape, place in inside))
    return list(once.values())


def compiled(*arguments: str) -> str:
    config = tiny_config(MODEL, *arguments)
    mesh = make_mesh(config.mesh, tpu_devices(parse_topology("v5e:4x4")))
    objective = objective_of(config, mesh)
    batch = pretraining_batch(objective, config.training.global_batch_size)
    return train_programs(objective).lower(batch).compile().as_text()


def test_the_reader_sees_what_it_should():
    text = """
%sum.1 (a: f32[], b: f32[]) -> f32[] {
}
%fused.2 (p: bf16[8,4]) -> bf16[2,4] {
  %all-reduce.3 = bf16[8,4]{1,0} all-reduce(%p), to_apply=%sum.1
}
%begin.8 (p: f32[6,4]) -> f32[6,4] {
  %all-reduce.9 = f32[6,4]{1,0} all-reduce(%p), to_apply=%sum.1, frontend_attributes={chain_id="0"}
}
%end.10 (p: f32[6,4]) -> f32[6,4] {
  %all-reduce.11 = f32[6,4]{1,0} all-reduce(%p), to_apply=%sum.1, frontend_attributes={chain_id="0"}
}
%body.4 (p: (s32[])) -> (s32[]) {
  %all-reduce-scatter.5 = bf16[2,4]{1,0} fusion(%x), kind=kCustom, calls=%fused.2
}
ENTRY %main (a: f32[4]) -> f32[4] {
  %while.6 = (s32[]) while(%t), condition=%c, body=%body.4
  %all-reduce-start.7 = (f32[4]{0}, f32[16,4]{1,0}) all-reduce-start(%a, %b), to_apply=%sum.1
}
"""
    assert collectives(text) == [
        Collective("all-reduce", "bf16", (8, 4), True),
        Collective("all-reduce", "f32", (6, 4), False),
        Collective("all-reduce", "f32", (4,), False),
        Collective("all-reduce", "f32", (16, 4), False),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicas_sum_gradients_once_in_the_dtype_asked_for(dtype):
    found = collectives(compiled(f"--training.gradient_reduction_dtype {dtype}"))
    assert found and not [c for c in found if c.in_loop]
    sums = [c for c in found if c.is_sum]
    matrices = [c for c in sums if len(c.shape) == 2]
    assert {c.dtype for c in matrices} == {{"float32": "f32", "bfloat16": "bf16"}[dtype]}
    if dtype == "float32":
        assert {c.dtype for c in sums} == {"f32"}
    # A parameter that only products read may be gathered as they round it; word embeddings are added in float32.
    assert {c.dtype for c in found if not c.is_sum and c.shape == (VOCABULARY, HIDDEN)} == {"f32"}
    rows = {VOCABULARY, VOCABULARY // 16}
    assert len([c for c in matrices if c.shape[0] in rows and c.shape[1] == HIDDEN]) == 1
    # Two layers: query, key, value, output, two of the feed-forward each; three embeddings, transform, pooler.
    assert len([c for c in matrices if set(c.shape) & {HIDDEN}]) <= 2 * 6 + 3 + 2 + 1


@pytest.mark.slow
def test_parts_of_a_replica_sum_gradients_of_weights_in_float32():
    """With fsdp and tensor the compiler sums inside the loop; activations may be summed in bfloat16."""
    found = collectives(compiled("--mesh.data 4 --mesh.fsdp 2 --mesh.tensor 2"))
    assert [c for c in found if c.in_loop]
    weights = {(HIDDEN, HIDDEN), (HIDDEN, FEED_FORWARD), (FEED_FORWARD, HIDDEN), (VOCABULARY, HIDDEN)}
    parts = {(rows // r, columns // c) for rows, columns in weights for r in (1, 2, 4) for c in (1, 2, 4)}
    sums = [c for c in found if c.is_sum and c.shape[-2:] in parts]
    assert sums and {c.dtype for c in sums} == {"f32"}


@pytest.mark.slow
def test_sums_run_beside_the_backward_pass_and_the_users_options_win(monkeypatch):
    text = compiled("--training.accumulation_steps 1 --model.hidden_size 512 --model.intermediate_size 2048")
    assert "AsyncCollectiveStart" in text
    mesh = make_mesh(tiny_config(MODEL).mesh, tpu_devices(parse_topology("v5e:4x4")))
    options = compiler_options(mesh)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_enable_async_all_reduce=false")
    assert compiler_options(mesh) == {k: v for k, v in options.items() if k != "xla_enable_async_all_reduce"}
    assert len(compiler_options(mesh)) == len(options) - 1


@pytest.mark.parametrize(
    ("slice_name", "is_listed"),
    [("v5e:2x2", True), ("v5p:2x2x1", True), ("v6e:2x2", True), ("v4:2x2x1", False), ("tpu7x:2x2x1", False)],
)
def test_collectives_overlap_on_the_chips_whose_compiler_can_do_so(slice_name, is_listed):
    mesh = make_mesh(tiny_config(MODEL).mesh, tpu_devices(parse_topology(slice_name)))
    options = compiler_options(mesh)
    assert (options.get("xla_jf_crs_combiner_threshold_in_bytes") == "1000000") == is_listed
    assert bool(options) == is_listed
