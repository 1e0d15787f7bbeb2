"""Files of ``torch.save`` in both formats, made without torch: opcodes, storages, zip members, byte for byte."""

import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CLASSES = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage",
}  # fmt: skip
MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
SYSTEM = {"protocol_version": VERSION, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


@dataclass
class Global:
    """A GLOBAL."""

    module: str
    name: str


@dataclass
class Call:
    """A REDUCE, and a BUILD if there is a state."""

    function: Any
    arguments: Any
    state: Any = None


@dataclass
class Persistent:
    """A BINPERSID."""

    identifier: Any


@dataclass
class Raw:
    """Opcodes as they are."""

    code: bytes


def opcodes(value: Any) -> bytes:
    """``value`` in opcodes of protocol 2, without memo."""
    match value:
        case Raw(code):
            return code
        case Global(module, name):
            return b"c" + module.encode() + b"\n" + name.encode() + b"\n"
        case Call(function, arguments, state):
            built = b"" if state is None else opcodes(state) + b"b"
            return opcodes(function) + opcodes(arguments) + b"R" + built
        case Persistent(identifier):
            return opcodes(identifier) + b"Q"
        case None | True | False:
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        case int():
            if -(1 << 31) <= value < 1 << 31:
                return b"J" + struct.pack("<i", value)
            size = value.bit_length() // 8 + 1
            return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            text = value.encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<I", len(text)) + text
        case tuple():
            return b"(" + b"".join(map(opcodes, value)) + b"t"
        case list():
            return b"](" + b"".join(map(opcodes, value)) + b"e"
        case dict():
            items = b"".join(opcodes(key) + opcodes(item) for key, item in value.items())
            start = b"ccollections\nOrderedDict\n)R" if isinstance(value, OrderedDict) else b"}"
            return start + b"(" + items + b"u"
    raise AssertionError(type(value))


def pickled(value: Any) -> bytes:
    return b"\x80\x02" + opcodes(value) + b"."


def storage(key: str, dtype: str, count: Any, **more: Any) -> Persistent:
    kind = Global("torch", CLASSES.get(dtype, dtype))
    return Persistent(("storage", kind, key, "cpu", count, *more.values()))


def tensor(of: Persistent, shape: Any, strides: Any = None, offset: Any = 0, *, parameter: bool = False) -> Call:
    """A tensor; without ``strides`` it is contiguous."""
    if strides is None:
        strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    rebuilt = Call(Global("torch._utils", "_rebuild_tensor_v2"), (of, offset, shape, strides, False, OrderedDict()))
    if parameter:
        return Call(Global("torch._utils", "_rebuild_parameter"), (rebuilt, True, OrderedDict()))
    return rebuilt


def state_of(arrays: Mapping[str, np.ndarray]) -> tuple[OrderedDict[str, Any], dict[str, bytes]]:
    """A state dict of contiguous tensors, each with a storage of its own; and the bytes of the storages."""
    state, data = OrderedDict(), {}
    for number, (name, values) in enumerate(arrays.items()):
        key = str(number)
        state[name] = tensor(storage(key, values.dtype.name, values.size), values.shape)
        data[key] = values.tobytes()
    return state, data


def save_zip(
    file: Path,
    state: Any,
    data: Mapping[str, bytes],
    *,
    more: Sequence[tuple[str, bytes]] = (("byteorder", b"little"),),
    root: str = "archive",
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """The format since torch 1.6. ``state`` is a value, or the bytes of the whole pickle."""
    content = state if isinstance(state, bytes) else pickled(state)
    with zipfile.ZipFile(file, "w", compression) as archive:
        members = [("data.pkl", content), *more, *((f"data/{key}", values) for key, values in data.items())]
        for name, values in members:
            archive.writestr(f"{root}/{name}", values)
        archive.writestr(f"{root}/version", b"3\n")
    return file


def save_old(
    file: Path,
    state: Any,
    data: Mapping[str, bytes],
    *,
    counts: Mapping[str, int] | None = None,
    head: Sequence[Any] = (MAGIC, VERSION, SYSTEM),
    keys: Any = None,
) -> Path:
    """The format before torch 1.6; ``counts`` are the elements of each storage (default: of float32)."""
    content = state if isinstance(state, bytes) else pickled(state)
    parts = [*map(pickled, head), content, pickled(list(data) if keys is None else keys)]
    for key, values in data.items():
        parts.append(struct.pack("<q", (counts or {}).get(key, len(values) // 4)) + values)
    file.write_bytes(b"".join(parts))
    return file


FORMATS = {"zip": save_zip, "old": save_old}
ARRAYS = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.float32)}
