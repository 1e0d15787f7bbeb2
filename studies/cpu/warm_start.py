"""Time to the first finished step of BERT-base with scan: cold, and with a warm compilation cache.

    python studies/cpu/warm_start.py [--rounds 3]

Each start is a separate process, with one row per step, because the arithmetic of a step is the same cold and warm
(2.4 s with 8 rows on two cores). Also prints the time of each part: tracing and lowering, compiling (warm: reading
the cache), and the first step. Exit code 3 if the warm start is less than 3 times faster.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ARGUMENTS = ["--execution.scan_layers", "true", "--training.global_batch_size", "1", "--data.seq_length", "128"]
PARTS = ("trace and lower", "compile", "first step")
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def first_step(cache: str) -> dict[str, float]:
    """Return the seconds of each part between an initialized state and the end of the first step."""
    import jax
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from synthetic_batch import synthetic_batch

    from bert_jax.config import PretrainConfig, load_config
    from bert_jax.objectives.registry import objective_class
    from bert_jax.parallel import make_mesh, to_global
    from bert_jax.training.programs import train_programs
    from bert_jax.training.state import initial_state

    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    config = load_config(PretrainConfig, ARGUMENTS)
    mesh = make_mesh(config.mesh)
    programs = train_programs(objective_class(config.objective)(config, mesh))
    state = jax.block_until_ready(initial_state(programs.model, programs.optimizer, programs.abstract, 0))
    rows = config.training.global_batch_size
    batch = synthetic_batch(rows, config.data.seq_length, config.data.max_predictions, config.model.vocab_size)
    batch = to_global(batch, mesh, rows)
    compiling: list[float] = []  # or reading from the cache
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiling.append(seconds) if event == COMPILE_EVENT else None
    )
    began = time.perf_counter()
    program = programs.step_for(batch)
    compiled, compile_seconds = time.perf_counter(), sum(compiling)
    jax.block_until_ready(program(state, batch))
    return {
        "trace and lower": compiled - began - compile_seconds,
        "compile": compile_seconds,
        "first step": time.perf_counter() - compiled,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cache:
        print(json.dumps(first_step(options.cache)))
        return 0
    times: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for name in times:
                command = [sys.executable, __file__, "--cache", cache]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                times[name].append(json.loads(out.splitlines()[-1]))
    for name, starts in times.items():
        parts = ", ".join(f"{part} {statistics.median(start[part] for start in starts):.2f} s" for part in PARTS)
        print(f"{name}: {parts}")
    medians = {name: statistics.median(sum(start.values()) for start in starts) for name, starts in times.items()}
    ratio = medians["cold"] / medians["warm"]
    print(
        f"first step done: cold {medians['cold']:.1f} s, warm {medians['warm']:.1f} s, "
        f"{ratio:.2f} times sooner (bar 3)"
    )
    return 0 if ratio >= 3 else 3


if __name__ == "__main__":
    sys.exit(main())
