"""The ``bert-jax`` console command: what one does with a model."""

import argparse
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_jax.cli.analysis_commands import ADD_COMMANDS as ADD_SEARCH_COMMANDS
from bert_jax.cli.options import (
    READABLE,
    add_command,
    add_model,
    add_pooling,
    add_reading,
    load_model,
    names_of,
    read_options,
    say,
    streaming,
)
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from bert_jax.process.exits import run_command
from bert_jax.process.signals import StopRequest


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bert-jax``; returns the exit code (2: the user's mistake, said in one line; 3: a check failed)."""
    parser = argparse.ArgumentParser(prog="bert-jax", description="What one does with a model.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    with_a_model = (
        _add_embed, *ADD_SEARCH_COMMANDS, _add_predict, _add_zero_shot, _add_fill_mask, _add_forward
    )  # fmt: skip
    for add in (_add_import, _add_export, *with_a_model, _add_plan):
        add(commands)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.run is plan_command:
        arguments.recipe = rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")

    def run() -> None:
        keep_to_cpu_without_accelerator()
        with StopRequest().at_once("stopped; what was not complete is not there: run the same command again"):
            arguments.run(arguments)

    return run_command(run)


def _add_checking(command: argparse.ArgumentParser) -> None:
    command.add_argument("--no_verify", action="store_true", help="do not compare outputs with the other library's")
    command.add_argument(
        "--peer_python", metavar="PYTHON",
        help="Python that has the other library (transformers, ...), where this one has not",
    )  # fmt: skip


def _add_import(commands: Any) -> None:
    command = add_command(commands, "import", import_command, "make a saved model of weights in another format")
    command.add_argument("--from", dest="source", required=True, metavar="DIR_OR_PREFIX", help=READABLE)
    command.add_argument("--to", dest="target", required=True, type=Path, metavar="WORKDIR", help="a new folder")
    add_reading(command)
    _add_checking(command)


def import_command(arguments: argparse.Namespace) -> None:
    """Read weights in any format, save them in this library's own, and prove that both are the same."""
    from bert_jax.interop.import_model import import_model

    import_model(
        Path(arguments.source),
        arguments.target,
        read_options(arguments),
        verify=not arguments.no_verify,
        peer_python=arguments.peer_python,
        report=print,
    )


def _add_export(commands: Any) -> None:
    command = add_command(commands, "export", export_command, "write a model in a format that others load")
    command.add_argument("--from", dest="source", required=True, metavar="WORKDIR", help=READABLE)
    command.add_argument("--to", dest="target", required=True, type=Path, metavar="DIR", help="the new folder")
    formats = ("hf", "sentence-transformers", "tf1", "onnx", "stablehlo", "npz")
    command.add_argument("--format", required=True, choices=formats, help="see docs/weights.md")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    command.add_argument(
        "--heads", type=names_of, metavar="HEAD,...",
        help="export these output layers alone: mlm, nsp, sequence, token, span, choice, pooler (default: all)",
    )  # fmt: skip
    command.add_argument("--force", action="store_true", help="replace DIR where it is not empty")
    add_reading(command)
    _add_checking(command)


def export_command(arguments: argparse.Namespace) -> None:
    """Write a model in another format, load it back by the other library's own route, and say the difference."""
    from bert_jax.interop.export import export_model

    export_model(
        Path(arguments.source),
        arguments.target,
        arguments.format,
        dtype=arguments.dtype,
        force=arguments.force,
        heads=arguments.heads,
        options=read_options(arguments),
        verify=not arguments.no_verify,
        peer_python=arguments.peer_python,
        report=print,
    )


# ------------------------------------------------------------------ a model at work


def _add_embed(commands: Any) -> None:
    command = add_command(commands, "embed", embed_command, "texts to vectors")
    add_model(command, "texts to embed")
    command.add_argument("--output", type=Path, metavar="FILE", help=".npy: float32[texts, E]; else JSON lines")
    add_pooling(command)
    prompt = command.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="put before every text")
    prompt.add_argument("--prompt_name", metavar="NAME", help="the model's prompt of that name")
    command.add_argument(
        "--layers", metavar="-1,-2,...",
        help="with --per_token: encoder layers, from 0, or from the last with -1 (default: -1,-2,-3,-4)",
    )  # fmt: skip
    command.add_argument(
        "--per_token", action="store_true",
        help="every token's vectors, as google-research/bert's extract_features.py writes them",
    )  # fmt: skip


def embed_command(arguments: argparse.Namespace) -> None:
    """One vector per text, or with --per_token those of every token and chosen layer."""
    from bert_jax.inference.embed import LAST_FOUR, embed, extract_features
    from bert_jax.inference.text_files import write_json_lines, write_npy

    pooled = ("pooling", "normalize", "prompt", "prompt_name")
    clash = [name for name in pooled if getattr(arguments, name) is not None] if arguments.per_token else []
    if clash or (arguments.layers and not arguments.per_token):
        what = f"--{clash[0]} has no meaning with --per_token" if clash else "--layers needs --per_token"
        raise ValueError(f"{what}: choose one vector per text, or every token of some layers")
    inputs, options = streaming(arguments)
    texts = (_text_of(value) for value in inputs)
    to_array = arguments.output is not None and arguments.output.suffix == ".npy"
    if arguments.per_token:
        if to_array:
            raise ValueError(f"--output {arguments.output}: tokens of texts differ in number; give a .jsonl file")
        layers = _whole_numbers("--layers", arguments.layers) if arguments.layers else LAST_FOUR
        write_json_lines(extract_features(load_model(arguments), texts, layers=layers, **options), arguments.output)
        return
    chosen = {name: getattr(arguments, name) for name in pooled}
    vectors = embed(load_model(arguments), texts, **chosen, **options)
    if to_array:
        count, width = write_npy(vectors, arguments.output)
        say(f"{arguments.output}: float32[{count}, {width}]")
        return
    write_json_lines(({"embedding": [round(float(x), 7) for x in vector]} for vector in vectors), arguments.output)


def _text_of(value: Any) -> str:
    text = value if isinstance(value, str) else value.get("text")
    if not isinstance(text, str):
        raise ValueError(f'{str(value)[:80]}: no text there; write {{"text": "..."}}')
    return text


def _whole_numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name}: {text!r} is not allowed; allowed: whole numbers with commas, -1,-2") from None


def _add_predict(commands: Any) -> None:
    command = add_command(commands, "predict", predict_command, "labels, tags, answers or choices")
    add_model(command, "texts; pairs, questions and choices come as JSON lines")
    command.add_argument("--task", choices=("sequence", "token", "span", "choice"), help="which head, if several")
    command.add_argument("--output", type=Path, metavar="FILE", help="JSON lines (default: standard output)")


def predict_command(arguments: argparse.Namespace) -> None:
    """What the task head says, as JSON lines: class names with probabilities (values for regression), tags, an
    answer, a choice. JSON input: text and text_pair (span heads: question and passage), text and choices, or the
    words of a text to be tagged."""
    from bert_jax.inference.predict import predict
    from bert_jax.inference.text_files import write_json_lines

    inputs, options = streaming(arguments)
    write_json_lines(predict(load_model(arguments), inputs, task=arguments.task, **options), arguments.output)


def _add_zero_shot(commands: Any) -> None:
    command = add_command(
        commands, "zero-shot", zero_shot_command, "classes that the model was not trained on",
        epilog='Example: bert-jax zero-shot "What a goal!" --model NLI_MODEL --labels sport politics',
    )  # fmt: skip
    texts = "texts, before --labels; where JSON lines have a label, the accuracy is said"
    add_model(command, texts, with_labels=False)
    command.add_argument(
        "--labels", required=True, nargs="+", metavar="LABEL[=WORD,...]",
        help="two or more, in the order of the output, with the words that stand for each (default: the label)",
    )  # fmt: skip
    command.add_argument(
        "--template", metavar="TEXT",
        help='for a model trained on inference a hypothesis with {} for the word (default: "This text is about '
        '{}."), for a masked-LM model a prompt with {text} and a mask ("{text} It was [MASK].")',
    )  # fmt: skip
    command.add_argument("--multi_label", action="store_true", help="several labels of a text, or none, may hold")
    command.add_argument(
        "--entailment", metavar="NAME", help="the model's class (default: the one that begins with entail)"
    )
    command.add_argument("--output", type=Path, metavar="FILE", help="JSON lines (default: standard output)")


def zero_shot_command(arguments: argparse.Namespace) -> None:
    """Which of some labels fits a text, by a model that was not trained on them: JSON lines as those of predict. A
    model trained on natural language inference says which hypothesis the text entails, a masked-LM model which
    words fit the mask of a prompt."""
    from bert_jax.inference.text_files import write_json_lines
    from bert_jax.inference.zero_shot import right_answer, scores, zero_shot

    if not arguments.texts and arguments.input is None and sys.stdin is not None and sys.stdin.isatty():
        raise ValueError(
            "no text given; texts stand before --labels, as all that follows it is labels, or in --input"
        )
    labels, several = _label_words(arguments.labels), arguments.multi_label
    inputs, options = streaming(arguments)
    waiting: deque[Any] = deque()
    right, answered = [], []

    def texts() -> Iterator[str]:
        for value in inputs:
            if not isinstance(value, str) and value.get("text_pair"):
                raise ValueError(f"{str(value)[:80]}: zero-shot takes one text, without text_pair")
            waiting.append(right_answer(value, [*labels], several))
            yield _text_of(value)

    results = zero_shot(
        load_model(arguments), texts(), labels, template=arguments.template, several=several,
        entailment=arguments.entailment, **options,
    )  # fmt: skip

    def rows() -> Iterator[dict[str, Any]]:
        for row in results:
            answer = waiting.popleft()
            if answer is not None:
                right.append(answer)
                answered.append(row)
            yield row

    write_json_lines(rows(), arguments.output)
    tell = say if arguments.output is None else print
    if right:
        tell(f"{len(right):,} labelled texts")
        for name, (value, low, high) in scores(right, answered, [*labels], several).items():
            tell(f"{name} {value:.4f} [{low:.4f}, {high:.4f}]")


def _label_words(given: Sequence[str]) -> dict[str, list[str]]:
    """LABEL=WORD,WORD or LABEL alone, its own word."""
    labels: dict[str, list[str]] = {}
    for text in given:
        label, equals, words = (part.strip() for part in text.partition("="))
        if not label or (not equals and "," in label):
            allowed = "LABEL, or LABEL=WORD,WORD, and a blank before the next"
            raise ValueError(f"--labels: {text!r} is not allowed; allowed: {allowed}")
        if label in labels:
            raise ValueError(f"--labels: {label!r} is given twice; give it once, LABEL=WORD,WORD")
        labels[label] = [word.strip() for word in words.split(",")] if equals else [label]
    return labels


def _add_fill_mask(commands: Any) -> None:
    command = add_command(commands, "fill-mask", fill_mask_command, "the best pieces for each [MASK] of a text")
    add_model(command, "texts with [MASK]")
    command.add_argument("--top", type=int, default=5, help="pieces per mask (default: 5)")
    command.add_argument("--json", action="store_true", help="one JSON object per text")


def fill_mask_command(arguments: argparse.Namespace) -> None:
    """The model's best pieces for each [MASK] of a text, with their probabilities."""
    from bert_jax.inference.fill import fill_mask
    from bert_jax.inference.text_files import write_json_lines

    inputs, options = streaming(arguments)
    filled = fill_mask(load_model(arguments), (_text_of(value) for value in inputs), top=arguments.top, **options)
    if arguments.json:
        masks = ((text.text, [{"predictions": mask.predictions} for mask in text.masks]) for text in filled)
        write_json_lines(({"text": text, "masks": found} for text, found in masks), None)
        return
    for text in filled:
        print(text.text)
        for number, mask in enumerate(text.masks, 1):
            label = f"  [MASK] {number}" if len(text.masks) > 1 else "  [MASK]"
            best = "  ".join(f"{piece} {probability:.3f}" for piece, probability in mask.predictions)
            print(f"{label}: {best}", flush=True)


def _add_forward(commands: Any) -> None:
    command = add_command(commands, "forward", forward_command, "every output on arrays of ids")
    add_model(command)
    command.add_argument("--input", required=True, type=Path, metavar="IN.npz", help="input_ids int[B, S], ...")
    command.add_argument("--output", required=True, type=Path, metavar="OUT.npz")
    command.add_argument("--hidden_states", action="store_true", help="add hidden_states [L+1, B, S, H]")
    command.add_argument("--attentions", action="store_true", help="add attentions [L, B, A, S, S]")


def forward_command(arguments: argparse.Namespace) -> None:
    """Run the model on input_ids, attention_mask (default: 1) and token_type_ids (default: 0) of an npz file."""
    from bert_jax.inference.forward import forward_npz

    shapes = forward_npz(
        load_model(arguments), arguments.input, arguments.output,
        hidden_states=arguments.hidden_states, attentions=arguments.attentions,
    )  # fmt: skip
    for name, shape in shapes.items():
        print(f"{name} {list(shape)}")


# ------------------------------------------------------------------ a run before it is rented


def _add_plan(commands: Any) -> None:
    command = add_command(
        commands, "plan", plan_command, "memory, speed, time and cost of a recipe on hardware that is not here",
        allow_abbrev=False, usage="bert-jax plan --config FILE --topology NAME [options] [--section.key VALUE ...]",
        epilog="--section.key VALUE: any option of a recipe, as for run_pretrain.py. See docs/planning.md.",
    )  # fmt: skip
    command.add_argument("--config", action="append", default=[], metavar="FILE", help="recipe; several stack")
    command.add_argument("--topology", metavar="NAME", help="v5e:16x16, v5e-256, v5p:4x4x8, h100:8, ...")
    command.add_argument("--devices", type=int, metavar="N", help="for --show_sharding, in the place of --topology")
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.add_argument("--price_per_chip_hour", type=float, metavar="X", help="gives the cost of the run")
    command.add_argument(
        "--first_step", type=int, default=0, metavar="N", help="steps done by earlier phases (default: 0)"
    )
    command.add_argument("--show_sharding", action="store_true", help="how every parameter is cut, and its bytes")
    command.add_argument("--search", action="store_true", help="try microbatches, recomputation and meshes")
    command.add_argument("--tries", type=int, default=8, metavar="N", help="most compilations (default: 8)")
    command.add_argument(
        "--batches", type=names_of, default=(), metavar="16,64,...",
        help="with --search: sequences per device to try, with other global batches than the recipe's",
    )  # fmt: skip
    command.add_argument("--output", type=Path, metavar="FILE", help="with --search: the best, as a recipe")


def plan_command(arguments: argparse.Namespace) -> None:
    """Predict memory, step time, MFU, duration and cost of a pretraining recipe on a TPU slice, by compiling its
    training step ahead of time (extra: tpu), or on GPUs, by arithmetic. No accelerator is needed."""
    from bert_jax.planner.topology import prepare_environment

    prepare_environment()  # before jax is imported
    from bert_jax.planner.command import PlanOptions, plan

    options = {name: value for name, value in vars(arguments).items() if name not in ("command", "run", "config")}
    files = [word for file in arguments.config for word in ("--config", file)]
    plan(PlanOptions(**options | {"recipe": [*files, *arguments.recipe]}))


if __name__ == "__main__":
    sys.exit(main())
