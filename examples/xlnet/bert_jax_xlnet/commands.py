"""The command that reads and writes folders of XLNet of transformers."""

import argparse
from pathlib import Path

from bert_jax.commands.options import Command, option, say


def xlnet_command(arguments: argparse.Namespace) -> None:
    """Convert an XLNet. If the model is a folder of XLNet of transformers, the command writes a saved model, which
    all commands read. Any other model with the encoder xlnet is written as such a folder, which is read back and
    compared bitwise."""
    from bert_jax.interop.export import replaced_folder
    from bert_jax.interop.readers import read_weights
    from bert_jax.interop.saved_model import write_saved
    from bert_jax.interop.verification import fingerprints
    from bert_jax.process.exits import VERIFICATION_FAILED, Stop
    from bert_jax_xlnet.folder import is_folder, read_folder, write_folder

    source, target = Path(arguments.model), Path(arguments.to)
    folder = replaced_folder(target, arguments.force, [(source, "the source")])
    if is_folder(source):
        weights = read_folder(source)
        with folder as partial:
            write_saved(partial, weights)
        notes = [*weights.notes, f"{target}: a saved model, {len(weights.params)} arrays"]
    else:
        weights = read_weights(source)
        with folder as partial:
            notes = [*weights.notes, *write_folder(partial, weights)]
            if fingerprints(weights) != fingerprints(read_folder(partial)):
                raise Stop(VERIFICATION_FAILED, "read back: the parameters differ; nothing was written")
        notes.append(f"{target}: {len(weights.params)} arrays read back, bitwise equal")
    for note in notes:
        say(note)


COMMANDS = (
    Command("xlnet", "convert an XLNet to and from transformers", xlnet_command, (
        option("--model", required=True, metavar="MODEL", help="an XLNet, or its folder of transformers"),
        option("--to", required=True, metavar="DIR", help="new folder"),
        option("--force", action="store_true", help="replace the folder --to if it is not empty"),
    ), group="export and inspect", example="--model runs/xlnet --to out/"),
)  # fmt: skip
