"""Parser for the text of compiled programs (HLO), which also counts bytes, operations and loop iterations.

``jax.stages.Compiled.as_text()`` returns this text, with one instruction per line: ``%name = shape
opcode(operands), attributes``. A line that cannot be parsed raises ``ValueError``, because skipping an instruction
would omit its time.
"""

import functools
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

_INSTRUCTION = re.compile(r"  +(ROOT )?%([\w.$\-]+) = ")
_HEADER = re.compile(r"(ENTRY )?%?([\w.$\-]+) \(")
_OPCODE = re.compile(r" ?([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.$\-]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_SECTIONS = ("HloModule ", "FileNames", "FunctionNames", "FileLocations", "StackFrames")
_MAX_TRIPS = 1_000_000
# Scalar operations that may determine the number of iterations of a loop.
_SCALAR_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "subtract": operator.sub, "and": operator.and_, "or": operator.or_, "LT": operator.lt,
    "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip


def first_group(pattern: str, text: str) -> str:
    """Return the first group of the first match of ``pattern`` in ``text``; an empty string if nothing matches."""
    match = re.search(pattern, text)
    return match[1] if match else ""


@dataclass(frozen=True)
class Array:
    """Type of one array. ``memory`` is the number of its memory space; 0 is the main memory of the device."""

    dtype: str
    shape: tuple[int, ...]
    memory: int = 0

    @property
    def num_bytes(self) -> int:
        """Size of the array in bytes, without padding."""
        return math.prod(self.shape) * _item_bits(self.dtype) // 8


@dataclass(frozen=True)
class Instruction:
    """One instruction. ``operands`` contains names of instructions of the same computation; ``attributes`` is the
    text after the operands."""

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    argument: str
    attributes: str
    is_root: bool

    @property
    def num_bytes(self) -> int:
        """Size of the result in bytes, without padding."""
        return sum(array.num_bytes for array in self.arrays)

    @functools.cached_property
    def estimated_cycles(self) -> int | None:
        """Number of cycles that the compiler estimates; None if it has no estimate."""
        cycles = int(first_group(r'"estimated_cycles":"(-?\d+)"', self.attributes) or -1)
        # A saturated counter is not an estimate.
        return cycles if 0 <= cycles < 1e15 else None

    @property
    def op_name(self) -> str:
        """Named scopes and primitive of the traced operation; empty for an instruction that the compiler added."""
        return first_group(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)

    @property
    def target(self) -> str:
        """Target of a custom call; empty for any other instruction."""
        return first_group(r'custom_call_target="([^"]*)"', self.attributes)

    def attribute(self, name: str) -> str:
        """Return the name of the computation that attribute ``name`` refers to; empty if the attribute is
        missing."""
        return first_group(rf"[ ,]{name}=%?([\w.$\-]+)", f" {self.attributes}")

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that the instruction calls, except the body and condition of a loop."""
        names = _NAME.findall(first_group(r"branch_computations=\{([^}]*)\}", self.attributes))
        keys = ["calls", "true_computation", "false_computation"] + ["to_apply"] * (
            self.opcode in ("call", "call-start")
        )
        return (*names, *(name for key in keys if (name := self.attribute(key))))


@dataclass
class Computation:
    """A computation: its instructions by name, in the order in which they run."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        """The instruction whose value is the result of the computation."""
        return next(line for line in reversed(self.instructions.values()) if line.is_root)


@dataclass
class Module:
    """A compiled program: its computations by name, and the name of the entry computation."""

    computations: dict[str, Computation]
    entry: str

    def operations(self, computation: str) -> float:
        """Return the number of multiplications and additions in the matrix products of ``computation``. Products in
        a loop are counted once per iteration."""
        lines = self.computations[computation].instructions.values()
        return sum(self.instruction_operations(line, computation) for line in lines)

    def instruction_operations(self, instruction: Instruction, computation: str) -> float:
        """Return the number of multiplications and additions of one instruction of ``computation``, including those
        of the computations that it calls."""
        lines = self.computations[computation].instructions
        if instruction.opcode == "convolution":
            return _convolution_operations(instruction, [lines[name] for name in instruction.operands])
        if instruction.opcode == "dot":
            return _dot_operations(instruction, lines[instruction.operands[0]])
        if instruction.opcode == "while":
            trips = self.trip_count(instruction, computation) or 1
            return trips * self.operations(instruction.attribute("body"))
        return sum(self.operations(name) for name in instruction.called)

    def trip_count(self, loop: Instruction, computation: str) -> int | None:
        """Return the number of iterations of ``loop``, a ``while`` instruction of ``computation``; None if the
        number is unknown."""
        if known := first_group(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
            return int(known)
        initial = self.computations[computation].instructions.get(loop.operands[0])
        if initial is None or initial.opcode != "tuple":
            return None
        try:
            return self._count(loop, lambda index: self._value(computation, initial.operands[index], _unknown))
        except _Unknown:
            return None

    def _count(self, loop: Instruction, initial: Callable[[int], int]) -> int:
        """Return the number of iterations of ``loop``, found by evaluating the scalars of its condition.
        ``initial(i)`` returns element i of the tuple with which the loop starts."""
        condition, body = loop.attribute("condition"), loop.attribute("body")
        root = self.computations[body].root
        if root.opcode != "tuple":
            raise _Unknown
        state: dict[int, int] = {}  # elements of the tuple on which the condition depends

        def carried(index: int) -> int:
            if index not in state:
                state[index] = initial(index)
            return state[index]

        trips = 0
        while self._value(condition, self.computations[condition].root.name, carried):
            after: dict[int, int] = {}
            while new := state.keys() - after.keys():
                after |= {index: self._value(body, root.operands[index], carried) for index in new}
            state.update(after)
            trips += 1
            if trips > _MAX_TRIPS:
                raise _Unknown
        return trips

    def _value(
        self, computation: str, name: str, carried: Callable[[int], int], arguments: tuple[int, ...] = ()
    ) -> int:
        """Return the value of the integer scalar ``name`` of ``computation``. ``carried(i)`` returns element i of
        the tuple that a loop carries; ``arguments`` contains the arguments of a called computation."""
        line = self.computations[computation].instructions[name]
        value = functools.partial(self._value, computation, carried=carried, arguments=arguments)
        match line.opcode:
            case "constant":
                if not re.fullmatch(r"-?\d+|true|false", line.argument):
                    raise _Unknown
                return {"true": 1, "false": 0}.get(line.argument) or int(line.argument.replace("false", "0"))
            case "get-tuple-element":
                if self.computations[computation].instructions[line.operands[0]].opcode != "parameter":
                    raise _Unknown
                return carried(int(first_group(r"index=(\d+)", line.attributes) or 0))
            case "parameter" if arguments:
                return arguments[int(line.argument)]
            case "copy" | "copy-start" | "copy-done" | "bitcast" | "broadcast" | "reshape" | "convert":
                return value(line.operands[0])
            case "add" | "subtract" | "and" | "or" | "compare":
                operation = first_group(r"direction=(\w+)", line.attributes) or line.opcode
                return int(_SCALAR_OPERATIONS[operation](*map(value, line.operands[:2])))
            case "fusion" | "call":
                inner = self.computations[line.called[0]]
                return self._value(inner.name, inner.root.name, carried, tuple(map(value, line.operands)))
        raise _Unknown


class _Unknown(Exception):
    """Raised for a value that the text does not determine."""


def _unknown(index: int) -> int:
    raise _Unknown


def parse(text: str) -> Module:
    """Parse the program in ``text``. Raises ``ValueError`` with the number of the first line that cannot be
    parsed."""
    # The metadata of a kernel have one line per entry.
    text = re.sub(r"kernel_metadata=\{[^}]*\}", lambda match: match[0].replace("\n", ""), text)
    computations: dict[str, Computation] = {}
    entry, current, in_table = "", None, False
    for number, line in enumerate(text.splitlines(), 1):
        if current is not None:
            if line.startswith("}"):
                current = None
                continue
            instruction = _parse_instruction(line)
            if instruction is None:
                raise ValueError(f"compiled program, line {number}: not an instruction: {line.strip()[:120]}")
            current.instructions[instruction.name] = instruction
        elif line.endswith("{") and (header := _HEADER.match(line)):
            current = computations[header[2]] = Computation(header[2])
            entry = header[2] if header[1] else entry
            in_table = False
        elif line.startswith(_SECTIONS):
            in_table = True
        elif line.strip() and not in_table:
            raise ValueError(f"compiled program, line {number}: not a computation: {line.strip()[:120]}")
    if not entry:
        raise ValueError("compiled program: the text has no ENTRY computation")
    return Module(computations, entry)


def _parse_instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    begin = head.end()
    # The shape of a tuple is in parentheses; the shape of an array ends at the blank before the opcode.
    end = _closing(line, begin) if line[begin : begin + 1] == "(" else line.find(" ", begin)
    opcode = _OPCODE.match(line, end) if end > 0 else None
    if opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    arrays = tuple(map(_array, _ARRAY.finditer(line, begin, end)))
    if close < 0 or not (arrays or re.match(r"\(\)|token\[\]", line[begin:end])):
        return None
    argument = line[opcode.end() : close - 1]
    return Instruction(
        head[2], arrays, opcode[1], tuple(_NAME.findall(argument)), argument, line[close:], bool(head[1])
    )


def _closing(text: str, begin: int) -> int:
    """Return the index after the parenthesis that closes the one at index ``begin``; -1 if it is not closed."""
    depth = 0
    for bracket in re.compile(r"[()]").finditer(text, begin):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return bracket.end()
    return -1


def _array(match: re.Match[str]) -> Array:
    sizes = tuple(int(size.lstrip("<=")) for size in match[2].split(",") if size)
    return Array(match[1], sizes, int(first_group(r"S\((\d+)\)", match[3] or "") or 0))


def _item_bits(dtype: str) -> int:
    """Return the number of bits of one element; 0 for the type ``token``."""
    bits = {"token": "0", "opaque": "0", "pred": "8"}.get(dtype) or first_group(r"^[a-z]+(\d+)", dtype)
    if not bits:
        raise ValueError(f"compiled program: unknown element type {dtype!r}")
    return int(bits)


def _dot_operations(line: Instruction, left: Instruction) -> float:
    dims = first_group(r"lhs_contracting_dims=\{([\d,]*)\}", line.attributes).split(",")
    contracted = math.prod(left.arrays[0].shape[int(dim)] for dim in dims if dim)
    return 2 * math.prod(line.arrays[0].shape) * contracted


def _convolution_operations(line: Instruction, operands: list[Instruction]) -> float:
    """Return the number of operations of a convolution: 2 x output elements x input features x kernel taps that
    fall on an input element. In a TPU program, every matrix product is a convolution; its batch dimensions are
    dilated window dimensions, in which all taps but one fall on padding."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.attributes)
    if labels is None:
        raise ValueError(f"compiled program: the convolution {line.name} has no dim_labels")
    left, right, out = (array.arrays[0].shape for array in (*operands[:2], line))
    operations = 2.0 * out[labels[3].index("b")] * out[labels[3].index("f")] * right[labels[2].index("i")]
    values = dict(pair.split("=") for pair in first_group(r"window=\{([^}]*)\}", line.attributes).split())
    for i, spatial in enumerate(sorted(label for label in labels[1] if label.isdigit())):

        def of(name: str, default: str, dim: int = i) -> str:
            return values[name].split("x")[dim] if name in values else default

        low = int(of("pad", "0_0").split("_")[0])
        operations *= _taps(
            left[labels[1].index(spatial)], right[labels[2].index(spatial)], out[labels[3].index(spatial)],
            int(of("stride", "1")), low, int(of("lhs_dilate", "1")), int(of("rhs_dilate", "1")),
        )  # fmt: skip
    return operations / int(first_group(r"batch_group_count=(\d+)", line.attributes) or 1)


@functools.lru_cache(maxsize=4096)
def _taps(size: int, kernel: int, out: int, stride: int, low: int, dilate: int, kernel_dilate: int) -> int:
    """Return the number of pairs (output position, kernel position) that meet an input element along one
    dimension."""
    places = np.arange(out) * stride + np.arange(kernel)[:, None] * kernel_dilate - low
    return int(((places >= 0) & (places <= (size - 1) * dilate) & (places % dilate == 0)).sum())
