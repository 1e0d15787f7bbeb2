"""Pretrain BERT: text to vocabulary, shards, checkpoints and a report.

python run_pretrain.py --config configs/quickstart.yaml [--workdir DIR] [--section.key value ...]
"""

import sys
import time

STARTED = time.perf_counter()

from bert_jax.training.signals import StopRequest

STOP = StopRequest.install()  # before the heavy imports: a signal that comes during them is not lost

from pathlib import Path

from bert_jax.config import PretrainConfig, dump_yaml, load_config
from bert_jax.config.loader import RunOptions, Setting, take_options
from bert_jax.exits import run_command
from bert_jax.training.warm_start import asks_for_warm_start


def main() -> None:
    options, arguments = take_options(RunOptions, sys.argv[1:])
    workdir = Path(options.workdir or options.default_workdir)
    start = None

    def resolve(settings: list[Setting]) -> list[Setting]:
        nonlocal start
        from bert_jax.interop import warm_start

        start, settings = warm_start.resolve(options, workdir, settings)
        return settings

    config = load_config(
        PretrainConfig, arguments, prog="run_pretrain.py", extra=RunOptions,
        resolve=resolve if asks_for_warm_start(options, workdir) else None,
    )  # fmt: skip
    if options.print_config:
        print(dump_yaml(config), end="")
        return

    from bert_jax.tokenization import load_tokenizer
    from bert_jax.training.pretrain import pretrain
    from data_pipeline.build import STOPPED, ensure_data, place_vocabulary
    from data_pipeline.source import ShardSource

    def report(line: str) -> None:
        print(line, flush=True)

    with STOP.at_once(STOPPED):
        if start is not None and start.vocabulary is not None:
            place_vocabulary(*start.vocabulary)
        vocabulary = ensure_data(config.data, vocab_size=config.model.vocab_size, report=report)
    tokenizer = load_tokenizer(vocabulary, lower_case=config.data.lower_case)
    pretrain(
        config,
        workdir=workdir,
        source=ShardSource(config, tokenizer),
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        stop=STOP,
        continue_from=Path(options.continue_from) if options.continue_from else None,
        warm_start=start.warm_start if start is not None else None,
        allow_numeric_change=options.allow_numeric_change,
        started=STARTED,
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
