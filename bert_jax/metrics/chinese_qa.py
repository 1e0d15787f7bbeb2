"""Exact match and character F1 of answers in Chinese (CMRC 2018, DRCD)."""

import re
import string
from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np

from bert_jax.metrics.score import Score, count_records, mean_score

# ASCII punctuation, its full-width forms, and Chinese punctuation. More characters than the list of
# ``cmrc2018_evaluate.py``, which lacks . , ( ) % among others and, by mistake, the opening quote and the ellipsis.
FULL_WIDTH = "".join(chr(ord(character) + 0xFEE0) for character in string.punctuation)
PUNCTUATION = string.punctuation + FULL_WIDTH + "、。·・…—–‘’“”〈〉《》「」『』【】〔〕〖〗〜"  # noqa: RUF001
NO_PUNCTUATION = str.maketrans("", "", PUNCTUATION)
# A run of Latin letters or digits (also full-width ones; the text is in lower case) is one token, and so is every
# other character except white space.
TOKEN = re.compile(r"[0-9a-zß-öø-ɏ\uff10-\uff19\uff41-\uff5a]+|\S")


def remove_punctuation(text: str) -> str:
    """Return lower-case text without punctuation; inner white space is kept, as in ``cmrc2018_evaluate.py``."""
    return text.lower().strip().translate(NO_PUNCTUATION)


def exact_and_f1(prediction: str, references: Sequence[str]) -> tuple[float, float]:
    """Return (exact, f1), each the maximum over ``references``.

    For one reference, exact is 1 if the texts are equal without punctuation, otherwise 0, and f1 is the F1 score
    of the longest common substring of tokens. Raises ``ValueError`` if there are no references.
    """
    if not references:
        raise ValueError(f"answer {prediction[:40]!r}: no references; give one or more")
    predicted = remove_punctuation(prediction)
    golds = [remove_punctuation(reference) for reference in references]
    return float(predicted in golds), max(_substring_f1(predicted, gold) for gold in golds)


def chinese_answer_scores(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[Score]:
    """Return the scores exact and f1 (0 to 1) of ``predictions``, each of which has one or more references."""
    count_records(predictions=predictions, references=references)
    values = np.array([exact_and_f1(*pair) for pair in zip(predictions, references, strict=True)])
    return [mean_score("exact", values[:, 0]), mean_score("f1", values[:, 1])]


def _substring_f1(predicted: str, gold: str) -> float:
    tokens, others = TOKEN.findall(predicted), TOKEN.findall(gold)
    common = SequenceMatcher(None, tokens, others, autojunk=False).find_longest_match().size
    return 2 * common / (len(tokens) + len(others)) if common else 0.0
