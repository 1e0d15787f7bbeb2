"""Subcommands of ``bert-jax`` that import and export models."""

import argparse
from pathlib import Path

from bert_jax.commands.options import SOURCE, Command, names_of, option, read_options, reading
from bert_jax.registry import load, names

_FORMATS = ("hf", "sentence-transformers", "tf1", "onnx", "stablehlo", "npz")


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
    from bert_jax.interop.model_card import Publication
    from bert_jax.io.hub import push

    if arguments.format is None:
        raise ValueError(f"--format: not given; formats that hold this model: {', '.join(_formats_of(arguments))}")
    if arguments.target is None:
        raise ValueError("--to: not given; name a new folder")
    publication = Publication(tuple(arguments.language), arguments.license, arguments.push)
    calibrate = check = None
    if any(getattr(arguments, name) is not None for name in ("calibration", "check", "check_loss")):
        calibrate, check = load("extensions", "export --calibration")(arguments)
    export_model(
        Path(arguments.source),
        arguments.target,
        arguments.format,
        dtype=arguments.dtype,
        force=arguments.force,
        heads=arguments.heads,
        width=arguments.width,
        exact_tokenizer=arguments.exact_tokenizer,
        with_onnx=arguments.with_onnx,
        calibrate=calibrate,
        check=check,
        options=read_options(arguments),
        verify=not arguments.no_verify,
        peer_python=arguments.peer_python,
        publication=publication,
        report=print,
    )
    if arguments.push:
        print(f"uploaded to {push(arguments.target, arguments.push)}")


def _formats_of(arguments: argparse.Namespace) -> list[str]:
    from bert_jax.interop.export_table import formats_of
    from bert_jax.interop.readers import read_weights

    return formats_of(read_weights(Path(arguments.source), read_options(arguments)).spec)


_CHECKING = (
    option("--no_verify", action="store_true", help="do not compare outputs with those of the other library"),
    option(
        "--peer_python", metavar="PYTHON",
        help="another Python in which the other library (transformers, ...) is installed",
    ),
)  # fmt: skip


def _format(parser: argparse.ArgumentParser) -> None:
    formats = (*_FORMATS, *names("formats"))
    described = "see docs/weights.md; without it, the command names the formats that hold the model"
    parser.add_argument("--format", choices=formats, help=described)


COMMANDS = (
    Command("import", "convert weights in another format to a saved model", import_command, (
        SOURCE,
        option("--to", dest="target", required=True, type=Path, metavar="WORKDIR", help="a new folder"),
        reading(),
        *_CHECKING,
    ), group="export and inspect", example="--model path/to/model --to saved/"),
    Command("export", "write a model in a format of another library", export_command, (
        SOURCE,
        option("--to", dest="target", type=Path, metavar="DIR", help="the new folder"),
        _format,
        option(
            "--dtype", choices=("float32", "float16", "bfloat16", "int8"), default="float32",
            help="dtype of the stored weights; int8 (onnx: for encoder, embeddings and their products; gguf: Q8_0) "
            "(default: float32)",
        ),
        option(
            "--exact_tokenizer", action="store_true",
            help="write a tokenizer.json with exactly the rules of google-research/bert, which only the tokenizers "
            "library reads (default: those of transformers' BertTokenizer, which differ for some rare characters)",
        ),
        option(
            "--with_onnx", action="store_true",
            help="with --format hf or sentence-transformers: also write onnx/model.onnx and, in 8 bits, "
            "onnx/model_quantized.onnx, for transformers.js and other programs",
        ),
        option(
            "--calibration", nargs="+", metavar="FILE",
            help="with --dtype int8: texts, one per line (.gz: packed), or JSON objects with text and text_pair "
            "(.jsonl), which determine the input range of each matrix product (default: a scale for each "
            "token, computed at run time)",
        ),
        option(
            "--check", metavar="FILE",
            help="labeled JSON lines as for fine-tuning: print the scores of the model and of the exported "
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
        option(
            "--language", type=names_of, default=(), metavar="CODE,...",
            help="languages of the texts, for the model card: codes of ISO 639, such as en,zh",
        ),
        option("--license", default="", metavar="NAME", help="license, for the model card, such as apache-2.0"),
        option(
            "--push", default="", metavar="OWNER/NAME",
            help="upload DIR to this model on the Hugging Face Hub; needs huggingface_hub, after: hf auth login",
        ),
        reading(),
        *_CHECKING,
    ), group="export and inspect", example="--model runs/quickstart --to out/ --format hf"),
)  # fmt: skip
