"""What may import what: the layers, TensorFlow and JAX kept out of where they do not belong."""

import ast
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path

import command
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
# The jax-free layers: text is prepared on machines and in worker processes that need no jax.
WITHOUT_JAX = [
    "bert_jax.config",
    "bert_jax.batch",
    "bert_jax.records",
    "bert_jax.metrics",
    "bert_jax.tokenization",
    "bert_jax.process.exits",
    "bert_jax.io.folder_lock",
    "bert_jax.objectives.registry",
    "bert_jax.training.launch",
]


def modules(package):
    """Dotted names of every module of ``package``, from the files."""
    files = sorted((REPOSITORY / package).rglob("*.py"))
    names = [".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in files]
    return [name.removesuffix(".__init__") for name in names]


def loaded_after(names):
    """Top-level modules in ``sys.modules`` of a fresh process that imported ``names``."""
    code = f"import importlib, json, sys\nfor name in {names!r}: importlib.import_module(name)\n"
    code += "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert {name.partition(".")[0] for name in names} <= loaded
    return loaded


def test_import_linter_contracts_hold():
    pytest.importorskip("importlinter", reason="the test extra brings import-linter")
    # A process of its own: it starts worker processes, which must not inherit jax's threads.
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Contracts: 7 kept, 0 broken." in done.stdout


@pytest.mark.slow
def test_a_pretraining_run_imports_no_room(tmp_path):
    recipe = command.recipe(tmp_path, training={"num_steps": 2, "eval_interval": 2})
    words = ["run_pretrain.py", "--config", str(recipe), "--workdir", str(tmp_path / "run")]
    code = f"""
import json, runpy, sys
sys.argv = {words!r}
try:
    runpy.run_path("run_pretrain.py", run_name="__main__")
except SystemExit as end:
    assert not end.code
print(json.dumps(["bert_jax.training.loop" in sys.modules, [name for name in sys.modules if ".contrib." in name]]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trained, rooms = json.loads(done.stdout.splitlines()[-1])
    assert trained and not [name for name in rooms if name.startswith(("bert_jax.", "data_pipeline."))]


def test_the_library_brings_neither_tensorflow_nor_the_data_pipeline():
    names = modules("bert_jax")
    assert len(names) > 30 and "bert_jax.training.pretrain" in names
    loaded = loaded_after(names)
    assert "jax" in loaded
    assert not loaded & {"tensorflow", "tensorflow_datasets", "data_pipeline", "torch"}


def test_a_model_is_loaded_without_what_only_training_or_statistics_need():
    code = "import json, sys, bert_jax; bert_jax.load; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"optax", "orbax.checkpoint", "scipy.special", "scipy.stats", "jax.experimental.pallas.triton"}
    assert not heavy & {*json.loads(run.stdout)}


def test_config_batches_and_tokenizers_need_no_jax():
    assert not loaded_after(WITHOUT_JAX) & {"jax", "jaxlib", "flax", "optax", "tensorflow", "data_pipeline"}


def test_the_data_pipeline_brings_tensorflow_late_and_jax_never():
    names = modules("data_pipeline")
    assert {"data_pipeline.read.pretrain_input", "data_pipeline.build.ensure"} <= set(names)
    names.append("bert_jax.commands.data")
    assert not loaded_after(names) & {"jax", "jaxlib", "flax", "tensorflow", "tensorflow_datasets", "jieba"}


@pytest.fixture(scope="module")
def rules():
    """``benchmarks/house.py``: what is counted, and the limits."""
    spec = importlib.util.spec_from_file_location("house", REPOSITORY / "benchmarks" / "house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def house(rules):
    """The checkout, counted."""
    return rules.House(REPOSITORY)


def test_no_circle_between_rooms(house):
    assert house.circles() == []


def test_no_function_is_long(rules, house):
    assert rules.MOST_FUNCTION == 60
    assert house.long_functions() == {}


def test_a_miss_of_each_limit_is_found(rules, tmp_path):
    """The counts are of use only if they see what is over a limit."""
    room = tmp_path / "bert_jax" / "a"
    room.mkdir(parents=True)
    (tmp_path / "bert_jax" / "b").mkdir()
    modules = [f"bert_jax.a.m{number}" for number in range(14)]
    for number in range(14):
        (room / f"m{number}.py").write_text("")
    lines = [f"import {module}" for module in modules[:13]]
    lines += ["def long():", *["    pass"] * 60, *["# more"] * 400]
    (tmp_path / "bert_jax" / "b" / "big.py").write_text("\n".join([*lines, ""]))
    (room / "m13.py").write_text("def late():\n    from bert_jax.b import big\n")
    house = rules.House(tmp_path)
    assert house.many_imports() == {"bert_jax/b/big.py": 13}
    assert house.long_functions() == {"bert_jax/b/big.py:long": 61}
    assert house.file_lines()["bert_jax/b/big.py"] == 474
    assert house.full_rooms() == {"bert_jax/a": 14}
    assert house.circles() == [["bert_jax/a", "bert_jax/b"]]


def tensorflow_imports(path):
    """(line, name of the function it stands in or None) of every import of TensorFlow."""
    found = []

    def walk(node, function):
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            names = [alias.name for alias in child.names] if isinstance(child, ast.Import) else []
            names += [child.module or ""] if isinstance(child, ast.ImportFrom) else []
            found.extend(
                (child.lineno, function) for name in names if name.partition(".")[0].startswith("tensorflow")
            )
            walk(child, inner)

    walk(ast.parse(path.read_text(encoding="utf-8")), None)
    return found


def test_three_functions_import_tensorflow():
    files = [*(REPOSITORY / "bert_jax").rglob("*.py"), *(REPOSITORY / "data_pipeline").rglob("*.py")]
    files += REPOSITORY.glob("*.py")
    found = {
        (path.relative_to(REPOSITORY).as_posix(), function)
        for path in files
        for _, function in tensorflow_imports(path)
    }
    assert found == {
        ("data_pipeline/host_tensorflow.py", "load_tensorflow"),
        ("data_pipeline/text/datasets.py", "load_tfds"),
        ("bert_jax/interop/tf1/checkpoint.py", "_tensorflow"),
    }


class Recorder(types.ModuleType):
    """Stands for TensorFlow and writes down every call by its dotted name."""

    def __init__(self, name, calls):
        super().__init__(name)
        self.calls = calls

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(f"{self.__name__}.{name}", self.calls)

    def __call__(self, *arguments):
        self.calls.append((self.__name__, *arguments))


def test_tensorflow_is_kept_from_accelerators_before_anything_runs(monkeypatch):
    """On a machine without accelerators a forgotten call would go unnoticed, so the calls are looked at."""
    from data_pipeline.host_tensorflow import load_tensorflow

    calls = []
    monkeypatch.setitem(sys.modules, "tensorflow", Recorder("tf", calls))
    module = load_tensorflow.__wrapped__()
    assert module.__name__ == "tf"
    hidden = [call[1:] for call in calls if call[0] == "tf.config.set_visible_devices"]
    assert hidden == [([], "GPU"), ([], "TPU")]
    assert all(call[0].startswith("tf.config.") for call in calls), calls
