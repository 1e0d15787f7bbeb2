"""``run_pretrain.py`` that also writes down which rows it reads.

python recorded_run.py FOLDER [options of run_pretrain.py]; FOLDER/rows.PID gets lines "data_step row digest".
"""

import os
import sys
import zlib
from pathlib import Path

from bert_jax.commands.pretrain import main
from data_pipeline.read.pretrain_input import ShardSource


class Recorded:
    """A batch iterator that writes a line for each row."""

    def __init__(self, iterator, rows, folder):
        self._iterator, self._rows = iterator, rows
        self._file = (folder / f"rows.{os.getpid()}").open("w")

    def __next__(self):
        batch, info = next(self._iterator)
        for place, row in enumerate(self._rows):
            digest = zlib.crc32(b"".join(values[place].tobytes() for _, values in sorted(batch.items())))
            self._file.write(f"{info.data_step} {row} {digest}\n")
        self._file.flush()
        return batch, info

    def __getattr__(self, name):
        return getattr(self._iterator, name)


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    folder.mkdir(exist_ok=True)
    plain = ShardSource.train
    ShardSource.train = lambda self, rows: Recorded(plain(self, rows), rows, folder)
    sys.exit(main())
