"""Time to the first finished step of BERT-base with scan: cold, and with a warm compilation cache.

    python benchmarks/warm_start.py [--rounds 3]

Each start is a process of its own. Exit code 3 when the warm start is not at least 3 times sooner.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

ARGUMENTS = ["--execution.scan_layers", "true", "--training.global_batch_size", "8", "--data.seq_length", "128"]


def first_step(cache: str) -> float:
    """Seconds from an initialised state to the end of the first step, lowering and compilation included."""
    import jax

    from bert_jax.batch import synthetic_batch
    from bert_jax.config import PretrainConfig, load_config
    from bert_jax.model import BertForPretraining
    from bert_jax.optim import make_optimizer, make_schedule
    from bert_jax.parallel import make_mesh, to_global
    from bert_jax.training.compile import TrainPrograms
    from bert_jax.training.state import abstract_state, initial_state, make_prng_key
    from bert_jax.training.step import make_train_step

    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    config = load_config(PretrainConfig, ARGUMENTS)
    mesh = make_mesh(config.mesh)
    model = BertForPretraining(config.model, config.execution, config.has_nsp, mesh)
    optimizer = make_optimizer(config.optimizer)
    abstract = abstract_state(model, optimizer, mesh, with_ema=False)
    state = jax.block_until_ready(initial_state(model, optimizer, abstract, 0))
    schedule = make_schedule(config.optimizer, 1000)
    key = make_prng_key(config.execution, 0)
    batch = to_global(synthetic_batch(8, 128, config.data.max_predictions, config.model.vocab_size), mesh, 8)
    began = time.perf_counter()
    step = make_train_step(model, optimizer, schedule, config.optimizer, 1, key)
    jax.block_until_ready(TrainPrograms(step, abstract, config, mesh).step_for(8)(state, batch))
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cache:
        print(first_step(options.cache))
        return 0
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for name in times:
                command = [sys.executable, __file__, "--cache", cache]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                times[name].append(float(out.split()[-1]))
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["cold"] / medians["warm"]
    print(
        f"first step: cold {medians['cold']:.1f} s, warm {medians['warm']:.1f} s, {ratio:.2f} times sooner (bar 3)"
    )
    return 0 if ratio >= 3 else 3


if __name__ == "__main__":
    sys.exit(main())
