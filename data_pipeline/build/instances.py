"""Conversion of documents to training instances in numpy: sentence pairs, truncation, and the arrays of a batch.

The option ``data.next_sentence`` selects the method: ``nsp`` follows create_pretraining_data.py of
google-research/bert; ``sop`` (Lan et al. 2019) keeps or swaps the order of two consecutive segments; ``none``
splits documents into single segments of the maximum length.

Randomness is counter-based. A (document, pass) has the key hash(seed, document, pass), and its instance j has the
key hash(seed, document, pass, j); the hash is ``bert_jax.hashing.hash_key``. Every random value is a hash of (key,
stream, counter), so an instance does not depend on earlier random values or on the process.

Legend: N instances, S tokens per row, at most M predictions per row.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.hashing import hash_key
from data_pipeline.build.masking import draw_bits, mask_batch, uniform

# Streams of the key of a (document, pass), and streams of the key of an instance.
_TARGET, _CHUNKS = 0, 1
_FRONT_OF_A, _FRONT_OF_B, _MASKS, _SHARD, _PLACE = range(5)
_DRAWS = 4  # random values per chunk: length of A, label, other document, first sentence in that document

IS_NEXT, IS_RANDOM, SWAPPED = 0, 1, 1  # labels


@dataclass(frozen=True, kw_only=True)
class InstanceSettings:
    """Data options, and the special token ids and the vocabulary size of the tokenizer."""

    data: DataConfig
    cls_id: int
    sep_id: int
    pad_id: int
    mask_id: int
    vocab_size: int

    @property
    def budget(self) -> int:
        """Largest number of tokens of a row, without [CLS] and [SEP]."""
        return self.data.seq_length - (2 if self.data.next_sentence == "none" else 3)


class Segment(NamedTuple):
    """Tokens [start, start + length) of a pool of token ids."""

    start: int
    length: int


# (u, v, needed) -> consecutive sentences of another document, up to ``needed`` tokens or the end of the document.
# u in [0, 1) selects the document, v in [0, 1) the sentence at which the segment starts.
RandomNext = Callable[[float, float, int], Segment]


class Instances(NamedTuple):
    """N instances with segments A and B of a pool of token ids.

    The fields are int64[N]. If ``data.next_sentence`` is none, B has length 0.
    """

    document: np.ndarray
    number: np.ndarray  # j, counted within the (document, pass)
    a_start: np.ndarray
    a_length: np.ndarray
    b_start: np.ndarray
    b_length: np.ndarray
    label: np.ndarray

    @classmethod
    def from_rows(cls, rows: list[tuple[int, ...]]) -> "Instances":
        """Create instances from rows; a row contains the fields of one instance."""
        return cls(*np.array(rows, np.int64).reshape(-1, len(cls._fields)).T)

    def slice(self, start: int, stop: int) -> "Instances":
        """Return the instances with the indices ``start`` to ``stop - 1``."""
        return Instances(*(column[start:stop] for column in self))


def instance_keys(settings: InstanceSettings, instances: Instances, pass_number: int) -> np.ndarray:
    """Return the key of every instance, uint64[N]: hash(seed, document, pass, j)."""
    return hash_key(settings.data.seed, instances.document, pass_number, instances.number)


def shard_and_place(keys: np.ndarray, num_shards: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, for every instance, the index of its shard, int64[N], and its sort key in this shard, uint64[N]."""
    return (hash_key(keys, _SHARD) % np.uint64(num_shards)).astype(np.int64), hash_key(keys, _PLACE)


def plan_document(
    sentence_lengths: np.ndarray,
    *,
    document: int,
    pass_number: int,
    first_token: int,
    settings: InstanceSettings,
    random_next: RandomNext | None,
) -> list[tuple[int, ...]]:
    """Return the instances of one document in one pass, before truncation, as rows of ``Instances``.

    ``sentence_lengths`` int[n] contains the number of tokens, at least 1, of each sentence of the document. The
    sentences are consecutive in the pool and start at the position ``first_token``. The target length is sampled
    once per document and pass. If ``data.next_sentence`` is nsp, ``random_next`` selects each random segment B.
    """
    key = hash_key(settings.data.seed, document, pass_number)
    is_short, length = uniform(draw_bits(key, _TARGET, 2))[0].tolist()
    target = settings.budget
    if is_short < settings.data.short_sequence_fraction:
        target = 2 + int(length * (settings.budget - 1))
    ends = [0, *np.cumsum(sentence_lengths).tolist()]
    if settings.data.next_sentence == "none":
        starts = range(0, ends[-1], target)
        return [
            (document, j, first_token + at, min(target, ends[-1] - at), 0, 0, IS_NEXT)
            for j, at in enumerate(starts)
        ]
    sentences = len(sentence_lengths)
    assert random_next is not None or settings.data.next_sentence != "nsp"
    draws = uniform(draw_bits(key, _CHUNKS, _DRAWS * sentences)).reshape(sentences, _DRAWS).tolist()
    pairs = _pairs(ends, target, draws, first_token, random_next if settings.data.next_sentence == "nsp" else None)
    return [(document, j, *a, *b, label) for j, (a, b, label) in enumerate(pairs)]


def _pairs(
    ends: list[int], target: int, draws: list[list[float]], first_token: int, random_next: RandomNext | None
) -> list[tuple[Segment, Segment, int]]:
    """Return pairs (A, B, label): sentences are collected up to the target length, and split into A and B.

    The border between A and B is a random sentence border. With ``random_next`` (nsp), B is random with probability
    0.5, and always if only one sentence was collected; the sentences after A are then used for the next pair.
    Without ``random_next`` (sop), A and B are swapped with probability 0.5, and a single sentence is split between
    two tokens.
    """
    pairs: list[tuple[Segment, Segment, int]] = []
    sentences = len(ends) - 1
    first = 0
    while first < sentences:
        stop = bisect_left(ends, ends[first] + target, first + 1, sentences)
        length_draw, label_draw, document_draw, sentence_draw = draws[len(pairs)]
        # A has 1 to stop - first - 1 sentences; a single sentence is A.
        middle = first + 1 + int(length_draw * (stop - first - 1))
        border = ends[middle]
        if stop - first == 1 and random_next is None:
            border = ends[first] + 1 + int(length_draw * (ends[stop] - ends[first] - 1))
        a = Segment(first_token + ends[first], border - ends[first])
        b = Segment(a.start + a.length, ends[stop] - border)
        if random_next is not None and (b.length == 0 or label_draw < 0.5):
            pairs.append((a, random_next(document_draw, sentence_draw, target - a.length), IS_RANDOM))
            stop = middle
        elif random_next is not None or (b.length and label_draw >= 0.5):
            pairs.append((a, b, IS_NEXT))
        elif b.length:  # a single token cannot be split
            pairs.append((b, a, SWAPPED))
        first = stop
    return pairs


def truncate(instances: Instances, keys: np.ndarray, budget: int) -> Instances:
    """Shorten pairs to ``budget`` tokens, one token at a time from the longer segment (B if they are equally long).

    Each token is dropped from the front or from the back of the segment with equal probability.
    """
    drop_a, drop_b = dropped_tokens(instances, budget)
    return instances._replace(
        a_start=instances.a_start + _coin_flips(keys, _FRONT_OF_A, drop_a),
        a_length=instances.a_length - drop_a,
        b_start=instances.b_start + _coin_flips(keys, _FRONT_OF_B, drop_b),
        b_length=instances.b_length - drop_b,
    )


def dropped_tokens(instances: Instances, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of tokens that :func:`truncate` drops from A and from B, int64[N] each."""
    excess = np.maximum(instances.a_length + instances.b_length - budget, 0)
    difference = instances.a_length - instances.b_length
    # The longer segment is shortened to the length of the other; then both are shortened in turn, B first.
    leading = np.minimum(excess, np.abs(difference))
    shared = excess - leading
    drop_a = np.where(difference > 0, leading, 0) + shared // 2
    return drop_a, np.where(difference > 0, 0, leading) + (shared + 1) // 2


def _coin_flips(keys: np.ndarray, stream: int, flips: np.ndarray) -> np.ndarray:
    """Flip ``flips`` int[N] fair coins per key; return the number of heads per key, int64[N]."""
    heads = np.zeros(len(keys), np.int64)
    rows = np.flatnonzero(flips)
    word = 0
    while len(rows):
        bits = hash_key(keys[rows], stream, word)
        unused = np.maximum(64 - (flips[rows] - 64 * word), 0).astype(np.uint64)
        heads[rows] += np.bitwise_count(bits >> unused)
        word += 1
        rows = rows[flips[rows] > 64 * word]
    return heads


def make_features(
    instances: Instances, keys: np.ndarray, pool: np.ndarray, pool_starts: np.ndarray, settings: InstanceSettings
) -> dict[str, np.ndarray]:
    """Return the features of N instances under their names in the shards, for ``tfexample.encode_examples``.

    ``pool`` int[P] contains the token ids of all segments; ``pool_starts`` bool[P] marks the first token of every
    word. With dynamic masking, the ids are not masked, and the feature ``word_starts`` [N, S] replaces the masking
    features.
    """
    instances = truncate(instances, keys, settings.budget)
    column = np.arange(settings.data.seq_length)
    a, b = instances.a_length[:, None], instances.b_length[:, None]
    has_b = b > 0
    length = a + 2 + np.where(has_b, b + 1, 0)
    in_a = (column >= 1) & (column <= a)
    in_b = (column >= a + 2) & (column < a + 2 + b)
    source = np.where(in_a, instances.a_start[:, None] + column - 1, 0)
    source = np.where(in_b, instances.b_start[:, None] + column - a - 2, source)
    candidates = in_a | in_b
    input_mask = column < length
    maskable = input_mask if settings.data.mask_special_tokens else candidates
    ids = np.where(input_mask, settings.sep_id, settings.pad_id).astype(np.int32)
    ids[:, 0] = settings.cls_id
    ids[candidates] = pool[source[candidates]]
    word_starts = input_mask.copy()
    word_starts[candidates] = pool_starts[source[candidates]]
    word_starts |= (column == 1) | (column == a + 2)
    word_starts &= input_mask
    features: dict[str, Any] = {
        "input_mask": input_mask,
        "segment_ids": has_b & input_mask & (column >= a + 2),
        "next_sentence_labels": instances.label[:, None],
        "sequence_keys": (keys >> np.uint64(32))[:, None].astype(np.uint32),
    }
    if settings.data.masking == "dynamic":
        return features | {"input_ids": ids, "word_starts": word_starts}
    masked, positions, labels, weights = mask_batch(
        ids, word_starts, maskable, hash_key(keys, _MASKS), data=settings.data, mask_id=settings.mask_id,
        vocab_size=settings.vocab_size,
    )  # fmt: skip
    return features | {
        "input_ids": masked,
        "masked_lm_positions": positions,
        "masked_lm_ids": labels,
        "masked_lm_weights": weights,
    }
