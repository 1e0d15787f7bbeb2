"""Subcommands of ``bert-jax`` about task heads: predictions, and labels without training."""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bert_jax.commands.options import (
    OUTPUT,
    Command,
    load_model,
    model,
    option,
    say,
    score_lines,
    streaming,
    text_of,
)
from bert_jax.io.text_lines import Each

if TYPE_CHECKING:
    from bert_jax.inference.text_files import Entry


def predict_command(arguments: argparse.Namespace) -> None:
    """Write the predictions of a fine-tuned model as JSON lines: values, tags, answers, choices, or classes with
    their probabilities. An input is plain text or a JSON object. The fields of
    the object are text and text_pair for a pair; text (the question) and text_pair (the passage) for question
    answering; text and choices for multiple choice; words for tagging."""
    from bert_jax.inference.predict import predict
    from bert_jax.inference.text_files import with_ids, write_json_lines
    from bert_jax.tasks.task import Prediction

    inputs, batches = streaming(arguments, of_tasks=True)
    loaded, last, documents = load_model(arguments), object(), 0
    settings = loaded.spec.task
    if settings is not None and settings.module:
        say(f"the run converted texts by {settings.module}, which predict does not run; give converted inputs")

    def counted(value: "Entry") -> "Entry":
        nonlocal last, documents
        place = value.get("group", value.get("document")) if isinstance(value, dict) else value
        last, documents = place, documents + (place != last)
        return value

    has_context = settings is not None and settings.document_context
    counted_inputs = Each(inputs, counted) if has_context else inputs

    def rows(noted: "Iterator[Entry]") -> Iterator[Prediction]:
        return predict(loaded, noted, task=arguments.task, exit_entropy=arguments.exit_entropy, batches=batches)

    write_json_lines(with_ids(counted_inputs, rows), arguments.output)
    if documents:
        say(f"documents of the words: {documents:,} (a blank line, or another document or group, begins one)")


def zero_shot_command(arguments: argparse.Namespace) -> None:
    """Classify texts with labels that the model was not trained on, and write JSON lines with the same fields as
    bert-jax predict. A natural language inference (NLI) model reads the text together with a hypothesis for
    each label; a masked-LM model scores the words of the labels at the mask of a prompt. If the inputs are JSON
    objects with the field label (with --multi_label: labels), metrics are also printed."""
    from bert_jax.inference.text_files import with_ids, write_json_lines
    from bert_jax.inference.zero_shot import right_answer, scores, zero_shot
    from bert_jax.tasks.task import Prediction

    if not arguments.texts and arguments.input is None and sys.stdin is not None and sys.stdin.isatty():
        raise ValueError("no text; write texts before --labels (arguments after it are labels), or use --input")
    labels, multi_label = _label_words(arguments.labels), arguments.multi_label
    inputs, batches = streaming(arguments)

    def parsed(value: "Entry") -> tuple[str, str | list[str] | None]:
        if not isinstance(value, str) and value.get("text_pair"):
            raise ValueError(f"{str(value)[:80]}: zero-shot accepts one text, without text_pair")
        return text_of(value), right_answer(value, [*labels], multi_label)

    loaded = load_model(arguments)
    answered = []

    def rows(inputs: "Iterator[Entry]") -> Iterator[Prediction]:
        texts, answers = itertools.tee(Each(inputs, parsed))
        results = zero_shot(
            loaded, (text for text, _ in texts), labels, template=arguments.template,
            multi_label=multi_label, entailment=arguments.entailment, batches=batches,
        )  # fmt: skip
        for row, (_, answer) in zip(results, answers, strict=True):
            if answer is not None:
                answered.append((answer, row))
            yield row

    write_json_lines(with_ids(inputs, rows), arguments.output)
    tell = say if arguments.output is None else print
    if answered:
        tell(f"{len(answered):,} labeled texts")
        for line in score_lines(
            scores([right for right, _ in answered], [row for _, row in answered], [*labels], multi_label)
        ):
            tell(line)


def _label_words(words_of_labels: Sequence[str]) -> dict[str, list[str]]:
    """Parse arguments of the form LABEL=WORD,WORD or LABEL; in the second form the label is its only word."""
    labels: dict[str, list[str]] = {}
    for text in words_of_labels:
        label, equals, words = (part.strip() for part in text.partition("="))
        if not label or (not equals and "," in label):
            allowed = "LABEL or LABEL=WORD,WORD, separated by blanks"
            raise ValueError(f"--labels: {text!r} is not allowed; allowed: {allowed}")
        if label in labels:
            raise ValueError(f"--labels: {label!r} occurs twice; give it once, with all its words: LABEL=WORD,WORD")
        labels[label] = [word.strip() for word in words.split(",")] if equals else [label]
    return labels


COMMANDS = (
    Command("predict", "predict labels, values, tags, answers or choices", predict_command, (
        model("texts; pairs, questions and choices require JSON lines (--input)"),
        option(
            "--task", choices=("sequence", "token", "span", "choice"),
            help="head that makes the predictions, if the model has several heads",
        ),
        option(
            "--exit_entropy", type=float, metavar="NATS",
            help="for each text, stop at the first layer whose head predicts class probabilities with an entropy "
            "below this number of nats; requires a model that was trained with loss.layer_heads own (see bert-jax "
            "early-exit)",
        ),
        OUTPUT,
    ), group="use", example='--model runs/sst2 "a film that one likes to see twice"'),
    Command("zero-shot", "classify with labels that the model was not trained on", zero_shot_command, (
        model(
            "texts, which must precede --labels", with_labels=False,
        ),
        option(
            "--labels", required=True, nargs="+", metavar="LABEL[=WORD,...]",
            help="two or more labels (with --multi_label: one or more), each optionally with the words that "
            "represent it (default: the label itself); the output lists the labels in this order",
        ),
        option(
            "--template", metavar="TEXT",
            help='NLI model: a hypothesis in which {} stands for the word of the label (default: '
            '"This text is about {}."); masked-LM model (required): a prompt with {text} and a mask, such as '
            '"{text} It was [MASK]."',
        ),
        option(
            "--multi_label", action="store_true",
            help="allow any number of labels for a text, including none; requires an NLI model",
        ),
        option(
            "--entailment", metavar="NAME",
            help="name of the entailment class of an NLI model (default: the class whose name begins with entail)",
        ),
        OUTPUT,
    ), group="use", example='"What a goal!" --model NLI_MODEL --labels sport politics'),
)  # fmt: skip
