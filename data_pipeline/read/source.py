"""What a pretraining run reads: training stream, held-out batches, unigram baseline."""

import dataclasses
import sys
from collections.abc import Iterator

import numpy as np

from bert_jax.batch import BatchIterator
from bert_jax.config import PretrainConfig
from bert_jax.io.storage import Location, location
from bert_jax.tokenization import Tokenizer
from data_pipeline.read.pretrain_input import eval_batches, pretrain_batches

# Batches of training records that the unigram distribution is counted on: enough for a sharp estimate.
BASELINE_BATCHES = 2000


class ShardSource:
    """Batches from the shards that ``config.data`` names."""

    def __init__(self, config: PretrainConfig, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer
        shards = location(config.data.shards)
        self._train = shards / "train" if (shards / "train").is_dir() else shards
        given = config.data.eval_shards
        self._eval: Location | None = location(given) if given else shards / "eval"
        if not given and not self._eval.is_dir():
            self._eval = None
        if self._eval is not None and not self._eval.is_dir():
            raise ValueError(
                f"data.eval_shards: {self._eval} is not a folder; give one of held-out shards, or none"
            )

    def train(self, rows: list[int]) -> BatchIterator:
        """Endless training batches of this host's ``rows``."""
        config = self._config
        return pretrain_batches(
            config.data,
            folder=self._train,
            lanes=config.lanes,
            batch_size=config.training.global_batch_size,
            batch_ramp=config.training.batch_ramp,
            seed=config.training.seed,
            rows=rows,
            tokenizer=self._tokenizer,
        )

    def held_out(
        self, batch_size: int, rows: list[int], max_batches: int
    ) -> Iterator[dict[str, np.ndarray]] | None:
        """Held-out batches, each record once (0 ``max_batches``: all), or ``None`` without held-out data."""
        if self._eval is None:
            return None
        return eval_batches(
            self._config.data,
            folder=self._eval,
            batch_size=batch_size,
            rows=rows,
            max_batches=max_batches,
            tokenizer=self._tokenizer,
        )

    def unigram_cross_entropy(self) -> float | None:
        """Nats per held-out target of the training targets' unigram distribution (add-one).

        Large training sets are counted on their first million records.
        """
        if self._eval is None:
            return None
        train = self._target_counts(self._train, BASELINE_BATCHES).astype(np.float64) + 1
        held_out = self._target_counts(self._eval, 0)
        return float(-(held_out @ np.log(train / train.sum())) / held_out.sum())

    def _target_counts(self, folder: Location, max_batches: int) -> np.ndarray:
        """int64[vocabulary]: how often each id is predicted."""
        counts = np.zeros(self._config.model.vocab_size, np.int64)
        # A damaged record is left out of a count; it must not end the run at its last evaluation.
        data = dataclasses.replace(self._config.data, max_blank_records=sys.maxsize)
        batches = eval_batches(
            data, folder=folder, batch_size=512, max_batches=max_batches, tokenizer=self._tokenizer
        )
        for batch in batches:
            labels = batch["mlm_labels"][batch["mlm_weights"] > 0]
            counts += np.bincount(labels, minlength=len(counts))
        return counts
