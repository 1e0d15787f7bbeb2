"""Interpreter of the pickles in files of ``torch.save``, which executes no code.

The interpreter knows tensors, dicts, ordered dicts, lists, tuples, strings, numbers, booleans and None. It is safe
because it never resolves a name: ``pickletools.genops`` splits the bytes into opcodes without executing them, a
GLOBAL must be a key of a table and pushes the entry of this table, and REDUCE calls only the functions of this
module that the table contains, which check their arguments. Nothing is imported, no attribute is set, and no method
of a value from the file is called. Opcodes outside the table of handlers (INST, OBJ, NEWOBJ, EXT and others) are
refused. A subclass of ``pickle.Unpickler`` would still execute REDUCE and BUILD on the objects that it finds.

Dict keys must be strings, and no container is compared, hashed or formatted: tuples that contain one another twice
would take exponential time. Every step takes constant time, or time proportional to the bytes or values that it
consumes, so that the number of steps and the size of the pickle bound time and memory.
"""

import collections
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple, TypeGuard

# A tensor needs about 45 opcodes, its module's version included; a model of 11,000 tensors can be read.
MOST_STEPS = 1 << 19
_MOST_DIMENSIONS = 8
# Class of a storage in torch -> dtype, named as in safetensors files.
_STORAGES = {
    "torch DoubleStorage": "F64", "torch FloatStorage": "F32", "torch HalfStorage": "F16",
    "torch BFloat16Storage": "BF16", "torch LongStorage": "I64", "torch IntStorage": "I32",
    "torch ShortStorage": "I16", "torch CharStorage": "I8", "torch ByteStorage": "U8", "torch BoolStorage": "BOOL",
}  # fmt: skip


class Refused(ValueError):
    """The pickle is damaged, or contains other objects than plain values and tensors."""


class Storage(NamedTuple):
    """Part of a one-dimensional array in the file, to which tensors refer."""

    key: str
    dtype: str
    # Number of elements of the whole array.
    elements: int
    # First and last + 1 element of the part.
    begin: int
    end: int


class TensorView(NamedTuple):
    """A tensor: shape, strides in elements, and the position of its first element in the array of ``storage``.

    No element lies outside ``storage``.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of elements of the array from the first to the last element of the tensor, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


class _StorageClass(NamedTuple):
    dtype: str


@dataclass(frozen=True)
class _Function:
    build: Callable[[tuple["Value", ...]], "Value"]


# A value of a pickle.
Value = (
    list["Value"] | dict[str, "Value"] | tuple["Value", ...] | Storage | TensorView | _Function | _StorageClass
    | str | int | float | None
)  # fmt: skip


def kind(value: object) -> str:
    """Return the type of a value from a pickle, for messages."""
    return {TensorView: "tensor", Storage: "storage", _Function: "name", _StorageClass: "name"}.get(
        type(value), type(value).__name__
    )


def unpickle(stream: IO[bytes]) -> tuple[Value, dict[str, Storage]]:
    """Read one pickle and return its value, with its tensors as :class:`TensorView`, and the storages by key.

    ``stream`` must be bounded, because declared sizes are read as a whole; it is left after the pickle. Raises
    :class:`Refused` or another ``ValueError``.
    """
    machine = _Machine()
    for step, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        if step >= MOST_STEPS:
            raise Refused(f"more than {MOST_STEPS} steps")
        if opcode.name == "STOP":
            value = machine.pop()
            if machine.stack or machine.marks:
                raise Refused("values remain after the end")
            return value, machine.storages
        handler = _HANDLERS.get(opcode.name)
        if handler is None:
            raise Refused(f"the opcode {opcode.name} is not allowed")
        handler(machine, argument)
    raise Refused("truncated")


@dataclass
class _Machine:
    """State of the interpreter: stack, positions of marks, memo."""

    stack: list[Value] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Value] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)

    def push(self, value: Value) -> None:
        self.stack.append(value)

    def pop(self) -> Value:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise Refused("the stack is empty")
        return self.stack.pop()

    def pop_many(self, count: int) -> tuple[Value, ...]:
        return tuple([self.pop() for _ in range(count)][::-1])

    def pop_to_mark(self) -> list[Value]:
        if not self.marks:
            raise Refused("no mark")
        position = self.marks.pop()
        values = self.stack[position:]
        del self.stack[position:]
        return values

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def top(self) -> Value:
        value = self.pop()
        self.stack.append(value)
        return value

    def put(self, index: int) -> None:
        if index > MOST_STEPS:
            raise Refused("the index of a memo entry is too large")
        self.memo[index] = self.top()

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise Refused("an unknown memo entry")
        self.stack.append(self.memo[index])

    def named(self, name: str) -> None:
        """Push the table's entry for ``name``: module, space, name in the module."""
        if name not in _NAMES:
            shown = ascii(name.replace(" ", ".", 1))[1:-1][:80]
            allowed = "only tensors and plain values are read, and no code is run"
            raise Refused(f"it names {shown}; {allowed}; save only the model's state_dict")
        self.stack.append(_NAMES[name])

    def named_on_stack(self) -> None:
        module, name = self.pop_many(2)
        if type(module) is not str or type(name) is not str:
            raise Refused("a name is not a string")
        self.named(f"{module} {name}")

    def append(self, values: list[Value]) -> None:
        target = self.top()
        if type(target) is not list:
            raise Refused(f"values are appended to a {kind(target)}")
        target.extend(values)

    def set_items(self, values: list[Value]) -> None:
        target = self.top()
        if not isinstance(target, dict):
            raise Refused(f"items of a {kind(target)} are set")
        if len(values) % 2:
            raise Refused("a key has no value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) is not str:
                raise Refused(f"a key is a {kind(key)}; save only the model's state_dict")
            if key in target:
                raise Refused("a key appears twice in a dict")
            target[key] = value

    def reduce(self) -> None:
        function, arguments = self.pop_many(2)
        if type(function) is not _Function or type(arguments) is not tuple:
            raise Refused(f"a {kind(function)} is called")
        self.stack.append(function.build(arguments))

    def build(self) -> None:
        """Ignore the attributes of an ordered dict: ``_metadata`` of a state dict has versions of modules."""
        target, state = self.pop_many(2)
        if type(target) is not collections.OrderedDict or type(state) is not dict:
            raise Refused(f"attributes of a {kind(target)} are set")
        self.stack.append(target)

    def load_storage(self) -> None:
        """Replace the identifier of a storage by the storage: ("storage", class, key, device, number of elements),
        in old files followed by None or by (key, first element, number of elements) of a part."""
        identifier = self.pop()
        if type(identifier) is not tuple or len(identifier) not in (5, 6) or type(identifier[0]) is not str:
            raise Refused("a persistent id does not name a storage")
        word, type_, key, _, count, *part = identifier
        if word != "storage" or type(type_) is not _StorageClass or type(key) is not str or not _natural(count):
            raise Refused("a persistent id does not name a storage")
        whole = Storage(key, type_.dtype, count, 0, count)
        if self.storages.setdefault(key, whole) != whole:
            raise Refused("a storage has two types or sizes")
        if part and part[0] is not None:
            if type(part[0]) is not tuple or len(part[0]) != 3:
                raise Refused("a part of a storage is not a key and two sizes")
            begin, size = _sizes(part[0][1:], "a part of a storage")
            whole = whole._replace(begin=begin, end=begin + size)
            if whole.end > count:
                raise Refused("a part of a storage is not inside the storage")
        self.stack.append(whole)


def _natural(value: Value) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 63


def _sizes(value: Value, what: str) -> tuple[int, ...]:
    """Return ``value``, which must be a tuple of a few natural numbers; ``what`` begins the message."""
    sizes = tuple(size for size in value if _natural(size)) if type(value) is tuple else ()
    if type(value) is not tuple or len(sizes) != len(value) or len(sizes) > _MOST_DIMENSIONS:
        raise Refused(f"{what} is not a tuple of at most {_MOST_DIMENSIONS} non-negative integers")
    return sizes


def _ordered_dict(arguments: tuple[Value, ...]) -> collections.OrderedDict[str, Value]:
    if arguments:
        raise Refused("an ordered dict is built from other values")
    return collections.OrderedDict()


def _tensor(arguments: tuple[Value, ...]) -> TensorView:
    """Return the tensor of ``_rebuild_tensor(storage, offset, size, stride)``, or of ``_rebuild_tensor_v2``, which
    adds whether gradients are required, hooks, and metadata (conjugate or negative views)."""
    if not 4 <= len(arguments) <= 7:
        raise Refused(f"a tensor has {len(arguments)} arguments")
    storage, offset = arguments[:2]
    if type(storage) is not Storage:
        raise Refused(f"the storage of a tensor is a {kind(storage)}")
    metadata = arguments[6] if len(arguments) == 7 else None
    if metadata is not None and (type(metadata) is not dict or metadata):
        raise Refused("a tensor is a conjugate or negative view; save independent tensors")
    shape, strides = (_sizes(sizes, "the shape or the strides of a tensor") for sizes in arguments[2:4])
    if not _natural(offset) or len(shape) != len(strides):
        raise Refused("the offset, shape and strides of a tensor are inconsistent")
    view = TensorView(storage, storage.begin + offset, shape, strides)
    if view.offset + view.length > storage.end:
        raise Refused("the offset, shape and strides of a tensor exceed its storage")
    return view


def _parameter(arguments: tuple[Value, ...]) -> TensorView:
    """Return the tensor of ``_rebuild_parameter(tensor, requires_grad, hooks)``."""
    if len(arguments) != 3 or type(arguments[0]) is not TensorView:
        raise Refused("a parameter is not a tensor")
    return arguments[0]


_NAMES: dict[str, _Function | _StorageClass] = {
    "collections OrderedDict": _Function(_ordered_dict),
    "torch._utils _rebuild_tensor": _Function(_tensor),
    "torch._utils _rebuild_tensor_v2": _Function(_tensor),
    "torch._utils _rebuild_parameter": _Function(_parameter),
} | {name: _StorageClass(dtype) for name, dtype in _STORAGES.items()}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = (
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
)  # fmt: skip
_HANDLERS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, version: None,
    "FRAME": lambda machine, size: None,
    **{name: lambda machine, _, value=value: machine.push(value) for name, value in _CONSTANTS.items()},  # type: ignore[misc]
    **dict.fromkeys(_VALUES, _Machine.push),
    # Strings of Python 2; genops decodes their bytes as Latin-1.
    "SHORT_BINSTRING": lambda machine, text: machine.push(text.encode("latin-1").decode()),
    "BINSTRING": lambda machine, text: machine.push(text.encode("latin-1").decode()),
    "MARK": lambda machine, _: machine.mark(),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE1": lambda machine, _: machine.push(machine.pop_many(1)),
    "TUPLE2": lambda machine, _: machine.push(machine.pop_many(2)),
    "TUPLE3": lambda machine, _: machine.push(machine.pop_many(3)),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_to_mark()),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "SETITEM": lambda machine, _: machine.set_items([*machine.pop_many(2)]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": lambda machine, _: machine.put(len(machine.memo)),
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": _Machine.named,
    "STACK_GLOBAL": lambda machine, _: machine.named_on_stack(),
    "REDUCE": lambda machine, _: machine.reduce(),
    "BUILD": lambda machine, _: machine.build(),
    "BINPERSID": lambda machine, _: machine.load_storage(),
}
