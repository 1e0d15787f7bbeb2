"""``bert-jax report`` and ``bert_jax.report``: the report of a run at any time, and several runs side by side."""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_jax import registry
from bert_jax.commands.options import Command, option
from bert_jax.io.files import require_folder, whole_file, write_whole
from bert_jax.io.storage import Location, ObjectPath, location
from bert_jax.objectives.display import Display, Panel
from bert_jax.training.logging.run_files import CONFIG_FILE, HTML_FILE, RunFiles, read_run

if TYPE_CHECKING:
    from bert_jax.commands.trained import TrainedRun

# The file with several runs.
COMPARISON = "comparison.html"
# The part that compares two fine-tuning runs, and the number of metrics of a split that it compares.
_COMPARE, _PAIRED = "report WORKDIR WORKDIR", 4


def report(
    *workdirs: "str | os.PathLike[str] | TrainedRun", output: "str | os.PathLike[str] | None" = None
) -> Location:
    """Write the report of a run, or one page that compares several runs; return the path of the file.

    ``workdirs``: folders (or URLs) of runs, or run objects; the runs may be in progress. ``output``: the file
    (default: report.html in the workdir; for several runs, comparison.html in the current folder). Raises
    ``ValueError`` if no workdir is given or if a folder contains no run.
    """
    return _report(workdirs, output)[0]


def _report(
    workdirs: "Sequence[str | os.PathLike[str] | TrainedRun]", output: "str | os.PathLike[str] | None"
) -> tuple[Location, list[RunFiles]]:
    """Write the page as :func:`report` does; return its path and the runs."""
    from bert_jax.training.logging.comparison import comparison_page
    from bert_jax.training.logging.report import run_page

    if not workdirs:
        raise ValueError("no workdir; give the folder of one or more runs")
    if any(isinstance(one, list | tuple) for one in workdirs):
        raise ValueError("workdirs: a list is not allowed; write report(*workdirs)")
    names = (one if isinstance(one, str | os.PathLike) else one.workdir for one in workdirs)
    places = [location(os.fspath(name)) for name in names]
    for place in places:
        if not (place / CONFIG_FILE).is_file():
            raise ValueError(f"{place}: no {CONFIG_FILE} in this folder; give the workdir of a run")
    runs = [(run, _display(run)) for run in map(read_run, places)]
    own = places[0] / HTML_FILE if len(runs) == 1 else Path(COMPARISON)
    target = own if output is None else location(os.fspath(output))
    _write(target, run_page(*runs[0]) if len(runs) == 1 else comparison_page(runs, _paired(places, runs)))
    return target, [run for run, _ in runs]


def _paired(places: Sequence[Location], runs: Sequence[tuple[RunFiles, Display]]) -> dict[str, tuple[float, float]]:
    """Return the 95% intervals of the differences, second - first, of the first metrics of two fine-tuning runs by
    SPLIT: METRIC, where the predictions of both runs contain the correct answers to the same records."""
    from bert_jax.training.logging.curves import different_scores

    files, found = [run for run, _ in runs], dict[str, tuple[float, float]]()
    if len(files) != 2 or _COMPARE not in registry.names("extensions") or not all(run.results for run in files):
        return {}
    compare = registry.load("extensions", _COMPARE)
    for split, values in files[0].scores().items():
        for name in [name for name in different_scores(values) if "/" not in name][:_PAIRED]:
            with contextlib.suppress(OSError, ValueError):
                difference = compare(places[1], places[0], split, name)
                found[f"{split}: {name}"] = (difference.low, difference.high)
    return found


def _write(target: Location, page: str) -> None:
    """Write the file by a temporary file of this call alone, because a run in progress writes its page too."""
    if isinstance(target, ObjectPath):
        write_whole(target, page)
        return
    folder = target.resolve().parent
    require_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".bert_jax-", dir=folder) as scratch,
        whole_file(target, Path(scratch)) as part,
    ):
        part.write_text(page, encoding="utf-8")


def _display(run: RunFiles) -> Display:
    """Return the display of the objective of ``run``. The file of an objective of the user is not run; its values
    get plain panels."""
    if run.is_finetuning:
        from bert_jax.finetuning.supervision import LABELS_ONLY
        from bert_jax.finetuning.task_objective import task_display

        return task_display(LABELS_ONLY)
    name = run.option("objective.name") or "masked_lm"
    if not run.option("objective.module") and (
        registry.is_of_trunk("objectives", name) or name in registry.names("objectives")
    ):
        display: Display = registry.load("objectives", name).display
        return display
    keys = [key for key in run.last("eval") if key not in ("step", "split", "loss", "targets", "padding_fraction")]
    return Display(panels=tuple(Panel(key.replace("_", " "), key) for key in keys))


def report_command(arguments: argparse.Namespace) -> None:
    """Write a page about a run: its scores, curves, samples and options. The run may be in progress or stopped; the
    page states the status of the run and the age of the last line in its log. If several runs are given, one page
    compares them and draws their curves in shared charts."""
    from bert_jax.training.logging.report import progress_line

    target, runs = _report(arguments.workdirs, arguments.output)
    for run in runs:
        if run.state != "complete":
            print(progress_line(run), file=sys.stderr)
    print(target)


COMMANDS = (
    Command("report", "write a page about a run, or a comparison of several runs", report_command, (
        option("workdirs", nargs="+", metavar="WORKDIR", help="workdir of a run (a folder or a URL)"),
        option(
            "--output", metavar="FILE",
            help=f"HTML file to write (default: {HTML_FILE} in the workdir; for several runs, {COMPARISON} in the "
            "current folder)",
        ),
    ), group="export and inspect", example="runs/quickstart"),
)  # fmt: skip
