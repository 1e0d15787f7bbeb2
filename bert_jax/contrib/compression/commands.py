"""Commands for smaller models: trim, factorize, prune, early-exit, augment."""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bert_jax.commands.options import (
    BATCH_TOKENS,
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
from bert_jax.io.hub import model_path
from bert_jax.json_values import Json

if TYPE_CHECKING:
    from bert_jax.interop.model_bundle import ModelBundle


def trim_command(arguments: argparse.Namespace) -> None:
    """Save a model that has only those vocabulary pieces that the texts of a corpus use. These texts are split into
    the same pieces as before, and their hidden states are bitwise identical. All single characters are kept, so
    other texts have no more unknown pieces than before."""
    from bert_jax.contrib.compression.trim import trim_model

    trim_model(
        model_path(arguments.source),
        arguments.target,
        arguments.corpus,
        read_options(arguments),
        ngram=arguments.ngram,
    )


def prune_command(arguments: argparse.Namespace) -> None:
    """Save a model with fewer layers, attention heads or feed-forward units. The arrays become smaller; no zeros
    are stored. The heads of all layers are ranked together, and so are the units: by their importance for the loss
    on examples, by the norm of their parameters, by the growth of this norm, or at random. Each layer keeps at
    least one head and one unit."""
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
    prune_model(model_path(arguments.source), arguments.target, pruning, read_options(arguments))


def factorize_command(arguments: argparse.Namespace) -> None:
    """Save a model whose word embedding table is replaced with the product of two smaller matrices: the best
    least-squares approximation of the rank in --rank. Print the savings and, with --check, the scores of both
    models. To recover a part of the lost accuracy, fine-tune the new model."""
    from bert_jax.contrib.compression.factorize import factorize_model

    source, target, options = model_path(arguments.source), arguments.target, read_options(arguments)
    factorize_model(source, target, arguments.rank, options, examples=arguments.check)


def early_exit_command(arguments: argparse.Namespace) -> None:
    """Print the cost and the quality of early exit on labeled examples. For each entropy threshold, and without
    early exit, the mean number of layers, the metrics of the task and the time in seconds are printed. The model
    must have heads on lower layers (fine-tuning with loss.layers and loss.layer_heads own)."""
    from bert_jax.contrib.compression.early_exit import exit_curve, exit_lines
    from bert_jax.inference.text_files import write_json_lines

    loaded = load_model(arguments)
    curve = exit_curve(loaded, arguments.examples, arguments.entropies)
    print("\n".join(exit_lines(curve, loaded.config.num_layers)))
    if arguments.output is not None:
        write_json_lines(map(dataclasses.asdict, curve), arguments.output)


def augment_command(arguments: argparse.Namespace) -> None:
    """Write JSON lines with text and text_pair: copies of each text or pair in which some words are replaced with
    words that a masked language model predicts in their place. Fine-tuning reads the copies as data.unlabelled, and
    a teacher labels them."""
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
        option("--to", dest="target", required=True, type=Path, metavar="WORKDIR", help="new folder"),
        option(
            "--corpus", required=True, nargs="+", metavar="FILE",
            help="files of texts: one text per line (plain or .gz), or JSON objects with text, text_pair, words, "
            "choices and negatives (.jsonl)",
        ),
        option(
            "--ngram", type=int, default=5, metavar="N",
            help="also keep a piece that no text uses if each of its substrings of N characters occurs in a word "
            "of "
            "the texts; 0: keep no such piece (default: 5)",
        ),
        reading(),
    ), group="more", example="--model DIR --to small/ --corpus texts.txt"),
    Command("factorize", "replace the word embedding table with two smaller matrices", factorize_command, (
        SOURCE,
        option("--to", dest="target", required=True, type=Path, metavar="WORKDIR", help="new folder"),
        option(
            "--rank", required=True, type=int, metavar="N",
            help="rank: the width of the first matrix",
        ),
        option(
            "--check", metavar="FILE",
            help="file of labeled examples, in JSON lines as for fine-tuning, on which both models are scored",
        ),
        reading(),
    ), group="more", example="--model runs/sst2 --to small/ --rank 128 --check dev.jsonl"),
    Command("prune", "remove layers, attention heads and feed-forward units", prune_command, (
        SOURCE,
        option("--to", dest="target", required=True, type=Path, metavar="WORKDIR", help="new folder"),
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
            help="layers to KEEP, counted from 0 (default: all); the other layers are removed before importance "
            "is computed",
        ),
        option(
            "--even", action="store_true",
            help="keep the same numbers of heads and units in each layer (default: rank those of all layers "
            "together)",
        ),
        option(
            "--importance", choices=("gradient", "magnitude", "movement", "random"), default="gradient",
            help="measure of the importance of heads and units: gradient (gradient of the loss on --examples; "
            "default), magnitude (norm of the parameters), movement (growth of this norm since --start) or random",
        ),
        option(
            "--examples", nargs="+", default=(), metavar="FILE",
            help="with --importance gradient: labeled examples as bert-data records prints them (.jsonl) or, for "
            "a masked language model, texts, one per line",
        ),
        option(
            "--limit", type=int, default=2000, metavar="N",
            help="with --importance gradient: number of examples to sample; 0: all (default: 2000)",
        ),
        option(
            "--start", default="", metavar="DIR_OR_PREFIX",
            help="with --importance movement: the model from which the training of --model started",
        ),
        option(
            "--seed", type=int, default=0, metavar="N",
            help="seed of samples and of --importance random (default: 0)",
        ),
        reading(),
    ), group="more", example="--model runs/sst2 --to small/ --heads 0.5 --units 0.5 --examples train.jsonl"),
    Command("early-exit", "measure predictions that stop at lower layers", early_exit_command, (
        model(),
        option(
            "--examples", required=True, nargs="+", metavar="FILE",
            help="labeled examples as bert-data records prints them (.jsonl)",
        ),
        option(
            "--entropies", nargs="+", type=float, metavar="NATS",
            help="entropy thresholds (predict --exit_entropy) to measure (default: 0.05, 0.1, 0.2, 0.4 and 0.8 "
            "times the maximum entropy)",
        ),
        option(
            "--output", type=Path, metavar="FILE", help="file to which the table is also written, as JSON lines",
        ),
    ), group="more", example="--model runs/sst2 --examples dev.jsonl"),
    Command("augment", "copy texts with some words replaced, for a teacher to label", augment_command, (
        model(required=True, with_labels=False),
        option(
            "--input", required=True, metavar="FILE",
            help="file with one text per line, or JSON lines (.jsonl) with text and, for pairs, text_pair",
        ),
        option(
            "--copies", type=int, default=20, metavar="N", help="maximum number of copies per text (default: 20)",
        ),
        option(
            "--share", type=float, default=0.4, metavar="X",
            help="share of the words to replace (default: 0.4)",
        ),
        option(
            "--candidates", type=int, default=15, metavar="N",
            help="number of most probable words from which a replacement is sampled (default: 15)",
        ),
        option("--seed", type=int, default=0, metavar="N", help="sampling seed (default: 0)"),
        option("--batch_tokens", type=int, metavar="N", help=BATCH_TOKENS),
        OUTPUT,
    ), group="more", example="--model BERT --input train.jsonl --copies 20 --output more.jsonl"),
)  # fmt: skip
