"""docs/story.md, in English and Chinese: its figures are those of the lines of docs/results/story.jsonl."""

import json
import re
from pathlib import Path

import pytest
from benchmark_modules import load_benchmark

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = ("docs/story.md", "docs/story.zh-CN.md")
SEEDS = (0, 1, 2)
INTERVAL = re.compile(r"[+-]?\d\.\d{3} ± \d\.\d{3}")


def tables(monkeypatch) -> list[str]:
    lines = (REPOSITORY / "docs/results/story.jsonl").read_text().splitlines()
    results = {one["key"]: one for one in map(json.loads, lines)}
    return load_benchmark("story_table", monkeypatch).tables(results, SEEDS)


def body(text: str) -> list[str]:
    """The rows of the tables of a page, without their heads."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    rules = [at for at, row in enumerate(rows) if set(row) <= set("|- ")]
    return [row for at, row in enumerate(rows) if at not in rules and at + 1 not in rules]


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_is_one_of_the_lines(page, monkeypatch):
    text, measured = (REPOSITORY / page).read_text(encoding="utf-8"), tables(monkeypatch)
    rows = body(text)
    assert len(rows) > 60
    assert set(rows) <= set(measured)
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    named = set(INTERVAL.findall(prose))
    assert len(named) > 20
    assert named <= {figure for line in measured for figure in INTERVAL.findall(line)}


def test_both_languages_have_the_same_figures():
    english, chinese = (INTERVAL.findall((REPOSITORY / page).read_text(encoding="utf-8")) for page in PAGES)
    assert sorted(english) == sorted(chinese)
