"""Training steps compiled for an H100 that is not there: temporaries and bytes moved, beside an older checkout.

    python benchmarks/gpu_programs.py [--shapes base512 large512 base128] [--base CHECKOUT] [--output JSONL]

Compiles BERT-base with 64 x 512 and 256 x 128 tokens and BERT-large with 32 x 512 (bfloat16, layers written out, no
recomputation, dropout 0.1 everywhere) in a process each, 30 to 60 s on two cores, and prints a JSON line per
program: bytes of temporaries, bytes that the scheduled kernels read and write (what a kernel of this project reads
again is counted again), the least time by ``bert_jax.contrib.planner``. ``--base`` compiles the same programs of
another checkout, by default their figures are the lines of that checkout in JSONL. Exit code 3 if either is
more than half of the base's. Needs the extra ``gpu``; no GPU is used.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import ROOT, environment, json_lines, write_json_lines

BAR = 0.5
LARGE = {
    "model.hidden_size": 1024, "model.num_layers": 24, "model.num_attention_heads": 16,
    "model.intermediate_size": 4096,
}  # fmt: skip
SHAPES: dict[str, tuple[int, int, int, dict[str, int]]] = {
    "base512": (64, 512, 80, {}),
    "large512": (32, 512, 80, LARGE),
    "base128": (256, 128, 20, {}),
}


def main() -> int:
    """Compile, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--base", type=Path, help="checkout to compare with")
    parser.add_argument("--output", type=Path, default=ROOT / "studies/gpu/gpu_programs.jsonl")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], Path(options.worker[1]))
        return 0
    before = json_lines(options.output)
    base = {line["shape"]: line for line in before if line["checkout"] != "this"}
    lines, good = [], True
    for shape in options.shapes:
        if options.base:
            base[shape] = measure(shape, options.base)
        line = measure(shape, ROOT)
        if old := base.get(shape):
            ratios = {f"{name}_ratio": line[name] / old[name] for name in ("temporary_bytes", "moved_bytes")}
            line |= {name: round(value, 3) for name, value in ratios.items()}
            good = good and max(ratios.values()) <= BAR
        lines.append(line)
        print(json.dumps(line), flush=True)
    kept = [line for line in before if line["checkout"] == "this" and line["shape"] not in options.shapes]
    write_json_lines(options.output, [*base.values(), *kept, *lines])
    return 0 if good and base else 3


def measure(shape: str, checkout: Path) -> dict[str, Any]:
    """Return the figures of the program ``shape`` of ``checkout``, compiled in a process of its own."""
    from bert_jax.contrib.planner.cycles import step_cost
    from bert_jax.contrib.planner.gpu_devices import target_config
    from bert_jax.contrib.planner.topology import parse_topology

    chip = parse_topology("h100:1").chip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "target").write_text(target_config(chip))
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", shape, folder]
        subprocess.run(command, env=environment(checkout.resolve()), check=True, stdout=subprocess.DEVNULL)
        text = Path(folder, "program.txt").read_text()
        temporary = int(Path(folder, "temporary").read_text())
    cost = step_cost(text, chip, {"data": 1}, (1,))
    revision = subprocess.check_output(["git", "rev-parse", "--short=7", "HEAD"], cwd=checkout, text=True)
    return {
        "checkout": "this" if checkout == ROOT else revision.strip(),
        "shape": shape,
        "temporary_bytes": temporary,
        "moved_bytes": round(cost.moved_bytes),
        "least_milliseconds": round(cost.seconds * 1e3, 1),
        "teraflops": round(cost.operations / 1e12, 2),
    }


def worker(shape: str, folder: Path) -> None:
    """Compile the program ``shape`` of the package that is found first, and write it to ``folder``."""
    from jax.experimental import topologies

    from bert_jax.config import PretrainConfig, load_config
    from bert_jax.parallel import make_mesh

    rows, length, predictions, sizes = SHAPES[shape]
    settings = {
        "execution.dtype": "bfloat16", "execution.scan_layers": "false", "data.corpus": "none",
        "data.seq_length": length, "data.max_predictions": predictions, "training.global_batch_size": rows, **sizes,
    }  # fmt: skip
    config = load_config(
        PretrainConfig, [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    )
    target = (folder / "target").read_text()
    shape_of_hosts = {"topology": "1x1x1", "target_config": target}
    described = topologies.get_topology_desc(platform="cuda", topology_name="gpu", **shape_of_hosts)
    mesh = make_mesh(config.mesh, described.devices)
    try:
        from bert_jax.objectives.registry import objective_class
        from bert_jax.training.programs import pretraining_batch, train_programs

        objective = objective_class(config.objective)(config, mesh)
        programs, batch = train_programs(objective), pretraining_batch(objective, rows)
    except ModuleNotFoundError:  # a checkout from before there were objectives
        from bert_jax.training import compile as old  # type: ignore[attr-defined]

        programs, batch = old.train_programs(config, mesh), old.pretraining_batch(config, mesh, rows)
    compiled = programs.lower(batch).compile()
    (folder / "program.txt").write_text(compiled.as_text())
    (folder / "temporary").write_text(str(compiled.memory_analysis().temp_size_in_bytes))


if __name__ == "__main__":
    sys.path.append(str(ROOT))
    sys.exit(main())
