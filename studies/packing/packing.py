"""Packed rows against unpacked ones: the same values, the same training, and the padding that they save.

    python studies/packing/packing.py same|train|fill|tpu --corpora TEXT [TEXT ...] --vocab VOCAB [VOCAB ...]

* same: about 40 sequences of at most 256 tokens, in packed rows and each in a row of its own, with dropout:
  relative differences of the loss and of the gradients (of the worst tensor), differences of pooled vectors and
  pair logits, gradient of one sequence with respect to others; 8 virtual devices, 4 microbatches (bars: 1e-6; 0).
* train: 300 steps of about 16 such sequences from one initialization, in one order, packed and unpacked, 3 seeds:
  the first step whose losses differ by more than 1e-4; held-out losses at the end (bar: the means differ by no more
  than the spread of the seeds).
* fill: for each corpus and each length, share of the tokens that are not padding (bar: 0.98 at 512), sequences left
  over, time and memory of the build over those of an unpacked build (1.3), and real tokens per second of a step on
  the CPU over those of unpacked rows (0.9 of the inverse of the unpacked share, if padding is above 5%).
* tpu: the last figure for BERT-base (4 layers) on v5e:2x2, compiled ahead of time and costed.

``--vocab`` is one file, or one per corpus. Prints JSON lines; exit code 3 below a bar.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import numpy as np

STEPS, SEEDS = 300, 3
LENGTHS = (128, 512, 1024)


def settings(corpus: str, vocab: str, folder: Path, length: int, packing: str, **more: Any) -> list[str]:
    """Return the arguments of ``bert-data shards`` and of a config."""
    values = {
        "data.corpus": corpus, "data.vocab": vocab, "data.shards": folder / packing, "data.packing": packing,
        "data.seq_length": length, "data.max_predictions": max(20, round(0.15 * length)), "data.dupe_factor": 1,
        "data.num_shards": 8, "data.token_store": folder.parent / "store", "model.max_position_embeddings": 1024,
        "model.vocab_size": 30522,
    }  # fmt: skip
    return [word for name, value in (values | more).items() for word in (f"--{name}", str(value))]


def build(arguments: list[str]) -> tuple[float, int]:
    """Build shards in a process of their own; return its seconds and the largest memory of a process, in bytes."""
    began, command = time.perf_counter(), [sys.executable, "-m", "bert_jax.commands.data", "shards", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"bert-data shards failed: {' '.join(command)}")
    return time.perf_counter() - began, 1024 * usage.ru_maxrss


def unpack(batch: dict[str, np.ndarray], rows: int, predictions: int) -> dict[str, np.ndarray]:
    """Return the sequences of a packed batch in ``rows`` rows of their own, in their order; others are blank."""
    from bert_jax.batch import feature_shapes

    shapes = feature_shapes(rows, batch["input_ids"].shape[1], predictions)
    single = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
    for number, (row, slot) in enumerate(np.argwhere(batch["nsp_weights"] > 0)):
        own = np.flatnonzero(batch["sequence_ids"][row] == slot + 1)
        for name in ("input_ids", "token_type_ids", "position_ids"):
            single[name][number, : len(own)] = batch[name][row, own]
        single["sequence_ids"][number, : len(own)] = 1
        masks = (batch["mlm_weights"][row] > 0) & np.isin(batch["mlm_positions"][row], own)
        single["mlm_positions"][number, : masks.sum()] = batch["mlm_positions"][row, masks] - own[0]
        single["mlm_labels"][number, : masks.sum()] = batch["mlm_labels"][row, masks]
        single["mlm_weights"][number, : masks.sum()] = 1
        for name in ("sequence_keys", "nsp_labels", "nsp_weights"):
            single[name][number] = batch[name][row, slot]
    return single


def config_of(arguments: list[str], *more: str) -> Any:
    """Return the config of a small model in float32."""
    from bert_jax.config import PretrainConfig, load_config

    model = (
        "--model.hidden_size 64 --model.num_layers 2 --model.num_attention_heads 2 --model.intermediate_size 256 "
        "--execution.dtype float32 --optimizer.learning_rate 1e-3 --optimizer.warmup_steps 30"
    )
    return load_config(PretrainConfig, [*arguments, *model.split(), f"--training.num_steps={STEPS}", *more])


def source_of(config: Any) -> Any:
    """Return the source of the shards of ``config``."""
    from bert_jax.tokenization import load_tokenizer
    from data_pipeline.read.pretrain_input import ShardSource

    return ShardSource(config, load_tokenizer(Path(config.data.vocab)))


def worst(tree: Any, reference: Any) -> tuple[str, float]:
    """Return the name of the tensor with the largest norm of a difference over the norm of its reference, and this
    ratio. Norms count as at least 1e-4 of the norm of all tensors."""
    from bert_jax.model import to_canonical

    trees = [to_canonical(one, 30522) for one in (tree, reference)]
    total = float(np.sqrt(sum(np.sum(np.square(np.float64(values))) for values in trees[1].values())))
    errors = {}
    for name, expected in trees[1].items():
        difference = np.linalg.norm(np.float64(trees[0][name]) - np.float64(expected))
        errors[name] = float(difference / max(np.linalg.norm(np.float64(expected)), 1e-4 * total))
    name = max(errors, key=lambda name: errors[name])
    return name, errors[name]


def same(corpus: str, vocab: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the differences of the values of packed and unpacked rows."""
    import jax
    import jax.numpy as jnp

    from bert_jax.model import BertForPretraining
    from bert_jax.model.dropout import TOKEN_FEATURES, TokenKey
    from bert_jax.objectives.masked_lm import MaskedLm
    from bert_jax.parallel import make_mesh, to_global
    from bert_jax.training.state import initial_params
    from bert_jax.training.step import loss_and_gradients

    arguments = settings(corpus, vocab, folder, 256, "best_fit")
    build(arguments)
    config = config_of(arguments, "--training.global_batch_size", "192")
    source = source_of(config)
    size = next(n for n in range(24, 10_000) if source.row_shape.rows(n) % 32 == 0)
    config = config_of(arguments, "--training.global_batch_size", str(size))
    source = source_of(config)
    packed, _ = next(source.train(list(range(source.row_shape.rows(size)))))
    unpacked = unpack(packed, int((packed["nsp_weights"] > 0).sum()), config.data.max_predictions)

    def run(batch: Any, mesh: Any = None, accumulation: int = 1) -> Any:
        objective = MaskedLm(config, mesh)
        params = initial_params(BertForPretraining(config.model, config.execution, True, mesh), 0)
        values = batch if mesh is None else to_global(batch, mesh, len(batch["input_ids"]))
        step = jax.jit(
            lambda params, values: loss_and_gradients(objective, params, values, jax.random.key(1), accumulation)
        )
        return jax.device_get(step(params, values)[:2])

    loss, gradients = run(unpacked)
    mesh = make_mesh(config.mesh)
    for name, found in (
        ("unpacked rows in reverse order", run({name: values[::-1] for name, values in unpacked.items()})),
        ("one device", run(packed)),
        ("4 microbatches", run(packed, None, 4)),
        ("8 devices", run(packed, mesh)),
        ("8 devices, 4 microbatches", run(packed, mesh, 4)),
    ):
        tensor, error = worst(found[1], gradients)
        line = {"sequences": len(unpacked["input_ids"]), "rows": len(packed["input_ids"])}
        line |= {"loss": abs(float(found[0] / loss) - 1), "gradients": error, "tensor": tensor}
        is_rounding = name.startswith("unpacked")  # the same rows in another order show the rounding of sums
        yield {"measured": name, **line, "reached": is_rounding or max(line["loss"], error) <= 1e-6}

    model = BertForPretraining(config.model, config.execution, True)
    params = initial_params(model, 0)
    outputs = []
    for batch in (unpacked, packed):
        there = batch["nsp_weights"] > 0
        key = TokenKey.of(jax.random.key(1), *(jnp.asarray(batch[name]) for name in TOKEN_FEATURES))
        output = jax.jit(model.apply)({"params": params}, batch, key)
        outputs.append([np.asarray(values)[there] for values in (output.pooled_output, output.nsp_logits)])
    values = {
        name: float(np.abs(one - other).max())
        for name, one, other in zip(("pooled vectors", "pair logits"), *outputs, strict=True)
    }
    yield {"measured": "outputs, absolute", **values, "reached": max(values.values()) <= 1e-6}

    features = {name: jnp.asarray(values) for name, values in packed.items()}
    key = TokenKey.of(jax.random.key(1), *(features[name] for name in TOKEN_FEATURES))
    x = jax.random.normal(jax.random.key(2), (*packed["input_ids"].shape, config.model.hidden_size))

    def encoded(x: Any) -> Any:
        def encode(model: Any) -> Any:
            return model.encoder(x, features["sequence_ids"], features["position_ids"], key)[0]

        return model.apply({"params": params}, method=encode)

    back = jax.jit(lambda x, cotangent: jax.vjp(encoded, x)[1](cotangent)[0])
    foreign = 0.0
    for slot in range(1, int(packed["sequence_ids"].max()) + 1):
        own = (packed["sequence_ids"] == slot)[..., None]
        cotangent = jnp.where(own, jax.random.normal(jax.random.key(slot), x.shape), 0)
        gradient = np.asarray(back(x, cotangent))
        others = ((packed["sequence_ids"] > 0) & (packed["sequence_ids"] != slot))[..., None]
        foreign = max(foreign, float(np.abs(np.where(others, gradient, 0)).max()))
    yield {"measured": "gradient across sequences", "largest": foreign, "reached": foreign == 0}


def train(corpus: str, vocab: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the losses of packed and unpacked training for each seed, and their comparison."""
    import jax

    from bert_jax.objectives.masked_lm import MaskedLm
    from bert_jax.parallel import make_mesh
    from bert_jax.training.programs import make_programs
    from bert_jax.training.state import initial_state

    arguments = settings(corpus, vocab, folder, 256, "best_fit")
    build(arguments)
    finals: dict[str, list[float]] = {"packed": [], "unpacked": []}
    for seed in range(SEEDS):
        config = config_of(arguments, "--training.global_batch_size", "16", "--training.seed", str(seed))
        source = source_of(config)
        rows = source.row_shape.rows(16)
        batches = source.train(list(range(rows)))
        packed = [next(batches)[0] for _ in range(STEPS)]
        most = max(int((batch["nsp_weights"] > 0).sum()) for batch in packed)
        held_out = list(source.held_out(16, list(range(16)), 0))
        largest = max(int((batch["nsp_weights"] > 0).sum()) for batch in held_out)
        losses = {}
        for name in finals:
            mesh = make_mesh(config.mesh, jax.devices()[:1])
            programs = make_programs(MaskedLm(config, mesh))
            state = initial_state(programs.model, programs.optimizer, programs.abstract, seed)
            losses[name] = []
            for batch in packed:
                features = batch if name == "packed" else unpack(batch, most, config.data.max_predictions)
                state, metrics = programs.step_for(features)(state, features)
                losses[name].append(metrics.unpack()["loss"])
            totals = np.zeros((2, 2))
            for batch in held_out:
                features = batch if name == "packed" else unpack(batch, largest, config.data.max_predictions)
                sums = jax.device_get(programs.eval_step(programs.gather(state), features))
                totals += np.array([sums["mlm_loss"], sums["nsp_loss"]])
            finals[name].append(float((totals[:, 0] / totals[:, 1]).sum()))
        differences = np.abs(np.array(losses["packed"]) - np.array(losses["unpacked"]))
        above = np.flatnonzero(differences > 1e-4)
        yield {
            "seed": seed, "rows": rows, "first_step_above_1e-4": int(above[0]) if len(above) else None,
            "largest_difference_of_first_100_steps": float(differences[:100].max()),
            "largest_difference": float(differences.max()), "last_loss": losses["packed"][-1],
            "held_out": {name: values[-1] for name, values in finals.items()}, "reached": True,
        }  # fmt: skip
    spread = float(np.ptp(finals["unpacked"]))
    difference = float(abs(np.mean(finals["packed"]) - np.mean(finals["unpacked"])))
    yield {"difference_of_means": difference, "spread_of_seeds": spread, "reached": difference <= spread}


def facts_of(folder: Path, length: int) -> dict[str, Any]:
    """Return counts of the training shards in ``folder``, packed or not."""
    from data_pipeline.shards.shard_files import read_manifest

    manifest = read_manifest(folder / "train")
    assert manifest is not None
    counts = manifest["counts"]
    rows = counts.get("rows", counts["instances"])
    return {"instances": counts["instances"], "rows": rows, **manifest.get("packing", {}), "cells": rows * length}


def step_seconds(config: Any, shapes: Sequence[Any], rows: int) -> list[float]:
    """Return the seconds of a training step of ``rows`` rows of each of ``shapes`` on the CPU: the least of seven
    alternating turns."""
    import jax

    from bert_jax.objectives.masked_lm import MaskedLm
    from bert_jax.parallel import make_mesh
    from bert_jax.training.programs import make_programs
    from bert_jax.training.state import initial_state

    mesh = make_mesh(config.mesh, jax.devices()[:1])
    programs = make_programs(MaskedLm(config, mesh))
    state = initial_state(programs.model, programs.optimizer, programs.abstract, 0)
    turns: list[list[float]] = []
    for _ in range(8):
        turns.append([])
        for shape in shapes:
            batch = {name: np.zeros(size, dtype) for name, (size, dtype) in shape.features(rows).items()}
            step = programs.step_for(batch)
            began = time.perf_counter()
            state, metrics = step(state, batch)
            metrics.unpack()
            turns[-1].append(time.perf_counter() - began)
    return [min(seconds) for seconds in zip(*turns[1:], strict=True)]


def tpu_seconds(config: Any, shapes: Sequence[Any], rows: int) -> list[float]:
    """Return the estimated seconds of a step of ``rows`` rows per chip of each of ``shapes`` on v5e:2x2."""
    from bert_jax.contrib.planner.cycles import step_cost
    from bert_jax.contrib.planner.topology import parse_topology, prepare_environment, tpu_devices
    from bert_jax.objectives.masked_lm import MaskedLm
    from bert_jax.parallel import make_mesh
    from bert_jax.training.programs import make_programs, pretraining_batch

    prepare_environment()
    place = parse_topology("v5e:2x2")
    objective = MaskedLm(config, make_mesh(config.mesh, tpu_devices(place)))
    seconds = []
    for shape in shapes:
        objective.row_shape = shape
        step: Any = make_programs(objective).step_for(pretraining_batch(objective, rows * place.num_devices))
        cost = step_cost(step.as_text(), place.chip, {"data": place.num_devices}, place.shape)
        seconds.append(float(cost.seconds))
    return seconds


def saved(corpus: str, vocab: str, folder: Path, *, on_tpu: bool) -> Iterator[dict[str, Any]]:
    """Yield, for each length, the share of padding and the gain in real tokens per second."""
    from bert_jax.batch import RowShape

    for length in LENGTHS:
        place = folder / str(length)
        built: dict[str, tuple[float, int]] = {}
        for packing in ("none", "best_fit"):
            arguments = settings(corpus, vocab, place, length, packing)
            if packing == "none" and length == LENGTHS[0]:
                build(settings(corpus, vocab, folder / "first", length, packing))  # the token store
            built[packing] = build(arguments)
        unpacked, packed = facts_of(place / "none", length), facts_of(place / "best_fit", length)
        tokens = packed["tokens"]
        shares = {"unpacked": tokens / unpacked["cells"], "packed": tokens / packed["cells"]}
        arguments = settings(corpus, vocab, place, length, "best_fit")
        shape = source_of(config_of(arguments)).row_shape
        plain = RowShape(length, config_of(arguments).data.max_predictions)
        rows = max(8192 // length, 8)
        measure, more = (tpu_seconds, TPU) if on_tpu else (step_seconds, ())
        times = measure(config_of(arguments, *more), (plain, shape), rows)
        gain = shares["packed"] / times[1] / (shares["unpacked"] / times[0])
        allowed = 1 / shares["unpacked"]
        line = {
            "corpus": Path(corpus).name, "length": length, "share": shares,
            "sequences_per_row": packed["instances"] / packed["rows"], "most": shape.sequences_per_row,
            "predictions": [plain.max_predictions, shape.max_predictions],
            "left_over": unpacked["instances"] - packed["instances"], "real_tokens_per_second": gain,
            "of_allowed": gain / allowed,
        }  # fmt: skip
        is_good = gain / allowed >= 0.9 or shares["unpacked"] > 0.95
        if not on_tpu:
            seconds, memory = (built["best_fit"][i] / built["none"][i] for i in (0, 1))
            line |= {"build_time": seconds, "build_memory": memory}
            is_good &= seconds <= 1.3 and line["left_over"] == 0
        is_good &= length != 512 or shares["packed"] >= 0.98
        yield line | {"reached": bool(is_good)}


TPU = (
    "--model.hidden_size=768", "--model.num_layers=4", "--model.num_attention_heads=12",
    "--model.intermediate_size=3072", "--execution.dtype=bfloat16",
)  # fmt: skip


def main() -> int:
    """Measure one part and print its lines; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("same", "train", "fill", "tpu"))
    parser.add_argument("--corpora", nargs="+", required=True, help="text files or folders")
    parser.add_argument("--vocab", nargs="+", required=True)
    options = parser.parse_args()
    vocabularies = options.vocab * len(options.corpora) if len(options.vocab) == 1 else options.vocab
    reached = True
    for corpus, vocab in zip(options.corpora, vocabularies, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "shards"
            if options.part in ("fill", "tpu"):
                lines = saved(corpus, vocab, place, on_tpu=options.part == "tpu")
            else:
                lines = {"same": same, "train": train}[options.part](corpus, vocab, place)
            for line in lines:
                print(json.dumps({"part": options.part, **line}), flush=True)
                reached &= bool(line["reached"])
    return 0 if reached else 3


if __name__ == "__main__":
    sys.exit(main())
