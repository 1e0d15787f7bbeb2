"""Subcommands of ``bert-jax`` that run a model on texts or token ids."""

import argparse
import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bert_jax.commands.options import (
    Command,
    load_model,
    model,
    option,
    pooling,
    say,
    streaming,
    text_of,
    vector_options,
    whole_numbers,
)
from bert_jax.io.text_lines import Each
from bert_jax.json_values import Json
from bert_jax.registry import load

if TYPE_CHECKING:
    from bert_jax.inference.batching import BatchOptions
    from bert_jax.inference.embed import VectorOptions
    from bert_jax.inference.engine import Engine
    from bert_jax.inference.text_files import Entry

POOLED = ("pooling", "normalize", "width", "prompt", "prompt_name")


def embed_command(arguments: argparse.Namespace) -> None:
    """Compute a vector for each text or, with --per_token or --per_word, a vector for each token or word at each
    selected layer."""
    from bert_jax.inference.embed import LAST_FOUR, embed, extract_features
    from bert_jax.inference.text_files import with_ids, write_json_lines, write_vectors

    parts = [name for name in ("per_token", "per_word") if getattr(arguments, name)]
    if len(parts) == 2:
        raise ValueError("--per_token, --per_word: not allowed together; give one of them")
    clash = [name for name in POOLED if getattr(arguments, name) is not None] if parts else []
    if clash or (arguments.layers and not parts):
        needs = "--layers: requires --per_token or --per_word"
        what = f"--{clash[0]}: not allowed with --{parts[0]}" if clash else needs
        raise ValueError(
            f"{what}; the output is one vector per text or, with these, one per token or word and layer"
        )
    if parts and arguments.dtype == "int8":
        raise ValueError(f"--dtype int8: not allowed with --{parts[0]}; use float32 or bfloat16")
    if arguments.precision != "float32":
        load("extensions", "embed --precision")(arguments, parts)
        return
    inputs, batches = streaming(arguments)
    to_array = arguments.output is not None and arguments.output.suffix in (".npy", ".npz")
    if parts:
        if to_array:
            raise ValueError(
                f"--output {arguments.output}: not allowed with --{parts[0]}, because texts differ in their number "
                "of tokens; use a .jsonl file"
            )
        layers = whole_numbers("--layers", arguments.layers) if arguments.layers else None
        loaded = load_model(arguments)
        if arguments.per_word:
            word_lines = load("extensions", "embed --per_word")
            run = partial(word_lines, layers=layers or (-1,), pooling=arguments.per_word)
        else:
            run = partial(extract_features, layers=layers or LAST_FOUR[: loaded.config.num_layers])
    else:
        loaded, chosen = load_model(arguments), vector_options(arguments, arguments.prompt, arguments.prompt_name)
        if to_array:
            vectors = embed(loaded, Each(inputs, text_of), chosen, batches)
            count, width = write_vectors(vectors, arguments.output)
            say(f"{arguments.output}: float32[{count}, {width}]")
            return
        run = partial(_vector_lines, options=chosen)
    rows = with_ids(inputs, lambda noted: run(loaded, Each(noted, text_of), batches=batches))
    write_json_lines(rows, arguments.output)


def _vector_lines(
    loaded: "Engine", texts: Iterable[str], options: "VectorOptions", batches: "BatchOptions"
) -> Iterator[dict[str, Json]]:
    from bert_jax.inference.embed import embed

    for vector in embed(loaded, texts, options, batches):
        yield {"embedding": [round(float(x), 7) for x in vector]}


def fill_mask_command(arguments: argparse.Namespace) -> None:
    """Print the most probable vocabulary pieces for each mask in a text, with their probabilities. The mask is the
    mask token of the model: [MASK] or, for RoBERTa, <mask>."""
    from bert_jax.inference.fill import FilledText, fill_mask
    from bert_jax.inference.text_files import with_ids, write_json_lines

    inputs, batches = streaming(arguments)
    loaded = load_model(arguments)

    def fill(noted: "Iterator[Entry]") -> Iterator[FilledText]:
        return fill_mask(loaded, Each(noted, text_of), top=arguments.top, batches=batches)

    def rows(noted: "Iterator[Entry]") -> Iterator[dict[str, Json]]:
        for text in fill(noted):
            yield {"text": text.text, "masks": [{"predictions": mask.predictions} for mask in text.masks]}

    if arguments.json:
        write_json_lines(with_ids(inputs, rows), None)
        return
    for text in fill(inputs):
        print(text.text)
        for number, mask in enumerate(text.masks, 1):
            label = f"  [MASK] {number}" if len(text.masks) > 1 else "  [MASK]"
            best = "  ".join(f"{piece} {probability:.3f}" for piece, probability in mask.predictions)
            print(f"{label}: {best}", flush=True)


def score_command(arguments: argparse.Namespace) -> None:
    """Write the log-probability of each text as a JSON line with text, score (the sum of the log-probabilities of
    its tokens, in nats) and tokens (the number of tokens). A masked language model predicts each token from a copy
    of the text in which the token is masked (pseudo-log-likelihood); a causal language model predicts it from the
    preceding tokens. With --pairs, print instead how often the acceptable sentence of a minimal pair has the higher
    score."""
    from bert_jax.inference.score import score
    from bert_jax.inference.text_files import with_ids, write_json_lines

    if arguments.pairs is not None:
        load("extensions", "score --pairs")(arguments)
        return
    clash = [name for name in ("limit", "pair_scores") if getattr(arguments, name) is not None]
    if clash:
        raise ValueError(f"--{clash[0]}: requires --pairs; add --pairs FILE")
    inputs, batches = streaming(arguments)
    loaded = load_model(arguments)
    total, tokens = 0.0, 0

    def rows(noted: "Iterator[Entry]") -> Iterator[dict[str, Json]]:
        nonlocal total, tokens
        for one in score(loaded, Each(noted, text_of), method=arguments.method, batches=batches):
            row: dict[str, Json] = {"text": one.text, "score": one.score, "tokens": len(one.pieces)}
            total, tokens = total + one.score, tokens + len(one.pieces)
            details: dict[str, Json] = {"pieces": one.pieces, "log_probabilities": one.log_probabilities}
            yield row | (details if arguments.per_token else {})

    write_json_lines(with_ids(inputs, rows), arguments.output)
    # Over all tokens of all texts (Salazar et al. 2020, section 2.3); the bound avoids an overflow.
    perplexity = math.exp(min(-total / tokens, 700.0))
    name = "perplexity" if loaded.config.is_causal else "pseudo-perplexity"
    say(f"{name} {perplexity:.4g} over {tokens:,} tokens")


def forward_command(arguments: argparse.Namespace) -> None:
    """Run the model on the arrays input_ids, attention_mask (default: all 1) and token_type_ids (default: all 0) of
    an npz file, and write every output to another npz file."""
    from bert_jax.inference.forward import forward_npz

    shapes = forward_npz(
        load_model(arguments), arguments.input, arguments.output,
        hidden_states=arguments.hidden_states, attentions=arguments.attentions,
    )  # fmt: skip
    for name, shape in shapes.items():
        print(f"{name} {list(shape)}")


def _prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--prompt", metavar="TEXT", help="text to insert before every text")
    group.add_argument(
        "--prompt_name",
        metavar="NAME",
        help="name of a prompt in the model; this prompt is inserted before every text",
    )


COMMANDS = (
    Command("embed", "compute vectors of texts, words or tokens", embed_command, (
        model("texts to embed", with_int8=True),
        option(
            "--output", type=Path, metavar="FILE",
            help="file for the vectors. .npy: an array float32[texts, width]; .npz: the same array, named "
            "embeddings; other names: JSON lines (default: JSON lines to standard output). With --precision int8 "
            "or binary: a new folder",
        ),
        option(
            "--precision", choices=("float32", "int8", "binary"), default="float32",
            help="int8 or binary: write an index for bert-jax search. An index stores one byte per value on disk; "
            "a search in a binary index keeps only one bit per value in memory (default: float32, no index)",
        ),
        pooling,
        _prompts,
        option(
            "--layers", metavar="-1,-2,...",
            help="with --per_token or --per_word: layers whose vectors are written; -1 is the last layer. With "
            "--per_token, 0 is the first encoder layer (default: -1,-2,-3,-4); with --per_word, 0 is the "
            "embedding layer and 1 is the first encoder layer (default: -1)",
        ),
        option(
            "--per_word", choices=("mean", "first"),
            help="write a vector for each word at each selected layer. mean: average the vectors of the word's "
            "pieces. first: take the vector of its first piece",
        ),
        option(
            "--per_token", action="store_true",
            help="write a vector for each token at each selected layer, in the format of google-research/bert "
            "(extract_features.py)",
        ),
    ), group="use", example="--model runs/quickstart --input texts.txt --output vectors.npy"),
    Command("fill-mask", "predict the pieces at each [MASK] in a text", fill_mask_command, (
        model("texts that contain the mask"),
        option("--top", type=int, default=5, help="number of pieces to print for each mask (default: 5)"),
        option("--json", action="store_true", help="print one JSON object per text"),
    ), group="use", example='--model runs/quickstart "the [MASK] of the united states"'),
    Command("score", "compute log-probabilities of texts, or accuracy on minimal pairs", score_command, (
        model("texts to score", with_labels=False),
        option(
            "--method", choices=("PLL-word-l2r", "PLL-original"),
            help="for masked language models: PLL-word-l2r (default) masks each token and the later tokens of its "
            "word (Kauf and Ivanova 2023); PLL-original masks only the token (Salazar et al. 2020) and "
            "overestimates rare words of several pieces, because the pieces predict each other",
        ),
        option(
            "--per_token", action="store_true",
            help="add the fields pieces and log_probabilities to each line",
        ),
        option(
            "--pairs", type=Path, metavar="FILE",
            help="file of minimal pairs as in BLiMP: JSON lines (also .gz) with sentence_good and sentence_bad. "
            "Accuracies are printed with 95%% Wilson intervals, also for groups of pairs if the lines have field, "
            "linguistics_term (phenomenon) and UID (paradigm). Ties count as errors",
        ),
        option("--limit", type=int, metavar="N", help="with --pairs: use only the first N pairs of each paradigm"),
        option(
            "--pair_scores", type=Path, metavar="FILE",
            help="with --pairs: file for JSON lines with score_good, score_bad and correct for every pair",
        ),
        option(
            "--output", type=Path, metavar="FILE",
            help="file for JSON lines (default: standard output). With --pairs, the file contains a line for each "
            "field, phenomenon and paradigm",
        ),
    ), group="use", example='--model runs/quickstart "A cat sat there." "A cat sat their."'),
    Command("forward", "compute every output of a model for arrays of token ids", forward_command, (
        model(),
        option(
            "--input", required=True, type=Path, metavar="IN.npz",
            help="npz file with the inputs, arrays int[batch, length]",
        ),
        option("--output", required=True, type=Path, metavar="OUT.npz", help="npz file for the outputs"),
        option(
            "--hidden_states", action="store_true",
            help="also write hidden_states [layers + 1, batch, length, width]",
        ),
        option(
            "--attentions", action="store_true",
            help="also write attentions [layers, batch, heads, length, length]",
        ),
    ), group="export and inspect",
        example="--model DIR --input ids.npz --output out.npz --hidden_states --attentions",
    ),
)  # fmt: skip
