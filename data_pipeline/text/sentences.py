"""A small rule-based sentence splitter for Latin, Cyrillic and CJK punctuation."""

import re
from itertools import pairwise

# Marks that end a sentence if white space and the start of another sentence follow.
_END = r"[.!?\u2026\u203d]+"
_CLOSING = "[\"'\u2019\u201d\u00bb\u203a)\\]}\u300d\u300f\u300b\uff09\u3011]*"
_OPENING = "[\"'\u2018\u201c\u201e\u00ab\u2039(\\[{\u00bf\u00a1\u2014\u2013-]"
_WESTERN = re.compile(rf"({_END}){_CLOSING}\s+(?={_OPENING}*\s*(\w))")
# CJK end marks need no white space after them; consecutive marks and the closing marks after them form one end.
_CJK = re.compile(rf"[\u3002\uff01\uff1f\uff61]+{_CLOSING}\s*")
_LAST_WORD = re.compile(r"[^\W_]+(?:\.[^\W_]+)*$")

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


def split_sentences(paragraph: str) -> list[str]:
    """Split a paragraph into stripped, nonempty sentences.

    A sentence ends at a mark such as ``. ! ?`` that is followed by white space and an upper-case letter, a digit or
    a letter without case, and at every CJK end mark. A full stop after an abbreviation or an initial does not end a
    sentence.
    """
    ends = [match.end() for match in _WESTERN.finditer(paragraph) if _ends_sentence(paragraph, match)]
    ends += [match.end() for match in _CJK.finditer(paragraph)]
    if not ends:
        text = paragraph.strip()
        return [text] if text else []
    borders = [0, *sorted(ends), len(paragraph)]
    parts = (paragraph[a:b].strip() for a, b in pairwise(borders))
    return [part for part in parts if part]


def _ends_sentence(paragraph: str, match: re.Match[str]) -> bool:
    if match.group(2).islower():
        return False
    if match.group(1) != ".":
        return True
    word = _LAST_WORD.search(paragraph, max(0, match.start() - 20), match.start())
    if word is None:
        return True
    is_initial = len(word.group()) == 1 and word.group().isupper() and word.group() != "I"
    return not is_initial and word.group().lower() not in _ABBREVIATIONS
