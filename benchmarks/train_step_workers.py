"""Training steps of BERT-base on the CPU, one implementation per process; driven by ``train_step_cpu.py``.

    python benchmarks/train_step_workers.py NAME [base|minilm]

NAME: ours, ours_bfloat16, flax, or torch and torch_masked with _float32 or _bfloat16. Every step is forward,
backward and AdamW on one batch with dropout 0.1: 8 x 128 tokens of BERT-base, or 16 x 128 of a BERT with the sizes
of MiniLM. Ours and torch_masked gather the 20 masked positions before the vocabulary projection, and torch_masked
allows the fastest float32 products; flax and torch project every position, as published.
Once ready, a worker reads a number of steps per line from standard input and answers with one JSON line.
"""

import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np
from synthetic_batch import synthetic_batch

LENGTH, MASKED, VOCAB = 128, 20, 30522
SMALL = sys.argv[2:] == ["minilm"]
ROWS = 16 if SMALL else 8
SIZES = {"hidden_size": 384, "intermediate_size": 1536} if SMALL else {}
LAYERS = 6 if SMALL else 12
LEARNING_RATE, WARMUP, WEIGHT_DECAY, EPSILON = 1e-4, 10_000, 0.01, 1e-6
Step = Callable[[], float]


def reference_batch() -> dict[str, np.ndarray]:
    """Return the shared batch with the feature names of the peers: labels on all positions, -100 without a
    target."""
    batch = synthetic_batch(ROWS, LENGTH, MASKED, VOCAB)
    labels = np.full((ROWS, LENGTH), -100, np.int64)
    np.put_along_axis(labels, batch["mlm_positions"].astype(np.int64), batch["mlm_labels"], axis=1)
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["sequence_ids"],
        "token_type_ids": batch["token_type_ids"],
        "labels": labels,
        "next_sentence_label": batch["nsp_labels"][:, 0],
    }


def ours(dtype: str = "float32") -> Step:
    """The project's own training step, as the training loop compiles it: clipping and the non-finite guard in."""
    import jax
    import jax.numpy as jnp
    from flax import linen as nn

    from bert_jax.config import ExecutionConfig, ModelConfig, OptimizerConfig, PretrainConfig
    from bert_jax.objectives.masked_lm import MaskedLm
    from bert_jax.optim import make_optimizer
    from bert_jax.training.state import TrainState, initial_params, key_words, make_prng_key
    from bert_jax.training.step import make_train_step

    config = OptimizerConfig(learning_rate=LEARNING_RATE, warmup_steps=WARMUP, weight_decay=WEIGHT_DECAY)
    sizes = ModelConfig(**SIZES, num_layers=LAYERS, num_attention_heads=12)
    execution = ExecutionConfig(dtype=dtype)
    objective = MaskedLm(PretrainConfig(model=sizes, optimizer=config, execution=execution), None)
    model = objective.model
    optimizer = make_optimizer(config)
    step, words = make_train_step(objective, optimizer), key_words(make_prng_key(execution, 0))
    compiled = jax.jit(step, donate_argnums=0)
    params = nn.unbox(jax.jit(lambda: initial_params(model, 0))())
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    batch = jax.device_put(synthetic_batch(ROWS, LENGTH, MASKED, VOCAB))

    def run() -> float:
        nonlocal state
        state, metrics = compiled(state, batch, objective.fixed, words)
        jax.block_until_ready(state)
        return float(metrics.unpack()["loss"])

    return run


def flax() -> Step:
    """transformers' Flax BERT (4.57, the last with Flax) with ``optax.adamw`` under ``jax.jit``."""
    import jax
    import jax.numpy as jnp
    import optax
    from transformers import BertConfig, FlaxBertForPreTraining

    model = FlaxBertForPreTraining(BertConfig(**SIZES, num_hidden_layers=LAYERS), input_shape=(1, LENGTH), seed=0)
    schedule = optax.linear_schedule(0.0, LEARNING_RATE, WARMUP)
    optimizer = optax.adamw(schedule, eps=EPSILON, weight_decay=WEIGHT_DECAY, mask=decayed)
    arrays = reference_batch()
    batch = jax.device_put({n: v.astype(np.int32) for n, v in arrays.items()})

    def loss_function(params: dict, batch: dict, key: jax.Array) -> jax.Array:
        inputs = {n: batch[n] for n in ("input_ids", "attention_mask", "token_type_ids")}
        outputs = model(**inputs, params=params, dropout_rng=key, train=True)
        mask = batch["labels"] >= 0
        nll = optax.softmax_cross_entropy_with_integer_labels(
            outputs.prediction_logits, jnp.where(mask, batch["labels"], 0)
        )
        next_sentence = optax.softmax_cross_entropy_with_integer_labels(
            outputs.seq_relationship_logits, batch["next_sentence_label"]
        )
        return jnp.sum(nll * mask) / jnp.sum(mask) + jnp.mean(next_sentence)

    def train_step(params: dict, state: tuple, batch: dict, key: jax.Array) -> tuple:
        key, dropout_key = jax.random.split(key)
        loss, grads = jax.value_and_grad(loss_function)(params, batch, dropout_key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, key, loss

    compiled = jax.jit(train_step, donate_argnums=(0, 1))
    params = jax.tree.map(jnp.asarray, model.params)
    carry = (params, optimizer.init(params), jax.random.key(0))

    def run() -> float:
        nonlocal carry
        params, state, key = carry
        *carry, loss = compiled(params, state, batch, key)
        jax.block_until_ready(carry)
        return float(loss)

    return run


def decayed(params: dict) -> dict:
    """Mask of a Flax tree: decay all but LayerNorm and bias."""
    import jax

    def is_decayed(path: tuple, _: object) -> bool:
        name = jax.tree_util.keystr(path)
        return not ("LayerNorm" in name or "bias" in name)

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def torch_step(*, bfloat16: bool, masked: bool = False) -> Step:
    """transformers' BERT in torch with its default (SDPA) attention and torch's fused AdamW.

    ``masked``: project the masked positions only, with float32 products of the precision "medium"."""
    import torch
    from transformers import BertConfig, BertForPreTraining

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = BertForPreTraining(BertConfig(**SIZES, num_hidden_layers=LAYERS)).train()
    plain = [p for n, p in model.named_parameters() if "LayerNorm" in n or "bias" in n]
    others = [p for n, p in model.named_parameters() if not ("LayerNorm" in n or "bias" in n)]
    groups = [{"params": others, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPSILON, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / WARMUP, 1.0))
    batch = {n: torch.from_numpy(v.astype(np.int64)) for n, v in reference_batch().items()}
    if masked:
        torch.set_float32_matmul_precision("medium")
    chosen = batch["labels"] >= 0

    def loss_of_masked() -> torch.Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
        hidden, pooled = model.bert(**inputs)[:2]
        scores, nsp_scores = model.cls(hidden[chosen], pooled)
        entropy = torch.nn.functional.cross_entropy
        return entropy(scores, batch["labels"][chosen]) + entropy(nsp_scores, batch["next_sentence_label"])

    def run() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = loss_of_masked() if masked else model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.item()

    return run


WORKERS: dict[str, Callable[[], Step]] = {
    "ours": ours,
    "ours_bfloat16": lambda: ours("bfloat16"),
    "flax": flax,
    "torch_float32": lambda: torch_step(bfloat16=False),
    "torch_bfloat16": lambda: torch_step(bfloat16=True),
    "torch_masked_float32": lambda: torch_step(bfloat16=False, masked=True),
    "torch_masked_bfloat16": lambda: torch_step(bfloat16=True, masked=True),
}


def main() -> None:
    """Run two untimed steps (compilation, first touch of the memory), then the number of steps of each input
    line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    start = time.perf_counter()
    step = WORKERS[sys.argv[1]]()
    for _ in range(2):
        loss = step()
    print(json.dumps({"setup_seconds": time.perf_counter() - start, "loss": loss}), file=answers)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            loss = step()
            seconds.append(time.perf_counter() - start)
        print(json.dumps({"seconds": seconds, "loss": loss}), file=answers)


if __name__ == "__main__":
    main()
