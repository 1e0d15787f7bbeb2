"""The pages that are also in Chinese: both have the same commands, code and links. Comments are translated."""

import re
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
# The English page, the Chinese one, the fewest blocks of code and links that they have.
PAGES = [("README.md", "README.zh-CN.md", 8, 30), ("docs/story.md", "docs/story.zh-CN.md", 4, 3)]
pages = pytest.mark.parametrize(("english", "chinese", "blocks", "links"), PAGES, ids=lambda value: str(value))


def parts(name: str) -> tuple[list[str], Counter[str], Counter[str]]:
    """The blocks of code without comments, the targets of links, and the words in backquotes outside of blocks. A
    link to a page in Chinese counts as one to the English page; links to sections, whose names are translated, are
    left out."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)
    blocks = [re.sub(r"(^|\s+)#.*$", "", block, flags=re.MULTILINE) for block in blocks]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = (target for target in re.findall(r"\]\(([^)]+)\)", prose) if not target.startswith("#"))
    links = Counter(target.replace(".zh-CN.md", ".md") for target in targets)
    return blocks, links, Counter(re.findall(r"`([^`\n]+)`", prose))


@pages
def test_commands_links_and_names_are_the_same(english, chinese, blocks, links):
    one, other = parts(english), parts(chinese)
    assert len(one[0]) >= blocks and len(one[1]) >= links
    assert one[0] == other[0], "the blocks of code differ"
    assert one[1] == other[1], "the links differ"
    assert one[2] == other[2], "the options and names in backquotes differ"


@pages
def test_each_names_the_other(english, chinese, blocks, links):
    for one, other in ((english, chinese), (chinese, english)):
        assert f"]({Path(other).name})" in (REPOSITORY / one).read_text(encoding="utf-8")


def test_both_stories_have_the_same_figures():
    figure = re.compile(r"[+-]?\d\.\d{3} ± \d\.\d{3}")
    english, chinese = (
        figure.findall((REPOSITORY / page).read_text(encoding="utf-8"))
        for page in ("docs/story.md", "docs/story.zh-CN.md")
    )
    assert len(english) > 20 and sorted(english) == sorted(chinese)
