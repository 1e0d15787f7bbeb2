"""The pages that are also in Chinese: both have the same commands, code and links; README in Chinese has more of
them, such as mirrors. Comments are translated. And the pages that are in Chinese only."""

import re
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
# The English page, the Chinese one, the fewest blocks of code and links that they have.
PAGES = [
    ("README.md", "README.zh-CN.md", 4, 30),
    ("docs/story.md", "docs/story.zh-CN.md", 4, 3),
    ("docs/articles.md", "docs/articles.zh-CN.md", 5, 40),
]
# The words that a reader in Chinese searches for.
WORDS = [
    "预训练", "微调", "掩码", "蒸馏", "剪枝", "量化", "句向量",
    "词向量", "长文本", "注意力", "可视化", "翻译", "小样本", "零样本",
    "各向异性", "情感", "聚类", "早停", "标签平滑", "分词", "词表",
    "数据增强", "命名实体", "序列标注", "阅读理解", "超参数", "学习率", "位置编码",
    "迁移学习", "混合精度", "断点续训", "多卡", "导出", "语义检索",
]  # fmt: skip
CHINESE = sorted([*(REPOSITORY / "docs" / "zh").glob("*.md"), *(REPOSITORY / "docs").glob("*.zh-CN.md")])
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
    if english == "README.md":
        assert [block for block in other[0] if block in one[0]] == one[0], "the Chinese page lacks a block of code"
        assert one[1] <= other[1], "the Chinese page lacks links"
    else:
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


def test_readme_is_one_page():
    """At most 700 words in English, and 700 characters in Chinese beside the names and the code."""
    english, chinese = (
        (REPOSITORY / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")
    )
    assert len(english.split()) <= 700 and len(chinese.split()) <= 700
    assert len(re.findall(r"[\u4e00-\u9fff]", re.sub(r"\]\(.*?\)", "", chinese))) <= 700


def test_every_word_has_an_answer():
    """README in Chinese leads from each word to a section of the glossary with that title and some sentences."""
    readme = (REPOSITORY / "README.zh-CN.md").read_text(encoding="utf-8")
    text = (REPOSITORY / "docs/zh/glossary.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)+)", text, re.MULTILINE))
    assert len(WORDS) == 34 and list(sections) == WORDS
    for word in WORDS:
        assert f"[{word}](docs/zh/glossary.md#{word})" in readme
        assert len(sections[word]) > 80 and "](" in sections[word], word


def test_links_of_chinese_pages():
    for page in CHINESE:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)]+)\)", prose):
            place, _, anchor = target.partition("#")
            if not place.startswith("http"):
                file = page.parent / place if place else page
                assert file.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def anchors(file: Path) -> set[str]:
    """The anchors of a page on GitHub: those of the titles, and those that are written out."""
    text = re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="(.+?)">', text))
