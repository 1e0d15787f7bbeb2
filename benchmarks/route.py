"""The route of a batch and of the learning rate: the files that a newcomer reads to follow either.

    python benchmarks/route.py [--base JSON]

Takes the first step of a tiny model on made-up text, masked when it is read, on the checkout in the working folder.
Three lists are printed, in the order of first entry:

* ids: the files of the project that receive the token ids, as an argument of a call or as its result, between the
  first record read and the traced training step: the array itself, or a serialized record, or either at most two
  levels deep in containers, named tuples and dataclasses;
* path: the files on the call stacks at these moments, without a bar;
* learning_rate: the files, of those that the run has loaded, that define or read the option ``learning_rate``, or
  make or call the schedule.

The last line is JSON: the lists and their lengths. ``--base`` takes such output (a file) of another checkout. Exit
code 3 above 12 files of ids or 5 of the learning rate, or, with ``--base``, above 0.6 times the other's.
"""

import argparse
import ast
import contextlib
import dataclasses
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

ROOT = Path.cwd()
MOST = {"ids": 12, "learning_rate": 5}
SHARE_OF_BASE = 0.6
DEPTH = 2
STEP = "train_step"  # the function that is traced
MOST_ITEMS = 40  # looked at in a container
ID_NAMES = {"input_ids", "input_ids_BxS", "ids", "token_ids"}  # of arguments and keys
CONFIG = """
data: {corpus: [CORPUS], shards: SHARDS, seq_length: 16, max_predictions: 3, dupe_factor: 2, num_shards: 2,
  eval_fraction: 0.2, workers: 1, masking: dynamic}
model: {vocab_size: 64, hidden_size: 16, num_layers: 2, num_attention_heads: 2, intermediate_size: 32,
  max_position_embeddings: 32}
optimizer: {learning_rate: 1.e-3, warmup_steps: 1}
training: {num_steps: 1, global_batch_size: 8, log_interval: 1, checkpoint_interval: 1}
"""


def is_record(value: Any) -> bool:
    """Return True for bytes (or an array or buffer of them) that hold a serialized example."""
    if isinstance(value, memoryview) or (type(value).__name__ == "ndarray" and value.dtype == "uint8"):
        value = bytes(value[:4096])
    return isinstance(value, bytes) and b"input_ids" in value and b"input_mask" in value


def is_array(value: Any) -> bool:
    """Return True for arrays of integers or texts; shapes and blank arrays hold no ids."""
    dtype = str(getattr(value, "dtype", ""))
    if type(value).__name__ == "ShapeDtypeStruct" or not any(kind in dtype for kind in ("int", "string", "object")):
        return False
    return type(value).__name__ not in ("ndarray", "ArrayImpl") or any(np.asarray(value).flat)


def own_name(path: Path) -> str | None:
    """Return the name of a file of the project, or None for other files, such as a .venv in it."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return name if name.startswith(("bert_jax/", "data_pipeline/", "run_pretrain")) else None


class Arrived(BaseException):
    """The loop has taken a batch and the step is traced: the route is known."""


class Route:
    """A profile function. ``received``: the files that get the ids; ``path``: all files on the call stacks then."""

    def __init__(self) -> None:
        self.received: dict[str, None] = {}
        self.path: dict[str, None] = {}
        self._names: dict[CodeType, str | None] = {}
        self._ids: dict[int, Any] = {}  # arrays met under the name of the ids, kept alive
        self._traced = False
        self._in_step = 0  # calls of the step under way
        self._loop: FrameType | None = None  # the main thread's function that was handed a batch

    def __call__(self, frame: FrameType, event: str, returned: Any) -> None:
        code = frame.f_code
        name = self._file(code)
        if name is None:
            return
        if event == "call":
            self._in_step += code.co_name == STEP
            count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
            local = frame.f_locals
            if any(self._holds(local[a], DEPTH, a) for a in code.co_varnames[:count] if a in local):
                self._add(frame)
        elif event == "return":
            caller = frame.f_back
            self._traced |= code.co_name == STEP
            self._in_step -= code.co_name == STEP
            if self._traced and caller is not None and caller is self._loop:
                raise Arrived
            if caller is not None and self._file(caller.f_code) and self._holds(returned, DEPTH):
                self._add(caller)
                if threading.current_thread() is threading.main_thread() and code.co_name == "__next__":
                    self._loop = caller

    def _add(self, frame: FrameType) -> None:
        self.received[self._file(frame.f_code)] = None
        while frame is not None:
            if name := self._file(frame.f_code):
                self.path[name] = None
            frame = frame.f_back

    def _file(self, code: CodeType) -> str | None:
        """Return the file of a function, or None if it is not in the project."""
        if code not in self._names:
            self._names[code] = own_name(Path(code.co_filename))
        return self._names[code]

    def _holds(self, value: Any, depth: int, name: str = "") -> bool:
        if is_record(value):
            self._ids.setdefault(0, None)
            return True
        if "Tracer" in type(value).__name__:  # outside the step: shapes of parameters and counts of operations
            return self._in_step > 0 and name in ID_NAMES
        if not self._ids and not self._in_step:  # no record was read yet
            return depth > 0 and any(self._holds(inner, depth - 1) for inner in contents(value).values())
        if id(value) in self._ids:
            return True
        # A tensor of texts holds the records of a batch before it is parsed.
        if is_array(value) and (name in ID_NAMES or "string" in str(value.dtype)):
            self._ids[id(value)] = value
            return True
        return depth > 0 and any(self._holds(inner, depth - 1, key) for key, inner in contents(value).items())


def contents(value: Any) -> dict[str, Any]:
    """Return the entries of a container, named tuple or dataclass, by name or number."""
    if isinstance(value, Mapping):
        return {str(key): inner for key, inner in list(value.items())[:MOST_ITEMS]}
    if isinstance(value, list | tuple):
        return {str(i): inner for i, inner in enumerate(value[:MOST_ITEMS])}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return {}


def follow_into_tensorflow(route: Route) -> None:
    """Profile the functions that TensorFlow calls from its own threads."""
    import tensorflow as tf

    original = tf.numpy_function

    def numpy_function(function: Any, *arguments: Any, **options: Any) -> Any:
        def profiled(*values: Any) -> Any:
            sys.setprofile(route)
            try:
                return function(*values)
            finally:
                sys.setprofile(None)

        return original(profiled, *arguments, **options)

    tf.numpy_function = numpy_function


def routes_of_ids(folder: Path) -> dict[str, list[str]]:
    """Return the files of the ids, and of the calls that lead to them, in a run on made-up text in ``folder``."""
    words = ["the cat sees a bird", "a dog likes the house", "my friend hears some music"]
    blocks = ["\n".join(f"{words[(i + j) % 3]} ." for j in range(4 + i % 5)) for i in range(30)]
    (folder / "corpus.txt").write_text("\n\n".join(blocks) + "\n")
    config = CONFIG.replace("CORPUS", str(folder / "corpus.txt")).replace("SHARDS", str(folder / "shards"))
    (folder / "config.yaml").write_text(config)
    options = ["--config", str(folder / "config.yaml")]
    # Apart, because building shards handles ids too.
    subprocess.run(
        [sys.executable, "-m", "bert_jax.commands.data", "shards", *options], check=True, stdout=subprocess.PIPE
    )
    route = Route()
    follow_into_tensorflow(route)
    sys.argv = ["run_pretrain.py", *options, "--workdir", str(folder / "run")]
    output = io.StringIO()
    threading.setprofile(route)
    sys.setprofile(route)
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(str(ROOT / "run_pretrain.py"), run_name="__main__")
        raise RuntimeError(f"no batch arrived: {output.getvalue()}")
    except Arrived:
        pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {"ids": list(route.received), "path": list(route.path)}


def handles_learning_rate(source: str) -> bool:
    """Return True for code that defines or reads the option, or makes or calls the schedule."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr="learning_rate") | ast.AnnAssign(target=ast.Name(id="learning_rate")):
                return True
            case ast.Subscript(slice=ast.Constant(value="learning_rate")):
                return True
            case ast.Call(func=ast.Name(id="make_schedule" | "schedule")) | ast.FunctionDef(name="make_schedule"):
                return True
    return False


def route_of_learning_rate() -> list[str]:
    """Return the loaded files of the project that handle the learning rate."""
    files = {Path(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
    own = {name: path for path in files if (name := own_name(path))}
    return [name for name in sorted(own) if handles_learning_rate(own[name].read_text(encoding="utf-8"))]


def main() -> int:
    """Measure, print the lists and compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, help="file whose last line is this program's JSON of another checkout")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        routes = routes_of_ids(Path(folder))
    routes["learning_rate"] = route_of_learning_rate()
    base = json.loads(arguments.base.read_text().splitlines()[-1])["counts"] if arguments.base else {}
    passed = True
    for name, files in routes.items():
        bar = min(MOST.get(name, sys.maxsize), int(SHARE_OF_BASE * base.get(name, sys.maxsize)))
        passed &= name not in MOST or len(files) <= bar
        print(f"{name}: {len(files)} files" + (f" (bar {bar})" if name in MOST else ""), *files, sep="\n  ")
    print(json.dumps({"routes": routes, "counts": {name: len(files) for name, files in routes.items()}}))
    return 0 if passed else 3


if __name__ == "__main__":
    sys.exit(main())
