"""Predicted speed of BERT-base's training step on a TPU slice: ours and that of transformers' Flax BERT.

    nice python studies/tpu/tpu_estimate.py --peer_python PEER/bin/python

Both are compiled ahead of time for the slice (no TPU is used) with the same cost estimate
(docs/design/tpu-performance.md): BERT-base at length 128, bfloat16, dropout 0.1, AdamW with clipping, collectives
included. Theirs is ``FlaxBertForPreTraining`` of transformers 4.57, the last with Flax, with the vocabulary
projection on all positions and gradients averaged by one ``pmean``, as in its published example. Both unroll the
layers. The peer's Python needs what ``benchmarks/requirements.lock`` lists and ``libtpu``. Each of the four
compilations takes minutes.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LENGTH, MASKED, VOCAB = 128, 20, 30522
BAR = 1.3


def main() -> int:
    """Print one line per variant and the ratios; return 3 if this library misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--rows", type=int, default=64, help="sequences per chip")
    parser.add_argument("--peer_python", default=sys.executable)
    parser.add_argument("--prng", nargs="*", default=["rbg", "threefry"], choices=["hash", "rbg", "threefry"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--worker", nargs=2, metavar=("WHO", "PRNG"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        who, prng = arguments.worker
        text = {"ours": ours, "xla": without_kernels, "flax": flax}[who](
            arguments.topology, arguments.rows, prng, arguments.layers
        )
        print(json.dumps(cost_of(text, arguments.topology)))
        return 0
    rates: dict[tuple[str, str], float] = {}
    for prng in arguments.prng:
        for who, python in (("ours", sys.executable), ("flax", arguments.peer_python)):
            line = run(python, who, prng, arguments)
            rates[who, prng] = arguments.rows * LENGTH / line["seconds"]
            print(
                f"{who:5} {prng:9} {line['seconds'] * 1e3:7.2f} ms/step, {rates[who, prng]:9,.0f} tokens/s/chip,"
                f" exposed communication {line['communication_seconds'] * 1e3:.2f} ms",
                flush=True,
            )
    for mine, theirs in (("rbg", "rbg"), ("threefry", "threefry"), ("rbg", "threefry")):
        if ("ours", mine) in rates and ("flax", theirs) in rates:
            print(f"ours {mine} / flax {theirs}: {rates['ours', mine] / rates['flax', theirs]:.2f}")
    reached = "rbg" not in arguments.prng or rates["ours", "rbg"] >= BAR * rates["flax", "rbg"]
    return 0 if reached else 3


def run(python: str, who: str, prng: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the cost of one variant, compiled in a separate process."""
    command = [python, __file__, "--topology", arguments.topology, "--rows", str(arguments.rows)]
    command += ["--layers", str(arguments.layers), "--worker", who, prng]
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def cost_of(text: str, topology: str) -> dict[str, float]:
    """Return the cost of the compiled program on one chip of the slice."""
    from bert_jax.contrib.planner.cycles import step_cost
    from bert_jax.contrib.planner.topology import parse_topology

    place = parse_topology(topology)
    found = dataclasses.asdict(step_cost(text, place.chip, {"data": place.num_devices}, place.shape))
    return {name: value for name, value in found.items() if isinstance(value, float)}


def without_kernels(topology: str, rows: int, prng: str, layers: int) -> str:
    """The project's own step without its TPU kernels."""
    return ours(topology, rows, prng, layers, "xla")


def ours(topology: str, rows: int, prng: str, layers: int, kernels: str = "auto") -> str:
    """The project's own step, as the training loop compiles it."""
    from bert_jax.contrib.planner.topology import parse_topology, prepare_environment, tpu_devices

    prepare_environment()
    from bert_jax.config import PretrainConfig, load_config
    from bert_jax.objectives.registry import objective_class
    from bert_jax.parallel import make_mesh
    from bert_jax.training.programs import pretraining_batch, train_programs

    devices = tpu_devices(parse_topology(topology))
    settings = {
        "model.num_layers": layers, "execution.dtype": "bfloat16", "execution.prng": prng,
        "execution.attention": kernels, "execution.residual_norm": kernels,
        "data.corpus": "none", "data.seq_length": LENGTH, "data.max_predictions": MASKED,
        "training.global_batch_size": rows * len(devices),
    }  # fmt: skip
    config = load_config(
        PretrainConfig, [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    )
    mesh = make_mesh(config.mesh, devices)
    objective = objective_class(config.objective)(config, mesh)
    programs = train_programs(objective)
    batch = pretraining_batch(objective, rows * len(devices))
    text: str = programs.step_for(batch).as_text()  # type: ignore[attr-defined]
    return text


def flax(topology: str, rows: int, prng: str, layers: int) -> str:
    """transformers' Flax BERT, data parallel as in its published example, with ``optax.adamw`` and clipping."""
    from bert_jax.contrib.planner.topology import parse_topology, prepare_environment, tpu_devices

    prepare_environment()
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from transformers import BertConfig, FlaxBertForPreTraining

    mesh = Mesh(np.array(tpu_devices(parse_topology(topology))), ("data",))
    config = BertConfig(num_hidden_layers=layers)
    model = FlaxBertForPreTraining(config, input_shape=(1, LENGTH), dtype=jnp.bfloat16, _do_init=False)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.linear_schedule(0.0, 1e-4, 10_000), eps=1e-6, weight_decay=0.01),
    )

    def loss_function(params: Any, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
        outputs = model(**inputs, params=params, dropout_rng=key, train=True)
        mask = batch["labels"] >= 0
        nll = optax.softmax_cross_entropy_with_integer_labels(
            outputs.prediction_logits, jnp.where(mask, batch["labels"], 0)
        )
        next_sentence = optax.softmax_cross_entropy_with_integer_labels(
            outputs.seq_relationship_logits, batch["next_sentence_label"]
        )
        return jnp.sum(nll * mask) / jnp.sum(mask) + jnp.mean(next_sentence)

    def train_step(params: Any, state: Any, batch: dict[str, jax.Array], step: jax.Array) -> tuple[Any, ...]:
        key = jax.random.key(0, impl={"threefry": "threefry2x32"}.get(prng, prng))
        key = jax.random.fold_in(jax.random.fold_in(key, step), jax.lax.axis_index("data"))
        loss, grads = jax.value_and_grad(loss_function)(params, batch, key)
        updates, state = optimizer.update(jax.lax.pmean(grads, "data"), state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "data")

    whole, cut = PartitionSpec(), PartitionSpec("data")
    mapped = jax.shard_map(
        train_step, mesh=mesh, in_specs=(whole, whole, cut, whole), out_specs=whole, check_vma=False
    )

    def shape(x: Any, spec: PartitionSpec = whole) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, LENGTH)))
    state = jax.eval_shape(optimizer.init, params)
    features = ("input_ids", "attention_mask", "token_type_ids", "labels")
    sizes = {name: (rows * mesh.size, LENGTH) for name in features} | {"next_sentence_label": (rows * mesh.size,)}
    batch = {name: shape(jax.ShapeDtypeStruct(size, jnp.int32), cut) for name, size in sizes.items()}
    arguments = (jax.tree.map(shape, params), jax.tree.map(shape, state), batch, shape(jnp.zeros((), jnp.int32)))
    return jax.jit(mapped, donate_argnums=(0, 1)).lower(*arguments).compile().as_text()


if __name__ == "__main__":
    sys.exit(main())
