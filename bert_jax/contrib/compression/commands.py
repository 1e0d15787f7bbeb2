"""Commands for smaller models: trim, factorize, prune, early-exit, augment."""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bert_jax.commands.options import (
    OUTPUT,
    SOURCE,
    Command,
    load_model,
    model,
    option,
    read_options,
    reading,
    run_options,
)
from bert_jax.json_values import Json

if TYPE_CHECKING:
    from bert_jax.interop.model_bundle import ModelBundle


def trim_command(arguments: argparse.Namespace) -> None:
    """Save a model with the pieces of its vocabulary that the texts of a corpus use. Each of these texts has
    the same pieces and bitwise equal hidden states as before. All characters are kept, so other texts have no more
    unknown pieces than before."""
    from bert_jax.contrib.compression.trim import trim_model

    trim_model(
        Path(arguments.source), arguments.target, arguments.corpus, read_options(arguments), ngram=arguments.ngram
    )


def prune_command(arguments: argparse.Namespace) -> None:
    """Save a model with fewer layers, attention heads and feed-forward units: really smaller arrays, not zeros.
    Heads and units are chosen among all layers by their importance for the loss of the model on examples, by the
    norm of their parameters, or at random; each layer keeps at least one of each."""
    from bert_jax.contrib.compression.examples import read_examples
    from bert_jax.contrib.compression.prune import Pruning, prune_model

    pruning = Pruning(
        heads=arguments.heads,
        units=arguments.units,
        layers=tuple(arguments.layers),
        even=arguments.even,
        importance=arguments.importance,
        examples=read_examples(arguments.examples, allow_texts=True),
        limit=arguments.limit,
        start=arguments.start,
        seed=arguments.seed,
    )
    prune_model(Path(arguments.source), arguments.target, pruning, read_options(arguments))


def factorize_command(arguments: argparse.Namespace) -> None:
    """Save a model whose table of word embeddings is the product of two smaller tables, the best approximation of
    that rank in least squares, and print the savings and, with --check, the scores of both models. Fine-tune it to
    regain a part of the loss."""
    from bert_jax.contrib.compression.factorize import factorize_model

    source, target, options = Path(arguments.source), arguments.target, read_options(arguments)
    factorize_model(source, target, arguments.rank, options, examples=arguments.check)


def early_exit_command(arguments: argparse.Namespace) -> None:
    """Print cost and quality of early exit on labeled examples: for each entropy, the mean number of layers, the
    metrics of the task, and the seconds, also for all layers. The model must have heads on lower layers
    (fine-tuning with loss.layers and loss.layer_heads own)."""
    from bert_jax.contrib.compression.early_exit import exit_curve, exit_lines
    from bert_jax.inference.text_files import write_json_lines

    loaded = load_model(arguments)
    curve = exit_curve(loaded, arguments.examples, arguments.entropies)
    print("\n".join(exit_lines(curve, loaded.config.num_layers)))
    if arguments.output is not None:
        write_json_lines(map(dataclasses.asdict, curve), arguments.output)


def augment_command(arguments: argparse.Namespace) -> None:
    """Write new texts of each text or pair, in which words are replaced by words that a masked language model
    expects in their place, as JSON lines with text and text_pair. Fine-tuning reads them as data.unlabelled, and a
    teacher labels them."""
    from bert_jax.contrib.compression.augment import Replacement, augment
    from bert_jax.inference.text_files import read_texts, write_json_lines

    replacement = Replacement(arguments.copies, arguments.share, arguments.candidates, arguments.seed)
    texts = (
        (value,) if isinstance(value, str) else _texts(value, f"{arguments.input}: entry {number}")
        for number, value in enumerate(read_texts((), arguments.input, False), 1)
    )
    write_json_lines(augment(load_model(arguments), texts, replacement, run_options(arguments)), arguments.output)


def _texts(value: Mapping[str, Json], where: str) -> tuple[str, ...]:
    given = [value[name] for name in ("text", "text_pair") if value.get(name) is not None]
    texts = tuple(one for one in given if isinstance(one, str))
    if not texts or "text" not in value or len(texts) < len(given):
        raise ValueError(f'{where}: no text; write {{"text": "..."}}, with "text_pair" for a pair')
    return texts


def export_functions(
    arguments: argparse.Namespace,
) -> "tuple[Callable[[ModelBundle], ModelBundle] | None, Callable[[Path, ModelBundle], None] | None]":
    """Return the functions that calibrate an int8 export and check its scores, for ``--calibration``, ``--check``
    and ``--check_loss`` of ``export``; each is None without its option."""
    calibrate = check = None
    if arguments.calibration is not None:
        from bert_jax.contrib.compression.onnx.calibration import calibrated

        calibrate = functools.partial(calibrated, files=arguments.calibration, report=print)
    if arguments.check is not None:
        from bert_jax.contrib.compression.examples import read_examples
        from bert_jax.contrib.compression.onnx.quality import check_program

        read_examples([arguments.check])  # an unreadable file is refused before the export
        check = functools.partial(
            check_program, file=arguments.check, allowed=arguments.check_loss, report=print, dtype=arguments.dtype
        )
    elif arguments.check_loss is not None:
        raise ValueError("--check_loss: requires --check; add --check with a file of labeled texts")
    return calibrate, check


COMMANDS = (
    Command("trim", "remove the vocabulary entries that a corpus does not use", trim_command, (
        SOURCE,
        option("--to", dest="target", required=True, type=Path, metavar="WORKDIR", help="a new folder"),
        option(
            "--corpus", required=True, nargs="+", metavar="FILE",
            help="one text per line (.gz: packed), or JSON objects with text, text_pair, words, choices and "
            "negatives (.jsonl)",
        ),
        option(
            "--ngram", type=int, default=5, metavar="N",
            help="keep a piece that no text has if every N characters of it occur in a word of the texts; 0: keep "
            "none (default: 5)",
        ),
        reading(),
    ), group="more", example="--model DIR --to small/ --corpus texts.txt"),
    Command("factorize", "word embeddings of a smaller rank", factorize_command, (
        SOURCE,
        option("--to", dest="target", required=True, type=Path, metavar="WORKDIR", help="a new folder"),
        option("--rank", required=True, type=int, metavar="N", help="width of the smaller table"),
        option(
            "--check", metavar="FILE",
            help="labeled JSON lines as for fine-tuning: print the scores of both models",
        ),
        reading(),
    ), group="more", example="--model runs/sst2 --to small/ --rank 128 --check dev.jsonl"),
    Command("prune", "remove layers, attention heads and feed-forward units", prune_command, (
        SOURCE,
        option("--to", dest="target", required=True, type=Path, metavar="WORKDIR", help="a new folder"),
        option(
            "--heads", type=float, default=1.0, metavar="SHARE",
            help="share of the attention heads to KEEP, above 0 (default: 1, all)",
        ),
        option(
            "--units", type=float, default=1.0, metavar="SHARE",
            help="share of the feed-forward units to KEEP, above 0 (default: 1, all)",
        ),
        option(
            "--layers", type=int, nargs="+", default=(), metavar="N",
            help="layers to KEEP, counted from 0 (default: all); others are removed before importance is computed",
        ),
        option(
            "--even", action="store_true",
            help="keep the same share in each layer, so layers have one size (default: the best of all layers)",
        ),
        option(
            "--importance", choices=("gradient", "magnitude", "movement", "random"), default="gradient",
            help="gradient (of the loss on --examples; default), magnitude (norm of the parameters), movement (how "
            "much this norm grew since --start) or random",
        ),
        option(
            "--examples", nargs="+", default=(), metavar="FILE",
            help="for gradient: labeled examples as bert-data records prints them (.jsonl), for a masked language "
            "model also texts, one per line",
        ),
        option(
            "--limit", type=int, default=2000, metavar="N",
            help="examples that count, drawn from all; 0: all (default: 2000)",
        ),
        option(
            "--start", default="", metavar="DIR_OR_PREFIX",
            help="for movement: the model from which the training of --model started",
        ),
        option("--seed", type=int, default=0, metavar="N", help="seed of draws (default: 0)"),
        reading(),
    ), group="more", example="--model runs/sst2 --to small/ --heads 0.5 --units 0.5 --examples train.jsonl"),
    Command("early-exit", "speed and quality of predictions that stop at lower layers", early_exit_command, (
        model(),
        option(
            "--examples", required=True, nargs="+", metavar="FILE",
            help="labeled examples as bert-data records prints them (.jsonl)",
        ),
        option(
            "--entropies", nargs="+", type=float, metavar="NATS",
            help="values of --exit_entropy (default: 0.05, 0.1, 0.2, 0.4 and 0.8 of the greatest entropy)",
        ),
        option("--output", type=Path, metavar="FILE", help="also write JSON lines"),
    ), group="more", example="--model runs/sst2 --examples dev.jsonl"),
    Command("augment", "more texts for a teacher to label, with words replaced", augment_command, (
        model(required=True, with_labels=False),
        option(
            "--input", required=True, metavar="FILE",
            help="one text per line, or JSON lines (.jsonl) with text and, for pairs, text_pair",
        ),
        option("--copies", type=int, default=20, metavar="N", help="most new texts of a text (default: 20)"),
        option("--share", type=float, default=0.4, metavar="X", help="replaced share of the words (default: 0.4)"),
        option("--candidates", type=int, default=15, metavar="N", help="words to draw from (default: 15)"),
        option("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)"),
        option("--batch_tokens", type=int, metavar="N", help="number of tokens per batch"),
        OUTPUT,
    ), group="more", example="--model BERT --input train.jsonl --copies 20 --output more.jsonl"),
)  # fmt: skip
