"""A small rule-based sentence splitter for all scripts."""

import re
from functools import lru_cache
from itertools import pairwise

# Marks that end a sentence if white space and the start of another sentence follow. Patterns begin with a set and
# have possessive quantifiers (++), so that they are quick, and linear in any text.
_END = "[.!?\u2026\u203d\u203c\u2047-\u2049\u2024\u2cf9-\u2cfb\u2e2e\u2e3c\u2e53\u2e54\ufe52\ufe56\ufe57\uff0e]"
_CLOSING = "[\"'\u2019\u201d\u00bb\u203a)\\]}\u300d\u300f\u300b\uff09\u3011]*+"
_OPENING = "[\"'\u2018\u201c\u201e\u00ab\u2039(\\[{\u00bf\u00a1\u2014\u2013-]"
_NEXT = rf"{_CLOSING}\s++(?={_OPENING}*+\s*+(\w))"
_SPACED_END = re.compile(rf"({_END}(?<!{_END}{_END}){_END}*+){_NEXT}")
# A semicolon between Greek letters is a question mark, and a colon between Armenian ones is a full stop.
_GREEK_ARMENIAN = [
    re.compile(rf"([{mark}](?<=[{letters}].)){_CLOSING}\s++(?={_OPENING}*+([{letters}]))")
    for mark, letters in ((";\u037e", "\u0370-\u03ff\u1f00-\u1fff"), (":", "\u0531-\u0587"))
]
# The other marks of the property Sentence_Terminal of Unicode 17.0, and the shads of Tibetan, need no white space
# after them; consecutive marks and the closing marks after them form one end.
_MARKS = (
    "\u0589\u061d-\u061f\u06d4\u0700-\u0702\u07f9\u0837\u0839\u083d\u083e\u0964\u0965\u0f0d\u0f0e\u104a\u104b"
    "\u1362\u1367\u1368\u166e\u1735\u1736\u17d4\u17d5\u1803\u1809\u1944\u1945\u1aa8-\u1aab\u1b4e\u1b4f"
    "\u1b5a\u1b5b\u1b5e\u1b5f\u1b7d-\u1b7f\u1c3b\u1c3c\u1c7e\u1c7f\u3002\ua4ff\ua60e\ua60f\ua6f3\ua6f7"
    "\ua876\ua877\ua8ce\ua8cf\ua92f\ua9c8\ua9c9\uaa5d-\uaa5f\uaaf0\uaaf1\uabeb\ufe12\ufe15\ufe16\uff01\uff1f"
    "\uff61"
)
_MARKS_BEYOND_BMP = re.compile(
    "[\U00010a56\U00010a57\U00010f55-\U00010f59\U00010f86-\U00010f89\U00011047\U00011048\U000110be-\U000110c1"
    "\U00011141-\U00011143\U000111c5\U000111c6\U000111cd\U000111de\U000111df\U00011238\U00011239\U0001123b"
    "\U0001123c\U000112a9\U000113d4\U000113d5\U0001144b\U0001144c\U000115c2\U000115c3\U000115c9-\U000115d7"
    "\U00011641\U00011642\U0001173c-\U0001173e\U00011944\U00011946\U00011a42\U00011a43\U00011a9b\U00011a9c"
    "\U00011c41\U00011c42\U00011ef7\U00011ef8\U00011f43\U00011f44\U00016a6e\U00016a6f\U00016af5\U00016b37"
    "\U00016b38\U00016b44\U00016d6e\U00016d6f\U00016e98\U0001bc9f\U0001da88]"
)
# Two word spaces are a full stop of Ethiopic. Dandas and shads stand in pairs, and around the number of a verse.
_PAIRED = "(?:\\s*+(?:\\d+\\s*+)?[\u0964\u0965\u0f0d\u0f0e]++)*"
_MARKED_END = re.compile(
    rf"[{_MARKS}\u1361\U00010a56-\U0001da88](?:(?<=\u1361)\u1361|[{_MARKS}]*+{_PAIRED}){_CLOSING}\s*+"
)
# Letters of scripts that put white space between sentences and phrases, not between words: Thai, Lao, New Tai Lue
# and other Tai scripts, without marks of repetition and abbreviation; Khmer and Burmese have end marks, too.
_THAI = (
    "\u0e01-\u0e2e\u0e30-\u0e3a\u0e40-\u0e45\u0e47-\u0e4e\u0e81-\u0eae\u0eb0-\u0ec4\u0ec8-\u0ece\u0edc-\u0edf"
    "\u1950-\u19c9\u1a20-\u1a7c\uaa80-\uaac2"
)
_PHRASES = [
    (re.compile(rf"\s(?<=[{letters}]\s)\s*+(?=[{letters}])"), re.compile(f"[{letters}]"))
    for letters in (_THAI, rf"{_THAI}\u1000-\u1049\u1780-\u17d3")
]
_LAST_WORD = re.compile(r"[^\W_]+(?:\.[^\W_]+)*$")
# Georgian letters count as lower case in Unicode, but Georgian has no capitals.
_GEORGIAN = re.compile("[\u10d0-\u10ff]")
_LEAST_CAPITALS = 0.002  # of the letters of cased text, in which a capital begins a sentence of 50 to 200 letters

# Lower-case words after which a full stop rarely ends a sentence.
_ABBREVIATIONS = frozenset(
    """
    mr mrs ms messrs mme mlle dr prof st rev hon gen col capt lt sgt maj gov sen rep pres sr jr vs no nos vol fig
    figs eq ch sec art pp approx ca cf al dept est inc ltd co corp bros e.g i.e a.m p.m u.s viz jan feb mar apr
    jun jul aug sep sept oct nov dec
    z.b d.h u.a bzw ggf vgl nr abb str sog evtl inkl zzgl usw dt hr fr
    г гг т.е т.к т.д т.п т.н др пр стр см ср им ул руб коп тыс млн млрд рис табл проф акад напр
    av bd etc env sra ud uds núm pág
    """.split()  # noqa: RUF001, SIM905
)


@lru_cache
def _capital() -> re.Pattern[str]:
    """Return a pattern of the capitals of all scripts in use."""
    return re.compile("[" + "".join(filter(str.isupper, map(chr, range(0xAB30)))) + "]")


def is_lower_case(text: str, least: int = 1) -> bool:
    """Return True if ``text`` has at least ``least`` letters with case and practically no capitals among them."""
    capitals = len(_capital().findall(text))
    if capitals > _LEAST_CAPITALS * len(text):
        return False
    letters = sum(map(str.islower, text))
    return letters >= least and capitals < _LEAST_CAPITALS * letters


def split_sentences(paragraph: str, lower_case: bool = False) -> list[str]:
    """Split a paragraph into stripped, nonempty sentences.

    A sentence ends at a mark such as ``. ! ?`` that is followed by white space and an upper-case letter, a digit or
    a letter without case (with ``lower_case``, for text without capitals: any letter), at every end mark of another
    script, and at white space between Thai or Lao letters. A full stop after an abbreviation or an initial does not
    end a sentence.
    """
    ends = [m.end() for m in _SPACED_END.finditer(paragraph) if _ends_sentence(paragraph, m, lower_case)]
    if not paragraph.isascii():
        for pattern in _GREEK_ARMENIAN:
            ends += [m.end() for m in pattern.finditer(paragraph) if _ends_sentence(paragraph, m, lower_case)]
        ends += [m.end() for m in _MARKED_END.finditer(paragraph) if _is_mark(m.group())]
        space, letter = _PHRASES[0 if ends else 1]
        borders = [m.end() for m in space.finditer(paragraph)]
        ends += borders if borders and 3 * len(letter.findall(paragraph)) > len(paragraph) else []
    if not ends:
        text = paragraph.strip()
        return [text] if text else []
    borders = [0, *sorted(ends), len(paragraph)]
    parts = (paragraph[a:b].strip() for a, b in pairwise(borders))
    return [part for part in parts if part]


def _is_mark(end: str) -> bool:
    if end[0] == "\u1361":
        return end[1:2] == "\u1361"
    return end[0] < "\U00010000" or _MARKS_BEYOND_BMP.match(end) is not None


def _ends_sentence(paragraph: str, match: re.Match[str], lower_case: bool) -> bool:
    following = match.group(2)
    if not lower_case and following.islower() and not _GEORGIAN.match(following):
        return False
    if match.group(1) != ".":
        return True
    word = _LAST_WORD.search(paragraph, max(0, match.start() - 20), match.start())
    if word is None:
        return True
    is_initial = len(word.group()) == 1 and (word.group().islower() if lower_case else word.group().isupper())
    is_initial = is_initial and word.group().upper() != "I" and not _GEORGIAN.match(word.group())
    return not is_initial and word.group().lower() not in _ABBREVIATIONS
