"""The page of a picture: one HTML file with its data and script, without requests."""

import base64
import html
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bert_jax.contrib.pictures.nearest_words import CLEAR
from bert_jax.json_values import Json
from bert_jax.tokenization.tokenizer import without_surrogates

# Characters of the text that the page shows.
_SHOWN = 600
_ATTENTION = """<h2>Attention of every head</h2>
<div class="card"><p class="soft">Rows are layers, columns are heads; R is the rollout (below). In each square, a
row is a token that attends and a column a token that it attends to. Click or tap a square to see it in full.
Color: 0% <span class="scale" id="scale"></span> 100%; the middle of the scale is 25%, because the color follows the
square root. <span id="equal"></span></p><canvas id="grid"></canvas>
<p class="soft">The head that attends most to each place. Means are over the tokens that are not special.</p>
<table class="places"><thead><tr><th>place</th><th>layer, head</th><th>mean attention</th><th>equal attention</th>
<th>random parameters</th></tr></thead><tbody id="patterns"></tbody></table>
<p class="soft">"Equal attention" is the value of a head that attends equally to all tokens that it can read.
"Random parameters" is the largest value of a head of the same network before training. A value that is not clearly
above both shows nothing that the model has learned.</p>
<p class="soft">Attention shows where a head reads, not why the model gives its answer: other attention can lead to
the same answer (Jain and Wallace 2019).</p></div>
<h2>One head</h2>
<div class="choose"><label>layer <select id="layer"></select></label>
<label>head <select id="head"></select></label></div>
<p class="soft" id="numbers"></p>
<div class="two"><div class="card"><canvas id="matrix"></canvas>
<p class="read" id="read">Point at or tap a cell to read its tokens and its value.</p></div>
<div class="card">
<div class="choose"><label><input type="checkbox" id="special"> without special tokens</label></div>
<p class="soft">Lines lead from a token (left) to the tokens that it attends to (right), from 10% on. Click or tap a
token on the left to see only its lines, from 1% on.</p>
<div class="lines"><div class="inner">
<ol id="from"></ol><svg id="lines"></svg><ol id="to"></ol></div></div></div></div>
<p class="soft">Rollout (Abnar and Zuidema 2020) multiplies the matrices of the layers up to the chosen one. The
matrix of a layer is the mean of its heads and the identity, because the residual connection passes each token on.
</p>
<h2>Entropy and distance of every head</h2>
<div class="two"><div class="card"><svg id="entropies"></svg></div>
<div class="card"><svg id="distances"></svg></div></div>
<p class="soft">A dot is a head; click or tap it to see it in full. A dash is equal attention. Entropy is small
if a token attends to few tokens. Distance counts the tokens between a token and those that it attends to,
weighted by attention. Both are means over the tokens.</p>"""
_NEAREST = """<h2>Nearest words of a token, layer by layer</h2>
<div class="card"><div class="chips" id="chips" dir="$DIR"></div><table class="near">
<thead><tr><th></th><th>nearest words and their cosines</th><th>median word</th>
<th>random parameters: nearest, median</th></tr></thead><tbody id="near"></tbody></table>
<p class="soft">Cosines between the vector of the token in this text and those of $COUNT vocabulary words, each read
alone by the same layers: words nearest to the tokens in the embedding table, and words with the lowest ids. "input
table" compares the rows of this table, where a piece has one vector in all texts.</p>
<p class="soft">"Median word" is the median of the cosines to all $COUNT words: half of the words are nearer. The
last column gives the cosine of the nearest word and the median for the same network before training. A row is above
random parameters only if its first cosine exceeds its median by more than $CLEAR times the difference between these
two. <span id="verdict"></span></p><p class="note">$VERDICT</p></div>"""
_MAP = """<h2>Map of words</h2>
<div class="card"><svg id="map"></svg><p class="soft">Input embeddings of $COUNT words on their first two principal
components: $X of the variance from left to right, $Y from bottom to top. Words of several pieces have the mean of
their pieces. The map leaves out $REST of the variance, so words that are close to each other here can be far apart
in the model. With random parameters, it would leave out $RANDOM. A dot without a label is a word whose
label would cover another one; point at the dot to read it.</p><p class="note">$VERDICT</p></div>"""
# Share of what a map leaves out with random parameters, from which down a map leaves out clearly less.
_LESS = 0.9


def page(
    title: str,
    summary: Sequence[str],
    text: str,
    notes: Sequence[str],
    data: Mapping[str, Json],
    values: np.ndarray,
) -> str:
    """Return the page.

    Args:
        title: heading of the page.
        summary: lines about the model.
        text: the text of the picture, empty if it has none.
        notes: lines about what the page does not show.
        data: what ``page.js`` reads; ``nearest`` and ``map`` are None if the page has no such part.
        values: uint8[layers, heads + 1, tokens, tokens], the square roots of attention probabilities and rollout,
            times 255; the page has no attention if it is empty.
    """
    own = [f"<h1>{html.escape(title)}</h1>"]
    own += [f'<p class="soft">{html.escape(line)}</p>' for line in summary]
    if text:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
        own.append(f'<p class="text" dir="auto">{html.escape(shown)}</p>')
    own += [f'<p class="note">{html.escape(line)}</p>' for line in notes]
    own.append("<noscript><p>This page draws with a script; allow scripts to see it.</p></noscript>")
    own += [_ATTENTION] if values.size else []
    if nearest := data["nearest"]:
        assert isinstance(nearest, dict)
        verdict = _nearest_verdict(nearest["sources"], nearest["above"], data["special"])  # type: ignore[arg-type]
        own.append(_filled(_NEAREST, {"DIR": direction(text), "COUNT": f"{nearest['candidates']:,}",
                                       "CLEAR": str(CLEAR), "VERDICT": verdict}))  # fmt: skip
    if of_words := data["map"]:
        assert isinstance(of_words, dict) and isinstance(of_words["words"], list)
        x, y = of_words["variance"]  # type: ignore[misc]
        rest, random = max(0.0, 1 - x - y), max(0.0, 1 - of_words["random_variance"])  # type: ignore[operator]
        own.append(_filled(_MAP, {"COUNT": str(len(of_words["words"])), "X": f"{x:.0%}", "Y": f"{y:.0%}",
                                   "REST": f"{rest:.0%}", "RANDOM": f"{random:.0%}",
                                   "VERDICT": _map_verdict(rest, random)}))  # fmt: skip
    here = Path(__file__).parent
    parts = {
        "TITLE": html.escape(title),
        "BODY": "\n".join(own),
        "DATA": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        "VALUES": base64.b64encode(values.tobytes()).decode(),
        "SCRIPT": (here / "page.js").read_text(encoding="utf-8"),
    }
    return without_surrogates(_filled((here / "page.html").read_text(encoding="utf-8"), parts))


def _nearest_verdict(sources: Sequence[str], above: Sequence[Sequence[bool]], special: Sequence[bool]) -> str:
    """Return what the rows ``sources`` show: for how many of the tokens that are not ``special`` each is ``above``
    random parameters."""
    size = special.count(False)
    counts = [sum(one and not is_special for one, is_special in zip(row, special, strict=True)) for row in above]
    if not size:
        return "All tokens of this text are special, so that the rows are not compared with random parameters."
    if not any(counts):
        return (
            f"For all {size} tokens of this text that are not special, no row is above random parameters: by this "
            "rule, these layers have learned no word similarity."
        )
    shown = ", ".join(f"{count} in {source}" for source, count in zip(sources, counts, strict=True))
    end = (
        " Rows with at most half of the tokens show little that the model has learned."
        if 2 * min(counts) <= size
        else ""
    )
    return (
        f"Of the {size} tokens of this text that are not special, this many are above random parameters: {shown}."
        f"{end}"
    )


def _map_verdict(rest: float, random: float) -> str:
    """Return what the share of the variance that the map leaves out shows, compared with random parameters."""
    if rest < _LESS * random:
        return (
            f"The map leaves out {rest:.0%}, at least a tenth less than the {random:.0%} of random parameters: the "
            "places of the words show something that the model has learned."
        )
    return (
        f"The map leaves out {rest:.0%}, which is not at least a tenth less than the {random:.0%} of random "
        "parameters: the places of the words show little that the model has learned."
    )


def _filled(template: str, parts: Mapping[str, str]) -> str:
    """Return ``template`` with each $NAME replaced by the part of this name; the parts themselves are not read."""
    return re.sub(r"\$([A-Z]+)\b", lambda found: parts[found[1]], template)


def direction(text: str) -> str:
    """Return "rtl" if the first letter of ``text`` belongs to a script from right to left, otherwise "ltr"."""
    kinds = map(unicodedata.bidirectional, text)
    return "rtl" if next((kind for kind in kinds if kind in ("L", "R", "AL")), "L") != "L" else "ltr"
