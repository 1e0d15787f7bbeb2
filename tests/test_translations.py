"""README.zh-CN.md: the commands, code and links of README.md."""

import re
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ENGLISH, CHINESE = "README.md", "README.zh-CN.md"
# Links from each file to the other.
BETWEEN = {ENGLISH, CHINESE}


def parts(name: str) -> tuple[list[str], Counter[str], Counter[str]]:
    """The blocks of code, the targets of links, and the words in backquotes outside of blocks."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    links = Counter(target for target in re.findall(r"\]\(([^)]+)\)", prose) if target not in BETWEEN)
    return blocks, links, Counter(re.findall(r"`([^`\n]+)`", prose))


def test_commands_links_and_names_are_the_same():
    english, chinese = parts(ENGLISH), parts(CHINESE)
    assert len(english[0]) >= 8 and len(english[1]) > 30
    assert english[0] == chinese[0], "the blocks of code differ"
    assert english[1] == chinese[1], "the links differ"
    assert english[2] == chinese[2], "the options and names in backquotes differ"


def test_each_names_the_other():
    for one, other in ((ENGLISH, CHINESE), (CHINESE, ENGLISH)):
        assert f"]({other})" in (REPOSITORY / one).read_text(encoding="utf-8")
