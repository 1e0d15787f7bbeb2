"""The ``bert-jax`` console command: what one does with a model."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bert_jax.exits import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bert-jax``; returns the exit code (2: the user's mistake, said in one line)."""
    parser = argparse.ArgumentParser(prog="bert-jax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    fill = commands.add_parser("fill-mask", help="the model's best pieces for each [MASK] of a text")
    fill.add_argument("texts", nargs="*", metavar="TEXT", help="text with [MASK]; none: one text a line from stdin")
    fill.add_argument("--model", required=True, type=Path, help="workdir of a pretraining run")
    fill.add_argument("--top", type=int, default=5, help="pieces per mask (default: 5)")
    fill.add_argument("--json", action="store_true", help="one JSON object per text")

    arguments = parser.parse_args(argv)
    return run_command(lambda: fill_mask(arguments))


def fill_mask(arguments: argparse.Namespace) -> None:
    """``bert-jax fill-mask``. Raises ``ValueError`` for a folder without a model or a text without [MASK]."""
    texts = arguments.texts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not texts:
        raise ValueError("no text given: pass texts with [MASK], or one a line on standard input")
    if arguments.top < 1:
        raise ValueError(f"--top: {arguments.top} is not allowed; allowed: 1 or more")

    from bert_jax.training.fill import fill_texts
    from bert_jax.training.saved_model import load_saved_model

    model, params, tokenizer = load_saved_model(arguments.model)
    for text in fill_texts(model, params, tokenizer, texts, arguments.top):
        if arguments.json:
            masks = [dict(predictions=mask.predictions) for mask in text.masks]
            print(json.dumps({"text": text.text, "masks": masks}, ensure_ascii=False))
            continue
        print(text.text)
        for number, mask in enumerate(text.masks, 1):
            label = f"  [MASK] {number}" if len(text.masks) > 1 else "  [MASK]"
            print(f"{label}: " + "  ".join(f"{piece} {probability:.3f}" for piece, probability in mask.predictions))


if __name__ == "__main__":
    sys.exit(main())
