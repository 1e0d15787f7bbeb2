"""Files of torch.save in both formats without torch: values, dtypes, views, tied tensors; and 2019's forms."""

import subprocess
import sys
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
from torch_files import CLASSES, Call, Global, Raw, opcodes, save_old, save_zip, storage, tensor

from bert_jax.io.torch_file import read_torch

FORMATS = {"zip": save_zip, "old": save_old}


def drawn(dtype: str, shape: tuple[int, ...] = (3, 4)) -> np.ndarray:
    values = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, shape)
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


@pytest.mark.parametrize("form", FORMATS)
def test_dtypes(tmp_path, form):
    arrays = {dtype: drawn(dtype) for dtype in CLASSES}
    state = {d: tensor(storage(d, d, values.size), values.shape) for d, values in arrays.items()}
    data = {d: values.tobytes() for d, values in arrays.items()}
    more = {} if form == "zip" else {"counts": dict.fromkeys(data, 12)}
    read = read_torch(FORMATS[form](tmp_path / "x.bin", state, data, **more))
    assert [*read] == [*CLASSES]
    for dtype, values in arrays.items():
        assert read[dtype].dtype == values.dtype and same(read[dtype].read(), values), dtype


@pytest.mark.parametrize("form", FORMATS)
def test_views_tied_tensors_and_parameters(tmp_path, form):
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    of = storage("7", "float32", 24)
    state = OrderedDict(
        whole=tensor(of, (4, 6)), tied=tensor(of, (4, 6), parameter=True),
        transposed=tensor(of, (6, 4), (1, 6)), rows=tensor(of, (2, 6), (6, 1), 12),
        block=tensor(of, (2, 3), (6, 1), 8), column=tensor(of, (4,), (6,), 5), scalar=tensor(of, (), (), 23),
        expanded=tensor(of, (2, 3), (0, 1), 3), one_row=tensor(of, (1, 6), (999, 1), 6),
        empty=tensor(of, (0, 6), (6, 1), 24),
    )  # fmt: skip
    expected = {
        "whole": values, "tied": values, "transposed": values.T, "rows": values[2:], "block": values[1:3, 2:5],
        "column": values[:, 5], "scalar": values[3, 5], "expanded": np.broadcast_to(values[0, 3:], (2, 3)),
        "one_row": values[1:2], "empty": values[:0],
    }  # fmt: skip
    read = read_torch(FORMATS[form](tmp_path / "x.bin", state, {"7": values.tobytes()}))
    for name, array in expected.items():
        assert same(read[name].read(), np.ascontiguousarray(array).reshape(array.shape)), name
        assert read[name].read().flags.c_contiguous


@pytest.mark.parametrize("form", FORMATS)
def test_attributes_of_a_state_dict_are_ignored(tmp_path, form):
    """``_metadata`` of torch.nn.Module.state_dict: an ordered dict from modules to versions."""
    metadata = OrderedDict([("", {"version": 1}), ("embeddings", {"version": 1})])
    state = Raw(opcodes(OrderedDict(a=tensor(storage("0", "float32", 3), (3,)))) + opcodes({"_metadata": metadata}))
    state.code += b"b"
    values = np.ones(3, np.float32)
    assert same(read_torch(FORMATS[form](tmp_path / "x", state, {"0": values.tobytes()}))["a"].read(), values)


def test_other_protocols(tmp_path):
    """MEMOIZE, FRAME, SHORT_BINUNICODE and STACK_GLOBAL of protocol 4; strings of Python 2; a memo entry."""
    of = storage("0", "float32", 2)
    of.identifier = (*of.identifier[:1], Raw(b"\x8c\x05torch\x94\x8c\x0cFloatStorage\x94\x93"), *of.identifier[2:])
    built = Call(Global("torch._utils", "_rebuild_tensor"), (of, 0, (2,), (1,)))
    framed = b"\x80\x04\x95" + bytes(8) + b"}U\x04n\xc3\xa4m" + opcodes(built) + b"q\x05sX\1\0\0\0bh\x05s."
    read = read_torch(save_zip(tmp_path / "x", framed, {"0": np.float32([1, 2]).tobytes()}))
    assert [*read] == ["näm", "b"] and read["b"].read().tolist() == [1, 2]


def test_parts_of_storages_in_old_files(tmp_path):
    """A persistent id of torch 0.3 names a part of a storage."""
    part = storage("0", "float32", 6, part=("1", 2, 3))
    file = save_old(tmp_path / "x", {"a": tensor(part, (2,), (1,), 1)}, {"0": np.arange(6, dtype="f4").tobytes()})
    assert read_torch(file)["a"].read().tolist() == [3, 4]


@pytest.mark.slow
def test_a_file_is_not_in_memory_twice(tmp_path):
    """64 MB in two tensors, one transposed: only the tensor that is read is in memory."""
    values = np.ones((2048, 4096), np.float32)
    state = {"a": tensor(storage("0", "float32", values.size), (4096, 2048), (1, 4096))}
    state["b"] = tensor(storage("1", "float32", values.size), (2048, 4096))
    save_zip(tmp_path / "x.bin", state, {"0": values.tobytes(), "1": values.tobytes()})
    script = (
        "import resource, sys; from pathlib import Path; from bert_jax.io.torch_file import read_torch\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before = peak(); read = read_torch(Path(sys.argv[1])); opened = peak()\n"
        "for tensor in read.values(): assert tensor.read().sum() == 2 ** 23\n"
        "print(opened - before, peak() - opened)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "x.bin"], capture_output=True, text=True)
    opened, read = map(int, done.stdout.split())
    assert opened < 8 and read < 32 * 2 + 16, done.stderr
