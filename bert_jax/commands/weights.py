"""Subcommands of ``bert-jax`` that import and export models."""

import argparse
from pathlib import Path

from bert_jax.commands.options import SOURCE, Command, names_of, option, read_options, reading
from bert_jax.io.hub import model_path, push
from bert_jax.registry import load, names

_FORMATS = ("hf", "sentence-transformers", "tf1", "onnx", "stablehlo", "npz")


def import_command(arguments: argparse.Namespace) -> None:
    """Read a model in any format, save it in the format of this library, and check that the saved model equals the
    source."""
    from bert_jax.interop.import_model import import_model

    import_model(
        model_path(arguments.source),
        arguments.target,
        read_options(arguments),
        verify=not arguments.no_verify,
        peer_python=arguments.peer_python,
        report=print,
    )


def export_command(arguments: argparse.Namespace) -> None:
    """Write a model in another format. If a library that reads this format is installed, load the result with it,
    and print, for each output, the largest difference from the output of bert_jax."""
    from bert_jax.interop.export import export_model
    from bert_jax.interop.model_card import Publication

    if arguments.format is None:
        raise ValueError(f"--format: not given; formats that hold this model: {', '.join(_formats_of(arguments))}")
    if arguments.target is None:
        raise ValueError("--to: not given; name a new folder")
    publication = Publication(tuple(arguments.language), arguments.license, arguments.push)
    calibrate = check = None
    if any(getattr(arguments, name) is not None for name in ("calibration", "check", "check_loss")):
        calibrate, check = load("extensions", "export --calibration")(arguments)
    export_model(
        model_path(arguments.source),
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

    return formats_of(read_weights(model_path(arguments.source), read_options(arguments)).spec)


_CHECKING = (
    option(
        "--no_verify", action="store_true",
        help="do not compare the outputs with those of the other library; an export then does not compare the "
        "stored parameters either",
    ),
    option(
        "--peer_python", metavar="PYTHON",
        help="Python interpreter with the other library, such as transformers, for the comparison (default: the "
        "interpreter that runs this command)",
    ),
)  # fmt: skip


def _format(parser: argparse.ArgumentParser) -> None:
    formats = (*_FORMATS, *names("formats"))
    described = "format to write (see docs/weights.md); without it, the formats that can store the model are listed"
    parser.add_argument("--format", choices=formats, help=described)


COMMANDS = (
    Command("import", "convert a model from another format to a saved model", import_command, (
        SOURCE,
        option("--to", dest="target", required=True, type=Path, metavar="WORKDIR", help="new folder"),
        reading(),
        *_CHECKING,
    ), group="export and inspect", example="--model path/to/model --to saved/"),
    Command("export", "write a model in the format of another library", export_command, (
        SOURCE,
        option("--to", dest="target", type=Path, metavar="DIR", help="new folder for the export"),
        _format,
        option(
            "--dtype", choices=("float32", "float16", "bfloat16", "int8"), default="float32",
            help="dtype of the stored weights; int8 requires --format onnx (8-bit weights of encoder and "
            "embeddings, and 8-bit matrix products) or gguf (Q8_0) (default: float32)",
        ),
        option(
            "--exact_tokenizer", action="store_true",
            help="write a tokenizer.json that has exactly the rules of google-research/bert and that only the "
            "tokenizers library reads (default: the rules of transformers' BertTokenizer, which treat some rare "
            "characters differently)",
        ),
        option(
            "--with_onnx", action="store_true",
            help="with --format hf or sentence-transformers: also write onnx/model.onnx and "
            "onnx/model_quantized.onnx (8-bit weights), for transformers.js and other programs",
        ),
        option(
            "--calibration", nargs="+", metavar="FILE",
            help="with --dtype int8: files of typical texts, from which a fixed input range is computed for each "
            "matrix product; a file has one text per line (also .gz), or JSON objects with text and text_pair "
            "(.jsonl) (default: a scale for each token, computed at run time)",
        ),
        option(
            "--check", metavar="FILE",
            help="with --format onnx: labeled examples, in JSON lines as for fine-tuning, on which the model and "
            "the exported program are scored; for a classifier, calibration errors are also printed",
        ),
        option(
            "--check_loss", type=float, metavar="X",
            help="with --check: export nothing (exit code 3) if the score of the exported program is lower than "
            "that of the model by more than X",
        ),
        option(
            "--heads", type=names_of, metavar="HEAD,...",
            help="heads to export: pooler, mlm, nsp, rtd, sequence, token, span, choice, crf, pair, exits, "
            "sentence. Layers that a head needs are also exported (default: all heads)",
        ),
        option(
            "--width", type=int, metavar="N",
            help="truncate text vectors to their first N values; requires --format sentence-transformers, onnx, "
            "stablehlo or npz",
        ),
        option("--force", action="store_true", help="replace the folder named by --to if it is not empty"),
        option(
            "--language", type=names_of, default=(), metavar="CODE,...",
            help="ISO 639 codes of the model's languages for the model card, such as en,zh",
        ),
        option(
            "--license", default="", metavar="NAME",
            help="license of the model for the model card, such as apache-2.0",
        ),
        option(
            "--push", default="", metavar="OWNER/NAME",
            help="also upload the export to this repository of the Hugging Face Hub; requires the package "
            "huggingface_hub and a login (hf auth login)",
        ),
        reading(),
        *_CHECKING,
    ), group="export and inspect", example="--model runs/quickstart --to out/ --format hf"),
)  # fmt: skip
