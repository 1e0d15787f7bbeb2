"""Find the borders of grapheme clusters, which a reader sees as single characters."""

import re
import unicodedata

# Characters besides marks that continue a cluster: vowels of Thai and Lao, vowels and final consonants of Hangul
# (syllables without accents are in three letters), joiners, half-width voiced sounds, skin tones of emoji.
_CONTINUING = re.compile("[\u0e33\u0eb3\u1160-\u11ff\ud7b0-\ud7ff\u200c\u200d\uff9e\uff9f\U0001f3fb-\U0001f3ff]")
_VIRAMA = 9  # combining class of the marks that join two consonants


def continues_cluster(char: str) -> bool:
    """Return True if ``char`` belongs to the cluster of the character before it."""
    return unicodedata.category(char)[0] == "M" or _CONTINUING.match(char) is not None


def joins_next(char: str) -> bool:
    """Return True if the letter after ``char`` belongs to the same cluster: after a virama or a joiner."""
    return char == "\u200d" or unicodedata.combining(char) == _VIRAMA
