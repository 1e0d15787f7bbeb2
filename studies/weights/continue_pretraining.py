"""Loss on added words and on all other masked tokens, before and after a run that added words to a model.

    python run_pretrain.py --config RECIPE --init_from SOURCE --add_words WORDS --workdir RUN
    python studies/weights/continue_pretraining.py --source SOURCE --words WORDS --run RUN [--split train --batches 200]

Compares the parameters that the run started from with its newest checkpoint, on the same masked instances (of
RUN's shards), without dropout.
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import numpy as np

from bert_jax.config import ExecutionConfig, PretrainConfig, RunOptions, load_config
from bert_jax.start.plan import plan_start, pretraining_spec
from bert_jax.interop.readers import read_weights
from bert_jax.model import BertForPretraining, from_canonical
from bert_jax.tokenization import load_tokenizer
from bert_jax.training.state import initial_params
from data_pipeline.read.pretrain_input import eval_batches

GROUPS = ("added words", "other tokens")


def losses(config: PretrainConfig, params: dict, batches: list, added: np.ndarray) -> dict[str, tuple[float, int]]:
    """Return the mean MLM loss in nats and the number of targets of each group."""
    model = BertForPretraining(config.model, ExecutionConfig(), config.has_nsp)
    tree = from_canonical(params, initial_params(model, 0), config.model.vocab_size)

    @jax.jit
    def nll(tree, batch):
        logits = model.apply({"params": tree}, batch, None).mlm_logits
        label = jax.numpy.take_along_axis(logits, batch["mlm_labels"][..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - label

    sums = dict.fromkeys(GROUPS, np.zeros(2))
    for batch in batches:
        values = np.asarray(nll(tree, batch), np.float64)
        masked = batch["mlm_weights"] > 0
        is_added = added[batch["mlm_labels"]]
        for name, chosen in zip(GROUPS, (masked & is_added, masked & ~is_added), strict=True):
            sums[name] = sums[name] + [values[chosen].sum(), chosen.sum()]
    return {name: (total / count, int(count)) for name, (total, count) in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="the model that the run started from")
    parser.add_argument("--words", required=True, help="file of the added words")
    parser.add_argument("--run", required=True, type=Path, help="workdir of the run")
    parser.add_argument("--split", choices=("eval", "train"), default="eval")
    parser.add_argument("--batches", type=int, default=0, help="maximum number of batches of 64 (default: all)")
    arguments = parser.parse_args()

    config = load_config(PretrainConfig, ["--config", str(arguments.run / "config.yaml")])
    data = config.data
    given = {"shards": data.shards, "seq_length": str(data.seq_length), "next_sentence": data.next_sentence}
    words = [word for name, value in given.items() for word in (f"--data.{name}", value)]
    # A folder that is not there: the start itself is asked for, not the run.
    options = RunOptions(init_from=arguments.source, add_words=arguments.words)
    start = plan_start(PretrainConfig, options, arguments.run / "no run", read_settings(words).all)
    vocabulary = load_tokenizer(arguments.run / Path(data.vocab).name, lower_case=data.lower_case)
    known = source_pieces(arguments.source)
    added = np.arange(config.model.vocab_size) >= known
    data = dataclasses.replace(data, prefetch=1)
    folder = Path(data.shards) / arguments.split
    batches = list(
        eval_batches(data, folder=folder, batch_size=64, max_batches=arguments.batches, tokenizer=vocabulary)
    )
    model = BertForPretraining(config.model, ExecutionConfig(), config.has_nsp)
    before = losses(config, start.with_parameters(pretraining_spec(config, model)).params, batches, added)
    after = losses(config, dict(read_weights(arguments.run).params), batches, added)
    for name in GROUPS:
        (first, count), (last, _) = before[name], after[name]
        change = f"{first:.4f} -> {last:.4f} nats ({last - first:+.4f})"
        print(f"{name}: {change} on {count:,} masked {arguments.split} targets")


def source_pieces(source: str) -> int:
    """Return the pieces of the vocabulary of the source model."""
    weights = read_weights(Path(source))
    assert weights.tokenizer_content is not None
    return len([line for line in weights.tokenizer_content.decode().split("\n") if line])


if __name__ == "__main__":
    main()
