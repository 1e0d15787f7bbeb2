"""One process of several that save and restore together; see ``test_checkpoint_hosts.py``.

python one_with_checkpoints.py CASE FOLDER --coordinator HOST:PORT --num_processes N --process_id I
"""

import sys
from pathlib import Path

from bert_jax.config import RunOptions
from bert_jax.config.loader import take_options
from bert_jax.process import hosts
from bert_jax.process.exits import run_command


def settings():
    import support

    return support.tiny_config("--mesh.data -1 --training.num_steps 6 --training.checkpoint_interval 2")


def train(folder):
    import support

    vocabulary = support.write_vocabulary(folder / str(hosts.index()))
    support.pretrain_on(
        settings(), folder / "run", vocabulary, source=support.SyntheticSource(settings()), host_timeout=300
    )


def fail_to_save(folder):
    from bert_jax.training.checkpoint import writer as checkpoint_writer

    real = checkpoint_writer.lines_digest
    saves = []

    def failing(lines):
        saves.append(lines)
        if hosts.index() == 1 and len(saves) == 2:
            raise OSError("the disk of this host is gone")
        return real(lines)

    checkpoint_writer.lines_digest = failing
    train(folder)


def restore(folder, damaged_for_one=""):
    """Restore; process 1 alone finds step 6 damaged, by what ``damaged_for_one`` of the module does."""
    from bert_jax.parallel import make_mesh
    from bert_jax.training.checkpoint import restore as checkpoint

    if damaged_for_one and hosts.index() == 1:
        real = getattr(checkpoint, damaged_for_one)

        def failing(*arguments):
            if "6" in {getattr(argument, "name", "") for argument in arguments}:
                raise ValueError("what one host sees")
            return real(*arguments)

        setattr(checkpoint, damaged_for_one, failing)
    import support

    config = settings()
    restored = checkpoint.restore_newest(
        folder / "run",
        config,
        make_mesh(config.mesh),
        support.objective_of(config).model,
        read_only=False,
        may_change=set(),
        report=print,
    )
    print("restored", restored.step, restored.meta["digest"])


def restore_bad_files(folder):
    restore(folder, "check_files")


def restore_bad_contents(folder):
    restore(folder, "_read_state")


def main():
    case, folder = sys.argv[1], Path(sys.argv[2])
    options, _ = take_options(RunOptions, sys.argv[3:])
    hosts.start(options)
    with hosts.ends_together(60):
        globals()[case](folder)


if __name__ == "__main__":
    sys.exit(run_command(main))
