"""The class of a ``bert-jax`` subcommand, and the options that several subcommands share."""

import argparse
import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bert_jax import registry
from bert_jax.config import ModelConfig
from bert_jax.config.loader import Settings
from bert_jax.config.options import Setting
from bert_jax.json_values import Json
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from bert_jax.registry import MODULE

if TYPE_CHECKING:
    from bert_jax.inference.batching import BatchOptions
    from bert_jax.inference.embed import VectorOptions
    from bert_jax.inference.loaded import LoadedModel
    from bert_jax.inference.text_files import Texts
    from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
    from bert_jax.training.logging.logger import Callback

READABLE = (
    "a model: workdir of a run, saved model, Hugging Face or sentence-transformers folder, name on the Hugging "
    "Face Hub, prefix of a TF1 checkpoint, or npz export"
)

BATCH_TOKENS = "maximum number of tokens per batch (default: depends on the device)"

_ONE_FILE = f"{MODULE}: needs one file, such as {MODULE} fnet_encoder.py"

# A function that adds options to a parser.
Options = Callable[[argparse.ArgumentParser], argparse.Action | None]
# Part of ``bert-jax --help`` that lists a command.
Group = Literal["train", "use", "export and inspect", "more"]


@dataclass(frozen=True)
class Command:
    """A subcommand: ``run`` is called with the parsed arguments, and the docstring of ``run`` is the description of
    the subcommand in ``--help``. ``example`` holds the arguments of an example in its help."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], None]
    options: Sequence[Options]
    # Further arguments of add_parser.
    parser: Mapping[str, Any] = field(default_factory=dict)
    # False: a stopped command keeps the complete rows of its output.
    is_whole: bool = True
    # True: arguments that are no options of the command are those of a recipe.
    takes_recipe: bool = False
    group: Group = "more"
    example: str = ""

    def add(self, commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
        """Add the parser of this subcommand to the subparsers ``commands``."""
        description = textwrap.fill(inspect.cleandoc(self.run.__doc__ or ""), help_width())
        parser = commands.add_parser(
            self.name,
            description=description,
            epilog=f"example:\n  bert-jax {self.name} {self.example}" if self.example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **self.parser,
        )
        parser.set_defaults(run=self.run, is_whole=self.is_whole, takes_recipe=self.takes_recipe)
        for add in self.options:
            add(parser)


def help_width() -> int:
    """Return the number of characters in a line of help."""
    return max(20, shutil.get_terminal_size().columns - 2)


def option(*names: str, **settings: Any) -> Options:
    """Return a function that adds an option or a positional argument to a parser. ``settings`` are the keyword
    arguments of ``add_argument``."""
    return lambda parser: parser.add_argument(*names, **settings)


# ------------------------------------------------------------------ types


def truth(text: str) -> bool:
    """Parse the text "true" or "false" as a bool."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: true, false")
    return text == "true"


def names_of(text: str) -> tuple[str, ...]:
    """Parse a list of names separated by commas."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: names separated by commas")
    return names


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Parse the value of the option ``name``, integers separated by commas. Raises ``ValueError`` for another
    text."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"{name}: {text!r} is not allowed; allowed: integers separated by commas, as in -1,-2"
        ) from None


# ------------------------------------------------------------------ shared options


def reading(*, with_labels: bool = True) -> Options:
    """Return the options that every command that reads a model has. If ``with_labels`` is True, they include
    ``--labels``, which names the classes."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("reading the model")
        group.add_argument(
            "--do_lower_case", type=truth, metavar="{true,false}",
            help="whether to lower-case the text; cannot change the setting of a saved model (default: the model's "
            "setting or, if it has none, a guess from the vocabulary)",
        )  # fmt: skip
        parser.set_defaults(class_names=None)
        if with_labels:
            group.add_argument(
                "--labels", dest="class_names", type=names_of, metavar="A,B,...",
                help="class names of the task head, in id order (default: the names that the model stores)",
            )  # fmt: skip
        group.add_argument(
            "--activation", choices=("gelu", "gelu_tanh"),
            help="activation of a TF1 checkpoint: gelu (computed with erf), or gelu_tanh as in "
            "google-research/bert (default: gelu_tanh)",
        )  # fmt: skip
        group.add_argument(
            "--ema", type=truth, metavar="{true,false}",
            help="true: read the moving average of the parameters (default for runs that have one); false: read "
            "the parameters themselves (default for TF1 checkpoints)",
        )  # fmt: skip
        group.add_argument(
            "--network", default="", metavar="NAME",
            help="network to read from a pretraining run that has two: discriminator (default) or generator",
        )  # fmt: skip
        group.add_argument(
            "--allow_mismatch", action="store_true",
            help="read the model even if its config and tensors contradict each other; the tensors take precedence",
        )  # fmt: skip

    return add


def model(texts: str = "", *, required: bool = True, with_labels: bool = True, with_int8: bool = False) -> Options:
    """Return the options for a model and, if ``texts`` is not empty, for input texts. ``texts`` is the help text of
    the positional argument.

    If ``required`` is False, ``--model`` is optional, because the command also accepts vectors instead of a model.
    ``with_int8`` is True for commands that compute vectors of texts with :func:`vector_options`.
    """
    dtypes = ("float32", "bfloat16", *(["int8"] if with_int8 else []))
    int8 = "; int8: 8-bit computation by onnxruntime on the CPU" if with_int8 else ""
    described = f"dtype of the computation{int8} (default: float32)"

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", required=required, metavar="DIR_OR_PREFIX", help=READABLE)
        parser.add_argument("--dtype", choices=dtypes, default="float32", help=described)
        if texts:
            parser.add_argument("texts", nargs="*", metavar="TEXT", help=texts)
            parser.add_argument(
                "--input", metavar="FILE",
                help="file with one text per line (blank lines are skipped), or a .jsonl file (default: standard "
                "input)",
            )  # fmt: skip
            parser.add_argument(
                "--json_lines",
                action="store_true",
                help="read each line of the input as a JSON object",
            )
        if texts or not required:
            parser.add_argument("--batch_tokens", type=int, metavar="N", help=BATCH_TOKENS)
        reading(with_labels=with_labels)(parser)

    return add


def pooling(parser: argparse.ArgumentParser) -> None:
    """Add the options that define how the vector of a text is computed."""
    parser.add_argument(
        "--pooling",
        choices=("cls", "mean", "max"),
        help="pooling of the token outputs into one vector (default: the model's pooling or, if it has none, mean)",
    )
    parser.add_argument(
        "--normalize", type=truth, metavar="{true,false}",
        help="whether to divide each vector by its Euclidean norm (default: the model's setting)",
    )  # fmt: skip
    parser.add_argument("--width", type=int, metavar="N", help="truncate each vector to its first N values")


# The model that a command converts; --from is its older name.
SOURCE = option("--model", "--from", dest="source", required=True, metavar="DIR_OR_PREFIX", help=READABLE)


def model_or_place(parser: argparse.ArgumentParser) -> None:
    """Add ``--model`` and, as its older form, the model as an argument without a name."""
    parser.add_argument("--model", metavar="DIR_OR_PREFIX", help=READABLE)
    parser.add_argument("place", nargs="?", metavar="MODEL", help="alternative to --model")


def take_place(arguments: argparse.Namespace) -> None:
    """Set ``arguments.model`` for :func:`model_or_place`. Raises ``ValueError`` unless one model is named."""
    if (arguments.model is None) == (arguments.place is None):
        raise ValueError("--model: name one model, as --model DIR_OR_PREFIX")
    arguments.model = arguments.model or arguments.place


OUTPUT = option("--output", type=Path, metavar="FILE", help="file for JSON lines (default: standard output)")


def take_encoder(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take ``--model.module FILE`` out of ``words`` and add the encoder in this Python file: a class ``Encoder``
    with the interface of ``bert_jax.model.bert.Encoder`` and, if it adds options, a subclass ``Config`` of
    ``ModelConfig``. Return the other words, and the option that sets ``model.encoder`` to the name of the file (no
    option without ``--model.module``).

    The file is run, so that in a run with several processes ``hosts.start`` comes first. Raises ``ValueError`` if
    the file cannot be loaded or defines no such class, or if an encoder has its name.
    """
    joined = [f"{MODULE}={word}" if i and words[i - 1] == MODULE else word for i, word in enumerate(words)]
    files = [word.removeprefix(f"{MODULE}=") for word in joined if word.startswith(f"{MODULE}=")]
    rest = [word for word in joined if word != MODULE and not word.startswith(f"{MODULE}=")]
    if len(files) != 1:
        if MODULE in joined or files:
            raise ValueError(_ONE_FILE)
        return rest, []
    return rest, ["--model.encoder", _add_encoder(files[0])]


def with_encoder(settings: Settings) -> Settings:
    """Return ``settings`` with ``model.encoder`` in place of the flag ``model.module`` (:func:`take_encoder`)."""
    key = MODULE.strip("-")
    found = [flag for flag in settings.flags if flag.key == key]
    if not found:
        return settings
    file = found[0].value
    if len(found) > 1 or not isinstance(file, str):
        raise ValueError(_ONE_FILE)
    rest = Settings(settings.files, tuple(flag for flag in settings.flags if flag.key != key))
    return rest.followed_by(Setting(found[0].source, "model.encoder", _add_encoder(file)))


def _add_encoder(file: str) -> str:
    """Run ``file``, add its encoder, and return the name of the encoder."""
    keep_to_cpu_without_accelerator()  # before JAX is imported
    from bert_jax.io.user_module import user_class
    from bert_jax.model.layers import Block

    option, name = MODULE.strip("-"), Path(file).stem
    encoder = user_class(file, option, Block, "Encoder")
    module = encoder.__module__
    if registry.names("encoders").get(name, f"{module}:Encoder") != f"{module}:Encoder":
        raise ValueError(f"{option}: {file}: {name} is the name of another encoder; rename the file")
    section = getattr(sys.modules[module], "Config", ModelConfig)
    if not (isinstance(section, type) and issubclass(section, ModelConfig)):
        raise ValueError(f"{option}: {file}: Config does not extend bert_jax.config.ModelConfig")
    registry.add("encoders", name, f"{module}:Encoder")
    if section is not ModelConfig:
        registry.add("encoder_options", name, f"{module}:Config")
    return name


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The inputs of a run that a program passes in addition to its options. The defaults are those of a command."""

    # See ``Launch``.
    report: Callable[[str], None] | None = None
    callbacks: "tuple[Callback, ...]" = ()
    # The model of init_from, if it is in memory.
    model: "ModelBundle | None" = None

    def say(self, line: str) -> None:
        """Report a line about the work before the run opens its log."""
        if self.report is None:
            print(line, flush=True)
        else:
            self.report(line)


COMMAND = Caller()


# ------------------------------------------------------------------ arguments to objects


def read_options(arguments: argparse.Namespace) -> "ReadOptions":
    """Return the ``ReadOptions`` for the parsed options of :func:`reading`."""
    from bert_jax.interop.model_bundle import ReadOptions

    return ReadOptions(
        lower_case=arguments.do_lower_case,
        labels=arguments.class_names,
        allow_mismatch=arguments.allow_mismatch,
        ema=arguments.ema,
        network=arguments.network,
        activation=arguments.activation,
    )


def load_model(arguments: argparse.Namespace) -> "LoadedModel":
    """Load the model that ``--model`` names, and print the notes of the reader to standard error."""
    from bert_jax.inference.loaded import load

    # int8 is an option of embed (vector_options).
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if arguments.dtype == "bfloat16" else "float32"
    loaded = load(arguments.model, dtype=dtype, options=read_options(arguments))
    for note in loaded.notes:
        say(note)
    return loaded


def streaming(arguments: argparse.Namespace, *, of_tasks: bool = False) -> "tuple[Texts, BatchOptions]":
    """Return the input texts of a command, and the options of :func:`run_options`. ``of_tasks``: see
    :func:`bert_jax.inference.text_files.read_texts`."""
    from bert_jax.inference.text_files import read_texts, refuse_blank

    options = run_options(arguments)
    refuse_blank(arguments.texts)
    inputs = read_texts(arguments.texts, arguments.input, arguments.json_lines, of_tasks=of_tasks, report=say)
    return inputs, options


def run_options(arguments: argparse.Namespace) -> "BatchOptions":
    """Return the ``BatchOptions`` of a command that runs texts through a model."""
    if arguments.batch_tokens is not None and arguments.batch_tokens < 1:
        raise ValueError(f"--batch_tokens: {arguments.batch_tokens} is not allowed; allowed: 1 or more")
    from bert_jax.inference.batching import BatchOptions

    return BatchOptions(arguments.batch_tokens, progress=_progress_counter())


def vector_options(
    arguments: argparse.Namespace, prompt: str | None = None, prompt_name: str | None = None
) -> "VectorOptions":
    """Return the ``VectorOptions`` for the parsed options of :func:`pooling` and a prompt."""
    from bert_jax.inference.embed import VectorOptions

    dtype: Literal["int8"] | None = "int8" if arguments.dtype == "int8" else None
    return VectorOptions(arguments.pooling, arguments.normalize, arguments.width, prompt, prompt_name, dtype)


def text_of(value: str | Mapping[str, Json]) -> str:
    """Return the text of an input, a text or an object with text. Raises ``ValueError`` for other objects."""
    text = value if isinstance(value, str) else value.get("text")
    if not isinstance(text, str):
        raise ValueError(f'{str(value)[:80]}: no text; write {{"text": "..."}}')
    return text


def score_lines(scores: Mapping[str, Sequence[float]]) -> list[str]:
    """Return one line per score, with its value and 95% interval. ``scores`` maps names to (value, lower bound,
    upper bound)."""
    return [f"{name} {value:.4f} [{low:.4f}, {high:.4f}]" for name, (value, low, high) in scores.items()]


def say(line: str) -> None:
    """Print a line to standard error, so that standard output contains only results."""
    print(line, file=sys.stderr, flush=True)


def _progress_counter() -> Callable[[int], None] | None:
    """Return a function that shows the number of processed texts on standard error. Return None unless standard
    error is a terminal and standard output is not."""
    if not sys.stderr.isatty() or sys.stdout.isatty():
        return None

    def show(done: int) -> None:
        print(f"\r{done:,} texts", end="", file=sys.stderr, flush=True)

    return show
