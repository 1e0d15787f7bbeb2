"""Compares the resolved recipes with the values of their authors' configs, and prints a table with the sources.

python studies/modern_training/recipe_values.py [--output LINES.jsonl]

Exit code 3 if a value differs. Values that differ on purpose are stated in the headers of the recipes.
"""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from bert_jax.config import RunOptions
from bert_jax.config.loader import build_config, take_options, to_dict
from bert_jax.config.pretrain import PretrainConfig

ROOT = Path(__file__).resolve().parents[2]
MODERN = "AnswerDotAI/ModernBERT, branch pretraining_documentation, yamls/modernbert/"
ETTIN = "JHU-CLSP/ettin-encoder-vs-decoder@6cbf954, pretraining/configs/standard/"
ELECTRA = "google-research/electra@8a46635, configure_pretraining.py, model/optimization.py, pretrain_helpers.py"
CRAMMING = (
    "JonasGeiping/cramming@196c991, cramming/config/arch/crammed-bert.yaml, train/bert-o4.yaml, optim/adam.yaml"
)

_MODERN_NETWORK: dict[str, Any] = {
    "model.vocab_size": 50_368, "model.feed_forward": "gated", "model.norm_epsilon": 1e-5,
    "model.without_bias": ["norm", "qkv", "attention_output", "feed_forward", "pooler_layer", "mlm_layer"],
    "model.embedding_norm": "yes", "model.norm_position": "pre_skip_first", "model.attention_windows": [0, 64, 64],
    "model.attention_output_dropout": 0.1, "model.attention_dropout": 0.0, "model.feed_forward_dropout": -1.0,
    "model.hidden_dropout": 0.0, "model.initialization": "megatron", "optimizer.name": "stable_adamw",
    "optimizer.beta1": 0.9, "optimizer.beta2": 0.98, "optimizer.epsilon": 1e-6,
    "optimizer.weight_decay_type": "independent", "optimizer.clip_norm": 0.0, "data.mask_token_share": 0.8,
    "data.random_token_share": 0.1, "data.next_sentence": "none",
}  # fmt: skip
_LONG = {"optimizer.warmup_steps": 0}
_DECAY = {"optimizer.schedule": "wsd", "optimizer.wsd_decay": "one_minus_sqrt"}


def _phase(tokens: int, rate: float, base: float, mask: float = 0.3) -> dict[str, Any]:
    return {
        "training.num_tokens": tokens, "optimizer.learning_rate": rate, "model.rotary_base": base,
        "data.mask_fraction": mask,
    }  # fmt: skip


def _modernbert() -> list[tuple[str, int, str, dict[str, Any]]]:
    network = _MODERN_NETWORK | {
        "model.num_layers": 22, "model.hidden_size": 768, "model.num_attention_heads": 12,
        "model.intermediate_size": 1152, "optimizer.weight_decay": 1e-5, "training.seed": 17,
    }  # fmt: skip
    first = {
        "training.global_batch_size": 4608, "optimizer.warmup_tokens": 3_000_000_000, "data.seq_length": 1024,
        "optimizer.schedule": "constant",
    }  # fmt: skip
    longer = _LONG | {
        "training.global_batch_size": 576,
        "data.seq_length": 8192,
        "model.rotary_window_base": 10_000.0,
    }
    decay = _DECAY | {"optimizer.wsd_decay_tokens": 50_000_000_000, "optimizer.final_fraction": 0.001}
    return [
        ("modernbert_base", 1, MODERN, network | first | _phase(1_719_000_000_000, 8e-4, 10_000.0)),
        ("modernbert_base", 2, MODERN, network | longer | _phase(250_000_000_000, 3e-4, 160_000.0)),
        ("modernbert_base", 3, MODERN, network | longer | decay | _phase(50_000_000_000, 3e-4, 160_000.0)),
    ]


def _ettin(recipe: str, folder: str, sizes: tuple[int, int, int, int], ramp: int) -> list[Any]:
    names = ("num_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    network = _MODERN_NETWORK | {f"model.{name}": size for name, size in zip(names, sizes, strict=True)}
    network |= {"optimizer.weight_decay": 3e-4, "training.seed": 21}
    first = {
        "training.global_batch_size": 4608, "optimizer.warmup_tokens": 4_000_000_000, "data.seq_length": 1024,
        "optimizer.schedule": "constant", "model.rotary_window_base": 10_000.0,
    }  # fmt: skip
    longer = _LONG | _DECAY | {"training.global_batch_size": 4608, "data.seq_length": 7999}
    second = {"optimizer.final_fraction": 0.5, "optimizer.wsd_decay_tokens": 250_000_000_000}
    second |= {"model.rotary_window_base": 10_000.0}
    third = {"optimizer.final_fraction": 0.04, "optimizer.wsd_decay_tokens": 50_000_000_000}
    third |= {"model.rotary_window_base": 160_000.0}
    name = f"encoder_{folder}.yaml"
    return [
        (recipe, 1, f"{ETTIN}{folder}/{name}", network | first | _phase(1_700_000_000_000, 3e-3, 10_000.0)),
        (
            recipe, 2, f"{ETTIN}{folder}/de_decay/{name}",
            network | longer | second | _phase(250_000_000_000, 3e-3, 160_000.0),
        ),
        (
            recipe, 3, f"{ETTIN}{folder}/prolong_decay/{name}",
            network | longer | third | _phase(50_000_000_000, 1.5e-3, 160_000.0, 0.15),
        ),
        (recipe, 1, f"{ETTIN}{folder}/{name}, batch_size_warmup_tokens", {"training.batch_ramp.0": ramp}),
    ]  # fmt: skip


# Recipe, phase, source, and the values of its authors by option.
VALUES: list[tuple[str, int, str, dict[str, Any]]] = [
    *_modernbert(),
    *_ettin("ettin_17m", "very_tiny", (7, 256, 384, 4), 125_000_000_000),
    *_ettin("ettin_32m", "tiny", (10, 384, 576, 6), 100_000_000_000),
    ("electra_small", 1, ELECTRA, {
        "model.hidden_size": 256, "model.num_layers": 12, "model.num_attention_heads": 4,
        "model.intermediate_size": 1024, "model.embedding_size": 128, "model.vocab_size": 30_522,
        "objective.discriminator_weight": 50.0, "objective.generator_size": (0.25,),
        "objective.embedding_sharing": "shared", "data.mask_fraction": 0.15, "data.mask_token_share": 0.85,
        "data.random_token_share": 0.0, "data.max_predictions": 19, "data.seq_length": 128,
        "optimizer.learning_rate": 5e-4, "optimizer.warmup_steps": 10_000, "optimizer.weight_decay": 0.01,
        "optimizer.beta1": 0.9, "optimizer.beta2": 0.999, "optimizer.epsilon": 1e-6, "optimizer.clip_norm": 1.0,
        "training.num_steps": 1_000_000, "training.global_batch_size": 128,
    }),
    ("cramming", 1, CRAMMING, {
        "model.num_layers": 16, "model.hidden_size": 768, "model.num_attention_heads": 12,
        "model.intermediate_size": 3072 // 2, "model.norm_epsilon": 1e-12, "model.norm_position": "pre",
        "model.feed_forward": "gated",
        "model.without_bias": ["qkv", "attention_output", "feed_forward", "mlm_output"], "model.mlm_layer": "none",
        "model.embedding_norm": "yes", "model.hidden_dropout": 0.0, "model.attention_dropout": 0.0,
        "data.mask_fraction": 0.25, "data.seq_length": 128, "optimizer.learning_rate": 1e-3,
        "optimizer.weight_decay": 0.01, "optimizer.beta1": 0.9, "optimizer.beta2": 0.98,
        "optimizer.epsilon": 1e-12, "optimizer.clip_norm": 0.5, "optimizer.schedule": "triangle",
        "training.global_batch_size": 8192,
    }),
    ("roberta_base", 1, "Liu et al. 2019, table 9", {
        "model.num_layers": 12, "model.hidden_size": 768, "model.intermediate_size": 3072,
        "model.num_attention_heads": 12, "model.hidden_dropout": 0.1, "model.attention_dropout": 0.1,
        "optimizer.warmup_steps": 24_000, "optimizer.learning_rate": 6e-4, "training.global_batch_size": 8192,
        "optimizer.weight_decay": 0.01, "training.num_steps": 500_000, "optimizer.schedule": "linear",
        "optimizer.epsilon": 1e-6, "optimizer.beta1": 0.9, "optimizer.beta2": 0.98, "optimizer.clip_norm": 0.0,
        "data.seq_length": 512,
    }),
]  # fmt: skip


def resolved(recipe: str, phase: int) -> dict[str, Any]:
    """Return the values of a phase of a recipe by option, as the commands in its header give them."""
    text = (ROOT / "configs" / f"{recipe}.yaml").read_text(encoding="utf-8")
    head = "\n".join(line[1:] for line in text.splitlines() if line.startswith("#")).replace("\\\n", " ")
    commands = re.findall(r"^ *python run_pretrain\.py (.*)$", head, re.MULTILINE)
    _, rest = take_options(RunOptions, shlex.split(commands[phase - 1]))
    config = build_config(PretrainConfig, rest.all)
    values = {}
    for section, options in to_dict(config).items():
        for name, value in options.items():
            values[f"{section}.{name}"] = list(value) if isinstance(value, tuple) else value
    ramp = values["training.batch_ramp"]
    return values | {"training.batch_ramp.0": ramp[0] if ramp else 0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", help="file to which one JSON line per phase of a recipe is written")
    options = parser.parse_args()
    lines = []
    for recipe, phase, source, authors in VALUES:
        ours = resolved(recipe, phase)
        different = {name: [value, ours[name]] for name, value in authors.items() if ours[name] != value}
        lines.append(
            {"recipe": recipe, "phase": phase, "source": source, "values": len(authors), "different": different}
        )
        print(json.dumps(lines[-1]))
    if options.output:
        Path(options.output).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    total = sum(line["values"] for line in lines)
    bad = sum(len(line["different"]) for line in lines)
    print(f"{total - bad} of {total} values are those of the authors")
    return 3 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
