"""Files of torch.save that are damaged or made to harm: exit code 2, one line, no code run, bounded memory."""

import copyreg
import pickle
import struct
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from torch_files import (
    ARRAYS,
    MAGIC,
    SYSTEM,
    VERSION,
    Call,
    Global,
    Persistent,
    Raw,
    opcodes,
    save_old,
    save_zip,
    state_of,
    storage,
    tensor,
)

from bert_jax.io.torch_file import LARGEST_PICKLE, read_torch
from bert_jax.io.torch_pickle import MOST_STEPS

EXTENSION = 200


def test_the_undamaged_file_is_read(save):
    read = read_torch(save(state_of(ARRAYS)[0]))
    assert all(np.array_equal(read[name].read(), values) for name, values in ARRAYS.items())


# ------------------------------------------------------------------ code


def harmful(touched: Path) -> dict[str, bytes]:
    """Opcodes that create the file ``touched`` when Python's unpickler reads them, by the opcode that does it."""
    system, command = b"cposix\nsystem\n", opcodes(f"touch {touched}")
    late = b"cbuiltins\nmap\n" + system + b"]" + command + b"a\x86"
    codes = {
        "GLOBAL and REDUCE": system + command + b"\x85R",
        "STACK_GLOBAL": b"\x8c\x05posix\x8c\x06system\x93" + command + b"\x85R",
        "INST": b"(" + command + b"iposix\nsystem\n",
        "OBJ": b"(" + system + command + b"o",
        "NEWOBJ": b"cbuiltins\nbytes\n" + late + b"\x81\x85\x81",
        "NEWOBJ_EX": b"cbuiltins\nbytes\n" + late + b"}\x92\x85}\x92",
        "BUILD": b"ccollections\nOrderedDict\n)R}" + opcodes("__setstate__") + system + b"sb" + command + b"b",
        "import of a module": b"cbuiltins\n__import__\n" + opcodes("antigravity") + b"\x85R",
        "eval": b"cbuiltins\neval\n" + opcodes(f"open({str(touched)!r}, 'w')") + b"\x85R",
        "protocol 0": f"cposix\nsystem\n(S'touch {touched}'\ntR".encode(),
    }
    for code, width in (("EXT1", "<B"), ("EXT2", "<H"), ("EXT4", "<i")):
        number = {"EXT1": b"\x82", "EXT2": b"\x83", "EXT4": b"\x84"}[code] + struct.pack(width, EXTENSION)
        codes[code] = number + command + b"\x85R"
    return codes


@pytest.fixture
def extension():
    copyreg.add_extension("posix", "system", EXTENSION)
    yield
    copyreg.remove_extension("posix", "system", EXTENSION)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("name", harmful(Path("x")))
def test_code(tmp_path, save, refused, name):
    """As the value of a tensor, of an attribute and of the whole file; also before the value in old files."""
    touched = tmp_path / "touched"
    code = harmful(touched)[name]
    if name != "import of a module":
        pickle.loads(b"\x80\x04" + code + b".")
        assert touched.exists(), "the pickle does no harm, so it proves nothing"
        touched.unlink()
    state = state_of(ARRAYS)[0]
    for value in (
        Raw(code),
        state | {"c": Raw(code)},
        Raw(opcodes(state) + b"}" + opcodes("_metadata") + code + b"sb"),
    ):
        refused(save(value), "not a torch file of plain tensors")
    for head in ([Raw(code), VERSION, SYSTEM], [MAGIC, Raw(code), SYSTEM], [MAGIC, VERSION, Raw(code)]):
        refused(save_old(tmp_path / "old.bin", state, state_of(ARRAYS)[1], head=head))
    refused(save_old(tmp_path / "old.bin", state, state_of(ARRAYS)[1], keys=Raw(code)))
    assert not touched.exists()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Global("torch", "load"), "torch.load"),
        (Call(Global("torch.hub", "load"), ("evil",)), "torch.hub.load"),
        (Call(Global("collections", "OrderedDict"), ([["a", 1]],)), "built from other values"),
        (Call(Global("torch", "FloatStorage"), (3,)), "a name is called"),
        (Call("os.system", ("x",)), "a str is called"),
        (Call(Global("collections", "OrderedDict"), []), "is called"),
        (Raw(b"}}b"), "attributes of a dict are set"),
        (Raw(b"ccollections\nOrderedDict\n)R]b"), "attributes of a OrderedDict are set"),
        (Raw(b"ccollections\nOrderedDict\n}b"), "attributes of a name are set"),
        (Raw(b"ccollections\nOrderedDict\nX\1\0\0\0aK\1s"), "items of a name are set"),
        (Persistent(("module", Global("torch", "FloatStorage"), "x.py", "source", 1)), "a persistent id"),
        (Persistent("evil"), "a persistent id"),
        (Raw(b"Pevil\n"), "PERSID"),
        (Raw(b"C\x03abc"), "SHORT_BINBYTES"),
        (Raw(b"\x8f"), "EMPTY_SET"),
        (Raw(b"\xff"), "damaged"),
        (Global("os\x1b[31m", "sys\x07tem"), "it names os"),
    ],
)
def test_other_values(save, refused, value, words):
    refused(save(value), words)


def test_objects_beside_the_tensors(save, refused):
    """What people save with the tensors: one line says to save only the state dict."""
    state, data = state_of(ARRAYS)
    for value, words in (
        ({"state_dict": state, "epoch": 3}, "'state_dict' is a OrderedDict, not a tensor"),
        ({"epoch": 3}, "'epoch' is a int"),
        ({"optimizer": {"state": {0: state}}}, "a key is a int"),
        ({"args": Global("argparse", "Namespace")}, "argparse.Namespace"),
        ([state], "it contains a list"),
        (tensor(storage("0", "float32", 12), (12,)), "it contains a tensor"),
        (None, "it contains a NoneType"),
    ):
        used = {key: values for key, values in data.items() if f"X\1\0\0\0{key}".encode() in opcodes(value)}
        refused(save(value, used), words, "save only the model's state_dict")


# ------------------------------------------------------------------ tensors that lie


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((-1, 4), (4, 1), 0), ((3, 4), (-4, 1), 11), ((3, 4), (4, 1), -1), ((3, 4), (4, 1), 1), ((3, 5), (4, 1), 0),
        ((4, 4), (4, 1), 0), ((3, 4), (5, 1), 0), ((1,), (1,), 12), ((3, 4), (4,), 0), ((3,), (4, 1), 0),
        ((2.0, 4), (4, 1), 0), ((True, 4), (4, 1), 0), ("34", (4, 1), 0), ([3, 4], (4, 1), 0),
        ((1,) * 9, (1,) * 9, 0),
        ((1 << 62, 4), (0, 1), 0), ((1 << 33, 1 << 33), (0, 0), 0), ((3, 4), (1 << 62, 1), 0),
        ((1 << 70,), (1,), 0),
        ((1 << 32, 1 << 32), (1 << 32, 1), 0), ((3, 4), (4, 1), 1 << 62), ((0, 1 << 62, 1 << 62), (1, 1, 1), 0),
        ((12,), (1,), None), ((12,), (1,), "0"), (None, None, 0), ((1000,), (0,), 0),
    ],
)  # fmt: skip
def test_shapes_strides_offsets(save, refused, shape, strides, offset):
    """Negative, beyond the storage, of wrong types, products beyond 64 bits, and expanded ones beyond the file."""
    made = tensor(storage("0", "float32", 12), shape, strides if strides is not None else 3, offset)
    refused(save({"a": made}, {"0": bytes(48)}))


@pytest.mark.parametrize("count", [-1, 0, 11, 13, 1 << 40, 1 << 62, 1 << 70, 12.0, True, "12", None])
def test_sizes_of_storages(save, refused, count):
    refused(save({"a": tensor(storage("0", "float32", count), (1,))}, {"0": bytes(48)}))


@pytest.mark.parametrize(
    "dtype", ["QInt8Storage", "ComplexFloatStorage", "UntypedStorage", "NoStorage", "Tensor", "float32", ""]
)
def test_unknown_dtypes(save, refused, dtype):
    kind = Persistent(("storage", Global("torch", dtype), "0", "cpu", 12))
    refused(save({"a": tensor(kind, (12,))}, {"0": bytes(48)}), "it names torch")


def test_storages(save, refused):
    one, key = storage("0", "float32", 12), "../../../../etc/passwd"
    for values, words in (
        ([one, storage("0", "int32", 12)], "two types or sizes"),
        ([one, storage("0", "float32", 11)], "two types or sizes"),
        ([storage(key, "float32", 12)], ""),
        ([storage("1", "float32", 12)], ""),
        ([storage(3, "float32", 12)], "a persistent id"),
        ([Persistent(("storage", "FloatStorage", "0", "cpu", 12))], "a persistent id"),
        ([storage("0", "float32", 12, part=("1", 8, 8))], "not inside the storage"),
        ([storage("0", "float32", 12, part=("1", -1, 8))], "part of a storage"),
        (["0"], "the storage of a tensor is a str"),
        ([Global("torch", "FloatStorage")], "the storage of a tensor is a name"),
    ):
        refused(save({str(i): tensor(value, (1,)) for i, value in enumerate(values)}, {"0": bytes(48)}), words)


def test_wrong_arguments_of_tensors(save, refused):
    of, v2 = storage("0", "float32", 12), Global("torch._utils", "_rebuild_tensor_v2")
    for value, words in (
        (Call(v2, ()), "0 arguments"),
        (Call(v2, (of, 0, (1,), (1,), False, OrderedDict(), {"conj": True})), "conjugate"),
        (Call(v2, (of, 0, (1,), (1,), False, OrderedDict(), None, 1)), "8 arguments"),
        (Call(Global("torch._utils", "_rebuild_parameter"), (of, True, OrderedDict())), "not a tensor"),
        (Call(Global("torch._utils", "_rebuild_sparse_tensor"), ()), "_rebuild_sparse_tensor"),
        (Call(Global("torch._utils", "_rebuild_meta_tensor_no_storage"), ()), "_rebuild_meta"),
    ):
        refused(save({"a": value}, {"0": bytes(48)}), words)


def test_many_copies_of_one_storage(save, refused):
    """Tensors that would need far more memory, or bytes read, than the file has."""
    of, data = storage("0", "float32", 1 << 16), {"0": bytes(1 << 18)}
    read_torch(save({str(i): tensor(of, (1 << 16,)) for i in range(8)}, data))
    refused(save({str(i): tensor(of, (1 << 16,)) for i in range(40)}, data), "overlap")
    refused(save({str(i): tensor(of, (2,), ((1 << 16) - 1,)) for i in range(40)}, data), "overlap")
    refused(save({"a": tensor(of, (1 << 17,), (0,))}, data), "exceeds the size of the file")


# ------------------------------------------------------------------ bombs


BOMBS = {
    "dicts": b"}" * 3_000_000, "marks": b"(" * 3_000_000, "self": b"]" + b"q\0h\0a" * 600_000,
    "doubling": b")" + b"q\0h\0\x86" * 600_000, "memo": b")" + b"\x94" * 3_000_000,
    "calls": b"ccollections\nOrderedDict\nq\0" + b"h\0)R" * 900_000,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in ("doubling", "memo") else pytest.param(name, marks=pytest.mark.slow) for name in BOMBS]
)
def test_bombs_of_steps(tmp_path, refused, name):
    """Deep nesting, tuples of 2 ** 600,000 elements, a memo of millions: refused after a number of steps."""
    file = save_zip(tmp_path / "x.bin", b"\x80\x02" + BOMBS[name] + b".", state_of(ARRAYS)[1])
    refused(file, megabytes=100)


def test_a_cut_number(save, refused):
    refused(save(b"\x80\x02K\1q\0r"))


def test_nested_values_that_are_ignored(save, refused):
    """Lists that contain themselves, and tuples that double 1,000 times, inside an attribute that nobody reads."""
    doubling = Raw(b")" + b"q\0h\0\x86" * 1000)
    state = Raw(opcodes(state_of(ARRAYS)[0]) + opcodes({"a": doubling, "b": Raw(b"]q\1h\1a")}) + b"b")
    assert read_torch(save(state))
    refused(save({"a": doubling}, {}), "'a' is a tuple")
    refused(save(Raw(b"}" + opcodes(doubling) + b"Ns")), "a key is a tuple")
    refused(save({"a": tensor(Persistent(doubling), (1,))}), "a persistent id")
    refused(save({"a": tensor(storage("0", "float32", 12), doubling, (1,))}), "the shape")
    refused(save({"a": Call(doubling, ())}), "a tuple is called")


@pytest.mark.parametrize(
    "code",
    [
        b"X" + struct.pack("<I", (1 << 32) - 1) + b"abc", b"\x8d" + struct.pack("<Q", 1 << 62) + b"abc",
        b"\x8e" + struct.pack("<Q", (1 << 64) - 1), b"\x8b" + struct.pack("<i", (1 << 31) - 1) + b"\1",
        b"\x8b" + struct.pack("<i", -1), b"\x8a\xff" + b"\x7f" * 255, b"r" + struct.pack("<I", (1 << 32) - 1),
        b"N" + b"r" + struct.pack("<I", (1 << 32) - 1), b"j" + struct.pack("<I", 7), b"L" + b"9" * 5000 + b"L\n",
        b"\x95" + struct.pack("<Q", 1 << 62), b"X\1\0\0\0\xff", b"I" + b"9" * 5000 + b"\n", b"F1e999999\n",
        b"\x8a\x11" + b"\x7f" * 17, b"T" + struct.pack("<i", -5), b"T" + struct.pack("<i", 1 << 30),
    ],
)  # fmt: skip
def test_sizes_inside_the_pickle(save, refused, code):
    refused(save(b"\x80\x02}" + code + b"0."))


@pytest.mark.parametrize(
    "code",
    [b"", b".", b"N", b"0.", b"a.", b"e.", b"s.", b"u.", b"t.", b"R.", b"b.", b"Q.", b"\x85.", b"q\0.", b"h\0.",
     b"(.", b"NN.", b"}(N.", b"}(NNN.", b"}(X\1\0\0\0au.", b"(\x85.", b"N(a.", b"}(.", b"\x93.", b"NN\x93.",
     b"}X\1\0\0\0aNsX\1\0\0\0aNs."],
)  # fmt: skip
def test_stacks_that_are_wrong(save, refused, code):
    refused(save(b"\x80\x02" + code))


def test_stacks_that_are_wrong_around_a_good_value(save, refused):
    state = state_of(ARRAYS)[0]
    good, name = opcodes(state), opcodes("a") + opcodes(state["a"])
    read_torch(save(b"\x80\x02" + good + b"r\0\0\1\0."))
    refused(save(b"\x80\x02N" + good + b"."), "values remain")
    refused(save(b"\x80\x02" + good + b"r\xff\xff\xff\xff."), "memo")
    refused(save(b"\x80\x02" + good + name + b"s."), "a key appears twice")


def test_a_pickle_that_is_too_long(tmp_path, refused):
    long = b"\x80\x02" + b"N0" * (LARGEST_PICKLE // 2) + b"."
    refused(save_zip(tmp_path / "x", long, {}), "data.pkl has")
    refused(save_old(tmp_path / "x", long, {}))
    assert MOST_STEPS < LARGEST_PICKLE


# ------------------------------------------------------------------ files that are cut or changed


def test_every_beginning(save, refused, monkeypatch):
    """Each number of bytes of a small file, from none to all but one."""
    file = save(*state_of({"a": ARRAYS["b"]}))
    content = file.read_bytes()
    for size in range(len(content)):
        file.write_bytes(content[:size])
        refused(file)
    file.write_bytes(content + b"\0")
    if file.read_bytes()[:2] != b"PK":
        refused(file, "1 bytes after the last storage")


def test_every_changed_byte(save):
    """A file with a changed byte is refused in one line, or read; nothing else happens."""
    file = save(*state_of({"a": ARRAYS["b"]}))
    content, read = file.read_bytes(), 0
    for position in range(len(content)):
        for change in (1, 128, 255):
            changed = bytearray(content)
            changed[position] ^= change
            file.write_bytes(changed)
            try:
                read += all(len(tensor.read()) <= 5 for tensor in read_torch(file).values())
            except ValueError as error:
                assert "\n" not in str(error)
    assert read > 60  # the values of the tensor, times three


def test_cut_while_it_is_read(save):
    file = save(*state_of(ARRAYS))
    opened = read_torch(file)
    file.write_bytes(file.read_bytes()[:40])
    for stored in opened.values():
        with pytest.raises(ValueError, match="truncated while it was read"):
            stored.read()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "damaged"),
        (b"\x1f\x8b" + bytes(100), "damaged"),
        (b"PK\x03\x04" + bytes(1000), "truncated or damaged"),
        (b"PK\x05\x06" + bytes(18), "damaged"),
        (bytes(1000), "damaged"),
        (b"ustar" + bytes(1000), "not a torch file"),
    ],
)
def test_other_files(tmp_path, refused, content, words):
    (tmp_path / "x.bin").write_bytes(content)
    refused(tmp_path / "x.bin", words)
