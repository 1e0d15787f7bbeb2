"""Generation of text by causal language models: tokens against transformers, logits with a cache, speed.

    python studies/generation/generation.py [--peer_python PYTHON] [--model FILE] [--new_tokens N]

Draws the weights of ``--model``, a file in configs/models of the family gpt2 (default: gpt2, 124 million
parameters), and continues four prompts of different lengths by ``--new_tokens`` (200) tokens, greedily.

* tokens: the same folder in ``GPT2LMHeadModel.generate`` of PYTHON (an environment with torch and transformers),
  float32, padding on the left (bar: equal tokens, but for rows whose two highest logits differ by less than 1e-4).
* cache: logits of each of these tokens with cached keys and values against one pass over the whole rows (bar: 1e-5
  x max(1, largest)).
* speed: seconds per token of the batch with the cache, and of one pass over the whole rows.

Prints a JSON line per row. Exit code 3 below a bar.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import HeadsConfig, ModelSpec, PretrainConfig, load_config
from bert_jax.contrib.generation.generate import cached_logits, generate_ids, language_model
from bert_jax.inference.loaded import LoadedModel, prepare
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.interop.hf.write import write_hf

MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
LENGTHS, BAR, TIE = (37, 12, 1, 25), 1e-5, 1e-4
RUN = """
import json, sys, time, numpy as np, torch, transformers
ids, mask = np.load(sys.argv[2])
model = transformers.GPT2LMHeadModel.from_pretrained(sys.argv[1]).eval()
settings = dict(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=int(sys.argv[3]))
start = time.perf_counter()
tokens = model.generate(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **settings)
seconds = time.perf_counter() - start
print(json.dumps([transformers.__version__, tokens[:, ids.shape[1]:].tolist(), seconds]))
"""


def drawn(model_file: str) -> ModelBundle:
    """Return the model with random weights, larger than initial ones, so that tokens differ."""
    arguments = ["--config", str(MODELS / f"{model_file}.yaml"), "--data.next_sentence", "none"]
    model = dataclasses.replace(load_config(PretrainConfig, arguments).model, tied_output=False)
    spec = ModelSpec(model=model, heads=HeadsConfig(mlm=True), family=model.family)
    rng, params = np.random.default_rng(0), {}
    for name, shape in parameter_shapes(spec).items():
        if name.endswith(("scale", "bias")):
            params[name] = np.full(shape, float(name.endswith("scale")), np.float32)
        else:
            params[name] = 0.06 * rng.standard_normal(shape, np.float32)
    return ModelBundle(spec=spec, params=params)


def padded(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask with padding on the left, int64[B, P]."""
    length = max(map(len, prompts))
    ids, mask = np.zeros((2, len(prompts), length), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :], mask[row, length - len(prompt) :] = prompt, 1
    return ids, mask


def peer_tokens(python: str, weights: ModelBundle, batch: Any, new: int) -> tuple[str, np.ndarray, float]:
    """Return the release of transformers, its tokens, and its seconds."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        folder.mkdir()
        write_hf(folder, weights)
        np.save(Path(root) / "batch.npy", np.stack(batch))
        command = [python, "-c", RUN, str(folder), str(Path(root) / "batch.npy"), str(new)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, check=True)
    version, tokens, seconds = json.loads(done.stdout.splitlines()[-1])
    return version, np.array(tokens), seconds


def cached_difference(
    loaded: LoadedModel, rows: tuple[np.ndarray, np.ndarray], new: int
) -> tuple[float, np.ndarray, float]:
    """Return the largest difference of the logits of the last ``new`` columns of ids and mask with a cache from
    those without, divided by max(1, largest), the logits without, [B, new, V], and the seconds that they took."""
    ids, mask = rows
    total = ids.shape[1]
    columns = total - new + 1
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    arrays = [jnp.asarray(x, jnp.int32) for x in (ids, mask, positions)]
    network = language_model(loaded)
    apply = jax.jit(lambda params, features: network.apply({"params": params}, features).mlm_logits)
    features = dict(zip(("input_ids", "sequence_ids", "position_ids"), arrays, strict=True))
    features["token_type_ids"] = jnp.zeros_like(arrays[0])
    features["mlm_positions"] = jnp.tile(jnp.arange(columns - 1, total), (len(ids), 1))
    apply(loaded.params, features).block_until_ready()
    start = time.perf_counter()
    whole = np.asarray(apply(loaded.params, features))
    seconds = time.perf_counter() - start
    run, cache, largest = jax.jit(cached_logits, static_argnums=0), {}, 0.0
    for i in range(new):
        first, last = (0, columns) if i == 0 else (columns + i - 1, columns + i)
        part = [x[:, first:last] for x in arrays]
        found, cache = run(network, loaded.params, cache, *part, arrays[1], jnp.int32(first))
        largest = max(largest, float(np.abs(np.asarray(found) - whole[:, i]).max()))
    return largest / max(1.0, float(np.abs(whole).max())), whole, seconds


def compared(ours: np.ndarray, theirs: np.ndarray, logits: np.ndarray) -> dict[str, Any]:
    """Return the figures for the tokens of this library and of transformers, int[B, N]; ``logits`` [B, N, V] are
    those from which ours were chosen."""
    best = np.sort(logits, axis=-1)[..., -2:]
    margins = best[..., 1] - best[..., 0]
    equal = ours == theirs
    ties = [bool(not row.all() and margin[row.argmin()] < TIE) for row, margin in zip(equal, margins, strict=True)]
    return {
        "part": "tokens", "equal": int(equal.sum()), "of": equal.size,
        "smallest_margin": float(f"{margins.min():.3g}"), "rows_that_differ_after_a_tie": sum(ties),
        "reached": all(row.all() or tie for row, tie in zip(equal, ties, strict=True)),
    }  # fmt: skip


def main() -> int:
    """Measure, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer_python", help="a Python with torch and transformers")
    parser.add_argument("--model", default="gpt2", choices=sorted(path.stem for path in MODELS.glob("gpt2*.yaml")))
    parser.add_argument("--new_tokens", type=int, default=200)
    options = parser.parse_args()
    weights, new = drawn(options.model), options.new_tokens
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, weights.spec.model.vocab_size - 1, length).tolist() for length in LENGTHS]
    loaded = prepare(weights)
    generate_ids(loaded, prompts, max_new_tokens=new)  # compiles
    start = time.perf_counter()
    tokens = np.array([ids for ids, _ in generate_ids(loaded, prompts, max_new_tokens=new)])
    seconds = time.perf_counter() - start
    ids, mask = padded(prompts)
    # The last token is not an input of the model.
    rows = np.concatenate([ids, tokens[:, :-1]], axis=1), np.pad(mask, ((0, 0), (0, new - 1)), constant_values=1)
    difference, logits, pass_seconds = cached_difference(loaded, rows, new)
    speed = {"seconds_per_token": round(seconds / new, 4), "one_pass_seconds": round(pass_seconds, 3)}
    results: list[dict[str, Any]] = [
        {"part": "cache", "largest_difference": float(f"{difference:.3g}"), "reached": difference <= BAR}
    ]
    if options.peer_python:
        version, theirs, peer_seconds = peer_tokens(options.peer_python, weights, (ids, mask), new)
        results.insert(0, compared(tokens, theirs, logits) | {"transformers": version})
        speed["seconds_per_token_transformers"] = round(peer_seconds / new, 4)
    results.append({"part": "speed"} | speed)
    about = {"command": f"python studies/generation/generation.py --model {options.model}", "prompts": len(prompts)}
    about |= {"new_tokens": new, "different_tokens": len(np.unique(tokens))}
    for result in results:
        print(json.dumps(about | result), flush=True)
    return 0 if all(result.get("reached", True) for result in results) else 3


if __name__ == "__main__":
    sys.exit(main())
