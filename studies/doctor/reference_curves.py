"""Reference curves: held-out losses of small runs without faults, from which the end of the plateau at the loss of
word frequencies follows.

    python studies/doctor/reference_curves.py --folder DIR --corpus TEXT [TEXT ...] [--steps N] [--seeds 0 1 2]
    python studies/doctor/reference_curves.py --folder DIR --table

Two sizes (mini: 4 layers of width 256; small: 4 layers of width 512) with two recipes (classic: learned positions,
LayerNorm after each sub-layer, sentence pairs, dropout, AdamW; modern: rotary positions, gated units, LayerNorm
before each sub-layer, no biases, no pairs, no dropout, Muon) and several seeds. A finished run is a JSON line in
DIR/curves.jsonl: size, recipe, seed, tokens per step, the loss of word frequencies, and (step, held-out loss)
pairs. An unfinished run continues when the command is started again. The table shows, for each run, the step and
the tokens at which the held-out loss is first 0.5 nats below that of word frequencies, which ends the plateau.
Exit code 3 if a run is missing.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import bert_jax

END_OF_PLATEAU = 0.5
SIZES = {
    "mini": {"model.hidden_size": 256, "model.num_attention_heads": 4, "model.intermediate_size": 1024},
    "small": {"model.hidden_size": 512, "model.num_attention_heads": 8, "model.intermediate_size": 2048},
}
COMMON = {
    "model.num_layers": 4, "model.vocab_size": 8192, "model.max_position_embeddings": 128, "data.seq_length": 128,
    "data.max_predictions": 20, "data.masking": "dynamic", "data.dupe_factor": 1, "data.num_shards": 8,
    "data.eval_fraction": 0.01, "training.global_batch_size": 256, "training.eval_batches": 8,
    "training.keep_checkpoints": 1,
}  # fmt: skip
RECIPES = {
    "classic": {"optimizer.learning_rate": 5e-4},
    "modern": {
        "model.position_embeddings": "rotary", "model.feed_forward": "gated", "model.norm_position": "pre_skip_first",
        "model.without_bias": ["norm", "qkv", "attention_output", "feed_forward", "mlm_layer"],
        "model.hidden_dropout": 0.0, "model.attention_dropout": 0.0, "model.type_vocab_size": 0,
        "data.next_sentence": "none", "optimizer.name": "muon", "optimizer.learning_rate": 2e-3,
        "optimizer.schedule": "wsd",
    },
}  # fmt: skip


def curve_of(folder, corpus, size, recipe, seed, steps):
    """Train one run, or continue it, and return its line."""
    interval = max(1, steps // 50)
    options = COMMON | SIZES[size] | RECIPES[recipe] | {
        "training.num_steps": steps, "training.seed": seed, "optimizer.warmup_steps": steps // 20,
        "training.eval_interval": interval, "training.checkpoint_interval": interval,
        "training.log_interval": interval, "data.shards": str(folder / f"shards-{recipe}"),
    }  # fmt: skip
    workdir = folder / f"{size}-{recipe}-{seed}"
    (folder / "empty.yaml").write_text("training: {}\n")  # the defaults of the options, which are those of BERT
    run = bert_jax.pretrain(folder / "empty.yaml", corpus=corpus, workdir=workdir, report=lambda line: None, options=options)
    points = [(row["step"], row["mlm_loss"]) for row in run.history if row.get("split") == "eval"]
    return {
        "size": size, "recipe": recipe, "seed": seed, "steps": steps,
        "tokens_per_step": COMMON["training.global_batch_size"] * COMMON["data.seq_length"],
        "unigram": run.metrics["unigram_cross_entropy"], "points": points,
    }  # fmt: skip


def print_table(lines, wanted):
    """Print the end of the plateau of each run; return the exit code."""
    have = {(line["size"], line["recipe"], line["seed"]): line for line in lines}
    for key in wanted:
        name = f"{key[0]:6s} {key[1]:8s} seed {key[2]}"
        if key not in have:
            print(f"{name}  missing")
            continue
        line = have[key]
        below = [step for step, loss in line["points"] if loss < line["unigram"] - END_OF_PLATEAU]
        end = f"plateau ends at step {below[0]:,}" if below else "plateau does not end"
        tokens = f", {below[0] * line['tokens_per_step']:,} tokens" if below else ""
        print(f"{name}  word frequencies {line['unigram']:.3f}, last {line['points'][-1][1]:.3f}; {end}{tokens}")
    return 3 if any(key not in have for key in wanted) else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--corpus", nargs="+")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    file = arguments.folder / "curves.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    wanted = [(size, recipe, seed) for seed in arguments.seeds
              for size, recipe in itertools.product(arguments.sizes, RECIPES)]  # fmt: skip
    if not arguments.table:
        if not arguments.corpus:
            parser.error("--corpus: missing; name files or folders of text")
        arguments.folder.mkdir(parents=True, exist_ok=True)
        done = {(line["size"], line["recipe"], line["seed"]) for line in lines}
        for key in wanted:
            if key not in done:
                lines.append(curve_of(arguments.folder, arguments.corpus, *key, arguments.steps))
                with file.open("a") as out:
                    out.write(json.dumps(lines[-1]) + "\n")
    return print_table(lines, wanted)


if __name__ == "__main__":
    sys.exit(main())
