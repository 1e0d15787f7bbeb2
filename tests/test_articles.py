"""docs/articles.md and docs/articles.zh-CN.md: the same 154 items in both, each with its four columns, the same
figures and verdicts; links lead somewhere, and options and commands exist."""

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest
from test_translations import anchors

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
PAGES = ("articles.md", "articles.zh-CN.md")
VERDICTS = {
    "confirmed": "一致",
    "partly": "部分一致",
    "contradicted": "不一致",
    "not measured": "尚未实测",
    "not covered": "不支持",
}


def text(page):
    return (DOCS / page).read_text(encoding="utf-8")


def items(page):
    """Number -> (item, article, paper, measured, verdict) of a page, in its order."""
    rows = re.findall(r"^\| (\d+)\. (.*) \|$", text(page), re.MULTILINE)
    found = {int(number): [cell.strip() for cell in cells.split("|")] for number, cells in rows}
    assert len(found) == len(rows), "a number stands in two rows"
    return found


def figures(cell):
    """The numbers of a cell, without those of links, options and names of systems."""
    bare = re.sub(r"\]\([^)]*\)|`[^`]*`|\b[A-Za-z]+-?\d[\w-]*|第[\d、 到和]+条|items? [\d, toand]+", " ", cell)
    return sorted(re.findall(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", bare.replace(", ", "; ")))


@pytest.fixture(scope="module")
def check():
    """The module studies/articles/check.py."""
    spec = importlib.util.spec_from_file_location("articles_check", REPOSITORY / "studies/articles/check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES)
def test_all_items_have_all_columns(page):
    found = items(page)
    assert list(found) == list(range(1, 155))
    for number, cells in found.items():
        assert len(cells) == 5 and all(cells), number


def verdict(cell):
    return re.split("[:：]", cell)[0].strip()


def test_verdicts_and_figures_are_the_same():
    for (number, english), chinese in zip(items(PAGES[0]).items(), items(PAGES[1]).values(), strict=True):
        assert VERDICTS[verdict(english[-1])] == verdict(chinese[-1]), number
        assert figures(english[3]) == figures(chinese[3]), number


@pytest.mark.parametrize(("page", "name"), [(PAGES[0], "not covered"), (PAGES[1], "不支持")])
def test_an_item_that_is_not_covered_says_why(page, name):
    reasons = [cells[-1] for cells in items(page).values() if verdict(cells[-1]) == name]
    assert len(reasons) > 5 and all(re.search("[:：] ?.{4}", reason) for reason in reasons)


@pytest.mark.parametrize(("page", "opening"), [(PAGES[0], "Of the 154 items"), (PAGES[1], "154 条中")])
def test_the_opening_counts_the_verdicts(page, opening):
    (line,) = (line for line in text(page).splitlines() if line.startswith(opening))
    counts = Counter(verdict(cells[-1]) for cells in items(page).values())
    names = VERDICTS if page == PAGES[0] else VERDICTS.values()
    assert re.findall(r"\d+", line) == ["154", *(str(counts[name]) for name in names)]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)]+)\)", text(page))
    assert len(targets) > 100
    for target in {*targets}:
        place, _, anchor = target.partition("#")
        file = DOCS / place if place else DOCS / page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES)
def test_options_and_commands_exist(page, check):
    found = check.spans(text(page))
    assert len(found) > 100
    wrong = [check.unknown(span) for span in found if not check.is_command(span)]
    assert not any(wrong), [one for one in wrong if one]
    commands = {span for span in found if check.is_command(span)}
    assert {span for span in commands if not span.startswith("python ")} <= {*check.COMPLETED}


@pytest.mark.parametrize("wrong", ["optimizer.mixup", "optimizer.schedule square", "--to_longer", "gelu_cubic"])
def test_wrong_options_are_found(wrong, check):
    assert check.unknown(wrong)


@pytest.mark.slow  # trains tiny models and runs every command
def test_the_commands_run(check):
    assert not check.check()
