"""One process of several that agree, fail or train; see ``test_hosts_together.py``.

python one_of_several.py CASE FOLDER --coordinator HOST:PORT --num_processes N --process_id I
"""

import sys
import time
from pathlib import Path

from bert_jax.config import RunOptions
from bert_jax.config.loader import take_options
from bert_jax.process import hosts
from bert_jax.process.exits import Stop, run_command


def agree(folder):
    for turn in range(3):
        print("gathered", *hosts.all_gather_text("numbers", f"{turn}.{hosts.index()}", 20))
    print("lead says", hosts.broadcast_from_lead("first", hosts.is_lead(), 20))
    hosts.require_shared(folder, 20)
    hosts.require_equal("recipe", "the same", "never said", 20)
    own = folder / str(hosts.index())
    own.mkdir()
    hosts.SHARED_WITHIN = 1.0
    for check in (
        lambda: hosts.require_equal("recipe", "odd" if hosts.index() == 1 else "plain", "give the same", 20),
        lambda: hosts.require_shared(own, 20),
    ):
        try:
            check()
        except ValueError as error:
            print("refused", error)
    raise Stop(42, "stopped at step 3", agreed=True)


def fail(folder):
    if hosts.index() == 1:
        raise ValueError("my own disk is gone")
    hosts.barrier("which the other never comes to", 60)


def come_late(folder):
    if hosts.index() == 1:
        time.sleep(8)
    hosts.barrier("the meeting", 2)


def learn(folder):
    """Gradients of the first step on two processes of two devices, against those of one device of this process."""
    import jax
    import support

    from bert_jax.config import MeshConfig
    from bert_jax.model import to_canonical
    from bert_jax.parallel import host_rows, make_mesh, to_global, to_host
    from bert_jax.training.programs import pretraining_batch, train_programs
    from bert_jax.training.state import initial_state

    config = support.tiny_config(
        "--model.hidden_size 128 --model.num_layers 4 --model.num_attention_heads 4 --data.seq_length 64 "
        "--model.intermediate_size 512 --data.max_predictions 10 --model.vocab_size 8192 --optimizer.clip_norm 0 "
        "--training.global_batch_size 32 --execution.prng threefry"
    )
    batch, found = support.random_batch(config, 1), []
    for mesh in (make_mesh(MeshConfig(data=2, tensor=2)), make_mesh(MeshConfig(data=1), jax.local_devices()[:1])):
        objective = support.objective_of(config, mesh)
        programs = train_programs(objective)
        step = programs.step_for(pretraining_batch(objective, 32))
        rows = list(host_rows(mesh, 32)) if mesh.size > 1 else list(range(32))
        own = to_global({name: batch[name][rows] for name in objective.features}, mesh, 32)
        start = jax.block_until_ready(initial_state(programs.model, programs.optimizer, programs.abstract, 3))
        hosts.barrier("compiled", 300)  # gloo waits 30 s for the others
        state, _ = jax.block_until_ready(step(start, own))
        found.append(to_canonical(to_host(state.opt_state[0].mu), config.model.vocab_size))
    difference = support.relative_difference(*found)
    assert difference <= 2e-6, difference
    print("the same gradients")


def train(folder, step_of_trouble, trouble, **config):
    """Train on made-up batches; ``trouble(batch, rows)`` happens from ``step_of_trouble`` on."""
    import support

    settings = support.tiny_config(
        "--mesh.data -1", *(f"--{key.replace('__', '.')} {v}" for key, v in config.items())
    )

    class Source(support.SyntheticSource):
        def train(self, rows):
            return Batches(settings, rows)

    class Batches(support.SyntheticIterator):
        def __next__(self):
            batch, info = super().__next__()
            if info.data_step >= step_of_trouble:
                trouble(batch, self.rows)
            return batch, info

    # The file of the vocabulary lies in a folder of its own: every process writes it.
    own = folder / str(hosts.index())
    vocabulary = support.write_vocabulary(own)
    support.pretrain_on(settings, folder / "run", vocabulary, source=Source(settings), host_timeout=600)


def lose_data(folder):
    def unreadable(batch, rows):
        if 0 not in rows:
            raise OSError("the shard is gone")

    train(folder, 4, unreadable)


def read_damage(folder):
    def blank(batch, rows):
        for name in batch:  # row 0 and the last: of the first and of the last process
            batch[name][[place for place, row in enumerate(rows) if row in (0, 7)]] = 0

    # Two a step from the fourth step on: the third step of damage is one too much.
    train(folder, 3, blank, data__max_blank_records=5, training__num_steps=30, training__checkpoint_interval=100)


def main():
    case, folder = sys.argv[1], Path(sys.argv[2])
    options, _ = take_options(RunOptions, sys.argv[3:])
    hosts.start(options)
    with hosts.ends_together(30):
        globals()[case](folder)


if __name__ == "__main__":
    sys.exit(run_command(main))
