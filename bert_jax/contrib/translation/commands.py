"""The command that reads and writes folders of ``EncoderDecoderModel``."""

import argparse
from pathlib import Path

from bert_jax.commands.options import Command, option, say
from bert_jax.io.hub import model_path


def encoder_decoder_command(arguments: argparse.Namespace) -> None:
    """Convert a translation model. A folder of transformers' EncoderDecoderModel is converted to a saved model,
    which all commands read. Any other translation model is written as such a folder; the folder is then read again
    and compared bitwise with the model."""
    import numpy as np

    from bert_jax.contrib.translation.hf_folder import is_folder, read_folder, unshared, write_folder
    from bert_jax.interop.export import replaced_folder
    from bert_jax.interop.readers import read_weights
    from bert_jax.interop.saved_model import write_saved
    from bert_jax.process.exits import VERIFICATION_FAILED, Stop

    source, target = model_path(arguments.model), Path(arguments.to)
    folder = replaced_folder(target, arguments.force, [(source, "the source")])
    if is_folder(source):
        weights = read_folder(source)
        with folder as partial:
            write_saved(partial, weights)
        notes = [*weights.notes, f"{target}: a saved model"]
    else:
        weights = read_weights(source)
        with folder as partial:
            notes = [*weights.notes, *write_folder(partial, weights)]
            wanted, found = (unshared(one).params for one in (weights, read_folder(partial)))
            if wanted.keys() != found.keys() or not all(np.array_equal(wanted[n], found[n]) for n in wanted):
                raise Stop(VERIFICATION_FAILED, "read back: the parameters differ; nothing was written")
        notes.append(f"{target}: EncoderDecoderModel, {len(found)} arrays read back, bitwise equal")
    for note in notes:
        say(note)


COMMANDS = (
    Command("encoder-decoder", "convert translation models to and from transformers", encoder_decoder_command, (
        option(
            "--model", required=True, metavar="MODEL",
            help="translation model, or a folder of transformers' EncoderDecoderModel",
        ),
        option("--to", required=True, metavar="DIR", help="new folder"),
        option("--force", action="store_true", help="replace the folder --to if it is not empty"),
    ), group="export and inspect", example="--model runs/de-en --to out/"),
)  # fmt: skip
