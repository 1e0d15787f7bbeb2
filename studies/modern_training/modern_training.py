"""Training of modern encoders: update rules, cut and stacked parameters, phases in tokens, lengths of recipes.

    python studies/modern_training/modern_training.py [--parts updates layouts phases lengths]

* updates: 60 updates of a model of 4 layers of width 256 by StableAdamW (the three kinds of weight decay) and by
  Muon, stacked and unstacked, against float64; largest norm of the difference of a parameter over its norm (bar:
  1e-6).
* layouts: 4 updates with the same gradients, stacked and unstacked, on meshes of 8 virtual devices (fsdp; data with
  optimizer state cut by ZeRO-1; both with tensor) against one device and unstacked layers (bar: 1e-6).
* phases: ``tests/entry/test_phase_kill.py``: three phases with 9 kills against undisturbed ones (bar: bitwise).
* lengths: steps and sizes that follow from the tokens of ModernBERT-base's three phases, against a loop over
  batches by the rule of its authors (bar: equal).

Prints a JSON line per row. Exit code 3 below a bar.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from bert_jax.config import MeshConfig, OptimizerConfig, PretrainConfig, load_config
from bert_jax.config.lengths import Batches
from bert_jax.model import BertForPretraining, from_canonical, to_canonical
from bert_jax.optim import make_optimizer
from bert_jax.parallel import make_mesh
from bert_jax.training.state import abstract_state, initial_params

OWN = Path(__file__).resolve().parents[2]
PARTS = ("updates", "layouts", "phases", "lengths")
VOCABULARY, RATE = 2000, 1e-3
MODEL = (
    f"--model.vocab_size {VOCABULARY} --model.hidden_size 256 --model.num_layers 4 --model.num_attention_heads 4 "
    "--model.intermediate_size 1024 --model.max_position_embeddings 128"
)
RULES = {
    "stable_adamw": [{"weight_decay_type": kind} for kind in ("decoupled", "independent", "l2")],
    "muon": [{"weight_decay_type": "decoupled"}],
}
MESHES = {"fsdp": (1, 8, 1), "zero1": (8, 1, 1), "both": (2, 2, 2)}


class Float64:
    """StableAdamW and Muon (AdamW for what is no matrix of the encoder) in float64 numpy."""

    def __init__(self, config: OptimizerConfig, params: dict[str, np.ndarray]) -> None:
        self.config, self.count = config, 0
        self.params = {name: np.float64(value) for name, value in params.items()}
        self.m = {name: np.zeros_like(value) for name, value in self.params.items()}
        self.v = {name: np.zeros_like(value) for name, value in self.params.items()}

    def step(self, grads: dict[str, np.ndarray]) -> None:
        self.count += 1
        for name, g in grads.items():
            update, shrink = self._direction(name, np.float64(g)), 1.0
            if self.config.name == "stable_adamw":
                g = np.float64(g) + self._decay(name, "l2")
                limit = np.maximum(self.v[name], self.config.epsilon**2)
                shrink = max(1.0, math.sqrt(np.mean(g * g / limit)))
            decay = self._decay(name, "decoupled") + self._decay(name, "independent") / self.config.learning_rate
            self.params[name] = self.params[name] - RATE / shrink * (update + decay)

    def _decay(self, name: str, kind: str) -> Any:
        is_own = self.config.weight_decay_type == kind and not name.endswith(("bias", "scale"))
        return self.config.weight_decay * self.params[name] if is_own else 0.0

    def _direction(self, name: str, g: np.ndarray) -> np.ndarray:
        config, t = self.config, self.count
        if config.name == "muon" and name.startswith("encoder/") and name.endswith("/kernel"):
            self.m[name] = 0.95 * self.m[name] + 0.05 * g
            x = 0.95 * self.m[name] + 0.05 * g
            x /= np.linalg.norm(x)
            x = x.T if x.shape[0] > x.shape[1] else x
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            return 0.2 * math.sqrt(max(g.shape)) * (x if x.shape == g.shape else x.T)
        if config.name == "stable_adamw":
            g = g + self._decay(name, "l2")
            beta1, beta2 = ((b - b**t) / (1 - b**t) for b in (config.beta1, config.beta2))
            scale1 = scale2 = 1.0
        else:
            beta1, beta2 = config.beta1, config.beta2
            scale1, scale2 = 1 - beta1**t, 1 - beta2**t
        self.m[name] = beta1 * self.m[name] + (1 - beta1) * g
        self.v[name] = beta2 * self.v[name] + (1 - beta2) * g * g
        return self.m[name] / scale1 / (np.sqrt(self.v[name] / scale2) + config.epsilon)


def network(scan_layers: bool, mesh: Any = None, **sizes: Any) -> tuple[PretrainConfig, BertForPretraining]:
    words = [f"--execution.scan_layers={scan_layers}", *(f"--{key}={value}" for key, value in sizes.items())]
    config = load_config(PretrainConfig, [*MODEL.split(), *words])
    return config, BertForPretraining(config.model, config.execution, config.has_nsp, mesh)


def gradients(shapes: dict[str, tuple[int, ...]], steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield gradients whose size jumps, with rows of zeros in the word embeddings."""
    rng = np.random.default_rng(1)
    for step in range(steps):
        grads = {n: np.float32(rng.standard_normal(shape) * (1, 30, 0.01)[step % 3]) for n, shape in shapes.items()}
        grads["embeddings/word_embeddings/embedding"][rng.integers(0, VOCABULARY, VOCABULARY)] = 0
        yield grads


def start() -> dict[str, np.ndarray]:
    """Return drawn parameters in the order of their names."""
    params = to_canonical(initial_params(network(False)[1], seed=0), VOCABULARY)
    rng = np.random.default_rng(0)
    return {name: np.float32(rng.standard_normal(params[name].shape) * 0.1) for name in sorted(params)}


def difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest norm of a difference of a parameter over its norm."""
    return max(
        float(np.linalg.norm(np.float64(found[n]) - expected[n]) / np.linalg.norm(np.float64(expected[n])))
        for n in expected
    )


def updated(config: OptimizerConfig, scan_layers: bool, sizes: tuple[int, int, int], steps: int) -> dict[str, Any]:
    """Return canonical parameters after ``steps`` updates on a mesh of ``sizes`` (data, fsdp, tensor)."""
    mesh = make_mesh(
        MeshConfig(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))), jax.devices()[: math.prod(sizes)]
    )
    run, model = network(scan_layers, mesh)
    flat, optimizer = start(), make_optimizer(config, vocab_size=VOCABULARY)
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(run, model, optimizer, mesh))

    def apply(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        direction, state = optimizer.update(grads, state, params)
        return jax.tree.map(lambda p, d: p - RATE * d, params, direction), state

    like = abstract_state(run, model, optimizer, mesh).params
    params = jax.device_put(from_canonical(flat, like, VOCABULARY), places.params)
    state = jax.jit(optimizer.init, out_shardings=places.opt_state)(params)
    step = jax.jit(apply, out_shardings=(places.params, places.opt_state))
    for grads in gradients({name: value.shape for name, value in flat.items()}, steps):
        params, state = step(params, state, jax.device_put(from_canonical(grads, like, VOCABULARY), places.params))
    return to_canonical(jax.device_get(params), VOCABULARY)


def rules() -> Iterator[OptimizerConfig]:
    for name, kinds in RULES.items():
        for kind in kinds:
            yield OptimizerConfig(name=name, clip_norm=0.0, weight_decay=0.1, beta2=0.98, learning_rate=0.1, **kind)


def updates() -> Iterator[dict[str, Any]]:
    for config in rules():
        exact = Float64(config, start())
        for grads in gradients({name: value.shape for name, value in exact.params.items()}, 60):
            exact.step(grads)
        for scan_layers in (False, True):
            off = difference(updated(config, scan_layers, (1, 1, 1), 60), exact.params)
            yield {
                "part": "updates", "optimizer": config.name, "decay": config.weight_decay_type,
                "stacked": scan_layers, "difference": off, "reached": off <= 1e-6,
            }  # fmt: skip


def layouts() -> Iterator[dict[str, Any]]:
    for config in rules():
        if config.weight_decay_type != "decoupled":
            continue
        expected = updated(config, False, (1, 1, 1), 4)
        for name, sizes in {"one device": (1, 1, 1), **MESHES}.items():
            for scan_layers in (False, True):
                if name == "one device" and not scan_layers:
                    continue
                off = difference(updated(config, scan_layers, sizes, 4), expected)
                yield {
                    "part": "layouts", "optimizer": config.name, "mesh": name, "stacked": scan_layers,
                    "difference": off, "reached": off <= 1e-6,
                }  # fmt: skip


def phases() -> Iterator[dict[str, Any]]:
    words = [sys.executable, "-m", "pytest", "-n", "0", "-m", "", "-s", "tests/entry/test_phase_kill.py"]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(words, cwd=OWN, env=environment, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if "kills, phases" in line), done.stdout[-300:])
    yield {"part": "phases", "result": line.lstrip("."), "reached": done.returncode == 0}


def lengths() -> Iterator[dict[str, Any]]:
    """Resolve the lengths of ModernBERT-base (``yamls/modernbert`` of AnswerDotAI/ModernBERT, branch
    pretraining_documentation); the ramp grows by 96 sequences on each of 8 devices at a time."""
    for phase, words, tokens, warmup in (
        ("pretraining", "--data.seq_length 1024 --training.global_batch_size 4608 "
         "--training.batch_ramp 50e9 768 768 --optimizer.warmup_tokens 3e9", 1_719e9, 3e9),
        ("context extension", "--data.seq_length 8192 --training.global_batch_size 576", 250e9, 0),
        ("decay", "--data.seq_length 8192 --training.global_batch_size 576 --optimizer.schedule wsd "
         "--optimizer.wsd_decay one_minus_sqrt --optimizer.wsd_decay_tokens 50e9", 50e9, 0),
    ):  # fmt: skip
        model = "--model.position_embeddings rotary --model.max_position_embeddings 8192 --data.next_sentence none "
        packed = "--data.packing best_fit --training.batch_unit rows"
        words = f"{model} {packed} {words} --training.num_tokens {tokens}"
        config = load_config(PretrainConfig, words.split())
        training, length = config.training, config.data.seq_length
        seen, steps, expected_warmup = 0, 0, 0
        while seen < tokens:
            size = training.global_batch_size
            if training.batch_ramp:
                sizes = range(768, size, 768)
                below = np.cumsum(sizes)
                size = next(
                    (s for s, b in zip(sizes, below, strict=True) if seen < math.ceil(50e9 / sum(sizes) * b)), size
                )
            expected_warmup += seen < warmup
            seen, steps = seen + size * length, steps + 1
        found = training.num_steps, (config.optimizer.warmup_steps if warmup else 0)
        batches = Batches(training.batch_ramp, training.global_batch_size, length)
        yield {
            "part": "lengths", "phase": phase, "tokens": int(tokens), "steps": found[0], "warmup_steps": found[1],
            "ramp": list(training.batch_ramp), "decay_steps": config.optimizer.wsd_decay_steps,
            "tokens_of_steps": batches.tokens(found[0]),
            "reached": found == (steps, expected_warmup) and batches.tokens(found[0]) == seen,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    reached = True
    for part in parser.parse_args().parts:
        for row in {"updates": updates, "layouts": layouts, "phases": phases, "lengths": lengths}[part]():
            print(json.dumps(row), flush=True)
            reached &= bool(row["reached"])
    sys.exit(0 if reached else 3)


if __name__ == "__main__":
    main()
