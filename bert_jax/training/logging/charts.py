"""Charts of a report as inline SVG: curves over steps, bars and points. Colors come from the style of the page."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.objectives.display import Panel
from bert_jax.training.logging.curves import series, smooth, thin
from bert_jax.training.logging.logger import Row
from bert_jax.training.logging.progress import format_count

# Size of a chart in its own units, which are about the pixels of a phone, and its margins.
_WIDTH, _HEIGHT = 340.0, 242.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 16.0, 8.0, 50.0
# Baseline of the labels below the horizontal axis.
_BELOW = _HEIGHT - _BOTTOM + 25
# Largest number of points of a curve that are marked.
MOST_MARKS = 40
# Values of points from here on are not drawn.
_LARGEST = 1e100


@dataclass(frozen=True)
class Line:
    """A curve: ``css`` are the classes of its stroke, ``color`` is a CSS color. Without a name, the legend omits
    it."""

    steps: np.ndarray
    values: np.ndarray
    color: str
    name: str = ""
    css: str = ""
    marked: bool = False
    # Step of the value that the run kept, which the chart marks.
    kept: int | None = None


@dataclass(frozen=True)
class Scale:
    """The scale of a chart: logarithmic, in percent, or from zero."""

    log: bool = False
    percent: bool = False
    from_zero: bool = False

    def text(self, value: float) -> str:
        """Return ``value`` as the label of a tick."""
        if self.percent:
            return f"{100 * value:g}%"
        if 0 < abs(value) < 0.001:
            return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
        return f"{value:g}" if abs(value) < 1000 else _brief(value)


def _brief(value: float) -> str:
    """Return ``format_count(value)`` without zeros at the end of a fraction: ``5k``, ``1.5k``."""
    text = format_count(value)
    return text if "." not in text else text[:-1].rstrip("0").rstrip(".") + text[-1]


def panel_lines(panel: Panel, rows: Sequence[Row]) -> list[Line]:
    """Return the curves of one run: training, with a running mean if it is noisy, and evaluation."""
    steps, values = thin(*series(rows, "train", panel.key))
    mean = smooth(values) if panel.noisy else values
    lines = [Line(steps, values, "var(--train)", css="faint")] if mean is not values else []
    lines.append(Line(steps, mean, "var(--train)", "training" if mean is values else "training, running mean"))
    name = "held-out" if panel.split == "eval" else panel.split
    lines.append(Line(*thin(*series(rows, panel.split, panel.key)), "var(--eval)", name, marked=True))
    return [line for line in lines if len(line.values)]


def exact(value: float, scale: Scale = Scale()) -> str:
    """Return ``value`` with three or four digits."""
    if scale.percent:
        return f"{value:.1%}"
    if abs(value) >= 10_000:
        return format_count(value)
    return f"{value:#.4g}".removesuffix(".") if abs(value) >= 0.01 else f"{value:.3g}"


def line_chart(
    lines: Sequence[Line], scale: Scale, levels: Sequence[tuple[float, str]] = (), *, title: str = ""
) -> str:
    """Return the legend and the SVG of curves over steps. ``levels``: (value, name) of dashed horizontal lines."""
    lines = [line for line in lines if len(line.values)]
    values = np.concatenate([line.values for line in lines])
    steps = np.concatenate([line.steps for line in lines])
    values = values[np.isfinite(values)] if np.isfinite(values).any() else np.zeros(1)
    known = [value for value, _ in levels]
    log = is_log(lines, scale)
    low, high = min([values.min(), *known]), max([values.max(), *known])
    most = 1.0 if scale.percent and high <= 1 else math.inf
    y_of, marks = _axis(min(low, 0.0) if scale.from_zero else low, high, log, most)
    first, last = float(steps.min()), float(steps.max())
    x_of = _linear(first if first < last else first - 1, last if first < last else last + 1, _LEFT, _WIDTH - _RIGHT)
    parts = [_grid(y_of, marks, scale), _step_labels(x_of, first, last)]
    for value, name in levels:
        y = y_of(value)
        parts.append(
            f'<line class="dash" style="--c:var(--base)" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" '
            f'y2="{y:.1f}"><title>{html.escape(name)} {exact(value, scale)}</title></line>'
        )
    parts += [_curve(line, x_of, y_of, scale) for line in lines]
    return _legend(lines, levels, scale) + _svg(parts, title)


def is_log(lines: Sequence[Line], scale: Scale) -> bool:
    """Return True if the chart of ``lines`` has a logarithmic axis: if ``scale`` allows it, and if the values span
    more than a decade."""
    if not scale.log:
        return False
    values = np.concatenate([line.values for line in lines] or [np.zeros(1)])
    values = values[np.isfinite(values)] if np.isfinite(values).any() else np.zeros(1)
    return bool(values.min() > 0 and values.max() > 10 * values.min())


def _curve(line: Line, x_of: Callable[[float], float], y_of: Callable[[float], float], scale: Scale) -> str:
    places = [
        (x_of(step), y_of(value), step, value)
        for step, value in zip(line.steps.tolist(), line.values.tolist(), strict=True)
        if math.isfinite(value)
    ]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in places)
    color = f'style="--c:{line.color}"'
    drawn = f'<polyline class="curve {line.css}" {color} points="{points}"/>' if len(places) > 1 else ""
    if (line.marked and len(places) <= MOST_MARKS) or len(places) < 3:
        drawn += "".join(
            f'<circle class="dot" {color} cx="{x:.1f}" cy="{y:.1f}" r="3">'
            f"<title>step {step:,.0f}: {exact(value, scale)}</title></circle>"
            for x, y, step, value in places
        )
    drawn += "".join(
        f'<circle class="ring" {color} cx="{x:.1f}" cy="{y:.1f}" r="6.5"/>'
        for x, y, step, _ in places
        if step == line.kept
    )
    return drawn


def _legend(lines: Sequence[Line], levels: Sequence[tuple[float, str]], scale: Scale) -> str:
    keys = [
        f'<span class="key" style="--c:{line.color}"><bdi>{html.escape(line.name)}</bdi> '
        f"{_named_values(line, scale)}</span>"
        for line in lines
        if line.name
    ]
    keys += [
        f'<span class="key dashed" style="--c:var(--base)"><bdi>{html.escape(name)}</bdi> '
        f"<b>{exact(value, scale)}</b></span>"
        for value, name in levels
    ]
    return f'<div class="keys">{"".join(keys)}</div>'


def _named_values(line: Line, scale: Scale) -> str:
    """Return the last value and, if it is another, the value that the run kept."""
    last = f"{'last ' if scale.from_zero else ''}<b>{exact(line.values[-1], scale)}</b>"
    kept = np.flatnonzero(line.steps == line.kept)
    if not len(kept) or line.steps[-1] == line.kept:
        return last
    return f"kept <b>{exact(line.values[kept[0]], scale)}</b> (step {line.kept:,}, ringed), last {last}"


def bar_chart(groups: Sequence[str], series: Mapping[str, Sequence[int]], colors: Sequence[str]) -> str:
    """Return the legend and the SVG of counts per group; every series has a bar in each group."""
    largest = max((max(counts, default=0) for counts in series.values()), default=0) or 1
    y_of, marks = _axis(0.0, float(largest), log=False)
    parts = [_grid(y_of, [mark for mark in marks if mark == int(mark)], Scale())]
    step = (_WIDTH - _RIGHT - _LEFT) / max(1, len(groups))
    width = 0.76 * step / max(1, len(series))
    for place, group in enumerate(groups):
        left = _LEFT + place * step
        parts.append(
            f'<text x="{left + step / 2:.1f}" y="{_BELOW}" text-anchor="middle">{html.escape(group)}</text>'
        )
        for number, (name, counts) in enumerate(series.items()):
            x, y = left + 0.12 * step + number * width, y_of(float(counts[place]))
            parts.append(
                f'<rect style="fill:{colors[number]}" x="{x:.1f}" y="{y:.1f}" width="{width - 1:.1f}" '
                f'height="{max(0.0, y_of(0.0) - y):.1f}"><title>{html.escape(name)}, {html.escape(group)}: '
                f"{counts[place]:,}</title></rect>"
            )
    keys = "".join(
        f'<span class="key" style="--c:{color}">{html.escape(name)}</span>'
        for name, color in zip(series, colors, strict=False)
    )
    return f'<div class="keys">{keys}</div>' + _svg(parts, ", ".join(series))


def point_chart(
    points: Sequence[tuple[float, float]], x: str, y: str, *, alike: bool = False, middle: bool = False
) -> str:
    """Return the SVG of points; empty without finite points. ``alike``: both axes have the same range, with the
    line of equal values. ``middle``: with a line at the mean of the values of ``x``, which are labels."""
    points = [point for point in points if all(abs(value) < _LARGEST for value in point)]  # False for NaN
    if not points:
        return ""
    xs, ys = np.array(points, float).T
    mean = float(xs.mean())
    x_ends, y_ends = (xs.min(), xs.max()), (ys.min(), ys.max())
    if alike:
        x_ends = y_ends = (min(*x_ends, *y_ends), max(*x_ends, *y_ends))
    y_of, y_marks = _axis(*y_ends, log=False)
    low, high, x_marks = _padded(*x_ends)
    x_of = _linear(low, high, _LEFT, _WIDTH - _RIGHT)
    parts = [_grid(y_of, y_marks, Scale()), _x_name(x), _y_name(y)]
    if alike:
        parts.append(_segment((x_of(low), y_of(low)), (x_of(high), y_of(high)), "grid strong"))
    if middle:
        parts.append(_segment((_LEFT, y_of(mean)), (x_of(high), y_of(mean)), "dash"))
    parts += [f'<text x="{x_of(mark):.1f}" y="{_BELOW}" text-anchor="middle">{mark:g}</text>' for mark in x_marks]
    parts += [
        f'<circle class="dot thin" style="--c:var(--train)" cx="{x_of(a):.1f}" cy="{y_of(b):.1f}" r="3">'
        f"<title>{html.escape(x)} {a:.3g}, {html.escape(y)} {b:.3g}</title></circle>"
        for a, b in points
    ]
    style = 'style="--c:var(--base)"'
    keys = f'<span class="key" {style}>equal values</span>' if alike else ""
    keys += f'<span class="key dashed" {style}>mean of these labels <b>{exact(mean)}</b></span>' if middle else ""
    return (f'<div class="keys">{keys}</div>' if keys else "") + _svg(parts, f"{y} over {x}")


def _segment(start: tuple[float, float], end: tuple[float, float], css: str) -> str:
    (x1, y1), (x2, y2) = start, end
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line class="{css}" style="--c:var(--base)" {place}/>'


def _svg(parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _linear(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _padded(low: float, high: float, most: float = math.inf) -> tuple[float, float, list[float]]:
    """Return the ends of an axis, and round values between them, which are not above ``most``."""
    if not high > low:
        below = max(abs(low), 1.0) * 0.1
        low, high = max(0.0, low - below) if low >= 0 else low - below, min(high + below, most)
    size = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(size))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= size * 0.999)
    marks = [round(step * n, 12) for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    margin = 0.04 * (high - low)
    return low - margin if low != 0 else low, high + margin, marks


def _axis(
    low: float, high: float, log: bool, most: float = math.inf
) -> tuple[Callable[[float], float], list[float]]:
    """Return the vertical position of a value, and the values that the axis names, which are not above ``most``."""
    if not log:
        start, end, marks = _padded(low, high, most)
        return _linear(start, end, _HEIGHT - _BOTTOM, _TOP), marks
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [10.0**n * factor for n in decades for factor in ((1, 2, 5) if len(decades) <= 3 else (1,))]
    inner = _linear(math.log10(low), math.log10(high), _HEIGHT - _BOTTOM, _TOP)
    return lambda value: inner(math.log10(max(value, low))), [mark for mark in marks if low <= mark <= high]


def _grid(y_of: Callable[[float], float], marks: Sequence[float], scale: Scale) -> str:
    return "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y_of(mark):.1f}" y2="{y_of(mark):.1f}"/>'
        f'<text x="{_LEFT - 9}" y="{y_of(mark) + 5:.1f}" text-anchor="end">{scale.text(mark)}</text>'
        for mark in marks
    )


def _step_labels(x_of: Callable[[float], float], first: float, last: float) -> str:
    marks = [mark for mark in _padded(first, last)[2] if mark == int(mark) and first <= mark <= last]
    if len(marks) < 2:
        marks = [first, last] if first < last else [first]
    return _x_name("step") + "".join(
        f'<text x="{x_of(mark):.1f}" y="{_BELOW}" text-anchor="middle">'
        f"{_brief(mark) if mark >= 10_000 else f'{mark:,.0f}'}</text>"
        for mark in marks
    )


def _y_name(name: str) -> str:
    """Return the name of the vertical axis, beside its labels."""
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    return f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{html.escape(name)}</text>'


def _x_name(name: str) -> str:
    """Return the name of the horizontal axis."""
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{html.escape(name)}</text>'
