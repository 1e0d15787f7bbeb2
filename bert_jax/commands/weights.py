"""Subcommands of ``bert-jax`` that import and export models."""

import argparse
import functools
from pathlib import Path

from bert_jax.commands.options import READABLE, Command, names_of, option, read_options, reading

_FORMATS = ("hf", "sentence-transformers", "tf1", "onnx", "stablehlo", "npz", "word2vec", "allennlp")


def import_command(arguments: argparse.Namespace) -> None:
    """Read a model in any format, save it in the format of this library, and verify that the saved model equals the
    source."""
    from bert_jax.interop.import_model import import_model

    import_model(
        Path(arguments.source),
        arguments.target,
        read_options(arguments),
        verify=not arguments.no_verify,
        peer_python=arguments.peer_python,
        report=print,
    )


def export_command(arguments: argparse.Namespace) -> None:
    """Write a model in another format, load it with the library of that format, and print, for each output,
    the largest difference from the output of this library."""
    from bert_jax.interop.export import export_model

    calibrate = check = None
    if arguments.calibration is not None:
        from bert_jax.compression.onnx.calibration import calibrated

        calibrate = functools.partial(calibrated, files=arguments.calibration, report=print)
    if arguments.check is not None:
        from bert_jax.compression.examples import read_examples
        from bert_jax.compression.onnx.quality import check_program

        read_examples([arguments.check])  # an unreadable file is refused before the export
        check = functools.partial(
            check_program, file=arguments.check, allowed=arguments.check_loss, report=print, dtype=arguments.dtype
        )
    elif arguments.check_loss is not None:
        raise ValueError("--check_loss: requires --check; add --check with a file of labeled texts")
    export_model(
        Path(arguments.source),
        arguments.target,
        arguments.format,
        dtype=arguments.dtype,
        force=arguments.force,
        heads=arguments.heads,
        width=arguments.width,
        exact_tokenizer=arguments.exact_tokenizer,
        calibrate=calibrate,
        check=check,
        options=read_options(arguments),
        verify=not arguments.no_verify,
        peer_python=arguments.peer_python,
        report=print,
    )


def trim_command(arguments: argparse.Namespace) -> None:
    """Save a model with the pieces of its vocabulary that the texts of a corpus use. Each of these texts keeps its
    pieces and its hidden states, bit by bit; all characters are kept, so that other texts have no more unknown
    pieces than before."""
    from bert_jax.compression.trim import trim_model

    trim_model(
        Path(arguments.source), arguments.target, arguments.corpus, read_options(arguments), ngram=arguments.ngram
    )


def prune_command(arguments: argparse.Namespace) -> None:
    """Save a model with fewer layers, attention heads and feed-forward units: really smaller arrays, not zeros.
    Heads and units are chosen among all layers by their importance for the loss of the model on examples, by the
    norm of their parameters, or at random; each layer keeps at least one of each."""
    from bert_jax.compression.examples import read_examples
    from bert_jax.compression.prune import Pruning, prune_model

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
    that rank in least squares, and print what it saves and, with --check, what it costs. Fine-tune it to regain a
    part of the loss."""
    from bert_jax.compression.factorize import factorize_model

    source, target, options = Path(arguments.source), arguments.target, read_options(arguments)
    factorize_model(source, target, arguments.rank, options, examples=arguments.check)


_CHECKING = (
    option("--no_verify", action="store_true", help="do not compare outputs with those of the other library"),
    option(
        "--peer_python", metavar="PYTHON",
        help="another Python in which the other library (transformers, ...) is installed",
    ),
)  # fmt: skip

COMMANDS = (
    Command("import", "convert weights in another format to a saved model", import_command, (
        option("--from", dest="source", required=True, metavar="DIR_OR_PREFIX", help=READABLE),
        option("--to", dest="target", required=True, type=Path, metavar="WORKDIR", help="a new folder"),
        reading(),
        *_CHECKING,
    )),
    Command("export", "write a model in a format of another library", export_command, (
        option("--from", dest="source", required=True, metavar="WORKDIR", help=READABLE),
        option("--to", dest="target", required=True, type=Path, metavar="DIR", help="the new folder"),
        option("--format", required=True, choices=_FORMATS, help="see docs/weights.md"),
        option(
            "--dtype", choices=("float32", "float16", "bfloat16", "int8"), default="float32",
            help="of the stored weights; int8 (onnx): of encoder and embeddings, and of their products (default: "
            "float32)",
        ),
        option(
            "--exact_tokenizer", action="store_true",
            help="write a tokenizer.json with exactly the rules of google-research/bert, which only the tokenizers "
            "library reads (default: those of transformers' BertTokenizer, which differ for some rare characters)",
        ),
        option(
            "--calibration", nargs="+", metavar="FILE",
            help="with --dtype int8: texts, one per line (.gz: packed), or JSON objects with text and text_pair "
            "(.jsonl), from which the range of the inputs of every product is taken (default: the range of each "
            "batch, when the program runs)",
        ),
        option(
            "--check", metavar="FILE",
            help="labeled JSON lines as for fine-tuning: print the score of the model and that of the exported "
            "program (onnx)",
        ),
        option(
            "--check_loss", type=float, metavar="X",
            help="with --check: export nothing (exit code 3) if the score is lower by more than X",
        ),
        option(
            "--heads", type=names_of, metavar="HEAD,...",
            help="export only these output layers and those that they need: pooler, mlm, nsp, rtd, sequence, "
            "token, span, choice, crf, pair, exits, sentence (default: all)",
        ),
        option(
            "--width", type=int, metavar="N",
            help="export the first N values of the vectors of texts (sentence-transformers, onnx, stablehlo, npz)",
        ),
        option("--force", action="store_true", help="replace DIR if it is not empty"),
        reading(),
        *_CHECKING,
    )),
    Command("trim", "leave out the pieces of the vocabulary that a corpus does not use", trim_command, (
        option("--from", dest="source", required=True, metavar="DIR_OR_PREFIX", help=READABLE),
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
    )),
    Command("factorize", "word embeddings of a smaller rank", factorize_command, (
        option("--from", dest="source", required=True, metavar="DIR_OR_PREFIX", help=READABLE),
        option("--to", dest="target", required=True, type=Path, metavar="WORKDIR", help="a new folder"),
        option("--rank", required=True, type=int, metavar="N", help="width of the smaller table"),
        option(
            "--check", metavar="FILE",
            help="labeled JSON lines as for fine-tuning: print the scores of both models",
        ),
        reading(),
    )),
    Command("prune", "leave out layers, attention heads and feed-forward units", prune_command, (
        option("--from", dest="source", required=True, metavar="DIR_OR_PREFIX", help=READABLE),
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
            help="layers to KEEP, counted from 0 (default: all); they are left out before importance is computed",
        ),
        option(
            "--even", action="store_true",
            help="keep the share in each layer, which leaves them all one size, instead of the best of all layers",
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
            help="for movement: the model with which the training of --from started",
        ),
        option("--seed", type=int, default=0, metavar="N", help="seed of draws (default: 0)"),
        reading(),
    )),
)  # fmt: skip
