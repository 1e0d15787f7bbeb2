"""The report of a run: WORKDIR/report.html (self-contained) and WORKDIR/report.png.

The report is made from the files of the workdir (:mod:`run_files`), so it can be written again at any time. While a
run is in progress, its lead process writes the page again and again, and browsers reload it.
"""

import dataclasses
import json
import logging
import math
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from bert_jax import registry
from bert_jax.io.errors import one_line
from bert_jax.io.files import write_whole
from bert_jax.io.storage import Location, is_url
from bert_jax.objectives.display import RUN_TILES, Display, ReportData
from bert_jax.tokenization.tokenizer import without_surrogates
from bert_jax.training.logging.charts import Scale, is_log, line_chart, panel_lines
from bert_jax.training.logging.curves import draw_curves, panels_of
from bert_jax.training.logging.logger import Row, Value
from bert_jax.training.logging.metrics_file import METRICS_FILE
from bert_jax.training.logging.page import (
    AGE_SCRIPT,
    breakable,
    card,
    command,
    document,
    escape,
    facts,
    folded,
    format_value,
    isolated,
    listed,
    pair,
    panels,
    section,
    table,
    tiles,
    words_of,
)
from bert_jax.training.logging.progress import format_age, format_count, format_duration
from bert_jax.training.logging.run_files import DATA_FILE, HTML_FILE, IMAGE_FILE, STATES, RunFiles, State, read_run
from bert_jax.training.logging.task_report import task_charts, task_sections, task_tiles
from bert_jax.training.logging.verdict import REMEDY, WEAK, command_of, known_levels, verdict

T = TypeVar("T")
_log = logging.getLogger(__name__)

# Seconds after which a browser loads the page of a run in progress again.
RELOAD_SECONDS = 20
# Seconds after which the page is written at the next line of metrics, even without an evaluation.
_LONGEST_WAIT = 60.0
# The line of the log with the number of training records of each class or tag.
_CLASSES_LINE = re.compile(r"\d+ (classes|types of entities|tags|labels): ")
# What marks a point of a curve of a task.
_RING = "<p>A ring marks the evaluation whose parameters are kept.</p>"
# Seconds of writing a page from which on not every evaluation writes one.
_LONG = 0.2


def write_report(workdir: Path | str, display: Display, data: ReportData | None = None, *, name: str = "") -> Path:
    """Write report.html and report.png of a complete run into ``workdir``; return the path of report.html.

    Args:
        workdir: folder of the run.
        display: panels, tiles and sections that the objective defines.
        data: results that no other file of the folder contains. They are written to report_data.json, from which
            later calls without ``data`` read the results. All keys are optional: ``title`` str; ``summary`` list of
            lines; ``evaluation`` {name: number or None}, the final evaluation; ``confusion`` {split: {"labels":
            [C], "counts": [C][C]}}, with a row per label and a column per prediction; ``findings`` and
            ``plain_answers`` by split; baselines and samples of the objective.
        name: name of the run (default: that of the folder).

    Raises:
        OSError: a file could not be written.
    """
    workdir = Path(workdir)
    run = read_run(workdir, None if data is None else "complete", data, name)
    image = _made(IMAGE_FILE, lambda: draw_curves(run.rows, run.data, display.panels, run.title))
    if image is not None:
        write_whole(workdir / IMAGE_FILE, image)
    page = _made(HTML_FILE, lambda: run_page(run, display))
    if page is None:
        page = document(run.title, [card("An error prevented this report. All other results are in the workdir.")])
    write_whole(workdir / HTML_FILE, page)
    if data is not None:  # last: with it, the run counts as complete
        write_whole(workdir / DATA_FILE, without_surrogates(json.dumps(data, indent=1, ensure_ascii=False)))
    return workdir / HTML_FILE


def _made(name: str, make: Callable[[], T]) -> T | None:
    """Return the content of the file ``name``, or None after an error, which must not prevent the end of a run."""
    try:
        return make()
    except Exception as error:
        _log.warning(
            "WARNING: %s: %s: %s; the other results are complete", name, type(error).__name__, one_line(error)
        )
        return None


class LiveReport:
    """The page of a run that is not complete. An error of writing it does not end the run."""

    def __init__(self, folder: Path, display: Display, workdir: Location, say: Callable[[str], None]) -> None:
        """``folder`` has the logs of the run in ``workdir``; they differ if this is a URL."""
        self._folder, self._display, self._workdir, self._say = folder, display, workdir, say
        self._written, self._seconds = -math.inf, 0.0
        # The last error that the log names.
        self._problem = ""
        # What the last evaluation found, and the function that finds it, until it is called.
        self._data: ReportData = {}
        self._find: Callable[[], ReportData] | None = None

    def add(self, find: Callable[[], ReportData]) -> None:
        """Show what ``find`` returns, which is called when the next page is written."""
        self._find = find

    def write(self, *, running: bool = True, is_due: bool = True) -> None:
        """Write the page; if it is not due, only if the last one is a minute old. If writing it takes long, because
        the run has many lines of metrics or records, this takes at most 2% of the time of the run. ``running``:
        browsers reload the page."""
        began = time.monotonic()
        least = 50 * self._seconds if self._seconds > _LONG and running else 0.0
        is_due = began - self._written >= (least if is_due else max(least, _LONGEST_WAIT))
        if not is_due or not (self._folder / METRICS_FILE).is_file():  # deleted or moved
            return
        try:
            if self._find is not None:
                find, self._find = self._find, None
                self._data = find()
            state: State = "running" if running else "stopped"
            run = read_run(self._folder, state, self._data, self._workdir.name, self._workdir)
            page_interval = max(_LONGEST_WAIT, 50 * self._seconds)
            write_whole(self._folder / HTML_FILE, run_page(run, self._display, page_interval))
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            if problem != self._problem:
                self._say(f"WARNING: {HTML_FILE}: {one_line(error)}; the run continues and tries again later")
            self._problem = problem
        self._written = time.monotonic()
        self._seconds = self._written - began


def run_page(run: RunFiles, display: Display, page_interval: float = _LONGEST_WAIT) -> str:
    """Return the page of one run. ``page_interval``: the seconds after which the run in progress writes its page
    again at the latest, if it logs a line."""
    known = known_levels(run, display)
    evaluation = {**(run.data.get("evaluation") or run.last("eval")), **known}
    evaluation = {key: value for key, value in evaluation.items() if key not in ("step", "split")}
    entries = [*task_tiles(run), *_tiles(display, run, evaluation)]
    result = verdict(run, display)
    is_told = REMEDY in result and len(run.scores()) == 1
    warnings = [line for line in _lines(run) if line.startswith("WARNING") and not (is_told and WEAK in line)]
    charts = [*task_charts(run), *_panels(run, display)]
    body = [
        f"<h1>{isolated(run.title)}</h1>",
        _state(run),
        _quiet(run, page_interval),
        result,
        *(f'<div class="warning">{isolated(line)}</div>' for line in warnings),
        tiles(entries),
        *task_sections(run),
        section("Charts", panels(charts, how_to_read([run]) + _RING * run.is_finetuning) or card("no metrics yet")),
        *(
            section(one.heading, card(f'<p class="soft">{escape(one.note)}</p>{listed(one.items)}'))
            for one in display.sections(run.data)
        ),
        _doctor(run),
    ]
    commands = [("command", command_of(run)), ("to use the result", _use(run))]
    lines = "".join(f'<p class="soft">{name}</p>{command(line)}' for name, line in commands if line)
    about = [card(facts(_about(run)) + lines, heading="Model, data and hardware")]
    if evaluation and not run.is_finetuning:
        named = named_values(evaluation, display)
        rows = [(escape(name), escape(format_value(key, evaluation[key]))) for key, name in named.items()]
        heading = "Final evaluation" if run.state == "complete" else "Last evaluation"
        about.append(card(table((), rows, numbers=(1,)), heading=heading))
    body.append(section("About this run", pair(*about)))
    notes = [line for line in _lines(run) if not line.startswith("WARNING")]
    if notes:
        items = "".join(f'<li dir="auto">{escape(line)}</li>' for line in notes)
        body.append(folded("messages of the run", f'<ul class="soft">{items}</ul>'))
    if run.config_text:
        body.append(folded("every option of this run", f"<pre>{escape(run.config_text)}</pre>"))
    if run.state != "running":
        return document(run.title, body)
    script = AGE_SCRIPT if run.last_line else ""
    return document(run.title, body, reload_seconds=RELOAD_SECONDS, script=script)


def how_to_read(runs: Sequence[RunFiles]) -> str:
    """Return what the curves of ``runs`` are and what is bad in them, as HTML."""
    text = (
        "<p>How to read the curves: a training value is a mean over the steps since the previous line of the log, "
    )
    text += "with the dropout of the run."
    if any(run.splits() for run in runs):
        text += " A held-out value is measured without dropout, so it can be better.</p>"
        text += "<p>If the training loss falls while the held-out loss rises, the model overfits."
    many_times = "A gradient norm that jumps to many times its usual value is a sign of unstable training."
    return f"{text}</p><p>{many_times}</p>"


def progress_line(run: RunFiles) -> str:
    """Return one line about a run that is not complete: its state, its step, and the time of its last line."""
    step = f"step {run.step:,} of {run.num_steps:,}" if run.num_steps else f"step {run.step:,}"
    line = f"{run.workdir}: {STATES[run.state]}, {step}"
    if run.state == "running" and run.last_line:
        age = time.time() - run.last_line
        line += f"; last line {format_age(age)} ago"
        if age > quiet_seconds(run) > 0:
            line += f", usually one every {format_age(run.log.interval)}: the run may hang"
    elif run.log.last_time:
        line += f"; last line {run.log.last_time}"
    return line


def quiet_seconds(run: RunFiles) -> float:
    """Return the seconds without a line after which a run in progress is doubtful: ten usual intervals, but not
    less than a minute, nor than twice the longest interval, which may be an evaluation. 0: unknown, because the log
    has few lines or is only uploaded from time to time."""
    if run.log.interval <= 0 or is_url(run.workdir):
        return 0.0
    return max(60.0, 10 * run.log.interval, 2 * run.log.longest_interval)


def _quiet(run: RunFiles, page_interval: float) -> str:
    """Return a warning that the page shows if the run in progress logs no line any more."""
    limit = quiet_seconds(run) if run.state == "running" and run.last_line else 0.0
    if not limit:
        return ""
    usual, line = format_age(run.log.interval), shlex.join(["bert-jax", "report", run.workdir])
    text = f"No line for <b></b>; usually there is one every {usual}. The run has stopped or hangs. "
    text += f"This command tells which of the two: <code>{escape(line)}</code>"
    return f'<div class="warning" data-limit="{limit + page_interval:.0f}" hidden>{text}</div>'


def _doctor(run: RunFiles) -> str:
    """Return the results of the checks of the run; empty without them, or without the room that shows them."""
    shows = "report of the doctor"
    if not run.doctor or shows not in registry.names("extensions"):
        return ""
    return section(*registry.load("extensions", shows)(run.doctor))


def _lines(run: RunFiles) -> list[str]:
    """Return the messages of the run: those of its results, or of its log."""
    return list(dict.fromkeys([*(run.data.get("summary") or ()), *run.log.lines[:40]]))


def _state(run: RunFiles) -> str:
    """Return what kind of run this is, and how far it has come."""
    kind = "Pretraining"
    if run.is_finetuning:
        kind = f"Fine-tuning: {run.option('task.kind') or 'task'}"
    elif run.config:
        kind += f": {run.option('objective.name') or 'masked_lm'}"
    step, total = run.step, run.num_steps
    words = STATES[run.state]
    way = f"step {step:,} of {total:,}" if total else f"step {step:,}"
    if run.state != "complete" and total:
        way += f" ({min(1.0, step / total):.0%})"
    if run.state == "complete" and total and step < total:
        words = "complete, ended early"
    parts = [escape(kind), f'<span class="state {run.state}">{words}</span>', way]
    if run.log.seconds >= 1:
        parts.append(format_duration(run.log.seconds))
    seconds = run.last().get("seconds_per_step")
    if run.state == "running" and isinstance(seconds, int | float) and total > step:
        parts.append(f"about {format_duration((total - step) * seconds)} left")
    if run.state == "running":
        if run.last_line:
            last = f'<span data-last="{run.last_line:.1f}"></span>'
            parts.append(f"last line {_clock(run.last_line)}{last}")
        parts.append(f"page written {_clock(time.time())}; it reloads itself")
    bar = ""
    if run.state != "complete" and total:
        bar = f'<div class="bar"><i style="width:{min(100.0, 100 * step / total):.1f}%"></i></div>'
    return f'<div class="soft">{" · ".join(parts)}</div>{bar}'


def _clock(seconds: float) -> str:
    """Return a time in seconds since 1970 in the time zone of this process, with its name."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


def _tiles(display: Display, run: RunFiles, evaluation: Row) -> list[tuple[str, str, str]]:
    """Return (value, label, remark) of the evaluation, of training, and of the model."""
    last, entries = {**run.last(), **mean_rates(run)}, list[tuple[str, str, str]]()
    for tile, values in [*((one, evaluation) for one in display.tiles), *((one, last) for one in RUN_TILES)]:
        if (value := values.get(tile.key)) is None:
            continue
        key, words = tile.beside
        beside = values.get(key)
        remark = "" if beside is None else f"{_tile_value(key, beside)} {words}"
        entries.append((_tile_value(tile.key, value), tile.label, remark))
    if run.log.parameters:
        entries.append((format_count(run.log.parameters), "parameters", ""))
    if run.log.seconds >= 1:
        entries.append((format_duration(run.log.seconds), "duration (h:m:s)", ""))
    return entries


def _tile_value(name: str, value: Value) -> str:
    if name == "tokens_per_second" and isinstance(value, int | float):
        return format_count(value)
    return f"{value:.2f}" if name == "epoch" else format_value(name, value)


def _panels(run: RunFiles, display: Display) -> list[str]:
    """Return a chart for each panel with data. The value of the kept parameters is marked."""
    answers, known = run.plain_answers(), known_levels(run, display)
    kept = {one["split"]: one.get("step") for one in run.results if "chosen_by" in one}
    charts = []
    for panel in panels_of(run.rows, display.panels):
        lines = [
            dataclasses.replace(line, kept=kept.get(panel.split)) if line.name == panel.split else line
            for line in panel_lines(panel, run.rows)
        ]
        key, label = panel.baseline
        levels = [(known[key], label)] if key in known else []
        answer = answers.get(panel.split)
        if answer and answer["metric"] == panel.key and answer["value"] is not None:
            levels.append((answer["value"], answer["answer"]))
        scale = Scale(panel.log, panel.percent, panel.key in ("tokens_per_second", "mfu"))
        title = panel.title + (" (log)" if is_log(lines, scale) else "")
        charts.append(card(line_chart(lines, scale, levels, title=title), heading=title))
    return charts


def named_values(evaluation: Row, display: Display) -> dict[str, str]:
    """Return the names of the values of an evaluation in the words of the tiles, by key. Values
    without such words are omitted if they equal another one: the total loss of a run with one loss."""
    words = {tile.key: tile.label.removeprefix("held-out ") for tile in display.tiles}
    words |= {tile.beside[0]: f"{words[tile.key]}, {tile.beside[1]}" for tile in display.tiles}
    words["targets"] = "predicted tokens"
    found = dict[str, str]()
    for key, value in evaluation.items():
        equal = [one for one in words if one != key and isinstance(value, float) and evaluation.get(one) == value]
        if key in words or not equal:
            found[key] = words.get(key) or words_of(key)
    return found


def time_parts(run: RunFiles) -> list[tuple[str, float]]:
    """Return the parts of the duration of a run in seconds; empty if they are unknown."""
    steps = rates(run)[0]
    if not steps or not run.log.start_seconds or run.log.seconds < 1:
        return []
    rest = max(0.0, run.log.seconds - run.log.start_seconds - steps)
    return [
        ("start-up and compilation", run.log.start_seconds),
        ("training steps", steps),
        ("evaluation, saving and the rest", rest),
    ]


def absolute(workdir: str) -> str:
    """Return the whole path of a folder, or its URL."""
    return workdir if is_url(workdir) else str(Path(workdir).absolute())


def mean_rates(run: RunFiles) -> dict[str, float]:
    """Return the means of the tokens per second and of the MFU over the training of a run."""
    seconds, sums = rates(run)
    return {key: value / seconds for key, value in sums.items()} if seconds else {}


def rates(run: RunFiles) -> tuple[float, dict[str, float]]:
    """Return the seconds of training and, by name, the sums of rate times seconds, such as the number of tokens."""
    seconds, sums, before = 0.0, dict[str, float](), 0
    for row in run.rows:
        length = row.get("seconds_per_step")
        if "split" not in row and isinstance(length, int | float):
            time_of = max(1, row["step"] - before) * length
            before, seconds = row["step"], seconds + time_of
            for key in ("tokens_per_second", "mfu"):
                if isinstance(value := row.get(key), int | float):
                    sums[key] = sums.get(key, 0.0) + value * time_of
    return seconds, sums


# About the run ----------------------------------------------------------------------------------------------------


def _about(run: RunFiles) -> list[tuple[str, str]]:
    """Return (name, HTML) of model, data, hardware and duration, as far as the files tell."""
    model, log, last = run.config.get("model") or {}, run.log, run.last()
    shape = ""
    if isinstance(model, Mapping) and model.get("num_layers"):
        parts = [f"{model['num_layers']} layers", f"width {model.get('hidden_size')}"]
        if model.get("num_attention_heads"):
            parts.append(f"{model['num_attention_heads']} attention heads")
        if model.get("intermediate_size"):
            parts.append(f"feed-forward width {_count(model['intermediate_size'])}")
        parts += [f"vocabulary {_count(model.get('vocab_size', 0))}", str(model.get("family", ""))]
        shape = ", ".join(part for part in parts if part)
    passes, examples = "", run.training_examples
    if examples:
        passes = f"{last['epoch']:.2f} passes over {examples:,} training examples"
        if tokens := rates(run)[1].get("tokens_per_second"):
            passes += f", {format_count(tokens)} tokens without padding"
    mesh = ", ".join(one for one in log.mesh.split("x") if not one.endswith("=1"))
    hardware = ", ".join(part for part in (log.devices, f"mesh {mesh}" if mesh else "", log.dtype) if part)
    optimizer = run.option("optimizer.name")
    rate = run.option("optimizer.learning_rate")
    return [
        ("model", escape(shape)),
        ("parameters", f"{log.parameters:,}" if log.parameters else ""),
        ("starts from", f"<bdi>{breakable(_start(run))}</bdi>" if _start(run) else ""),
        ("data", "<br>".join(isolated(one) for one in _data(run))),
        ("read", escape(passes)),
        ("batch", _batch(run)),
        ("optimizer", escape(f"{optimizer}, learning rate {rate}") if optimizer and rate else ""),
        ("seed", escape(run.option("training.seed"))) if run.option("training.seed") is not None else ("seed", ""),
        ("training classes", _classes_of(run)),
        ("hardware", escape(hardware)),
        ("runs on", escape(log.place)),
        ("versions", escape(log.versions)),
        ("workdir", f"<bdi>{breakable(absolute(run.workdir))}</bdi>"),
        ("started", escape(_local(log.began or log.first_time))),
        ("last line", escape(_local(log.last_time))),
        ("duration", _duration(run)),
        ("parameters in", f"<bdi>{breakable(_saved(run))}</bdi>"),
    ]


def _local(when: str) -> str:
    return f"{when} (local time)" if when else ""


def _saved(run: RunFiles) -> str:
    """Return the folder of the parameters that other commands read; empty if nothing is saved."""
    if run.is_finetuning and run.state == "complete":
        return f"{run.workdir}/best"
    return f"{run.workdir}/checkpoints, step {run.saved_steps[-1]:,}" if run.saved_steps else ""


def _use(run: RunFiles) -> str:
    """Return a command that uses the parameters of a complete run."""
    if run.state != "complete" or not _saved(run) or run.option("task.kind") == "translation":
        return ""
    folder = shlex.quote(run.workdir)
    if not run.is_finetuning:
        return f"bert-jax finetune --init_from {folder} --config RECIPE --workdir NEW_FOLDER"
    if run.option("task.kind") == "sentence":
        return f"bert-jax embed --model {folder} --input texts.txt --output vectors.npy"
    return f"bert-jax predict --model {folder} --input FILE"


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _start(run: RunFiles) -> str:
    line = next((line for line in run.log.lines if line.startswith("starts from ")), "")
    return "random parameters" if run.from_random else line.removeprefix("starts from ")


def _classes_of(run: RunFiles) -> str:
    """Return the line of the log with the training records by class or tag, with each of these isolated, because
    classes in a right-to-left script would change places with the numbers."""
    lines = [line for line in run.log.lines if _CLASSES_LINE.match(line)]
    line = max(lines, key=lambda line: " types of entities: " in line, default="")
    head, _, rest = line.partition(": ")
    return f"{escape(head)}: {', '.join(isolated(part) for part in rest.split(', '))}" if line else ""


def _data(run: RunFiles) -> list[str]:
    """Return the files of the run, and what its log says about classes."""
    found = []
    for key in ("corpus", "dir", "train", "dev", "test", "shards", "mixture"):
        value = run.option(f"data.{key}")
        values = value if isinstance(value, list) else [value] if isinstance(value, str) else []
        if any(values):
            found.append(f"{key}: {', '.join(map(str, values))}")
            if any(str(one).startswith("package:") for one in values):
                found[-1] += " (the text files of an installed Python package)"
    return found


def _batch(run: RunFiles) -> str:
    size, length = (
        run.option("training.global_batch_size"),
        run.option("data.seq_length") or run.option("task.max_length"),
    )
    parts = [
        f"{_count(size)} examples" if size else "",
        f"at most {_count(length)} tokens each" if length else "",
    ]
    return escape(", ".join(part for part in parts if part))


def _duration(run: RunFiles) -> str:
    if run.log.seconds < 1:
        return ""
    often = f" in {run.log.attempts} starts" if run.log.attempts > 1 else ""
    parts = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in time_parts(run))
    return f"{format_duration(run.log.seconds)}{often}{f': {parts}' if parts else ''}"
