"""The hashed bits of dropout: their statistics, their indices, and the cost of a step against threefry.

    python studies/dropout/hash_dropout.py [--parts uniform correlation places cpu tpu] [--seeds 100] [--pairs 9]

* uniform: for each of 100 seeds, the p-value of a chi-square test of 10^8 draws of 16 bits, half of the seeds for
  hidden values and half for attention probabilities; then the Kolmogorov-Smirnov test of the p-values (bar: 0.01).
* correlation: the correlation of each pair of 64 masks (4 steps, 4 layers, 4 sites; 2^18 values each) at every
  shift and XOR of the index below 2^16, in units of 1 / sqrt(n). Independent masks exceed 4 at a known rate, so
  masks of PCG64 are measured beside them; the bar is the value that the largest of as many independent correlations
  stays below with probability 0.999.
* places: bits of 8,192 x 8,192 probabilities, 16 heads and 64 rows at random places and at the last ones, against
  Python integers (bar: all equal).
* cpu: a step of BERT-base with 8 x 128 tokens, hash over threefry, medians of alternating turns (bar: 1.0, or the
  95% interval contains 1).
* tpu: the same step for v5e:2x2, compiled ahead of time without kernels and costed (bar: 1.0).

Prints a JSON line per part. Exit code 3 below a bar.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from pairs import interval
from scipy import stats

DRAWS = 10**8
MASKS, MASK_SIZE, INDICES = 64, 2**18, 2**16
WORD = 2**32 - 1
PARTS = ("uniform", "correlation", "places", "cpu", "tpu")


def token_key(seed: int, rows: int, length: int) -> Any:
    """Return the key of ``rows`` sequences of ``length`` tokens."""
    import jax
    import jax.numpy as jnp

    from bert_jax.model.dropout import TokenKey

    places = [jnp.broadcast_to(x, (rows, length)) for x in (jnp.arange(rows)[:, None], jnp.arange(length))]
    return TokenKey(jax.random.key(seed), *places)


def uniform(options: argparse.Namespace) -> dict[str, Any]:
    """Return the p-value of the Kolmogorov-Smirnov test over the p-values of the seeds."""
    import jax

    from bert_jax.model.dropout import _hashed_probabilities, _hashed_values

    hidden = jax.jit(lambda seed: _hashed_values(token_key(seed, 64, 512), (64, 512, 768)).ravel())
    scores = jax.jit(lambda seed: _hashed_probabilities(token_key(seed, 8, 512), 12).ravel())
    p_values = []
    for seed in range(options.seeds):
        draw = (hidden, scores)[seed % 2]
        counts, part = np.zeros(65536, np.int64), 0
        while (left := DRAWS - counts.sum()) > 0:
            values = np.asarray(draw(1000 * seed + part)).astype(np.uint16)[:left]
            counts += np.bincount(values, minlength=65536)
            part += 1
        p_values.append(float(stats.chisquare(counts).pvalue))
    test = stats.kstest(p_values, "uniform")
    return {
        "seeds": options.seeds,
        "least_p": min(p_values),
        "ks_p": float(test.pvalue),
        "reached": test.pvalue > 0.01,
    }


def walsh_hadamard(x: np.ndarray) -> np.ndarray:
    """Return the unnormalized Walsh-Hadamard transform of ``x`` [n], n a power of two."""
    x, half = x.astype(np.float64), 1
    while half < len(x):
        pairs = x.reshape(-1, 2, half)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).ravel()
        half *= 2
    return x


def correlations(masks: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the correlations of each pair of ``masks`` float[count, n] times sqrt(n): at every cyclic shift below
    2^16, then at every XOR below 2^16."""
    size = masks.shape[1]
    normal = (masks - masks.mean(1, keepdims=True)) / masks.std(1, keepdims=True)
    fourier = np.fft.rfft(normal)
    hadamard = np.stack([walsh_hadamard(mask) for mask in normal])
    for one in range(len(masks)):
        for other in range(one):
            shifted = np.fft.irfft(np.conj(fourier[one]) * fourier[other], size)[:INDICES]
            yield shifted / math.sqrt(size)
            xored = walsh_hadamard(hadamard[one] * hadamard[other])[:INDICES]
            yield xored / size / math.sqrt(size)


def correlation(options: argparse.Namespace) -> dict[str, Any]:
    """Return the largest correlation of the hash and of PCG64, and how many exceed 4 / sqrt(n)."""
    import jax

    from bert_jax.model.dropout import _hashed_values, site_key

    def mask(number: int) -> np.ndarray:
        step, layer, site = number // 16, number // 4 % 4, number % 4
        key = token_key(0, 1, MASK_SIZE // 1024)
        key = site_key(key.replace(key=jax.random.fold_in(key.key, step)), layer, site)
        return np.asarray(_hashed_values(key, (1, MASK_SIZE // 1024, 1024)) < 6554).ravel()

    rng = np.random.default_rng(0)
    kinds = {
        "hash": np.stack([mask(number) for number in range(options.masks)]),
        "pcg64": rng.random((options.masks, MASK_SIZE)) < 0.1,
    }
    tried = options.masks * (options.masks - 1) * INDICES
    bar = float(stats.norm.isf(0.001 / tried / 2))
    expected = tried * 2 * float(stats.norm.sf(4))
    line: dict[str, Any] = {"masks": options.masks, "correlations": tried, "expected_above_4": expected}
    for name, masks in kinds.items():
        largest = above = 0.0
        for values in correlations(masks):
            largest, above = max(largest, float(np.abs(values).max())), above + float((np.abs(values) > 4).sum())
        line |= {f"{name}_largest": largest, f"{name}_above_4": above}
    return line | {"bar": bar, "reached": line["hash_largest"] <= bar}


def mix(x: int, salt: int) -> int:
    """Return the hash of Python integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD ^ salt
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ x >> 16


def places(options: argparse.Namespace) -> dict[str, Any]:
    """Return the number of probabilities whose bits differ from those of Python integers."""
    import jax
    import jax.numpy as jnp

    from bert_jax.model.dropout import TokenKey, _hashed_probabilities

    rng = np.random.default_rng(0)
    positions = np.stack([np.concatenate([[0, 1, 8190, 8191], rng.integers(0, 8192, 28)]) for _ in range(64)])
    sequences = np.tile(rng.integers(0, 2**32, (64, 1), dtype=np.uint32), (1, 32))
    sequences[-1] = WORD
    key = jax.random.key(5)
    tokens = TokenKey(key, jnp.asarray(sequences.view(np.int32)), jnp.asarray(positions, jnp.int32))
    drawn = np.asarray(_hashed_probabilities(tokens, 16))
    first, second = (int(word) for word in jax.random.key_data(key))
    wrong = 0
    for row, head, query, at in [*rng.integers(0, (64, 16, 32, 32), (20_000, 4)).tolist(), [63, 15, 3, 3]]:
        sequence, pair = int(sequences[row, query]), head // 2
        one = mix((mix(sequence ^ first, second) + int(positions[row, query])) & WORD, second)
        other = mix((mix(sequence ^ second, first) + int(positions[row, query])) & WORD, first)
        start = (int(positions[row, at]) + (one ^ pair * 0x9E3779B1 & WORD)) & WORD
        word = mix(start, (other + pair * 0x85EBCA77) & WORD)
        wrong += (word >> 16 * (head % 2)) & 0xFFFF != drawn[row, head, query, at]
    return {"places": 20_001, "wrong": int(wrong), "reached": wrong == 0}


def cpu(options: argparse.Namespace) -> dict[str, Any]:
    """Return the ratio of the step times, hash over threefry."""
    import jax
    from synthetic_batch import synthetic_batch

    from bert_jax.config import PretrainConfig, load_config
    from bert_jax.objectives.registry import objective_class
    from bert_jax.parallel import make_mesh, to_global
    from bert_jax.training.programs import train_programs
    from bert_jax.training.state import initial_state

    def program(prng: str) -> Callable[[], float]:
        words = f"--execution.prng {prng} --data.corpus none --training.global_batch_size 8"
        config = load_config(PretrainConfig, words.split())
        mesh = make_mesh(config.mesh, jax.devices()[:1])
        programs = train_programs(objective_class(config.objective)(config, mesh))
        batch = to_global(synthetic_batch(8, 128, 20, config.model.vocab_size), mesh, 8)
        step = programs.step_for(batch)
        states = [initial_state(programs.model, programs.optimizer, programs.abstract, 0)]

        def run() -> float:
            began = time.perf_counter()
            for _ in range(2):
                states[0], metrics = step(states[0], batch)
            metrics.unpack()
            return time.perf_counter() - began

        run()
        return run

    runs = {name: program(name) for name in ("hash", "threefry")}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for pair in range(options.pairs):
        for name in sorted(runs, reverse=bool(pair % 2)):
            seconds[name].append(runs[name]())
    ratios = sorted(h / t for h, t in zip(seconds["hash"], seconds["threefry"], strict=True))
    low, high = interval(ratios)
    middle = float(np.median(ratios))
    times = {name: round(float(np.median(values)) / 2, 4) for name, values in seconds.items()}
    return {"ratio": middle, "interval": [low, high], "seconds": times, "reached": middle <= 1 or low <= 1}


def tpu(options: argparse.Namespace) -> dict[str, Any]:
    """Return the ratio of the costs of a step on v5e:2x2, hash over threefry, without kernels."""
    seconds = {}
    for prng in ("hash", "threefry", "rbg"):
        command = [sys.executable, str(Path(__file__).resolve().parents[1] / "tpu" / "tpu_estimate.py"), "--worker", "xla", prng]
        root = str(Path(__file__).resolve().parents[2])
        done = subprocess.run(
            [*command, "--topology", "v5e:2x2", "--rows", "32"],
            env=os.environ | {"PYTHONPATH": root}, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        seconds[prng] = json.loads(done.stdout.splitlines()[-1])["seconds"]
    ratio = seconds["hash"] / seconds["threefry"]
    return {"seconds": seconds, "ratio": ratio, "reached": ratio <= 1}


def main() -> int:
    """Measure the parts and print their lines; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--masks", type=int, default=MASKS)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    reached = True
    for name in options.parts:
        line = globals()[name](options)
        reached &= bool(line["reached"])
        print(json.dumps({"part": name, **line, "reached": bool(line["reached"])}), flush=True)
    return 0 if reached else 3


if __name__ == "__main__":
    sys.exit(main())
