"""The report of a run: WORKDIR/report.html (one file, nothing loaded from elsewhere) and WORKDIR/report.png.

Made from what lies in the folder: metrics.jsonl, config.yaml and report_data.json, so it can be made again at
any time, also while the run goes on. Whatever is missing is left out.
"""

import html
import io
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.io.files import write_whole
from bert_jax.training.logging.confusion import draw_confusion, side_of
from bert_jax.training.logging.metrics_file import read_metrics
from bert_jax.training.logging.progress import format_count

HTML_FILE = "report.html"
IMAGE_FILE = "report.png"
DATA_FILE = "report_data.json"

# Metrics of a split of a task that are drawn.
_TASK_METRICS = 2
# Points drawn per curve: more than pixels would only make the file large.
_MAX_POINTS = 800
_TRAIN_COLOR, _EVAL_COLOR, _BASELINE_COLOR = "#4269d0", "#e8590c", "#868e96"


@dataclass(frozen=True)
class Panel:
    """One diagram: a metric over steps."""

    title: str
    key: str
    log: bool = False
    percent: bool = False
    # Noisy from step to step: a running mean is drawn over the values.
    noisy: bool = True
    # ``split`` of the evaluations that are drawn beside training.
    split: str = "eval"


PANELS = (
    Panel("loss", "loss"),
    Panel("masked-token loss (nats)", "mlm_loss"),
    Panel("masked-token accuracy", "mlm_accuracy", percent=True),
    Panel("sentence-pair loss (nats)", "nsp_loss"),
    Panel("sentence-pair accuracy", "nsp_accuracy", percent=True),
    Panel("learning rate", "learning_rate", noisy=False),
    Panel("gradient norm", "grad_norm", log=True),
    Panel("tokens per second", "tokens_per_second"),
    Panel("model FLOP utilisation", "mfu", percent=True),
)


def write_report(workdir: Path | str, data: Mapping[str, Any] | None = None) -> Path:
    """Write report.html and report.png into ``workdir``; returns the path of report.html.

    Args:
        workdir: folder of the run.
        data: what the folder does not hold otherwise; kept in report_data.json, from where later calls without
            ``data`` take it. All keys may be missing:
            ``title`` str; ``summary`` list of lines; ``evaluation`` {name: number or None}, the final
            evaluation; ``unigram_loss`` float, cross-entropy of the unigram distribution in nats;
            ``confusion`` {split: {"labels": [C], "counts": [C][C]}}, rows given, columns predicted;
            ``filled_masks`` list of ``{"text": str with [MASK]s, "masks": [{"answer": str,
            "predictions": [[piece, probability], ...]}, ...]}``, best prediction first.

    Raises:
        OSError: a file cannot be written.
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
    image, svg = draw_curves(records, data.get("unigram_loss"), title, data.get("confusion") or {})
    write_whole(workdir / IMAGE_FILE, image)
    page = _page(title, data, records, svg, config)
    write_whole(workdir / HTML_FILE, page)
    return workdir / HTML_FILE


# Curves ---------------------------------------------------------------------------------------------------------


def series(records: Sequence[Mapping[str, Any]], split: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one metric, nulls left out."""
    points = [
        (record["step"], record[key])
        for record in records
        if record.get("split", "train") == split and isinstance(record.get(key), int | float)
    ]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.asarray(steps, float), np.asarray(values, float)


def thin(steps: np.ndarray, values: np.ndarray, max_points: int = _MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most ``max_points`` points: means over equal runs of neighbours; the last point is kept as it is."""
    if len(steps) <= max_points:
        return steps, values
    edges = np.linspace(0, len(steps) - 1, max_points).astype(int)
    counts = np.diff(edges)
    mean_steps = np.add.reduceat(steps[:-1], edges[:-1]) / counts
    mean_values = np.add.reduceat(values[:-1], edges[:-1]) / counts
    return np.append(mean_steps, steps[-1]), np.append(mean_values, values[-1])


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred running mean over about a twentieth of the curve; at the ends, over what there is of it."""
    half = len(values) // 40
    if half == 0:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first, last = np.maximum(index - half, 0), np.minimum(index + half, len(values) - 1)
    return (sums[last + 1] - sums[first]) / (last + 1 - first)


def draw_curves(
    records: Sequence[Mapping[str, Any]], unigram_loss: float | None, title: str, matrices: Mapping[str, Any]
) -> tuple[bytes, str]:
    """The diagrams, and below them confusion matrices by split, as PNG bytes and as an inline SVG element; panels
    without data are left out."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style = {
        "axes.edgecolor": "#ced4da",
        "axes.labelcolor": "#495057",
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": "#212529",
        "axes.titlelocation": "left",
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "font.size": 9,
        "grid.color": "#e9ecef",
        "legend.frameon": False,
        "svg.fonttype": "none",  # text stays text: small, and searchable in the page
        "svg.hashsalt": "report",  # same curves, same bytes
        "xtick.color": "#868e96",
        "ytick.color": "#868e96",
    }
    present = [
        panel
        for panel in (*_task_panels(records), *PANELS)
        if len(series(records, "train", panel.key)[0]) or len(series(records, panel.split, panel.key)[0])
    ]
    columns = min(3, max(1, len(present)))
    rows = max(1, -(-len(present) // columns))
    side = max((side_of(len(matrix["labels"])) for matrix in matrices.values()), default=0.0)
    width, height = max(5.0, 4.3 * columns, side), 2.9 * rows + 0.5
    beside = max(1, min(len(matrices), int(width / side))) if matrices else 1
    below = side * -(-len(matrices) // beside)
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # A name in a script that matplotlib's font lacks: boxes in the PNG; the page has the text itself.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure = Figure(figsize=(width, height + below), layout="constrained")
        FigureCanvasAgg(figure)
        curves = figure
        if matrices:
            curves, lower = figure.subfigures(2, 1, height_ratios=(height, below))
            draw_confusion(lower, matrices, beside)
        curves.suptitle(f"{title}  (over steps)", x=0.01, ha="left", fontsize=12, color="#868e96")
        if not present:
            curves.text(0.5, 0.45, "no metrics yet", ha="center", color="#868e96", fontsize=12)
        for index, panel in enumerate(present):
            _draw_panel(curves.add_subplot(rows, columns, index + 1), panel, records, unigram_loss)
        if figure.axes:
            figure.get_layout_engine().execute(figure)
        figure.set_layout_engine("none")  # once for both files: it takes as long as drawing one
        image, vector = io.BytesIO(), io.StringIO()
        figure.savefig(image, format="png", dpi=130)
        curves.suptitle("")  # the page has its own heading
        figure.savefig(vector, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return image.getvalue(), _inline_svg(vector.getvalue())


def _task_panels(records: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Panels of a fine-tuning task: the first metrics of every split that it is evaluated on."""
    splits: dict[str, list[str]] = {}
    for record in records:
        split = record.get("split", "eval")
        if split != "eval":
            splits.setdefault(split, [name for name, value in record.items() if isinstance(value, float)])
    return [
        Panel(f"{split}: {name.replace('_', ' ')}", name, noisy=False, split=split)
        for split, names in splits.items()
        for name in names[:_TASK_METRICS]
    ]


def _draw_panel(axes: Any, panel: Panel, records: Sequence[Mapping[str, Any]], unigram_loss: float | None) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    steps, values = thin(*series(records, "train", panel.key))
    if len(steps):
        few = len(steps) < 3
        smoothed = smooth(values) if panel.noisy else values
        if smoothed is not values:
            axes.plot(steps, values, color=_TRAIN_COLOR, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smoothed, color=_TRAIN_COLOR, linewidth=1.6, label="training", marker="o" if few else None)
    eval_steps, eval_values = thin(*series(records, panel.split, panel.key))
    if len(eval_steps):
        marker = "o" if len(eval_steps) <= 40 else None
        axes.plot(
            eval_steps,
            eval_values,
            color=_EVAL_COLOR,
            linewidth=1.2,
            marker=marker,
            markersize=4,
            label="held-out" if panel.split == "eval" else panel.split,
        )
    if panel.key == "mlm_loss" and unigram_loss is not None:
        axes.axhline(unigram_loss, color=_BASELINE_COLOR, linestyle="--", linewidth=1, label="unigram")
    drawn = np.concatenate([values, eval_values])
    if panel.log and len(drawn) and drawn.min() > 0 and drawn.max() > 10 * drawn.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif panel.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    elif panel.key == "tokens_per_second":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:,g}k"))
    if panel.key in ("tokens_per_second", "mfu"):
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_title(panel.title)
    axes.grid(True, linewidth=0.8)
    axes.set_axisbelow(True)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(fontsize=8)


def _inline_svg(text: str) -> str:
    """The svg element alone, scaling with the page; without addresses that only a stand-alone file needs."""
    element = text[text.index("<svg") :]
    head, rest = element.split(">", 1)
    head = re.sub(r'\s(?:xmlns(?::\w+)?|width|height)="[^"]*"', "", head)
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL).replace("xlink:href", "href")
    return f'{head} role="img" aria-label="curves of the run">{rest}'


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


def _page(title: str, data: Mapping[str, Any], records: Sequence[Mapping[str, Any]], svg: str, config: str) -> str:
    sections = [f"<h1>{html.escape(str(title))}</h1>"]
    sections += [f'<div class="soft">{html.escape(str(line))}</div>' for line in data.get("summary") or ()]
    sections.append(_tiles(records, data))
    sections.append(f'<h2>Curves</h2><div class="card">{svg}</div>')
    if data.get("evaluation"):
        sections.append("<h2>Final evaluation</h2>" + _evaluation_table(data))
    if data.get("filled_masks"):
        sections.append("<h2>Filled masks</h2>" + _filled_masks(data["filled_masks"]))
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


def format_value(name: str, value: Any) -> str:
    """A number as a person reads it: accuracies, shares and MFU in percent, counts with commas; None: n/a."""
    if value is None:
        return "n/a"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if name == "mfu" or name.endswith(("accuracy", "fraction")):
        return f"{value:.1%}"
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.4g}"


def _tiles(records: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> str:
    """The last value of what people look for first."""
    last: dict[str, Any] = {}
    for record in records:
        if record.get("split", "train") == "train":
            last |= record
    evaluation = data.get("evaluation") or {}
    tiles = [
        ("held-out masked-token loss", "mlm_loss", evaluation.get("mlm_loss")),
        ("of the unigram distribution", "unigram_loss", data.get("unigram_loss")),
        ("held-out masked-token accuracy", "mlm_accuracy", evaluation.get("mlm_accuracy")),
        ("held-out sentence-pair accuracy", "nsp_accuracy", evaluation.get("nsp_accuracy")),
        ("step", "step", last.get("step")),
        ("examples seen", "examples_seen", last.get("examples_seen")),
        ("tokens per second", "tokens_per_second", last.get("tokens_per_second")),
        ("model FLOP utilisation", "mfu", last.get("mfu")),
    ]
    cells = [
        f'<div class="tile"><b>{html.escape(_tile_value(name, value))}</b><span>{label}</span></div>'
        for label, name, value in tiles
        if value is not None
    ]
    return f'<div class="tiles">{"".join(cells)}</div>' if cells else ""


def _tile_value(name: str, value: Any) -> str:
    return format_count(value) if name == "tokens_per_second" else format_value(name, value)


def _evaluation_table(data: Mapping[str, Any]) -> str:
    values = dict(data["evaluation"])
    if data.get("unigram_loss") is not None:
        values["unigram_loss"] = data["unigram_loss"]
    rows = [
        f'<tr><td>{html.escape(name)}</td><td class="n">{html.escape(format_value(name, value))}</td></tr>'
        for name, value in values.items()
    ]
    return f'<div class="card"><table>{"".join(rows)}</table></div>'


def _filled_masks(items: Sequence[Mapping[str, Any]]) -> str:
    """Each sentence with its best guesses in place (green: right), and the runners-up below."""
    entries = []
    for item in items:
        pieces = str(item.get("text", "")).split("[MASK]")
        masks = list(item.get("masks") or ())
        sentence, details = html.escape(pieces[0]), []
        for index, tail in enumerate(pieces[1:]):
            mask = masks[index] if index < len(masks) else {}
            predictions, answer = mask.get("predictions") or (), mask.get("answer")
            best = str(predictions[0][0]) if predictions else "[MASK]"
            right = " right" if best == answer else ""
            sentence += f'<span class="mask{right}">{html.escape(best)}</span>{html.escape(tail)}'
            guesses = "".join(
                f'<span class="guess">{html.escape(str(piece))} {probability:.0%}</span>'
                for piece, probability in predictions
            )
            original = f"<b>{html.escape(str(answer))}</b>: " if answer is not None else ""
            details.append(f'<div class="soft">{original}{guesses}</div>')
        entries.append(f'<li class="sentence">{sentence}{"".join(details)}</li>')
    note = (
        '<div class="soft">best guess in place, green where it is right; below: the original and all guesses</div>'
    )
    return f'<div class="card">{note}<ul>{"".join(entries)}</ul></div>'
