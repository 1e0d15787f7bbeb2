"""Minimal pairs: count how often a language model assigns the acceptable sentence the higher probability.

The files have the format of BLiMP (Warstadt et al. 2020, arXiv:1912.00582): JSON lines with ``sentence_good`` and
``sentence_bad``; ``UID`` names the paradigm of a pair, ``linguistics_term`` its phenomenon and ``field`` its field
of linguistics.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_jax.inference.batching import BatchOptions
from bert_jax.inference.engine import Engine
from bert_jax.inference.score import Method, score
from bert_jax.io.text_lines import numbered_lines, opened
from bert_jax.io.untrusted_folder import json_object
from bert_jax.metrics.resampling import Interval, wilson_interval

_SENTENCES = ("sentence_good", "sentence_bad")
# Level of a group -> field of a line.
LEVELS = {"field": "field", "phenomenon": "linguistics_term", "paradigm": "UID"}
_NEEDED = '; write {"sentence_good": "...", "sentence_bad": "..."}'


@dataclass(frozen=True)
class ScoredPair:
    """A line of the file, and the log-probabilities (nats) and numbers of tokens of its two sentences."""

    pair: dict[str, str]
    good: float
    bad: float
    tokens: tuple[int, int]

    @property
    def correct(self) -> bool:
        """True if the acceptable sentence is more probable. A tie is wrong."""
        return self.good > self.bad


@dataclass(frozen=True)
class Group:
    """Accuracy on the pairs of a level ("overall" or a key of :data:`LEVELS`) and name, with the bounds of the 95%
    Wilson interval."""

    level: str
    name: str
    pairs: int
    ties: int
    accuracy: Interval


def read_pairs(file: Path, limit: int | None = None) -> list[dict[str, str]]:
    """Return the lines of ``file`` (.gz: compressed), at most the first ``limit`` of each paradigm.

    "/" in a field name becomes "_", because one paradigm of BLiMP writes "syntax/semantics". Raises
    ``ValueError`` for a line that is not an object with two sentences, and for a file without lines; the message
    contains the file name and the line number.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit: {limit} is not allowed; use 1 or more")
    pairs, taken = [], Counter[str]()
    with opened(file) as stream:
        for number, line in numbered_lines(stream, file):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            pair = json_object(line, where, _NEEDED)
            for name in _SENTENCES:
                if not isinstance(pair.get(name), str) or not pair[name].strip():
                    raise ValueError(f"{where}: no {name}{_NEEDED}")
            for name in LEVELS.values():
                if not isinstance(pair.get(name, ""), str):
                    raise ValueError(f"{where}: {name}: {pair[name]!r} is not allowed; use a string")
            if "field" in pair:
                pair["field"] = pair["field"].replace("/", "_")
            taken[pair.get("UID", "")] += 1
            if limit is None or taken[pair.get("UID", "")] <= limit:
                pairs.append(pair)
    if not pairs:
        raise ValueError(f"{file}: no pairs{_NEEDED}")
    return pairs


def score_pairs(
    loaded: Engine,
    pairs: Sequence[dict[str, str]],
    *,
    method: Method | None = None,
    batches: BatchOptions = BatchOptions(),
) -> Iterator[ScoredPair]:
    """Yield the scores of each pair, in order; see :func:`bert_jax.inference.score.score`.

    Two sentences with the same pieces are a tie, whatever the rounding in the rows in which they ran."""
    rows = score(loaded, (pair[name] for pair in pairs for name in _SENTENCES), method=method, batches=batches)
    for pair in pairs:
        good, bad = next(rows), next(rows)
        other = good if good.pieces == bad.pieces else bad
        yield ScoredPair(pair, good.score, other.score, (len(good.pieces), len(bad.pieces)))


def accuracies(scored: Sequence[ScoredPair]) -> list[Group]:
    """Return the accuracy on all pairs and on each field, phenomenon and paradigm, in the order of their
    first pairs. A pair without the name of a level does not count in it."""
    names = {("overall", "all"): list(scored)}
    for level, name in LEVELS.items():
        for one in scored:
            if name in one.pair:
                names.setdefault((level, one.pair[name]), []).append(one)
    return [
        Group(
            level, name, len(members), sum(one.good == one.bad for one in members),
            wilson_interval(sum(one.correct for one in members), len(members)),
        )
        for (level, name), members in names.items()
    ]  # fmt: skip
