"""What the subcommands of ``bert-jax`` share: options that read a model, its texts, and what is said meanwhile."""

import argparse
import sys
from typing import Any

READABLE = "workdir, saved model, Hugging Face or sentence-transformers folder, TF1 checkpoint prefix, npz export"


def truth(text: str) -> bool:
    """The type of an option that is true or false."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: true, false")
    return text == "true"


def names_of(text: str) -> tuple[str, ...]:
    """The type of an option of names with commas between them."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: names with commas between them")
    return names


def add_command(commands: Any, name: str, run: Any, help: str, **options: Any) -> argparse.ArgumentParser:
    """A subcommand whose function ``run`` is called with the arguments; its docstring is the description."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=help, description=run.__doc__, **options)
    command.set_defaults(run=run)
    return command


def add_reading(command: argparse.ArgumentParser, *, with_labels: bool = True) -> None:
    """Options of every command that reads a model; ``with_labels``: also the names of its head's classes."""
    group = command.add_argument_group("reading the model")
    group.add_argument(
        "--do_lower_case", type=truth, metavar="{true,false}",
        help="case of a vocabulary whose folder does not say it (default: guessed from the pieces, and said)",
    )  # fmt: skip
    command.set_defaults(class_names=None)
    if with_labels:
        group.add_argument(
            "--labels", dest="class_names", type=names_of, metavar="A,B,...",
            help="class names of the task head, in id order (default: as the model names them)",
        )  # fmt: skip
    group.add_argument(
        "--activation", choices=("gelu", "gelu_tanh"),
        help="what a TF1 checkpoint's gelu is: erf (gelu) or, as in the published code and by default, tanh",
    )  # fmt: skip
    group.add_argument(
        "--ema", type=truth, metavar="{true,false}",
        help="the parameters' moving average or the parameters (default: the average where there is one)",
    )  # fmt: skip
    group.add_argument(
        "--allow_mismatch", action="store_true",
        help="go on where config and tensors contradict each other (the tensors decide)",
    )  # fmt: skip


def read_options(arguments: argparse.Namespace) -> Any:
    """What :func:`add_reading` added, as the readers take it."""
    from bert_jax.interop.exchange import ReadOptions

    return ReadOptions(
        lower_case=arguments.do_lower_case,
        labels=arguments.class_names,
        allow_mismatch=arguments.allow_mismatch,
        ema=arguments.ema,
        activation=arguments.activation,
    )


def add_model(
    command: argparse.ArgumentParser, texts: str = "", *, required: bool = True, with_labels: bool = True
) -> None:
    """A model, and ``texts`` to run it on; without ``required`` there may be vectors in its place."""
    command.add_argument("--model", required=required, metavar="DIR_OR_PREFIX", help=READABLE)
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    if texts:
        command.add_argument("texts", nargs="*", metavar="TEXT", help=texts)
        command.add_argument(
            "--input",
            metavar="FILE",
            help="texts, one a line (blank ones are left out), or .jsonl (default: stdin)",
        )
        command.add_argument("--json_lines", action="store_true", help="the input holds JSON objects, one a line")
    if texts or not required:
        command.add_argument("--batch_tokens", type=int, metavar="N", help="tokens that run at a time")
    add_reading(command, with_labels=with_labels)


def add_pooling(command: argparse.ArgumentParser) -> None:
    """How a text becomes one vector."""
    command.add_argument("--pooling", choices=("cls", "mean", "max"), help="default: the model's own, else mean")
    command.add_argument("--normalize", type=truth, metavar="{true,false}", help="default: as the model's own")


def load_model(arguments: argparse.Namespace) -> Any:
    """The model of ``--model``; what there is to say of how it was read goes to standard error."""
    from bert_jax.inference.loaded import load

    model = load(arguments.model, dtype=arguments.dtype, options=read_options(arguments))
    for note in model.notes:
        say(note)
    return model


def streaming(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The inputs and the options that every command over texts hands on."""
    from bert_jax.inference.text_files import read_texts

    options = run_options(arguments)
    return read_texts(arguments.texts, arguments.input, arguments.json_lines), options


def run_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """How texts run through a model, the same for every use of it."""
    if arguments.batch_tokens is not None and arguments.batch_tokens < 1:
        raise ValueError(f"--batch_tokens: {arguments.batch_tokens} is not allowed; allowed: 1 or more")
    return {"batch_tokens": arguments.batch_tokens, "progress": _progress_counter()}


def say(line: str) -> None:
    """A line for the person, apart from the results."""
    print(line, file=sys.stderr, flush=True)


def _progress_counter() -> Any:
    """A counter on standard error where a person looks at it and the results go elsewhere."""
    if not sys.stderr.isatty() or sys.stdout.isatty():
        return None

    def show(done: int) -> None:
        print(f"\r{done:,} texts", end="", file=sys.stderr, flush=True)

    return show
