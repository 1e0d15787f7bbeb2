"""The command that continues texts: generate."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bert_jax.commands.options import (
    OUTPUT,
    Command,
    load_model,
    model_or_place,
    option,
    reading,
    say,
    take_place,
    text_of,
)
from bert_jax.io.text_lines import Each
from bert_jax.json_values import Json

if TYPE_CHECKING:
    from bert_jax.inference.text_files import Entry


def generate_command(arguments: argparse.Namespace) -> None:
    """Continue texts with a causal language model, token by token. Writes a JSON line for each text, with prompt,
    text (the continuation), tokens (the number of its tokens) and ended (true if the model predicted the end
    token). Without --temperature, each token is the most probable one."""
    from bert_jax.contrib.generation.generate import Sampling, generate
    from bert_jax.inference.text_files import read_texts, with_ids, write_json_lines

    take_place(arguments)
    sampling = Sampling(**{name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p", "seed")})
    if sampling.temperature == 0 and (sampling.top_k or sampling.top_p < 1):
        raise ValueError("--top_k and --top_p require --temperature; set it, for example to 1")
    inputs = read_texts(arguments.prompt or (), arguments.input, arguments.json_lines, report=say)
    loaded = load_model(arguments)

    def rows(noted: "Iterator[Entry]") -> Iterator[dict[str, Json]]:
        for row in generate(
            loaded, Each(noted, text_of), max_new_tokens=arguments.max_new_tokens, sampling=sampling,
            batch_size=arguments.batch_size,
        ):  # fmt: skip
            yield {"prompt": row.prompt, "text": row.text, "tokens": len(row.ids), "ended": row.ended}

    write_json_lines(with_ids(inputs, rows), arguments.output)


COMMANDS = (
    Command("generate", "continue texts with a causal language model", generate_command, (
        model_or_place,
        option(
            "--dtype", choices=("float32", "bfloat16"), default="float32",
            help="dtype of the computation (default: float32)",
        ),
        option(
            "--prompt", action="append", metavar="TEXT",
            help="text to continue; this option may be given several times",
        ),
        option(
            "--input", metavar="FILE",
            help="file with one text per line (blank lines are skipped), or a .jsonl file (default: standard "
            "input)",
        ),
        option(
            "--json_lines", action="store_true",
            help="read the input as one JSON object per line",
        ),
        option(
            "--max_new_tokens", type=int, default=50, metavar="N",
            help="maximum number of tokens in a continuation (default: 50)",
        ),
        option(
            "--temperature", type=float, default=0.0, metavar="T",
            help="sample each token from the softmax of the logits divided by T; 0: use the most probable token "
            "(default: 0)",
        ),
        option(
            "--top_k", type=int, default=0, metavar="K",
            help="with --temperature: sample only from the K most probable tokens; 0: from all tokens (default: 0)",
        ),
        option(
            "--top_p", type=float, default=1.0, metavar="P",
            help="with --temperature: sample only from the smallest set of most probable tokens whose "
            "probabilities sum to at least P (default: 1, all tokens)",
        ),
        option("--seed", type=int, default=0, help="seed of the sampling (default: 0)"),
        option("--batch_size", type=int, default=8, metavar="N", help="number of texts per batch (default: 8)"),
        OUTPUT,
        reading(with_labels=False),
    ), group="use", example='--model GPT2_FOLDER --prompt "The capital of France is"'),
)  # fmt: skip
