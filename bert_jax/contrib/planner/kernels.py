"""Time of the kernels of a compiled program that the compiler does not estimate.

On a GPU, this is the least time of each kernel: at the full bandwidth of the memory, or at the full speed of the
matrix units, whichever takes longer. The bytes and operations are counted from the text of the program. Vector
operations, launches, and tiles that do not fill the board cost nothing here: a run is slower.

On a TPU, the Pallas kernels of this project state the operations of their blocks on the matrix and vector units
(``bert_jax.model.kernels.common.stated_cost``). Both follow each other, except for the part that the kernel states
to overlap, and each step waits once for the latency of the units. ``studies/tpu/tpu_kernels.py`` compares these
cycles with the instructions that the compiler schedules.
"""

import math
import re
from collections.abc import Mapping

from bert_jax.contrib.planner import hlo
from bert_jax.parallel.hardware import Chip

# Instructions that read only the elements that they select from their first operand.
_SELECTING = ("dynamic-slice", "slice", "gather")
# Share of the bf16 peak that float32 products reach: they run as TF32.
_FLOAT32_SHARE = 0.5
_TRITON, _CUBLAS = "__gpu$xla.gpu.triton", "__cublas$"
# Cycles from a product of matrices through an exponential to the next product.
_STEP_CYCLES = 160


def kernel_cost(
    line: hlo.Instruction, computation: str, module: hlo.Module, chip: Chip
) -> tuple[float, float, float]:
    """Return the least seconds of ``line``, an instruction of ``computation``, its operations in products of
    matrices, and the bytes that it reads and writes."""
    lines = module.computations[computation].instructions
    if line.target == _TRITON and (stated := stated_numbers(line)):
        operations, moved = stated["flops"], stated["bytes_accessed"]
    elif line.target.startswith(_CUBLAS):
        operations, moved = _library_product(line, lines)
    else:
        operations = module.instruction_operations(line, computation)
        moved = _moved_bytes(line, lines, module)
    seconds = max(
        operations / (chip.device_peak_flops * _speed(line, lines, module)), moved / chip.device_memory_bandwidth
    )
    return seconds, operations, moved


def stated_numbers(line: hlo.Instruction) -> dict[str, float]:
    """Return the numbers that a kernel of this project states (``bert_jax.model.kernels.common.stated_cost``);
    empty if it states none."""
    text = hlo.first_group(r'(?:serialized_metadata = "|kernel_metadata=)\{([^}]*)\}', line.attributes)
    # A string of the program of a GPU writes a quote as \22.
    pairs = re.findall(r'"(\w+)": ?"(\d+)"', text.replace(r"\22", '"'))
    return {name: float(value) for name, value in pairs}


def pallas_seconds(stated: Mapping[str, float], chip: Chip) -> float:
    """Return the seconds of a Pallas kernel on one device of a TPU ``chip``, from the numbers that it states
    (:func:`stated_numbers`)."""
    matrix = stated["flops"] / chip.device_peak_flops
    vector = stated["vector_operations"] / chip.vector_operations_per_second
    together = min(matrix, vector) * stated["overlap_percent"] / 100
    computed = matrix + vector - together + stated["steps"] * _STEP_CYCLES / (chip.clock_ghz * 1e9)
    return max(computed, stated["bytes_accessed"] / chip.device_memory_bandwidth)


def _library_product(line: hlo.Instruction, lines: Mapping[str, hlo.Instruction]) -> tuple[float, float]:
    """Return the operations and bytes of a product of matrices by cuBLAS, without its workspace."""
    left = lines[line.operands[0]].arrays[0]
    dims = re.findall(r'"(\d+)"', hlo.first_group(r'"lhs_contracting_dimensions":\[([^\]]*)\]', line.attributes))
    contracted = math.prod(left.shape[int(dim)] for dim in dims)
    out = line.arrays[0]
    moved = out.num_bytes + sum(lines[name].num_bytes for name in line.operands if name in lines)
    return 2.0 * math.prod(out.shape) * contracted, float(moved)


def _speed(line: hlo.Instruction, lines: Mapping[str, hlo.Instruction], module: hlo.Module) -> float:
    """Return the share of the bf16 peak at which the products of ``line`` can run."""
    if line.target.startswith(_CUBLAS):
        dtypes = {lines[name].arrays[0].dtype for name in line.operands[:2]}
    else:
        dtypes = set()
        for name in line.called:
            inner = module.computations[name].instructions
            dots = [each for each in inner.values() if each.opcode == "dot"]
            dtypes |= {inner[name].arrays[0].dtype for each in dots for name in each.operands[:2]}
    return _FLOAT32_SHARE if dtypes == {"f32"} else 1.0


def _moved_bytes(line: hlo.Instruction, lines: Mapping[str, hlo.Instruction], module: hlo.Module) -> float:
    """Return the bytes that ``line`` reads and writes: of an operand from which it only selects, those selected; of
    an array that it updates in place, those updated."""
    if line.opcode == "dynamic-update-slice":
        return 2.0 * lines[line.operands[1]].num_bytes
    if line.opcode in _SELECTING:
        return 2.0 * line.num_bytes
    inner = module.computations[line.called[0]] if line.opcode == "fusion" and line.called else None
    total = float(line.num_bytes)
    if inner is not None and inner.root.opcode == "dynamic-update-slice":
        total = float(inner.instructions[inner.root.operands[1]].num_bytes)
    for index, name in enumerate(line.operands):
        if name in lines:
            total += lines[name].num_bytes if inner is None else _read_bytes(inner, index, lines[name].num_bytes)
    return total


def _read_bytes(inner: hlo.Computation, index: int, num_bytes: int) -> float:
    """Return the bytes that a fusion reads of its operand ``index``, which has ``num_bytes``."""
    parameter = next(
        (i.name for i in inner.instructions.values() if i.opcode == "parameter" and int(i.argument) == index), ""
    )
    users = [i for i in inner.instructions.values() if parameter in i.operands]
    if not users or not all(_selects(user, parameter) for user in users):
        return float(num_bytes)
    selected = sum(0 if user.opcode == "dynamic-update-slice" else user.num_bytes for user in users)
    return float(min(selected, num_bytes))


def _selects(user: hlo.Instruction, parameter: str) -> bool:
    return user.opcode in (*_SELECTING, "dynamic-update-slice") and user.operands[0] == parameter
