"""HTML of a report: the style, the page, and its building blocks. A page loads nothing, and runs no script except
the one that shows the age of a run in progress."""

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence

from bert_jax.tokenization.tokenizer import without_surrogates
from bert_jax.training.logging.curves import is_share
from bert_jax.training.logging.logger import Value

# Number of charts in a row of a wide page.
_IN_ROW = 3
# Colors of the runs in a comparison, and their number.
RUN_COLORS = 8

STYLE = """
:root { color-scheme: light dark; --bg: #f5f6f8; --card: #fff; --ink: #1f2328; --soft: #59636e; --line: #dfe3e8;
  --grid: #e8ebef; --train: #2563c9; --eval: #c84a05; --base: #6e7781; --hit: #d3f3da; --miss: #ffedb5;
  --good: #1a7f37; --bad: #c62828; --error: 198, 40, 40;
  --heat: 37, 99, 201; --c0: #2563c9; --c1: #c84a05; --c2: #1a7f37; --c3: #8250df; --c4: #bf3989; --c5: #0f7b82;
  --c6: #8a6100; --c7: #57606a; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --card: #1c2026; --ink: #e6e9ec; --soft: #9ba6b2;
  --line: #30363d; --grid: #2a3037; --train: #79b0ff; --eval: #ff9a57; --base: #8b949e; --hit: #17492a;
  --miss: #5a4708; --good: #5fd07e; --bad: #ff8080; --error: 255, 100, 100;
  --heat: 95, 160, 255; --c0: #79b0ff; --c1: #ff9a57; --c2: #5fd07e; --c3: #c29bff;
  --c4: #ff8fc7; --c5: #4fcfd6; --c6: #e3b341; --c7: #b1bac4; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--bg); margin: 0;
  overflow-wrap: anywhere; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 14px 60px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 6px; } h2 { font-size: 18px; margin: 34px 0 10px; }
h3 { font-size: 14px; margin: 0 0 2px; } p { margin: 0 0 10px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
.card + .card, .pair + .card, details.card { margin-top: 12px; }
.soft { color: var(--soft); font-size: 13px; }
.state { display: inline-block; border: 1px solid var(--line); border-radius: 20px; padding: 1px 10px;
  background: var(--card); font-size: 13px; }
.state.running { border-color: var(--train); color: var(--train); }
.state.complete { border-color: var(--good); color: var(--good); }
.state.stopped { border-color: var(--bad); color: var(--bad); font-weight: 600; }
.verdict { border-left: 4px solid var(--base); margin-top: 12px; } .verdict p:last-child { margin: 0; }
.verdict.good { border-left-color: var(--good); } .verdict.doubtful { border-left-color: var(--eval); }
.verdict.stopped { border-left-color: var(--bad); } .verdict pre { margin: 0 0 10px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.warning { border-left: 4px solid var(--eval); padding: 6px 12px; background: var(--card); margin-top: 10px; }
.bar { height: 6px; border-radius: 3px; background: var(--grid); overflow: hidden; margin: 10px 0 0; }
.bar i { display: block; height: 100%; background: var(--train); }
.tiles { display: grid; grid-template-columns: repeat(var(--n), 1fr); gap: 10px; margin-top: 16px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 9px 13px; }
.tile b { display: block; font-size: 21px; line-height: 1.35; font-variant-numeric: tabular-nums; }
.tile span { display: block; color: var(--soft); font-size: 13px; line-height: 1.35; }
@media (max-width: 900px) { .tiles { grid-template-columns: repeat(var(--half), 1fr); } }
@media (max-width: 560px) { .tiles { grid-template-columns: repeat(2, 1fr); } .tile b { font-size: 19px; } }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); gap: 12px; }
@media (min-width: 1000px) { .panels > .double { grid-column: span 2; } }
.pair { columns: 2 420px; column-gap: 12px; margin-top: 16px; }
.pair .card { break-inside: avoid; margin: 0 0 12px; } .panels .card { margin: 0; min-width: 0; }
svg { width: 100%; height: auto; display: block; overflow: visible; }
svg text { font: 14.5px system-ui, sans-serif; fill: var(--soft); paint-order: stroke; stroke: var(--card);
  stroke-width: 3px; }
.grid { stroke: var(--grid); } .strong { stroke: var(--base); }
 .curve { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.faint { opacity: .3; stroke-width: 1; }
.ring { fill: none; stroke: var(--c); stroke-width: 2; } .thin { stroke-width: 1.2; opacity: .6; }
.dot { fill: var(--c); }
.dash { stroke: var(--c); stroke-dasharray: 5 4; stroke-width: 1.5; }
.keys { display: flex; flex-wrap: wrap; gap: 0 12px; font-size: 13px; color: var(--soft); min-height: 20px; }
.keys b { color: var(--ink); font-variant-numeric: tabular-nums; }
.key::before { content: ""; display: inline-block; width: 12px; height: 3px; border-radius: 2px; margin-right: 5px;
  vertical-align: middle; background: var(--c); }
.key.dashed::before { width: 20px; height: 2px; border-radius: 0;
  background: repeating-linear-gradient(90deg, var(--c) 0 5px, transparent 5px 7.5px); }
.note { color: var(--soft); } .panels + .soft, .soft + .panels { margin-top: 10px; }
th .key { display: inline-flex; align-items: center; } th .key::before { flex: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; overflow-wrap: break-word; }
td, th { padding: 5px 16px 5px 0; text-align: left; vertical-align: top; }
td:last-child, th:last-child { padding-right: 0; }
th, th.n { color: var(--soft); font-weight: 600; font-size: 13px; white-space: normal; }
tr + tr > * { border-top: 1px solid var(--line); }
th[scope=row] { color: var(--ink); font-weight: 400; font-size: 14px; min-width: 92px;
  overflow-wrap: break-word; }
table.options th[scope=row] { overflow-wrap: normal; }
@media (max-width: 560px) { td, th { padding-right: 10px; }
  .groups td, .groups th { padding-right: 7px; font-size: 13px; }
  .groups tr > :nth-child(2) { display: none; } }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); gap: 2px 28px;
  margin: 0; }
.facts div { display: flex; gap: 10px; padding: 4px 0; }
.facts dt { color: var(--soft); flex: 0 0 96px; font-size: 13px; line-height: 1.7; } .facts dd { margin: 0; }
.track { position: relative; height: 12px; border-radius: 6px; background: var(--grid); min-width: 44px;
  margin: 5px 0; }
.track i { position: absolute; left: 0; top: 0; bottom: 0; border-radius: 6px; background: var(--train); }
.track u { position: absolute; top: -3px; bottom: -3px; width: 2px; background: var(--ink); }
.whole { width: 100%; } td.n small { display: block; color: var(--soft); font-size: 12px; }
.narrow { display: none; }
@media (max-width: 560px) { .wide { display: none; } .wide + .narrow { display: block; }
  td.n small { white-space: normal; } }
@media (max-width: 1150px) { .wider { display: none; } .wider + .narrow { display: block; } }
.matrix td, .matrix th { border: 0; padding: 3px 5px; min-width: 0; }
.matrix td, .matrix thead th + th { width: var(--w); min-width: var(--w); max-width: var(--w); }
.matrix td { text-align: center; border-radius: 3px; font-variant-numeric: tabular-nums; }
.matrix thead th { vertical-align: bottom; text-align: center; overflow-wrap: anywhere; }
.matrix thead th:first-child { text-align: right; font-weight: 400; white-space: nowrap; }
.matrix .turn th + th bdi { writing-mode: vertical-rl; }
.matrix th[scope=row] { white-space: nowrap; text-align: right; font-size: 13px; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); gap: 12px 28px; }
.beside > .card { margin: 0; min-width: 0; }
.list { margin: 0; padding: 0; list-style: none; } .list > li + li { border-top: 1px solid var(--line);
  margin-top: 10px; padding-top: 10px; }
.mask { background: var(--miss); border-radius: 4px; padding: 1px 5px; -webkit-box-decoration-break: clone;
  box-decoration-break: clone; } .right { background: var(--hit); }
.both { background: linear-gradient(var(--hit) 50%, var(--miss) 50%); }
.text .mask { padding: 1px 0; }
.tag { color: var(--soft); font-size: 13px; display: inline-block; }
.guess { margin: 2px 10px 2px 0; display: inline-block; }
.guess bdi { border: 1px solid var(--line); border-radius: 4px; padding: 0 5px; color: var(--ink); }
 .text { white-space: pre-wrap; }
.text + .text { border-inline-start: 3px solid var(--line); padding-inline-start: 8px; margin-top: 3px; }
.answer { font-size: 13px; margin-top: 3px; } .answer > span { display: inline-block; margin-right: 12px; }
p + pre { white-space: pre-wrap; overflow-wrap: anywhere; margin-top: 0; }
pre span { display: inline-block; max-width: 100%; } .soft:has(+ pre) { margin: 8px 0 0; }
pre { overflow-x: auto; font-size: 13px; margin: 8px 0 0; overflow-wrap: normal; } summary { cursor: pointer; }
"""


# Shows the seconds since the last line of the log, and a warning after more than a limit.
AGE_SCRIPT = """
const age = document.querySelector("[data-last]"), quiet = document.querySelector("[data-limit]");
const words = (s) => s < 100 ? `${Math.round(s)} s` : s < 6000 ? `${Math.round(s / 60)} minutes`
  : s < 172800 ? `${Math.round(s / 3600)} hours` : `${Math.round(s / 86400)} days`;
const show = () => {
  const seconds = Math.max(0, Date.now() / 1000 - age.dataset.last);
  age.textContent = ` (${words(seconds)} ago)`;
  if (!quiet || seconds < quiet.dataset.limit) return;
  quiet.hidden = false;
  quiet.querySelector("b").textContent = words(seconds);
  const state = document.querySelector(".state");
  state.className = "state stopped";
  state.textContent = "stopped or hangs";
};
show();
setInterval(show, 1000);
"""

# Whatever the texts of a run contain, the page loads nothing, and executes nothing except the script of the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def escape(value: object) -> str:
    """Return ``value`` as text in HTML."""
    return html.escape(str(value))


def isolated(value: object) -> str:
    """Return text of the user as HTML that does not change the direction of the text around it."""
    return f"<bdi>{escape(value)}</bdi>"


def breakable(name: object) -> str:
    """Return the name of an option or a path as HTML that may be broken after a dot, an underscore or a slash."""
    return escape(name).replace(".", ".<wbr>").replace("_", "_<wbr>").replace("/", "/<wbr>").replace(":", ":<wbr>")


def document(title: str, body: Iterable[str], *, reload_seconds: int = 0, script: str = "") -> str:
    """Return the page. With ``reload_seconds`` above 0, browsers load it again after so many seconds; they run
    ``script`` at its end."""
    parts, policy = "\n".join(part for part in body if part), _POLICY
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        parts, policy = f"{parts}\n<script>{script}</script>", f"{policy}; script-src 'sha256-{digest}'"
    reload = f'<meta http-equiv="refresh" content="{reload_seconds}">' if reload_seconds else ""
    return without_surrogates(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"{reload}<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{parts}\n</main></body></html>\n"
    )


def section(heading: str, content: str) -> str:
    """Return a part of the page; empty without content."""
    return f"<h2>{escape(heading)}</h2>\n{content}" if content else ""


def card(content: str, *, heading: str = "", css: str = "") -> str:
    """Return a box; empty without content."""
    head = f"<h3>{escape(heading)}</h3>" if heading else ""
    return f'<div class="{f"card {css}".strip()}">{head}{content}</div>' if content else ""


def tiles(entries: Sequence[tuple[str, str, str]]) -> str:
    """Return tiles of (value, label, remark): at most eight and an even number, so that none is alone in a row."""
    shown = entries[: min(8, len(entries) // 2 * 2)] or entries
    columns = {6: 3, 8: 4}.get(len(shown), max(1, len(shown)))
    cells = [
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span>'
        + (f"<span>{escape(remark)}</span>" if remark else "")
        + "</div>"
        for value, label, remark in shown
    ]
    half = 3 if len(shown) == 6 else max(1, columns // 2)
    return f'<div class="tiles" style="--n:{columns};--half:{half}">{"".join(cells)}</div>' if cells else ""


def pair(*cards: str) -> str:
    """Return boxes that stand beside each other where there is room; empty without boxes."""
    shown = [one for one in cards if one]
    return f'<div class="pair">{"".join(shown)}</div>' if len(shown) > 1 else "".join(shown)


def panels(charts: Sequence[str], note: str = "") -> str:
    """Return the boxes of charts in rows of up to three. ``note`` is HTML that explains them, which fills the last
    row."""
    missing = -len(charts) % _IN_ROW
    css = {0: "soft", 1: "card note", 2: "card note double"}[missing]
    last = f'<div class="{css}">{note}</div>' if note and charts else ""
    inside = [*charts, last] if missing else charts
    grid = f'<div class="panels">{"".join(inside)}</div>' if charts else ""
    return grid if missing else last + grid


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = (), css: str = ""
) -> str:
    """Return a table of HTML cells, the first of each row a heading; the columns ``numbers`` contain numbers."""

    def cell(tag: str, column: int, content: str, more: str = "") -> str:
        of_numbers = ' class="n"' if column in numbers else ""
        return f"<{tag}{more}{of_numbers}>{content}</{tag}>"

    head = "".join(cell("th", column, name) for column, name in enumerate(header))
    lines = [f"<tr>{head}</tr>"] if header else []
    lines += [
        "<tr>"
        + "".join(
            cell("td" if column else "th", column, content, "" if column else ' scope="row"')
            for column, content in enumerate(row)
        )
        + "</tr>"
        for row in rows
    ]
    return f'<div class="scroll"><table class="{css}">{"".join(lines)}</table></div>'


def listed(items: Iterable[str]) -> str:
    """Return a list of HTML items with lines between them."""
    return f'<ul class="list">{"".join(f"<li>{item}</li>" for item in items)}</ul>'


def facts(entries: Iterable[tuple[str, str]]) -> str:
    """Return a list of (name, HTML); entries without content are omitted."""
    items = [f"<div><dt>{escape(name)}</dt><dd>{content}</dd></div>" for name, content in entries if content]
    return f'<dl class="facts">{"".join(items)}</dl>' if items else ""


def track(value: float, marks: Iterable[tuple[float, str]] = ()) -> str:
    """Return a bar of ``value`` between 0 and 1, with marks at other values and their names."""
    lines = "".join(
        f'<u style="left:{100 * x:.1f}%" title="{escape(name)}"></u>' for x, name in marks if 0 <= x <= 1
    )
    return f'<div class="track"><i style="width:{100 * min(1.0, max(0.0, value)):.1f}%"></i>{lines}</div>'


def command(line: str) -> str:
    """Return a command as a box whose lines only break at spaces, if its words are not too long."""
    return f"<pre>{' '.join(f'<span>{escape(word)}</span>' for word in line.split(' '))}</pre>"


def folded(summary: str, content: str) -> str:
    """Return content that a click on ``summary`` shows."""
    return f'<details class="card"><summary>{escape(summary)}</summary>{content}</details>'


def short(name: str, most: int = 40) -> str:
    """Return ``name`` in one line of at most ``most`` characters."""
    name = " ".join(name.split())
    return name if len(name) <= most else f"{name[: most - 1]}…"


def words_of(name: str) -> str:
    """Return the name of a metric in words."""
    return name.replace("_", " ")


def format_value(name: str, value: Value) -> str:
    """Format a value as text: shares and MFU as percentages, counts with commas, None as n/a."""
    if value is None:
        return "n/a"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if is_share(name):
        return f"{value:.1%}"
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:#.4g}".removesuffix(".")
