"""The site is built without a warning, asks no other host, and its search finds words in English and in Chinese."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_translations import WORDS

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def search():
    """The module docs/site/search.py."""
    pytest.importorskip("sphinx")
    spec = importlib.util.spec_from_file_location("site_search", REPOSITORY / "docs/site/search.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_words_of_a_query(search):
    assert search.words("如何预训练BERT?") == ["预训", "训练", "BERT"]
    assert search.words("resume a_run 词") == ["resume", "a_run", "词"]


@pytest.mark.slow  # writes the generated pages
def test_generated_pages_are_replaced_and_folders_stay(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs/site"))
    pages = importlib.import_module("pages")
    monkeypatch.setattr(pages, "GENERATED", tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / "former.md").write_text("")
    pages.write()
    assert (tmp_path / "commands.md").is_file() and (tmp_path / ".ipynb_checkpoints").is_dir()
    assert not (tmp_path / "former.md").exists()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(folder / "cache")]
    command += ["-c", str(REPOSITORY / "docs/site"), str(REPOSITORY), str(folder / "html")]
    built = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    )
    assert built.returncode == 0, built.stderr
    return folder / "html"


@pytest.mark.slow  # builds the site
def test_pages_load_nothing_from_other_hosts(site):
    pages = [*site.rglob("*.html")]
    assert len(pages) > 50
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'(?:<script[^>]* src|<link[^>]* href|<img[^>]* src)="(?:https?:)?//[^"]*', text), (
            page
        )
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style


@pytest.mark.slow  # builds the site
def test_the_index_has_english_and_chinese_words(site, search):
    index = json.loads((site / "searchindex.js").read_text(encoding="utf-8").removeprefix("Search.setIndex(")[:-1])

    def pages(word):
        files = index["terms"].get(word, [])
        return {index["docnames"][file] for file in (files if isinstance(files, list) else [files])}

    assert "README" in pages("checkpoint") and "README.zh-CN" in pages("训练")
    for word in WORDS:
        assert set.intersection(*map(pages, search.words(word))), word
    assert not any(page.startswith("studies/") for word in index["terms"] for page in pages(word))
    language = (site / "_static" / "language_data.js").read_text(encoding="utf-8")
    assert "Stemmer = EnglishStemmer;" in language and "var splitQuery" in language
    assert "docs/generated/options-pretrain" in pages("warmup_step") | pages("warmup_steps")


def test_the_table_of_formats_knows_the_family_of_a_recipe(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs/site"))
    pages = importlib.import_module("pages")
    formats = {name.partition("]")[0][1:]: names for name, _, names in pages._formats()}
    assert formats["quickstart"].startswith("hf, sentence-transformers") and "tf1" not in formats["quickstart"]
    assert "tf1" in formats["bert_base_phase1"] and "hf" not in formats["cramming"]
