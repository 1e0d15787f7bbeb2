"""A page with several runs side by side: their curves over each other, their evaluations, and their options."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.metrics import Score
from bert_jax.metrics.resampling import paired_bootstrap
from bert_jax.objectives.display import Display, Examples, Panel
from bert_jax.training.logging.charts import MOST_MARKS, Line, Scale, line_chart, panel_lines
from bert_jax.training.logging.curves import different_scores, is_share, panels_of, series
from bert_jax.training.logging.logger import Value
from bert_jax.training.logging.page import (
    RUN_COLORS,
    breakable,
    card,
    document,
    escape,
    format_value,
    isolated,
    listed,
    pair,
    panels,
    section,
    short,
    table,
    words_of,
)
from bert_jax.training.logging.progress import format_count, format_duration
from bert_jax.training.logging.report import (
    RELOAD_SECONDS,
    absolute,
    how_to_read,
    mean_rates,
    named_values,
    time_parts,
)
from bert_jax.training.logging.run_files import STATES, RunFiles
from bert_jax.training.logging.verdict import known_levels, lower_is_better

# Number of rows of the tables of scores and of options, and of characters of a value.
_MOST_ROWS, _MOST_OPTIONS, _LONGEST_VALUE = 24, 40, 60
# Number of groups of held-out rows from which on a difference has an interval.
_LEAST_GROUPS = 10
# Prefixes in the table of scores: of the last training values, and of held-out minus training values.
_TRAINING, _GAP = "training: ", "gap: "
# Rows of the table of runs that contain paths.
_PATHS = ("data", "workdir")
# Options that name the data.
_DATA = ("corpus", "dir", "train", "shards", "mixture")
_STYLES = (
    "<p>Where both are known, thin lines are values in training, and dots and thick lines are values on held-out "
    "data.</p>"
)
# Steps at whose end two runs are compared for the trend of their difference, and its smallest relative change.
_TREND_STEPS, _TREND = 4, 0.1
# Smallest relative change between the last two of these steps.
_STILL = 0.005
# Most digits that are added to values whose difference disagrees with them.
_MORE_DIGITS = 3
# A number as it is shown: its sign, its decimals and its unit.
_DECIMAL = re.compile(r"([+-]?)[\d,]+(?:\.(\d+))?(%?)")
# Options that differ and are named in the first sentences.
_FEW_OPTIONS = 3


def comparison_page(
    runs: Sequence[tuple[RunFiles, Display]], paired: Mapping[str, tuple[float, float]] | None = None
) -> str:
    """Return the page of several runs with their displays; browsers reload it while one of them is in progress.
    ``paired``: known 95% intervals of the differences, second - first, of two fine-tuning runs by SPLIT: METRIC."""
    files, names = [run for run, _ in runs], _names([run for run, _ in runs])
    body = [
        f"<h1>{' and '.join(map(isolated, names))}</h1>",
        card(_verdict(runs, names, paired or {}), css="verdict"),
        pair(
            card(_options(files, names), heading="Options that differ"),
            card(_scores(runs, names, paired or {}), heading="Evaluation"),
            card(_overview(files, names), heading="Runs"),
        ),
        section("Curves", _curves(runs, names)),
        *_sections(runs, names),
    ]
    is_running = any(run.state == "running" for run in files)
    return document(" / ".join(names), body, reload_seconds=RELOAD_SECONDS if is_running else 0)


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """Return the names of the runs, numbered where they are equal."""
    names = [short(run.title) for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def _color(number: int) -> str:
    return f"var(--c{number % RUN_COLORS})"


def _headed(names: Sequence[str]) -> list[str]:
    """Return the heads of the columns of a table: nothing, and the runs in their colors."""
    keys = [f'<span class="key" style="--c:{_color(i)}">{isolated(name)}</span>' for i, name in enumerate(names)]
    return ["", *keys]


def _overview(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    rows: list[tuple[str, Callable[[RunFiles], object]]] = [
        ("state", lambda run: STATES[run.state]),
        ("step", lambda run: f"{run.step:,} of {run.num_steps:,}" if run.num_steps else f"{run.step:,}"),
        ("kind", lambda run: run.option("task.kind") or run.option("objective.name") or ""),
        ("layers x width", lambda run: _shape(run)),
        ("parameters", lambda run: format_count(run.log.parameters) if run.log.parameters else ""),
        ("data", _data),
        ("training examples", lambda run: f"{count:,}" if (count := run.training_examples) else ""),
        ("batch", lambda run: run.option("training.global_batch_size") or ""),
        ("learning rate", lambda run: run.option("optimizer.learning_rate") or ""),
        ("seed", lambda run: "" if run.option("training.seed") is None else run.option("training.seed")),
        ("started (local time)", lambda run: run.log.began or run.log.first_time),
        ("last line", lambda run: run.log.last_time if run.state != "complete" else ""),
        ("hardware", lambda run: run.log.devices),
        ("versions", lambda run: run.log.versions),
        ("passes over the data", lambda run: f"{passes:.2f}" if (passes := run.last().get("epoch")) else ""),
        ("duration", lambda run: format_duration(run.log.seconds) if run.log.seconds >= 1 else ""),
        *(_time_part(number) for number in range(3)),
        ("tokens per second of training, mean", lambda run: format_count(_speed(run)) if _speed(run) else ""),
        ("workdir", lambda run: absolute(run.workdir)),
    ]
    lines = [
        [escape(name), *((breakable if name in _PATHS else escape)(value(run)) for run in runs)]
        for name, value in rows
    ]
    note = (
        '<p class="soft">Tokens per second are a mean over the training steps; the other parts of the duration do '
    )
    note = f"{note}not change them.</p>" if any(time_parts(run) for run in runs) else ""
    return table(_headed(names), [line for line in lines if any(line[1:])], css="runs") + note


def _time_part(number: int) -> tuple[str, Callable[[RunFiles], object]]:
    """Return the row of a part of the duration: its name, and a function that returns its value."""
    name = ("start-up and compilation", "training steps", "evaluation, saving and the rest")[number]

    def value(run: RunFiles) -> str:
        return next((format_duration(seconds) for part, seconds in time_parts(run) if part == name), "")

    return f"... {name}", value


def _speed(run: RunFiles) -> float:
    return mean_rates(run).get("tokens_per_second", 0.0)


def _verdict(
    runs: Sequence[tuple[RunFiles, Display]], names: Sequence[str], paired: Mapping[str, tuple[float, float]]
) -> str:
    """Return which run is better and whether the difference is clear, its trend, and what the runs have in
    common."""
    files = [run for run, _ in runs]
    trend = _trend(runs, names) if len(runs) == 2 else ""
    parts = (_better(runs, names, paired), trend, f"{_ends(files, names)} {_differences(files, names)}")
    return "".join(f"<p>{part}</p>" for part in parts if part)


def _ends(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """Return which runs are complete."""
    open_ones = [f"{isolated(name)} is {STATES[run.state]}" for run, name in zip(runs, names, strict=True)
                 if run.state != "complete"]  # fmt: skip
    everyone = "Both" if len(runs) == 2 else "All"
    steps = {run.step for run in runs}
    same = f"at step {runs[0].step:,}" if len(steps) == 1 else "at different steps"
    if not open_ones:
        return f"{everyone} runs are complete and end {same}."
    return f"Not all runs are complete: {'; '.join(open_ones)}. Their last lines are {same}."


def _differences(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """Return how many options differ and, if these are few, their values."""
    keys, flat = _different(runs)
    if not keys:
        return "Their options are the same."
    if len(keys) > _FEW_OPTIONS:
        return f"{len(keys)} options differ (below)."
    each = []
    for key in keys:
        values = (short(one.get(key, "not set")) for one in flat)
        of_runs = ", ".join(f"{isolated(name)}: {isolated(one)}" for name, one in zip(names, values, strict=True))
        each.append(f"{escape(key)} ({of_runs})")
    return f"Only {'this option differs' if len(keys) == 1 else 'these options differ'}: {', '.join(each)}."


def _main_score(runs: Sequence[tuple[RunFiles, Display]]) -> str:
    """Return the key of the first value of the first run in :func:`_evaluation`; empty if there is none."""
    run, display = runs[0]
    if run.is_finetuning:
        return next(iter(_evaluation(run)), "")
    return next((tile.key for tile in display.tiles), "")


def _trend(runs: Sequence[tuple[RunFiles, Display]], names: Sequence[str]) -> str:
    """Return whether the difference of two runs in the first value grows or shrinks over their last common
    evaluations or, if there is only one, in training; empty if this is unknown."""
    files, key = [run for run, _ in runs], _main_score(runs)
    split, _, name = key.rpartition(": ")
    for where, place in ((split or "eval", "on held-out data"), ("train", "in training")):
        curves = [dict(zip(*(one.tolist() for one in series(run.rows, where, name)), strict=True)) for run in files]
        steps = sorted({*curves[0]} & {*curves[1]})[-_TREND_STEPS:]
        if len(steps) < 2:
            continue
        changes = [curves[1][step] - curves[0][step] for step in steps]
        first, last = changes[0], changes[-1]
        how = "stayed about the same"
        if first * last < 0:
            how = "changed its sign"
        elif abs(abs(last) - abs(first)) > _TREND * max(abs(first), abs(last)):
            grows, before = abs(last) > abs(first), abs(changes[-2])
            goes_on = (abs(last) - before) * (1 if grows else -1) > _STILL * before
            how = (
                ("grew" if goes_on else "stopped growing")
                if grows
                else "shrank"
                if goes_on
                else "stopped shrinking"
            )
        each = ", ".join(
            f"{_change(key, one)} at step {step:,.0f}" for one, step in zip(changes, steps, strict=True)
        )
        label = words_of(name) if files[0].is_finetuning else _labels(runs[0]).get(name, words_of(name))
        return (
            f"The difference in {escape(label)} {place} ({isolated(names[1])} minus {isolated(names[0])}) {how}: "
            f"{each}. These runs do not show whether the order would change with more steps."
        )
    return ""


def _labels(one: tuple[RunFiles, Display]) -> dict[str, str]:
    run, display = one
    return named_values(_evaluation(run), display)


def _better(
    runs: Sequence[tuple[RunFiles, Display]], names: Sequence[str], paired: Mapping[str, tuple[float, float]]
) -> str:
    """Return a sentence that names the run with the best first value; empty if a run lacks it."""
    found, files = [_evaluation(run) for run, _ in runs], [run for run, _ in runs]
    run, first = runs[0][0], _main_score(runs)
    numbers = [values.get(first) for values in found]
    known = [one for one in numbers if isinstance(one, float)]
    if len(runs) < 2 or len(known) < len(runs):
        return ""
    label = words_of(first) if run.is_finetuning else _labels(runs[0]).get(first, words_of(first))
    each = zip(names, known, strict=True)
    values = " and ".join(f"{isolated(name)}: {format_value(first, one)}" for name, one in each)
    best = (min if lower_is_better(first) else max)(known)
    if known.count(best) > 1:
        return f"<p>Equal in {escape(label)} ({values}).</p>"
    way = "lower" if lower_is_better(first) else "higher"
    text = f"{isolated(names[known.index(best)])} is better in {escape(label)} ({values}; {way} is better)."
    seeds = "one run of each kind does not show how much the values change with the seed"
    if ends := (_of_groups(files) | dict(paired)).get(first) if len(runs) == 2 else None:
        is_clear = not ends[0] <= 0 <= ends[1]
        how = "is larger than" if is_clear else "is not clearly larger than"
        ends_of = " to ".join(_change(first, end) for end in ends)
        interval = f"95% interval of {isolated(names[1])} minus {isolated(names[0])}: {ends_of}"
        text += f" The difference {how} the noise of the held-out records ({interval}), but {seeds}."
    else:
        text += f" Whether the difference is larger than noise is unknown: {seeds}."
    return text


def _sections(runs: Sequence[tuple[RunFiles, Display]], names: Sequence[str]) -> list[str]:
    """Return the examples of the objectives, such as filled masks, of all runs side by side: one box for each text
    if the runs have the same texts, otherwise one for each run."""
    found: dict[str, list[tuple[str, Examples]]] = {}
    for place, (run, display) in enumerate(runs):
        name = f'<h3><span class="key" style="--c:{_color(place)}">{isolated(names[place])}</span></h3>'
        for one in display.sections(run.data):
            found.setdefault(one.heading, []).append((name, one))
    sections = []
    for heading, parts in found.items():
        note = f'<p class="soft">{escape(parts[0][1].note)}</p>'
        if len({tuple(one.texts) for _, one in parts}) == 1:
            rows = zip(*(one.items for _, one in parts), strict=True)
            boxes = [
                [f"<div>{name}{item}</div>" for (name, _), item in zip(parts, row, strict=True)] for row in rows
            ]
            body = "".join(card(f'<div class="beside">{"".join(box)}</div>') for box in boxes)
        else:
            body = f'<div class="beside">{"".join(card(name + listed(one.items)) for name, one in parts)}</div>'
        sections.append(section(heading, note + body))
    return sections


def _data(run: RunFiles) -> str:
    """Return the files and folders of the data."""
    values = [run.option(f"data.{key}") or () for key in _DATA]
    return ", ".join(str(one) for own in values for one in (own if isinstance(own, list | tuple) else [own]))


def _shape(run: RunFiles) -> str:
    layers, width = run.option("model.num_layers"), run.option("model.hidden_size")
    return f"{layers} x {width}" if layers and width else ""


def _evaluation(run: RunFiles) -> dict[str, Any]:
    """Return the last or final values by name; those of a task are preceded by their split."""
    if run.is_finetuning:
        return {
            f"{split}: {name}": values[name]
            for split, values in run.scores().items()
            for name in different_scores(values)
            if "/" not in name
        }
    values = run.data.get("evaluation") or run.last("eval")
    return {name: value for name, value in values.items() if name not in ("step", "split")}


def _scores(
    runs: Sequence[tuple[RunFiles, Display]], names: Sequence[str], paired: Mapping[str, tuple[float, float]]
) -> str:
    """Return the values of all runs with their intervals, the best ones in bold, and of two runs their
    difference."""
    files = [run for run, _ in runs]
    intervals, paired = [_intervals(run) for run in files], {**_of_groups(files), **paired}
    found, labels, rows = [_evaluation(run) for run, _ in runs], dict[str, str](), []
    for values, (run, display) in zip(found, runs, strict=True):
        labels |= {key: words_of(key) for key in values} if run.is_finetuning else named_values(values, display)
        for tile in display.tiles:
            label, own = tile.label.removeprefix("held-out "), values.get(tile.key)
            if isinstance(value := run.last().get(tile.key), float):
                values[_TRAINING + tile.key] = value
                labels[_TRAINING + tile.key] = f"{label} in training"
                if isinstance(own, float):
                    values[_GAP + tile.key] = own - value
                    unit = " (points)" if is_share(tile.key) else ""
                    labels[_GAP + tile.key] = f"{label}, held-out minus training{unit}"
    for key, label in [*labels.items()][:_MOST_ROWS]:
        numbers = [values.get(key) for values in found]
        known = [one for one in numbers if isinstance(one, float)]
        best = (min if lower_is_better(key) else max)(known) if len(known) > 1 else None
        if key.endswith("fraction") or key.startswith((_TRAINING, _GAP)):
            best = None
        text = _change if key.startswith(_GAP) else format_value
        shown = [text(key, values[key]) if key in values else "" for values in found]
        if len(runs) == 2:
            shown = _agreeing(key, shown, numbers)
        cells = [*map(escape, shown)]
        for place, number in enumerate(numbers):
            if number is not None and number == best:
                cells[place] = f"<b>{cells[place]}</b>"
            if ends := intervals[place].get(key):
                cells[place] += f"<small>{' to '.join(escape(format_value(key, end)) for end in ends)}</small>"
        change = [_difference(key, numbers[0], numbers[1], paired.get(key))] if len(runs) == 2 else []
        rows.append([isolated(label), *cells, *change])
    header = [*_headed(names), *([f"{isolated(names[1])} - {isolated(names[0])}"] if len(runs) == 2 else [])]
    notes = f"Bold: the best value. {_same_data(files, found)} {_certainty(intervals, paired)}"
    if any(key.startswith(_GAP) for key in labels):
        notes += " Training values are means over the steps since the last line of the log, with dropout."
    notes = f'<p class="soft">{notes}</p>'
    return table(header, rows, numbers=range(1, len(runs) + 2)) + notes if rows else ""


def _difference(key: str, first: Value, second: Value, ends: tuple[float, float] | None) -> str:
    """Return second - first and, with ``ends``, its interval."""
    if not isinstance(first, float) or not isinstance(second, float):
        return ""

    interval = f"<small>{' to '.join(_change(key, end) for end in ends)}</small>" if ends else ""
    unit = " points" if is_share(key) and not key.startswith(_GAP) else ""
    return _change(key, second - first) + unit + interval


def _change(key: str, value: Value) -> str:
    """Return a difference with its sign, of shares in percentage points."""
    if not isinstance(value, int | float):
        return ""
    return f"{100 * value:+.1f}" if is_share(key) else f"{value:+.4g}"


def _agreeing(key: str, shown: Sequence[str], numbers: Sequence[Any]) -> list[str]:
    """Return the two values ``shown`` with as many more digits as they need for their difference to agree with the
    shown one, which is computed from the unrounded ``numbers``."""
    if not all(isinstance(one, float) and math.isfinite(one) for one in numbers):
        return [*shown]
    found = [_DECIMAL.fullmatch(one) for one in shown]
    if not found[0] or not found[1]:
        return [*shown]
    scale = 100 if is_share(key) else 1
    digits = max(len(one[2] or "") for one in found if one)
    difference = round(scale * (numbers[1] - numbers[0]), digits)
    for more in range(_MORE_DIGITS + 1):
        rounded = [round(scale * one, digits + more) for one in numbers]
        if abs(rounded[1] - rounded[0] - difference) < 0.51 * 10.0**-digits * (more > 0) + 1e-9:
            break
    if not more:
        return [*shown]
    sign = "+" if found[0][1] else ""
    return [
        f"{one:{sign}.{digits + more}f}{part[3] if part else ''}" for one, part in zip(rounded, found, strict=True)
    ]


def _intervals(run: RunFiles) -> dict[str, Sequence[float]]:
    """Return the known 95% intervals of the values of :func:`_evaluation`."""
    entries = [(f"{one['split']}: {name}", score) for one in run.results for name, score in one["metrics"].items()]
    return {key: score["ci95"] for key, score in entries if score.get("ci95")}


def _of_groups(runs: Sequence[RunFiles]) -> dict[str, tuple[float, float]]:
    """Return 95% intervals of the differences between two pretraining runs, second - first: the paired bootstrap
    over groups of held-out rows. Values whose groups differ in weight are means over other rows."""
    if len(runs) != 2:
        return {}
    groups = [run.data.get("evaluation_groups") or {} for run in runs]
    found = {}
    for key in [key for key in groups[0] if key in groups[1] and not key.endswith("fraction")]:
        first, second = (np.array(one[key], float) for one in groups)
        if len(first) >= _LEAST_GROUPS and np.array_equal(first[:, 1:], second[:, 1:]):
            difference = paired_bootstrap(_mean(key, second), _mean(key, first), len(first), seed=0)
            found[key] = (difference.low, difference.high)
    return found


def _mean(name: str, groups: np.ndarray) -> Score:
    """Return the score sum / weight of ``groups`` float64[G, 2]."""

    def of(indices: np.ndarray) -> float:
        total, weight = groups[indices].sum(axis=0)
        return float(total / weight) if weight else math.nan

    return Score(name, of)


def _certainty(
    intervals: Sequence[Mapping[str, Sequence[float]]], paired: Mapping[str, tuple[float, float]]
) -> str:
    """Return what the intervals cover."""
    kinds = ["of a value" if any(intervals) else "", "of a difference on the same records" if paired else ""]
    of = " and ".join(kind for kind in kinds if kind)
    known = f"Small: the 95% interval {of}, from resampled records." if of else "The files contain no intervals."
    return f"{known} One run of each kind does not show how much the values change with the seed."


def _same_data(runs: Sequence[RunFiles], found: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about the held-out data of the runs, from digests of records or numbers of targets."""
    digests = [tuple(one.get("digest") for one in run.results) for run in runs]
    if all(digests) and None not in digests[0]:
        same = "the same" if len({*digests}) == 1 else "not the same"
        return f"The predicted records are {same} in all runs."
    targets = {values.get("targets") for values in found}
    if None in targets:
        return "The files do not tell whether the held-out data is the same."
    same = "the same number of" if len(targets) == 1 else "different numbers of"
    return f"The held-out data has {same} targets."


def _curves(runs: Sequence[tuple[RunFiles, Display]], names: Sequence[str]) -> str:
    """Return a chart for each panel of any of the runs, with the curves of all of them."""
    every: dict[tuple[str, str], Panel] = {}
    for run, display in runs:
        for panel in panels_of(run.rows, display.panels):
            every.setdefault((panel.key, panel.split), panel)
    charts = []
    for panel in every.values():
        lines = [line for number, (run, _) in enumerate(runs) for line in _run_lines(panel, run, number, names)]
        scale = Scale(panel.log, panel.percent, panel.key in ("tokens_per_second", "mfu"))
        levels = _common_level(panel, runs)
        charts.append(card(line_chart(lines, scale, levels, title=panel.title), heading=panel.title))
    return panels(charts, _STYLES + how_to_read([run for run, _ in runs])) or card("no metrics yet")


def _common_level(panel: Panel, runs: Sequence[tuple[RunFiles, Display]]) -> list[tuple[float, str]]:
    """Return the baseline of a panel and its name if all runs have the same one."""
    key, label = panel.baseline
    known = [known_levels(run, display).get(key, math.nan) for run, display in runs]
    return [(known[0], label)] if all(math.isclose(one, known[0]) for one in known) else []


def _run_lines(panel: Panel, run: RunFiles, number: int, names: Sequence[str]) -> list[Line]:
    """Return the curves of a run in its color; training is thin where there is an evaluation, and the names
    then tell which is which."""
    lines = [line for line in panel_lines(panel, run.rows) if line.css != "faint"]
    named = lines[-1] if lines else None
    css = {True: "", False: "thin"}
    return [
        Line(
            np.asarray(line.steps), line.values, _color(number),
            names[number] + (_kind(line) if len(lines) > 1 else ""), css[line is named], line.marked,
        )
        for line in lines
    ]  # fmt: skip


def _kind(line: Line) -> str:
    """Return the words of the legend about a curve of a run that has two."""
    return f", {line.name}{' (dots)' if line.marked and len(line.values) <= MOST_MARKS else ''}"


def _different(runs: Sequence[RunFiles]) -> tuple[list[str], list[dict[str, str]]]:
    """Return the names of the options that differ, and the options of each run by name."""
    flat = [_flat(run.config) for run in runs]
    every = dict.fromkeys(key for one in flat for key in one)
    return [key for key in every if len({one.get(key) for one in flat}) > 1], flat


def _options(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    keys, flat = _different(runs)
    rows = [
        [breakable(key), *(isolated(short(one.get(key, ""), _LONGEST_VALUE)) for one in flat)]
        for key in keys[:_MOST_OPTIONS]
    ]
    left = len(keys) - len(rows)
    note = f'<p class="soft">{left:,} more differ</p>' if left > 0 else ""
    return table(_headed(names), rows, css="options") + note if rows else "none"


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the options by dotted name."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            is_count = isinstance(value, int) and not isinstance(value, bool)
            text = f"{value:,}" if is_count else str(value)
            found[f"{prefix}{name}"] = ", ".join(map(str, value)) if isinstance(value, list) else text
    return found
