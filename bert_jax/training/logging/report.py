"""The report of a run: WORKDIR/report.html (self-contained) and WORKDIR/report.png.

The report is created from metrics.jsonl, config.yaml and report_data.json in the same folder, so it can be written
again at any time, even while the run is in progress. Sections without data are omitted.
"""

import html
import json
from collections.abc import Sequence
from pathlib import Path

from bert_jax.io.files import write_whole
from bert_jax.objectives.display import RUN_TILES, Display, ReportData
from bert_jax.training.logging.curves import baselines, draw_curves
from bert_jax.training.logging.logger import Row, Value
from bert_jax.training.logging.metrics_file import read_metrics
from bert_jax.training.logging.progress import format_count

HTML_FILE = "report.html"
IMAGE_FILE = "report.png"
DATA_FILE = "report_data.json"


def write_report(workdir: Path | str, display: Display, data: ReportData | None = None) -> Path:
    """Write report.html and report.png into ``workdir``; return the path of report.html.

    Args:
        workdir: folder of the run.
        display: panels, tiles and sections that the objective defines.
        data: results that no other file of the folder contains. They are written to report_data.json, from which
            later calls without ``data`` read the results. All keys are optional: ``title`` str; ``summary`` list of
            lines; ``evaluation`` {name: number or None}, the final evaluation; ``confusion`` {split: {"labels":
            [C], "counts": [C][C]}}, with a row per label and a column per prediction; baselines and samples of the
            objective.

    Raises:
        OSError: a file could not be written.
    """
    workdir = Path(workdir)
    data_path = workdir / DATA_FILE
    if data is not None:
        write_whole(data_path, json.dumps(data, indent=1, ensure_ascii=False))
    elif data_path.exists():
        data = json.loads(data_path.read_text(encoding="utf-8"))
    data = data or {}
    records = read_metrics(workdir)
    config_path = workdir / "config.yaml"
    config = config_path.read_text(encoding="utf-8") if config_path.exists() else ""

    title = data.get("title", workdir.resolve().name)
    image, svg = draw_curves(records, data, display.panels, title)
    write_whole(workdir / IMAGE_FILE, image)
    page = _page(title, display, data, records, svg, config)
    write_whole(workdir / HTML_FILE, page)
    return workdir / HTML_FILE


# Page -----------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light; --ink: #212529; --soft: #868e96; --line: #e9ecef; --mark: #fff3bf; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #f8f9fa; margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 36px 0 10px; }
.card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 16px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 18px; }
.tile { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 10px 16px;
  min-width: 118px; }
.tile b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; }
.tile span, .soft { color: var(--soft); font-size: 13px; }
svg { width: 100%; height: auto; display: block; }
svg text { font-family: system-ui, sans-serif !important; }
table { border-collapse: collapse; } td, th { padding: 5px 18px 5px 0; text-align: left; vertical-align: top; }
tr + tr td { border-top: 1px solid var(--line); } td.n { text-align: right; font-variant-numeric: tabular-nums; }
.mask { background: var(--mark); border-radius: 4px; padding: 1px 5px; white-space: nowrap; }
.right { background: #d3f9d8; } .guess { margin-right: 14px; white-space: nowrap; }
ul { margin: 6px 0; padding-left: 20px; } li.sentence { margin: 0 0 14px; }
pre { overflow-x: auto; font-size: 13px; margin: 0; } summary { cursor: pointer; }
"""


def _page(title: str, display: Display, data: ReportData, records: Sequence[Row], svg: str, config: str) -> str:
    known = baselines(data, display.panels)
    sections = [f"<h1>{html.escape(str(title))}</h1>"]
    sections += [f'<div class="soft">{html.escape(str(line))}</div>' for line in data.get("summary") or ()]
    sections.append(_tiles(display, records, {**(data.get("evaluation") or {}), **known}))
    sections.append(f'<h2>Curves</h2><div class="card">{svg}</div>')
    if data.get("evaluation"):
        sections.append("<h2>Final evaluation</h2>" + _evaluation_table({**data["evaluation"], **known}))
    sections += [f"<h2>{html.escape(heading)}</h2>{body}" for heading, body in display.sections(data)]
    if config:
        sections.append(
            "<h2>Configuration</h2><details class='card'><summary>every option of this run</summary>"
            f"<pre>{html.escape(config)}</pre></details>"
        )
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(str(title))}</title><style>{_STYLE}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def format_value(name: str, value: Value) -> str:
    """Format a value as text: accuracies, fractions and MFU as percentages, counts with commas, None as n/a."""
    if value is None:
        return "n/a"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if name == "mfu" or name.endswith(("accuracy", "fraction")):
        return f"{value:.1%}"
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.4g}"


def _tiles(display: Display, records: Sequence[Row], evaluation: Row) -> str:
    """Return HTML tiles with the values of the final evaluation and the last logged values of training."""
    last: dict[str, Value] = {}
    for record in records:
        if record.get("split", "train") == "train":
            last |= record
    tiles = [(tile, evaluation.get(tile.key)) for tile in display.tiles]
    tiles += [(tile, last.get(tile.key)) for tile in RUN_TILES]
    cells = [
        f'<div class="tile"><b>{html.escape(_tile_value(tile.key, value))}</b>'
        f"<span>{html.escape(tile.label)}</span></div>"
        for tile, value in tiles
        if value is not None
    ]
    return f'<div class="tiles">{"".join(cells)}</div>' if cells else ""


def _tile_value(name: str, value: Value) -> str:
    if name == "tokens_per_second" and isinstance(value, int | float):
        return format_count(value)
    return format_value(name, value)


def _evaluation_table(values: Row) -> str:
    rows = [
        f'<tr><td>{html.escape(name)}</td><td class="n">{html.escape(format_value(name, value))}</td></tr>'
        for name, value in values.items()
    ]
    return f'<div class="card"><table>{"".join(rows)}</table></div>'
