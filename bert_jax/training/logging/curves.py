"""The series of a run's panels, and report.png: metrics over steps, and confusion matrices of classifiers."""

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_jax.objectives.display import FIRST_PANELS, LAST_PANELS, Confusion, Panel, ReportData
from bert_jax.training.logging.logger import Row, Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Number of metrics that are plotted per split of a task, besides the loss.
_TASK_METRICS = 2
# Words in the names of metrics between 0 and 1 that are shown in percent.
_SHARES = {"f1", "exact", "precision", "recall"}
# Maximum number of points per curve; more points than pixels would only enlarge the file.
_MAX_POINTS = 800
_TRAIN_COLOR, _EVAL_COLOR, _BASELINE_COLOR = "#4269d0", "#e8590c", "#868e96"
# Maximum number of classes for which a confusion matrix shows counts, and for which it shows all class names.
_MOST_COUNTS, _MOST_NAMES = 20, 40
_LONGEST_NAME = 24
# Fonts with Chinese letters, which the font of matplotlib lacks: of Linux, Windows and macOS.
_CHINESE_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei", "Microsoft YaHei", "SimHei", "PingFang SC", "Hiragino Sans GB", "Heiti SC",
)  # fmt: skip
# Titles are English, and the Chinese fonts often have no bold letters, of which matplotlib warns.
_TITLE_FONT = "sans-serif"
_STYLE: dict[Any, Any] = {
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
    "xtick.color": "#868e96",
    "ytick.color": "#868e96",
}


def series(records: Sequence[Row], split: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and the non-null values of the metric ``key`` in ``split``, each as float64[points]."""
    types = (int, float)  # faster than int | float, and a long run has many lines
    own = [one for one in records if isinstance(one.get(key), types) and one.get("split", "train") == split]
    return np.array([one["step"] for one in own], float), np.array([one[key] for one in own], float)


def thin(steps: np.ndarray, values: np.ndarray, max_points: int = _MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Reduce a curve to at most ``max_points`` points: means of groups of adjacent points, and the last point."""
    if len(steps) <= max_points:
        return steps, values
    edges = np.linspace(0, len(steps) - 1, max_points).astype(int)
    counts = np.diff(edges)
    mean_steps = np.add.reduceat(steps[:-1], edges[:-1]) / counts
    mean_values = np.add.reduceat(values[:-1], edges[:-1]) / counts
    return np.append(mean_steps, steps[-1]), np.append(mean_values, values[-1])


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centered moving average of ``values``.

    The window contains about 1/20 of the values, and fewer at both ends of the curve. Fewer than 40 values are
    returned unchanged.
    """
    if len(values) < 40:
        return values
    window = np.ones(2 * (len(values) // 40) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def panels_of(records: Sequence[Row], panels: Sequence[Panel]) -> list[Panel]:
    """Return the panels with data: those of the task, of every run, and ``panels``, those of the objective. The
    panel of the total loss is omitted if the panel of a single loss has the same curves."""
    curves = [
        (panel, series(records, "train", panel.key)[1], series(records, panel.split, panel.key)[1])
        for panel in (*_task_panels(records), *FIRST_PANELS, *panels, *LAST_PANELS)
    ]
    curves = [one for one in curves if len(one[1]) or len(one[2])]

    def is_again(panel: Panel, *values: np.ndarray) -> bool:
        others = [other[1:] for other in curves if other[0] not in FIRST_PANELS]
        if panel not in FIRST_PANELS:
            return False
        if any(other.key == panel.key and other.split != panel.split for other, *_ in curves):
            return True  # a panel of a task has the curve of training too
        # The weights of the mean over a log interval differ.
        return any(
            all(len(a) == len(b) and np.allclose(a, b, rtol=0.01) for a, b in zip(values, one, strict=True))
            for one in others
        )

    return [one[0] for one in curves if not is_again(*one)]


def _fonts() -> list[str]:
    """Return the font families of a plot: each letter is drawn in the first one that has it."""
    from matplotlib.font_manager import get_font_names

    installed = set(get_font_names())
    return [_TITLE_FONT, *(name for name in _CHINESE_FONTS if name in installed)]


def draw_curves(records: Sequence[Row], data: ReportData, panels: Sequence[Panel], title: str) -> bytes:
    """Plot the panels with data and, below them, the confusion matrix of each split; return PNG bytes.

    ``data`` contains the baselines and the confusion matrices (see ``write_report``).
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure, FigureBase

    matrices = {split: one for split, one in (data.get("confusion") or {}).items() if "counts" in one}
    known = baselines(data, panels)
    present = panels_of(records, panels)
    columns = min(3, max(1, len(present)))
    rows = max(1, -(-len(present) // columns))
    side = max((_side_of(len(matrix["labels"])) for matrix in matrices.values()), default=0.0)
    width, height = max(5.0, 4.3 * columns, side), 2.9 * rows + 0.5
    beside = max(1, min(len(matrices), int(width / side))) if matrices else 1
    below = side * -(-len(matrices) // beside)
    with matplotlib.rc_context(_STYLE | {"font.family": _fonts()}), warnings.catch_warnings():
        # Letters of scripts for which no font is installed appear as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure = Figure(figsize=(width, height + below), layout="constrained")
        FigureCanvasAgg(figure)
        curves: FigureBase = figure
        if matrices:
            parts: np.ndarray = np.asarray(figure.subfigures(2, 1, height_ratios=(height, below)))
            curves, lower = parts
            _draw_confusion(lower, matrices, beside)
        curves.suptitle(f"{title}  (over steps)", x=0.01, ha="left", fontsize=12, color="#868e96", parse_math=False)
        if not present:
            curves.text(0.5, 0.45, "no metrics yet", ha="center", color="#868e96", fontsize=12)
        for index, panel in enumerate(present):
            _draw_panel(curves.add_subplot(rows, columns, index + 1), panel, records, known)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=130)
    return image.getvalue()


def baselines(data: ReportData, panels: Sequence[Panel]) -> dict[str, float]:
    """Return the baselines of the panels that ``data`` contains, by key."""
    values, keys = dict(data.items()), [panel.baseline[0] for panel in panels]
    return {key: value for key in keys if isinstance(value := values.get(key), int | float)}


def different_scores(values: Mapping[str, Value]) -> list[str]:
    """Return the names of the scores, those over all classes or tags first, without those that equal an earlier one
    by definition: with one class per text, the micro averages equal the accuracy."""
    names = [name for name, value in values.items() if value is None or isinstance(value, float)]
    if "accuracy" in names:
        names = [name for name in names if not name.endswith("_micro")]
    # The F1 says more than the precision and the recall, of which it is the mean.
    return sorted(names, key=lambda name: (name != names[0], "/" in name, not name.startswith("f1")))


def is_share(name: str) -> bool:
    """Return True for metrics that are shown in percent: accuracies, F1, precision, recall, exact answers,
    fractions and MFU."""
    metric = name.rpartition(": ")[2].partition("/")[0]
    return metric == "mfu" or metric.endswith(("accuracy", "fraction")) or bool(_SHARES & {*metric.split("_")})


def _task_panels(records: Sequence[Row]) -> list[Panel]:
    """Return the panels of a fine-tuning task: one for each of the first few metrics of each evaluated split, and
    for its loss."""
    splits: dict[str, list[str]] = {}
    for record in records:
        split = str(record.get("split", "eval"))
        if split != "eval":
            splits.setdefault(split, different_scores(record))
    return [
        Panel(
            f"{split}: {name.replace('_', ' ')}",
            name,
            percent=is_share(name),
            noisy=False,
            split=split,
        )
        for split, names in splits.items()
        for place, name in enumerate(names)
        if place < _TASK_METRICS or name in ("log_loss", "loss")  # which show overfitting
    ]


def _draw_panel(axes: "Axes", panel: Panel, records: Sequence[Row], known: Mapping[str, float]) -> None:
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
    key, label = panel.baseline
    if key in known:
        axes.axhline(known[key], color=_BASELINE_COLOR, linestyle="--", linewidth=1, label=label)
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
    axes.set_title(panel.title, family=_TITLE_FONT)
    axes.grid(True, linewidth=0.8)
    axes.set_axisbelow(True)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(fontsize=8)


def _side_of(classes: int) -> float:
    """Return the side length (in inches) of the plot of a confusion matrix, including the class names."""
    return min(9.0, max(3.6, 1.6 + 0.37 * classes))


def _draw_confusion(figure: "Figure", matrices: Mapping[str, Confusion], columns: int) -> None:
    """Draw the confusion matrix of each split into a matplotlib (sub)figure with ``columns`` matrices per row.

    ``matrices`` maps each split to {"labels": names [C], "counts": [C][C]}, with a row per label and a column per
    prediction. The color of a cell shows its fraction of the row sum. In matrices of at most 20 classes, the cells
    also show their counts.
    """
    rows = math.ceil(len(matrices) / columns)
    places = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (split, matrix) in zip(places, matrices.items(), strict=False):
        _draw_matrix(axes, split, [_short(str(name)) for name in matrix["labels"]], np.array(matrix["counts"]))
    for axes in list(places)[len(matrices) :]:
        axes.set_axis_off()


def _draw_matrix(axes: "Axes", split: str, names: list[str], counts: np.ndarray) -> None:
    classes = len(names)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="none")
    if classes <= _MOST_COUNTS:
        for (row, column), count in np.ndenumerate(counts):
            color = "white" if shares[row, column] > 0.5 else "#495057"
            axes.text(column, row, f"{count}", ha="center", va="center", color=color, fontsize=7)
    shown = range(0, classes, math.ceil(classes / _MOST_NAMES))
    text, size = [names[i] for i in shown], 8 if len(shown) <= 12 else 6.5
    turned = 0 if sum(map(len, names)) <= 24 else 90
    axes.set_yticks(shown, text, parse_math=False, fontsize=size)
    axes.set_xticks(shown, text, parse_math=False, fontsize=size, rotation=turned)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_anchor("W")
    axes.set_title(f"{split}: confusion matrix", family=_TITLE_FONT)
    axes.set(xlabel="prediction", ylabel="label")


def _short(name: str) -> str:
    name = " ".join(name.split())
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
