"""Fixtures of tests of files of torch.save."""

import time
from pathlib import Path

import pytest
from torch_files import ARRAYS, FORMATS, state_of

from bert_jax.io.torch_file import read_torch
from bert_jax.process import exits


def status(name: str) -> int:
    """A size of this process in KB."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


@pytest.fixture
def refused(capsys):
    """A check that a file is refused with exit code 2 in one line that holds some words, cheaply."""

    def check(file: Path, *words: str, megabytes: int = 20, seconds: float = 10) -> str:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before, began = status("VmRSS"), time.monotonic()
        code = exits.run_command(lambda: print(read_torch(file)))
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (exits.USER_ERROR, "", 1), (out, err)
        assert err.isascii() and err[:-1].isprintable() and len(err) < 600 and str(file) in err
        assert all(word in err for word in words), err
        assert status("VmHWM") - before < megabytes << 10
        assert time.monotonic() - began < seconds
        return err

    return check


@pytest.fixture(params=FORMATS)
def save(request, tmp_path):
    """A writer of a state with the storages of ``ARRAYS``, in both formats."""

    def write(state, data=None, **options):
        return FORMATS[request.param](
            tmp_path / "x.bin", state, state_of(ARRAYS)[1] if data is None else data, **options
        )

    return write
