"""Reading the text of a compiled program: computations, instructions, their sizes, operations and loop counts.

The text is what ``jax.stages.Compiled.as_text()`` gives, one instruction per line: ``%name = shape
opcode(operands), attributes``. Reading is strict, because a line passed over would be time passed over: one that
does not have this form raises ``ValueError``.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_INSTRUCTION = re.compile(r"  +(ROOT )?%([\w.$\-]+) = ")
_HEADER = re.compile(r"(ENTRY )?%?([\w.$\-]+) \(")
_OPCODE = re.compile(r" ?([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.$\-]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_SECTIONS = ("HloModule ", "FileNames", "FunctionNames", "FileLocations", "StackFrames")
_MAX_TRIPS = 1_000_000


@dataclass(frozen=True)
class Array:
    """Shape of one array. ``memory`` is the compiler's memory space: 0 is the device's main memory."""

    dtype: str
    shape: tuple[int, ...]
    memory: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return math.prod(self.shape) * _item_bits(self.dtype) // 8


@dataclass(frozen=True)
class Instruction:
    """One line. ``operands`` are names within the computation; ``attributes`` is the text after them."""

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    argument: str
    attributes: str
    is_root: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.num_bytes for array in self.arrays)

    @functools.cached_property
    def estimated_cycles(self) -> int | None:
        """The compiler's estimate of cycles, or None."""
        found = re.search(r'"estimated_cycles":"(-?\d+)"', self.attributes)
        # A saturated counter is no estimate.
        return int(found[1]) if found and 0 <= int(found[1]) < 1e15 else None

    @property
    def op_name(self) -> str:
        """Scopes and primitive that it came from, empty where the compiler made it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """Target of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def attribute(self, name: str) -> str | None:
        """Name of the computation that attribute ``name`` gives."""
        found = re.search(rf"[ ,]{name}=%?([\w.$\-]+)", f" {self.attributes}")
        return found[1] if found else None

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that run when it runs, once each (a loop's body and condition are not among them)."""
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        names = _NAME.findall(branches[1]) if branches else []
        keys = ["calls", "true_computation", "false_computation"] + ["to_apply"] * (
            self.opcode in ("call", "call-start")
        )
        return (*names, *(name for key in keys if (name := self.attribute(key))))


@dataclass
class Computation:
    """Instructions by name, in the order in which they run."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        """The instruction whose value is the computation's."""
        return next(reversed([i for i in self.instructions.values() if i.is_root]))


@dataclass
class Module:
    """A compiled program: its computations by name and the name of the first to run."""

    computations: dict[str, Computation]
    entry: str

    def operations(self, computation: str) -> float:
        """Multiplications and additions of all matrix products of ``computation``, loops multiplied out."""
        return sum(self.instruction_operations(i, computation) for i in self._lines(computation))

    def instruction_operations(self, instruction: Instruction, computation: str) -> float:
        """Return the same count for one instruction of ``computation``, including the computations it calls."""
        lines = self.computations[computation].instructions
        if instruction.opcode == "convolution":
            return _convolution_operations(instruction, [lines[name] for name in instruction.operands])
        if instruction.opcode == "dot":
            return _dot_operations(instruction, lines[instruction.operands[0]])
        if instruction.opcode == "while":
            trips = self.trip_count(instruction, computation) or 1
            return trips * self.operations(instruction.attribute("body") or "")
        return sum(self.operations(name) for name in instruction.called)

    def _lines(self, computation: str) -> Iterator[Instruction]:
        yield from self.computations[computation].instructions.values()

    def trip_count(self, loop: Instruction, computation: str) -> int | None:
        """Rounds of a ``while`` of ``computation``; None if the text does not tell."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
        if known:
            return int(known[1])
        condition, body = loop.attribute("condition"), loop.attribute("body")
        lines = self.computations[computation].instructions
        initial = lines.get(loop.operands[0])
        if condition is None or body is None or initial is None or initial.opcode != "tuple":
            return None
        try:
            return self._count(
                condition, body, [functools.partial(self._value, computation, o) for o in initial.operands]
            )
        except _Unknown:
            return None

    def _count(self, condition: str, body: str, initial: list) -> int:
        """Run the scalars that decide about the next round."""
        root = self.computations[body].root
        if root.opcode != "tuple":
            raise _Unknown
        # The condition's elements of the carried tuple, and those from which the body makes them.
        state: dict[int, int] = {}
        while True:
            try:
                self._value(condition, self.computations[condition].root.name, state)
                for index in tuple(state):
                    self._value(body, root.operands[index], state)
                break
            except _Missing as missing:
                state[missing.index] = initial[missing.index]({})
        trips = 0
        while self._value(condition, self.computations[condition].root.name, state):
            state = {index: self._value(body, root.operands[index], state) for index in state}
            trips += 1
            if trips > _MAX_TRIPS:
                raise _Unknown
        return trips

    def _value(self, computation: str, name: str, carried: Mapping[int, int], given: tuple[int, ...] = ()) -> int:
        """Value of a scalar of whole numbers; ``carried`` are known elements of the loop's tuple, ``given`` the
        parameters of a called computation."""
        line = self.computations[computation].instructions[name]
        value = functools.partial(self._value, computation, carried=carried, given=given)
        match line.opcode:
            case "constant":
                if not re.fullmatch(r"-?\d+|true|false", line.argument):
                    raise _Unknown
                return {"true": 1, "false": 0}.get(line.argument) or int(line.argument.replace("false", "0"))
            case "get-tuple-element":
                if self.computations[computation].instructions[line.operands[0]].opcode != "parameter":
                    raise _Unknown
                found = re.search(r"index=(\d+)", line.attributes)
                index = int(found[1]) if found else 0
                if index not in carried:
                    raise _Missing(index)
                return carried[index]
            case "parameter" if given:
                return given[int(line.argument)]
            case "copy" | "copy-start" | "copy-done" | "bitcast" | "broadcast" | "reshape" | "convert":
                return value(line.operands[0])
            case "add" | "subtract" | "and" | "or" | "compare":
                left, right = value(line.operands[0]), value(line.operands[1])
                return _apply(line, left, right)
            case "fusion" | "call":
                inner = self.computations[line.called[0]]
                arguments = tuple(value(operand) for operand in line.operands)
                return self._value(inner.name, inner.root.name, carried, arguments)
        raise _Unknown


class _Unknown(Exception):
    """A value that the text does not tell."""


class _Missing(Exception):
    """An element of the loop's tuple that must be known first."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def _apply(line: Instruction, left: int, right: int) -> int:
    match line.opcode:
        case "add":
            return left + right
        case "subtract":
            return left - right
        case "and":
            return left & right
        case "or":
            return left | right
    found = re.search(r"direction=(\w+)", line.attributes)
    results = {
        "LT": left < right, "LE": left <= right, "GT": left > right,
        "GE": left >= right, "EQ": left == right, "NE": left != right,
    }  # fmt: skip
    return int(results[found[1]]) if found else 0


def parse(text: str) -> Module:
    """The program in ``text``. Raises ``ValueError`` naming the first line that is not understood."""
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
        raise ValueError("compiled program: no ENTRY computation in its text")
    return Module(computations, entry)


def _parse_instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    begin = head.end()
    # A tuple's shape is in parentheses, an array's ends before the blank that the opcode follows.
    end = _closing(line, begin) if line[begin : begin + 1] == "(" else line.find(" ", begin)
    opcode = _OPCODE.match(line, end) if end > 0 else None
    if opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    arrays = tuple(_array(found) for found in _ARRAY.finditer(line, begin, end))
    if close < 0 or not (arrays or re.match(r"\(\)|token\[\]", line[begin:end])):
        return None
    argument = line[opcode.end() : close - 1]
    return Instruction(
        head[2], arrays, opcode[1], tuple(_NAME.findall(argument)), argument, line[close:], bool(head[1])
    )


def _closing(text: str, begin: int) -> int:
    """Return the position after the parenthesis that closes the one at ``begin``; -1 if none does."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, begin):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return -1


def _array(found: re.Match[str]) -> Array:
    sizes = tuple(int(size.lstrip("<=")) for size in found[2].split(",") if size)
    space = re.search(r"S\((\d+)\)", found[3] or "")
    return Array(found[1], sizes, int(space[1]) if space else 0)


def _item_bits(dtype: str) -> int:
    """Bits of one element; 0 for tokens."""
    if dtype in ("token", "opaque"):
        return 0
    if dtype == "pred":
        return 8
    found = re.match(r"[a-z]+(\d+)", dtype)
    if found is None:
        raise ValueError(f"compiled program: unknown element type {dtype!r}")
    return int(found[1])


def _dot_operations(line: Instruction, left: Instruction) -> float:
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.attributes)
    dims = [int(dim) for dim in found[1].split(",") if dim] if found else []
    return 2 * math.prod(line.arrays[0].shape) * math.prod(left.arrays[0].shape[dim] for dim in dims)


def _convolution_operations(line: Instruction, operands: list[Instruction]) -> float:
    """2 x output x taps that meet an input x input features. TPU writes every matrix product as a convolution, with
    batch dimensions as dilated windows most of whose taps meet padding."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.attributes)
    if labels is None:
        raise ValueError(f"compiled program: convolution without dim_labels: {line.name}")
    left, right, out = (array.arrays[0].shape for array in (*operands[:2], line))
    operations = 2.0 * out[labels[3].index("b")] * out[labels[3].index("f")] * right[labels[2].index("i")]
    window = re.search(r"window=\{([^}]*)\}", line.attributes)
    values = dict(pair.split("=") for pair in window[1].split()) if window else {}
    for i, spatial in enumerate(sorted(label for label in labels[1] if label.isdigit())):

        def of(name: str, default: str, dim: int = i) -> str:
            return values[name].split("x")[dim] if name in values else default

        low = int(of("pad", "0_0").split("_")[0])
        operations *= _taps(
            left[labels[1].index(spatial)], right[labels[2].index(spatial)], out[labels[3].index(spatial)],
            int(of("stride", "1")), low, int(of("lhs_dilate", "1")), int(of("rhs_dilate", "1")),
        )  # fmt: skip
    batch_groups = re.search(r"batch_group_count=(\d+)", line.attributes)
    return operations / int(batch_groups[1]) if batch_groups else operations


@functools.lru_cache(maxsize=4096)
def _taps(size: int, kernel: int, out: int, stride: int, low: int, dilate: int, kernel_dilate: int) -> int:
    """Pairs (output position, kernel position) that meet an element of the input along one dimension."""
    count = 0
    for tap in range(kernel):
        for position in range(out):
            place = position * stride + tap * kernel_dilate - low
            count += 0 <= place <= (size - 1) * dilate and place % dilate == 0
    return count
