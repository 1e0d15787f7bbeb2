"""The site: ``sphinx-build -c docs/site . build/site`` from the folder of the repository.

The sources are the Markdown files where they are, so that links work in the repository and on the site;
``pages.py`` writes the pages that follow from the code into docs/generated.
"""

import os
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pages
import search

import bert_jax

project = "bert_jax"
version = release = bert_jax.__version__
copyright = "the authors of bert_jax, Apache License 2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "*.md", "docs/*.md", "docs/**/*.md", "bert_jax/contrib/*/README.md", "data_pipeline/contrib/*/README.md",
    "studies/*/README.md", "examples/*/README.md",
]  # fmt: skip
exclude_patterns = [".*", "build", "runs", "data", "tests", "**/__pycache__", "*.egg-info"]
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
smartquotes = False  # "--" begins options
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"bert_jax {release}"
html_static_path = ["static"]
html_css_files = ["tables.css"]
html_js_files = ["search_ranking.js"]
html_search_language = "en-zh"
html_show_sphinx = html_copy_source = False

# A link that may lead to a folder, whose page pages.py writes; the name of a paragraph.
_LINK = re.compile(r"\]\(([\w./-]+)\)")
_NAME = re.compile(r'^<a id="([\w-]+)"></a>', re.MULTILINE)
# The heading of a function of docs/api.md with its parameters, which are too long for a table of contents.
_SIGNATURE = re.compile(r"^### `([\w.]+)(\(.*)`$", re.MULTILINE)
# Pages that search does not list: figures of single studies.
_NOT_SEARCHED = "studies/"


def _adapt(app, name, source):
    """Replace links to folders by links to their generated pages, and names in HTML by those of MyST; move the
    parameters of functions out of headings; offer tutorials as notebooks."""
    here = (REPOSITORY / name).parent

    def page(match):
        folder = here / match[1]
        return f"]({os.path.relpath(pages.page_of(folder), here)})" if folder.is_dir() else match[0]

    text = _NAME.sub(r"(\1)=\n", _LINK.sub(page, source[0]))
    if (file := pages.GENERATED / f"{Path(name).name}.ipynb").is_file():
        offered = "下载为 notebook" if "/zh/" in name else "Download as a notebook"
        text = text.replace("\n\n", f"\n\n[{offered}]({os.path.relpath(file, here)})\n\n", 1)
    source[0] = _SIGNATURE.sub(r"### `\1`\n`\1\2`\n", text)


def _keep_from_search(app, doctree):
    if app.env.docname.startswith(_NOT_SEARCHED):
        app.env.metadata[app.env.docname]["nosearch"] = True


def _first_page(app, error):
    """Write index.html, which opens the start page."""
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "index.html").write_text(
            '<meta http-equiv="refresh" content="0; url=docs/index.html">\n'
        )


def setup(app):
    """Write the generated pages, and register the search and the links to folders."""
    pages.write()
    app.add_search_language(search.EnglishAndChinese)
    app.connect("source-read", _adapt)
    app.connect("doctree-read", _keep_from_search)
    app.connect("build-finished", _first_page)
