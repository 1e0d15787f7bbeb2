"""Commands that show a model: picture, play, story."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bert_jax.commands.options import READABLE, Command, load_model, option, reading, say

if TYPE_CHECKING:
    from bert_jax.inference.engine import Text


def picture_command(arguments: argparse.Namespace) -> None:
    """Write a page that shows how a model processes a text: the attention of every head, one head in detail with
    lines from each token to the tokens that it attends to, attention rollout, the entropy and the mean attention
    distance of every head, and the vocabulary words nearest to each token at every layer. For comparison, the page
    also shows values for a head that attends equally to all tokens and for randomly initialized parameters. The
    page is one HTML file, which loads nothing from the network. --words adds a map of word embeddings; without a
    text, the page contains only this map."""
    from bert_jax.contrib.pictures.picture import picture
    from bert_jax.contrib.pictures.words_map import read_words

    name, text = _model_and_text(arguments)
    if text is None and arguments.words is None:
        raise ValueError("TEXT: missing; write a text after the model, or set --words")
    if text is None and arguments.pair is not None:
        raise ValueError("--pair: requires a first text; write it after the model")
    words = [] if arguments.words is None else read_words(arguments.words)
    both: Text | None = text if text is None or arguments.pair is None else (text, arguments.pair)
    arguments.model = name
    found = picture(
        load_model(arguments), both, words=words, layer=arguments.layer, head=arguments.head, top=arguments.top,
        candidates=arguments.candidates,
    )  # fmt: skip
    found.save(arguments.output)
    for note in found.notes:
        say(note)
    size = len(found.html.encode())
    print(f"{arguments.output}: {len(found.tokens)} tokens, {size / 1e6:.1f} MB; open it in a browser")


def play_command(arguments: argparse.Namespace) -> None:
    """Guess masked words against a model. In each of at most ten sentences, one word is masked: you write your
    guess, then the model shows its guesses with their probabilities. Each sentence is used once per game. The
    sentences come from the --text file. Without it, they come from the held-out text of the pretraining run or, if
    there is none or the vocabulary is Chinese, from a built-in list. Each sentence of the Chinese list contains an
    idiom of four characters, and one of these characters is masked. "pass" skips a sentence; "quit" or Ctrl-D ends
    the game. The end shows the score and how good the model's guesses were."""
    from bert_jax.contrib.pictures.play import play

    arguments.model, _ = _model_and_text(arguments, with_text=False)
    play(load_model(arguments), Path(arguments.model), file=arguments.text, seed=arguments.seed)


def story_command(arguments: argparse.Namespace) -> None:
    """Draw how a pretraining run learned, as an SVG file: its guesses for the mask of a text at 0, 1, 10 and 100%
    of the steps, above its loss curve. Step 0 uses the randomly initialized parameters of the run. The other steps
    require checkpoints: training.checkpoint_interval determines which checkpoints are saved, and
    training.keep_every which of them are kept."""
    from bert_jax.contrib.pictures.story import draw_story

    workdir, text = _model_and_text(arguments)
    if text is None:
        raise ValueError('TEXT: missing; write a text with a mask after the workdir, such as "the [MASK] of it"')
    stages = draw_story(Path(workdir), text, arguments.output)
    steps = ", ".join(f"{stage.step:,}" for stage in stages)
    print(f"{arguments.output}: guesses at steps {steps}")


def _model_and_text(arguments: argparse.Namespace, *, with_text: bool = True) -> tuple[str, str | None]:
    """Return the model and the text, of which the model can also be given as ``--model``. Raises ``ValueError``
    unless one model is named."""
    given = [value for value in (arguments.first, getattr(arguments, "second", None)) if value is not None]
    if arguments.model is not None:
        given = [arguments.model, *given]
    if not given or len(given) > 1 + with_text:
        wanted = f"bert-jax {arguments.command} MODEL{' TEXT' if with_text else ''}"
        raise ValueError(f"arguments: {' '.join(map(repr, given)) or 'none'}; write {wanted}")
    return given[0], given[1] if len(given) > 1 else None


_MODEL = option("--model", metavar="DIR_OR_PREFIX", help="alternative to MODEL")
_DTYPE = option(
    "--dtype",
    choices=("float32", "bfloat16"),
    default="float32",
    help="dtype of the computation (default: float32)",
)

COMMANDS = (
    Command("picture", "write a page with the attention and the nearest words of a text", picture_command, (
        option("first", nargs="?", metavar="MODEL", help=READABLE),
        option("second", nargs="?", metavar="TEXT", help="text that the model reads"),
        _MODEL,
        option("--pair", metavar="TEXT", help="second text of a pair"),
        option(
            "--output", type=Path, default=Path("picture.html"), metavar="FILE",
            help="HTML file to write (default: picture.html)",
        ),
        option(
            "--layer", type=int, default=1, metavar="L",
            help="layer that the page shows first, counted from 1 (default: 1)",
        ),
        option(
            "--head", type=int, default=1, metavar="H",
            help="head that the page shows first, counted from 1 (default: 1)",
        ),
        option(
            "--words", metavar="FILE|A,B,...",
            help="words for a map of their embeddings: a file with one word per line, or words separated by commas",
        ),
        option(
            "--top", type=int, default=5, metavar="K",
            help="number of nearest words per token (default: 5)",
        ),
        option(
            "--candidates", type=int, default=2000, metavar="N",
            help="number of vocabulary words to compare with each token; 0: no nearest words (default: 2000)",
        ),
        _DTYPE,
        reading(with_labels=False),
    ), group="use", example='DIR "he sat on the bank of the river" --layer 3 --head 2'),
    Command("play", "guess masked words against a model", play_command, (
        option("first", nargs="?", metavar="MODEL", help=READABLE),
        _MODEL,
        option(
            "--text", type=Path, metavar="FILE",
            help="text file with one sentence per line",
        ),
        option(
            "--seed", type=int, default=0, metavar="N",
            help="seed with which sentences and words are chosen (default: 0)",
        ),
        _DTYPE,
        reading(with_labels=False),
    ), group="use", example="DIR --seed 1"),
    Command("story", "draw the guesses of a pretraining run over its loss curve", story_command, (
        option("first", nargs="?", metavar="WORKDIR", help="workdir of a pretraining run"),
        option("second", nargs="?", metavar="TEXT", help="text with one mask"),
        option("--model", metavar="WORKDIR", help="alternative to the argument WORKDIR"),
        option(
            "--output", type=Path, default=Path("story.svg"), metavar="FILE",
            help="SVG file to write (default: story.svg)",
        ),
    ), group="export and inspect", example='runs/mine "the [MASK] of the united states"'),
)  # fmt: skip
