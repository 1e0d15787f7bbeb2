"""Fine-tune BERT on a task: read the task files, train, and write metrics, predictions and an exported model.

    python run_finetune.py --config configs/finetune/sst2.yaml --init_from MODEL --data.dir DIR

The same as ``bert-jax finetune``. On a TPU pod or in a SLURM job, start the same command on every host; together,
the hosts train one run.
"""

from bert_jax.process import early

early.start()

import sys

from bert_jax.commands.finetune import main

if __name__ == "__main__":
    sys.exit(main())
