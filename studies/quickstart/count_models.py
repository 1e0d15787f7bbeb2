"""Count models of the training text, which predict a masked token from the pieces beside it.

unigram: the piece's share of the text, each count raised by 1. left pair: the piece after its left neighbor,
smoothed with the unigram. left x right: the product of this distribution and that of the piece before its right
neighbor, over the unigram's, normalized (both neighbors independent given the piece). window: the pieces seen
between both neighbors, smoothed with left x right. Smoothing is that of Witten and Bell (1991): a context with n
occurrences and t distinct pieces gives its counts the weight n / (n + t).
"""

from collections.abc import Iterable, Mapping

import numpy as np
from scipy.sparse import csr_array

from bert_jax.config.pretrain import DataConfig
from bert_jax.io.storage import location
from bert_jax.tokenization import Tokenizer
from data_pipeline.build.token_store import TokenStore, held_out

NAMES = ("unigram", "left_pair", "left_x_right", "window")


def training_ids(data: DataConfig, tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids of all training documents, int64[tokens], each between [CLS] and [SEP]."""
    store = TokenStore(location(data.shards) / "store")
    held = held_out(store.contents, seed=data.seed, fraction=data.eval_fraction)
    ids = []
    for (_, start), (_, stop), is_held in zip(store.documents[:-1], store.documents[1:], held, strict=True):
        if not is_held:
            ids += [[tokenizer.cls_id], store.ids(int(start), int(stop)), [tokenizer.sep_id]]
    return np.concatenate(ids).astype(np.int64)


class CountModels:
    """The models of the text ``ids`` (int64[tokens]) with ``pieces`` pieces."""

    def __init__(self, ids: np.ndarray, pieces: int) -> None:
        self._pieces = pieces
        counts = np.bincount(ids, minlength=pieces) + 1.0
        self._unigram = counts / counts.sum()
        self._after, self._before = (self._pairs(a, b) for a, b in ((ids[:-1], ids[1:]), (ids[1:], ids[:-1])))
        contexts = ids[:-2] * pieces + ids[2:]
        order = np.argsort(contexts, kind="stable")
        self._contexts, self._between = contexts[order], ids[1:-1][order]

    def _pairs(self, given: np.ndarray, pieces: np.ndarray) -> csr_array:
        pairs = csr_array((np.ones(len(given)), (given, pieces)), shape=(self._pieces, self._pieces))
        pairs.sum_duplicates()
        return pairs

    def _beside(self, counts: csr_array, neighbors: np.ndarray) -> np.ndarray:
        rows = counts[neighbors].toarray()
        return _smoothed(rows, np.broadcast_to(self._unigram, rows.shape))

    def probabilities(self, left: np.ndarray, right: np.ndarray) -> dict[str, np.ndarray]:
        """Return the distributions float64[N, pieces] between the neighbors ``left`` and ``right`` (int[N]).

        A neighbor that the text does not have, such as [MASK], has no influence.
        """
        after, before = self._beside(self._after, left), self._beside(self._before, right)
        product = after * before / self._unigram
        product /= product.sum(axis=1, keepdims=True)
        seen = np.zeros_like(product)
        contexts = left.astype(np.int64) * self._pieces + right
        ends = (np.searchsorted(self._contexts, contexts, side) for side in ("left", "right"))
        for row, start, stop in zip(seen, *ends, strict=True):
            row += np.bincount(self._between[start:stop], minlength=self._pieces)
        unigram = np.broadcast_to(self._unigram, product.shape)
        return dict(zip(NAMES, (unigram, after, product, _smoothed(seen, product)), strict=True))

    def evaluate(self, batches: Iterable[Mapping[str, np.ndarray]]) -> dict[str, dict[str, float]]:
        """Return loss and accuracy of each model on the masked tokens of ``batches``."""
        sums = {name: np.zeros(3) for name in NAMES}
        for batch in batches:
            left, right, labels = neighbors(batch)
            for name, found in self.probabilities(left, right).items():
                loss = -np.log(found[np.arange(len(labels)), labels]).sum()
                sums[name] += (loss, (found.argmax(axis=1) == labels).sum(), len(labels))
        return {
            name: {"mlm_loss": float(loss / targets), "mlm_accuracy": float(hits / targets)}
            for name, (loss, hits, targets) in sums.items()
        }


def _smoothed(counts: np.ndarray, shorter: np.ndarray) -> np.ndarray:
    """Return distributions from ``counts`` [N, pieces], and ``shorter`` in the weight of unseen pieces."""
    distinct = (counts > 0).sum(axis=1, keepdims=True)
    total = counts.sum(axis=1, keepdims=True) + distinct
    return np.where(total > 0, (counts + distinct * shorter) / np.maximum(total, 1), shorter)


def neighbors(batch: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the input ids left and right of each masked token of ``batch``, and its label: int[N] each."""
    rows, slots = np.nonzero(batch["mlm_weights"] > 0)
    positions = batch["mlm_positions"][rows, slots]
    ids = batch["input_ids"]
    return ids[rows, positions - 1], ids[rows, positions + 1], batch["mlm_labels"][rows, slots]
