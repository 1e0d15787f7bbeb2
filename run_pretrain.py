"""Pretrain BERT: create a vocabulary and shards from text, then train and write checkpoints and a report.

    python run_pretrain.py --config configs/quickstart.yaml [--workdir DIR] [--section.key value ...]

The same as ``bert-jax pretrain``. On a TPU pod or in a SLURM job, start the same command on every host; together,
the hosts train one run.
"""

from bert_jax.process import early

early.start()

import sys

from bert_jax.commands.pretrain import main

if __name__ == "__main__":
    sys.exit(main())
