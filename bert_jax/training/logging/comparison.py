"""A page with several runs side by side: their curves over each other, their evaluations, and their options."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.metrics import Score
from bert_jax.metrics.resampling import paired_bootstrap
from bert_jax.objectives.display import Display, Panel
from bert_jax.training.logging.charts import Line, Scale, line_chart, panel_lines
from bert_jax.training.logging.curves import different_scores, is_share, panels_of
from bert_jax.training.logging.logger import Value
from bert_jax.training.logging.page import (
    RUN_COLORS,
    card,
    document,
    escape,
    format_value,
    isolated,
    pair,
    panels,
    section,
    short,
    table,
    words_of,
)
from bert_jax.training.logging.progress import format_count, format_duration
from bert_jax.training.logging.report import RELOAD_SECONDS, mean_rates, named_values
from bert_jax.training.logging.run_files import STATES, RunFiles
from bert_jax.training.logging.verdict import lower_is_better

# Number of rows of the tables of scores and of options, and of characters of a value.
_MOST_ROWS, _MOST_OPTIONS, _LONGEST_VALUE = 24, 40, 60
# Number of groups of held-out rows from which on a difference has an interval.
_LEAST_GROUPS = 10
# Prefix of the last training values in the table of scores.
_TRAINING = "training: "
# Options that name the data.
_DATA = ("corpus", "dir", "train", "shards", "mixture")
_STYLES = (
    '<p class="soft">Thick lines with dots: held-out data. Thin lines: training, where both are known. '
    "Training values are measured with the dropout of the run, held-out values without it.</p>"
)


def comparison_page(
    runs: Sequence[tuple[RunFiles, Display]], paired: Mapping[str, tuple[float, float]] | None = None
) -> str:
    """Return the page of several runs with their displays; browsers reload it while one of them is in progress.
    ``paired``: known 95% intervals of the differences, second - first, of two fine-tuning runs by SPLIT: METRIC."""
    files, names = [run for run, _ in runs], _names([run for run, _ in runs])
    body = [
        f"<h1>{' and '.join(map(isolated, names))}</h1>",
        card(_better(runs, names, paired or {}), css="verdict"),
        pair(
            card(_options(files, names), heading="Options that differ"),
            card(_scores(runs, names, paired or {}), heading="Evaluation"),
            card(_overview(files, names), heading="Runs"),
        ),
        section("Curves", _STYLES + _curves(runs, names)),
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
        ("duration", lambda run: format_duration(run.log.seconds) if run.log.seconds >= 1 else ""),
        ("tokens per second, mean", lambda run: format_count(_speed(run)) if _speed(run) else ""),
        ("workdir", lambda run: run.workdir),
    ]
    lines = [[escape(name), *(escape(value(run)) for run in runs)] for name, value in rows]
    return table(_headed(names), [line for line in lines if any(line[1:])], css="runs")


def _speed(run: RunFiles) -> float:
    return mean_rates(run).get("tokens_per_second", 0.0)


def _better(
    runs: Sequence[tuple[RunFiles, Display]], names: Sequence[str], paired: Mapping[str, tuple[float, float]]
) -> str:
    """Return a sentence that names the run with the best first value; empty if a run lacks it."""
    found, files = [_evaluation(run) for run, _ in runs], [run for run, _ in runs]
    run, display = runs[0]
    first = next(iter(found[0]), "") if run.is_finetuning else next((tile.key for tile in display.tiles), "")
    numbers = [values.get(first) for values in found]
    known = [one for one in numbers if isinstance(one, float)]
    if len(runs) < 2 or len(known) < len(runs):
        return ""
    label = words_of(first) if run.is_finetuning else named_values(found[0], display).get(first, words_of(first))
    each = zip(names, known, strict=True)
    values = " and ".join(f"{isolated(name)}: {format_value(first, one)}" for name, one in each)
    best = (min if lower_is_better(first) else max)(known)
    if known.count(best) > 1:
        return f"<p>Equal in {escape(label)} ({values}).</p>"
    way = "lower" if lower_is_better(first) else "higher"
    text = f"{isolated(names[known.index(best)])} is better in {escape(label)} ({values}; {way} is better)."
    if ends := (_of_groups(files) | dict(paired)).get(first) if len(runs) == 2 else None:
        is_clear = not ends[0] <= 0 <= ends[1]
        how = "does not contain 0" if is_clear else "contains 0, so the runs may be equally good"
        text += f" The 95% interval of the difference {how}."
    return f"<p>{text}</p>"


def _sections(runs: Sequence[tuple[RunFiles, Display]], names: Sequence[str]) -> list[str]:
    """Return the sections of the objectives, such as filled masks, of all runs side by side."""
    found: dict[str, list[str]] = {}
    for (run, display), name in zip(runs, names, strict=True):
        for heading, content in display.sections(run.data):
            found.setdefault(heading, []).append(f"<div><h3>{isolated(name)}</h3>{content}</div>")
    return [section(heading, panels(parts)) for heading, parts in found.items()]


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
            if isinstance(value := run.last().get(tile.key), float):
                values[_TRAINING + tile.key] = value
                labels[_TRAINING + tile.key] = f"{tile.label.removeprefix('held-out ')} in training"
    for key, label in [*labels.items()][:_MOST_ROWS]:
        numbers = [values.get(key) for values in found]
        known = [one for one in numbers if isinstance(one, float)]
        best = (min if lower_is_better(key) else max)(known) if len(known) > 1 else None
        if key.endswith("fraction") or key.startswith(_TRAINING):
            best = None
        cells = [escape(format_value(key, values[key])) if key in values else "" for values in found]
        for place, number in enumerate(numbers):
            if number is not None and number == best:
                cells[place] = f"<b>{cells[place]}</b>"
            if ends := intervals[place].get(key):
                cells[place] += f"<small>{' to '.join(escape(format_value(key, end)) for end in ends)}</small>"
        change = [_difference(key, numbers[0], numbers[1], paired.get(key))] if len(runs) == 2 else []
        rows.append([isolated(label), *cells, *change])
    header = [*_headed(names), *(["second - first"] if len(runs) == 2 else [])]
    notes = f'<p class="soft">Bold: the best value. {_same_data(files, found)} {_certainty(intervals, paired)}</p>'
    return table(header, rows, numbers=range(1, len(runs) + 2)) + notes if rows else ""


def _difference(key: str, first: Value, second: Value, ends: tuple[float, float] | None) -> str:
    """Return second - first and, with ``ends``, its interval."""
    if not isinstance(first, float) or not isinstance(second, float):
        return ""

    def text(change: float) -> str:
        return f"{100 * change:+.1f}" if is_share(key) else f"{change:+.4g}"

    interval = f"<small>{' to '.join(map(text, ends))}</small>" if ends else ""
    return text(second - first) + (" points" if is_share(key) else "") + interval


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
        charts.append(card(line_chart(lines, scale, title=panel.title), heading=panel.title))
    return panels(charts) or card("no metrics yet")


def _run_lines(panel: Panel, run: RunFiles, number: int, names: Sequence[str]) -> list[Line]:
    """Return the curves of a run in its color; training is thin where there is an evaluation, which has the
    name."""
    lines = [line for line in panel_lines(panel, run.rows) if line.css != "faint"]
    named = lines[-1] if lines else None
    css = {True: "", False: "thin"}
    return [
        Line(
            np.asarray(line.steps), line.values, _color(number), names[number] if line is named else "",
            css[line is named], line.marked,
        )
        for line in lines
    ]  # fmt: skip


def _options(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    flat = [_flat(run.config) for run in runs]
    every = dict.fromkeys(key for one in flat for key in one)
    keys = [key for key in every if len({one.get(key) for one in flat}) > 1]
    rows = [
        [_breakable(key), *(isolated(short(one.get(key, ""), _LONGEST_VALUE)) for one in flat)]
        for key in keys[:_MOST_OPTIONS]
    ]
    left = len(keys) - len(rows)
    note = f'<p class="soft">{left:,} more differ</p>' if left > 0 else ""
    return table(_headed(names), rows, css="options") + note if rows else "none"


def _breakable(name: str) -> str:
    """Return the name of an option as HTML that can only be broken after a dot or an underscore."""
    return escape(name).replace(".", ".<wbr>").replace("_", "_<wbr>")


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
