"""``run_pretrain.py`` on made-up batches instead of files, so that a start takes a few seconds.

BERT_JAX_FAULT=block:STEP:PROCESS makes that process wait for ever for the batch of a step; evaluation takes about
a second.
"""

import os
import sys
import time

from bert_jax.process.signals import StopRequest

STOP = StopRequest.install()

from pathlib import Path

from support import SyntheticIterator, SyntheticSource, pretrain_on

from bert_jax.config import PretrainConfig, RunOptions
from bert_jax.config.loader import build_config, take_options
from bert_jax.process import hosts
from bert_jax.process.exits import run_command
from bert_jax.training.pretrain import PretrainJob

KIND, STEP, PROCESS = (*os.environ.get("BERT_JAX_FAULT", "").split(":"), "-1", "-1")[:3]


class Iterator(SyntheticIterator):
    def __next__(self):
        if KIND == "block" and self.data_step == int(STEP) and hosts.index() == int(PROCESS):
            print("blocked", flush=True)
            time.sleep(3600)
        return super().__next__()


class Source(SyntheticSource):
    def train(self, rows):
        return Iterator(self.config, rows)

    def held_out(self, batch_size, rows, max_batches):
        for batch in super().held_out(batch_size, rows, max_batches):
            time.sleep(0.3)
            yield batch


def main() -> None:
    options, settings = take_options(RunOptions, sys.argv[1:])
    config = build_config(PretrainConfig, settings.all)
    PretrainJob.finish = lambda *_: None  # drawing takes longer than the run
    hosts.start(options)
    if hosts.count() > 1:
        STOP.share()
    with hosts.ends_together(options.host_timeout):
        workdir = Path(options.workdir)
        pretrain_on(
            config, workdir, workdir.parent / "vocab.txt", source=Source(config), stop=STOP,
            host_timeout=options.host_timeout,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_command(main))
