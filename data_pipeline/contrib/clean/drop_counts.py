"""Counts and examples of the text that the rules drop, and a report of them.

Every job counts separately and stores the counts as JSON; sums and examples do not depend on how the jobs are
distributed. The examples of a rule are those with the smallest keys, which are hashes of the place of a document or
a line, so that they come from all parts of the corpus.
"""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from bert_jax.hashing import hash_key

EXAMPLES = 20
_EXCERPT = 200  # characters of a document or a line in an example
# Rules in the order in which they are applied, with their descriptions.
RULES = {
    "encoding": "broken encoding",
    "length": "too few or too many words",
    "language": "other languages",
    "exact_duplicate": "equal to an earlier document",
    "boilerplate": "lines that repeat in many documents",
    "near_duplicate": "similar to an earlier document",
}
Place = tuple[int, int]  # (index of the source, index of the document in it), both from 0


def excerpt(text: str) -> str:
    """Return the start of ``text`` on one line."""
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT else f"{line[:_EXCERPT]}..."


class Tally:
    """Counts per rule or source, and the examples with the smallest keys per rule."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}
        self._examples: dict[str, list[tuple[int, int, dict[str, Any]]]] = {}

    def add(self, name: str, **counts: int) -> None:
        """Add ``counts`` to the counts of the rule or source ``name``."""
        self._counts.setdefault(name, Counter()).update(counts)

    def offer(self, rule: str, place: Place, line: int, make: Callable[[], dict[str, Any]]) -> None:
        """Keep an example of ``rule`` if its key is among the smallest; ``make`` returns its fields.

        ``place`` and ``line`` determine the key; ``line`` is 0 for a whole document.
        """
        key = int(hash_key(*place, line)[0])
        held = self._examples.setdefault(rule, [])
        # A heap whose first entry has the largest key; no two examples of a rule have the same place and line.
        if len(held) < EXAMPLES:
            heapq.heappush(held, (-key, len(held), {"place": [*place, line], **make()}))
        elif -key > held[0][0]:
            heapq.heapreplace(held, (-key, held[0][1], {"place": [*place, line], **make()}))

    def as_json(self) -> str:
        """Return the tally as JSON for :func:`merge`."""
        examples = {rule: sorted(held, reverse=True) for rule, held in self._examples.items()}
        return json.dumps({"counts": self._counts, "examples": examples}, ensure_ascii=False)


def merge(tallies: Iterable[str]) -> tuple[dict[str, dict[str, int]], dict[str, list[dict[str, Any]]]]:
    """Add the tallies that :meth:`Tally.as_json` returned.

    Returns the counts by rule or source, and the examples by rule, in the order of the corpus.
    """
    counts: dict[str, Counter[str]] = {}
    examples: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for text in tallies:
        tally = json.loads(text)
        for name, values in tally["counts"].items():
            counts.setdefault(name, Counter()).update(values)
        for rule, held in tally["examples"].items():
            pairs = [*examples.get(rule, []), *((-key, example) for key, _, example in held)]
            examples[rule] = heapq.nsmallest(EXAMPLES, pairs, key=lambda pair: (pair[0], pair[1]["place"]))
    ordered = {
        rule: sorted((example for _, example in held), key=lambda example: example["place"])
        for rule, held in examples.items()
    }
    return {name: dict(values) for name, values in counts.items()}, ordered
