"""Masked and permuted tokens at equal steps, on the text of the quickstart: pseudo-likelihood of held-out text.

    python studies/xlnet/objectives.py FOLDER [--steps 250] [--rows 60]

Needs the package of examples/xlnet. Trains three models on the same batches (64 rows of 64 tokens, 20% targets, no
dropout), in turn:

* bert: the Transformer of BERT with learned positions, and masked tokens;
* xlnet_masked: the network of XLNet, and masked tokens;
* xlnet: the network of XLNet, and permuted tokens.

The losses of training are not comparable. Afterwards each model predicts each token of held-out rows from all other
tokens of its row: masked models see [MASK] at its place, and XLNet has a query there, whose token nothing sees. The
measure is the mean of -log p over the same tokens. A line is added to FOLDER/objectives.jsonl for each model.
"""

import argparse
import json
import time
from pathlib import Path

import bert_jax
import jax
import jax.numpy as jnp
import numpy as np
from bert_jax.config import ExecutionConfig, PretrainConfig, load_config
from bert_jax.interop.readers import read_weights
from bert_jax.model.canonical import abstract_params, from_canonical
from bert_jax.tokenization import build_tokenizer
from bert_jax_xlnet.objective import TwoStreamModel
from data_pipeline.read.pretrain_input import ShardSource
from flax import linen as nn

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "xlnet" / "xlnet_small.yaml"
MODELS = {
    "bert": {"model.encoder": "transformer", "model.type_vocab_size": 0, "objective.name": "masked_lm"},
    "xlnet_masked": {"objective.name": "masked_lm"},
    "xlnet": {},
}


def rows_of(tokenizer, count):
    """Ids before masking of ``count`` held-out rows without padding, int32[count, 64]."""
    config = load_config(PretrainConfig, ["--config", str(RECIPE)])
    found = []
    for batch in ShardSource(config, tokenizer).held_out(64, list(range(64)), 0):
        ids, (rows, slots) = batch["input_ids"].copy(), np.nonzero(batch["mlm_weights"] > 0)
        ids[rows, batch["mlm_positions"][rows, slots]] = batch["mlm_labels"][rows, slots]
        found += list(ids[(batch["sequence_ids"] > 0).all(axis=1)])
    return np.stack(found[:: max(len(found) // count, 1)][:count])


def surprisal(weights, ids, mask_id, is_masked):
    """The mean of -log p of each token except the first and the last of the rows ``ids``, given all others."""
    model = TwoStreamModel(weights.spec.model, ExecutionConfig(), weights.spec.heads)
    tree = from_canonical(weights.params, nn.unbox(abstract_params(model)), model.config.vocab_size)
    length = ids.shape[1]
    places = np.arange(1, length - 1)

    @jax.jit
    def log_p(row):
        """-log p of the tokens of one row, each predicted in a copy of the row of its own."""
        copies, hidden = jnp.tile(row, (len(places), 1)), places[:, None] == np.arange(length)
        features = {
            "input_ids": jnp.where(hidden & is_masked, mask_id, copies), "token_type_ids": 0 * copies,
            "position_ids": jnp.tile(jnp.arange(length), (len(places), 1)), "sequence_ids": 0 * copies + 1,
        }
        if is_masked:
            features["mlm_positions"] = places[:, None]
        else:
            features |= {"perm_mask": jnp.tile(hidden[:, None], (1, length, 1)), "target_positions": places[:, None]}
        logits = model.apply({"params": tree}, features).mlm_logits[:, 0]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), row[places][:, None], axis=-1)[:, 0]

    return np.stack([np.asarray(log_p(row)) for row in ids])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--rows", type=int, default=60)
    arguments = parser.parse_args()
    for name, options in MODELS.items():
        workdir, start = arguments.folder / name, time.perf_counter()
        last = {"training.eval_interval": arguments.steps, "training.log_interval": arguments.steps // 10}
        last["optimizer.warmup_steps"] = arguments.steps // 10
        bert_jax.pretrain(RECIPE, workdir=workdir, num_steps=arguments.steps, options=options | last)
        seconds, weights = time.perf_counter() - start, read_weights(workdir)
        tokenizer = build_tokenizer(weights.spec.tokenizer, weights.tokenizer_content, name)
        ids = rows_of(tokenizer, arguments.rows)
        found = surprisal(weights, ids, tokenizer.mask_id, name != "xlnet")
        line = {
            "model": name, "steps": arguments.steps, "parameters": sum(x.size for x in weights.params.values()),
            "seconds": round(seconds), "tokens": found.size, "surprisal": round(float(found.mean()), 4),
            "error": round(float(found.mean(axis=1).std() / len(found) ** 0.5), 4),
        }
        with (arguments.folder / "objectives.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        print(line, flush=True)


if __name__ == "__main__":
    main()
