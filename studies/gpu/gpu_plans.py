"""Plans of GPUs beside published rates, and collectives of training steps compiled for 8 boards and a TPU slice.

    python studies/gpu/gpu_plans.py [--cases modernbert_h100 h100_8 ...] [--output JSONL]

Compiles each training step ahead of time in a process of its own, 1 to 4 minutes on two cores, and prints a JSON
line. A case with a published rate states the rate of the plan, which is an upper bound, and its ratio to the
published one. A case with several devices states the bytes that its collectives sum (by kind and dtype), those of a
float32 gradient of every parameter, the bytes per device of state and batch, and the seconds that its collectives
take if nothing hides them, over those of one reduction of the gradients and one gathering of the parameters (with
fsdp, of the parameters of the layers twice, in bfloat16).

Exit code 3 if a plan is slower than published; if the gradients are not summed once and in float32; if a device
holds more than its part of the optimizer's state; or if the collectives take more than 1.1 (with fsdp 1.6) times
these seconds. Needs the extras ``gpu`` and ``tpu``; neither is used.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
_LARGE = (
    "--model.hidden_size 1024 --model.num_layers 24 --model.num_attention_heads 16 --model.intermediate_size 4096"
)
_MODERN = "--config configs/modernbert_base.yaml --training.batch_ramp"
_BASE_128 = "--execution.dtype bfloat16 --data.seq_length 128 --data.max_predictions 20"


@dataclass(frozen=True)
class Case:
    """Options of a training step, its devices, and the published rate of one board in ``unit`` per second."""

    options: str
    topology: str
    rate: float = 0.0
    unit: str = ""
    source: str = ""


CASES = {
    "modernbert_h100": Case(
        f"{_MODERN} --training.global_batch_size 32", "h100:1", 307_700, "tokens",
        "1.7 T tokens in 194 h on 8 H100 (Warner et al. 2024)",
    ),
    "large_512_a100": Case(
        f"--execution.dtype bfloat16 {_LARGE} --data.seq_length 512 --data.max_predictions 80 "
        "--training.global_batch_size 32",
        "a100:1", 210, "sequences",
        "NVIDIA DeepLearningExamples, BERT for PyTorch, phase 2 (bins of 64 tokens, so shorter sequences)",
    ),
    "base_128_a100": Case(
        f"{_BASE_128} --training.global_batch_size 256", "a100:1", 866, "sequences",
        "286.7 M sequences in 11.5 h on 8 A100 (MosaicML)",
    ),
    "h100_8": Case(f"{_BASE_128} --training.global_batch_size 2048", "h100:8"),
    "h100_2x4": Case(f"{_BASE_128} --training.global_batch_size 2048 --mesh.data 2 --mesh.fsdp 4", "h100:8"),
    "v5e_4x4": Case(f"{_BASE_128} --training.global_batch_size 1024", "v5e:4x4"),
}  # fmt: skip
# Most bytes and seconds over the exact ones. With fsdp, the gradient of the word embeddings also gathers that of
# the activations in float32, because each device has columns of the table.
MARGIN, FSDP_MARGIN = 1.1, 1.6


def main() -> int:
    """Compile, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--output", type=Path, help="file of JSON lines, which is continued")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.worker)))
        return 0
    old = options.output.read_text().splitlines() if options.output and options.output.exists() else []
    lines = [json.loads(line) for line in old]
    for name in options.cases:
        if all(line["case"] != name for line in lines):
            words = [sys.executable, str(Path(__file__).resolve()), "--worker", name]
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
            lines.append(json.loads(done.stdout.splitlines()[-1]))
            if options.output:
                options.output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        print(json.dumps(line))
    return 0 if all(line["good"] for line in lines) else 3


def worker(name: str) -> dict[str, Any]:
    """Compile the step of the case ``name`` and return its figures."""
    from bert_jax.config import PretrainConfig, load_config
    from bert_jax.contrib.planner.compiled import compile_step
    from bert_jax.contrib.planner.plan import Asked, plan_compiled
    from bert_jax.contrib.planner.topology import parse_topology

    case = CASES[name]
    config, topology = load_config(PretrainConfig, case.options.split()), parse_topology(case.topology)
    step = compile_step(config, topology)
    plan = plan_compiled(config, topology, Asked(), step)
    line: dict[str, Any] = {"case": name, "topology": topology.name, "fits": plan.fits}
    line |= {"step_milliseconds": round(1e3 * (plan.predicted_step_seconds or 0), 2), "peak_bytes": plan.peak_bytes}
    if case.rate:
        rate = getattr(plan, f"{case.unit}_per_second") or 0.0
        ratio = round(rate / case.rate, 3)
        rates = {"at_most": round(rate), "published": case.rate, "unit": f"{case.unit}/s", "source": case.source}
        return line | rates | {"ratio": ratio, "good": plan.fits and ratio >= 1}
    return line | of_collectives(step, topology, plan)


def of_collectives(step: Any, topology: Any, plan: Any) -> dict[str, Any]:
    """Return the bytes and the seconds of the collectives of a compiled step."""
    from bert_jax.config import PretrainConfig
    from bert_jax.contrib.planner import cycles, hlo
    from bert_jax.contrib.planner.arithmetic import parameter_count

    module, seen, summed, seconds = hlo.parse(step.hlo), set(), defaultdict(int), 0.0
    for computation in module.computations.values():
        lines = computation.instructions
        for each in lines.values():
            kind = cycles._COLLECTIVES.match(each.opcode)
            chain = hlo.first_group(r'chain_id="(\d+)"', each.attributes)
            if kind is None or each.opcode.endswith(("-done", "-update")) or (chain and chain in seen):
                continue
            seen.add(chain)
            size = cycles._group_size(each.attributes, topology.num_devices)
            num_bytes = sum(lines[name].num_bytes for name in each.operands)
            for operand in each.operands:
                dtype = lines[operand].arrays[0].dtype
                summed[f"{kind[0]} {dtype}"] += lines[operand].num_bytes
            seconds += cycles.collective_seconds(kind[0], num_bytes, size, topology.chip, topology.shape)
    parameters = parameter_count(PretrainConfig())
    whole = 4 * parameters
    reduced = {name: count for name, count in summed.items() if "gather" not in name and count > whole / 100}
    data, fsdp = plan.mesh["data"], plan.mesh["fsdp"]
    # With fsdp, the sum over fsdp is followed by one of each part over data.
    once = whole <= sum(reduced.values()) <= MARGIN * whole * (1 + (data > 1 and fsdp > 1) / fsdp)
    once = once and all("f32" in name for name in reduced)
    cut = plan.argument_bytes <= MARGIN * (3 * whole / (data * fsdp)) + 2**24
    # Layers gather their parameters in bfloat16 over fsdp, forward and backward.
    reduce = "all-reduce" if topology.is_tpu else "reduce-scatter"  # the compiler for TPUs has no reduce-scatter
    exchanges = [(reduce, whole, fsdp), (reduce, whole // fsdp, data)]
    exchanges += [("all-gather", whole // (data * fsdp), data)] + 2 * [("all-gather", whole // 2 // fsdp, fsdp)]
    of_plan = sum(cycles.collective_seconds(*each, topology.chip, topology.shape) for each in exchanges)
    return {
        "bytes": dict(summed), "gradient_bytes": whole, "argument_bytes": plan.argument_bytes,
        "collective_milliseconds": round(1e3 * seconds, 2), "planned_milliseconds": round(1e3 * of_plan, 2),
        "ratio": round(seconds / of_plan, 3), "not_hidden_milliseconds": round(1e3 * plan.communication_seconds, 2),
        "good": once and cut and seconds <= (FSDP_MARGIN if fsdp > 1 else MARGIN) * of_plan,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
