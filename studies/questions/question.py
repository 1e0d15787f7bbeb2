"""What a question of the study is: its words, its class, the expected bands of its figures, and its function."""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Band = tuple[float, float]
Figures = Mapping[str, float]
Answer = Callable[[argparse.Namespace], Figures]


@dataclass(frozen=True)
class Question:
    """A question. ``bands`` has the lowest and the highest expected value of some figures that ``answer`` returns;
    the other figures are printed only."""

    name: str
    number: str
    words: str
    kind: Literal["exact", "measured", "trained"]
    bands: Mapping[str, Band]
    answer: Answer

    def misses(self, figures: Figures) -> list[str]:
        """Return the names of the figures that are outside their bands."""
        return [name for name, (low, high) in self.bands.items() if not low <= figures[name] <= high]

    def lines(self, figures: Figures) -> list[str]:
        """Return a line for each figure."""
        found = []
        for name, value in figures.items():
            low, high = self.bands.get(name, (-math.inf, math.inf))
            expected = f"  expected: {low:g} to {high:g}" if name in self.bands else ""
            found.append(f"  {name}: {value:.6g}{expected}")
        return found


QUESTIONS: dict[str, Question] = {}


def question(
    number: str, kind: Literal["exact", "measured", "trained"], words: str, bands: Mapping[str, Band]
) -> Callable[[Answer], Answer]:
    """Register the decorated function as the answer to the question with its name. ``number``: the question in the
    list of 24."""

    def register(answer: Answer) -> Answer:
        name = answer.__name__
        QUESTIONS[name] = Question(name, number, words, kind, bands, answer)
        return answer

    return register
